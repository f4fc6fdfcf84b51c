"""Proof that a prompt holds what the messages say: every text whole, once, and in order.

A template is a program that may drop a text, cut it, or move it. So it is run once more with two
characters that occur nowhere else, one at the beginning and one at the end of each text. What
stands between them is compared with the texts; without them, the prompt must be the one that is
used. White space at a text's ends is not looked at, and thoughts of earlier answers
(`reasoning_content`) may go. Templates that write a text into JSON or HTML escape it, which changes
nothing for the reader.

Of a call, the name and the arguments must be there, as JSON; of a document (the variable
`documents`), its text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_swarmkv.errors import ChatTemplateError
from langchain_swarmkv.prompts.messages import TemplateMessage

__all__ = ["TextProof", "document_texts"]

_DOCUMENT_KEYS = ("text", "contents", "content", "snippet")
"""Where chat templates look for a document's text; of one without any, all texts count."""

# Words that are no text for a template that knows them: they switch thoughts on and off.
_SWITCHES = ("/think", "/no_think")

_OPENING_CHARS = 64


class TextProof:
    """One conversation with marks around its texts, and what must be found between them.

    Args:
        messages: as the template gets them, but with `content` as text.
        documents: the template's variable of this name.
        marks: characters that occur neither in these nor in the template.
        source: the template.
    """

    def __init__(
        self,
        messages: Sequence[TemplateMessage],
        documents: object,
        marks: Iterator[str],
        source: str,
    ) -> None:
        self._begin, self._end = next(marks), next(marks)
        self._document_begin, self._document_end = next(marks), next(marks)
        self._call = next(marks)
        self._switches = [word for word in _SWITCHES if word in source]
        self._given = messages
        self._texts = [
            (place, message["content"].strip())
            for place, message in enumerate(messages)
            if message["content"].strip()
        ]
        self._calls = [
            (place, call["function"])
            for place, message in enumerate(messages)
            for call in message.get("tool_calls", ())
        ]
        self._document_texts = [text.strip() for text in document_texts(documents) if text.strip()]
        self.messages = [self._marked(message) for message in messages]
        """With marks."""
        self.documents = self._marked_documents(documents)
        """With marks."""

    def _marked(self, message: TemplateMessage) -> TemplateMessage:
        marked = {**message, "content": _around(message["content"], self._begin, self._end)}
        if "tool_calls" in message:
            marked["tool_calls"] = [
                {**call, "function": {**function, "name": self._call + function["name"]}}
                for call in message["tool_calls"]
                for function in (call["function"],)
            ]
        return marked

    def _marked_documents(self, documents: object) -> object:
        texts = set(document_texts(documents))

        def marked(value: object) -> object:
            if isinstance(value, str) and value in texts:
                return _around(value, self._document_begin, self._document_end)
            if isinstance(value, Mapping):
                return {key: marked(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [marked(item) for item in value]
            return value

        return marked(documents) if texts else documents

    def check(self, marked: str) -> None:
        """Look for the texts between the marks.

        Args:
            marked: what the template makes of `messages` and `documents`.

        Raises:
            ChatTemplateError: saying which text is lost, changed, moved or there twice.
        """
        found = re.findall(f"{self._begin}([^{self._begin}{self._end}]*){self._end}", marked)
        if len(found) != len(self._texts) or not all(
            self._is(text, piece) for (_, text), piece in zip(self._texts, found, strict=True)
        ):
            self._tell(found)
        self._check_calls(marked.split(self._call)[1:])
        begin, end = self._document_begin, self._document_end
        documents = re.findall(f"{begin}([^{begin}{end}]*){end}", marked)
        for place, text in enumerate(self._document_texts, 1):
            if not any(self._is(text, piece) for piece in documents):
                raise _document_left_out(place)

    def _tell(self, found: Sequence[str]) -> None:
        for place, text in self._texts:
            if not any(self._is(text, piece) for piece in found):
                message = self._given[place]
                beside = ", beside a tool call" if message.get("tool_calls") else ""
                raise ChatTemplateError(
                    f"it leaves the text of message {place + 1} ({message['role']}{beside}) out, "
                    "or a part of it"
                )
        raise ChatTemplateError("it writes the texts of the messages in another order, or twice")

    def _check_calls(self, pieces: Sequence[str]) -> None:
        left = iter(pieces)
        for place, function in self._calls:
            # A result may repeat the name of its call.
            if not any(_is_call(function, piece) for piece in left):
                raise ChatTemplateError(
                    f"it leaves a tool call of message {place + 1} out, or its arguments"
                )

    def confirm(self, marked: str, rendered: str) -> None:
        """Make sure that what was proved of the marked prompt is true of the one without marks.

        Raises:
            ChatTemplateError: it is another one, and a text or a call is not in it, or a long text
                is in it twice.
        """
        marks = (self._begin, self._end, self._document_begin, self._document_end, self._call)
        for mark in marks:
            marked = marked.replace(mark, "")
        if marked == rendered:
            return
        # It looked at how texts begin or end, or how long they are.
        at = 0
        for place, text in self._texts:
            ends = [
                start + len(form)
                for form in self._forms(text)
                if (start := rendered.find(form, at)) >= 0
            ]
            if not ends:
                raise ChatTemplateError(
                    f"it leaves the text of message {place + 1} ({self._given[place]['role']}) "
                    "out, or a part of it"
                )
            at = min(ends)
        for place, text in self._texts:
            # Shorter ones may be in the template's own words.
            if len(text) >= _OPENING_CHARS and rendered.count(text) > marked.count(text):
                raise ChatTemplateError(f"it writes the text of message {place + 1} twice")
        for place, function in self._calls:
            names = {escaped(function["name"]) for escaped in (str, _json, _ascii_json)}
            starts = [start for name in names if (start := rendered.find(name)) >= 0]
            if not any(_is_call(function, rendered[start:]) for start in starts):
                raise ChatTemplateError(
                    f"it leaves a tool call of message {place + 1} out, or its arguments"
                )
        for place, text in enumerate(self._document_texts, 1):
            if not any(form in rendered for form in self._forms(text)):
                raise _document_left_out(place)

    def _is(self, text: str, piece: str) -> bool:
        if piece == text:
            return True
        piece = piece.strip()
        # Documents are long, and escaping goes character by character: the first few tell most.
        opening = text[:_OPENING_CHARS]
        return any(
            piece.startswith(escaped(opening)) and piece == escaped(text) for escaped in _ESCAPES
        ) or (bool(self._switches) and piece == self._without_switches(text))

    def _forms(self, text: str) -> Iterator[str]:
        """The text, and as a template may write it without a loss."""
        yield from (escaped(text) for escaped in _ESCAPES)
        if self._switches:
            yield self._without_switches(text)

    def _without_switches(self, text: str) -> str:
        words = "|".join(map(re.escape, self._switches))
        text = re.sub(rf"^(?:(?:{words})(?!\S)\s*)+", "", text)
        while found := re.search(rf"(?<!\S)(?:{words})$", text):
            text = text[: found.start()].rstrip()
        return text


def document_texts(documents: object) -> list[str]:
    """What a prompt must hold of the variable `documents`: its texts."""
    if isinstance(documents, str):
        return [documents]
    if isinstance(documents, Mapping):
        values = [documents[key] for key in _DOCUMENT_KEYS if key in documents]
        return [text for value in values or documents.values() for text in document_texts(value)]
    if isinstance(documents, (list, tuple)):
        return [text for document in documents for text in document_texts(document)]
    return []


def _around(text: str, begin: str, end: str) -> str:
    """The text with marks, inside the white space at its ends, which templates trim."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{begin}{core}{end}{text[start + len(core) :]}"


def _document_left_out(place: int) -> ChatTemplateError:
    return ChatTemplateError(
        f"it leaves the text of document {place} out (the variable `documents`); put documents "
        "that it does not tell into a message"
    )


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ascii_json(text: str) -> str:
    # Private-use characters stay: they stand for others, see `segments` and `sandbox`.
    return re.sub("[^\ue000-\uf8ff]+", lambda part: json.dumps(part[0])[1:-1], text)


def _html(text: str) -> str:
    return html.escape(text).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")


_ESCAPES = (str, _json, _ascii_json, _html)


def _is_call(function: Mapping[str, Any], piece: str) -> bool:
    """Whether a piece of the prompt begins with the call's name and then has its arguments."""
    name = function["name"]
    if not piece.startswith((name, _json(name), _ascii_json(name))):
        return False
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    wanted = _canonical(arguments)
    if wanted in (None, "{}"):
        return True  # no JSON, or nothing to lose
    decoder = json.JSONDecoder()
    at = piece.find("{")
    while at >= 0:
        try:
            if _canonical(decoder.raw_decode(piece, at)[0]) == wanted:
                return True
        except ValueError:
            pass
        at = piece.find("{", at + 1)
    return False


def _canonical(value: object) -> str | None:
    """JSON that is the same for the same value; None: it is no JSON."""
    try:
        return json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    except (TypeError, ValueError):
        return None
