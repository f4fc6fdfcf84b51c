"""The thread that owns one engine, from loading to closing; others reach it through queues."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from langchain_swarmkv.config import EngineConfig, SnapshotPolicy
from langchain_swarmkv.engine.contract import Engine
from langchain_swarmkv.engine.factory import open_engine
from langchain_swarmkv.errors import EngineClosedError, ForkedProcessError
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.request import Request
from langchain_swarmkv.scheduling.scheduler import Scheduler, closed_by
from langchain_swarmkv.scheduling.signals import (
    check_may_wait,
    is_engine_thread,
    set_engine_thread,
)
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.store import SnapshotStore
from langchain_swarmkv.snapshots.tiers import SnapshotTiers
from langchain_swarmkv.statistics import EngineStatistics

__all__ = ["EngineLoop", "Stores"]

_log = logging.getLogger(__name__)

_DISK_SLICE_SECONDS = 0.02
"""How long an engine that waits for a file alone waits before it looks at cancels and deadlines."""

_LOCK_SLICE_SECONDS = 0.05
"""How often an engine that waits for the device looks at cancels, deadlines and new requests. It
keeps its place in the queue meanwhile."""

_GATHER_SECONDS = 0.01
"""How long an idle engine waits for more requests after one came, all in all: agents start
together, and each one that misses the first step waits for all of it."""


class EngineLoop:
    """The engine thread. It alone touches the `Engine`, from loading to closing."""

    def __init__(
        self,
        engine: EngineConfig | Engine,
        stores: Stores,
        device_locks: DeviceLockManager,
    ) -> None:
        self._source = engine
        self._stores = stores
        self.has_disk = stores.disk is not None
        self._device_locks = device_locks
        self._mixed_prefill_tokens = (
            engine.mixed_prefill_tokens if isinstance(engine, EngineConfig) else 128
        )
        # Re-entrant: the collector may call `stop` in the middle of one of the sections below.
        self._changed = threading.Condition(threading.RLock())
        self._inbox: deque[Request] = deque()
        self._calls: deque[_Call] = deque()
        self._is_started = threading.Event()
        self._has_ended = threading.Event()
        self._is_closing = False
        self._cause: BaseException | None = None
        self._last_statistics: EngineStatistics | None = None
        self.pid = os.getpid()
        self.engine: Engine
        self.scheduler: Scheduler
        self._thread = threading.Thread(target=self._main, name="swarmkv-engine", daemon=True)

    # -- any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the engine on its thread and wait for it."""
        # A daemon thread in native code while the interpreter is torn down would crash it.
        _open_loops.add(self)
        self._thread.start()
        try:
            self._is_started.wait()
        except BaseException:  # an interrupt: nobody is left who could close what gets loaded
            self.stop()
            raise
        if self._cause is not None:
            self._thread.join()
            raise self._cause

    @property
    def closed(self) -> bool:
        """Whether requests are refused."""
        return self._is_closing

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the engine's thread: a progress callback does."""
        return threading.current_thread() is self._thread

    def check_process(self) -> None:
        """Refuse a process that was forked from the one with the thread."""
        if os.getpid() != self.pid:
            raise ForkedProcessError("This engine belongs to the parent process.")

    def check_usable(self) -> None:
        """Refuse a loop that is closed, too."""
        self.check_process()
        if self._is_closing:
            raise EngineClosedError(
                f"Open a new engine; this one was closed{closed_by(self._cause)}"
            ) from self._cause

    def submit(self, *requests: Request) -> None:
        """Queue requests; the engine sees all of them at once."""
        with self._changed:
            self.check_usable()
            self._inbox.extend(requests)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Have a request ended at the next step."""
        # NOTE: called from __del__ too, at any moment and on any thread, so it takes no lock: the
        # flag is seen at the next step, and an engine with this request is stepping or about to.
        request.cancelled = True

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the engine thread between two steps and wait for it."""
        if self.is_current_thread:
            function()  # asked for by a progress callback, which would wait for itself
            return
        check_may_wait("Work on another engine's thread")
        call = _Call(function)
        with self._changed:
            self.check_usable()
            self._calls.append(call)
            self._changed.notify()
        call.wait()

    def flush(self) -> None:
        """Wait until what is on its way to the disk is there."""
        self._tiers.flush()

    def insert(self, snapshot: KVSnapshot) -> bool:
        """Keep a snapshot in memory or, without room there, on disk. False: in neither."""
        if self._tiers.memory.put(snapshot):
            return True
        writing = self._tiers.write(snapshot, must=True)
        if writing is not None:
            writing.result()
        return writing is not None

    def statistics(self) -> EngineStatistics:
        """The engine at this moment; the last picture once it is closed."""
        if self._last_statistics is not None:
            return self._last_statistics
        return self.scheduler.statistics()

    def stop(self) -> None:
        """Have the thread come to its end, without waiting for it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def close(self) -> None:
        """Stop and wait; harmless when repeated."""
        if os.getpid() != self.pid:
            return  # the parent's engine: nothing of it can or must be freed here
        self.stop()
        if not is_engine_thread():  # two that wait for each other would wait for ever
            # NOTE: a join that Ctrl-C interrupted takes the thread for ended ever after.
            self._has_ended.wait()
            self._thread.join()

    # -- the engine thread -----------------------------------------------------------------------

    def _main(self) -> None:
        set_engine_thread()
        try:
            self._run()
        finally:
            self._has_ended.set()

    def _run(self) -> None:
        try:
            source = self._source
            self._device_locks.check(
                source.device if isinstance(source, Engine) else source.device_name
            )
            self.engine = source if isinstance(source, Engine) else open_engine(source)
            self._tiers = SnapshotTiers(
                self._stores.memory,
                can_cut=self.engine.limits.can_cut,
                disk=self._stores.disk,
                policy=self._stores.policy,
                wake=self._wake,
            )
            self.scheduler = Scheduler(
                self.engine, self._tiers, mixed_prefill_tokens=self._mixed_prefill_tokens
            )
        except BaseException as error:
            self._cause = error
            self._is_closing = True
            self._stores.close()
            return
        finally:
            self._is_started.set()
        try:
            while self._wait_for_work():
                self._step()
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._cause = error
        finally:
            self._shut_down()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._inbox or self._calls or self.scheduler.has_work or self._is_closing):
                self._changed.wait()
            if not self.scheduler.has_work:
                self._gather()
            if self._is_closing:
                return False
        self._take_in()
        return True

    def _take_in(self) -> None:
        """Give the scheduler the new requests, and do what others asked for."""
        with self._changed:
            inbox, calls = list(self._inbox), list(self._calls)
            self._inbox.clear()
            self._calls.clear()
        for request in inbox:
            self.scheduler.add(request)
        for call in calls:
            call.run()

    def _gather(self) -> None:
        num_requests = 0
        until = monotonic() + _GATHER_SECONDS
        while num_requests < len(self._inbox) < self.engine.limits.max_sequences:
            left_seconds = until - monotonic()
            if left_seconds <= 0:
                break
            num_requests = len(self._inbox)
            self._changed.wait(left_seconds)

    def _step(self) -> None:
        if not self.scheduler.has_work:
            return
        if self.scheduler.waits_for_disk:
            self._wait_for_disk()
            return
        with self._device_locks.enqueue(
            self.engine.device, owner=self._owner, num_cores=self.engine.num_cores
        ) as place:
            while (lease := place.wait(_LOCK_SLICE_SECONDS)) is None:
                self._take_in()
                with self.scheduler.lock:
                    self.scheduler.reap()
                if self._is_closing or not self.scheduler.has_work:
                    return
            with lease:
                self.scheduler.step()

    def _wait_for_disk(self) -> None:
        with self._changed:
            # Looked at anew under the lock: the disk may have answered, and woken nobody.
            if self.scheduler.waits_for_disk and not (
                self._inbox or self._calls or self._is_closing
            ):
                self._changed.wait(_DISK_SLICE_SECONDS)
        with self.scheduler.lock:
            self.scheduler.reap()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    @property
    def _owner(self) -> str:
        return f"{self.engine.facts.name}#{id(self):x}"

    def _shut_down(self) -> None:
        with self._changed:
            self._is_closing = True
            inbox, calls = list(self._inbox), list(self._calls)
        for request in inbox:
            self.scheduler.add(request)
        self.scheduler.abandon_all(self._cause)
        if self._cause is None:
            self._flush_residents()
        self._last_statistics = self.scheduler.statistics()
        for call in calls:
            call.fail(EngineClosedError("The engine was closed."))
        self.engine.close()
        self._tiers.close()
        # What was written, or lost, by closing counts too.
        self._last_statistics = replace(self._last_statistics, **self._tiers.statistics())

    def _flush_residents(self) -> None:
        """Under a policy that writes, what the pool still holds goes to disk too."""
        try:
            self.scheduler.flush()
        except Exception as error:  # closing goes on; they can be computed again
            _log.warning("What was in the pool could not be saved: %s", error)


@dataclass(frozen=True)
class Stores:
    """What an engine is given to keep snapshots in."""

    memory: MemorySnapshotStore
    disk: SnapshotStore | None
    policy: SnapshotPolicy

    def close(self) -> None:
        """Close both: there is no engine that would."""
        self.memory.close()
        if self.disk is not None:
            self.disk.close()


class _Call:
    """A function for the engine thread, and a place to wait for it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


_open_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    loops = list(_open_loops)
    while loops:
        with contextlib.suppress(KeyboardInterrupt):  # the wait is a step long at most, or a load
            loops[-1].close()
            loops.pop()
