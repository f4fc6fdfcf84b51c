"""Grammars for answers, in llguidance's Lark dialect: what calls and objects may look like.

    start: thoughts? body
    body:  text | calls | text-then-calls | object, as tools, tool_choice and schema say

Where calls are free ("auto"), text goes on unbound until a call's trigger; from there on the call
is held to the tool's schema, and nothing follows the last one. White space is what templates write
themselves, `", "` and `": "`, so no answer can be padded for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_swarmkv.prompts.call_format import CallFormat, Hole, ReasoningTags
from langchain_swarmkv.prompts.held_schema import held_schema
from langchain_swarmkv.prompts.tool_schema import tool_schema
from langchain_swarmkv.prompts.tools import Tools

__all__ = ["MAX_PARALLEL_CALLS", "AnswerRules", "answer_guide"]

MAX_PARALLEL_CALLS = 16
"""Calls in one answer; small models would repeat themselves up to max_tokens."""

_ANYTHING = r"/(?s:.*)/"
_JSON_LEXEME = re.compile(r'"(?:[^"\\]|\\.)*"|\s*[:,]\s*|[^\s"]')


@dataclass(frozen=True)
class AnswerRules:
    """What one answer is held to.

    The texts of `calls` and `reasoning` have marks in place of control tokens.
    """

    tools: Tools | None
    calls: CallFormat
    json_schema: Mapping[str, Any] | None
    """None: any text. {"type": "object"}: any object."""
    reasoning: ReasoningTags | None
    starts_in_reasoning: bool


def answer_guide(rules: AnswerRules, token_id: Callable[[str], int | None]) -> str | None:
    """The grammar of an answer; None: nothing holds it.

    Args:
        rules: see `AnswerRules`.
        token_id: the control token that a character stands for, if it is a mark.
    """
    return _Writer(rules, token_id).write()


class _Writer:
    def __init__(self, rules: AnswerRules, token_id: Callable[[str], int | None]) -> None:
        self._rules = rules
        self._token_id = token_id
        self._lines: list[str] = []

    def write(self) -> str | None:
        body = list(self._bodies())
        if not body:
            return None
        self._lines.insert(0, f"start: {self._thoughts()}body")
        self._lines.insert(1, f"body: {' | '.join(body)}")
        return "\n".join(self._lines) + "\n"

    def _bodies(self) -> Iterator[str]:
        tools, schema = self._rules.tools, self._rules.json_schema
        callable_tools = tools.callable if tools is not None and tools.is_constrained else []
        must_call = tools is not None and tools.choice.mode == "required" and callable_tools
        if callable_tools and not must_call and schema and not self._rules.calls.has_markup:
            yield from map(self._json_call, callable_tools)
        elif callable_tools and (must_call or schema is not None):
            self._write_calls(callable_tools)
            yield self._literal(self._rules.calls.opening + self._first_text) + " calls"
        elif callable_tools:
            self._write_calls(callable_tools)
            yield from self._free_text_or_calls()
        if schema is not None and not must_call:
            self._lines.append(f"object: {_json(schema)}")
            yield "object"

    @property
    def _first_text(self) -> str:
        return str(self._rules.calls.call[0])

    def _write_calls(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Rule `calls`: everything after the first text of the first call."""
        rules = self._rules
        assert rules.tools is not None
        calls = rules.calls
        rest = self._literal(calls.closing)
        if calls.separator is not None and not rules.tools.is_single:
            again = self._literal(f"{calls.separator}{self._first_text}")
            rest = f"({again} call){{0,{MAX_PARALLEL_CALLS - 1}}} {rest}"
        self._lines.append(f"calls: call {rest}")
        self._lines.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
        for place, tool in enumerate(tools):
            function = tool["function"]
            parts = [self._part(part, function) for part in calls.call[1:]]
            self._lines.append(f"call_{place}: {' '.join(filter(None, parts))}")
        if Hole.ID in calls.call:
            self._lines.append("CALL_ID: /[a-zA-Z0-9]{9}/")

    def _part(self, part: str | Hole, function: Mapping[str, Any]) -> str:
        if part is Hole.NAME:
            return self._literal(function["name"])  # which needs no escapes; see `tools`
        if part is Hole.ARGUMENTS:
            return _arguments(function)
        return "CALL_ID" if part is Hole.ID else self._literal(part)

    def _json_call(self, tool: Mapping[str, Any]) -> str:
        """A call that is bare JSON, in the lexemes of JSON.

        llguidance looks no further than one, so a literal that begins as the object beside it does
        would rule that object out.
        """
        calls, function = self._rules.calls, tool["function"]
        values = {Hole.NAME: function["name"], Hole.ARGUMENTS: "\0", Hole.ID: "a" * 9}
        parts = [calls.opening, *calls.call, calls.closing]
        text = "".join(values[part] if isinstance(part, Hole) else part for part in parts)
        arguments = _arguments(function)
        return " ".join(
            arguments if lexeme == "\0" else _quote(lexeme) for lexeme in _JSON_LEXEME.findall(text)
        )

    def _free_text_or_calls(self) -> Iterator[str]:
        calls = self._rules.calls
        head = calls.opening + self._first_text
        trigger = calls.trigger
        if not calls.has_markup:
            # Bare JSON is a call only where the answer begins with it, however it is spaced.
            begins = r"\s*".join(_regex(char) for char in head if not char.isspace())
            self._lines.append(rf"FREE: {_ANYTHING} & ~/(?s:\s*{begins}.*)/")
            yield "FREE"
            yield f"{self._literal(head)} calls"
            return
        free = _ANYTHING
        reasoning = self._rules.reasoning
        if reasoning is not None and not self._is_mark(reasoning.opening[0]):
            # A thought may speak of a call without making one.
            free += rf" & ~/(?s:\s*{_regex(reasoning.opening)}.*)/"
        self._lines.append(f"FREE: {free}")
        yield "FREE"
        opened = self._up_to("trigger", "FREE", trigger)
        yield f"{opened} {self._literal(head.lstrip().removeprefix(trigger))} calls"

    def _thoughts(self) -> str:
        tags = self._rules.reasoning
        if tags is None:
            return ""
        self._lines.append(f"ANYTHING: {_ANYTHING}")
        self._lines.append(r"BLANK: /\n{0,2}/")
        thought = f"{self._up_to('thought', 'ANYTHING', tags.closing)} BLANK"
        if self._rules.starts_in_reasoning:
            return f"{thought} "
        return f"({self._literal(tags.opening)} {thought})? "

    def _up_to(self, name: str, text: str, mark: str) -> str:
        """Text up to, and with, the first time that `mark` is written."""
        first_token = next((i for i, char in enumerate(mark) if self._is_mark(char)), len(mark))
        if first_token == 0:
            return f"{text} {self._literal(mark)}"  # no text can hold a control token
        self._lines.append(f"{name}[lazy]: {text} {_quote(mark[:first_token])}")
        return f"{name} {self._literal(mark[first_token:])}"

    def _is_mark(self, char: str) -> bool:
        return self._token_id(char) is not None

    def _literal(self, text: str) -> str:
        """Quoted text and control tokens, in order."""
        pieces: list[str] = []
        quoted = ""
        for char in text:
            token_id = self._token_id(char)
            if token_id is None:
                quoted += char
                continue
            pieces += [_quote(quoted), f"<[{token_id}]>"]
            quoted = ""
        return " ".join(filter(None, [*pieces, _quote(quoted)]))


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _regex(text: str) -> str:
    return "".join(
        char if char.isalnum() or char == " " else f"\\x{{{ord(char):x}}}" for char in text
    )


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(held_schema(schema), ensure_ascii=False)}"


def _arguments(function: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(tool_schema(function).held, ensure_ascii=False)}"
