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
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias, TypeVar, cast

from langchain_swarmkv.prompts.answer_parts import (
    ENDED_INSIDE_CALL,
    AnswerPart,
    CallArguments,
    CallEnd,
    CallStart,
    InvalidCall,
    ReasoningPart,
    TextPart,
)
from langchain_swarmkv.prompts.call_format import CallFormat, Hole, ReasoningTags
from langchain_swarmkv.prompts.call_marks import CallMarks, is_control, is_space, without_control
from langchain_swarmkv.prompts.json_scanner import JsonScanner, parse_object

__all__ = ["AnswerParser", "new_call_id"]

_END = ""
"""Read, again and again, at the end of the answer."""

_T = TypeVar("_T")
_Reads: TypeAlias = Generator[None, str, _T]
"""Is sent the characters of the answer, one by one."""


def new_call_id() -> str:
    """A name for a call that the model gave none."""
    return f"call_{uuid.uuid4().hex}"


class AnswerParser:
    """One answer. `push` its text as it comes, then `finish`; both return what has become certain.

    Args:
        calls: how this model writes calls; None: it makes none.
        reasoning: what stands around its thoughts; None: it writes none.
        starts_in_reasoning: the prompt ends with the opening tag.
        checks: by the tools' names, what says why whole arguments do not fit.
        new_call_id: names calls whose id does not come before their arguments.
    """

    def __init__(
        self,
        *,
        calls: CallFormat | None,
        reasoning: ReasoningTags | None,
        starts_in_reasoning: bool = False,
        checks: Mapping[str, Callable[[Mapping[str, Any]], str | None]] | None = None,
        new_call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._calls = None if calls is None else CallMarks(calls)
        self._trigger = "" if self._calls is None else self._calls.trigger
        self._reasoning = reasoning
        self._starts_in_reasoning = starts_in_reasoning
        self._checks = checks or {}
        self._new_call_id = new_call_id

        self.may_think = True
        """Whether what comes next may belong to thoughts, their tags included."""
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
        marks = self._calls
        yield from self._thoughts()
        self.may_think = False
        missing = yield from self._text() if self._trigger else self._bare_call()
        while marks and missing is not None:
            missing = yield from self._call(missing, marks)

    def _thoughts(self) -> _Reads[None]:
        if self._reasoning is None:
            return
        opened = yield from self._optional(self._reasoning.opening, exact=True)
        if opened or self._starts_in_reasoning:
            thoughts = _Prose(self._think, leading="", waits=True)
            yield from self._until(self._reasoning.closing, thoughts.push)
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

    def _call(self, missing: str, marks: CallMarks) -> _Reads[str | None]:
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

    def _inside_call(self, call: _Call, missing: str, marks: CallMarks) -> _Reads[str | None]:
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
                error = yield from self._arguments(call, marks)
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
        raw = without_control("".join(self._raw)).strip()
        self._parts.append(InvalidCall(call.index, call_id, call.name, raw, error))

    def _after_call(self, marks: CallMarks) -> _Reads[str | None]:
        # Pieces of text that a call parts would run into each other.
        self._leading = "\n" if self._said else ""
        closed = yield from self._optional(marks.closing, may_be_cut=True)
        if closed:
            return (yield from self._text())
        opened = yield from self._optional(marks.next_call, may_be_cut=True)
        if opened:
            self._raw = list(opened) if marks.next_raw else []
            return marks.after_next_call
        return (yield from self._text())

    # What calls are made of.

    def _literal(self, literal: str) -> _Reads[None]:
        for at, expected in enumerate(literal):
            while (char := (yield from self._next(expected))) != expected:
                if not is_space(char):
                    self._take_back(char)
                    rest = without_control(literal[at:]) or "a control token"
                    raise _BrokenCallError(f"The call is malformed: {char!r} instead of {rest!r}.")

    def _word(self, stop: str) -> _Reads[str]:
        """Read up to `stop`; "": up to the bracket of the arguments."""
        stop = stop or "{"
        word = []
        while (char := (yield from self._next(stop))) != stop:
            word.append(char)
        self._take_back(char)
        return "".join(word).strip()

    def _arguments(self, call: _Call, marks: CallMarks) -> _Reads[str | None]:
        """Read a JSON value and release it, if it is an object; returns what is wrong with it."""
        char = " "
        while is_space(char):
            char = yield from self._next()
        if char in ("{", "[", '"'):
            return (yield from self._value(call, char, marks))
        if char == "n":
            yield from self._literal("ull")
        else:
            self._take_back(char)
            if not marks.arguments_optional:
                raise _BrokenCallError(f"The call is malformed: {char!r} instead of arguments.")
        self._parts.append(CallArguments(call.index, "{}"))
        return self._misfit(call, {})

    def _value(self, call: _Call, char: str, marks: CallMarks) -> _Reads[str | None]:
        scanner, value, is_object = JsonScanner(), [], char == "{"
        while True:
            if char == marks.ends_arguments and not scanner.in_string:
                self._take_back(char)
                raise _BrokenCallError(f"The arguments are no JSON object: {char!r} in it.")
            scanner.push(char)
            value.append(char)
            if is_object:
                self._parts.append(CallArguments(call.index, char))
            if scanner.closed:
                break
            char = yield from self._next()
        text = "".join(value)
        try:
            arguments = parse_object(text) if is_object else _object_in(text)
        except ValueError as error:
            return f"The arguments are no JSON object: {error}."
        if not is_object:
            self._parts.append(CallArguments(call.index, json.dumps(arguments)))
        return self._misfit(call, arguments)

    def _misfit(self, call: _Call, arguments: Mapping[str, Any]) -> str | None:
        check = self._checks.get(call.name or "")
        return None if check is None else check(arguments)

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
            if char == expected or not is_control(char):
                self._raw.append(char)
                return char
            if char == self._trigger[:1]:
                self._put_back.append(char)
                raise _BrokenCallError("Another call begins inside the call.")

    def _take_back(self, char: str) -> None:
        self._put_back.append(char)
        self._raw.pop()

    def _optional(
        self, literal: str, *, exact: bool = False, may_be_cut: bool = False
    ) -> _Reads[str]:
        """Read `literal`; "" and nothing read, if something else comes.

        White space before it does not count; nor does that in it, unless it must be `exact`.
        """
        read: list[str] = []
        at = 0
        while at < len(literal):
            char = yield from self._read()
            read.append(char)
            if char == literal[at]:
                at += 1
            elif may_be_cut and at and char == _END:
                break
            elif char == _END or (exact and at) or not (is_space(char) or is_control(char)):
                self._put_back += reversed(read)
                return ""
        return "".join(read)

    def _until(self, mark: str, take: Callable[[str], None]) -> _Reads[str]:
        """Take what comes before `mark`, and return the mark; "": the answer ended, all was taken.

        The mark is spelled exactly: what is not, the answer's guide has not held.
        """
        matched = ""
        while (char := (yield from self._read())) != _END:
            matched += char
            while not mark.startswith(matched):
                take(matched[0])
                matched = matched[1:]
            if matched and matched == mark:
                return mark
        for char in matched:
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
        if is_control(char):
            return
        if is_space(char) and (self._waits or self._leading is not None):
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


def _object_in(value: str) -> dict[str, Any]:
    """The object that a JSON string holds as JSON text; nothing is the empty object."""
    if value[0] != '"':
        raise ValueError("a JSON list")
    text = json.loads(value)
    return {} if text.strip() in ("", "null") else parse_object(text)


def _kind(part: AnswerPart) -> tuple[type[AnswerPart], int | None]:
    return type(part), getattr(part, "index", None)


def _joined(parts: list[AnswerPart]) -> AnswerPart:
    """Pieces of one kind as one piece."""
    if len(parts) == 1:
        return parts[0]
    pieces = cast("list[TextPart | ReasoningPart | CallArguments]", parts)
    return replace(pieces[0], text="".join(piece.text for piece in pieces))
