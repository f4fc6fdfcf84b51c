"""Regular expressions: for dates, times and durations that there are, and of any schema."""

from __future__ import annotations

import re

__all__ = ["FORMAT_PATTERNS", "decimal_digits", "decimal_pattern", "unclear_part"]

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "([01][0-9]|2[0-3])"

_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+-]{_HOUR}:[0-5][0-9])"

# The units follow each other, largest first; what is longer than Python's longest is left out.
_MINUTES = "[0-9]{1,6}(M([0-9]{1,6}S)?|S)"
_OF_TIME = f"T([0-9]{{1,6}}H([0-9]{{1,6}}M([0-9]{{1,6}}S)?)?|{_MINUTES})"
_OF_DATE = "([0-9]{1,6}Y([0-9]{1,6}M([0-9]{1,6}D)?)?|[0-9]{1,6}M([0-9]{1,6}D)?|[0-9]{1,6}D)"
_DURATION = f"P({_OF_DATE}({_OF_TIME})?|{_OF_TIME}|[0-9]{{1,6}}W)"

_BASE64 = "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
_BASE64URL = "([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}(==)?|[A-Za-z0-9_-]{3}=?)?"

FORMAT_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "byte": _BASE64,
    "base64": _BASE64,
    "base64url": _BASE64URL,
    **{
        f"uuid{version}": f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}"
        "-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        for version in (1, 3, 4, 5, 6, 7, 8)
    },
}
"""Whole texts of formats. Each lets out only what the format allows, if not all of it."""

# Of pydantic up to 2.12: no text of signs and points alone, and digits as the field allows them.
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:(?P<any>\\d\*\\\.\?\\d\*\$)"
    r"|\\d\*\\\.\?\\d\{0,(?P<places>\d+)\}0\*\$"
    r"|\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<length>\d+)\}0\*\$\)"
    r"\\d\{0,\d+\}\\\.\\d\{0,(?P<fraction>\d+)\}0\*\$\))"
)

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


def decimal_pattern(pattern: str) -> str | None:
    """Some of the texts that pydantic's pattern of a decimal number takes, without looking ahead.

    Returns:
        A pattern for numbers written as usual (`-12.50`); None: it is another pattern.
    """
    found = _DECIMAL.fullmatch(pattern)
    if found is None:
        return None
    if found["any"]:
        return decimal_digits(None, None)
    if found["places"]:
        return decimal_digits(None, int(found["places"]))
    whole, length, fraction = (int(found[name]) for name in ("whole", "length", "fraction"))
    return decimal_digits(whole, fraction if whole + 1 + fraction <= length else 0)


def decimal_digits(max_whole: int | None, max_fraction: int | None) -> str | None:
    """A pattern of decimal numbers with so many digits before the point and after it.

    Args:
        max_whole: most digits before the point; None: any number.
        max_fraction: most digits after it; None: any number.

    Returns:
        The pattern; None: there are no digits at all.
    """
    if max_whole == 0:
        return rf"^-?0\.[0-9]{{1,{max_fraction}}}$" if max_fraction else None
    whole = "[0-9]+" if max_whole is None else f"[0-9]{{1,{max_whole}}}"
    most = "" if max_fraction is None else max_fraction
    fraction = "" if max_fraction == 0 else rf"(\.[0-9]{{1,{most}}})?"
    return f"^-?{whole}{fraction}$"
