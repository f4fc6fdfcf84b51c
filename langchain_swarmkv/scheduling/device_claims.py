"""The lock of one device inside one process: claims, who holds it, who waits, and for how long.

A claim goes NEW -> WAITING -> GRANTED (first in this process; may still wait for other
processes) -> HELD -> ENDED. LOST instead of ENDED when its owner died, FORKED in a child process.

Giving a claim back must work anywhere, even in a finalizer that the garbage collector runs in the
middle of our own critical section. So it never waits for the mutex: the claim is appended to
`_returned`, and whoever has the mutex, or the next one who gets it, takes it back.
"""

from __future__ import annotations

import asyncio
import math
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from langchain_swarmkv.scheduling.fair_queue import Entry, FairQueue, Owner
from langchain_swarmkv.scheduling.process_lock import ProcessLock
from langchain_swarmkv.scheduling.signals import Signal
from langchain_swarmkv.statistics import DeviceStatistics, OwnerLockStatistics, PercentileSeconds

__all__ = ["Claim", "ClaimState", "Device", "DeviceOwner"]

WINDOW = 1024
"""Waits and holds kept for the statistics of one owner."""
MAX_OWNERS = 256
"""Accounts kept at one device; beyond, the idle one with the least use is forgotten."""
LIVENESS_SECONDS = 0.25
"""How often those who wait look whether the holder still lives."""


class ClaimState(Enum):
    """How far a claim has come."""

    NEW = auto()
    WAITING = auto()
    GRANTED = auto()
    HELD = auto()
    ENDED = auto()
    LOST = auto()
    FORKED = auto()


@dataclass(eq=False)
class DeviceOwner(Owner):
    """An owner's account, with its statistics."""

    num_acquired: int = 0
    num_timeouts: int = 0
    wait_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    hold_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


@dataclass(eq=False)
class Claim(Entry):
    """One call of acquire, from its start until its lease is released."""

    owner: DeviceOwner
    signal: Signal = field(kw_only=True)
    thread: threading.Thread = field(kw_only=True)
    loop: asyncio.AbstractEventLoop | None = field(kw_only=True)
    """None for a claim of a thread."""
    made_at: float = field(kw_only=True)
    held_at: float = 0.0
    state: ClaimState = ClaimState.NEW

    @property
    def is_alive(self) -> bool:
        """Whether the thread, or the event loop, that made the claim can still give it back."""
        # The main thread counts as ended while exit handlers, which may close engines, run on it.
        thread_lives = self.thread.is_alive() or self.thread is threading.main_thread()
        if self.loop is None:
            return thread_lives
        return not self.loop.is_closed() and (thread_lives or self.loop.is_running())

    def describe(self) -> str:
        """Who made it, for messages."""
        kind = "thread" if self.loop is None else "event loop of thread"
        return f"{self.owner.name!r} ({kind} {self.thread.name!r})"


