"""A document as plain text, from a .txt, .md or .pdf file in whatever encoding it came."""

from __future__ import annotations

import logging
from pathlib import Path

from charset_normalizer import from_bytes
from pypdf import PdfReader
from pypdf.errors import DependencyError

from langchain_swarmkv import SwarmKVError

SUFFIXES = (".txt", ".md", ".pdf")
DISCLOSURE = Path(__file__).with_name("disclosure.md")
"""The invention disclosure that comes with the example, about 3,100 tokens of SmolLM2."""

# What pypdf finds odd in a file it can read after all is news only where logging is set up.
logging.getLogger("pypdf").addHandler(logging.NullHandler())


class DocumentError(SwarmKVError, ValueError):
    """The document cannot be read; `path` says which."""


def read_document(path: Path) -> str:
    """Read a document.

    Args:
        path: a file whose name ends in one of `SUFFIXES`.

    Returns:
        Its text, never blank, lines end in one line feed, and there is no byte order mark.

    Raises:
        DocumentError: unknown suffix; no such file; no permission; no text in it.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise _error(path, f"its suffix is {suffix!r}; use one of {', '.join(SUFFIXES)}")
    try:
        text = _pdf_text(path) if suffix == ".pdf" else _plain_text(path)
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    if not text.strip():
        raise _error(path, "it is empty")
    return text


def _plain_text(path: Path) -> str:
    data = path.read_bytes()
    text = _decoded(data)
    if text is None or any(map(_is_binary, text)):
        raise _error(path, "it is not text in any encoding that charset-normalizer knows")
    return text


def _decoded(data: bytes) -> str | None:
    # UTF-8 proves itself; a guess could still take a short UTF-8 text for something else.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" not in text:
        return text
    guess = from_bytes(data).best()
    return None if guess is None else str(guess)


def _is_binary(character: str) -> bool:
    """Whether a C0 control character that no text file holds."""
    return character < " " and character not in "\t\n\v\f\r\x1a\x1b"


def _pdf_text(path: Path) -> str:
    with path.open("rb") as file:
        try:
            reader = PdfReader(file)
            locked = reader.is_encrypted and not _opens_without_password(reader)
            pages = [] if locked else [page.extract_text() for page in reader.pages]
        except Exception as error:  # damaged files make pypdf fail in every way there is
            raise _error(path, f"it is no readable PDF ({error})") from error
    if locked:
        raise _error(path, "it is encrypted; save a copy without a password")
    text = "\n\n".join(page.strip() for page in pages)
    if pages and not text.strip():
        raise _error(path, "its pages hold no text; if they are scans, run OCR first")
    # Broken character maps yield lone surrogates, which no tokenizer takes.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _opens_without_password(reader: PdfReader) -> bool:
    """Try the empty password, which many encrypted files have."""
    try:
        return bool(reader.decrypt(""))
    except DependencyError:  # the cipher needs a package that is not installed
        return False


def _error(path: Path, reason: str) -> DocumentError:
    return DocumentError(f"cannot read the document {str(path)!r}: {reason}.", path=path)
