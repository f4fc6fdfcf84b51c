"""The lock of one device inside one process: claims, who holds it, who waits, and for how long.

A claim goes NEW -> WAITING -> GRANTED (first in this process; may still wait for other
processes) -> HELD -> ENDED. LOST instead of ENDED when its owner died, FORKED in a child process.
Several claims may hold a device of several units; one at a time is GRANTED, so that one thread or
task at a time asks other processes.

Giving a claim back must work anywhere, even in a finalizer that the garbage collector runs in the
middle of our own critical section. So it never waits for the mutex: the claim is appended to
`_returned`, and whoever has the mutex, or the next one who gets it, takes it back.
"""

from __future__ import annotations

import asyncio
import math
import random
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
"""How often those who wait look whether the holders still live."""
POLL_SECONDS = 0.001
"""Mean pause between two tries while another process has the device."""


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
    num_units: int = 1
    """Units of the device that it takes."""
    units: tuple[int, ...] = ()
    """Those that it has, as other processes know them."""
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
        num_units: how many units it has: claims that take no more than these hold it together.
    """

    def __init__(
        self,
        name: str,
        process_lock: ProcessLock | None,
        clock: Callable[[], float],
        num_units: int = 1,
    ) -> None:
        self.name = name
        self.num_units = num_units
        self._process_lock = process_lock
        self._clock = clock
        self._mutex = threading.Lock()
        self._queue: FairQueue[Claim] = FairQueue()
        self._current: list[Claim] = []
        self._returned: deque[Claim] = deque()
        self._owners: dict[str, DeviceOwner] = {}

    def claim(
        self,
        owner: str,
        weight: float,
        signal: Signal,
        loop: asyncio.AbstractEventLoop | None,
        num_units: int | None = None,
    ) -> Claim:
        """A new claim of the calling thread or loop; `look` puts it into the queue.

        It takes so many units of the device, or all that there are: None, and too many, mean all.
        """
        taken = self.num_units if num_units is None else min(num_units, self.num_units)
        return Claim(
            self._owners.get(owner) or self._open_account(owner),
            weight,
            taken / self.num_units,
            num_units=taken,
            signal=signal,
            thread=threading.current_thread(),
            loop=loop,
            made_at=self._clock(),
        )

    def check(self) -> None:
        """See that other processes can be asked; raises DeviceLockError if not."""
        if self._process_lock is not None:
            with self._mutex:
                self._process_lock.check()
            self._settle()

    def poll(self, claim: Claim) -> float:
        """Seconds that `claim` should wait before it asks again; 0: it holds the device."""
        pause_seconds = self.look(claim)
        if pause_seconds == 0.0 and not self.try_hold(claim):
            # Uneven, so that processes do not try in lockstep.
            return POLL_SECONDS * random.uniform(0.5, 1.5)
        return pause_seconds

    def look(self, claim: Claim) -> float:
        """Seconds that `claim` should wait before it looks again; 0: it is granted.

        Whoever waits takes over from holders that died, and from one whose turn has lapsed.
        """
        lost: list[Claim] = []
        with self._mutex:
            self._take_back()
            now = self._clock()
            if claim.state is ClaimState.NEW:
                claim.state = ClaimState.WAITING
                self._queue.join(claim, now)
            self._dispatch(now, asking=claim)
            if claim.state is ClaimState.WAITING:
                lost = self._end_dead_claims()
                self._dispatch(now, asking=claim)
            pause_seconds = self._pause_seconds(claim, now)
        self._settle()
        for one in lost:
            _warn_of_death(self.name, one)
        return pause_seconds

    def try_hold(self, claim: Claim) -> bool:
        """Make a granted claim hold the device; False: other processes have it, try again."""
        try:
            with self._mutex:
                if self._process_lock is not None:
                    units = self._process_lock.try_acquire(claim.num_units)
                    if units is None:
                        return False
                    claim.units = units
                now = claim.held_at = self._clock()
                claim.state = ClaimState.HELD
                claim.owner.num_acquired += 1
                claim.owner.wait_seconds.append(now - claim.made_at)
                # The next one may ask other processes now.
                self._dispatch(now)
        finally:
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
    def current(self) -> tuple[Claim, ...]:
        """The claims that hold the device, and the one that is next in this process."""
        return tuple(self._current)

    def foreign_holder_pid(self) -> int | None:
        """A process that was in the way at the last try; None if unknown."""
        return None if self._process_lock is None else self._process_lock.holder_pid()

    def disown(self) -> None:
        """In a forked child: every claim is the parent's. The device is of no use afterwards."""
        for claim in (*self._queue.waiting, *self._current):
            claim.state = ClaimState.FORKED

    def statistics(self) -> DeviceStatistics:
        """What was measured so far."""
        with self._mutex:
            self._take_back()
            holding = [claim for claim in self._current if claim.state is ClaimState.HELD]
            waiting = [claim.owner for claim in self._queue.waiting]
            waiting += [claim.owner for claim in self._current if claim not in holding]
            accounts = [_copy(owner) for owner in self._owners.values()]
        self._settle()
        names_waiting = Counter(owner.name for owner in waiting)
        return DeviceStatistics(
            device=self.name,
            locked=bool(holding),
            holder=holding[0].owner.name if holding else None,
            holders=tuple(claim.owner.name for claim in holding),
            num_units=self.num_units,
            num_units_held=sum(claim.num_units for claim in holding),
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
            if claim in self._current:
                self._end(claim, ClaimState.ENDED)
            elif claim.state is ClaimState.WAITING:
                self._queue.leave(claim)
                claim.state = ClaimState.ENDED
            self._dispatch(self._clock())
            self._rouse_first()

    def _pause_seconds(self, claim: Claim, now: float) -> float:
        if claim.state is ClaimState.GRANTED:
            return 0.0
        reserved_seconds = self._queue.reserved_seconds(now) if self._has_room else None
        return LIVENESS_SECONDS if reserved_seconds is None else max(reserved_seconds, 1e-4)

    def _end(self, claim: Claim, state: ClaimState) -> None:
        """End a claim that was granted."""
        now, held_seconds = self._clock(), 0.0
        held = claim.state is ClaimState.HELD
        if held:
            held_seconds = now - claim.held_at
            claim.owner.hold_seconds.append(held_seconds)
        self._queue.finish(claim, held_seconds, now)
        claim.state = state
        self._current.remove(claim)
        # Before the units are granted again: the next claim uses the same files.
        if self._process_lock is not None:
            if held:
                self._process_lock.release(claim.units)
            else:
                self._process_lock.give_up()

    def _end_dead_claims(self) -> list[Claim]:
        """End the claims that have units and whose owners died; returns them."""
        dead = [claim for claim in self._current if not claim.is_alive]
        for claim in dead:
            self._end(claim, ClaimState.LOST)
        return dead

    @property
    def _has_room(self) -> bool:
        """Whether the first that waits could be granted now, if nothing is reserved."""
        first = self._queue.first()
        if first is None or any(claim.state is ClaimState.GRANTED for claim in self._current):
            return False
        return first.num_units + sum(claim.num_units for claim in self._current) <= self.num_units

    def _dispatch(self, now: float, asking: Claim | None = None) -> None:
        """Grant units that are free to the first that waits; the one that asks needs no signal."""
        while self._has_room and (claim := self._queue.take(now)) is not None:
            if not claim.is_alive:
                claim.state = ClaimState.LOST
                self._queue.finish(claim, 0.0, now)
                continue
            claim.state = ClaimState.GRANTED
            self._current.append(claim)
            if claim is not asking:
                claim.signal.set()

    def _rouse_first(self) -> None:
        """If there is room but it is reserved, let the first that waits see for how long."""
        if self._has_room and (first := self._queue.first()) is not None:
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
