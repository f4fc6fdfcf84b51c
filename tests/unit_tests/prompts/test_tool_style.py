"""How templates write calls is found out, and conversations are told in that way, or in plain text.

A prompt must stay the beginning of the next one, or nothing of a conversation would be cached.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_swarmkv.prompts.call_format import ReasoningTags
from langchain_swarmkv.prompts.call_turns import (
    DEFAULT_FORMAT,
    native_calls,
    plain_calls,
    plain_tools,
)
from langchain_swarmkv.prompts.encoder import Ask
from langchain_swarmkv.prompts.messages import template_messages
from langchain_swarmkv.prompts.tool_style import NativeCalls, find_native_calls
from tests.unit_tests.prompts.answer_cases import calls_of, parse, text_of
from tests.unit_tests.prompts.call_templates import ENDS, FORMATS, TEMPLATES, model, renderer

THINK = ReasoningTags("<think>", "</think>")
AS_TEXT = {"like-deepseek"}
LONG_ID = "call_0123456789abcdef"
CALLS: list[dict[str, Any]] = [
    {"name": "search", "args": {"query": "seals", "deep": {"a": [1, None]}}, "id": LONG_ID},
    {"name": "weather", "args": {}, "id": "abcDEF123"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Find.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
    for name in ("search", "weather")
]


def found(name: str) -> NativeCalls | None:
    tags = THINK if "<think>" in TEMPLATES[name] else None
    return find_native_calls(renderer(name), ENDS, tags)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_each_template_is_found(name: str) -> None:
    """None: it does not tell of tools, or its calls are XML, numbered, or split in channels."""
    native = found(name)
    if name not in FORMATS:
        assert native is None
        return
    assert native == NativeCalls(FORMATS[name], arguments_as_text=name in AS_TEXT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
        "{{ messages }}{{ tools }}",
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ tools }}",
    ],
)
def test_a_template_that_shows_no_calls_has_no_format(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails, one whose text is no conversation, and one that leaves calls out."""
    monkeypatch.setitem(TEMPLATES, "odd", source)
    assert found("odd") is None


