"""JSON while it arrives: where a value ends, and whether it is an object. Nothing here recurses."""

from __future__ import annotations

import json
from typing import Any, NoReturn

__all__ = ["MAX_JSON_DEPTH", "JsonScanner", "parse_object"]

MAX_JSON_DEPTH = 100
"""Deeper arguments are refused: what reads them later (json, pydantic) recurses, and gives up at a
depth that depends on the caller's stack."""

_CLOSERS = {"{": "}", "[": "]"}


class JsonScanner:
    """Follows brackets and strings, character by character.

    Which bracket closes which is not checked: `parse_object` does, once the value is there.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self.in_string = False
        self._escaped = False
        self.max_depth = 0

    def push(self, text: str) -> None:
        """Take more of the value."""
        for char in text:
            if self.in_string:
                self.in_string = char != '"' or self._escaped
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self.in_string = True
            elif char in _CLOSERS:
                self._closers.append(_CLOSERS[char])
                self.max_depth = max(self.max_depth, len(self._closers))
            elif char in ("}", "]") and self._closers:
                self._closers.pop()

    @property
    def closed(self) -> bool:
        """Whether every bracket and string is: a value that began with one has then ended."""
        return not (self.in_string or self._closers)

    @property
    def spoiler(self) -> str:
        """What makes the text so far no JSON, and no beginning of JSON either: a wrong bracket."""
        end_of_string = ('"' + '"' * self._escaped) * self.in_string
        return end_of_string + ("]" if self._closers and self._closers[-1] == "}" else "}")


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object that `text` is, by the letter of the standard.

    Raises:
        ValueError: it is something else.
    """
    scanner = JsonScanner()
    scanner.push(text)
    if scanner.max_depth > MAX_JSON_DEPTH:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
    value = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
