"""The date and time that a template writes into a prompt.

A template that asks for the time gives other tokens whenever it is asked, and nothing behind them
is shared. So a prompt is rendered at one instant; and a document, or a conversation that goes on,
keeps the instant at which this process first met it. A `DocumentRef` carries it further.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from langchain_swarmkv.errors import ConfigurationError

__all__ = ["Clock", "PromptTimes", "as_instant", "prompt_times", "read_clock", "run_digests"]

Clock: TypeAlias = datetime | Callable[[], datetime]
"""An instant, or what tells one whenever it is asked."""

Present: TypeAlias = Callable[[Sequence[bytes]], datetime]
"""Gives the instant of messages that this process has not met, from `run_digests` of them."""

MAX_TIMES = 4096
"""Documents, and conversations, whose instant is remembered; those used longest ago go first."""


def read_clock(clock: Clock | None) -> datetime:
    """The present instant of a clock, once; None: of the machine's.

    Raises:
        ConfigurationError: the clock tells something that is no time.
    """
    if clock is None:
        return _whole(datetime.now())
    told = clock() if callable(clock) else clock
    if not isinstance(told, datetime):
        raise ConfigurationError(
            f"clock gave a {type(told).__name__}; it must give a datetime, best with a time zone."
        )
    return _whole(told)


def as_instant(given: object) -> datetime:
    """An instant from a datetime or from the text that a `DocumentRef` has.

    Raises:
        ConfigurationError: it is neither.
    """
    if isinstance(given, datetime):
        return _whole(given)
    try:
        return _whole(datetime.fromisoformat(given))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"prompt_time={given!r}: give a datetime, or what DocumentRef['prompt_time'] says "
            "(ISO 8601, '2026-12-01T09:30:00+01:00')."
        ) from None


def _whole(instant: datetime) -> datetime:
    """With its offset, and as its text reads again: `%Z` must not change on the way."""
    try:
        zoned = instant if instant.tzinfo is not None else instant.astimezone()
        return datetime.fromisoformat(zoned.isoformat())
    except (OverflowError, OSError, ValueError) as error:
        raise ConfigurationError(f"{instant!r} has no place in the local time zone.") from error


class PromptTimes:
    """Remembers at which instant documents and conversations were first rendered.

    A **document** is a run of messages that was prefilled, or counted as one; whatever begins with
    it has its instant. A **conversation** was asked, and only what goes on from it has its instant:
    the same question asked again is asked now. Thread safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._documents: dict[bytes, datetime] = {}
        self._conversations: dict[bytes, datetime] = {}

    def document(self, salt: str, turns: Sequence[Mapping[str, Any]], present: Present) -> datetime:
        """The instant of a document, or of what it begins with; a new one's is the present."""
        digests = run_digests(salt, turns)
        new = self._present_if_new(digests, present)
        with self._lock:
            instant = self._known(digests) or new
            _keep(self._documents, digests[-1], instant)
            return instant

    def set_document(
        self, salt: str, turns: Sequence[Mapping[str, Any]], instant: datetime
    ) -> None:
        """From now on this is the document's instant."""
        digest = run_digests(salt, turns)[-1]
        with self._lock:
            _keep(self._documents, digest, instant)

    def conversation(
        self,
        salt: str,
        turns: Sequence[Mapping[str, Any]],
        present: Present,
        *,
        num_document_turns: int = 0,
        is_asked: bool = True,
    ) -> datetime:
        """The instant of a prompt.

        Args:
            salt: nothing is shared between salts.
            turns: the whole conversation.
            present: gives it if nothing is known of how it begins.
            num_document_turns: how many turns at the start are a document, by their own account.
            is_asked: False: the prompt is only counted, and not remembered.
        """
        digests = run_digests(salt, turns)
        new = self._present_if_new(digests, present)
        with self._lock:
            instant = self._known(digests) or new
            if num_document_turns:
                _keep(self._documents, digests[num_document_turns - 1], instant)
            if is_asked:
                _keep(self._conversations, digests[-1], instant)
            return instant

    def _present_if_new(self, digests: Sequence[bytes], present: Present) -> datetime:
        # A user's clock is not called with the lock held.
        with self._lock:
            known = self._known(digests)
        return known or present(digests)

    def _known(self, digests: Sequence[bytes]) -> datetime | None:
        for place in reversed(range(len(digests))):
            instant = self._documents.get(digests[place])
            if instant is None and place < len(digests) - 1:
                instant = self._conversations.get(digests[place])
            if instant is not None:
                return instant
        return None


def run_digests(salt: str, turns: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """One digest for each run of turns at the start, the longest last; the same in any process."""
    digest = hashlib.sha256(json.dumps(salt).encode())
    digests = []
    for turn in turns:
        digest.update(hashlib.sha256(json.dumps(turn, default=str).encode()).digest())
        digests.append(digest.digest())
    return digests


def _keep(times: dict[bytes, datetime], digest: bytes, instant: datetime) -> None:
    times.pop(digest, None)
    times[digest] = instant
    if len(times) > MAX_TIMES:
        del times[next(iter(times))]


prompt_times = PromptTimes()
"""Those of this process: models with equal prompts share engines, whichever object asks."""
