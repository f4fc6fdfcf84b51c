"""Message shapes: what becomes a template message, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompt_values import StringPromptValue
from langchain_core.prompts import ChatPromptTemplate

from langchain_swarmkv.errors import PromptError, UnsupportedContentError
from langchain_swarmkv.prompts.messages import (
    as_messages,
    content_strings,
    fold,
    map_content,
    merge,
    template_messages,
)

CALL = {"name": "search", "args": {"query": "seals", "top": 3}, "id": "call-1"}


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (SystemMessage("x"), "system"),
        (ChatMessage("x", role="developer"), "system"),
        (HumanMessage("x"), "user"),
        (ChatMessage("x", role="User"), "user"),
        (AIMessage("x"), "assistant"),
        (AIMessageChunk("x"), "assistant"),
        (ToolMessage("x", tool_call_id="1"), "tool"),
        (FunctionMessage("x", name="f"), "tool"),
    ],
)
def test_each_message_class_has_its_role(message: BaseMessage, role: str) -> None:
    """Roles are system, user, assistant and tool, whatever the class is called."""
    (converted,) = template_messages([message])
    assert (converted["role"], converted["content"]) == (role, "x")


@pytest.mark.parametrize("message", [ChatMessage("x", role="im_start"), RemoveMessage("1")])
def test_a_role_from_outside_is_refused(message: BaseMessage) -> None:
    """Templates write the role as markup, so it must be one of the four."""
    with pytest.raises(UnsupportedContentError, match="role"):
        template_messages([message])


def test_text_blocks_are_joined() -> None:
    """Content given as a list is the text of its blocks."""
    message = HumanMessage(
        ["a", {"type": "text", "text": "b"}, {"type": "text-plain", "text": "c"}]
    )
    assert template_messages([message])[0]["content"] == "abc"


@pytest.mark.parametrize("kind", ["image_url", "image", "audio", "file", "video", "no_such"])
@pytest.mark.parametrize("make", [HumanMessage, SystemMessage, AIMessage])
def test_media_are_refused_by_name(kind: str, make: type[BaseMessage]) -> None:
    """A block that is not text is refused, never dropped, and the message says which."""
    message = make(content=[{"type": "text", "text": "look"}, {"type": kind, "url": "http://x"}])
    with pytest.raises(UnsupportedContentError, match=repr(kind)) as error:
        template_messages([message])
    assert error.value.facts["content_type"] == kind


def test_no_messages_are_refused() -> None:
    """An empty conversation has nothing to answer."""
    with pytest.raises(PromptError, match="no messages"):
        template_messages([])


@pytest.mark.parametrize(
    "given",
    [
        "Hi",
        [("human", "Hi")],
        [{"role": "user", "content": "Hi"}],
        [HumanMessage("Hi")],
        StringPromptValue(text="Hi"),
        ChatPromptTemplate.from_messages([("human", "{x}")]).invoke({"x": "Hi"}),
    ],
)
def test_every_input_of_langchain_is_taken(given: Any) -> None:
    """Text, tuples, dicts, messages and prompt values are the same conversation."""
    (message,) = as_messages(given)
    assert isinstance(message, HumanMessage)
    assert message.content == "Hi"


def test_tool_calls_carry_their_arguments_as_a_mapping() -> None:
    """Templates read arguments as a mapping, never as JSON text."""
    (converted,) = template_messages([AIMessage("", tool_calls=[CALL])])
    assert converted["tool_calls"] == [
        {
            "type": "function",
            "id": "call-1",
            "function": {"name": "search", "arguments": {"query": "seals", "top": 3}},
        }
    ]


def test_an_answer_without_calls_has_no_calls_key() -> None:
    """Templates ask `'tool_calls' in message`; an empty list would mislead them."""
    assert "tool_calls" not in template_messages([AIMessage("x", tool_calls=[])])[0]


def test_calls_and_thoughts_in_content_are_not_repeated() -> None:
    """Calls stand in `tool_calls`; a thinking block is not history."""
    content = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "name": "search", "id": "call-1", "input": {}},
    ]
    converted = template_messages([AIMessage(content, tool_calls=[CALL])])[0]
    assert converted["content"] == "Looking."


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": 1}, "{'a': 1}"),
        ([{"a": "é"}], '{"a": "é"}'),
        ([{"type": "text", "text": "42"}], "42"),
        ([], ""),
    ],
)
def test_tool_results_may_be_data(content: Any, text: str) -> None:
    """A dict or a list that a tool returned is rendered, with or without a matching call."""
    (converted,) = template_messages([ToolMessage(content, tool_call_id="lost")])
    assert (converted["content"], converted["tool_call_id"]) == (text, "lost")


def test_conversion_leaves_the_messages_alone() -> None:
    """Neither conversion nor mapping touches what the caller holds."""
    messages = [SystemMessage("s", name="n"), AIMessage("a", tool_calls=[CALL])]
    before = copy.deepcopy(messages)
    converted = [map_content(message, str.upper) for message in template_messages(messages)]
    converted[1]["tool_calls"][0]["function"]["arguments"]["new"] = 1
    assert messages == before


def test_all_strings_from_outside_are_found() -> None:
    """Content, names, ids, argument names and values at any depth; the role is ours."""
    call = {"name": "f", "args": {"k1": ["v1", {"k2": "v2"}], "n": 1}, "id": "i"}
    messages = template_messages(
        [
            AIMessage("a", name="bob", tool_calls=[call]),
            ToolMessage("r", tool_call_id="t", name="f"),
        ]
    )
    assert content_strings(messages) == [
        *("a", "bob", "i", "f", "k1", "v1", "k2", "v2", "n"),
        *("r", "f", "t"),
    ]
    mapped = map_content(messages[0], str.upper)
    assert mapped["role"] == "assistant"
    assert mapped["tool_calls"][0]["type"] == "function"
    assert mapped["tool_calls"][0]["function"] == {
        "name": "F",
        "arguments": {"K1": ["V1", {"K2": "V2"}], "N": 1},
    }


def turns(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("given", "folded"),
    [
        ([("system", "s"), ("user", "u")], [("user", "s\n\nu")]),
        ([("system", "s"), ("system", "t"), ("user", "u")], [("user", "s\n\nt\n\nu")]),
        ([("user", "u"), ("user", "v")], [("user", "u\n\nv")]),
        ([("system", "s"), ("assistant", "a")], [("user", "s"), ("assistant", "a")]),
        ([("assistant", "a"), ("user", "u")], [("assistant", "a"), ("user", "u")]),
        ([("system", "s")], [("user", "s")]),
        ([("system", ""), ("user", "u")], [("user", "u")]),
        ([("tool", "1"), ("tool", "2")], [("tool", "1"), ("tool", "2")]),
    ],
)
def test_fold_gives_user_turns_and_strict_alternation(
    given: list[tuple[str, str]], folded: list[tuple[str, str]]
) -> None:
    """System texts join the user turn after them, neighbours of one role become one."""
    messages = turns(*given)
    assert fold(messages) == turns(*folded)
    assert messages == turns(*given)


def test_merge_leaves_system_messages_what_they_are() -> None:
    """Neighbours of one role become one, tool turns excepted; roles stay."""
    given = turns(("system", "s"), ("system", "t"), ("user", "u"), ("user", "v"), ("tool", "1"))
    assert merge(given) == turns(("system", "s\n\nt"), ("user", "u\n\nv"), ("tool", "1"))


def test_fold_keeps_the_calls_of_both_answers() -> None:
    """Two assistant turns that become one have the calls of both."""
    messages = template_messages(
        [AIMessage("a", tool_calls=[CALL]), AIMessage("", tool_calls=[{**CALL, "id": "call-2"}])]
    )
    (merged,) = fold(messages)
    assert merged["content"] == "a"
    assert [call["id"] for call in merged["tool_calls"]] == ["call-1", "call-2"]
