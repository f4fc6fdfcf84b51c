"""One spelling of what JSON schemas say in several: old drafts, OpenAPI, Kubernetes, Go.

The plain schema is of draft 2020-12 and says what the given one says:

    nothing      a keyword that is null (as Go writes empty lists), `uniqueItems: false`,
                 `not: false`, `propertyNames: {"type": "string"}`
    numbers      `int32`, `uint8` and so on are bounds (OpenAPI), where a bound is exact (up to
                 2^53); all other formats are about strings, and say nothing of a number;
                 `exclusiveMinimum: true` makes the minimum beside it an exclusive one (draft 4)
    objects      `propertyNames` that tells the names or their pattern becomes properties;
                 `unevaluatedProperties: false` is `additionalProperties: false`, where nothing
                 else tells properties; `dependencies` are the two keywords of today
    null         `nullable: true` beside a type (OpenAPI 3.0) adds null to the type
    never        `not: {}` is the schema `false`
    Kubernetes   `x-kubernetes-int-or-string`, `x-kubernetes-preserve-unknown-fields`
    references   a `$id` beside a `$ref` does not count up to draft 7
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["MAPS", "SCHEMAS", "all_parts", "changed", "plain_schema"]

SCHEMAS = frozenset(
    {
        *("additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if"),
        *("items", "not", "oneOf", "prefixItems", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
"""Where a schema holds schemas: one, or a list of them."""
MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Where it holds schemas, each with a key."""

_VALUES = frozenset({"const", "default", "example"})
"""Keywords for which null is a value."""
_RANGES: dict[str, tuple[int | None, int | None]] = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, None),
    "uint": (0, None),
}
_DIGITS = {
    "int64": "^-?(0|[1-9][0-9]{0,17}|[1-8][0-9]{18})$",
    "uint64": "^(0|[1-9][0-9]{0,18})$",
}
"""Of 64-bit integers that are written as strings, as Google's interfaces do."""
_NUMBER_FORMATS = frozenset({*_RANGES, "int", "int64", "float", "double", "int-or-string"})
_OLD_DRAFTS = tuple(f"json-schema.org/draft-0{number}/" for number in (3, 4, 6, 7))
_TELLS_PROPERTIES = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}
)

_Schema = dict[str, Any]


def plain_schema(schema: Mapping[str, Any]) -> _Schema:
    """A copy of the schema in one spelling.

    Raises:
        TypeError, ValueError, AttributeError: it is no JSON schema.
        RecursionError: it is nested too deeply.
    """
    is_old = any(draft in str(schema.get("$schema")) for draft in _OLD_DRAFTS)
    plain = changed(schema, lambda part: _plain(part, is_old))
    if not isinstance(plain, dict):
        return {"not": {}}
    if "$ref" in plain and _needs_no_id(plain):
        plain.pop("$id", None)
    return plain


def _needs_no_id(plain: _Schema) -> bool:
    """Whether all references are within the one document, and none goes by its `$id`."""
    parts = all_parts(plain)
    references = [str(part["$ref"]) for part in parts if "$ref" in part]
    return all(reference.startswith("#") for reference in references) and not any(
        "$id" in part for part in parts[:-1]
    )


