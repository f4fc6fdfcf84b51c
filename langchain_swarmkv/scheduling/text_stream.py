"""Tokens to text while they arrive: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["TextStream"]


class TextStream:
    """The text of one answer.

    Two things hold text back: bytes that do not yet make a character, and text that may turn out
    to be the beginning of a stop string. An unfinished character at the end becomes one U+FFFD.

    A control token adds nothing to the text, or a mark, but stop strings are compared with its own
    text. They match all of it or none: `<` does not end an answer at `<|im_start|>`.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        # What stop strings are compared with, and where the control tokens stand in it.
        self._held = ""
        self._controls: list[_Control] = []
        self.stopped = False

    def push(self, data: bytes) -> str:
        """Take a token's bytes; return the text that is now certain. Sets `stopped`."""
        return self._release(self._decoder.decode(data))

    def push_control(self, written: str, shown: str) -> str:
        """Take a control token, after the bytes so far; as `push`.

        Args:
            written: what stop strings are compared with.
            shown: what it adds to the text.
        """
        before = self._decoder.decode(b"", final=True)  # and is as new for what comes after
        if not self._stop:
            return before + shown
        start = len(self._held) + len(before)
        self._controls.append(_Control(start, start + len(written), shown))
        return self._release(before + written)

    def finish(self) -> str:
        """Return what was held back. Call once, at the end of the answer."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        return text + self._take(len(self._held))

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        self._held += text
        # The first to be complete, wherever the text was cut into tokens; of several that end
        # together, the one that begins first.
        found = [(at + len(s), at) for s in self._stop if (at := self._find(s)) >= 0]
        if found:
            self.stopped = True
            text = self._take(min(found)[1])
            self._held = ""
            return text
        return self._take(len(self._held) - max(map(self._overlap, self._stop)))

    def _find(self, stop: str) -> int:
        at = self._held.find(stop)
        while at >= 0 and not (self._is_seam(at) and self._is_seam(at + len(stop))):
            at = self._held.find(stop, at + 1)
        return at

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of what is held that is a beginning of `stop`, but not all."""
        held = self._held
        for length in range(min(len(held), len(stop) - 1), 0, -1):
            start = len(held) - length
            if stop.startswith(held[start:]) and self._is_seam(start):
                return length
        return 0

    def _is_seam(self, at: int) -> bool:
        return not any(control.start < at < control.end for control in self._controls)

    def _take(self, length: int) -> str:
        """Let go of the beginning of what is held; returns what it shows."""
        shown, place = [], 0
        while self._controls and self._controls[0].end <= length:
            control = self._controls.pop(0)
            shown += [self._held[place : control.start], control.shown]
            place = control.end
        shown.append(self._held[place:length])
        self._held = self._held[length:]
        self._controls = [
            _Control(start - length, end - length, text) for start, end, text in self._controls
        ]
        return "".join(shown)


class _Control(NamedTuple):
    """Where a control token stands in what is held."""

    start: int
    end: int
    shown: str
