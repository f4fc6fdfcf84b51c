"""Who gets a device next: held time shared by weight, first come first served among equals.

Weighted fair queueing. Every owner has a virtual time that grows by held seconds / weight; the
waiting owner with the least goes next. The queue has one too, that of an owner which always got
its fair share: it grows by held seconds / the weights of all that are active. There a newcomer
starts, and one that was idle: so being idle saves up nothing, and however many new names come,
an owner that waits is never overtaken for long.

An owner releases a lock before it asks again, so with two owners only the other one waits at that
moment, and plain waiting would alternate whatever the weights are. Hence the lock stays reserved,
for `RETURN_SECONDS` at most, for an owner that is still owed time and that came back within that
span the last time. One who does not come back is trusted again only after a quick return.

A device may have several units (the cores of a CPU), and entries that take some of them. Then the
account of an owner grows by its share of the device: what is shared is units times seconds. The
first in the queue is never overtaken by one that would fit already: else those that take few units
would starve one that takes many. So the caller takes an entry only when its units are free.

Pure bookkeeping: no threads, no clock; the caller says what time it is and holds a mutex.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["RETURN_SECONDS", "Entry", "FairQueue", "Owner"]

RETURN_SECONDS = 0.01
"""How long a lock is kept free for an owner that is owed it: about what an engine does between
two steps (sampling, scheduling), and little beside a step."""


@dataclass(eq=False)
class Owner:
    """One name's account at one device."""

    name: str
    weight: float = 1.0
    """Of its latest entry."""
    virtual_seconds: float = 0.0
    """Held seconds x share / weight; lifted to the queue's virtual time after being idle."""
    num_active: int = 0
    """Its entries that wait or hold."""
    released_at: float | None = None
    """When its last entry released, until it joins again."""
    returns_at_once: bool = False
    """Whether it joined within `RETURN_SECONDS` of its last release."""


@dataclass(eq=False)
class Entry:
    """One place in the queue; an owner may have several."""

    owner: Owner
    weight: float
    share: float = 1.0
    """Part of the device that it takes; 1: all of it."""
    order: int = 0
    """Counts the entries of a queue, set by `join`."""


EntryT = TypeVar("EntryT", bound=Entry)


class FairQueue(Generic[EntryT]):
    """The waiting entries of one device."""

    def __init__(self) -> None:
        self.waiting: list[EntryT] = []
        self._taken: list[EntryT] = []
        self.virtual_seconds = 0.0
        self._orders = itertools.count()
        self._reserved_for: Owner | None = None
        self._reserved_until = 0.0

    def join(self, entry: EntryT, now: float) -> None:
        """Wait from now on, until `leave` or `take`."""
        owner = entry.owner
        owner.weight = entry.weight
        if owner.num_active == 0:
            self._welcome(owner, now)
        owner.num_active += 1
        entry.order = next(self._orders)
        self.waiting.append(entry)

    def leave(self, entry: EntryT) -> None:
        """Wait no longer; harmless if it does not wait."""
        if entry in self.waiting:
            self.waiting.remove(entry)
            entry.owner.num_active -= 1

    def first(self) -> EntryT | None:
        """The entry that goes next, unless the lock is reserved."""
        return min(
            self.waiting,
            key=lambda entry: (entry.owner.virtual_seconds, entry.order),
            default=None,
        )

    def take(self, now: float) -> EntryT | None:
        """The entry that goes now, to be ended by `finish`; None: none waits, or reserved."""
        entry = self.first()
        if entry is None or self._is_reserved_before(entry, now):
            return None
        self._reserved_for = None
        self.waiting.remove(entry)
        self._taken.append(entry)
        return entry

    def finish(self, entry: EntryT, held_seconds: float, now: float) -> None:
        """Account for an entry that was taken and is done with the lock now."""
        owner = entry.owner
        active = {one.owner for one in (*self.waiting, *self._taken)}
        self._taken.remove(entry)
        used_seconds = held_seconds * entry.share
        owner.virtual_seconds += used_seconds / entry.weight
        self.virtual_seconds += used_seconds / sum(one.weight for one in active)
        owner.num_active -= 1
        if owner.num_active == 0:
            owner.released_at = now
        # Reserved only from those who wait already: a lock that nobody wants is free at once.
        self._reserved_for = owner if owner.returns_at_once and self.waiting else None
        self._reserved_until = now + RETURN_SECONDS

    def reserved_seconds(self, now: float) -> float | None:
        """How long the first entry must wait for the owner that is owed more; None: not at all."""
        entry = self.first()
        if entry is None or not self._is_reserved_before(entry, now):
            return None
        return self._reserved_until - now

    def _welcome(self, owner: Owner, now: float) -> None:
        released_at, owner.released_at = owner.released_at, None
        owner.returns_at_once = released_at is not None and now - released_at <= RETURN_SECONDS
        # One that comes back at once was not idle: it keeps what it is owed.
        if not owner.returns_at_once:
            owner.virtual_seconds = max(owner.virtual_seconds, self.virtual_seconds)

    def _is_reserved_before(self, entry: EntryT, now: float) -> bool:
        owner = self._reserved_for
        return (
            owner is not None
            and now < self._reserved_until
            and owner.virtual_seconds < entry.owner.virtual_seconds
        )
