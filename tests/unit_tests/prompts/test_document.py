"""The document's message and its reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage

from langchain_swarmkv.errors import PromptError
from langchain_swarmkv.prompts.document import (
    DEFAULT_INSTRUCTIONS,
    document_digest,
    document_message,
    document_parts,
    document_text,
)
from tests.support.processes import WITHOUT_LANGCHAIN

IDENTITY = "a" * 64


def test_instructions_come_before_the_document() -> None:
    """What is shared stands first: instructions, a blank line, the text."""
    message = document_message("The text.", "Read.")
    assert isinstance(message, SystemMessage)
    assert message.content == "Read.\n\nThe text."
    assert document_message("The text.").content == f"{DEFAULT_INSTRUCTIONS}\n\nThe text."
    assert document_message("The text.", "").content == "The text."


@given(text=st.text(max_size=50), instructions=st.text(max_size=20))
def test_text_and_instructions_can_be_told_apart_again(text: str, instructions: str) -> None:
    """Whatever they contain, a blank line or each other included."""
    assert document_parts([document_message(text, instructions)]) == (text, instructions)


def test_other_messages_are_their_text() -> None:
    """A prefix that is no document message is remembered as the text that it has."""
    messages = [SystemMessage("one"), HumanMessage("two")]
    assert document_parts(messages) == ("one\n\ntwo", "")
    assert document_parts([HumanMessage("x"), document_message("d", "i")]) == ("d", "i")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("", IDENTITY, [1, 23]), ("", IDENTITY, [12, 3])),
        (("", IDENTITY, [1]), ("", IDENTITY, [1, 0])),
        (("", IDENTITY, [256]), ("", IDENTITY, [0, 1])),
        (("a", IDENTITY, [1]), ("b", IDENTITY, [1])),
        (("a", IDENTITY, [1]), ("", f"a{IDENTITY}", [1])),
        (("", "x", [1]), ("", "y", [1])),
    ],
)
def test_digests_differ_where_anything_differs(
    one: tuple[str, str, list[int]], other: tuple[str, str, list[int]]
) -> None:
    """Salt, model and tokens, and where one ends and the next begins."""
    assert document_digest(*one) != document_digest(*other)
    assert document_digest(*one) == document_digest(*one)


def test_digests_are_equal_in_every_process() -> None:
    """No dependence on Python's own hash."""
    code = (
        "from langchain_swarmkv.prompts.document import document_digest as d;"
        "print(d('salt', 'model', [1, 2, 3]))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", WITHOUT_LANGCHAIN + code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {document_digest("salt", "model", [1, 2, 3])}


def test_the_salt_cannot_be_read_from_a_reference() -> None:
    """References travel in checkpoints; a salt is a secret."""
    assert "tenant-7" not in json.dumps(document_digest("tenant-7", IDENTITY, [1]))


def test_a_document_of_langchain_is_its_text() -> None:
    """Its metadata is for programs; nothing of it, and no repr, is told to a model."""
    document = Document("The text.", metadata={"source": "secret/path.pdf", "page": 3})
    assert document_message(document, "Read.").content == "Read.\n\nThe text."
    assert document_message(document) == document_message("The text.")


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        (None, "NoneType"),
        (["text"], "list"),
        ([Document("text")], "list"),
        (b"text", "bytes"),
        (PurePath("text.txt"), "Path"),
        ({"page_content": "text"}, "dict"),
        (HumanMessage("text"), "HumanMessage"),
        (7, "int"),
    ],
)
def test_anything_else_is_no_document(wrong: Any, seen: str) -> None:
    """Its repr must not become the document."""
    with pytest.raises(PromptError, match=rf"is a \w*{seen}; document_message needs"):
        document_message(wrong)


def test_documents_are_joined_in_their_order() -> None:
    """With a blank line between two; what is no `Document` has no text."""
    pages = [Document("One."), Document("Two."), Document("Three.")]
    assert document_text(pages) == document_text(tuple(pages)) == "One.\n\nTwo.\n\nThree."
    assert document_text([*pages, "Four."]) is None
    assert document_text([]) is None
