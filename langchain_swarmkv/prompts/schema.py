"""Schemas of answers: from what users give to JSON schemas, and from JSON back to objects."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel, PydanticUserError, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import DecimalSchema
from typing_extensions import is_typeddict

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.held_schema import check_schema
from langchain_swarmkv.prompts.json_patterns import decimal_digits

__all__ = ["OutputSchema", "is_recursive", "output_schema"]

_DOC_OF_DICT = inspect.getdoc(dict)


class _JsonSchema(GenerateJsonSchema):
    """Pydantic's, but for decimals, of which it tells "a number or a string", whatever is in it."""

    def decimal_schema(self, schema: DecimalSchema) -> dict[str, Any]:
        """A number where it has bounds, digits where they are counted, else either."""
        found: dict[str, Any] = super().decimal_schema(schema)
        branches: Sequence[dict[str, Any]] = found.get("anyOf", ())
        number = next((each for each in branches if each.get("type") == "number"), None)
        text = next((each for each in branches if each.get("type") == "string"), None)
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        pattern = decimal_digits(None if digits is None else digits - (places or 0), places or 0)
        if digits is places is None:
            pattern = decimal_digits(None, None)
        if number is None or text is None or pattern is None:
            return found
        text["pattern"] = pattern
        if any(schema.get(key) is not None for key in ("gt", "ge", "lt", "le", "multiple_of")):
            return number
        return found if digits is places is None else text


@dataclass(frozen=True)
class OutputSchema:
    """What an answer must be."""

    name: str
    description: str
    json_schema: dict[str, Any]
    validate: Callable[[str], Any]
    """Makes the object that the user gets from JSON; raises ValueError."""
    is_dict: bool
    """Whether users get a plain dict, of which parts can be shown while it grows."""
    shown: dict[str, Any]
    """The schema as LangChain shows it in traces."""

    @property
    def can_be_held(self) -> bool:
        """Whether decoding can be held to all of it."""
        try:
            check_schema(self.json_schema, self.name)
        except ConfigurationError:
            return False
        return True

    def call_options(self, method: str, strict: bool | None = None) -> dict[str, Any]:
        """The options of a call that asks for it.

        Raises:
            ConfigurationError: the method only makes objects, and it is none.
        """
        if method != "json_schema" and self.json_schema.get("type", "object") != "object":
            raise ConfigurationError(
                f"method={method!r} makes objects, and {self.name!r} is of type "
                f"{self.json_schema['type']!r}. Use method='json_schema'."
            )
        if method == "json_mode":
            held = {"schema": self.json_schema} if strict is not False and self.can_be_held else {}
            return {"response_format": {"type": "json_object", **held}}
        flag = {} if strict is None else {"strict": strict}
        if method == "json_schema":
            body = {"name": self.name, "schema": self.json_schema, **flag}
            return {"response_format": {"type": "json_schema", "json_schema": body}}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.json_schema,
            **flag,
        }
        return {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": self.name,
            "parallel_tool_calls": False,
        }


_BODIES = ("parameters", "schema", "input_schema")
"""Where the schema stands in an OpenAI function, in its response format, in an Anthropic tool."""
_KEYWORDS = frozenset(
    {"$ref", "allOf", "anyOf", "const", "enum", "oneOf", "properties", "title", "type"}
)
"""One of these at least stands in any schema that says something."""


def output_schema(schema: Mapping[str, Any] | type) -> OutputSchema:
    """Read a pydantic class (v2 or v1), a TypedDict, a dataclass, or a dict.

    A dict is a JSON schema, or holds one as OpenAI's functions, tools and response formats do, or
    Anthropic's tools.

    Raises:
        ConfigurationError: it is none of these.
    """
    try:
        found = _read(schema)
        json.dumps(found.json_schema)
    except RecursionError:
        raise ConfigurationError("The schema is nested too deeply.") from None
    except (PydanticUserError, TypeError, ValueError, NameError) as error:
        what = schema.__name__ if isinstance(schema, type) else f"A {type(schema).__name__}"
        raise ConfigurationError(f"{what} makes no JSON schema: {error}") from error
    return replace(
        found, name=re.sub(r"[^a-zA-Z0-9_-]", "_", found.name), shown=_shown(schema, found)
    )


def _shown(schema: Mapping[str, Any] | type, found: OutputSchema) -> dict[str, Any]:
    try:
        return convert_to_json_schema(schema)  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError, RecursionError):
        return found.json_schema


