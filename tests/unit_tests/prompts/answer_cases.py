"""Formats of tool calls as models have them, and helpers to parse answers in them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count, groupby
from typing import Any

from langchain_swarmkv.prompts.answer_parser import AnswerParser
from langchain_swarmkv.prompts.answer_parts import (
    AnswerPart,
    CallArguments,
    CallEnd,
    CallStart,
    InvalidCall,
    ReasoningPart,
    TextPart,
)
from langchain_swarmkv.prompts.call_format import CallFormat, Hole, ReasoningTags

NAME, ARGUMENTS, ID = Hole.NAME, Hole.ARGUMENTS, Hole.ID

# Control tokens, as the parser gets them.
TOOL_CALLS, ARGS, CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END, OTHER = (
    chr(0xD800 + i) for i in range(8)
)

HERMES = CallFormat(
    opening="",
    call=('<tool_call>\n{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}\n</tool_call>"),
    separator="\n",
    closing="",
)
LLAMA = CallFormat(
    opening="",
    call=('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
    separator=None,
    closing="",
)
NEMO = CallFormat(
    opening=f"{TOOL_CALLS} [",
    call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, ', "id": "', ID, '"}'),
    separator=", ",
    closing="]",
)
MISTRAL = CallFormat(opening="", call=(TOOL_CALLS, NAME, ARGS, ARGUMENTS), separator="", closing="")
DEEPSEEK = CallFormat(
    opening=CALLS_BEGIN,
    call=(f"{CALL_BEGIN}function{SEP}", NAME, "\n```json\n", ARGUMENTS, f"\n```{CALL_END}"),
    separator="\n",
    closing=CALLS_END,
)
COHERE = CallFormat(
    opening="Action: ```json\n[\n",
    call=('{"tool_call_id": "', ID, '", "tool_name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
    separator=",\n",
    closing="\n]```",
)
FORMATS = {
    "hermes": HERMES,
    "llama": LLAMA,
    "nemo": NEMO,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "cohere": COHERE,
}
THINK = ReasoningTags("<think>", "</think>")

ARGUMENTS_CASES: list[dict[str, Any]] = [
    {},
    {"city": "Bern"},
    {"a": {"b": [{"c": {}}, [[]], None, True, 1.5e3]}},
    {"text": 'quotes " and \\ and \\" and \n and braces }{][ and </tool_call><tool_call>'},
    {"text": "歪 👩‍🚀 é \u2028 \x00"},
]


def written(
    calls: CallFormat, made: Iterable[tuple[str, dict[str, Any]]], *, ascii_only: bool = False
) -> str:
    """The text of calls as a model writes them."""

    def call(position: int, name: str, arguments: dict[str, Any]) -> str:
        holes = {
            NAME: name,
            ARGUMENTS: json.dumps(arguments, ensure_ascii=ascii_only),
            ID: f"own{position}",
        }
        return "".join(holes[part] if isinstance(part, Hole) else part for part in calls.call)

    texts = [call(position, *one) for position, one in enumerate(made)]
    return calls.opening + (calls.separator or "").join(texts) + calls.closing


def parser(calls: CallFormat | None, **options: Any) -> AnswerParser:
    """A parser that names its calls new0, new1, ..."""
    numbers = count()
    options = {"reasoning": THINK, "new_call_id": lambda: f"new{next(numbers)}", **options}
    return AnswerParser(calls=calls, **options)


def parse(pieces: Iterable[str], calls: CallFormat | None, **options: Any) -> list[AnswerPart]:
    """All parts of an answer, neighbours of a kind joined. A str is an iterable of characters."""
    stream = parser(calls, **options)
    parts = [part for piece in pieces for part in stream.push(piece)]
    return joined([*parts, *stream.finish()])


def joined(parts: list[AnswerPart]) -> list[AnswerPart]:
    result: list[AnswerPart] = []
    for kind, alike in groupby(parts, lambda part: (type(part), getattr(part, "index", None))):
        group = list(alike)
        if kind[0] in (TextPart, ReasoningPart, CallArguments):
            text = "".join(part.text for part in group)
            group = [CallArguments(kind[1], text) if kind[1] is not None else kind[0](text)]
        result += group
    return result


def text_of(parts: Iterable[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def calls_of(parts: Iterable[AnswerPart]) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the valid calls."""
    parts = list(parts)
    texts: dict[int, str] = {}
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.index] = texts.get(part.index, "") + part.text
    ended = {part.index for part in parts if isinstance(part, CallEnd)}
    return [
        (part.name, json.loads(texts[part.index]))
        for part in parts
        if isinstance(part, CallStart) and part.index in ended
    ]


def invalid_of(parts: Iterable[AnswerPart]) -> list[InvalidCall]:
    return [part for part in parts if isinstance(part, InvalidCall)]
