"""Tokens to text while they arrive: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["TextStream"]


class TextStream:
    """The text of one answer.

    Two things hold text back: bytes that do not yet make a character, and text that may turn out
    to be the beginning of a stop string. An unfinished character at the end becomes one U+FFFD.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """Take a token's bytes; return the text that is now certain. Sets `stopped`."""
        return self._release(self._decoder.decode(data))

    def push_mark(self, mark: str) -> str:
        """Take a character that no bytes make, after the bytes so far; as `push`."""
        before = self._decoder.decode(b"", final=True)  # and is as new for what comes after
        return self._release(before + mark)

    def finish(self) -> str:
        """Return what was held back. Call once, at the end of the answer."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        pending = self._held + text
        # The first to be complete, wherever the text was cut into tokens; of several that end
        # together, the one that begins first.
        found = [(at + len(s), at) for s in self._stop if (at := pending.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return pending[: min(found)[1]]
        keep = max(_overlap(pending, stop) for stop in self._stop)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop` (but not all of it)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
