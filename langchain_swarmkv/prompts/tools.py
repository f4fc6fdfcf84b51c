"""Tools as a model is told of them, and which of them an answer must call.

A tool is kept as OpenAI's function dict, which chat templates read: `{"type": "function",
"function": {"name", "description", "parameters"}}`, with JSON schema as parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from langchain_core.tools import BaseTool
from langchain_core.tools.base import create_schema_from_function
from langchain_core.utils.function_calling import convert_to_openai_tool
from typing_extensions import is_typeddict

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.plain_json import plain_json
from langchain_swarmkv.prompts.schema import is_recursive, output_schema

__all__ = [
    "Tool",
    "ToolChoice",
    "ToolLike",
    "Tools",
    "map_tool",
    "openai_tools",
    "tool_choice",
]

ToolLike: TypeAlias = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
Tool: TypeAlias = dict[str, Any]

_TYPE_NAMES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_FIXED_KEYS = frozenset({"name", "description", "parameters", "properties", "required", "type"})
_MODES = ("auto", "none", "any", "required")
_NAME = re.compile(r"[\w.:/-]+( [\w.:/-]+)*")
_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolChoice:
    """Whether an answer calls tools.

    `mode` is "auto" (as the model likes), "none" or "required"; with "required", `name` may say
    which tool.
    """

    mode: Literal["auto", "none", "required"]
    name: str | None = None


@dataclass(frozen=True)
class Tools:
    """All that one call says of tools."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice("auto")
    parallel: bool | None = None
    """Whether one answer may hold several calls; None: if it need not hold any."""

    @property
    def offered(self) -> list[Tool]:
        """The tools that the prompt tells of."""
        return list(self.tools)

    @property
    def callable(self) -> list[Tool]:
        """The tools that the answer may call."""
        if self.choice.mode == "none":
            return []
        name = self.choice.name
        return [t for t in self.tools if name is None or t["function"]["name"] == name]

    @property
    def is_single(self) -> bool:
        """Whether one call at most is allowed.

        Models that are made to call, and were not trained to, do not know when to stop.
        """
        if self.choice.name is not None:
            return True
        return self.choice.mode == "required" if self.parallel is None else not self.parallel

    @property
    def is_constrained(self) -> bool:
        """Whether calls are held to the tools' schemas: unless one was bound with strict=False."""
        return all(tool["function"].get("strict") is not False for tool in self.callable)


def openai_tools(tools: Sequence[ToolLike], *, strict: bool | None = None) -> list[Tool]:
    """Whatever LangChain takes as tools, as OpenAI's dicts.

    Raises:
        ConfigurationError: one is no function tool, or two different ones have one name.
    """
    try:
        given = list(tools)
    except TypeError:
        raise ConfigurationError(f"tools={tools!r}: give a list of tools.") from None
    by_name: dict[str, Tool] = {}
    for converted in (_openai_tool(tool, strict) for tool in given):
        name = converted["function"]["name"]
        known = by_name.setdefault(name, converted)
        if _held(known) != _held(converted):
            raise ConfigurationError(f"Two tools are named {name!r}; give each its own name.")
    return list(by_name.values())


def _held(tool: Tool) -> Any:
    """What calls are held to, without the titles that pydantic writes and LangChain drops."""
    return _without_titles(tool["function"]["parameters"])


def _without_titles(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {
            key: _without_titles(value)
            for key, value in part.items()
            if key != "title" or not isinstance(value, str)
        }
    return [_without_titles(item) for item in part] if isinstance(part, (list, tuple)) else part


def _openai_tool(tool: ToolLike, strict: bool | None) -> Tool:
    converted = _converted(tool)
    _check_runs_here(tool, converted)
    function = converted.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not name or not isinstance(name, str):
        raise ConfigurationError(f"A tool needs a function with a name: {tool!r}.")
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"The tool name {name!r} could not be told from the markup of a call; use letters, "
            "digits, '_', '-', '.', ':', '/' and single spaces."
        )
    parameters = _whole_parameters(tool) or function.get("parameters") or _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise ConfigurationError(f"The parameters of the tool {name!r} are no JSON schema.")
    description = function.get("description") or ""
    function = {**function, "description": description, "parameters": parameters}
    function = plain_json(function, f"The tool {name!r}")
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def _converted(tool: ToolLike) -> Tool:
    if isinstance(tool, type) and is_typeddict(tool):
        # LangChain's conversion takes neither NotRequired nor recursion, nor a missing docstring.
        found = output_schema(tool)
        function = {"name": found.name, "description": found.description}
        return {
            "type": "function",
            "function": {**function, "parameters": _bare(found.json_schema)},
        }
    try:
        return convert_to_openai_tool(tool)
    except (TypeError, ValueError, AttributeError, RecursionError, KeyError) as error:
        schema = tool.args_schema if isinstance(tool, BaseTool) else None
        if isinstance(tool, BaseTool) and isinstance(schema, Mapping):
            # LangChain's conversion follows references, and gives up at one that leads nowhere.
            told = {"name": tool.name, "description": tool.description, "parameters": schema}
            return {"type": "function", "function": told}
        raise ConfigurationError(f"{tool!r} cannot be made a tool: {error}") from error


