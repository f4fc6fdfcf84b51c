"""The text layer of a PDF, if it has one that says which characters it shows."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pypdf import PageObject, PdfReader
from pypdf.errors import DependencyError

from langchain_swarmkv.documents.encodings import CONTROLS
from langchain_swarmkv.documents.plain_text import FileText, Unreadable

__all__ = ["pdf_text"]

# What pypdf finds odd in a file it can read after all is news only where logging is set up.
logging.getLogger("pypdf").addHandler(logging.NullHandler())

_MAX_NO_TEXT_SHARE = 0.2
"""Of characters that cannot be text: beyond that, a page or a document is not readable."""
_OCR = "run OCR first, for example with ocrmypdf"
_MAPPINGS = re.compile(rb"begin(?:bfchar|bfrange)\s*<")
_NUMBERED_GLYPH = re.compile(r"/(?!u[0-9A-F]{4}|uni[0-9A-F]{4})[A-Za-z]{0,6}\d+")


@dataclass
class _Page:
    text: str = ""
    num_characters: int = 0
    """All but white space."""
    num_no_text: int = 0
    """Of them, those that cannot be text."""
    unmapped: str = ""
    """What fonts drew that do not say which characters their glyphs are."""
    is_blank: bool = False
    error: Exception | None = None

    @property
    def is_unreadable(self) -> bool:
        return self.num_no_text > _MAX_NO_TEXT_SHARE * self.num_characters

    @property
    def is_without_text(self) -> bool:
        return not (self.num_characters or self.is_blank or self.error)


def pdf_text(path: Path) -> FileText:
    """Read a PDF.

    Raises:
        OSError: the file cannot be opened.
        Unreadable: it is damaged or encrypted, or its text layer is missing or none.
    """
    with path.open("rb") as file:
        try:
            reader = PdfReader(file)
            if reader.is_encrypted:
                _unlock(reader)
            pages = [_page(page) for page in reader.pages]
            filled_fields = _filled_fields(reader)
        except Unreadable:
            raise
        except Exception as error:  # damaged files make pypdf fail in every way there is
            raise Unreadable(f"it is no readable PDF ({error})") from error
    _check(pages)
    readable = [page for page in pages if not (page.is_unreadable or page.error)]
    texts = [CONTROLS.sub("", page.text).strip() for page in readable]
    notices = list(_notices(pages, readable))
    if filled_fields:
        notices.append(
            f"It is a form; what its filled fields ({filled_fields}) hold is not part of the text. "
            "To have it there, print the form to a new PDF."
        )
    # Broken character maps yield lone surrogates, which no tokenizer takes.
    text = "\n\n".join(texts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return FileText(text, notices=tuple(notices))


def _unlock(reader: PdfReader) -> None:
    """Try the empty password, which files have that only forbid printing or copying."""
    try:
        is_open = bool(reader.decrypt(""))
    except DependencyError as error:
        raise Unreadable(
            "it is encrypted, and its cipher needs the package cryptography (pip install "
            "'langchain-swarmkv[encryption]')"
        ) from error
    if not is_open:
        raise Unreadable("it is encrypted; save a copy without a password")


def _page(page: PageObject) -> _Page:
    read = _Page()
    unmapped: list[str] = []
    # By id, with the font itself so that the id stays its own: texts are many, fonts few.
    fonts: dict[int, tuple[Any, bool]] = {}

    def visit(text: str, _cm: Any, _tm: Any, font: Any, _size: Any) -> None:
        read.num_characters += sum(not c.isspace() for c in text)
        if font and id(font) not in fonts:
            fonts[id(font)] = (font, _is_mapped(font))
        if font and not fonts[id(font)][1]:
            unmapped.append(text)
        else:
            read.num_no_text += sum(map(_is_no_text, text))

    try:
        read.text = page.extract_text(visitor_text=visit)
        contents = page.get_contents()
        read.is_blank = contents is None or not contents.get_data().strip()
    except Exception as error:  # one damaged page is no reason to refuse the others
        return _Page(error=error)
    read.unmapped = "".join(unmapped)
    return read


def _is_mapped(font: Any) -> bool:
    """Whether the font says which characters its glyphs are, by a map or by their names."""
    if "/ToUnicode" in font and _has_mappings(font["/ToUnicode"]):
        return True
    encoding = font.get("/Encoding")
    if font.get("/Subtype") == "/Type0":
        return encoding not in ("/Identity-H", "/Identity-V")
    names = encoding.get("/Differences", []) if isinstance(encoding, dict) else []
    numbered = [bool(_NUMBERED_GLYPH.fullmatch(name)) for name in names if isinstance(name, str)]
    return 2 * sum(numbered) <= len(numbered)


def _has_mappings(character_map: Any) -> bool:
    """Whether a map names any character; pypdf writes glyph numbers where it names none."""
    is_stream = hasattr(character_map, "get_data")  # it may lead nowhere, or be a name
    return is_stream and bool(_MAPPINGS.search(character_map.get_data()))


def _is_no_text(character: str) -> bool:
    if character == "\ufffd":
        return True
    category = unicodedata.category(character)
    return category in ("Co", "Cn", "Cs") or (category == "Cc" and not character.isspace())


def _check(pages: Sequence[_Page]) -> None:
    """Count what cannot be text, and refuse a document that holds too much of it."""
    errors = [page.error for page in pages if page.error]
    if errors and len(errors) == len(pages):
        raise Unreadable(f"it is no readable PDF ({errors[0]})") from errors[0]
    if not any(page.num_characters for page in pages):
        if pages:
            raise Unreadable(f"its pages hold no text; if they are scans, {_OCR}")
        return  # it is empty
    unmapped = "".join(page.unmapped for page in pages)
    is_legible = _is_legible(unmapped)
    for page in pages:
        page.num_no_text += sum(
            _is_no_text(c) if is_legible else not c.isspace() for c in page.unmapped
        )
    num_no_text = sum(page.num_no_text for page in pages)
    num_characters = sum(page.num_characters for page in pages)
    if num_no_text > _MAX_NO_TEXT_SHARE * num_characters:
        reason = (
            "its fonts do not say which characters they show"
            if unmapped and not is_legible
            else "its fonts name characters that cannot be text"
        )
        raise Unreadable(
            f"its text layer is not readable: {num_no_text:,} of {num_characters:,} characters "
            f"({num_no_text / num_characters:.0%}) cannot be text, because {reason}; {_OCR}"
        )


def _is_legible(text: str) -> bool:
    """Whether glyph numbers happen to be characters: Latin text is mostly small letters."""
    visible = [c for c in text if not c.isspace()]
    letters = [c for c in visible if c.isalpha()]
    num_small = sum(c.islower() for c in letters)
    return (
        not any(map(_is_no_text, visible))
        and len(letters) >= 0.6 * len(visible)
        and num_small >= 0.6 * len(letters)
    )


def _filled_fields(reader: PdfReader) -> int:
    try:
        return sum(bool(value) for value in reader.get_form_text_fields().values())
    except Exception:  # a damaged form is none
        return 0


def _notices(pages: Sequence[_Page], readable: Sequence[_Page]) -> Iterator[str]:
    numbered = list(enumerate(pages, start=1))
    empty = [number for number, page in numbered if page.is_without_text]
    if empty:
        yield f"{_page_list(empty)} without text; if that is a scan, {_OCR}."
    unreadable = [number for number, page in numbered if page.is_unreadable]
    if unreadable:
        yield (
            f"{_page_list(unreadable)} left out: the text layer there does not say which "
            f"characters it shows; {_OCR}."
        )
    damaged = [number for number, page in numbered if page.error]
    if damaged:
        yield f"{_page_list(damaged)} left out: pypdf cannot read what is damaged there."
    num_controls = sum(len(CONTROLS.findall(page.text)) for page in readable)
    if num_controls:
        were = (
            "1 control character was"
            if num_controls == 1
            else (f"{num_controls:,} control characters were")
        )
        yield f"{were} dropped."
    num_others = sum(page.num_no_text for page in readable) - num_controls
    if num_others > 0:
        were = "1 character is" if num_others == 1 else f"{num_others:,} characters are"
        yield f"{were} of a font's own (private use, unassigned or U+FFFD) and mean nothing here."


def _page_list(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"Page {names[0]} is" if len(numbers) == 1 else f"Pages {', '.join(names)} are"
