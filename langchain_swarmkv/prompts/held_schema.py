r"""What decoding is held to of a JSON schema: all of it, or it is refused (tools: `tool_schema`).

llguidance refuses most of what it does not know by itself. What it would pass over in silence, or
read in another way than JSON schema and Python do, is refused here, or said in an exact way:

    objects    get no properties but their own, unless the schema says so: models like to add some
    unions     with a discriminator have it always, so that they can be told apart
    formats    dates, times, durations, base64 and the versions of UUIDs become patterns; unknown
               formats refused
    patterns   what dialects of regular expressions read differently (`\S`, `[a&&b]`) refused;
               pydantic's of a `Decimal`, which looks ahead, becomes one that does not
    numbers    beyond 2^53, where neighbours look alike, refused
    keys       minProperties > 1 refused, as a key may come twice
    contents   contentSchema, contentMediaType and contentEncoding refused, base64 aside
    drafts     what older ones and OpenAPI spell otherwise becomes plain (`plain_schema`);
               references to where no schemas are kept refused, and those beside a `$id`

A multiple of a decimal fraction is one in decimal numbers, though not always in floats (9.77 of
0.01), and digits beyond a float's may hide how near a number is to an exclusive bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from langchain_swarmkv.engine.guide import check_guide
from langchain_swarmkv.errors import ConfigurationError, GrammarError
from langchain_swarmkv.prompts.json_patterns import (
    FORMAT_PATTERNS,
    decimal_pattern,
    unclear_part,
)
from langchain_swarmkv.prompts.plain_schema import (
    MAPS,
    SCHEMAS,
    all_parts,
    changed,
    plain_schema,
)
from langchain_swarmkv.scheduling.signals import is_loop_thread

__all__ = ["Unheld", "check_schema", "compile_schema", "exact_schema", "held_schema", "unheld"]

_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # Without \u escapes one key has one spelling.
    "json_allowed_escapes": 'nrbtf\\"',
}
_FORMATS = frozenset({*FORMAT_PATTERNS, "email", "ipv4", "ipv6", "uri", "uuid"})
# Of pydantic's own; they say what a string is for, and every string is one.
_FORMATS_OF_ANY_STRING = frozenset({"password", "binary", "path", "file-path", "directory-path"})
_ENCODINGS = frozenset({"base64", "base64url"})
_UNHELD = (
    *("contains", "contentMediaType", "contentSchema", "dependentRequired", "dependentSchemas"),
    *("else", "if", "maxContains", "minContains", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    *("$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"),
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

# Where a schema tells the properties of an object.
_OWN = frozenset({"additionalProperties", "patternProperties", "properties", "required"})
_OTHERS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
# What may tell more of them, though decoding is not held to it.
_MORE = frozenset({"dependentSchemas", "else", "if", "then", "unevaluatedProperties"})

_Schema = dict[str, Any]


class Unheld(NamedTuple):
    """What decoding cannot be held to."""

    feature: str
    """For messages."""
    keys: tuple[str, ...]
    """The keywords that say it; without them, the schema allows more."""


def held_schema(schema: Mapping[str, Any], what: str = "The schema") -> _Schema:
    """The schema as llguidance is given it.

    Args:
        schema: as the user gave it.
        what: names it in messages.

    Raises:
        ConfigurationError: decoding cannot be held to it, for the feature that is named.
    """
    try:
        plain = plain_schema(schema)
        parts = all_parts(plain)
        for found in (found for part in parts for found in unheld(part)):
            raise ConfigurationError(
                f"{what} has {found.feature}, which decoding cannot be held to. Leave it out and "
                "check it afterwards, or use strict=False.",
                feature=found.feature,
            )
        return exact_schema(plain, parts)
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
        compile_schema(held)
    except (TypeError, RecursionError) as error:
        raise ConfigurationError(f"{what} is no JSON: {error}.") from error
    except GrammarError as error:
        raise ConfigurationError(
            f"{what} cannot be held to: {error} Change it, or use strict=False."
        ) from error


def compile_schema(held: Mapping[str, Any]) -> None:
    """Compile what `exact_schema` made.

    Raises:
        GrammarError: llguidance refuses it, or it is too large.
    """
    check_guide(f"start: %json {json.dumps(held, ensure_ascii=False)}\n")


def exact_schema(plain: _Schema, parts: Sequence[Mapping[str, Any]]) -> _Schema:
    """A schema, free of what is `unheld`, as llguidance is given it.

    Args:
        plain: as `plain_schema` makes it.
        parts: all schemas within it, with what was unheld: it may tell properties.
    """
    is_closed = not any(map(_is_combined, parts))
    held: _Schema = changed(plain, lambda p: _closed(_exact(p)) if is_closed else _exact(p))
    return {**_tagged(held, parts), "x-guidance": _STYLE}


def _tagged(held: _Schema, parts: Sequence[Mapping[str, Any]]) -> _Schema:
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
    is_told_elsewhere = not part.keys().isdisjoint(_MORE)
    return num_places > 1 or len(part.get("allOf") or ()) > 1 or is_told_elsewhere


def _closed(part: _Schema) -> _Schema:
    properties = part.get("properties")
    if properties is None or not set(part.get("required", ())) <= properties.keys():
        return part
    return {"additionalProperties": False, **part}


def _exact(part: _Schema) -> _Schema:
    held = dict(part)
    decimal = decimal_pattern(held["pattern"]) if isinstance(held.get("pattern"), str) else None
    if decimal is not None:
        held["pattern"] = decimal
    name = held.get("format", held.pop("contentEncoding", None))
    held.pop("contentEncoding", None)
    if isinstance(name, str) and (name in FORMAT_PATTERNS or name in _FORMATS_OF_ANY_STRING):
        held.pop("format", None)
        if name in FORMAT_PATTERNS:
            _add_pattern(held, f"^{FORMAT_PATTERNS[name]}$")
    return held


def _add_pattern(held: _Schema, pattern: str) -> None:
    if "pattern" in held:
        held["allOf"] = [*held.get("allOf", ()), {"pattern": pattern}]
    else:
        held["pattern"] = pattern


def unheld(part: Mapping[str, Any]) -> Iterator[Unheld]:
    """What llguidance would pass over in one part of a plain schema, or read otherwise."""
    for key in _UNHELD:
        if key in part:
            yield Unheld(key, (key,))
    for key in ("const", "enum"):
        fixed = part.get(key) if key == "enum" else [part.get(key)]
        if any(isinstance(text, str) and _UNWRITABLE.search(text) for text in fixed or ()):
            yield Unheld("a control character in const or enum", (key,))
    if not isinstance(part.get("properties", {}), Mapping):
        yield Unheld("`properties` that are no mapping", ("properties",))
    if not isinstance(part.get("required", []), (list, tuple)):
        yield Unheld("a `required` that is no list", ("required",))
    yield from _unheld_texts(part)
    if isinstance(part.get("minProperties"), int) and part["minProperties"] > 1:
        yield Unheld("minProperties", ("minProperties",))
    if isinstance(part.get("$ref"), str) and not _leads_to_schema(part["$ref"]):
        yield Unheld(f"the reference {part['$ref']!r} to where no schemas are kept", ("$ref",))
    if "$ref" in part and "$id" in part:
        yield Unheld("a `$id` beside a `$ref`, which drafts read differently", ("$ref",))
    yield from _unheld_numbers(part)


def _unheld_texts(part: Mapping[str, Any]) -> Iterator[Unheld]:
    name, pattern = part.get("format"), part.get("pattern")
    if name is not None and name not in _FORMATS | _FORMATS_OF_ANY_STRING:
        yield Unheld(f"the format {name!r}", ("format",))
    encoding = part.get("contentEncoding")
    if encoding is not None and (encoding not in _ENCODINGS or name not in (None, encoding)):
        yield Unheld("contentEncoding", ("contentEncoding",))
    if isinstance(pattern, str) and decimal_pattern(pattern) is None and unclear_part(pattern):
        yield Unheld(f"the pattern {pattern!r}, from {unclear_part(pattern)!r} on", ("pattern",))
    for text in part.get("patternProperties") or ():
        if isinstance(text, str) and unclear_part(text):
            feature = f"the pattern {text!r}, from {unclear_part(text)!r} on"
            yield Unheld(feature, ("patternProperties",))


def _leads_to_schema(reference: str) -> bool:
    keys = iter(reference.partition("#")[2].split("/")[1:])
    is_list = False
    for key in keys:
        if key not in MAPS | SCHEMAS and not (is_list and key.isdecimal()):
            return False
        is_list = key in SCHEMAS
        if key in MAPS:
            next(keys, None)
    return True


def _unheld_numbers(part: Mapping[str, Any]) -> Iterator[Unheld]:
    for key in _NUMBERS:
        if key in part and any(abs(number) > _MAX_EXACT for number in _numbers(part[key])):
            yield Unheld(f"{key} with a number beyond 2^53", (key,))
    lower, upper = part.get("exclusiveMinimum"), part.get("exclusiveMaximum")
    width = _width(part)
    if part.get("type") != "integer" and (lower, upper) != (None, None) and width < 1:
        feature = "an exclusive bound less than 1 from the other bound"
        yield Unheld(feature, ("exclusiveMinimum", "exclusiveMaximum"))


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
