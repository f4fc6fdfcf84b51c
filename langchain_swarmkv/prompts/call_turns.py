"""A conversation's calls and results, written as a template wants them.

In the template's own format (`tool_style`) they stay what they are, with arguments and ids as it
takes them. Elsewhere they become text of ordinary turns, in `DEFAULT_FORMAT`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_swarmkv.prompts.call_format import CallFormat, Hole
from langchain_swarmkv.prompts.messages import TemplateMessage, merge
from langchain_swarmkv.prompts.tool_style import NativeCalls
from langchain_swarmkv.prompts.tools import Tool

__all__ = [
    "DEFAULT_FORMAT",
    "calls_apart",
    "native_calls",
    "plain_calls",
    "plain_results",
    "plain_tools",
]

DEFAULT_FORMAT = CallFormat(
    opening="",
    call=(
        '<tool_call>\n{"name": "',
        Hole.NAME,
        '", "arguments": ',
        Hole.ARGUMENTS,
        "}\n</tool_call>",
    ),
    separator="\n",
    closing="",
)
"""For templates with no tools: Hermes' tags, the most common in models' training."""


def native_calls(messages: Sequence[TemplateMessage], native: NativeCalls) -> list[TemplateMessage]:
    """The same conversation as the template wants its calls: arguments as text, ids as it knows."""
    shows_ids = Hole.ID in native.format.call
    return [_as_native(message, native.arguments_as_text, shows_ids) for message in messages]


def _as_native(message: TemplateMessage, as_text: bool, shows_ids: bool) -> TemplateMessage:
    changed = {**message}
    if shows_ids and "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {
                **call,
                "id": _short_id(call["id"]) if shows_ids else call["id"],
                "function": _as_text(call["function"]) if as_text else call["function"],
            }
            for call in message["tool_calls"]
        ]
    return changed


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": _to_json(function["arguments"])}


def _short_id(call_id: str) -> str:
    """Nine letters and digits, which Mistral's templates insist on; the same for the same id."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def plain_tools(tools: Sequence[Tool]) -> str:
    """What a model without tools in its template is told of them."""
    lines = "\n".join(_to_json(tool["function"], skip=("strict",)) for tool in tools)
    return (
        "You can call these functions; each line describes one, its parameters as a JSON schema:\n"
        f"{lines}\n"
        "To call one, write its name and arguments as JSON, like this:\n"
        '<tool_call>\n{"name": "function_name", "arguments": {"parameter": "value"}}\n</tool_call>'
    )


def calls_apart(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The same conversation for a template that drops the text beside calls.

    The text becomes a turn of its own, and the calls follow in another.
    """
    apart: list[TemplateMessage] = []
    for message in messages:
        if _has_text_beside_calls(message):
            apart.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {key: message[key] for key in message if key != "reasoning_content"}
            message["content"] = ""
        apart.append(message)
    return apart


def plain_results(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The same conversation for one that, with texts apart from calls, insists on alternation.

    The results of calls that stood beside a text become a user turn: it comes between that text and
    the answer, and is one turn with a question that follows at once.
    """
    plain: list[TemplateMessage] = []
    is_plain = was_result = False
    for message in messages:
        if message["role"] == "assistant":
            is_plain = _has_text_beside_calls(message)
        if is_plain and message["role"] == "tool":
            text = _result_text(message)
            if was_result:
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
            was_result = True
            continue
        if was_result and message["role"] == "user":
            plain[-1] = merge([plain[-1], message])[0]
        else:
            plain.append(message)
        was_result = False
    return calls_apart(plain)


def _has_text_beside_calls(message: TemplateMessage) -> bool:
    return bool(message.get("tool_calls")) and bool(message["content"].strip())


def _result_text(message: TemplateMessage) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def plain_calls(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The same conversation with calls and results as text of assistant and user turns."""
    plain: list[TemplateMessage] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = _result_text(message)
            if was_result:
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            plain.append(_spelled_out(message))
        else:
            plain.append(message)
        was_result = is_result
    return plain


def _spelled_out(message: TemplateMessage) -> TemplateMessage:
    calls = [_call_text(call["function"]) for call in message["tool_calls"]]
    content = "\n".join(filter(None, (message["content"], *calls)))
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def _call_text(function: Mapping[str, object]) -> str:
    name = _to_json(str(function["name"])).removeprefix('"').removesuffix('"')
    values = {Hole.NAME: name, Hole.ARGUMENTS: _to_json(function["arguments"])}
    return "".join(values[part] if isinstance(part, Hole) else part for part in DEFAULT_FORMAT.call)


def _to_json(value: object, skip: Sequence[str] = ()) -> str:
    if isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if key not in skip}
    return json.dumps(value, ensure_ascii=False, default=str)
