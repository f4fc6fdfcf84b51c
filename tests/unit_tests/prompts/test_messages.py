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


def test_a_role_from_outside_is_refused() -> None:
    """Templates write the role as markup, so it must be one of the four."""
    with pytest.raises(UnsupportedContentError, match="role 'im_start'"):
        template_messages([ChatMessage("x", role="im_start")])


def test_a_remove_message_is_refused_with_its_place() -> None:
    """It changes the state of a graph and is no turn of a conversation."""
    with pytest.raises(UnsupportedContentError, match="state of a LangGraph graph"):
        template_messages([HumanMessage("x"), RemoveMessage("1")])


def test_text_blocks_are_joined() -> None:
    """Content given as a list is the text of its blocks."""
    message = HumanMessage(
        ["a", {"type": "text", "text": "b"}, {"type": "text-plain", "text": "c"}]
    )
    assert template_messages([message])[0]["content"] == "abc"


@pytest.mark.parametrize(
    "kind",
    [
        *("image_url", "image", "audio", "input_audio", "file", "document", "media", "video"),
        *("server_tool_call", "no_such"),
    ],
)
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
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "name": "search", "id": "call-1", "input": {"query": "other"}},
    ]
    (converted,) = template_messages([AIMessage(content, tool_calls=[CALL])])
    (plain,) = template_messages([AIMessage("Looking.", tool_calls=[CALL])])
    assert converted == plain


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "name": "search", "id": "call-1", "input": CALL["args"]},
        {"type": "tool_call", "name": "search", "id": "call-1", "args": CALL["args"]},
    ],
)
def test_calls_that_stand_in_content_alone_are_calls(block: dict[str, Any]) -> None:
    """Histories from elsewhere have no `tool_calls` beside their blocks."""
    message = AIMessage([{"type": "text", "text": "Looking."}, block])
    assert template_messages([message]) == template_messages(
        [AIMessage("Looking.", tool_calls=[CALL])]
    )


def test_broken_calls_are_text_of_the_answer() -> None:
    """The model sees what it wrote; templates want mappings, which broken JSON is not."""
    broken = {"name": "search", "args": '{"query": "se', "id": "c", "error": None}
    nameless = {"name": None, "args": "{", "id": None, "error": "cut"}
    message = AIMessage("Looking.", tool_calls=[CALL], invalid_tool_calls=[broken, nameless])
    (converted,) = template_messages([message])
    assert converted["content"] == 'Looking.\nsearch {"query": "se\n{'
    assert len(converted["tool_calls"]) == 1
    block = {"type": "invalid_tool_call", **broken}
    for content, invalid in (([block], []), ([block], [broken])):
        (converted,) = template_messages([AIMessage(content, invalid_tool_calls=invalid)])
        assert converted == {"role": "assistant", "content": 'search {"query": "se'}


def test_results_in_a_users_content_are_tool_turns() -> None:
    """Anthropic's form: results among the blocks of a user message, in the order written."""
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "green"}]},
        {"type": "tool_result", "tool_use_id": "2", "content": "blue", "is_error": True},
        {"type": "text", "text": "and now?"},
        {"type": "tool_result", "tool_use_id": "3"},
    ]
    assert template_messages([HumanMessage(results, name="bob")]) == [
        {"role": "tool", "content": "green", "tool_call_id": "1"},
        {"role": "tool", "content": "blue", "tool_call_id": "2"},
        {"role": "user", "content": "and now?", "name": "bob"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
    ]


def test_a_picture_in_a_result_is_refused() -> None:
    """Within a result as anywhere else."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}
    with pytest.raises(UnsupportedContentError, match="'image'"):
        template_messages([HumanMessage([result])])


THOUGHTFUL = [
    AIMessage("Hi.", additional_kwargs={"reasoning_content": "hm"}),
    AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Hi."}]),
    AIMessage([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hi."}]),
    AIMessage(
        content_blocks=[{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Hi."}]
    ),
    AIMessage(
        [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Hi."}],
        response_metadata={"output_version": "v1"},
    ),
]


@pytest.mark.parametrize("message", THOUGHTFUL)
def test_thoughts_are_fed_back_on_request_only(message: AIMessage) -> None:
    """Under the key that templates read, from wherever the message holds them."""
    plain = {"role": "assistant", "content": "Hi."}
    assert template_messages([message]) == [plain]
    kept = template_messages([message, AIMessage("Bye.")], keep_reasoning=True)
    assert kept == [{**plain, "reasoning_content": "hm"}, {"role": "assistant", "content": "Bye."}]
    (merged,) = merge(kept)
    assert merged["reasoning_content"] == "hm"
    assert merge([*kept, *kept])[0]["reasoning_content"] == "hm\n\nhm"


def test_messages_in_the_standard_form_are_understood() -> None:
    """Version 1 blocks: text with citations, calls, and what only another provider reads."""
    content: list[Any] = [
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "text", "text": "A.", "annotations": [{"type": "citation", "url": "u"}]},
        {"type": "text", "text": " B."},
        {"type": "non_standard", "value": {"type": "redacted_thinking", "data": "x"}},
        {"type": "tool_call", "name": "search", "id": "call-1", "args": CALL["args"]},
    ]
    message = AIMessage(content_blocks=content, response_metadata={"output_version": "v1"})
    expected = template_messages([AIMessage("A. B.", tool_calls=[CALL])])
    assert template_messages([message]) == expected


@pytest.mark.parametrize("value", [{"a": 1}, {"type": "non_standard"}])
def test_what_only_another_provider_reads_is_refused_by_its_type(value: dict[str, Any]) -> None:
    """Unknown content is never dropped."""
    with pytest.raises(UnsupportedContentError, match="'non_standard'"):
        template_messages([AIMessage([{"type": "non_standard", "value": value}])])


def test_a_refusal_is_what_the_assistant_said() -> None:
    """OpenAI's block for it is text."""
    (converted,) = template_messages([AIMessage([{"type": "refusal", "refusal": "No."}])])
    assert converted["content"] == "No."


@pytest.mark.parametrize("content", ["", [], [""], [{"type": "text", "text": None}]])
@pytest.mark.parametrize("make", [HumanMessage, SystemMessage, AIMessage])
def test_empty_content_is_an_empty_turn(content: Any, make: type[BaseMessage]) -> None:
    """A turn without text stays a turn."""
    (converted,) = template_messages([make(content=content)])
    assert converted["content"] == ""


def test_openai_dicts_are_understood() -> None:
    """Content may be null, arguments are JSON text there, and a developer is a system."""
    function = {"name": "search", "arguments": '{"query": "seals", "top": 3}'}
    call = {"type": "function", "id": "call-1", "function": function}
    given: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "call-1"},
    ]
    assert template_messages(as_messages(given)) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "bob"},
        *template_messages([AIMessage("", tool_calls=[CALL])]),
        {"role": "tool", "content": "42", "tool_call_id": "call-1"},
    ]


