"""Whether the arguments of a call fit the whole schema of its tool.

jsonschema is the judge. It never fetches a schema, and no pattern may keep it: patterns are those
of whoever wrote the tool, and some take exponential time, so `regex` searches, which can be told to
give up.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import regex
from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from langchain_swarmkv.prompts.plain_schema import all_parts, changed

__all__ = ["CHECKED_FORMATS", "ArgumentCheck", "without_wrong_parts"]

_log = logging.getLogger(__name__)

_PATTERN_SECONDS = 0.1
_MAX_MESSAGE_CHARACTERS = 300
_MAX_ROUNDS = 20

_Schema = dict[str, Any]


class _UndecidedError(Exception):
    """A pattern took too long."""


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern)


def _matches(pattern: str, text: str) -> bool:
    try:
        return _compiled(pattern).search(text, timeout=_PATTERN_SECONDS) is not None
    except TimeoutError:
        raise _UndecidedError(pattern) from None


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _matches(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], value: Any, _schema: Any
) -> Iterator[ValidationError]:
    if isinstance(value, dict):
        for pattern, schema in patterns.items():
            for key, item in value.items():
                if _matches(pattern, key):
                    yield from validator.descend(item, schema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, value: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, item in value.items():
        if key in known or any(_matches(pattern, key) for pattern in patterns):
            continue
        if allowed is False:
            yield ValidationError(f"the property {key!r} is not allowed")
        else:
            yield from validator.descend(item, allowed, path=key)


_Validator: Any = extend(
    Draft202012Validator,
    {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    },
)
_FORMATS = FormatChecker(formats=())
# Python's regular expressions are not those of the standard.
_FORMATS.checkers = {
    name: checker
    for name, checker in Draft202012Validator.FORMAT_CHECKER.checkers.items()
    if name != "regex"
}
CHECKED_FORMATS = frozenset(_FORMATS.checkers)
"""Formats that `ArgumentCheck` knows."""


class ArgumentCheck:
    """Says why arguments do not fit.

    Args:
        name: the tool's, for messages.
        schema: a plain one, without wrong parts.
    """

    def __init__(self, name: str, schema: Mapping[str, Any]) -> None:
        self._name = name
        self._validator = _Validator(schema, registry=Registry(), format_checker=_FORMATS)
        self._has_failed = False
        self({})  # whatever fails with any arguments is said now

    def __call__(self, arguments: Mapping[str, Any]) -> str | None:
        """The reason; None: they fit."""
        try:
            error = best_match(self._validator.iter_errors(arguments))
        except _UndecidedError as undecided:
            return (
                f"The arguments could not be checked: the pattern {str(undecided)!r} of the tool "
                f"{self._name!r} takes longer than {_PATTERN_SECONDS} s."
            )
        except Exception as failure:  # what a schema may do to a validator, nobody has listed
            self._say_failed(failure)
            return None
        if error is None:
            return None
        message = str(error.message)[:_MAX_MESSAGE_CHARACTERS]
        place = error.json_path.removeprefix("$").removeprefix(".")
        where = f" at {place}" if place else ""
        return f"The arguments do not fit the schema of {self._name!r}{where}: {message}."

    def _say_failed(self, failure: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning(
                "The arguments of the tool %r are not checked against all of its schema: %s: %s",
                self._name,
                type(failure).__name__,
                str(failure)[:_MAX_MESSAGE_CHARACTERS],
            )


def without_wrong_parts(schema: _Schema) -> tuple[_Schema, list[str]]:
    """A plain schema without what is no JSON schema, and the list of that."""
    schema = copy.deepcopy(schema)
    told: list[str] = []
    judge = Draft202012Validator(
        Draft202012Validator.META_SCHEMA, format_checker=FormatChecker(formats=())
    )
    for _ in range(_MAX_ROUNDS):
        paths = [list(error.absolute_path) for error in judge.iter_errors(schema)]
        if not paths:
            break
        told += filter(None, [_cut_out(schema, path) for path in paths])
    else:
        raise ValueError("it is no JSON schema")
    return _without_unusable(schema, told), told


def _cut_out(schema: _Schema, path: list[Any]) -> str:
    """Delete what a path leads to, or the list that it is in.

    Returns:
        What that is called; "": it went with another one.
    """
    if not path:
        raise ValueError("it is no object")
    holders: list[Any] = [schema]
    try:
        for key in path[:-1]:
            holders.append(holders[-1][key])
        holders[-1][path[-1]]
    except (KeyError, IndexError):
        return ""
    while isinstance(holders[-1], list):
        holders.pop()
        path.pop()
    value = holders[-1].pop(path[-1])
    return f"{'.'.join(map(str, path))}, which is no JSON schema ({str(value)[:40]})"


def _without_unusable(schema: _Schema, told: list[str]) -> _Schema:
    """The schema without references that lead nowhere, and without patterns that are none."""
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    parts = all_parts(schema)
    has_ids = any("$id" in part for part in parts)
    has_key_patterns = any("patternProperties" in part for part in parts)

    def leads_nowhere(reference: str) -> bool:
        if has_ids:
            return False  # relative to what, only the validator knows
        try:
            resolver.lookup(reference)
        except Unresolvable:
            return True
        return False

    def usable(part: _Schema) -> _Schema:
        part = dict(part)
        if isinstance(part.get("$ref"), str) and leads_nowhere(part["$ref"]):
            told.append(f"the reference {part.pop('$ref')!r}, which leads nowhere")
        if "pattern" in part and not _is_pattern(part["pattern"]):
            told.append(f"the pattern {part.pop('pattern')!r}, which is none")
        if not all(map(_is_pattern, part.get("patternProperties", ()))):
            patterns = list(part.pop("patternProperties"))
            told.append(f"patternProperties of which one is no pattern ({patterns!r})")
            part["additionalProperties"] = True
        if has_key_patterns and part.pop("unevaluatedProperties", None) is not None:
            # jsonschema would search the patterns itself, without an end.
            told.append("unevaluatedProperties beside patternProperties, which nothing checks")
        return part

    return _as_dict(changed(schema, usable))


def _as_dict(schema: Any) -> _Schema:
    return schema if isinstance(schema, dict) else {}


def _is_pattern(text: str) -> bool:
    try:
        _compiled(text)
    except regex.error:
        return False
    return True
