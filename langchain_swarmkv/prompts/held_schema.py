r"""What decoding is held to of a JSON schema: all of it, or it is refused.

llguidance refuses most of what it does not know by itself. What it would pass over in silence, or
read in another way than JSON schema and Python do, is refused here, or said in an exact way:

    objects    get no properties but their own, unless the schema says so: models like to add some
    unions     with a discriminator have it always, so that they can be told apart
    formats    dates, times and durations become patterns of those that there are; unknown ones
               refused
    patterns   what dialects of regular expressions read differently (`\S`, `[a&&b]`) refused
    numbers    beyond 2^53, where neighbours look alike, refused
    keys       minProperties > 1 refused, as a key may come twice
    contents   contentSchema, contentEncoding and contentMediaType refused
    drafts     `$schema` is left out: of a keyword that its draft does not know, nothing would be
               held; references to where no schemas are kept refused

A multiple of a decimal fraction is one in decimal numbers, though not always in floats (9.77 of
0.01), and digits beyond a float's may hide how near a number is to an exclusive bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from langchain_swarmkv.engine.guide import check_guide
from langchain_swarmkv.errors import ConfigurationError, GrammarError
from langchain_swarmkv.prompts.json_patterns import (
    DATE,
    DATE_TIME,
    DURATION,
    TIME,
    unclear_part,
)
from langchain_swarmkv.scheduling.signals import is_loop_thread

__all__ = ["check_schema", "held_schema"]

_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # Without \u escapes one key has one spelling.
    "json_allowed_escapes": 'nrbtf\\"',
}
_PATTERNS = {"date": DATE, "time": TIME, "date-time": DATE_TIME, "duration": DURATION}
_FORMATS = frozenset({*_PATTERNS, "email", "ipv4", "ipv6", "uri", "uuid"})
# Of pydantic's own; they say what a string is for, and every string is one.
_FORMATS_OF_ANY_STRING = frozenset({"password", "binary", "path", "file-path", "directory-path"})
_UNHELD = (
    *("contentSchema", "contentEncoding", "contentMediaType", "dependentRequired"),
    *("dependentSchemas", "if", "not", "propertyNames", "unevaluatedItems"),
    *("unevaluatedProperties", "uniqueItems"),
)
_NUMBERS = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "const",
    "enum",
)
_MAX_EXACT = 2**53
# What JSON writes as \u.... alone, and llguidance does not write here.
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")

# Where a schema holds schemas: one or a list of them, or one for each key.
_SCHEMAS = frozenset(
    {
        *("additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "if", "items"),
        *("not", "oneOf", "prefixItems", "propertyNames"),
    }
)
_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
# Where it tells the properties of an object.
_OWN = frozenset({"additionalProperties", "patternProperties", "properties", "required"})
_OTHERS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})

_Schema = dict[str, Any]


def held_schema(schema: Mapping[str, Any], what: str = "The schema") -> _Schema:
    """The schema as llguidance is given it.

    Args:
        schema: as the user gave it.
        what: names it in messages.

    Raises:
        ConfigurationError: decoding cannot be held to it, for the feature that is named.
    """
    try:
        parts = _all_schemas(schema)
        for feature in (feature for part in parts for feature in _unheld(part)):
            raise ConfigurationError(
                f"{what} has {feature}, which decoding cannot be held to. Leave it out and check "
                "it afterwards, or use strict=False.",
                feature=feature,
            )
        return {**_tagged(_exact_schema(schema, parts), parts), "x-guidance": _STYLE}
    except RecursionError:
        raise ConfigurationError(f"{what} is nested too deeply.") from None
    except ConfigurationError:
        raise
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{what} is no JSON schema: {error}.") from error


def check_schema(schema: Mapping[str, Any], what: str) -> None:
    """Refuse what decoding cannot be held to; args and errors as of `held_schema`.

    On an event loop, which must not stand still, what only compiling shows is left to the call.
    """
    held = held_schema(schema, what)
    if is_loop_thread():
        return
    try:
        check_guide(f"start: %json {json.dumps(held, ensure_ascii=False)}\n")
    except (TypeError, RecursionError) as error:
        raise ConfigurationError(f"{what} is no JSON: {error}.") from error
    except GrammarError as error:
        raise ConfigurationError(
            f"{what} cannot be held to: {error} Change it, or use strict=False."
        ) from error


def _exact_schema(schema: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> _Schema:
    is_closed = not any(map(_is_combined, parts))
    held: _Schema = _changed(schema, lambda p: _closed(_exact(p)) if is_closed else _exact(p))
    return held


def _tagged(held: _Schema, parts: list[Mapping[str, Any]]) -> _Schema:
    """The schema with the tags of unions required, though pydantic lets them have a default."""
    tags = dict(pair for part in parts for pair in _discriminators(part))
    for kind in ("$defs", "definitions"):
        for name, part in held.get(kind, {}).items():
            tag = tags.get(f"#/{kind}/{name}")
            if tag is not None and tag in part.get("properties", ()):
                part["required"] = sorted({*part.get("required", ()), tag})
    return held


def _discriminators(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The references of a tagged union, each with the name of its tag (as OpenAPI has it)."""
    discriminator = part.get("discriminator")
    if isinstance(discriminator, Mapping) and isinstance(discriminator.get("propertyName"), str):
        for branch in part.get("oneOf") or ():
            if isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str):
                yield branch["$ref"], discriminator["propertyName"]


