r"""What a model says, thinks and calls, told apart while the text arrives.

An answer is `[thoughts] text (calls text)*`, in the markup of its model. Control tokens come as
single lone surrogates (U+D800 and up), which no text holds; where one is no part of the markup it
is dropped. White space in the markup does not count: models write `{"name":"x"` as well as
`{"name": "x"`.

The parser is one generator that is sent a character at a time. So it reads like the grammar, and
what it finds cannot depend on how the text was cut.
"""

from __future__ import annotations

import json
import uuid
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias, TypeVar, cast

from langchain_swarmkv.prompts.call_format import (
    CallFormat,
    Hole,
    Part,
    ReasoningTags,
    markup_of,
)
from langchain_swarmkv.prompts.json_scanner import JsonScanner, parse_object

__all__ = [
    "ENDED_INSIDE_CALL",
    "AnswerParser",
    "AnswerPart",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "InvalidCall",
    "ReasoningPart",
    "TextPart",
    "new_call_id",
]

ENDED_INSIDE_CALL = "The answer ended inside the call."

_END = ""
"""Read, again and again, at the end of the answer."""

_T = TypeVar("_T")
_Reads: TypeAlias = Generator[None, str, _T]
"""Is sent the characters of the answer, one by one."""


@dataclass(frozen=True)
class TextPart:
    """A piece of what the model says."""

    text: str


@dataclass(frozen=True)
class ReasoningPart:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call whose arguments are about to come."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is whole and its arguments are a JSON object."""

    index: int


@dataclass(frozen=True)
class InvalidCall:
    """What began as a call and is none; its `CallStart` may have been seen, and arguments too."""

    index: int
    call_id: str
    name: str | None
    """None: it did not come that far."""
    raw: str
    """All that the model wrote, control tokens aside."""
    error: str


AnswerPart: TypeAlias = (
    "TextPart | ReasoningPart | CallStart | CallArguments | CallEnd | InvalidCall"
)


def new_call_id() -> str:
    """A name for a call that the model gave none."""
    return f"call_{uuid.uuid4().hex}"


