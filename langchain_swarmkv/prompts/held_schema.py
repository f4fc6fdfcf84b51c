"""What decoding is held to of a JSON schema: all of it, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from langchain_swarmkv.errors import ConfigurationError

__all__ = ["check_schema", "held_schema"]

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Of pydantic's own; they say what a string is for, and every string is one.
_FORMATS_OF_ANY_STRING = frozenset({"password", "binary", "path", "file-path", "directory-path"})

# Where a schema holds schemas: one, a list of them, or one for each key.
_ONE = frozenset({"additionalProperties", "items", "not", "contains", "propertyNames", "if"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})

_Schema = dict[str, Any]


def held_schema(schema: Mapping[str, Any]) -> _Schema:
    """The schema as llguidance is given it.

    Objects get no properties but their own, unless they say so: models like to add some, and JSON
    schema allows it by default.
    """
    is_closed = not any(map(_is_combined, _all_schemas(schema)))
    return {**_changed(schema, _closed if is_closed else _plain), "x-guidance": _STYLE}


def _is_combined(part: Mapping[str, Any]) -> bool:
    """Whether the properties of one object are told in several places."""
    if len(part.get("allOf") or ()) > 1:
        return True
    return "properties" in part and not part.keys().isdisjoint({"$ref", "allOf", "anyOf", "oneOf"})


def _plain(part: _Schema) -> _Schema:
    is_any = part.get("type") == "string" and str(part.get("format")) in _FORMATS_OF_ANY_STRING
    return {k: v for k, v in part.items() if k != "format"} if is_any else part


def _closed(part: _Schema) -> _Schema:
    held = _plain(part)
    return {"additionalProperties": False, **held} if "properties" in held else held


def _changed(schema: Any, change: Callable[[_Schema], _Schema]) -> Any:
    """The schema with all that are in it changed, innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    copy: _Schema = {}
    for key, value in schema.items():
        if key in _ONE:
            copy[key] = _changed(value, change)
        elif key in _LISTS and isinstance(value, (list, tuple)):
            copy[key] = [_changed(item, change) for item in value]
        elif key in _MAPS and isinstance(value, Mapping):
            copy[key] = {name: _changed(item, change) for name, item in value.items()}
        else:
            copy[key] = value
    return change(copy)


def _all_schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []

    def keep(part: _Schema) -> _Schema:
        found.append(part)
        return part

    _changed(schema, keep)
    return iter(found)


def check_schema(schema: Mapping[str, Any], what: str) -> None:
    """Refuse what decoding cannot be held to.

    Raises:
        ConfigurationError: naming the feature.
    """
    try:
        held_schema(schema)
    except RecursionError:
        raise ConfigurationError(f"{what} is nested too deeply.") from None