def changed(schema: Any, change: Callable[[_Schema], Any]) -> Any:
    """The schema with all that are in it changed, innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    copy: _Schema = {}
    for key, value in schema.items():
        if key in SCHEMAS and isinstance(value, (list, tuple)):
            copy[key] = [changed(item, change) for item in value]
        elif key in SCHEMAS:
            copy[key] = changed(value, change)
        elif key in MAPS and isinstance(value, Mapping):
            copy[key] = {name: changed(item, change) for name, item in value.items()}
        else:
            copy[key] = value
    return change(copy)


def all_parts(schema: Any) -> list[Mapping[str, Any]]:
    """All schemas within a schema, itself among them."""
    found: list[Mapping[str, Any]] = []

    def keep(part: _Schema) -> _Schema:
        found.append(part)
        return part

    changed(schema, keep)
    return found


def _plain(part: _Schema, is_old: bool) -> _Schema | bool:
    plain = {key: value for key, value in part.items() if value is not None or key in _VALUES}
    plain.pop("$schema", None)
    if is_old and "$ref" in plain:
        plain.pop("$id", None)
    for key in ("uniqueItems", "not"):
        if plain.get(key) is False:
            del plain[key]
    if "not" in plain and plain["not"] in ({}, True):
        return False
    _plain_items(plain)
    _plain_bounds(plain)
    _plain_format(plain)
    _plain_types(plain)
    _plain_dependencies(plain)
    _plain_names(plain)
    return plain


def _plain_items(plain: _Schema) -> None:
    # A tuple as old drafts have it; beside one of today's, `additionalItems` says nothing.
    rest = plain.pop("additionalItems", True)
    if isinstance(plain.get("items"), list):
        plain["prefixItems"] = plain["items"]
        plain["items"] = rest


def _plain_bounds(plain: _Schema) -> None:
    for bound, exclusive in (
        ("minimum", "exclusiveMinimum"),
        ("maximum", "exclusiveMaximum"),
    ):
        flag = plain.get(exclusive)
        if isinstance(flag, bool):
            del plain[exclusive]
            if flag and bound in plain:
                plain[exclusive] = plain.pop(bound)


def _plain_format(plain: _Schema) -> None:
    name, kind = plain.get("format"), plain.get("type")
    if not isinstance(name, str):
        return
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and "string" not in kinds:
        del plain["format"]
    elif name in _NUMBER_FORMATS:
        del plain["format"]
        if name in _DIGITS and kind == "string":
            plain.setdefault("pattern", _DIGITS[name])
    if kinds == ["string"]:
        return
    lowest, highest = _RANGES.get(name, (None, None))
    for key, bound, narrower in (("minimum", lowest, max), ("maximum", highest, min)):
        given = plain.get(key, bound)
        if bound is not None and isinstance(given, (int, float)):
            plain[key] = narrower(given, bound)


def _plain_types(plain: _Schema) -> None:
    kind = plain.get("type")
    if plain.pop("nullable", False) is True and kind is not None:
        kinds = kind if isinstance(kind, list) else [kind]
        plain["type"] = kinds if "null" in kinds else [*kinds, "null"]
    if plain.get("x-kubernetes-int-or-string") is True and not {"type", "anyOf"} & plain.keys():
        plain["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if plain.get("x-kubernetes-preserve-unknown-fields") is True and "properties" in plain:
        plain.setdefault("additionalProperties", True)


def _plain_dependencies(plain: _Schema) -> None:
    dependencies = plain.get("dependencies")
    if not isinstance(dependencies, Mapping):
        return
    del plain["dependencies"]
    for name, needed in dependencies.items():
        key = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        known = plain.get(key)
        plain[key] = {**(known if isinstance(known, Mapping) else {}), name: needed}


def _plain_names(plain: _Schema) -> None:
    if plain.get("unevaluatedProperties") is False and not _TELLS_PROPERTIES & plain.keys():
        del plain["unevaluatedProperties"]
        plain.setdefault("additionalProperties", False)
    names = plain.get("propertyNames")
    if names is True:
        del plain["propertyNames"]
    if not isinstance(names, Mapping) or "patternProperties" in plain:
        return
    told = {key: value for key, value in names.items() if (key, value) != ("type", "string")}
    others = plain.get("additionalProperties", True)
    if not told:
        del plain["propertyNames"]
    elif told.keys() in ({"enum"}, {"const"}):
        allowed = told["enum"] if "enum" in told else [told["const"]]
        own = plain.get("properties", {})
        if not isinstance(allowed, list) or not isinstance(own, Mapping):
            return
        plain["properties"] = {
            name: own.get(name, others) for name in allowed if isinstance(name, str)
        }
        plain["additionalProperties"] = False
        del plain["propertyNames"]
    elif told.keys() == {"pattern"} and "properties" not in plain:
        plain["patternProperties"] = {told["pattern"]: others}
        plain["additionalProperties"] = False
        del plain["propertyNames"]
