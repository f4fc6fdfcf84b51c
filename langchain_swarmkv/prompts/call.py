"""What one call asks for beyond its messages: tools, a schema, and what follows from them.

options -> Call -> Ask (for the prompt), guide (for decoding), parser (for the answer)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.answer_parser import AnswerParser
from langchain_swarmkv.prompts.encoder import AnswerStyle, Ask, Thinking
from langchain_swarmkv.prompts.guides import AnswerRules, answer_guide
from langchain_swarmkv.prompts.held_schema import check_schema
from langchain_swarmkv.prompts.plain_json import plain_json
from langchain_swarmkv.prompts.tool_schema import Check, check_strict, tool_schema
from langchain_swarmkv.prompts.tools import Tools, openai_tools, tool_choice

__all__ = ["CALL_OPTIONS", "Call"]

CALL_OPTIONS = ("parallel_tool_calls", "response_format", "tool_choice", "tools")

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Call:
    """The tools and the schema of one call."""

    tools: Tools | None
    json_schema: Mapping[str, Any] | None
    """What the answer is held to, where it is no tool call; None: any text."""
    instructions: str
    """What the prompt says of the schema."""

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Call:
        """Check the options of a call, spelled as OpenAI's.

        Raises:
            ConfigurationError: an option is wrong, or a tool is chosen that there is not.
        """
        return cls(_tools(options), *_schema(options.get("response_format")))

    def check(self) -> None:
        """Refuse, before there is a model, what decoding cannot be held to.

        What it cannot be held to of a tool's schema is logged, unless the tool is strict.

        Raises:
            ConfigurationError: naming the feature.
        """
        if self.json_schema is not None:
            check_schema(self.json_schema, "The schema")
        if self.tools is not None and self.tools.is_constrained:
            for tool in self.tools.callable:
                if tool["function"].get("strict") is True:
                    check_strict(tool["function"])
                else:
                    tool_schema(tool["function"])

    def ask(self, keep_reasoning: bool) -> Ask:
        """What the prompt must say."""
        tools = self.tools.offered if self.tools else ()
        return Ask(tools, self.instructions, keep_reasoning)

    def guide(self, style: AnswerStyle, thinking: Thinking) -> str | None:
        """The grammar of the answer; None: it is free."""
        if self.tools is None and self.json_schema is None:
            return None
        rules = AnswerRules(
            tools=self.tools,
            calls=style.calls,
            json_schema=self.json_schema,
            reasoning=None if thinking is Thinking.OFF else style.reasoning,
            starts_in_reasoning=thinking is Thinking.BEGUN,
        )
        return answer_guide(rules, style.marks.token_id)

    def parser(self, style: AnswerStyle, thinking: Thinking) -> AnswerParser:
        """What takes the answer apart."""
        return AnswerParser(
            calls=style.calls if self.tools and self.tools.callable else None,
            reasoning=None if thinking is Thinking.OFF else style.reasoning,
            starts_in_reasoning=thinking is Thinking.BEGUN,
            checks=self._checks(),
        )

    def _checks(self) -> dict[str, Check]:
        """Of the tools whose calls are not held to all of their schema."""
        if self.tools is None or not self.tools.is_constrained:
            return {}
        functions = [tool["function"] for tool in self.tools.callable]
        checks = {function["name"]: tool_schema(function).check for function in functions}
        return {name: check for name, check in checks.items() if check is not None}


def _tools(options: Mapping[str, Any]) -> Tools | None:
    given = options.get("tools")
    if not given:
        # A choice without tools is checked, too.
        tool_choice(options.get("tool_choice"), ())
        return None
    tools = tuple(openai_tools(given))
    choice = tool_choice(options.get("tool_choice"), tools)
    parallel = options.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise ConfigurationError(f"parallel_tool_calls={parallel!r}: use True, False or None.")
    return Tools(tools, choice, parallel)


def _schema(response_format: object) -> tuple[Mapping[str, Any] | None, str]:
    """What holds the answer, and what the prompt says of it."""
    if response_format is None:
        return None, ""
    given = plain_json(response_format, "response_format")
    given = given if isinstance(given, Mapping) else {}
    kind = given.get("type")
    if kind == "text":
        return None, ""
    if kind == "json_object" and isinstance(given.get("schema", _ANY_OBJECT), Mapping):
        return given.get("schema", _ANY_OBJECT), ""
    body = given["json_schema"] if isinstance(given.get("json_schema"), Mapping) else {}
    schema = body.get("schema")
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise ConfigurationError(
            f"response_format={response_format!r}: use {{'type': 'json_schema', 'json_schema': "
            "{'name': ..., 'schema': {...}}}, {'type': 'json_object'}, with a 'schema' or without, "
            "or {'type': 'text'}; or "
            "with_structured_output, which also parses the answer."
        )
    text = json.dumps(schema, ensure_ascii=False)
    instructions = f"Answer with JSON alone, as this JSON schema describes it:\n{text}"
    return (None if body.get("strict") is False else schema), instructions
