"""How long the longest tests run: for a short time in `make test`, in full in `make test-all`."""

from __future__ import annotations

import os

_LENGTH = os.environ.get("TEST_LENGTH", "short")
if _LENGTH not in ("short", "full"):
    raise ValueError(f"TEST_LENGTH={_LENGTH}; it is short or full")


def length(short: int, full: int) -> int:
    """How many rounds a test marked `long` takes, as TEST_LENGTH says."""
    return full if _LENGTH == "full" else short
