"""The engine as callers see it: submit from any thread or event loop, one thread does the work.

caller ── submit ──> inbox ──> EngineLoop (one thread) ── Scheduler.step ──> Engine
   ^                                                            │
   └──────────── RequestHandle <── Channel <── chunks ──────────┘
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from typing_extensions import Self

from langchain_swarmkv.config import EngineConfig, SamplingParams, SnapshotPolicy
from langchain_swarmkv.engine.contract import Engine, EngineLimits, ModelFacts, Tokenizer
from langchain_swarmkv.engine.factory import open_engine
from langchain_swarmkv.engine.grammar import check_grammar
from langchain_swarmkv.errors import (
    ConfigurationError,
    ContextBudgetError,
    DeviceLockTimeoutError,
    EngineClosedError,
    ForkedProcessError,
    InvalidRequestError,
    SnapshotError,
    SnapshotMismatchError,
)
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.request import Request, RequestHandle
from langchain_swarmkv.scheduling.scheduler import Scheduler, closed_by
from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.snapshot import KVSnapshot, prefix_namespace
from langchain_swarmkv.snapshots.store import SnapshotStore
from langchain_swarmkv.snapshots.tiers import SnapshotTiers
from langchain_swarmkv.statistics import EngineStatistics

__all__ = ["SwarmEngine"]

_log = logging.getLogger(__name__)

_DISK_SLICE_SECONDS = 0.02
"""How long an engine that waits for a file alone waits before it looks at cancels and deadlines."""

_LOCK_SLICE_SECONDS = 1.0
"""How long the engine thread waits for the device before it looks at cancels and deadlines."""

_GATHER_SECONDS = 0.01
"""How long an idle engine waits for another request after one came: agents start together, and
each one that misses the first step waits for all of it."""


class SwarmEngine:
    """One model, one KV pool, any number of callers.

    Every request forks the longest prefix that the pool holds, and requests that arrive together
    share one prefill; nothing has to be declared. All methods are thread safe. Close it, or use it
    as a context manager.

    Args:
        engine: what to load, or an engine that exists already (`FakeEngine()` in tests); the
            latter is then owned and closed here.
        snapshot_memory_bytes: host memory for prefixes that had to leave the pool; 0: none.
        snapshot_dir: folder for prefixes that outlive the process; None: none do. They hold the
            documents in a recoverable form; for encryption give a `snapshot_store`.
        snapshot_policy: what goes there by itself.
        snapshot_store: any `SnapshotStore` in place of a folder; it is owned and closed here.
        device_locks: who may use the device when; None: the one manager that all engines of this
            process share.

    Raises:
        ModelError: the model cannot be loaded.
        SnapshotStorageError: the folder for snapshots cannot be used.
    """

    def __init__(
        self,
        engine: EngineConfig | Engine,
        *,
        snapshot_memory_bytes: int = 1 << 30,
        snapshot_dir: Path | str | None = None,
        snapshot_policy: SnapshotPolicy | str = SnapshotPolicy.WRITE_THROUGH,
        snapshot_store: SnapshotStore | None = None,
        device_locks: DeviceLockManager | None = None,
    ) -> None:
        if not isinstance(engine, EngineConfig | Engine):
            raise ConfigurationError(
                f"engine is a {type(engine).__name__}; give an EngineConfig or an Engine."
            )
        if snapshot_memory_bytes < 0:
            raise ConfigurationError(
                f"snapshot_memory_bytes={snapshot_memory_bytes} is negative; 0 switches it off."
            )
        if snapshot_dir is not None and snapshot_store is not None:
            raise ConfigurationError("give either snapshot_dir or snapshot_store.")
        policy = _checked_policy(snapshot_policy)
        if snapshot_dir is not None:
            snapshot_store = DiskSnapshotStore(snapshot_dir)
        stores = _Stores(MemorySnapshotStore(snapshot_memory_bytes), snapshot_store, policy)
        self._loop = _EngineLoop(engine, stores, device_locks or _process_device_locks())
        self._loop.start()
        self.facts: ModelFacts = self._loop.engine.facts
        self.limits: EngineLimits = self._loop.engine.limits
        self.tokenizer: Tokenizer = self._loop.engine.tokenizer

    @property
    def has_disk(self) -> bool:
        """Whether there is a folder or store for snapshots."""
        return self._loop.has_disk

    @property
    def closed(self) -> bool:
        """Whether requests are refused."""
        return self._loop.closed

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        name: str = "",
        cache_salt: str = "",
        keep_prefix: bool = True,
        pin: str | None = None,
        persist: bool = False,
        timeout_seconds: float | None = None,
    ) -> RequestHandle:
        """Queue a prompt and return at once.

        Args:
            tokens: the whole prompt, shared part included, as token ids.
            params: how to sample; None: greedy, 256 tokens. `max_tokens=0` only prefills.
            name: for statistics and messages.
            cache_salt: requests share prefixes only with requests of the same salt.
            keep_prefix: leave prompt and answer in the pool for later requests. False: a one-shot
                branch, whose cells are free when it ends.
            pin: keep the tokens resident, never evicted, until `release(pin)`. Repeating a pin
                changes nothing.
            persist: write prompt and answer to the disk, whatever the policy. The request ends
                once they are there, and fails with SnapshotStorageError if they cannot be written.
            timeout_seconds: the request fails if it takes longer, waiting included.

        Raises:
            ConfigurationError: `persist` without a folder or store for snapshots.
            InvalidRequestError: an empty prompt, a token id outside the vocabulary, or a pin or a
                cache_salt that is no string.
            ContextBudgetError: prompt and max_tokens can never fit.
            GrammarError: the grammar is too large or too deeply nested to be given to llama.cpp.
                (One that does not parse fails the request instead.)
            EngineClosedError: the engine is closed.
        """
        params = params or SamplingParams()
        self._loop.check_usable()
        if persist and not self._loop.has_disk:
            raise ConfigurationError("persist needs a snapshot_dir or a snapshot_store.")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise InvalidRequestError(
                f"timeout_seconds={timeout_seconds} must be positive or None."
            )
        if pin is not None and not isinstance(pin, str):
            raise InvalidRequestError(f"pin is a {type(pin).__name__}; give a string or None.")
        if params.grammar is not None:
            check_grammar(params.grammar)
        request = self._request(
            tokens,
            params,
            cache_salt=cache_salt,
            name=name,
            keep_prefix=keep_prefix,
            pin=pin,
            persist=persist,
            timeout_seconds=timeout_seconds,
        )
        self._loop.submit(request)
        return RequestHandle(request, self._loop.cancel, self)

    def _request(
        self, tokens: Sequence[int], params: SamplingParams, *, cache_salt: str, **options: Any
    ) -> Request:
        token_list = self._checked(tokens)
        self._check_fits(len(token_list), params.max_tokens)
        return Request(
            token_list,
            params,
            namespace=self._namespace(cache_salt),
            now=self._loop.scheduler.now,
            **options,
        )

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        try:
            ids = np.asarray(tokens, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"token ids must be integers: {error}") from error
        if ids.ndim != 1 or not ids.size:
            raise InvalidRequestError("the prompt has no tokens; at least one is needed.")
        if not np.array_equal(ids, np.asarray(tokens)):
            raise InvalidRequestError("token ids must be integers.")
        outside = ids[(ids < 0) | (ids >= self.facts.n_vocab)]
        if outside.size:
            raise InvalidRequestError(
                f"token id {outside[0]} is outside the vocabulary of {self.facts.n_vocab}.",
                token_id=int(outside[0]),
            )
        checked: list[int] = ids.tolist()
        return checked

    def _check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        needed = num_prompt_tokens + max_tokens
        for limit_name, limit in (
            ("n_ctx", self.limits.num_cells),
            ("n_ctx_train", self.facts.n_ctx_train),
        ):
            if needed > limit:
                raise ContextBudgetError(
                    f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: "
                    f"{needed} together, but {limit_name}={limit}. "
                    + _what_would_fit(limit_name, limit, num_prompt_tokens),
                    needed_tokens=needed,
                    limit_tokens=limit,
                    limit_name=limit_name,
                )

    def _namespace(self, cache_salt: str) -> str:
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(
                f'cache_salt is a {type(cache_salt).__name__}; give a string, or none for "".'
            )
        return prefix_namespace(self.facts.identity.digest, cache_salt)

    def release(self, pin: str) -> bool:
        """Let a pinned prefix be evicted again. False: there was no such pin; harmless."""
        self._loop.check_process()
        scheduler = self._loop.scheduler
        with scheduler.lock:
            return not self.closed and scheduler.cache.release(pin)

    def is_resident(self, tokens: Sequence[int], cache_salt: str = "") -> bool:
        """Whether all of `tokens` lie in the pool now, ready to be forked."""
        self._loop.check_process()
        scheduler = self._loop.scheduler
        with scheduler.lock:
            return not self.closed and scheduler.cache.is_resident(
                self._namespace(cache_salt), self._checked(tokens)
            )

    def reset_prefix_cache(self) -> None:
        """Forget every prefix that is neither pinned nor in use, in the pool and in host memory.

        What lies on disk stays there, and is found again.

        For measurements that shall start cold, and to let go of documents at once.

        Raises:
            EngineClosedError: the engine is closed.
        """
        self._loop.check_usable()
        self._loop.call(self._loop.scheduler.reset_prefix_cache)

    def snapshot(self, tokens: Sequence[int], *, cache_salt: str = "") -> KVSnapshot:
        """The KV of exactly these tokens, computed first as far as it is not in the cache.

        Raises:
            SwarmKVError: as `submit`, or whatever makes the prefill fail.
        """
        self._loop.check_usable()
        request = self._request(
            tokens, SamplingParams(max_tokens=0), cache_salt=cache_salt, wants_snapshot=True
        )
        self._loop.submit(request)
        RequestHandle(request, self._loop.cancel, self).result()
        assert request.snapshot is not None  # taken before the request ended
        return request.snapshot

    def insert(self, snapshot: KVSnapshot, *, cache_salt: str = "") -> None:
        """Make a snapshot one that later requests with this salt may use.

        Raises:
            SnapshotMismatchError: it is of another model, of other settings or of another salt;
                `field` says which.
            SnapshotError: host memory has no room for it, and there is no disk.
            SnapshotStorageError: nor has the disk.
        """
        self._loop.check_usable()
        ours = self.facts.identity
        difference = ours.difference(snapshot.identity)
        if difference is not None:
            raise SnapshotMismatchError(
                f"The snapshot differs in {difference.field}: {difference.theirs or 'none'}; this "
                f"engine has {difference.ours or 'none'}.",
                field=difference.field,
                expected=difference.ours,
                seen=difference.theirs,
            )
        if snapshot.namespace != self._namespace(cache_salt):
            raise SnapshotMismatchError(
                "The snapshot was saved under another cache_salt.", field="cache_salt"
            )
        if not self._loop.insert(snapshot):
            raise SnapshotError(
                f"There is no room in host memory for a snapshot of {snapshot.num_bytes} bytes; "
                "raise snapshot_memory_bytes.",
                num_bytes=snapshot.num_bytes,
            )

    def flush(self) -> None:
        """Wait until every snapshot that is on its way to the disk is there."""
        self._loop.check_usable()
        self._loop.flush()

    def statistics(self) -> EngineStatistics:
        """The engine at this moment; the last picture once it is closed."""
        self._loop.check_process()
        return self._loop.statistics()

    def check(self) -> None:
        """Compare the engine's books with the cache itself, between two steps.

        Raises:
            AssertionError: they differ, a fault of this package.
        """
        self._loop.check_usable()
        self._loop.call(self._loop.scheduler.cache.check)

    def close(self) -> None:
        """Stop. Requests still there fail with EngineClosedError. Harmless when repeated."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        loop: _EngineLoop | None = getattr(self, "_loop", None)
        if loop is not None and not loop.closed and os.getpid() == loop.pid:
            # NOTE: no waiting for the engine thread. The collector runs this on any thread, which
            # may hold what the engine thread needs to get to its end.
            loop.stop()
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        name = self.facts.name if hasattr(self, "facts") else "not loaded"
        return f"<SwarmEngine {name!r} {'closed' if self.closed else 'open'}>"


