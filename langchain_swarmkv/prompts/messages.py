"""LangChain messages as the dicts that chat templates read.

A template message has a `role` (system, user, assistant or tool) and a text `content`; an assistant
turn may have `tool_calls`, a tool turn its `tool_call_id`. Everything but the role and the fixed
words of a tool call came from outside and is called *content* here; see `segments`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.prompt_values import PromptValue

from langchain_swarmkv.errors import PromptError, UnsupportedContentError
from langchain_swarmkv.prompts.call_format import ReasoningTags

__all__ = [
    "TemplateMessage",
    "as_messages",
    "content_strings",
    "fold",
    "map_content",
    "map_strings",
    "merge",
    "num_leading_systems",
    "split_thoughts",
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
# Parts of an answer that are no text of its own: thoughts, and calls (which `tool_calls` holds).
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_content"})
_CALLS = frozenset({"tool_use", "tool_call", "invalid_tool_call"})
_TEXT_KEYS = {"text": "text", "text-plain": "text", "refusal": "refusal", None: "text"}
_UNSPOKEN = _THOUGHTS | _CALLS | {"tool_call_chunk", "input_json_delta"}


def as_messages(given: LanguageModelInput) -> list[BaseMessage]:
    """Everything LangChain takes as a prompt, as messages: text, tuples, dicts, prompt values.

    Raises:
        PromptError: it is something else.
    """
    if isinstance(given, str):
        return [HumanMessage(given)]
    if isinstance(given, PromptValue):
        return given.to_messages()
    if not isinstance(given, Sequence):
        # NOTE: a single dict would be read as a list of its keys.
        raise PromptError(
            f"A prompt cannot be a {type(given).__name__}; give text, a prompt value, or a list "
            "of messages."
        )
    return convert_to_messages(given)


def template_messages(
    messages: Sequence[BaseMessage], *, keep_reasoning: bool = False
) -> list[TemplateMessage]:
    """Convert messages; the originals are not touched and not shared.

    Anthropic's way of writing calls and their results as blocks of content is understood, too: a
    user's `tool_result` becomes a tool turn. Calls that could not be parsed are text.

    Args:
        messages: the conversation.
        keep_reasoning: give answers their thoughts back, as `reasoning_content`.

    Raises:
        PromptError: there are no messages.
        UnsupportedContentError: a role or a kind of content that is not text.
    """
    if not messages:
        raise PromptError("There are no messages to answer; give at least one.")
    converted: list[TemplateMessage] = []
    for message in messages:
        if isinstance(message, AIMessage):
            converted.append(_answer(message, keep_reasoning=keep_reasoning))
        else:
            converted += _turns(message)
    return converted


def _turns(message: BaseMessage) -> Iterator[TemplateMessage]:
    role = _role(message)
    blocks: list[Any] = []
    results = 0
    for block in _blocks(message):
        if role == "user" and _kind(block) == "tool_result":
            if blocks:
                yield _turn(role, message, blocks)
            yield _tool_result(block)
            blocks, results = [], results + 1
        else:
            blocks.append(block)
    if blocks or not results:
        yield _turn(role, message, blocks)


def _turn(role: str, message: BaseMessage, blocks: Sequence[Any]) -> TemplateMessage:
    turn: TemplateMessage = {"role": role, "content": _text(blocks, role)}
    if message.name:
        turn["name"] = message.name
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _tool_result(block: Mapping[str, Any]) -> TemplateMessage:
    content = block.get("content") or ""
    blocks = [content] if isinstance(content, str) else content
    call_id = str(block.get("tool_use_id") or "")
    return {"role": "tool", "content": _text(blocks, "tool"), "tool_call_id": call_id}


def _answer(message: AIMessage, *, keep_reasoning: bool) -> TemplateMessage:
    blocks = _blocks(message)
    turn = _turn("assistant", message, [b for b in blocks if _kind(b) not in _UNSPOKEN])
    given = [*message.tool_calls, *message.invalid_tool_calls]
    known = {call["id"] for call in given}
    given += [b for b in blocks if _kind(b) in _CALLS and b.get("id") not in known]
    calls, broken = [], []
    for call in given:
        name, arguments = call.get("name") or "", call.get("input", call.get("args"))
        if isinstance(arguments, Mapping):
            calls.append(_tool_call(call.get("id") or "", name, map_strings(arguments, str)))
        else:
            broken.append(f"{name} {arguments or ''}".strip())
    if calls:
        turn["tool_calls"] = calls
    turn["content"] = "\n".join(filter(None, (turn["content"], *broken)))
    if keep_reasoning and (reasoning := _reasoning(message, blocks)):
        turn["reasoning_content"] = reasoning
    return turn


def _tool_call(call_id: str, name: str, arguments: object) -> TemplateMessage:
    return {
        "type": "function",
        "id": call_id,
        "function": {"name": name, "arguments": arguments},
    }


def _reasoning(message: AIMessage, blocks: Sequence[Any]) -> str:
    given = message.additional_kwargs.get("reasoning_content")
    if isinstance(given, str):
        return given
    thoughts = (
        block.get("reasoning") or block.get("thinking")
        for block in blocks
        if _kind(block) in _THOUGHTS
    )
    return "\n".join(thought for thought in thoughts if isinstance(thought, str))


def _role(message: BaseMessage) -> str:
    if isinstance(message, RemoveMessage):
        raise UnsupportedContentError(
            "A RemoveMessage takes a message out of the state of a LangGraph graph; it has no role "
            "in a prompt. Give the model the messages that are left.",
            role=message.type,
        )
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


def _blocks(message: BaseMessage) -> list[Any]:
    content = message.content
    if isinstance(content, str):
        return [content]
    # What another provider's message holds beyond the standard goes by that provider's type.
    return [_standard(block) for block in content]


def _standard(block: Any) -> Any:
    value = block.get("value") if _kind(block) == "non_standard" else None
    return value if _kind(value) else block


def _kind(block: Any) -> str | None:
    return block.get("type") if isinstance(block, Mapping) else None


def _text(blocks: Sequence[Any], role: str) -> str:
    return "".join(_block_text(block, role) for block in blocks)


def _block_text(block: Any, role: str) -> str:
    if isinstance(block, str):
        return block
    kind = _kind(block)
    key = _TEXT_KEYS.get(kind)
    if key in block and isinstance(text := block[key] or "", str):
        return text
    if role == "tool" and kind in ("json", None):
        return json.dumps(block.get("json", block), ensure_ascii=False, default=str)
    raise UnsupportedContentError(
        f"A message of the role {role} holds a content block of type {kind!r}; this model reads "
        "text only. Put its text into a text block, or leave it out.",
        content_type=kind,
    )


def map_content(message: TemplateMessage, change: Callable[[str], str]) -> TemplateMessage:
    """A copy in which every string that came from outside is changed."""
    copy = {
        key: value if key == "role" else map_strings(value, change)
        for key, value in message.items()
        if key != "tool_calls"
    }
    if "tool_calls" in message:
        copy["tool_calls"] = [
            _tool_call(
                change(call["id"]),
                change(call["function"]["name"]),
                map_strings(call["function"]["arguments"], change),
            )
            for call in message["tool_calls"]
        ]
    return copy


def map_strings(value: Any, change: Callable[[str], str], *, keys: bool = True) -> Any:
    """A copy of plain data in which every string is changed, and with `keys` those of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            map_strings(key, change) if keys else key: map_strings(item, change, keys=keys)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change, keys=keys) for item in value]
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