class AnswerParser:
    """One answer. `push` its text as it comes, then `finish`; both return what has become certain.

    Args:
        calls: how this model writes calls; None: it makes none.
        reasoning: what stands around its thoughts; None: it writes none.
        starts_in_reasoning: the prompt ends with the opening tag.
        new_call_id: names calls whose id does not come before their arguments.
    """

    def __init__(
        self,
        *,
        calls: CallFormat | None,
        reasoning: ReasoningTags | None,
        starts_in_reasoning: bool = False,
        new_call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._calls = None if calls is None else _CallMarks(calls)
        self._trigger = "" if self._calls is None else self._calls.trigger
        self._reasoning = reasoning
        self._starts_in_reasoning = starts_in_reasoning
        self._new_call_id = new_call_id

        self._parts: list[AnswerPart] = []
        self._num_calls = 0
        self._raw: list[str] = []
        """The present call, as written."""
        self._leading: str | None = None
        """What the next text begins with instead of its white space; None: that stays."""
        self._said = False
        self._put_back: list[str] = []
        """What was read too far, the next character last."""
        self._ended = False
        self._reader = self._answer()
        next(self._reader)

    def push(self, text: str) -> list[AnswerPart]:
        """Take more of the answer."""
        for char in text:
            self._reader.send(char)
        return self._released()

    def finish(self) -> list[AnswerPart]:
        """Take the end of the answer. Call once."""
        self._ended = True
        try:
            self._reader.send(_END)
        except StopIteration:
            pass
        return self._released()

    def _released(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return [_joined(list(alike)) for _, alike in groupby(parts, _kind)]

    # The grammar. Readers of `str | None` run until a call opens, and return what its first literal
    # still lacks; None: the answer has ended.

    def _answer(self) -> _Reads[None]:
        yield from self._thoughts()
        missing = yield from self._text() if self._trigger else self._bare_call()
        while missing is not None:
            missing = yield from self._call(missing, cast(_CallMarks, self._calls))

    def _thoughts(self) -> _Reads[None]:
        if self._reasoning is None:
            return
        opened = yield from self._optional(_squeezed(self._reasoning.opening))
        if opened or self._starts_in_reasoning:
            thoughts = _Prose(self._think, leading="", waits=True)
            yield from self._until(_squeezed(self._reasoning.closing), thoughts.push)
            self._leading = ""

    def _text(self) -> _Reads[str | None]:
        prose = _Prose(self._say, self._leading, waits=bool(self._trigger))
        trigger = yield from self._until(self._trigger, prose.push)
        if not trigger:
            prose.finish()
        return self._opened_by(trigger)

    def _opened_by(self, trigger: str) -> str | None:
        self._raw = list(trigger)
        return self._calls.after_trigger if self._calls and trigger else None

    def _bare_call(self) -> _Reads[str | None]:
        """A call without markup opens an answer, or the answer holds no calls."""
        if self._calls is not None:
            self._raw = list((yield from self._optional(self._calls.head)))
            if self._raw:
                return ""
        return (yield from self._text())

    def _call(self, missing: str, marks: _CallMarks) -> _Reads[str | None]:
        call = _Call(self._num_calls)
        try:
            error = yield from self._inside_call(call, missing, marks)
        except _BrokenCallError as broken:
            error = str(broken)
            if not (self._trigger or call.started or call.index or error == ENDED_INSIDE_CALL):
                # NOTE: other JSON may begin as a call without markup does.
                self._put_back += reversed(self._raw)
                return (yield from self._text())
            trigger = yield from self._until(self._trigger, self._raw.append)
            self._close(call, error)
            return self._opened_by(trigger)
        self._close(call, error)
        return (yield from self._after_call(marks))

    def _inside_call(self, call: _Call, missing: str, marks: _CallMarks) -> _Reads[str | None]:
        """Read a call to its end; returns what is wrong with its arguments."""
        error = None
        yield from self._literal(missing)
        for part, stop in marks.parts:
            if isinstance(part, str):
                yield from self._literal(part)
            elif part is Hole.NAME:
                call.name = yield from self._word(stop)
            elif part is Hole.ARGUMENTS:
                call.started = True
                call.call_id = call.call_id or self._new_call_id()
                self._parts.append(CallStart(call.index, call.call_id, call.name or ""))
                error = yield from self._arguments(call.index, optional=marks.arguments_optional)
            elif not call.started:
                call.call_id = yield from self._word(stop)
            elif marks.id_ends_object:
                yield from self._rest_of_object()
            else:
                yield from self._word(stop)
        return error

    def _close(self, call: _Call, error: str | None) -> None:
        self._num_calls += 1
        if error is None:
            self._parts.append(CallEnd(call.index))
            return
        call_id = call.call_id or self._new_call_id()
        raw = _without_marks("".join(self._raw)).strip()
        self._parts.append(InvalidCall(call.index, call_id, call.name, raw, error))

    def _after_call(self, marks: _CallMarks) -> _Reads[str | None]:
        # Pieces of text that a call parts would run into each other.
        self._leading = "\n" if self._said else ""
        closed = yield from self._optional(marks.closing)
        if not closed and (yield from self._optional(marks.next_call)):
            self._raw = list(marks.next_raw)
            return marks.after_next_call
        return (yield from self._text())

    # What calls are made of.

    def _literal(self, literal: str) -> _Reads[None]:
        for at, expected in enumerate(literal):
            while (char := (yield from self._next(expected))) != expected:
                if not char.isspace():
                    self._take_back(char)
                    rest = _without_marks(literal[at:]) or "a control token"
                    raise _BrokenCallError(f"The call is malformed: {char!r} instead of {rest!r}.")

    def _word(self, stop: str) -> _Reads[str]:
        """Read up to `stop`; "": up to the bracket of the arguments."""
        stop = stop or "{"
        word = []
        while (char := (yield from self._next(stop))) != stop:
            word.append(char)
        self._take_back(char)
        return "".join(word).strip()

    def _arguments(self, index: int, *, optional: bool) -> _Reads[str | None]:
        """Read a JSON value and release it, if it is an object; returns what is wrong with it."""
        char = " "
        while char.isspace():
            char = yield from self._next()
        if char == "n":
            yield from self._literal("ull")
        elif char not in ("{", "[", '"'):
            self._take_back(char)
            if not optional:
                raise _BrokenCallError(f"The call is malformed: {char!r} instead of arguments.")
        else:
            return (yield from self._value(index, char))
        self._parts.append(CallArguments(index, "{}"))
        return None

    def _value(self, index: int, char: str) -> _Reads[str | None]:
        scanner, value, is_object = JsonScanner(), [], char == "{"
        while True:
            scanner.push(char)
            value.append(char)
            if is_object:
                self._parts.append(CallArguments(index, char))
            if scanner.closed:
                break
            char = yield from self._next()
        try:
            if not is_object:
                text = json.dumps(_object_in("".join(value)))
                self._parts.append(CallArguments(index, text))
            else:
                parse_object("".join(value))
        except ValueError as error:
            return f"The arguments are no JSON object: {error}."
        return None

    def _rest_of_object(self) -> _Reads[None]:
        """What a model may write after the arguments, or leave away: its own id for the call."""
        scanner = JsonScanner()
        scanner.push("{")
        while not scanner.closed:
            scanner.push((yield from self._next()))

    # Characters.

    def _read(self) -> _Reads[str]:
        if self._put_back:
            return self._put_back.pop()
        return _END if self._ended else (yield)

    def _next(self, expected: str = "") -> _Reads[str]:
        """The next character of a call; of control tokens, only the expected one counts."""
        while True:
            char = yield from self._read()
            if char == _END:
                raise _BrokenCallError(ENDED_INSIDE_CALL)
            if char == expected or not _is_mark(char):
                self._raw.append(char)
                return char
            if char == self._trigger[:1]:
                self._put_back.append(char)
                raise _BrokenCallError("Another call begins inside the call.")

    def _take_back(self, char: str) -> None:
        self._put_back.append(char)
        self._raw.pop()

    def _optional(self, literal: str) -> _Reads[str]:
        """Read `literal`, white space aside; "" and nothing read, if something else comes."""
        read: list[str] = []
        at = 0
        while at < len(literal):
            char = yield from self._read()
            read.append(char)
            if char == literal[at]:
                at += 1
            elif char == _END or not (char.isspace() or _is_mark(char)):
                self._put_back += reversed(read)
                return ""
        return "".join(read)

    def _until(self, mark: str, take: Callable[[str], None]) -> _Reads[str]:
        """Take what comes before `mark`, white space in it aside; returns it as it was written.

        "": the answer ended, and all of it was taken.
        """
        held: deque[str] = deque()
        matched = ""
        while (char := (yield from self._read())) != _END:
            held.append(char)
            if matched and char.isspace():
                continue
            matched += char
            while not mark.startswith(matched):
                matched = matched[1:]
                take(held.popleft())
                while held and held[0].isspace():
                    take(held.popleft())
            if matched and matched == mark:
                return "".join(held)
        for char in held:
            take(char)
        return ""

    def _say(self, text: str) -> None:
        self._said = True
        self._parts.append(TextPart(text))

    def _think(self, text: str) -> None:
        self._parts.append(ReasoningPart(text))


class _Prose:
    """Text or thoughts on their way out: white space waits, as a mark after it would end it."""

    def __init__(self, release: Callable[[str], None], leading: str | None, *, waits: bool) -> None:
        self._release = release
        self._leading = leading
        self._waits = waits
        self._space: list[str] = []

    def push(self, char: str) -> None:
        if _is_mark(char):
            return
        if char.isspace() and (self._waits or self._leading is not None):
            self._space.append(char)
            return
        space = "".join(self._space) if self._leading is None else self._leading
        self._release(space + char)
        self._space.clear()
        self._leading = None

    def finish(self) -> None:
        if self._space and self._leading is None:
            self._release("".join(self._space))


class _BrokenCallError(Exception):
    """The call ends here: what comes is not what the format says."""


@dataclass
class _Call:
    index: int
    call_id: str | None = None
    name: str | None = None
    started: bool = False


class _CallMarks:
    """A call format as the parser needs it: its texts without white space."""

    def __init__(self, calls: CallFormat) -> None:
        first = str(calls.call[0])
        self.head = _squeezed(calls.opening + first)
        self.trigger = _squeezed(calls.trigger) if calls.has_markup else ""
        """What opens a call anywhere in the text; "": calls open answers only."""
        self.after_trigger = self.head[len(self.trigger) :]

        separator = _squeezed(calls.separator or "")
        self.next_call = separator or _squeezed(markup_of(first)) or _squeezed(first)
        """What shows that another call follows."""
        if calls.separator is None:
            self.next_call = ""
        self.next_raw = "" if separator else self.next_call
        self.after_next_call = _squeezed(first)[len(self.next_raw) :]
        self.closing = _squeezed(calls.closing)

        parts = [part if isinstance(part, Hole) else _squeezed(part) for part in calls.call[1:]]
        parts = [part for part in parts if part]
        self.arguments_optional = parts[-1] is not Hole.ARGUMENTS
        self.id_ends_object = _id_ends_object(parts)
        if self.id_ends_object:
            after_object = str(parts[-1]).partition("}")[2]
            parts[parts.index(Hole.ARGUMENTS) + 1 :] = [Hole.ID, after_object]
        self.parts = [
            (part, _stop(next_)) for part, next_ in zip(parts, [*parts[1:], ""], strict=True)
        ]
        """After the first literal: literals, and holes with the first character after them."""


def _id_ends_object(parts: list[Part]) -> bool:
    """Whether a call is an object such as `{..., "arguments": {...}, "id": "..."}`."""
    if len(parts) < 4 or parts[-4] is not Hole.ARGUMENTS or parts[-2] is not Hole.ID:
        return False
    return "}" in str(parts[-1]) and "}" not in str(parts[-3])


def _stop(following: Part) -> str:
    return "" if isinstance(following, Hole) else following[:1]


def _object_in(value: str) -> dict[str, Any]:
    """The object that a JSON string holds as JSON text; nothing is the empty object."""
    text = json.loads(value)
    if not isinstance(text, str):
        raise ValueError("a JSON list")
    return {} if text.strip() in ("", "null") else parse_object(text)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _is_mark(char: str) -> bool:
    return "\ud800" <= char <= "\udfff"


def _without_marks(text: str) -> str:
    return "".join(char for char in text if not _is_mark(char))


def _kind(part: AnswerPart) -> tuple[type[AnswerPart], int | None]:
    return type(part), getattr(part, "index", None)


def _joined(parts: list[AnswerPart]) -> AnswerPart:
    """Pieces of one kind as one piece."""
    if len(parts) == 1:
        return parts[0]
    pieces = cast("list[TextPart | ReasoningPart | CallArguments]", parts)
    return replace(pieces[0], text="".join(piece.text for piece in pieces))