def _check_runs_here(tool: ToolLike, converted: Tool) -> None:
    kind = converted.get("type")
    if isinstance(tool, Mapping) and "input_schema" not in tool:
        # The conversion makes functions of some providers' tools, too.
        given = tool.get("type", "object")
        kind = kind if given == "object" else given
    if kind != "function":
        raise ConfigurationError(
            f"A tool of type {kind!r} runs at a provider; a local model takes "
            "function tools: pydantic classes, functions, LangChain tools or their dicts."
        )


def _whole_parameters(tool: ToolLike) -> dict[str, Any] | None:
    """The parameters' schema where LangChain's own conversion cuts recursion short."""
    model: Any = tool
    if isinstance(tool, Mapping) or is_typeddict(tool):
        return None
    if isinstance(tool, BaseTool):
        model = tool.tool_call_schema
    elif not isinstance(tool, type):
        model = create_schema_from_function(
            "parameters",
            tool,
            parse_docstring=True,
            error_on_invalid_docstring=False,
            include_injected=False,
        )
    schema = output_schema(model).json_schema
    return _bare(schema) if is_recursive(schema) else None


def _bare(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with its properties at the top, where templates read them, and without a title."""
    if "$ref" in schema:
        definitions = schema.get("$defs") or schema["definitions"]
        schema = {**definitions[schema["$ref"].rsplit("/", 1)[-1]], **schema}
    return {k: v for k, v in schema.items() if k not in ("$ref", "title", "description")}


def map_tool(tool: Tool, change: Callable[[str], str]) -> Tool:
    """A copy in which every string that came from outside is changed."""
    return {**tool, "function": _map_strings(tool["function"], change)}


def _map_strings(value: Any, change: Callable[[str], str], key: object = None) -> Any:
    if isinstance(value, str):
        # Templates compare the types' names.
        return value if key == "type" and value in _TYPE_NAMES else change(value)
    if isinstance(value, Mapping):
        return {
            k if k in _FIXED_KEYS else change(k): _map_strings(v, change, k)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change, key) for item in value]
    return value


def tool_choice(given: object, tools: Sequence[Tool]) -> ToolChoice:
    """What LangChain's and OpenAI's ways to choose mean.

    None, False and "auto"; "none"; "any", "required" and True; a tool's name;
    `{"type": "function", "function": {"name": ...}}`, `{"type": "tool", "name": ...}`,
    `{"type": "auto"}` and so on.

    Raises:
        ConfigurationError: no such tool, or none at all to require.
    """
    choice = _read_choice(given)
    names = [tool["function"]["name"] for tool in tools]
    if choice.name is not None and choice.name not in names:
        raise ConfigurationError(
            f"tool_choice names {choice.name!r}, but the tools are {', '.join(names) or 'none'}.",
            tool_choice=choice.name,
        )
    if choice.mode == "required" and not names:
        raise ConfigurationError("tool_choice requires a call, but there are no tools.")
    return choice


def _read_choice(given: object) -> ToolChoice:
    if isinstance(given, Mapping):
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else given.get("name")
        if isinstance(name, str):
            return ToolChoice("required", name)
        given = given["type"] if given.get("type") in _MODES else given
    if given is None or given is False or given == "auto":
        return ToolChoice("auto")
    if given is True or given in ("any", "required"):
        return ToolChoice("required")
    if given == "none":
        return ToolChoice("none")
    if not isinstance(given, str):
        raise ConfigurationError(
            f"tool_choice={given!r}: use None, 'auto', 'none', 'any', 'required', a tool's name, "
            "or OpenAI's dict."
        )
    return ToolChoice("required", given)
