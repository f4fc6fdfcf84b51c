"""The document that agents share: the message that carries it, and a reference to its KV cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, SystemMessage
from typing_extensions import NotRequired, TypedDict

from langchain_swarmkv.errors import PromptError

__all__ = [
    "DEFAULT_INSTRUCTIONS",
    "DocumentContent",
    "DocumentRef",
    "document_digest",
    "document_message",
    "document_parts",
    "document_text",
    "num_document_messages",
]

DocumentContent: TypeAlias = str | Document | list[Document]
"""A document as a graph's state may hold it; `document_text` makes one text of it."""

DEFAULT_INSTRUCTIONS = (
    "You are one of several analysts who read the same document. Answer the task you are given "
    "from this document alone, precisely and briefly. Where it does not say, say so."
)
"""What every analyst is told, before the document."""

_INSTRUCTIONS_KEY = "swarmkv_instructions"


class DocumentRef(TypedDict):
    """Plain data that stands for a prefilled document in a graph's state.

    It stays valid when the KV cache is gone: the text is in the state under `text_key`, and the
    same text and instructions give the same prompt again.
    """

    digest: str
    """SHA-256 of cache salt, model identity and the token ids of the shared prefix."""
    num_tokens: int
    """Length of the shared prefix."""
    model: str
    """Identity of the model that computed it."""
    text_key: str
    """Key of the text in the state."""
    instructions: str
    """What stands before the text in the system message."""
    prompt_time: NotRequired[str]
    """Date and time in all prompts on it, ISO 8601 with its offset from UTC; missing where the
    template writes none."""


def document_text(document: object) -> str | None:
    """The text that a model reads; None: it is neither a text nor `Document`s.

    Args:
        document: a text; a LangChain `Document`, whose `page_content` is read; or a list or tuple
            of them, read in their order with a blank line between two. Metadata is for programs:
            no model reads it.
    """
    if isinstance(document, str):
        return document
    if isinstance(document, Document):
        return document.page_content
    if isinstance(document, list | tuple) and document:
        pages = [page.page_content for page in document if isinstance(page, Document)]
        return "\n\n".join(pages) if len(pages) == len(document) else None
    return None


def document_message(
    document: str | Document, instructions: str = DEFAULT_INSTRUCTIONS
) -> SystemMessage:
    """The system message that all branches share: instructions, a blank line, the document.

    Args:
        document: a text, or a LangChain `Document`, of which the model reads `page_content` and
            not the metadata. Of several, join the texts, with a blank line as `DocumentNode` does.
        instructions: what all analysts are told before it.

    Raises:
        PromptError: the document is something else.
    """
    text = document_text(document) if isinstance(document, str | Document) else None
    if text is None:
        raise PromptError(
            f"The document is a {type(document).__name__}; document_message needs its text, or a "
            "LangChain Document. read_document(path) makes one of a file."
        )
    content = f"{instructions}\n\n{text}" if instructions else text
    return SystemMessage(content, additional_kwargs={_INSTRUCTIONS_KEY: instructions})


def document_parts(messages: Sequence[BaseMessage]) -> tuple[str, str]:
    """Text and instructions of the first `document_message`, or the text of all messages and ""."""
    for message in messages:
        instructions = message.additional_kwargs.get(_INSTRUCTIONS_KEY)
        if isinstance(instructions, str):
            before = f"{instructions}\n\n" if instructions else ""
            return str(message.text).removeprefix(before), instructions
    return "\n\n".join(str(message.text) for message in messages), ""


def num_document_messages(messages: Sequence[BaseMessage]) -> int:
    """How many of them, from the first on, end with a `document_message`; 0: they begin with none.

    Only system messages may stand before it.
    """
    for place, message in enumerate(messages):
        if message.type != "system":
            return 0
        if _INSTRUCTIONS_KEY in message.additional_kwargs:
            return place + 1
    return 0


def document_digest(cache_salt: str, identity: str, prefix_ids: Sequence[int]) -> str:
    """Hex SHA-256 over length-prefixed parts: no two different triples share an encoding."""
    digest = hashlib.sha256()
    for part in (
        cache_salt.encode("utf-8", "surrogatepass"),
        identity.encode(),
        np.asarray(prefix_ids, dtype="<u4").tobytes(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
