r"""What decoding is held to of a JSON schema: all of it, or it is refused.

llguidance refuses most of what it does not know by itself. What it would pass over in silence, or
read in another way than JSON schema and Python do, is refused here, or said in an exact way:

    objects    get no properties but their own, unless the schema says so: models like to add some
    formats    dates and times become patterns that know no 30th of February; unknown ones refused
    patterns   what dialects of regular expressions read differently (`\S`, `[a&&b]`) refused
    numbers    beyond 2^53, where neighbours look alike, refused
    keys       minProperties > 1 refused, as a key may come twice
    contents   contentSchema, contentEncoding and contentMediaType refused
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from langchain_swarmkv.engine.guide import check_guide
from langchain_swarmkv.errors import ConfigurationError, GrammarError
from langchain_swarmkv.prompts.json_patterns import DATE, DATE_TIME, TIME

__all__ = ["check_schema", "held_schema"]

_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # Without \u escapes one key has one spelling.
    "json_allowed_escapes": 'nrbtf\\"',
}
_PATTERNS = {"date": DATE, "time": TIME, "date-time": DATE_TIME}
_FORMATS = frozenset({*_PATTERNS, "duration", "email", "ipv4", "ipv6", "uri", "uuid"})
# Of pydantic's own; they say what a string is for, and every string is one.
_FORMATS_OF_ANY_STRING = frozenset({"password", "binary", "path", "file-path", "directory-path"})
_UNHELD = ("contentSchema", "contentEncoding", "contentMediaType")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const")
_MAX_EXACT = 2**53
# What dialects draw differently: classes of characters, where inverted; and what only some have.
_UNCLEAR = re.compile(
    r"\\[DSWbBzZAGpPkQE<>]|\\x\{|\\u\{|\(\?(?!:)|\[\^[^\]]*\\[dsw]|\[[^\]\\]*\[|&&|--|~~"
)

# Where a schema holds schemas: one, a list of them, or one for each key.
_ONE = frozenset({"additionalProperties", "items", "not", "contains", "propertyNames", "if"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})

_Schema = dict[str, Any]


def held_schema(schema: Mapping[str, Any]) -> _Schema:
    """The schema as llguidance is given it."""
    is_closed = not any(map(_is_combined, _all_schemas(schema)))
    return {**_changed(schema, _closed if is_closed else _exact), "x-guidance": _STYLE}


def _is_combined(part: Mapping[str, Any]) -> bool:
    """Whether the properties of one object are told in several places."""
    if len(part.get("allOf") or ()) > 1:
        return True
    return "properties" in part and not part.keys().isdisjoint({"$ref", "allOf", "anyOf", "oneOf"})


def _closed(part: _Schema) -> _Schema:
    held = _exact(part)
    return {"additionalProperties": False, **held} if "properties" in held else held


def _exact(part: _Schema) -> _Schema:
    held = {key: value for key, value in part.items() if (key, value) != ("uniqueItems", False)}
    name = held.get("format")
    if isinstance(name, str) and (name in _PATTERNS or name in _FORMATS_OF_ANY_STRING):
        del held["format"]
        if name in _PATTERNS:
            held["pattern"] = f"^{_PATTERNS[name]}$"
    return held


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


def _all_schemas(schema: Any) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []

    def keep(part: _Schema) -> _Schema:
        found.append(part)
        return part

    _changed(schema, keep)
    return found


def check_schema(schema: Mapping[str, Any], what: str) -> None:
    """Refuse what decoding cannot be held to.

    Args:
        schema: as the user gave it.
        what: names it in the message.

    Raises:
        ConfigurationError: naming the feature.
    """
    try:
        for part in _all_schemas(schema):
            for feature in _unheld(part):
                raise ConfigurationError(
                    f"{what} has {feature}, which decoding cannot be held to. Leave it out and "
                    "check it afterwards, or use strict=False.",
                    feature=feature,
                )
        guide = f"start: %json {json.dumps(held_schema(schema), ensure_ascii=False)}\n"
        check_guide(guide)
    except RecursionError:
        raise ConfigurationError(f"{what} is nested too deeply.") from None
    except GrammarError as error:
        raise ConfigurationError(
            f"{what} cannot be held to: {error} Change it, or use strict=False."
        ) from error


def _unheld(part: Mapping[str, Any]) -> Iterator[str]:
    """What llguidance would pass over, or read otherwise."""
    for key in _UNHELD:
        if key in part:
            yield key
    name, pattern = part.get("format"), part.get("pattern")
    if isinstance(name, str) and name not in _FORMATS | _FORMATS_OF_ANY_STRING:
        yield f"the format {name!r}"
    if name in _PATTERNS and (pattern is not None or {"minLength", "maxLength"} & part.keys()):
        yield f"the format {name!r} with a pattern or a length"
    patterns = [pattern, *(part.get("patternProperties") or ())]
    for text in patterns:
        unclear = _UNCLEAR.search(text) if isinstance(text, str) else None
        if unclear:
            yield f"the pattern {text!r} with {unclear.group()!r}"
    if isinstance(part.get("minProperties"), int) and part["minProperties"] > 1:
        yield "minProperties"
    yield from _unheld_numbers(part)


def _unheld_numbers(part: Mapping[str, Any]) -> Iterator[str]:
    values = [(key, part[key]) for key in _NUMBERS if key in part]
    values += [("enum", value) for value in part.get("enum") or ()]
    for key, value in values:
        if isinstance(value, (int, float)) and abs(value) > _MAX_EXACT:
            yield f"{key} with a number beyond 2^53"
    lower, upper = part.get("exclusiveMinimum"), part.get("exclusiveMaximum")
    width = _width(part)
    if part.get("type") != "integer" and (lower, upper) != (None, None) and width < 1:
        yield "an exclusive bound less than 1 from the other bound"


def _width(part: Mapping[str, Any]) -> float:
    lowest = max(float(part.get(key, "-inf")) for key in ("minimum", "exclusiveMinimum"))
    highest = min(float(part.get(key, "inf")) for key in ("maximum", "exclusiveMaximum"))
    return highest - lowest