def fold(
    messages: Sequence[TemplateMessage], *, start: int = 0, others: bool = True
) -> list[TemplateMessage]:
    """The same conversation for a template that takes no system turn, or none at these places.

    Each system text becomes part of the user turn after it, or a user turn of its own.

    Args:
        messages: the conversation.
        start: how many messages at the start stay what they are.
        others: merge neighbours of one role everywhere, not only where a system text comes in.
    """
    folded: list[TemplateMessage] = []
    was_system = False
    for place, message in enumerate(messages):
        is_system = message["role"] == "system" and place >= start
        turn = {**message, "role": "user"} if is_system else message
        joins = folded and folded[-1]["role"] == turn["role"] != "tool"
        if joins and (others or is_system or was_system):
            folded[-1] = _merged(folded[-1], turn)
        else:
            folded.append(turn)
        was_system = is_system
    return folded


def num_leading_systems(messages: Sequence[TemplateMessage]) -> int:
    """How many system messages the conversation begins with."""
    return next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))


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


def split_thoughts(message: TemplateMessage, tags: ReasoningTags, *, keep: bool) -> TemplateMessage:
    """An answer without the thoughts that stand in its text, as other programs leave them there."""
    content = message["content"]
    is_thoughtful = message["role"] == "assistant" and content.lstrip().startswith(tags.opening)
    if not is_thoughtful or tags.closing not in content:
        return message
    thoughts, _, answer = content.partition(tags.closing)
    changed = {**message, "content": answer.lstrip()}
    if keep:
        changed["reasoning_content"] = thoughts.partition(tags.opening)[2].strip()
    return changed


def _merged(first: TemplateMessage, second: TemplateMessage) -> TemplateMessage:
    merged = {**first, **second}
    merged["content"] = "\n\n".join(filter(None, (first["content"], second["content"])))
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if calls:
        merged["tool_calls"] = calls
    thoughts = [m["reasoning_content"] for m in (first, second) if "reasoning_content" in m]
    if thoughts:
        merged["reasoning_content"] = "\n\n".join(thoughts)
    return merged