def _is_combined(part: Mapping[str, Any]) -> bool:
    """Whether the properties of one object are told in several places."""
    num_places = len(_OTHERS & part.keys()) + (not part.keys().isdisjoint(_OWN))
    return num_places > 1 or len(part.get("allOf") or ()) > 1


def _closed(part: _Schema) -> _Schema:
    return {"additionalProperties": False, **part} if "properties" in part else part


def _exact(part: _Schema) -> _Schema:
    held = {key: value for key, value in part.items() if (key, value) != ("uniqueItems", False)}
    held.pop("$schema", None)
    # A tuple as old drafts have it; beside one of today's, llguidance would forget the latter.
    rest = held.pop("additionalItems", True)
    if isinstance(held.get("items"), list):
        held["prefixItems"] = held["items"]
        held["items"] = rest
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
        if key in _SCHEMAS and isinstance(value, (list, tuple)):
            copy[key] = [_changed(item, change) for item in value]
        elif key in _SCHEMAS:
            copy[key] = _changed(value, change)
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


def _unheld(part: Mapping[str, Any]) -> Iterator[str]:
    """What llguidance would pass over, or read otherwise."""
    for key in _UNHELD:
        if part.get(key, False) is not False:
            yield key
    fixed = [part.get("const"), *(part.get("enum") or ())]
    if any(isinstance(text, str) and _UNWRITABLE.search(text) for text in fixed):
        yield "a control character in const or enum"
    if not isinstance(part.get("properties", {}), Mapping):
        yield "`properties` that are no mapping"
    if not isinstance(part.get("required", []), (list, tuple)):
        yield "a `required` that is no list"
    name, pattern = part.get("format"), part.get("pattern")
    if name is not None and name not in _FORMATS | _FORMATS_OF_ANY_STRING:
        yield f"the format {name!r}"
    if name in _PATTERNS and (pattern is not None or {"minLength", "maxLength"} & part.keys()):
        yield f"the format {name!r} with a pattern or a length"
    for text in (pattern, *(part.get("patternProperties") or ())):
        unclear = unclear_part(text) if isinstance(text, str) else None
        if unclear:
            yield f"the pattern {text!r}, from {unclear!r} on"
    if isinstance(part.get("minProperties"), int) and part["minProperties"] > 1:
        yield "minProperties"
    if isinstance(part.get("$ref"), str) and not _leads_to_schema(part["$ref"]):
        yield f"the reference {part['$ref']!r} to where no schemas are kept"
    yield from _unheld_numbers(part)


def _leads_to_schema(reference: str) -> bool:
    keys = iter(reference.partition("#")[2].split("/")[1:])
    is_list = False
    for key in keys:
        if key not in _MAPS | _SCHEMAS and not (is_list and key.isdecimal()):
            return False
        is_list = key in _SCHEMAS
        if key in _MAPS:
            next(keys, None)
    return True


def _unheld_numbers(part: Mapping[str, Any]) -> Iterator[str]:
    for key in _NUMBERS:
        if key in part and any(abs(number) > _MAX_EXACT for number in _numbers(part[key])):
            yield f"{key} with a number beyond 2^53"
    lower, upper = part.get("exclusiveMinimum"), part.get("exclusiveMaximum")
    width = _width(part)
    if part.get("type") != "integer" and (lower, upper) != (None, None) and width < 1:
        yield "an exclusive bound less than 1 from the other bound"


def _numbers(value: Any) -> Iterator[float]:
    """All numbers within a JSON value."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)


def _width(part: Mapping[str, Any]) -> float:
    lowest = max(float(part.get(key, "-inf")) for key in ("minimum", "exclusiveMinimum"))
    highest = min(float(part.get(key, "inf")) for key in ("maximum", "exclusiveMaximum"))
    return highest - lowest
