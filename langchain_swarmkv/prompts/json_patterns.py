"""Regular expressions: for dates, times and durations that there are, and of any schema."""

from __future__ import annotations

import re

__all__ = ["DATE", "DATE_TIME", "DURATION", "TIME", "unclear_part"]

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "([01][0-9]|2[0-3])"

DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
DATE_TIME = f"{DATE}T{TIME}"

# The units follow each other, largest first; what is longer than Python's longest is left out.
_MINUTES = "[0-9]{1,6}(M([0-9]{1,6}S)?|S)"
_OF_TIME = f"T([0-9]{{1,6}}H({_MINUTES})?|{_MINUTES})"
_OF_DATE = "([0-9]{1,6}Y([0-9]{1,6}M([0-9]{1,6}D)?)?|[0-9]{1,6}M([0-9]{1,6}D)?|[0-9]{1,6}D)"
DURATION = f"P({_OF_DATE}({_OF_TIME})?|{_OF_TIME}|[0-9]{{1,6}}W)"

# What Python, Rust and JavaScript read alike.
_CHARACTER = r"\\(?:[nrtf]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[^a-zA-Z0-9<>])"
_IN_CLASS = rf"(?:{_CHARACTER}|[^\[\]\\&~-]|&(?!&)|~(?!~)|-(?!-))"
_CLEAR = re.compile(
    rf"{_CHARACTER}|\\[dsw]"
    rf"|\[\^{_IN_CLASS}+\]|\[(?!\^)(?:\\[dsw](?!-[^\]])|{_IN_CLASS})+\]"
    r"|\((?!\?)|\(\?:"
    r"|(?:[*+?]|\{\d+(?:,\d*)?\})\??(?![*+?])"
    r"|[^\\\[(*+?{]"
)


def unclear_part(pattern: str) -> str:
    r"""The rest of a pattern from where dialects read it differently (`\S`, `[a&&b]`), or ""."""
    place = 0
    while found := _CLEAR.match(pattern, place):
        place = found.end()
    return pattern[place:]