def _what_would_fit(limit_name: str, limit: int, num_prompt_tokens: int) -> str:
    room = limit - num_prompt_tokens
    if room > 0:
        return f"max_tokens={room} would fit."
    more = "raise n_ctx or " if limit_name == "n_ctx" else ""
    return f"Even without an answer it does not fit: {more}shorten the prompt."


class _EngineLoop:
    """The engine thread. It alone touches the `Engine`, from loading to closing."""

    def __init__(
        self,
        engine: EngineConfig | Engine,
        stores: _Stores,
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
        return self._is_closing

    def check_process(self) -> None:
        if os.getpid() != self.pid:
            raise ForkedProcessError("This engine belongs to the parent process.")

    def check_usable(self) -> None:
        self.check_process()
        if self._is_closing:
            raise EngineClosedError(
                f"Open a new engine; this one was closed{closed_by(self._cause)}"
            ) from self._cause

    def submit(self, request: Request) -> None:
        with self._changed:
            self.check_usable()
            self._inbox.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        # NOTE: called from __del__ too, at any moment and on any thread, so it takes no lock: the
        # flag is seen at the next step, and an engine with this request is stepping or about to.
        request.cancelled = True

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the engine thread between two steps and wait for it."""
        if threading.current_thread() is self._thread:
            function()  # asked for by a progress callback, which would wait for itself
            return
        call = _Call(function)
        with self._changed:
            self.check_usable()
            self._calls.append(call)
            self._changed.notify()
        call.wait()

    def flush(self) -> None:
        try:
            self._tiers.flush()
        except RuntimeError:  # its threads have ended
            self.check_usable()
            raise

    def insert(self, snapshot: KVSnapshot) -> bool:
        if self._tiers.memory.put(snapshot):
            return True
        writing = self._tiers.write(snapshot, must=True)
        if writing is not None:
            writing.result()
        return writing is not None

    def statistics(self) -> EngineStatistics:
        if self._last_statistics is not None:
            return self._last_statistics
        return self.scheduler.statistics()

    def stop(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # the parent's engine: nothing of it can or must be freed here
        self.stop()
        if threading.current_thread() is not self._thread:
            # NOTE: a join that Ctrl-C interrupted takes the thread for ended ever after.
            self._has_ended.wait()
            self._thread.join()

    # -- the engine thread -----------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._run()
        finally:
            self._has_ended.set()

    def _run(self) -> None:
        try:
            self.engine = (
                self._source if isinstance(self._source, Engine) else open_engine(self._source)
            )
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
            inbox, calls = list(self._inbox), list(self._calls)
            self._inbox.clear()
            self._calls.clear()
        for request in inbox:
            self.scheduler.add(request)
        for call in calls:
            call.run()
        return True

    def _gather(self) -> None:
        num_requests = 0
        while num_requests < len(self._inbox) < self.engine.limits.max_sequences:
            num_requests = len(self._inbox)
            self._changed.wait(_GATHER_SECONDS)

    def _step(self) -> None:
        if not self.scheduler.has_work:
            return
        if self.scheduler.waits_for_disk:
            self._wait_for_disk()
            return
        try:
            lease = self._device_locks.acquire(
                self.engine.device, owner=self._owner, timeout_seconds=_LOCK_SLICE_SECONDS
            )
        except DeviceLockTimeoutError:
            with self.scheduler.lock:
                self.scheduler.reap()
            return
        with lease:
            self.scheduler.step()

    def _wait_for_disk(self) -> None:
        with self._changed:
            if not (self._inbox or self._calls or self._is_closing):
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

    def _flush_residents(self) -> None:
        """Under a policy that writes, what the pool still holds goes to disk too."""
        try:
            self.scheduler.flush()
        except Exception as error:  # closing goes on; they can be computed again
            _log.warning("What was in the pool could not be saved: %s", error)


@dataclass(frozen=True)
class _Stores:
    """What an engine is given to keep snapshots in."""

    memory: MemorySnapshotStore
    disk: SnapshotStore | None
    policy: SnapshotPolicy

    def close(self) -> None:
        self.memory.close()
        if self.disk is not None:
            self.disk.close()


def _checked_policy(policy: SnapshotPolicy | str) -> SnapshotPolicy:
    try:
        return SnapshotPolicy(policy)
    except ValueError:
        known = ", ".join(item.value for item in SnapshotPolicy)
        raise ConfigurationError(
            f"snapshot_policy={policy!r} is unknown; there are {known}."
        ) from None


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


@functools.cache
def _process_device_locks() -> DeviceLockManager:
    return DeviceLockManager()


_open_loops: weakref.WeakSet[_EngineLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    loops = list(_open_loops)
    while loops:
        with contextlib.suppress(KeyboardInterrupt):  # the wait is a step long at most, or a load
            loops[-1].close()
            loops.pop()
