"""LangChain messages as the dicts that chat templates read.

A template message has a `role` (system, user, assistant or tool) and a text `content`; an assistant
turn may have `tool_calls`, a tool turn its `tool_call_id`. Everything but the role and the fixed
words of a tool call came from outside and is called *content* here; see `segments`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.prompt_values import PromptValue

from langchain_swarmkv.errors import PromptError, UnsupportedContentError

__all__ = [
    "TemplateMessage",
    "as_messages",
    "content_strings",
    "fold",
    "map_content",
    "merge",
    "template_messages",
    "with_user_text",
]

TemplateMessage: TypeAlias = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
# Parts of an answer that are not fed back: calls stand in `tool_calls`, thoughts are not history.
_UNSPOKEN = frozenset({"tool_call", "tool_call_chunk", "tool_use", "thinking", "reasoning"})


def as_messages(given: LanguageModelInput) -> list[BaseMessage]:
    """Everything LangChain takes as a prompt, as messages: text, tuples, dicts, prompt values."""
    if isinstance(given, str):
        return [HumanMessage(given)]
    if isinstance(given, PromptValue):
        return given.to_messages()
    return convert_to_messages(given)


def template_messages(
    messages: Sequence[BaseMessage], *, keep_reasoning: bool = False
) -> list[TemplateMessage]:
    """Convert messages; the originals are not touched and not shared.

    Raises:
        PromptError: there are no messages.
        UnsupportedContentError: a role or a kind of content that is not text.
    """
    if not messages:
        raise PromptError("There are no messages to answer; give at least one.")
    return [_template_message(message) for message in messages]


def _template_message(message: BaseMessage) -> TemplateMessage:
    converted: TemplateMessage = {"role": _role(message), "content": _text(message)}
    if message.name:
        converted["name"] = message.name
    if isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and message.tool_calls:
        converted["tool_calls"] = [
            _tool_call(call["id"] or "", call["name"], call["args"]) for call in message.tool_calls
        ]
    return converted


def _tool_call(call_id: str, name: str, arguments: object) -> TemplateMessage:
    return {
        "type": "function",
        "id": call_id,
        "function": {"name": name, "arguments": arguments},
    }


def _role(message: BaseMessage) -> str:
    kind = message.role if isinstance(message, ChatMessage) else message.type
    role = _ROLES.get(kind.removesuffix("MessageChunk").lower())
    if role is None:
        # NOTE: a role is written into the prompt as markup, so it is never taken from outside.
        raise UnsupportedContentError(
            f"A message has the role {kind!r}; chat templates know system, user, assistant and "
            "tool. Use one of LangChain's message classes for these.",
            role=kind,
        )
    return role


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block, message) for block in message.content)


def _block_text(block: str | Mapping[str, Any], message: BaseMessage) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if isinstance(block.get("text"), str) and kind in ("text", "text-plain", None):
        text: str = block["text"]
        return text
    if isinstance(message, AIMessage) and kind in _UNSPOKEN:
        return ""
    if isinstance(message, ToolMessage) and kind is None:
        return json.dumps(block, ensure_ascii=False, default=str)
    raise UnsupportedContentError(
        f"A {message.type} message holds a content block of type {kind!r}; this model reads text "
        "only. Put its text into a text block, or leave it out.",
        content_type=kind,
    )


def map_content(message: TemplateMessage, change: Callable[[str], str]) -> TemplateMessage:
    """A copy in which every string that came from outside is changed."""
    copy = {
        key: value if key == "role" else _map_strings(value, change)
        for key, value in message.items()
        if key != "tool_calls"
    }
    if "tool_calls" in message:
        copy["tool_calls"] = [
            _tool_call(
                change(call["id"]),
                change(call["function"]["name"]),
                _map_strings(call["function"]["arguments"], change),
            )
            for call in message["tool_calls"]
        ]
    return copy


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(k, change): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def content_strings(messages: Sequence[TemplateMessage]) -> list[str]:
    """All the strings that came from outside."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    for message in messages:
        map_content(message, keep)
    return found


def merge(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The same conversation for a template with strict alternation.

    Neighbours of one role become one turn, a blank line between them. Tool turns stay apart.
    """
    merged: list[TemplateMessage] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] != "tool":
            merged[-1] = _merged(merged[-1], message)
        else:
            merged.append(message)
    return merged


def fold(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The same conversation for a template without a system role.

    Each system text becomes part of the user turn after it, or a user turn of its own.
    """
    return merge(
        [
            {**message, "role": "user"} if message["role"] == "system" else message
            for message in messages
        ]
    )


def with_user_text(
    messages: Sequence[TemplateMessage], *, before: str = "", after: str = ""
) -> list[TemplateMessage]:
    """The same conversation with text around that of its first user turn.

    Not the last: it stays where it is as the conversation grows, and with it all that is cached.
    """
    place = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    turn = messages[place] if place < len(messages) else {"role": "user", "content": ""}
    text = "\n\n".join(filter(None, (before, turn["content"], after)))
    return [*messages[:place], {**turn, "content": text}, *messages[place + 1 :]]


def _merged(first: TemplateMessage, second: TemplateMessage) -> TemplateMessage:
    merged = {**first, **second}
    merged["content"] = "\n\n".join(filter(None, (first["content"], second["content"])))
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return {**merged, "tool_calls": calls} if calls else merged
