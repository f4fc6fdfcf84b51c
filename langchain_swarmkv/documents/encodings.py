"""Which encoding a text file is in, where no byte order mark and no proof says it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import log

from langchain_swarmkv.documents.writings import WRITINGS

__all__ = ["CONTROLS", "Guess", "guess_encoding", "num_controls", "wide_encoding"]

_SAMPLE_BYTES = 20_000
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
"""Control characters but for white space and line ends, NEL (U+0085) among them."""
_WORD_BEYOND_ASCII = re.compile(rb"[^\s]*[\x80-\xff][^\s]*")

_RARE_PAGES = {
    "cp850": log(0.005),
    "cp866": log(0.05),
    "iso8859_2": log(0.3),
    "iso8859_5": log(0.1),
    "iso8859_6": log(0.1),
    "iso8859_7": log(0.5),
    "koi8_r": log(0.5),
    "koi8_u": log(0.3),
    "mac_cyrillic": log(0.002),
    "mac_roman": log(0.002),
}
"""Code pages that are rarer than the one of Windows for the same language."""

_UTF8_BYTE = -2.0
"""A byte of a character that is valid UTF-8. Legacy texts hold few of those by chance."""
_UTF8_DAMAGE = -8.0
"""A place that is not: dearer than a letter of any language, cheaper than an odd character."""

_PLAUSIBLE = -7.0
"""Scores a byte, at least, of a text in a code page that is known here."""
_SLACK = -10.0
"""One odd character proves nothing against a short text."""
_PLAUSIBLE_WIDE = -9.5
"""Scores a character, at least, of a text in UTF-16."""


@dataclass(frozen=True)
class Guess:
    """An encoding by Python's name; the language that spoke for it, or ""."""

    encoding: str
    language: str


def guess_encoding(data: bytes) -> Guess | None:
    """The likeliest encoding of bytes that are not valid UTF-8; None: no known one is likely.

    Damaged UTF-8 is one of the candidates. The common code pages are compared by how their
    languages are written; what none of them explains is left to charset-normalizer.
    """
    sample = _sample(data)
    if {byte for byte in sample if byte >= 0x80} == {0xFF}:
        return Guess("utf_8", "")  # erased memory; no language has a text with this letter alone
    texts: dict[str, str] = {}
    best, best_score = Guess("utf_8", ""), _utf8_score(sample)
    for writing in WRITINGS:
        for encoding in writing.encodings:
            if encoding not in texts:
                texts[encoding] = sample.decode(encoding, "replace")
            score = writing.score(texts[encoding]) + writing.prior + _RARE_PAGES.get(encoding, 0.0)
            if score > best_score:
                best, best_score = Guess(encoding, writing.language), score
    num_bytes = sum(byte >= 0x80 for byte in sample)
    return best if best_score >= _SLACK + _PLAUSIBLE * num_bytes else _any_other(data)


def _sample(data: bytes) -> bytes:
    """Words with bytes beyond ASCII; white space is no part of a character in any code page."""
    words = _WORD_BEYOND_ASCII.findall(data)
    step = sum(map(len, words)) // _SAMPLE_BYTES + 1
    return b" ".join(word[:_SAMPLE_BYTES] for word in words[::step])


def _utf8_score(sample: bytes) -> float:
    text = sample.decode("utf-8", "replace")
    num_damaged = text.count("\ufffd")
    num_valid_bytes = sum(len(c.encode()) for c in text if c > "\x7f" and c != "\ufffd")
    return _UTF8_BYTE * num_valid_bytes + _UTF8_DAMAGE * num_damaged


def _any_other(data: bytes) -> Guess | None:
    from charset_normalizer import from_bytes  # only rare files need it

    # UTF-16 has been tried, and nearly all bytes are valid there.
    match = from_bytes(data, cp_exclusion=["utf_16", "utf_16_le", "utf_16_be"]).best()
    return None if match is None else Guess(match.encoding, "")


def wide_encoding(data: bytes) -> str | None:
    """UTF-16 or UTF-32 without a byte order mark, where that can be recognised.

    Args:
        data: bytes among which control characters are frequent, NUL among them.
    """
    if len(data) % 4 == 0:
        for encoding in ("utf_32_le", "utf_32_be"):
            try:
                if data.decode(encoding).strip("\0"):
                    return encoding
            except UnicodeDecodeError:
                continue
    best = max(_wide_scores(data[: min(len(data), _SAMPLE_BYTES) // 2 * 2]), default=None)
    return best[1] if best and best[0] >= _PLAUSIBLE_WIDE else None


def _wide_scores(sample: bytes) -> Iterator[tuple[float, str]]:
    if not _is_wide(sample):
        return
    for encoding in ("utf_16_le", "utf_16_be"):
        text = sample.decode(encoding, "replace")
        if num_controls(text) * 50 <= len(text):
            score = max(writing.score(text) for writing in WRITINGS)
            yield score / max(sum(c > "\x7f" for c in text), 1), encoding


def _is_wide(sample: bytes) -> bool:
    """Whether two bytes make a character: one of the two is the same all over, or both vary."""
    odd, even = (num_controls(sample[start::2].decode("latin-1")) for start in (0, 1))
    if max(odd, even) * 20 >= len(sample) and max(odd, even) >= 2 * min(odd, even):
        return True  # an alphabet: its number, or 0 for ASCII
    return sum(byte >= 0x80 for byte in sample) * 20 >= len(sample)


def num_controls(text: str) -> int:
    """How many control characters there are that a text file does not need."""
    return len(CONTROLS.findall(text))
