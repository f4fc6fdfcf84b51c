"""What decoding is held to of a JSON schema: all of it, or it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["check_schema", "held_schema"]

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def held_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as llguidance is given it."""
    return {**schema, "x-guidance": _STYLE}


def check_schema(schema: Mapping[str, Any], what: str) -> None:
    """Refuse what decoding cannot be held to.

    Raises:
        ConfigurationError: naming the feature.
    """
