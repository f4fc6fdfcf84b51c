"""Files as documents: `.txt` and `.md` in the encoding that they came in, and the text of PDFs."""

from langchain_swarmkv.documents.reader import SUFFIXES, DocumentWarning, read_document

__all__ = ["SUFFIXES", "DocumentWarning", "read_document"]
