"""The text of a `.txt` or `.md` file, and what was guessed, replaced or dropped on the way."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

from langchain_swarmkv.documents.encodings import (
    CONTROLS,
    guess_encoding,
    num_controls,
    wide_encoding,
)

__all__ = ["FileText", "Unreadable", "plain_text"]

_MARKS = (
    # UTF-32's little-endian mark begins with UTF-16's.
    (codecs.BOM_UTF32_LE, "utf_32"),
    (codecs.BOM_UTF32_BE, "utf_32"),
    (codecs.BOM_UTF8, "utf_8"),
    (codecs.BOM_UTF16_LE, "utf_16"),
    (codecs.BOM_UTF16_BE, "utf_16"),
    (b"\x84\x31\x95\x33", "gb18030"),
)

_OTHER_FILES = (
    (b"%PDF-", "it is a PDF; give it the suffix .pdf"),
    (b"PK\x03\x04", "it is a ZIP archive, as .docx, .odt and .epub are; save it as text or PDF"),
    (b"\xd0\xcf\x11\xe0", "it is an old Office file; save it as text or PDF"),
    (b"{\\rtf", "it is RTF; save it as text or PDF"),
    (b"\x1f\x8b", "it is compressed with gzip; unpack it"),
    (b"\x89PNG", "it is a picture; run OCR on it"),
    (b"\xff\xd8\xff", "it is a picture; run OCR on it"),
    (b"GIF8", "it is a picture; run OCR on it"),
    (b"II*\x00", "it is a picture; run OCR on it"),
    (b"MM\x00*", "it is a picture; run OCR on it"),
    (b"GGUF", "it is a GGUF model"),
    (b"\x7fELF", "it is a program"),
)

_MAX_CONTROL_SHARE = 0.05
"""Of control characters in a text; programs and pictures have more than a tenth."""
_WIDE_CONTROL_SHARE = 0.02
"""Of control bytes, from which on a file may be UTF-16 or UTF-32."""
_FEW_CONTROLS = 3
"""So many are no proof against a short text."""


class Unreadable(Exception):
    """Why a file has no text; the words that follow "cannot read the document 'x': "."""


@dataclass(frozen=True)
class FileText:
    """What was read of a file."""

    text: str
    encoding: str | None = None
    """Python's name of it; None for a PDF."""
    notices: tuple[str, ...] = ()
    """What was guessed and what is not as it was in the file, in whole sentences."""


def plain_text(data: bytes, encoding: str | None = None) -> FileText:
    """Decode a text file.

    Args:
        data: the whole file.
        encoding: what it is in; None: find out.

    Raises:
        Unreadable: it is no text.
    """
    for start, reason in _OTHER_FILES:
        if data.startswith(start):
            raise Unreadable(reason)
    found, guess_notice = (encoding, None) if encoding else _find(data)
    text = _decode(data, found).removeprefix("\ufeff")
    notices = [guess_notice] if guess_notice else []
    notices += _replaced(text, data, found)
    # Blocks of a tape and files that were reserved in advance end so.
    body = text.rstrip("\0\x1a")
    num_dropped = num_controls(body)
    if num_dropped > max(_FEW_CONTROLS, _MAX_CONTROL_SHARE * len(body)):
        raise Unreadable(
            f"it is not text: {num_dropped:,} of its {len(body):,} characters are control "
            f"characters (read as {found}); if it is text in another encoding, name it"
        )
    num_dropped += len(text) - len(body)
    if num_dropped:
        codes = sorted({f"U+{ord(c):04X}" for c in CONTROLS.findall(text)})
        notices.append(f"{_count(num_dropped, 'control character')} dropped: {_few(codes)}.")
    return FileText(CONTROLS.sub("", text), _name(found), tuple(notices))


def _find(data: bytes) -> tuple[str, str | None]:
    """The encoding, and a notice where it is only likely."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return encoding, None
    if b"\x1b$" in data and _is_valid(data, "iso2022_jp"):
        return "iso2022_jp", None
    if num_controls(data.decode("latin-1")) > max(_FEW_CONTROLS, _WIDE_CONTROL_SHARE * len(data)):
        wide = wide_encoding(data)
        if wide:
            return wide, f"It has no byte order mark; it looks like {_name(wide)}. {_ADVICE}"
    if _is_valid(data, "utf_8"):
        return "utf_8", None
    guess = guess_encoding(data)
    if guess is None:
        raise Unreadable(
            "it is not text in any encoding that is known here; if it is text, name its encoding"
        )
    if guess.encoding == "utf_8":
        return "utf_8", None  # what is damaged has a notice of its own
    language = f", because it reads as {guess.language} there" if guess.language else ""
    return guess.encoding, (
        f"It is not UTF-8; its encoding was guessed as {_name(guess.encoding)}{language}. {_ADVICE}"
    )


_ADVICE = "If the text looks wrong, name its encoding."


def _is_valid(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _decode(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding, "replace")
    except LookupError as error:  # unknown, or a codec that is none of texts
        raise Unreadable(
            f"there is no encoding {encoding!r}; use a name that Python knows, such as utf-8, "
            "cp1252 or gb18030"
        ) from error
    except ValueError as error:
        raise Unreadable(f"it cannot be read as {encoding} ({error})") from error


def _replaced(text: str, data: bytes, encoding: str) -> Iterator[str]:
    num_replaced = text.count("\ufffd")
    if _name(encoding) == "utf-8":
        num_replaced -= data.count("\ufffd".encode())  # those of the file itself
    if num_replaced:
        stand = "stands" if num_replaced == 1 else "stand"
        places = _count(num_replaced, "place")
        yield f"{places} not valid {_name(encoding)}, and {stand} as U+FFFD."


def _count(number: int, noun: str) -> str:
    return f"1 {noun} was" if number == 1 else f"{number:,} {noun}s were"


def _few(words: list[str]) -> str:
    return ", ".join(words[:5]) + (", ..." if len(words) > 5 else "")


def _name(encoding: str) -> str:
    try:
        return codecs.lookup(encoding).name
    except LookupError:
        return encoding
