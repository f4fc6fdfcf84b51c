"""What the guide of an answer lets a model write: calls as its template writes them, and no others.

A template's own words must pass, token by token, or a model would be pushed off what it learnt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from langchain_swarmkv.engine.guide import GuideCompiler, GuideMatcher
from langchain_swarmkv.errors import GrammarError
from langchain_swarmkv.prompts.call import Call
from langchain_swarmkv.prompts.encoder import Ask, Thinking
from langchain_swarmkv.prompts.guides import MAX_PARALLEL_CALLS
from tests.unit_tests.prompts.answer_cases import calls_of, invalid_of, joined, text_of
from tests.unit_tests.prompts.call_templates import CONTROLS, FORMATS, Model, model
from tests.unit_tests.prompts.vocabularies import MarkedTokenizer


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*required]}
    return {
        "type": "function",
        "function": {"name": name, "description": "Find.", "parameters": parameters},
    }


TOOLS = [
    tool("search", {"query": {"type": "string"}, "limit": {"type": "integer"}}, ["query"]),
    tool("weather", {}),
]
SEARCH = {"name": "search", "args": {"query": 'a "b" \\ {歪}', "limit": 3}, "id": "abcDEF123"}
WEATHER = {"name": "weather", "args": {}, "id": "abcDEF456"}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
OBJECT = '{"a": 1}'
HI = HumanMessage("Hi")


class Writer:
    """One model under the guide of one call."""

    def __init__(self, talker: Model, **options: Any) -> None:
        self.tokenizer = talker.tokenizer
        self.call = Call.read({"tools": TOOLS, **options})
        prompt = talker.encoder.prompt([HI], self.call.ask(keep_reasoning=False))
        self.thinking = prompt.thinking
        self._guide = self.call.guide(talker.encoder.answers, prompt.thinking)

    def start(self) -> GuideMatcher:
        assert self._guide is not None
        return compiler(self.tokenizer).matcher(self._guide)

    def may_write(self, *pieces: str | list[int]) -> bool:
        """Whether an answer may be these texts and tokens, and end there."""
        at = self.start()
        try:
            for piece in pieces:
                for token_id in self.tokenizer.ids(piece) if isinstance(piece, str) else piece:
                    at.accept(token_id)
            return bool(at.allowed()[self.tokenizer.eos_id])
        except GrammarError:
            return False


@cache
def compiler(tokenizer: MarkedTokenizer) -> GuideCompiler:
    return GuideCompiler(tokenizer)


@cache
def talker_of(name: str, controls: tuple[str, ...] = CONTROLS, **variables: object) -> Model:
    return model(name, controls=controls, **variables)


def as_written(talker: Model, *calls: dict[str, Any]) -> list[int]:
    """The ids that the template itself writes for these calls of an earlier answer."""
    results = [ToolMessage("x", tool_call_id=call["id"], name=call["name"]) for call in calls]
    turns = [[HI, AIMessage("", tool_calls=[*calls]), *results], [HI, AIMessage("no calls"), HI]]
    one, other = (talker.encoder.prompt(talk, Ask(TOOLS)).ids for talk in turns)
    start = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    end = next(i for i in range(start, len(one)) if talker.tokenizer.is_end(one[i]))
    written = one[start:end]
    while written[-1] == ord("\n"):
        written.pop()
    return written


def changed(ids: list[int], old: str, new: str) -> list[int]:
    """The ids with one text in place of another; it must be there."""
    before, after = list(old.encode()), list(new.encode())
    place = next(i for i in range(len(ids)) if ids[i : i + len(before)] == before)
    return [*ids[:place], *after, *ids[place + len(before) :]]


CHOICES: list[dict[str, Any]] = [
    {},
    {"tool_choice": "any"},
    {"tool_choice": "search"},
    {"response_format": SCHEMA},
    {"tool_choice": "any", "response_format": SCHEMA},
]
# Those that write as others do are left out.
NAMES = [name for name in FORMATS if name not in ("granite-4.0", "qwen2.5", "qwq")]
MANY = [name for name in NAMES if FORMATS[name].separator is not None]
VOCABULARIES = [CONTROLS, ()]


@pytest.mark.parametrize("controls", VOCABULARIES, ids=["control tokens", "text"])
@pytest.mark.parametrize("options", CHOICES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_written_as_the_template_writes_it(
    name: str, options: dict[str, Any], controls: tuple[str, ...]
) -> None:
    """Whether its markup is control tokens or text; and nothing but a call is taken for one."""
    talker = talker_of(name, controls)
    writer = Writer(talker, **options)
    call = as_written(talker, SEARCH)
    assert writer.may_write(call)
    assert writer.may_write(changed(call, ', "limit": 3', ""))
    wrong = [
        changed(call, "search", "serach"),
        changed(call, "search", "search2"),
        changed(call, '"limit": 3', '"limit": "3"'),
        changed(call, '"limit": 3', '"limits": 3'),
        changed(call, '"limit": 3', '"limit": 3, "more": 1'),
        changed(call, '"limit": 3', '"limit":3'),
        changed(call, '"query": ', '"limit": '),
        [*call, *b"and so on"],
        [*call, *b"\n\n"],
        call[:-1],
    ]
    assert [writer.may_write(ids) for ids in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("options", CHOICES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_several_calls_are_written_only_where_they_are_wanted(
    name: str, options: dict[str, Any]
) -> None:
    """By a model that knows how, where it need not call at all or the caller wants several."""
    talker = talker_of(name)
    call = as_written(talker, SEARCH)
    other = as_written(talker, WEATHER)
    is_named = options.get("tool_choice") == "search"
    assert Writer(talker, **options).may_write(other) is not is_named
    one = Writer(talker, parallel_tool_calls=False, **options)
    assert one.may_write(call)
    if name in MANY:
        both = as_written(talker, SEARCH, WEATHER)
        must_call = "tool_choice" in options
        assert Writer(talker, **options).may_write(both) is not must_call
        several = Writer(talker, parallel_tool_calls=True, **options)
        assert several.may_write(both) is not is_named
        assert not one.may_write(both)
    else:
        assert not Writer(talker, **options).may_write(call, other)


@pytest.mark.parametrize("name", MANY)
def test_a_model_cannot_call_for_ever(name: str) -> None:
    """Small models would repeat a call up to the limit of tokens."""
    talker = talker_of(name)
    writer = Writer(talker)
    assert writer.may_write(as_written(talker, *[WEATHER] * MAX_PARALLEL_CALLS))
    assert not writer.may_write(as_written(talker, *[WEATHER] * (MAX_PARALLEL_CALLS + 1)))


@pytest.mark.parametrize("controls", VOCABULARIES, ids=["control tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_free_text_is_any_text(name: str, controls: tuple[str, ...]) -> None:
    """Empty, JSON, in any script, and with beginnings of markup; a call may follow it."""
    talker = talker_of(name, controls)
    writer = Writer(talker)
    texts = ["", "Hi.", "<tool_", "a <tool_call and [TOOL_CALL <|calls|", '{"a": [1]}', "歪\n\x00 "]
    assert [writer.may_write(text) for text in texts] == [True] * len(texts)
    call = as_written(talker, SEARCH)
    bare = not FORMATS[name].has_markup
    assert [writer.may_write(text, call) for text in texts if text] == [True] * (len(texts) - 1)
    spoiled = changed(call, "search", "serach")
    assert [writer.may_write(text, spoiled) for text in texts if text] == [bare] * (len(texts) - 1)


def test_bare_json_that_looks_like_a_call_must_be_one() -> None:
    """However it is spaced: the parser would take it for a call."""
    writer = Writer(talker_of("like-llama-3"))
    assert writer.may_write('{"names": "a"}')
    assert writer.may_write('{"a": 1, "name": "b"}')
    for text in (
        '{"name": "a"}',
        '{"name":"a"}',
        ' {"name": "a"}',
        '{ "name" :\n"a"}',
        '{"name":"',
    ):
        assert not writer.may_write(text), text


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_held_is_a_call_or_the_object(name: str) -> None:
    """No free text where a call is required, and none beside a schema."""
    talker = talker_of(name)
    for options in CHOICES[1:]:
        writer = Writer(talker, **options)
        may_be_object = "tool_choice" not in options
        assert writer.may_write(OBJECT) is may_be_object
        wrong = ["", "Hi.", '{"a": "1"}', '{"a": 1, "b": 2}', "Hi. " + OBJECT, OBJECT + "."]
        assert not any(writer.may_write(text) for text in wrong)
        assert not writer.may_write("Hi.", as_written(talker, SEARCH))
    only_object = Writer(talker, tool_choice="none", response_format=SCHEMA)
    assert only_object.may_write(OBJECT)
    assert not only_object.may_write(as_written(talker, SEARCH))


THINKING: list[tuple[str, dict[str, object], Thinking]] = [
    ("qwen3", {}, Thinking.FREE),
    ("qwen3", {"enable_thinking": False}, Thinking.OFF),
    ("qwq", {"enable_thinking": True}, Thinking.BEGUN),
    ("qwq", {"enable_thinking": False}, Thinking.OFF),
]
TAGS = [CONTROLS, (*CONTROLS, "<think>", "</think>")]


@pytest.mark.parametrize("controls", TAGS, ids=["text", "control tokens"])
@pytest.mark.parametrize("options", CHOICES, ids=str)
@pytest.mark.parametrize(("name", "variables", "expected"), THINKING)
def test_thoughts_come_first_and_are_free(
    name: str,
    variables: dict[str, object],
    expected: Thinking,
    options: dict[str, Any],
    controls: tuple[str, ...],
) -> None:
    """They may speak of calls and objects; what follows them is held as if there were none."""
    talker = talker_of(name, controls, **variables)
    writer = Writer(talker, **options)
    assert writer.thinking is expected
    call = as_written(talker, SEARCH)
    thought = f"\nI could <tool_call> or write {OBJECT}.\n</think>"
    thought = thought if expected is Thinking.BEGUN else f"<think>{thought}"
    is_free = not options
    for blank in ("", "\n", "\n\n"):
        assert writer.may_write(thought, blank, call) is (expected is not Thinking.OFF)
        assert not writer.may_write(thought, blank, changed(call, "search", "serach"))
    assert writer.may_write(call) is (expected is not Thinking.BEGUN)
    if expected is not Thinking.OFF:
        assert writer.may_write(thought, "\n\nHi.") is is_free
        may_be_object = is_free or "tool_choice" not in options
        assert writer.may_write(thought, "\n\n", OBJECT) is may_be_object
        assert not writer.may_write(thought.removesuffix("</think>"), call)


def test_nothing_holds_an_answer_without_calls_or_schema() -> None:
    """No tools, none to call, tools bound with strict=False, and a format that is text."""
    talker = talker_of("qwen3")
    loose = [{**t, "function": {**t["function"], "strict": False}} for t in TOOLS]
    for options in (
        {"tools": []},
        {"tool_choice": "none"},
        {"tools": loose},
        {"tools": loose, "tool_choice": "any"},
        {"tools": [], "response_format": {"type": "text"}},
    ):
        call = Call.read({"tools": TOOLS, **options})
        assert call.guide(talker.encoder.answers, Thinking.FREE) is None


def random_answer(writer: Writer, draw: random.Random) -> list[int] | None:
    """Tokens that the guide allows up to an end, markup and closing ones liked; None: no end."""
    tokenizer, at, ids = writer.tokenizer, writer.start(), list[int]()
    liked = {*range(256, tokenizer.n_vocab), *b'"}<'}
    for _ in range(300):
        allowed = at.allowed().nonzero()[0].tolist()
        printable = [i for i in allowed if 32 <= i < 127 or i in liked]
        wanted = [i for i in allowed if i in liked] if draw.random() < 0.4 else printable
        token_id = draw.choice(wanted or allowed)
        if tokenizer.is_end(token_id):
            return ids
        at.accept(token_id)
        ids.append(token_id)
    return None


@pytest.mark.parametrize("controls", VOCABULARIES, ids=["control tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_guide_lets_through_is_read_as_a_call(
    name: str, controls: tuple[str, ...]
) -> None:
    """The parser finds valid calls of known tools in any answer that is held, and nothing else."""
    draw, talker = random.Random(name), talker_of(name, controls)
    style = talker.encoder.answers
    num_read = 0
    for options in ({}, {"tool_choice": "any"}, {"response_format": SCHEMA}):
        writer = Writer(talker, **options)
        for _ in range(8):
            ids = random_answer(writer, draw)
            if ids is None:
                continue
            num_read += 1
            parser = writer.call.parser(style, writer.thinking)
            text = talker.tokenizer.spelled(ids, style.marks.by_token)
            parts = joined([*parser.push(text), *parser.finish()])
            calls = calls_of(parts)
            assert invalid_of(parts) == []
            assert {called for called, _ in calls} <= {"search", "weather"}
            assert all("query" in made for called, made in calls if called == "search")
            if options:
                assert bool(calls) is not bool(text_of(parts).strip())
                assert calls or "tool_choice" not in options
    assert num_read > 8