@pytest.mark.parametrize("given", [{"role": "user", "content": "Hi"}, 5, None])
def test_what_is_no_prompt_is_refused(given: Any) -> None:
    """A single dict is not a conversation; its keys are not messages."""
    with pytest.raises(PromptError, match=type(given).__name__):
        as_messages(given)


def test_a_failed_tool_says_so_itself() -> None:
    """The status of a result is for programs; what the model reads is the text."""
    message = ToolMessage("Error: no such file", tool_call_id="1", name="f", status="error")
    assert template_messages([message]) == [
        {"role": "tool", "content": "Error: no such file", "name": "f", "tool_call_id": "1"}
    ]


def test_every_message_stays_where_it_is() -> None:
    """Several system messages, lone system messages and results without a call are kept."""
    messages = [
        SystemMessage("a"),
        SystemMessage("b"),
        ToolMessage("lost", tool_call_id="?"),
        ChatMessage("r", role="function"),
    ]
    roles = [turn["role"] for turn in template_messages(messages)]
    assert roles == ["system", "system", "tool", "tool"]
    assert template_messages(messages[:1]) == [{"role": "system", "content": "a"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": 1}, "{'a': 1}"),
        ([{"a": "é"}], '{"a": "é"}'),
        ([{"type": "text", "text": "42"}], "42"),
        ([{"type": "json", "json": {"a": [1]}}], '{"a": [1]}'),
        (["a", "b"], "ab"),
        ([], ""),
    ],
)
def test_tool_results_may_be_data(content: Any, text: str) -> None:
    """A dict or a list that a tool returned is rendered, with or without a matching call."""
    (converted,) = template_messages([ToolMessage(content, tool_call_id="lost")])
    assert (converted["content"], converted["tool_call_id"]) == (text, "lost")


def test_conversion_leaves_the_messages_alone() -> None:
    """Neither conversion nor mapping touches what the caller holds, nor what it made."""
    deep = {**CALL, "args": {"list": [{"a": "b"}]}}
    messages = [SystemMessage("s", name="n"), AIMessage("a", tool_calls=[deep])]
    before = copy.deepcopy(messages)
    converted = template_messages(messages)
    mapped = [map_content(message, str.upper) for message in converted]
    assert converted == template_messages(before)
    for turns in (converted, mapped):
        arguments = turns[1]["tool_calls"][0]["function"]["arguments"]
        arguments.popitem()[1][0].clear()
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


@pytest.mark.parametrize(
    ("others", "folded"),
    [
        (True, "system:s.t user:u assistant:a.b user:v.w"),
        (False, "system:s system:t user:u assistant:a assistant:b user:v.w"),
    ],
)
def test_fold_may_leave_the_leading_system_turns(others: bool, folded: str) -> None:
    """And neighbours where no system text comes in."""
    given = "system:s system:t user:u assistant:a assistant:b system:v user:w"
    wanted = [{**m, "content": m["content"].replace(".", "\n\n")} for m in pairs(folded)]
    assert fold(pairs(given), start=2, others=others) == wanted


def pairs(text: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), turn.split(":"), strict=True)) for turn in text.split()]


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
