"""What calls of a tool are held to, and what is checked once their arguments are whole.

Tools come from servers that nobody here has written, and one odd schema must not stop an agent. So
decoding is held to what it can be held to of a schema; if that is not all of it, the arguments are
checked against the whole schema afterwards, and a log says once what is not held:

    wrong       keywords that are no JSON schema are left out, and so are references that lead
                nowhere: nothing is ever fetched
    unheld      keywords that decoding cannot be held to (`held_schema`) are left out while the
                arguments are written
    refused     where llguidance refuses the rest, the smallest parts that it refuses are loosened
                until it does not
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from langchain_swarmkv.errors import ConfigurationError, GrammarError
from langchain_swarmkv.prompts.argument_check import (
    CHECKED_FORMATS,
    ArgumentCheck,
    without_wrong_parts,
)
from langchain_swarmkv.prompts.held_schema import (
    check_schema,
    compile_schema,
    exact_schema,
    held_schema,
    unheld,
)
from langchain_swarmkv.prompts.plain_schema import MAPS, SCHEMAS, all_parts, changed, plain_schema

__all__ = ["Check", "ToolSchema", "check_strict", "tool_schema"]

_log = logging.getLogger(__name__)

_MAX_TRIED_CHARACTERS = 8 * 1024 * 1024
"""Given to llguidance for one schema, which reads about 2 MB in a second."""
_TRIAL_CHARACTERS = 4096
"""What a trial costs besides its text."""
_MAX_TOLD = 8
_LAST = (
    *("oneOf", "patternProperties", "minProperties", "maxProperties", "format", "pattern"),
    *("multipleOf", "enum", "const", "required", "allOf", "anyOf", "$ref", "prefixItems"),
)
"""Keywords that llguidance may refuse, in the order in which they are left out."""

_Schema = dict[str, Any]
Check: TypeAlias = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class ToolSchema:
    """The parameters of one tool."""

    held: Mapping[str, Any]
    """What calls are held to while they are written, as llguidance is given it."""
    unheld: tuple[str, ...]
    """What they are not held to."""
    check: Check | None
    """Says why arguments do not fit the whole schema, or None; None: what is held is all of it."""


def check_strict(function: Mapping[str, Any]) -> None:
    """Refuse a tool whose calls cannot be held to all of its schema.

    Raises:
        ConfigurationError: naming the feature.
    """
    check_schema(function["parameters"], f"The schema of the tool {function['name']!r}")


def tool_schema(function: Mapping[str, Any]) -> ToolSchema:
    """What calls of a tool are held to; a log says once what they are not.

    Args:
        function: of an OpenAI tool. With "strict" true, all of its schema is held.

    Raises:
        ConfigurationError: it is strict, and has something that decoding cannot be held to.
    """
    if function.get("strict") is True:
        return ToolSchema(held_schema(function["parameters"]), (), None)
    return _tool_schema(function["name"], json.dumps(function["parameters"], ensure_ascii=False))


@lru_cache(maxsize=512)  # agents bind the same tools at each turn
def _tool_schema(name: str, text: str) -> ToolSchema:
    parameters = json.loads(text)
    what = f"The schema of the tool {name!r}"
    try:
        check_schema(parameters, what)
        return ToolSchema(held_schema(parameters, what), (), None)
    except ConfigurationError:
        pass
    try:
        found = _loosened(name, parameters)
    except (RecursionError, TypeError, ValueError, AttributeError, KeyError) as error:
        _log.warning("%s can be neither held nor checked: %s.", what, error)
        return ToolSchema(exact_schema({"type": "object"}, ()), ("the whole schema",), None)
    features = "; ".join(found.unheld[:_MAX_TOLD])
    more = len(found.unheld) - _MAX_TOLD
    _log.warning(
        "%s has %s%s, which decoding is not held to. Calls are checked when they are whole; those "
        "that do not fit are found under invalid_tool_calls. Bind the tools with strict=True to "
        "refuse such schemas.",
        what,
        features,
        f"; and {more} more" if more > 0 else "",
    )
    return found


def _loosened(name: str, parameters: Mapping[str, Any]) -> ToolSchema:
    whole, told = without_wrong_parts(plain_schema(parameters))
    parts = all_parts(whole)

    def without_unheld(part: _Schema) -> _Schema:
        found = list(unheld(part))
        is_checked = part.get("format") in CHECKED_FORMATS
        told.extend(
            each.feature + ", which nothing checks" * (each.keys == ("format",) and not is_checked)
            for each in found
        )
        return _without(part, {key for each in found for key in each.keys})

    held = exact_schema(changed(whole, without_unheld), parts)
    if "$ref" not in held:
        held.setdefault("type", "object")
    held = _Relaxer(held, told).relaxed_schema()
    return ToolSchema(held, tuple(dict.fromkeys(told)), ArgumentCheck(name, whole))


def _without(part: _Schema, keys: set[str]) -> _Schema:
    rest = {key: value for key, value in part.items() if key not in keys}
    if keys & {"patternProperties", "properties"}:
        rest["additionalProperties"] = True  # it was about all but those
    if "prefixItems" in keys:
        rest.pop("items", None)
    return rest


class _Relaxer:
    """Leaves out of a schema what llguidance refuses, and as little else as it can."""

    def __init__(self, held: _Schema, told: list[str]) -> None:
        self._held = held
        self._told = told
        self._around: _Schema = {"x-guidance": held["x-guidance"]}
        self._num_tried = 0

    def relaxed_schema(self) -> _Schema:
        reason = self._refusal(self._held)
        if reason is None:
            return self._held
        root = {k: v for k, v in self._held.items() if k not in ("$defs", "definitions")}
        for kind in ("$defs", "definitions"):
            definitions = self._held.get(kind)
            if isinstance(definitions, Mapping):
                self._around[kind] = self._relaxed_definitions(kind, definitions)
        relaxed = {**self._around, **_as_dict(self._relaxed(root))}
        relaxed.setdefault("type", "object")
        if self._refusal(relaxed) is None:
            return relaxed
        self._told.append(f"the whole schema ({reason})")
        return {"type": "object", "x-guidance": self._held["x-guidance"]}

    def _relaxed_definitions(self, kind: str, definitions: Mapping[str, Any]) -> _Schema:
        """Each alone, with all others as if they allowed anything: what one has is its own."""
        relaxed: _Schema = {}
        around = self._around
        for name, definition in definitions.items():
            alone = {**dict.fromkeys(definitions, True), name: definition}
            self._around = {**around, kind: alone}
            relaxed[name] = self._relaxed(definition)
        self._around = around
        return relaxed

    def _relaxed(self, part: Any) -> Any:
        if not isinstance(part, dict) or self._refusal({**self._around, **part}) is None:
            return part
        part = {key: self._relaxed_below(key, value) for key, value in part.items()}
        reason = self._refusal({**self._around, **part})
        if reason is None:
            return part
        if "oneOf" in part and "anyOf" not in part:
            part["anyOf"] = part.pop("oneOf")
            self._told.append("a oneOf whose parts may overlap")
            reason = self._refusal({**self._around, **part})
        for key in _LAST:
            if reason is not None and key in part:
                self._told.append(f"{key} ({reason})")
                part = _without(part, {key})
                reason = self._refusal({**self._around, **part})
        if reason is None:
            return part
        self._told.append(f"a part of the schema ({reason})")
        return {"type": part["type"]} if part.get("type") in ("object", "array") else True

    def _relaxed_below(self, key: str, value: Any) -> Any:
        if key in SCHEMAS and isinstance(value, list):
            return [self._relaxed(item) for item in value]
        if key in SCHEMAS:
            return self._relaxed(value)
        if key in MAPS and isinstance(value, dict):
            return {name: self._relaxed(item) for name, item in value.items()}
        return value

    def _refusal(self, schema: _Schema) -> str | None:
        self._num_tried += _TRIAL_CHARACTERS + len(json.dumps(schema))
        if self._num_tried > _MAX_TRIED_CHARACTERS:
            return "it is too large, and too much of it is refused"
        try:
            compile_schema(schema)
        except GrammarError as error:
            return _short(str(error))
        return None


def _as_dict(schema: Any) -> _Schema:
    return schema if isinstance(schema, dict) else {}


def _short(reason: str) -> str:
    """What llguidance says, without where it stands in a guide that nobody has seen."""
    reason = reason.rpartition("failed to compile JSON schema: ")[2]
    return " ".join(reason.split())[:200].rstrip(".")