def _read(schema: Mapping[str, Any] | type) -> OutputSchema:
    if isinstance(schema, Mapping):
        return _from_dict(schema)
    if not isinstance(schema, type):
        raise TypeError("use a pydantic class, a TypedDict, a dataclass or a JSON schema")
    if issubclass(schema, BaseModel):
        found = schema.model_json_schema(schema_generator=_JsonSchema)
        return _of(schema, found, schema.model_validate_json, is_dict=False)
    if hasattr(schema, "__fields__") and hasattr(schema, "parse_obj"):  # pydantic.v1
        version_1: Any = schema
        return _of(schema, version_1.schema(), version_1.parse_raw, is_dict=False)
    if dataclasses.is_dataclass(schema):
        adapter = TypeAdapter[Any](schema)
        found = adapter.json_schema(schema_generator=_JsonSchema)
        return _of(schema, found, adapter.validate_json, is_dict=False)
    if is_typeddict(schema):
        return _of(schema, _typed_dict_schema(schema), _checked_dict(schema), is_dict=True)
    raise TypeError("use a pydantic class, a TypedDict, a dataclass or a JSON schema")


def _of(
    schema: type, json_schema: dict[str, Any], validate: Callable[[str], Any], *, is_dict: bool
) -> OutputSchema:
    description = json_schema.get("description") or ""
    return OutputSchema(schema.__name__, description, json_schema, validate, is_dict, {})


def _typed_dict_schema(schema: type) -> dict[str, Any]:
    try:
        whole = TypeAdapter[Any](schema).json_schema(schema_generator=_JsonSchema)
    except PydanticUserError as refusal:  # typing.TypedDict before Python 3.12
        try:
            return _langchain_schema(schema)
        except (TypeError, RecursionError):
            raise refusal from None
    if is_recursive(whole):
        return whole
    try:
        # LangChain reads descriptions and defaults from Annotated[type, default, "description"].
        return _langchain_schema(schema)
    except TypeError:
        return whole  # it does not know NotRequired


def _langchain_schema(schema: type) -> dict[str, Any]:
    found: dict[str, Any] = _without_doc_of_dict(convert_to_json_schema(schema))
    return found


def _without_doc_of_dict(part: Any) -> Any:
    """LangChain describes a class without a docstring by that of the built-in dict."""
    if isinstance(part, dict):
        return {k: _without_doc_of_dict(v) for k, v in part.items() if v != _DOC_OF_DICT}
    return [_without_doc_of_dict(item) for item in part] if isinstance(part, list) else part


def _checked_dict(schema: type) -> Callable[[str], Any]:
    try:
        adapter = TypeAdapter[Any](schema)
    except PydanticUserError:  # typing.TypedDict before Python 3.12
        return json.loads

    def validate(text: str) -> Any:
        adapter.validate_json(text)
        return json.loads(text)

    return validate


def _from_dict(schema: Mapping[str, Any]) -> OutputSchema:
    inner = schema.get(str(schema.get("type")))
    named = inner if isinstance(inner, Mapping) and "name" in inner else schema
    body = next((named[key] for key in _BODIES if "name" in named and key in named), None)
    if isinstance(body, Mapping):
        name, body = str(named["name"]), dict(body)
        description = str(named.get("description") or "")
    else:
        body = dict(schema)
        if body and body.keys().isdisjoint(_KEYWORDS):
            raise TypeError("it has no keyword of JSON schema")
        name = str(body.get("title") or "answer")
        description = str(body.get("description") or "")
    return OutputSchema(name, description, body, json.loads, is_dict=True, shown={})


def is_recursive(schema: Mapping[str, Any]) -> bool:
    """Whether a definition of the schema refers to itself, directly or by way of others."""
    definitions = schema.get("$defs") or schema.get("definitions") or {}
    if not isinstance(definitions, Mapping):
        return False
    references = {name: _references(body) for name, body in definitions.items()}
    references[""] = _references({k: v for k, v in schema.items() if v is not definitions})
    return any(_reaches(references, name, name) for name in references)


def _references(body: Any) -> set[str]:
    """Names of the definitions that a part refers to; "" is the whole schema."""
    found, to_read = set(), [body]
    while to_read:
        part = to_read.pop()
        if isinstance(part, Mapping):
            reference = part.get("$ref")
            if isinstance(reference, str):
                found.add("" if reference == "#" else reference.rsplit("/", 1)[-1])
            to_read += part.values()
        elif isinstance(part, (list, tuple)):
            to_read += part
    return found


def _reaches(references: Mapping[str, set[str]], start: str, goal: str) -> bool:
    seen, to_visit = set(), [start]
    while to_visit:
        for name in references.get(to_visit.pop(), ()):
            if name == goal:
                return True
            if name not in seen:
                seen.add(name)
                to_visit.append(name)
    return False
