"""`DeviceLockManager`: who may compute on a device, fairly, across engines and processes.

Engines hold the lock for one step (20-1000 ms, or seconds), so models on one device interleave step
by step instead of fighting for its cores or its memory bandwidth inside a step. Of a CPU each takes
as many cores as it computes on, so engines run side by side as far as there are cores for them.
"""

from __future__ import annotations

import asyncio
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from langchain_swarmkv.engine.cores import usable_cores
from langchain_swarmkv.errors import (
    ConfigurationError,
    DeviceLockError,
    DeviceLockNotHeldError,
    DeviceLockTimeoutError,
)
from langchain_swarmkv.scheduling.device_claims import Claim, ClaimState, Device
from langchain_swarmkv.scheduling.process_lock import ProcessLock, private_lock_dir
from langchain_swarmkv.scheduling.signals import LoopSignal, ThreadSignal
from langchain_swarmkv.statistics import LockStatistics

__all__ = ["DeviceLease", "DeviceLockManager", "DevicePlace"]

_MANAGERS: weakref.WeakSet[DeviceLockManager] = weakref.WeakSet()


class DeviceLease:
    """A device held, or some cores of it.

    Leave the `with` (or `async with`) block, or call `release`, to pass it on.

    It belongs to the thread that called `acquire`, or to the event loop that awaited
    `acquire_async`: any thread may release it, but its owner must live until then (see
    `DeviceLockManager` for what happens if not). Collected unreleased, it releases the device
    and gives a ResourceWarning.

    Attributes:
        device: the device.
        owner: who asked for it.
    """

    def __init__(self, device: Device, claim: Claim) -> None:
        self.device = device.name
        self.owner = claim.owner.name
        self._lock = device
        self._claim = claim

    @property
    def held(self) -> bool:
        """Whether the device is still ours."""
        claim: Claim | None = self.__dict__.get("_claim")
        return claim is not None and claim.state is ClaimState.HELD

    def release(self) -> None:
        """Pass the device on; from any thread, never blocking.

        Raises:
            DeviceLockNotHeldError: released already, taken over since the owner died, or held by
                the parent of this forked process.
        """
        # Removing the claim is atomic: of two threads that release, one finds nothing.
        claim: Claim | None = self.__dict__.pop("_claim", None)
        if claim is None or claim.state is not ClaimState.HELD:
            raise DeviceLockNotHeldError(
                f"{self.owner!r} does not hold {self.device!r}: {_reason(claim)}. Release a lease "
                "once, in the process that acquired it.",
                device=self.device,
                owner=self.owner,
            )
        self._lock.give_back(claim)

    def __enter__(self) -> DeviceLease:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Released inside the block is fine; so is a block that a forked child leaves.
        claim: Claim | None = self.__dict__.get("_claim")
        if claim is not None and claim.state is not ClaimState.FORKED:
            self.release()

    async def __aenter__(self) -> DeviceLease:
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(error_type, error, traceback)

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        claim: Claim | None = self.__dict__.pop("_claim", None)
        if claim is not None and claim.state is ClaimState.HELD:
            self._lock.give_back(claim)
            _warn(
                f"A lease of {self.device!r} by {self.owner!r} was dropped without a release.",
                ResourceWarning,
                source=self,
            )


class DevicePlace:
    """A place in the queue for a device, kept until the device is granted or the block is left.

    For one who has other things to see to while it waits. It belongs to the thread that called
    `enqueue`, as a lease does.
    """

    def __init__(
        self, device: Device, claim: Claim, signal: ThreadSignal, clock: Callable[[], float]
    ) -> None:
        self._lock, self._claim, self._signal, self._clock = device, claim, signal, clock
        self._is_left = False

    def wait(self, timeout_seconds: float | None = None) -> DeviceLease | None:
        """Wait so long for the device; None: not yet, and the place is kept.

        Raises:
            DeviceLockError: the lock files cannot be used, or this thread holds the device.
        """
        limit = None if timeout_seconds is None else self._clock() + timeout_seconds
        while pause_seconds := self._lock.poll(self._claim):
            if limit is not None:
                pause_seconds = min(pause_seconds, limit - self._clock())
                if pause_seconds <= 0:
                    return None
            _refuse_waiting_for_itself(self._lock, self._claim)
            self._signal.wait(pause_seconds)
        self._is_left = True
        return DeviceLease(self._lock, self._claim)

    def timeout_error(self) -> DeviceLockTimeoutError:
        """The error of one who gives up now, which is counted."""
        return _timed_out(self._lock, self._claim, self._clock())

    def leave(self) -> None:
        """Wait no longer; harmless once the device was granted, and when repeated."""
        if not self._is_left:
            self._is_left = True
            self._lock.give_back(self._claim)

    def __enter__(self) -> DevicePlace:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()


