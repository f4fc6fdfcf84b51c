"""One reader for all: a file becomes a LangChain `Document`, and what was lost is told."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from langchain_core.documents import Document

from langchain_swarmkv.documents.plain_text import FileText, Unreadable, plain_text
from langchain_swarmkv.errors import DocumentError

__all__ = ["SUFFIXES", "DocumentWarning", "read_document"]

SUFFIXES = (".txt", ".md", ".pdf")


class DocumentWarning(UserWarning):
    """The text of a document is a guess, or not all that is in the file."""


def read_document(
    path: str | os.PathLike[str],
    *,
    encoding: str | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> Document:
    """Read a `.txt`, `.md` or `.pdf` file.

    A text is read as UTF-8, or as its byte order mark says. Bytes that are damaged become U+FFFD.
    What is not UTF-8 is guessed: the common code page whose language explains it best, else what
    charset-normalizer finds. A PDF gives its text layer, pages apart by a blank line; one without
    (a scan, or fonts that do not say which characters they draw) is refused, since only OCR can
    read it.

    Args:
        path: the file; its suffix says what it is.
        encoding: what a text file is in, by Python's name; nothing is guessed then.
        on_notice: is told, a sentence each, what was guessed, replaced, dropped or left out.
            Without it each of them is a `DocumentWarning`.

    Returns:
        The text as `page_content`: never blank, lines end in one line feed, no byte order mark, no
        control characters but white space. In the `metadata`: `source`, the path; `encoding`, of a
        text file; `notices`, a list.

    Raises:
        DocumentError: it cannot be read; `path` says which file and `reason` why.
    """
    path = Path(path)
    try:
        read = _read(path, encoding)
        text = read.text.replace("\r\n", "\n").replace("\r", "\n")
        if not text.strip():
            raise Unreadable("it is empty")
    except (OSError, Unreadable) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise DocumentError(
            f"cannot read the document {str(path)!r}: {reason}.", path=path, reason=reason
        ) from error
    for notice in read.notices:
        if on_notice:
            on_notice(notice)
        else:
            warnings.warn(DocumentWarning(f"{path}: {notice}"), stacklevel=2)
    metadata = {"source": str(path), "encoding": read.encoding, "notices": list(read.notices)}
    if read.encoding is None:
        del metadata["encoding"]
    return Document(text, metadata=metadata)


def _read(path: Path, encoding: str | None) -> FileText:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise Unreadable(f"its suffix is {suffix!r}; use one of {', '.join(SUFFIXES)}")
    if suffix != ".pdf":
        return plain_text(path.read_bytes(), encoding)
    if encoding is not None:
        raise Unreadable(f"a PDF has no encoding; leave out {encoding!r}")
    from langchain_swarmkv.documents.pdf_text import pdf_text  # pypdf takes time to import

    return pdf_text(path)