def test_numbered_calls_are_no_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs from call to call can be written by no fixed pieces of text."""
    numbered = TEMPLATES["like-deepseek"].replace("'<|sep|>'", "':' ~ loop.index ~ '<|sep|>'")
    assert "loop.index" in numbered
    monkeypatch.setitem(TEMPLATES, "numbered", numbered)
    assert found("numbered") is None


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read_as_it_was_written(name: str) -> None:
    """By the template from messages, and by the parser in the format that was found."""
    native = found(name)
    assert native is not None
    calls = CALLS if native.format.separator is not None else CALLS[:1]
    user = {"role": "user", "content": "Hi"}
    turns = native_calls([user, *template_messages([AIMessage("", tool_calls=calls)])], native)
    render = renderer(name)
    question = render([user], TOOLS).partition("<think>")[0]
    written = render(turns, TOOLS).removeprefix(question)
    answer = written[: min(at for end in ENDS if (at := written.find(end)) >= 0)]
    parts = parse(answer, native.format)
    assert calls_of(parts) == [(call["name"], call["args"]) for call in calls]
    assert text_of(parts).strip() == ""


@pytest.mark.parametrize("name", FORMATS)
def test_ids_are_shortened_where_the_template_shows_them(name: str) -> None:
    """To nine letters and digits, the same in a call and its result; others stay as they are."""
    native = found(name)
    assert native is not None
    turns = native_calls(
        template_messages(
            [
                AIMessage("", tool_calls=CALLS),
                ToolMessage("one", tool_call_id=LONG_ID),
                ToolMessage("two", tool_call_id="abcDEF123"),
            ]
        ),
        native,
    )
    first, second = (call["id"] for call in turns[0]["tool_calls"])
    assert [turn["tool_call_id"] for turn in turns[1:]] == [first, second]
    assert second == "abcDEF123"
    if name.startswith("mistral"):
        assert first != second
        assert len(first) == 9
        assert first.isalnum()
    else:
        assert first == LONG_ID


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_text_only_where_the_template_wants_it(name: str) -> None:
    """A mapping for those that write JSON themselves."""
    native = found(name)
    assert native is not None
    [turn] = native_calls(template_messages([AIMessage("", tool_calls=CALLS[:1])]), native)
    given = turn["tool_calls"][0]["function"]["arguments"]
    assert (json.loads(given) if name in AS_TEXT else given) == CALLS[0]["args"]


def test_plain_calls_are_read_as_they_were_written() -> None:
    """Text, calls and results as turns that every template takes."""
    messages = [
        HumanMessage("Hi"),
        AIMessage("Let me see.", tool_calls=CALLS),
        ToolMessage("one", tool_call_id=LONG_ID),
        ToolMessage("two", tool_call_id="abcDEF123"),
        AIMessage("Done."),
        HumanMessage("Thanks"),
    ]
    plain = plain_calls(template_messages(messages))
    assert [turn["role"] for turn in plain] == ["user", "assistant", "user", "assistant", "user"]
    assert not any("tool_calls" in turn for turn in plain)
    assert plain[2]["content"] == (
        "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    )
    parts = parse(plain[1]["content"], DEFAULT_FORMAT)
    assert text_of(parts) == "Let me see."
    assert calls_of(parts) == [(call["name"], call["args"]) for call in CALLS]


def test_odd_names_and_values_survive_in_plain_calls() -> None:
    """Quotes, markup and any script."""
    call = {"name": 'a"b\\c 歪', "args": {"x</tool_call>": '"}\n歪'}, "id": "1"}
    [turn] = plain_calls(template_messages([AIMessage("", tool_calls=[call])]))
    assert json.loads(turn["content"][len("<tool_call>") : -len("</tool_call>")]) == {
        "name": call["name"],
        "arguments": call["args"],
    }


def test_plain_tools_tell_each_tool_in_a_line() -> None:
    """All that a model must know of it, and how to call it; not how strictly it is held to it."""
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    told = plain_tools(tools)
    lines = [json.loads(line) for line in told.splitlines() if line.startswith('{"name": "sea')]
    assert lines == [TOOLS[0]["function"]]
    example = told[told.index("<tool_call>") :]
    assert calls_of(parse(example, DEFAULT_FORMAT)) == [("function_name", {"parameter": "value"})]


TALK: list[BaseMessage] = [
    SystemMessage("Be brief."),
    HumanMessage("Hi"),
    AIMessage("", tool_calls=[{**CALLS[0], "id": "abcDEF123"}]),
    ToolMessage("seals", tool_call_id="abcDEF123", name="search"),
    AIMessage("A page."),
    HumanMessage("Thanks"),
    AIMessage("Welcome."),
    HumanMessage("More"),
]
# They put tools, or a system text, into the last user turn.
MOVING = {"mistral-nemo", "mistral-small-3.2"}


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", sorted({*TEMPLATES} - MOVING))
def test_a_prompt_is_the_beginning_of_the_next_one(name: str, tools: list[dict[str, Any]]) -> None:
    """But for thoughts that it opens: what was cached of a conversation stays of use."""
    talker, ask = model(name), Ask(tools)
    for size in (2, 4, 6):
        before = talker.encoder.prompt(TALK[:size], ask).ids
        after = talker.encoder.prompt(TALK[: size + 2], ask).ids
        thoughts = talker.tokenizer.ids("<think>\n</think>")
        if before[-len(thoughts) :] == thoughts:
            before = before[: -len(thoughts)]
        assert after[: len(before)] == before


@pytest.mark.parametrize("name", sorted(MOVING))
def test_results_of_calls_move_nothing(name: str) -> None:
    """Where tools stand in the last user turn, they stay while it is worked on."""
    encoder, ask = model(name).encoder, Ask(TOOLS)
    before, after = (encoder.prompt(TALK[:size], ask).ids for size in (2, 4))
    assert after[: len(before)] == before


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {*FORMATS}))
def test_plain_tools_stand_at_the_start_of_the_first_user_turn(name: str) -> None:
    """Before its text, once, and only where they are asked for."""
    talker = model(name)
    told = plain_tools(TOOLS)
    prompt = talker.tokenizer.readable(talker.encoder.prompt(TALK, Ask(TOOLS)).ids)
    assert prompt.count(told) == 1
    assert prompt.index("Be brief.") < prompt.index(f"{told}\n\nHi") < prompt.index("seals\n</tool")
    assert told not in talker.tokenizer.readable(talker.encoder.prompt(TALK, Ask([])).ids)