class DeviceLockManager:
    """Guards each device ("cpu", "cuda:0", ...) across engines, and across processes.

    Share one manager among the engines of a process: fairness is a matter of one manager.
    Making it touches no file; the first use of a device opens its lock files.

    *Cores.* A device whose name is "cpu", or begins with "cpu:", has as many units as this process
    may use cores. A claim of `num_cores` takes so many of them, and waits until they are free all
    together; one without takes the whole device. Any other device is taken whole. The first in the
    queue is never overtaken by one that needs fewer cores, so a wide claim is not starved, and
    those behind it wait although cores are free. Cores are counted, nothing is bound to them.

    *Within the process* waiting owners share the held time by weight (see `fair_queue`); among
    equals, and within one owner, who came first goes first. *Across processes* those who wait take
    turns, one step each, whatever their weights (see `process_lock`); while a process waits for
    another, its claim stays first in its own queue. All see the same cores by their numbers: a
    process that is bound to some of them takes only these.

    *Names.* `owner` is a label for accounts and messages: any number of threads and tasks may use
    the same one, and they exclude each other. So the lock is not re-entrant. A thread that asks
    again while it holds the device, or while a task of its own event loop does, gets a
    DeviceLockError at once. A task that asks again waits until its timeout: pass one.

    *When an owner dies* with the device:
        - the lease is garbage collected: released at once, ResourceWarning;
        - the task was cancelled, or an exception left the block: the block releases;
        - its thread ended, or its event loop was closed, and the lease lives on somewhere: those
          who wait take over within a fraction of a second, ResourceWarning. A lease must hence
          not outlive its thread; a thread that was not started by `threading` never counts as
          dead, nor does a loop that stopped without being closed, in a thread that lives;
        - the process died, even by SIGKILL: the operating system frees the device.
    Not covered: an owner that lives and hangs. Others then get their timeout, with its name.

    *Forks.* A forked child holds nothing and starts anew; what the parent holds stays locked
    for it, and the lock does not outlive the parent.

    Args:
        lock_dir: folder for lock files; None: the one that the environment variable
            SWARMKV_LOCK_DIR names, else one private to the user, in `$XDG_RUNTIME_DIR` or the
            temporary directory. Only processes with the same folder exclude each other: not
            other users, nor containers with a temporary directory of their own.
        across_processes: False: guard this process only, without files.
        cores: numbers of the cores that "cpu" stands for; None: those that this process may use
            (affinity, and limits of its container).
        clock: seconds, monotonic; for tests.
    """

    def __init__(
        self,
        *,
        lock_dir: Path | None = None,
        across_processes: bool = True,
        cores: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if cores is not None and not cores:
            raise ConfigurationError("cores is empty; give at least one number, or None.")
        self._lock_dir = lock_dir
        self._cores = None if cores is None else tuple(cores)
        self._across_processes = across_processes
        self._clock = clock
        self._devices: dict[str, Device] = {}
        _MANAGERS.add(self)

    def check(self, device: str) -> None:
        """Open the device's lock files now, and see that they can be locked.

        Raises:
            DeviceLockError: they cannot be used; the message says what to set.
        """
        self._device(device).check()

    def acquire(
        self,
        device: str,
        *,
        owner: str,
        weight: float = 1.0,
        timeout_seconds: float | None = None,
        num_cores: int | None = None,
    ) -> DeviceLease:
        """Wait for the device; blocks the thread.

        Args:
            device: name of the device; every engine on it must use the same.
            owner: who asks.
            weight: share of the held time beside other owners that wait, above 0.
            timeout_seconds: None: wait for ever. 0: only if it is free at once.
            num_cores: take only so many cores of a CPU; None, or more than there are: all of it.

        Raises:
            DeviceLockTimeoutError: not granted in time; `device`, `owner`, `waited_seconds` and
                `holder` (text, None if unknown) say more.
            DeviceLockError: the lock files cannot be used, or this thread holds the device.
            ConfigurationError: a weight, timeout or number of cores out of range, or an empty name.
        """
        _check_timeout(device, timeout_seconds)
        with self.enqueue(device, owner=owner, weight=weight, num_cores=num_cores) as place:
            lease = place.wait(timeout_seconds)
            if lease is None:
                raise place.timeout_error()
            return lease

    def acquire_nowait(
        self, device: str, *, owner: str, weight: float = 1.0, num_cores: int | None = None
    ) -> DeviceLease:
        """Take the device if it is free; raises as `acquire` with a timeout of 0. Never blocks."""
        return self.acquire(
            device, owner=owner, weight=weight, timeout_seconds=0.0, num_cores=num_cores
        )

    def enqueue(
        self, device: str, *, owner: str, weight: float = 1.0, num_cores: int | None = None
    ) -> DevicePlace:
        """A place in the queue, to `wait` in as often as it takes; arguments as of `acquire`.

        Leave it, or use it as a context manager.
        """
        _check_arguments(device, owner, weight, num_cores)
        signal = ThreadSignal()
        lock = self._device(device)
        claim = lock.claim(owner, weight, signal, None, num_cores)
        return DevicePlace(lock, claim, signal, self._clock)

    async def acquire_async(
        self,
        device: str,
        *,
        owner: str,
        weight: float = 1.0,
        timeout_seconds: float | None = None,
        num_cores: int | None = None,
    ) -> DeviceLease:
        """Like `acquire`, on any asyncio event loop, which is never blocked.

        Cancelled at any moment, the claim leaves the queue, or passes on the lock it was granted.
        """
        _check_timeout(device, timeout_seconds)
        _check_arguments(device, owner, weight, num_cores)
        loop = asyncio.get_running_loop()
        signal = LoopSignal(loop)
        lock = self._device(device)
        claim = lock.claim(owner, weight, signal, loop, num_cores)
        try:
            while pause_seconds := lock.poll(claim):
                if timeout_seconds is not None:
                    left_seconds = timeout_seconds - (self._clock() - claim.made_at)
                    if left_seconds <= 0:
                        raise _timed_out(lock, claim, self._clock())
                    pause_seconds = min(pause_seconds, left_seconds)
                await signal.wait(pause_seconds)
            return DeviceLease(lock, claim)
        except BaseException:
            lock.give_back(claim)
            raise

    def statistics(self) -> LockStatistics:
        """Waits and holds of each owner at each device, over its last 1024 uses."""
        devices = [self._devices[name] for name in sorted(self._devices)]
        return LockStatistics(devices=tuple(device.statistics() for device in devices))

    def _device(self, name: str) -> Device:
        device = self._devices.get(name)
        if device is None:
            # Of two threads that come here at once, one opens files that nobody uses.
            device = self._devices.setdefault(name, self._make_device(name))
        return device

    def _make_device(self, name: str) -> Device:
        units = self._units(name)
        process_lock = None
        if self._across_processes:
            process_lock = ProcessLock(private_lock_dir(self._lock_dir), name, units)
        return Device(name, process_lock, self._clock, len(units))

    def _units(self, device: str) -> tuple[int, ...]:
        if device != "cpu" and not device.startswith("cpu:"):
            return (0,)
        return usable_cores() if self._cores is None else self._cores

    def _forget_parent(self) -> None:
        for device in self._devices.values():
            device.disown()
        self._devices.clear()


def _check_arguments(device: str, owner: str, weight: float, num_cores: int | None) -> None:
    if not device or not owner:
        raise ConfigurationError(
            f"device={device!r}, owner={owner!r}: neither may be empty.",
            device=device,
            owner=owner,
        )
    if not 0 < weight < float("inf"):
        raise ConfigurationError(
            f"weight={weight} is not a finite number above 0.", device=device, weight=weight
        )
    if num_cores is not None and num_cores < 1:
        raise ConfigurationError(
            f"num_cores={num_cores} is below 1. Use None to take the whole device.",
            device=device,
            num_cores=num_cores,
        )


def _check_timeout(device: str, timeout_seconds: float | None) -> None:
    if timeout_seconds is not None and not timeout_seconds >= 0:
        raise ConfigurationError(
            f"timeout_seconds={timeout_seconds} is below 0. Use None to wait for ever.",
            device=device,
            timeout_seconds=timeout_seconds,
        )


def _refuse_waiting_for_itself(lock: Device, claim: Claim) -> None:
    """A thread that blocks cannot release what it holds, nor run the task that holds it."""
    for holder in lock.current:
        if holder is not claim and holder.thread is claim.thread:
            raise DeviceLockError(
                f"This thread would wait for itself: {holder.describe()} has {lock.name!r}, and "
                f"{claim.owner.name!r} asks for it in the same thread. Release it first, or use "
                "acquire_async in tasks.",
                device=lock.name,
                owner=claim.owner.name,
                holder=holder.owner.name,
                retryable=False,
            )


def _reason(claim: Claim | None) -> str:
    if claim is None or claim.state is ClaimState.ENDED:
        return "it was released before"
    if claim.state is ClaimState.FORKED:
        return "it belongs to the parent of this forked process"
    return "its owner ended, and another took over"


def _timed_out(lock: Device, claim: Claim, now: float) -> DeviceLockTimeoutError:
    """Count it, and make the error."""
    lock.count_timeout(claim)
    waited_seconds, holder = now - claim.made_at, _holder_name(lock, claim)
    return DeviceLockTimeoutError(
        f"{claim.owner.name!r} waited {waited_seconds:.3f} s for {lock.name!r}, which is held by "
        f"{holder or 'nobody known'}. Raise timeout_seconds, or find out why it is held so long.",
        device=lock.name,
        owner=claim.owner.name,
        waited_seconds=waited_seconds,
        holder=holder,
    )


def _holder_name(lock: Device, claim: Claim) -> str | None:
    others = [holder.owner.name for holder in lock.current if holder is not claim]
    if others:
        return ", ".join(others)
    pid = lock.foreign_holder_pid()
    if pid is None:
        return None
    return f"process {pid}" if pid != os.getpid() else "another manager of this process"


def _forget_parent() -> None:
    for manager in list(_MANAGERS):
        manager._forget_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
