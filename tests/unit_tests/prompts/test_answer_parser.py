"""Text, thoughts and calls are told apart as they arrive, wherever the text is cut."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_swarmkv.prompts.answer_parser import new_call_id
from langchain_swarmkv.prompts.answer_parts import (
    ENDED_INSIDE_CALL,
    CallArguments,
    CallEnd,
    CallStart,
    InvalidCall,
    ReasoningPart,
    TextPart,
)
from langchain_swarmkv.prompts.call_format import CallFormat, ReasoningTags
from tests.unit_tests.prompts.answer_cases import (
    ARGUMENTS,
    ARGUMENTS_CASES,
    COHERE,
    DEEPSEEK,
    FORMATS,
    HERMES,
    ID,
    LLAMA,
    MISTRAL,
    NAME,
    NEMO,
    OTHER,
    THINK,
    TOOL_CALLS,
    calls_of,
    invalid_of,
    joined,
    parse,
    parser,
    text_of,
    written,
)

formats = pytest.mark.parametrize("calls", FORMATS.values(), ids=FORMATS.keys())
lists = pytest.mark.parametrize("calls", [HERMES, NEMO, MISTRAL, DEEPSEEK, COHERE])
TWO = [("first", {"a": [1, {"b": "}"}]}), ("second", {"c": 'x"y'})]


# Calls.


@formats
@pytest.mark.parametrize("arguments", ARGUMENTS_CASES)
def test_a_call_is_found_with_its_arguments_as_written(
    calls: CallFormat, arguments: dict[str, object]
) -> None:
    """Nested braces, quotes, escapes, markup in strings, unicode: nothing ends the call early."""
    text = json.dumps(arguments, ensure_ascii=False)
    parts = parse([written(calls, [("get", arguments)])], calls)
    call_id = "own0" if calls is COHERE else "new0"
    assert parts == [CallStart(0, call_id, "get"), CallArguments(0, text), CallEnd(0)]


@lists
def test_two_calls_are_two(calls: CallFormat) -> None:
    parts = parse([written(calls, TWO)], calls)
    assert calls_of(parts) == TWO
    assert [part.index for part in parts if isinstance(part, CallEnd)] == [0, 1]
    starts = [part for part in parts if isinstance(part, CallStart)]
    assert len({start.call_id for start in starts}) == 2
    assert text_of(parts) == ""


@lists
def test_two_calls_cut_anywhere_are_the_same_two(calls: CallFormat) -> None:
    """F2: each cut into two pieces, and all cuts at once."""
    text = f"Let me see.\n{written(calls, TWO)}\nDone."
    whole = parse([text], calls)
    assert calls_of(whole) == TWO
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]], calls) == whole
    assert parse(text, calls) == whole


@lists
def test_an_answer_cut_anywhere_shows_no_markup_and_loses_no_call(calls: CallFormat) -> None:
    """F6: what is cut is never shown as text, and never passed off as a call."""
    text = written(calls, TWO)
    for length in range(len(text)):
        parts = parse([text[:length]], calls)
        valid, invalid = calls_of(parts), invalid_of(parts)
        assert valid == TWO[: len(valid)]
        assert all(call.error == ENDED_INSIDE_CALL for call in invalid)
        # Of a cut trigger nobody can tell that it was to be one, but for control tokens.
        assert not text_of(parts) or calls in (HERMES, COHERE)
        assert not text_of(parts) or calls.trigger.startswith(text_of(parts).strip())
        assert len(valid) + len(invalid) <= 2


@pytest.mark.parametrize(
    "cut",
    ['{"a": "some te', '{"a": [1,', '{"a": {"b": 1}', '{"a": 1', '{"a": "x\\', "{", '{"a": nul'],
)
@formats
def test_arguments_cut_by_the_limit_are_an_invalid_call(calls: CallFormat, cut: str) -> None:
    """F6: in a string, after a comma, before the last brace: never a call with less arguments."""
    text = written(calls, [("get", {})])
    text = text[: text.index("{}")] + cut
    parts = parse([text], calls)
    start, arguments, invalid = parts
    assert isinstance(start, CallStart)
    assert arguments == CallArguments(0, cut)
    assert isinstance(invalid, InvalidCall)
    assert (invalid.index, invalid.call_id, invalid.name) == (0, start.call_id, "get")
    assert invalid.raw == re.sub("[\ud800-\udfff]", "", text).strip()
    assert invalid.error == ENDED_INSIDE_CALL


def test_a_call_whose_closing_markup_is_missing_is_invalid() -> None:
    """The model had not finished: nobody knows what was to come."""
    parts = parse(['<tool_call>\n{"name": "f", "arguments": {}}\n'], HERMES)
    assert parts[-1] == InvalidCall(
        0, "new0", "f", '<tool_call>\n{"name": "f", "arguments": {}}', ENDED_INSIDE_CALL
    )


@formats
def test_white_space_in_markup_does_not_count(calls: CallFormat) -> None:
    """Models write `{"name":"x"` as well as `{"name": "x"`, and newlines where they like.

    Markup that opens a call is spelled exactly, as guides hold no other.
    """
    trigger = calls.trigger if calls.has_markup else ""

    def spaced(text: str, space: str) -> str:
        head, _, rest = text.rpartition(trigger) if trigger else ("", "", text)
        return head + (trigger if trigger in text else "") + space.join("".join(rest.split()))

    for space in ("", " \n"):
        form = calls.map_text(lambda text, space=space: spaced(text, space))
        assert calls_of(parse([written(form, TWO[:1])], calls)) == TWO[:1]


def test_markup_with_white_space_in_it_is_text() -> None:
    """A guide lets it pass as such."""
    text = '<tool _call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse([text], HERMES) == [TextPart(text)]


@pytest.mark.parametrize("value", ["{}", "null", "", '""', '"{}"', '"null"', '" "'])
def test_no_arguments_are_an_empty_object(value: str) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {value}}}\n</tool_call>'
    assert parse([text], HERMES) == [CallStart(0, "new0", "f"), CallArguments(0, "{}"), CallEnd(0)]


def test_arguments_as_a_string_are_decoded() -> None:
    """F3: JSON text inside a JSON string; it is held until it is known to be an object."""
    arguments = {"a": 'x "y" }', "b": ["歪"]}
    text = json.dumps({"name": "f", "arguments": json.dumps(arguments)})
    stream = parser(HERMES)
    begun = joined(stream.push(f"<tool_call>{text[:-2]}"))
    assert begun == [CallStart(0, "new0", "f")]
    rest = [*stream.push(f"{text[-2:]}</tool_call>"), *stream.finish()]
    assert calls_of([*begun, *rest]) == [("f", arguments)]


@pytest.mark.parametrize(
    "value",
    [
        '{"a": }',
        "{'a': 1}",
        '{"a": 1,}',
        '{"a": NaN}',
        '{"a": "line\nbreak"}',
        "[1, 2]",
        '"text"',
        '"[1]"',
        '"{\\"a\\": 1"',
        "[" * 100_000 + "]" * 100_000,
        '{"a": ' * 101 + "1" + "}" * 101,
    ],
)
def test_arguments_that_are_no_json_object_are_an_invalid_call(value: str) -> None:
    """F3: with the raw text, and what follows is not lost with it."""
    bad = f'<tool_call>\n{{"name": "f", "arguments": {value}}}\n</tool_call>'
    parts = parse([f"{bad}\n{written(HERMES, TWO[:1])}"], HERMES)
    (invalid,) = invalid_of(parts)
    assert (invalid.index, invalid.name, invalid.raw) == (0, "f", bad)
    assert invalid.error.startswith("The arguments are no JSON object: ")
    assert calls_of(parts) == TWO[:1]
    assert text_of(parts) == ""


def test_deep_arguments_are_fine_to_a_bound() -> None:
    value = '{"a": ' * 100 + "1" + "}" * 100
    parts = parse([f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>'], HERMES)
    assert parts[-1] == CallEnd(0)


@pytest.mark.parametrize(
    ("calls", "text", "raw"),
    [
        (HERMES, "<tool_call>\nI would call f.", "<tool_call>\nI would call f."),
        (HERMES, '<tool_call>{"nom": "f"}', '<tool_call>{"nom": "f"}'),
        (HERMES, '<tool_call>{"name": "f", "args": {}}', '<tool_call>{"name": "f", "args": {}}'),
        (HERMES, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"'),
        (HERMES, "<tool_call>", "<tool_call>"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {]}}', None),
        (DEEPSEEK, f"{DEEPSEEK.opening}I think", "I think"),
        (NEMO, f"{TOOL_CALLS}get_weather(Bern)", "get_weather(Bern)"),
        (MISTRAL, f"{TOOL_CALLS}get{{}}", "get{}"),
        (MISTRAL, written(MISTRAL, [("get", {})])[:-2] + "Bern", "getBern"),
    ],
)
def test_markup_without_a_call_is_an_invalid_call(
    calls: CallFormat, text: str, raw: str | None
) -> None:
    """F3: never lost, never shown as text."""
    parts = parse([f"Well. {text}"], calls)
    assert text_of(parts) == "Well."
    (invalid,) = invalid_of(parts)
    assert invalid.raw == (raw or text)
    assert invalid.error
    assert calls_of(parts) == []


@pytest.mark.parametrize("calls", [HERMES, MISTRAL, DEEPSEEK])
def test_the_next_trigger_ends_a_broken_call(calls: CallFormat) -> None:
    trigger = calls.trigger
    parts = parse([f"{trigger}?? {written(calls, TWO[:1])}"], calls)
    (invalid,) = invalid_of(parts)
    assert (invalid.index, invalid.name) == (0, None)
    assert invalid.raw.endswith("??")
    assert calls_of(parts) == TWO[:1]
    assert [part.index for part in parts if isinstance(part, CallEnd)] == [1]


def test_a_bracket_too_few_does_not_swallow_the_next_call() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": {"b": "<"}}\n</tool_call>'
    parts = parse([f"{broken}\n{written(HERMES, TWO)}"], HERMES)
    assert [call.raw for call in invalid_of(parts)] == [broken]
    assert calls_of(parts) == TWO


def test_a_control_token_that_opens_a_call_ends_one_inside_its_arguments() -> None:
    """No string can hold it, unlike the text of a tag."""
    first = written(MISTRAL, [("f", {"a": 1})])[:-1]
    parts = parse([first + written(MISTRAL, TWO[:1])], MISTRAL)
    assert invalid_of(parts)[0].raw == 'f{"a": 1'
    assert calls_of(parts) == TWO[:1]


def test_a_broken_call_of_a_list_leaves_the_others() -> None:
    text = written(NEMO, TWO).replace("second", 'se", "x": "').removesuffix("]")
    parts = parse([text], NEMO)
    assert calls_of(parts) == TWO[:1]
    (invalid,) = invalid_of(parts)
    assert invalid.raw.startswith('{"name": "se"')


def test_an_unknown_tool_is_an_ordinary_call() -> None:
    """F3: its name stays visible; the parser knows no tools."""
    assert calls_of(parse([written(HERMES, [("no such", {})])], HERMES)) == [("no such", {})]


@pytest.mark.parametrize("rest", ['"}]', '", "type": {"a": "}"}}]', '"}'])
def test_an_id_after_the_arguments_comes_too_late(rest: str) -> None:
    """A call's id is known when the call begins; Mistral's models may leave theirs away, too."""
    text = f'{TOOL_CALLS} [{{"name": "f", "arguments": {{}}, "id": "abc{rest}'
    assert parse([text], NEMO) == [CallStart(0, "new0", "f"), CallArguments(0, "{}"), CallEnd(0)]


def test_a_late_id_may_be_missing() -> None:
    first, second = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {"a": 1}}'
    parts = parse([f"{TOOL_CALLS}[{first}, {second}]"], NEMO)
    assert calls_of(parts) == [("f", {}), ("g", {"a": 1})]
    assert text_of(parts) == ""


def test_a_late_id_may_stand_outside_the_object_of_the_arguments() -> None:
    head = '<call>{"function": {"name": "'
    calls = CallFormat(
        opening="",
        call=(head, NAME, '", "arguments": ', ARGUMENTS, '}, "id": "', ID, '"}</call>'),
        separator="\n",
        closing="",
    )
    parts = parse([written(calls, TWO)], calls)
    assert calls_of(parts) == TWO
    assert not invalid_of(parts)


def test_new_ids_differ() -> None:
    assert new_call_id() != new_call_id()


# Calls without markup.


def test_json_that_is_no_call_is_text() -> None:
    """A model that answers in JSON: nothing of it is lost, also where it begins as a call does."""
    for text in ['{"nam": 1}', '{"name": "John", "age": 3}\n', '{"name": "John"}', ' {"a": 1}']:
        assert parse([text], LLAMA) == [TextPart(text)]
        assert parse(text, LLAMA) == [TextPart(text)]


def test_without_markup_only_the_beginning_can_be_a_call() -> None:
    call = written(LLAMA, TWO[:1])
    assert parse([f"Hm. {call}"], LLAMA) == [TextPart(f"Hm. {call}")]
    parts = parse([f"\n<think>x</think>\n {call} and"], LLAMA)
    assert calls_of(parts) == TWO[:1]
    assert text_of(parts) == "and"


def test_without_a_separator_one_call_is_all() -> None:
    """The format says that the model makes one call at a time."""
    first, second = (written(LLAMA, [call]) for call in TWO)
    parts = parse([f"{first}\n{second}"], LLAMA)
    assert calls_of(parts) == TWO[:1]
    assert text_of(parts) == second


def test_a_list_without_markup() -> None:
    calls = dataclasses.replace(LLAMA, opening="[", separator=", ", closing="]")
    assert calls_of(parse([written(calls, TWO)], calls)) == TWO
    broken = written(calls, TWO).replace("second", 'x", "')
    parts = parse([broken], calls)
    assert calls_of(parts) == TWO[:1]
    assert len(invalid_of(parts)) == 1
    assert text_of(parts) == ""


def test_a_name_may_stand_right_before_its_arguments() -> None:
    calls = CallFormat(opening="", call=(">>>", NAME, "\n", ARGUMENTS), separator="", closing="")
    assert calls_of(parse([written(calls, TWO)], calls)) == TWO


# Text.


@formats
def test_plain_text_is_released_as_it_comes(calls: CallFormat) -> None:
    """Only white space waits, and what may be the beginning of a trigger."""
    text = "A plain answer, of 2 < 3 lines\nand {some} [marks]. "
    stream = parser(calls)
    released = ""
    for at, char in enumerate(text, start=1):
        released += text_of(stream.push(char))
        assert len(released) >= len(text[:at].rstrip("<{[A \n"))
    assert released + text_of(stream.finish()) == text


def test_without_calls_white_space_does_not_wait() -> None:
    stream = parser(None)
    assert [text_of(stream.push(char)) for char in "a \nb"] == ["a", " ", "\n", "b"]


@lists
def test_text_around_calls_is_shown_without_the_white_space_between(calls: CallFormat) -> None:
    call = written(calls, TWO[:1])
    assert text_of(parse([f"  Hm.\n\n{call}"], calls)) == "  Hm."
    assert text_of(parse([f"\n{call}\n\nOk. \n"], calls)) == "Ok. \n"
    assert text_of(parse([f"Hm. {call}Ok."], calls)) == "Hm.\nOk."


@lists
def test_calls_may_follow_text_that_follows_calls(calls: CallFormat) -> None:
    parts = parse([f"{written(calls, TWO[:1])} and {written(calls, TWO[1:])}"], calls)
    assert calls_of(parts) == TWO
    assert [part.index for part in parts if isinstance(part, CallEnd)] == [0, 1]
    assert text_of(parts) == "and"


def test_the_beginning_of_a_trigger_is_text_if_the_answer_ends() -> None:
    assert parse(["a <tool_"], HERMES) == [TextPart("a <tool_")]
    assert text_of(parse("a <<tool_<tool_call", HERMES)) == "a <<tool_<tool_call"


@pytest.mark.parametrize("calls", [None, *FORMATS.values()])
def test_a_control_token_that_means_nothing_is_dropped(calls: CallFormat | None) -> None:
    """In text, thoughts, names, arguments and between them."""
    text = f"{OTHER}<think>a{OTHER}b{OTHER}</think>{OTHER}c{OTHER}d{OTHER}"
    assert parse([text], calls) == [ReasoningPart("ab"), TextPart("cd")]
    if calls is not None:
        call = written(calls, TWO[:1])
        spoilt = OTHER.join(call)
        assert calls_of(parse([spoilt], calls)) == TWO[:1] or calls.trigger not in spoilt


# Thoughts.


@pytest.mark.parametrize("text", ["<think>\na b\n</think>\n\nc", " \n<think> a b</think>c"])
def test_thoughts_come_before_the_answer(text: str) -> None:
    assert parse([text], HERMES) == [ReasoningPart("a b"), TextPart("c")]
    assert parse(text, None) == [ReasoningPart("a b"), TextPart("c")]


def test_a_prompt_may_have_opened_the_thoughts() -> None:
    for text in ("\na b\n</think>\n\nc", "<think>a b</think>c"):
        parts = parse([text], HERMES, starts_in_reasoning=True)
        assert parts == [ReasoningPart("a b"), TextPart("c")]


def test_thoughts_without_an_end_are_all_thoughts() -> None:
    text = f"<think>I could {written(HERMES, TWO)} </thi"
    assert parse([text], HERMES) == [ReasoningPart(text.removeprefix("<think>"))]


@pytest.mark.parametrize("text", ["<think></think>", "<think>\n\n</think>\n\n"])
def test_no_thoughts_are_none(text: str) -> None:
    assert parse([text], None) == []
    assert parse([f"{text}a"], None) == [TextPart("a")]


def test_later_tags_are_text() -> None:
    for text in ("a <think>b</think>", "a</think> b", "<thin", "<thinking> a"):
        assert parse([text], HERMES) == [TextPart(text)]
    assert parse(["<think>a</think>b</think>"], None) == [
        ReasoningPart("a"),
        TextPart("b</think>"),
    ]


def test_tags_may_be_control_tokens() -> None:
    tags = ReasoningTags(chr(0xD900), chr(0xD901))
    text = f"{tags.opening}\na </think>\n{tags.closing}\n\nb{tags.closing}c"
    assert parse([text], None, reasoning=tags) == [ReasoningPart("a </think>"), TextPart("bc")]


def test_without_tags_all_is_text() -> None:
    text = "<think>a</think> b"
    assert parse([text], None, reasoning=None) == [TextPart(text)]


@formats
def test_calls_come_after_thoughts(calls: CallFormat) -> None:
    parts = parse([f"<think>I call it.</think>\n\n{written(calls, TWO[:1])}"], calls)
    assert parts[0] == ReasoningPart("I call it.")
    assert calls_of(parts) == TWO[:1]
    assert text_of(parts) == ""


# All of it.


def test_interleaved_answers_do_not_mix() -> None:
    """F2: three branches, a character each in turn."""
    cases = [
        (HERMES, f"One. {written(HERMES, TWO)}"),
        (NEMO, written(NEMO, TWO[1:])),
        (LLAMA, f"<think>x</think>{written(LLAMA, TWO[:1])}"),
    ]
    streams = [parser(calls) for calls, _ in cases]
    received: list[list] = [[] for _ in cases]
    for at in range(max(len(text) for _, text in cases)):
        for stream, (_, text), parts in zip(streams, cases, received, strict=True):
            parts += stream.push(text[at : at + 1])
    for stream, (calls, text), parts in zip(streams, cases, received, strict=True):
        assert joined([*parts, *stream.finish()]) == parse([text], calls)


def fragments(calls: CallFormat) -> st.SearchStrategy[str]:
    """Answers of bits of markup, JSON, white space, control tokens and whole calls."""
    bits = [
        *(text for part in (calls.opening, *calls.call, calls.closing) for text in [part]),
        *("f", "{}", '{"a": "}"}', '"{}"', "null", "{", '"', "}", "]", ",", " ", "\n", "text"),
        *(THINK.opening, THINK.closing, OTHER, written(calls, TWO), written(calls, TWO[:1])),
    ]
    texts = [bit for bit in bits if isinstance(bit, str)]
    bit = st.sampled_from(texts) | st.sampled_from(texts).map(lambda text: text[: len(text) // 2])
    return st.lists(bit, max_size=12).map("".join)


@settings(deadline=None)
@given(st.data())
def test_what_is_found_does_not_depend_on_the_cuts(data: st.DataObject) -> None:
    """And no control token is ever shown."""
    calls = data.draw(st.sampled_from(list(FORMATS.values())))
    text = data.draw(fragments(calls))
    starts_in_reasoning = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text], calls, starts_in_reasoning=starts_in_reasoning)
    assert parse(pieces, calls, starts_in_reasoning=starts_in_reasoning) == whole
    assert parse(text, calls, starts_in_reasoning=starts_in_reasoning) == whole
    for part in whole:
        "".join(str(value) for value in dataclasses.astuple(part)).encode()


@pytest.mark.parametrize(
    "text",
    [
        " " * 100_000,
        "< " * 100_000,
        "<tool_call" * 10_000,
        "<tool_call>" * 10_000,
        "<think>" + " " * 100_000 + "</" * 50_000,
        '<tool_call>{"name": "f", "arguments": ' + '{"a":[' * 10_000,
        '<tool_call>{"name": "f", "arguments": "' + "\\" * 100_000,
        '<tool_call>{"name": "' + "f" * 100_000,
        '<tool_call>{"name": "f", "arguments": {}' + " " * 100_000 + "?",
    ],
    ids=lambda text: text[:12] + text[-2:],
)
def test_long_answers_take_time_in_proportion(text: str) -> None:
    """Cut into characters; a parser that looks back over the text would not end in time."""
    assert parse(text, HERMES)