class Device:
    """One device's lock in this process. Thread safe.

    Args:
        name: the device.
        process_lock: excludes other processes; None: only this process is guarded.
        clock: seconds, monotonic.
    """

    def __init__(
        self, name: str, process_lock: ProcessLock | None, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self._process_lock = process_lock
        self._clock = clock
        self._mutex = threading.Lock()
        self._queue: FairQueue[Claim] = FairQueue()
        self._current: Claim | None = None
        self._returned: deque[Claim] = deque()
        self._owners: dict[str, DeviceOwner] = {}

    def claim(
        self, owner: str, weight: float, signal: Signal, loop: asyncio.AbstractEventLoop | None
    ) -> Claim:
        """A new claim of the calling thread or loop; `look` puts it into the queue."""
        return Claim(
            self._owners.get(owner) or self._open_account(owner),
            weight,
            signal=signal,
            thread=threading.current_thread(),
            loop=loop,
            made_at=self._clock(),
        )

    def look(self, claim: Claim) -> float:
        """Seconds that `claim` should wait before it looks again; 0: it is granted.

        Whoever waits takes over from a holder that died, and from one whose turn has lapsed.
        """
        lost: Claim | None = None
        with self._mutex:
            self._take_back()
            now = self._clock()
            if claim.state is ClaimState.NEW:
                claim.state = ClaimState.WAITING
                self._queue.join(claim, now)
            self._dispatch(now, asking=claim)
            if claim.state is ClaimState.WAITING:
                lost = self._end_dead_holder()
                self._dispatch(now, asking=claim)
            pause_seconds = self._pause_seconds(claim, now)
        self._settle()
        if lost is not None:
            _warn_of_death(self.name, lost)
        return pause_seconds

    def try_hold(self, claim: Claim) -> bool:
        """Make a granted claim hold the device; False: another process has it, try again."""
        if self._process_lock is not None and not self._process_lock.try_acquire():
            return False
        with self._mutex:
            now = claim.held_at = self._clock()
            claim.state = ClaimState.HELD
            claim.owner.num_acquired += 1
            claim.owner.wait_seconds.append(now - claim.made_at)
        self._settle()
        return True

    def give_back(self, claim: Claim) -> None:
        """End a claim, whatever its state, and pass the lock on. Never blocks."""
        self._returned.append(claim)
        self._settle()

    def count_timeout(self, claim: Claim) -> None:
        """Note that a claim was given up because its time had passed."""
        with self._mutex:
            claim.owner.num_timeouts += 1
        self._settle()

    @property
    def current(self) -> Claim | None:
        """The claim that holds the device, or is first in this process."""
        return self._current

    def foreign_holder_pid(self) -> int | None:
        """Process that took the device last; None if unknown."""
        return None if self._process_lock is None else self._process_lock.holder_pid()

    def disown(self) -> None:
        """In a forked child: every claim is the parent's. The device is of no use afterwards."""
        for claim in (*self._queue.waiting, *([self._current] if self._current else [])):
            claim.state = ClaimState.FORKED

    def statistics(self) -> DeviceStatistics:
        """What was measured so far."""
        with self._mutex:
            self._take_back()
            current = self._current
            held = current is not None and current.state is ClaimState.HELD
            waiting = [claim.owner for claim in self._queue.waiting]
            if current is not None and not held:
                waiting.append(current.owner)
            accounts = [_copy(owner) for owner in self._owners.values()]
        self._settle()
        names_waiting = Counter(owner.name for owner in waiting)
        return DeviceStatistics(
            device=self.name,
            locked=held,
            holder=current.owner.name if current is not None and held else None,
            tasks_waiting=len(waiting),
            owners=tuple(_owner_statistics(one, names_waiting[one.name]) for one in accounts),
        )

    def _settle(self) -> None:
        """Take back what was returned while the mutex was taken; called after every use of it."""
        while self._returned and self._mutex.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._mutex.release()

    def _take_back(self) -> None:
        while self._returned:
            claim = self._returned.popleft()
            if claim is self._current:
                self._end_current(claim, ClaimState.ENDED)
            elif claim.state is ClaimState.WAITING:
                self._queue.leave(claim)
                claim.state = ClaimState.ENDED
            self._dispatch(self._clock())
            self._rouse_first()

    def _pause_seconds(self, claim: Claim, now: float) -> float:
        if claim.state is ClaimState.GRANTED:
            return 0.0
        reserved_seconds = self._queue.reserved_seconds(now) if self._current is None else None
        return LIVENESS_SECONDS if reserved_seconds is None else max(reserved_seconds, 1e-4)

    def _end_current(self, claim: Claim, state: ClaimState) -> None:
        now, held_seconds = self._clock(), 0.0
        if claim.state is ClaimState.HELD:
            held_seconds = now - claim.held_at
            claim.owner.hold_seconds.append(held_seconds)
        self._queue.finish(claim, held_seconds, now)
        claim.state = state
        self._current = None
        # Before the lock is granted again: the next claim uses the same files.
        if self._process_lock is not None:
            self._process_lock.release()

    def _end_dead_holder(self) -> Claim | None:
        """End the claim that has the lock if its owner died; returns it."""
        claim = self._current
        if claim is None or claim.is_alive:
            return None
        self._end_current(claim, ClaimState.LOST)
        return claim

    def _dispatch(self, now: float, asking: Claim | None = None) -> None:
        """Grant the lock if it is free; the one that asks needs no signal."""
        while self._current is None and (claim := self._queue.take(now)) is not None:
            if not claim.is_alive:
                claim.state = ClaimState.LOST
                self._queue.finish(claim, 0.0, now)
                continue
            claim.state = ClaimState.GRANTED
            self._current = claim
            if claim is not asking:
                claim.signal.set()

    def _rouse_first(self) -> None:
        """If the lock is free but reserved, let the first that waits see for how long."""
        if self._current is None and (first := self._queue.first()) is not None:
            first.signal.set()

    def _open_account(self, name: str) -> DeviceOwner:
        with self._mutex:
            if len(self._owners) >= MAX_OWNERS:
                self._forget_an_owner()
            owner = self._owners.setdefault(name, DeviceOwner(name))
        self._settle()
        return owner

    def _forget_an_owner(self) -> None:
        idle = [owner for owner in self._owners.values() if owner.num_active == 0]
        if idle:
            del self._owners[min(idle, key=lambda owner: owner.virtual_seconds).name]


def _copy(owner: DeviceOwner) -> DeviceOwner:
    return replace(
        owner, wait_seconds=owner.wait_seconds.copy(), hold_seconds=owner.hold_seconds.copy()
    )


def _owner_statistics(owner: DeviceOwner, num_waiting: int) -> OwnerLockStatistics:
    return OwnerLockStatistics(
        owner=owner.name,
        num_acquired=owner.num_acquired,
        num_timeouts=owner.num_timeouts,
        wait=_percentiles(owner.wait_seconds),
        hold=_percentiles(owner.hold_seconds),
        num_waiting=num_waiting,
    )


def _percentiles(window: Sequence[float]) -> PercentileSeconds:
    ordered = sorted(window)
    ranks = (_nearest_rank(ordered, percent) for percent in (50, 95, 99))
    return PercentileSeconds(len(ordered), *ranks)


def _nearest_rank(ordered: Sequence[float], percent: int) -> float:
    if not ordered:
        return 0.0
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def _warn_of_death(device: str, claim: Claim) -> None:
    warnings.warn(
        f"{claim.describe()} ended without releasing {device!r}; the next in the queue took over. "
        "Use the lease as a context manager.",
        ResourceWarning,
        stacklevel=4,
    )
