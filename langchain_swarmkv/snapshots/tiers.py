"""Memory over disk, as one engine uses them.

    find    which tier holds the most of a prompt; reads heads only
    fetch   read a snapshot from disk, on another thread
    put     keep one: in memory, and on disk as the policy says, on another thread

The engine's thread calls these and never waits for a disk. What cannot be read or written is told
in the log and counted: a snapshot is a copy of what can be computed again, so no request fails for
it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

from langchain_swarmkv.config import SnapshotPolicy
from langchain_swarmkv.errors import SnapshotError
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.prefix_index import PrefixIndex, TokenIds
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.store import FoundPrefix, SnapshotStore, StoredPrefix

__all__ = ["Fetch", "SnapshotTiers", "Tier", "TierCounters", "TierMatch"]

_log = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 2 << 30
"""Snapshots that wait to be written take memory too; more than this is not queued."""

Fetch = Future[StoredPrefix | None]
"""What was read from disk; None: it is gone, or cannot be used."""


class Tier(str, Enum):
    """Where a snapshot lies."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True)
class TierMatch:
    """The best snapshot for a prompt, and where it lies."""

    tier: Tier
    found: FoundPrefix


@dataclass
class TierCounters:
    """Counted since the engine started."""

    num_disk_reads: int = 0
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0
    num_disk_writes: int = 0
    num_disk_failures: int = 0
    """Reads and writes that failed, and writes for which there was no room in the queue."""


class SnapshotTiers:
    """One engine's stores; it closes them.

    Args:
        memory: the tier for what had to leave the pool.
        can_cut: whether the engine can use a part of a snapshot.
        disk: the tier that outlives the process; None: there is none.
        policy: what goes to disk by itself.
        wake: called on another thread when a fetch has ended.
    """

    def __init__(
        self,
        memory: MemorySnapshotStore,
        *,
        can_cut: bool,
        disk: SnapshotStore | None = None,
        policy: SnapshotPolicy = SnapshotPolicy.NEVER,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.memory = memory
        self.disk = disk
        self.counters = TierCounters()
        self._can_cut = can_cut
        self._policy = policy if disk is not None else SnapshotPolicy.NEVER
        self._wake = wake
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="swarmkv-snapshot-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="swarmkv-snapshot-writer")
        self._fetches: dict[str, Fetch] = {}
        self._lock = threading.Lock()
        # Under the lock: the snapshots that wait to be written, by key, and their bytes.
        self._queued: PrefixIndex[str] = PrefixIndex()
        self._queued_bytes = 0
        if self._policy is SnapshotPolicy.WRITE_BACK:
            memory.on_evict = self.write

    @property
    def writes_through(self) -> bool:
        """Whether a prefix goes to disk as soon as it has been computed."""
        return self._policy is SnapshotPolicy.WRITE_THROUGH

    @property
    def saves_at_the_end(self) -> bool:
        """Whether what is still in the pool shall be put here when the engine closes."""
        return self._policy is not SnapshotPolicy.NEVER

    # -- finding ---------------------------------------------------------------------------------

    def find(self, namespace: str, tokens: TokenIds, min_tokens: int) -> TierMatch | None:
        """The snapshot that shares most with a prompt; in memory, where both share as much."""
        best: TierMatch | None = None
        for tier in Tier:
            found = self._find_in(tier, namespace, tokens, min_tokens)
            if found and found.num_tokens > (best.found.num_tokens if best else 0):
                best = TierMatch(tier, found)
        return best

    def holds(self, tier: Tier, namespace: str, tokens: TokenIds) -> bool:
        """Whether a snapshot of all these tokens, or of more, lies there or is on its way."""
        if tier is Tier.DISK:
            with self._lock:
                search = self._queued.longest if self._can_cut else self._queued.longest_whole
                queued = search(namespace, tokens)
            if queued is not None and queued.num_tokens == len(tokens):
                return True
        return self._find_in(tier, namespace, tokens, len(tokens)) is not None

    def _find_in(
        self, tier: Tier, namespace: str, tokens: TokenIds, min_tokens: int
    ) -> FoundPrefix | None:
        store = self.memory if tier is Tier.MEMORY else self.disk
        if store is None:
            return None
        try:
            return store.find(namespace, tokens, can_cut=self._can_cut, min_tokens=min_tokens)
        except SnapshotError as error:
            self._note_failure("looked through", error)
            return None

    # -- reading ---------------------------------------------------------------------------------

    def fetch(self, match: TierMatch, namespace: str, tokens: TokenIds) -> Fetch:
        """Begin to read what was found on disk; those who want the same share one reading."""
        key = match.found.key
        fetch = self._fetches.get(key)
        if fetch is None or fetch.done():
            self._fetches = {k: f for k, f in self._fetches.items() if not f.done()}
            fetch = self._fetches[key] = self._reader.submit(
                self._read, namespace, tokens, match.found.num_tokens
            )
            fetch.add_done_callback(lambda _: self._wake())
        return fetch

    def _read(self, namespace: str, tokens: TokenIds, min_tokens: int) -> StoredPrefix | None:
        assert self.disk is not None
        started = time.perf_counter()
        try:
            stored = self.disk.get(namespace, tokens, can_cut=self._can_cut, min_tokens=min_tokens)
        except SnapshotError as error:
            self._note_failure("read", error)
            return None
        if stored is None:
            return None
        self.counters.num_disk_reads += 1
        self.counters.disk_read_bytes += stored.snapshot.num_bytes
        self.counters.disk_read_seconds += time.perf_counter() - started
        self.memory.put(stored.snapshot)
        return stored

    # -- writing ---------------------------------------------------------------------------------

    def put(self, snapshot: KVSnapshot) -> bool:
        """Keep what leaves the pool. False: neither tier takes it."""
        kept = self.memory.put(snapshot)
        if self._policy is SnapshotPolicy.NEVER or (kept and not self.writes_through):
            return kept
        if self.holds(Tier.DISK, snapshot.namespace, snapshot.tokens):
            return True
        return self.write(snapshot) or kept

    def has_room(self, num_bytes: float) -> bool:
        """Whether so much could be put and nothing else be lost for it."""
        if self._policy is not SnapshotPolicy.NEVER:
            return True
        return self.memory.num_bytes + num_bytes <= self.memory.max_bytes

    def get(self, namespace: str, tokens: TokenIds, min_tokens: int) -> StoredPrefix | None:
        """What memory holds of a prompt."""
        return self.memory.get(namespace, tokens, can_cut=self._can_cut, min_tokens=min_tokens)

    def remove(self, key: str) -> None:
        """Drop what turned out not to load, from both tiers."""
        self.memory.remove(key)
        if self.disk is not None:
            self.disk.remove(key)

    def write(self, snapshot: KVSnapshot) -> bool:
        """Queue a snapshot for the disk, whatever the policy. False: there is no room to."""
        key, num_bytes = snapshot.key, snapshot.num_bytes
        with self._lock:
            if self.disk is None:
                return False
            if key in self._queued:
                return True
            if self._queued_bytes and self._queued_bytes + num_bytes > _MAX_QUEUED_BYTES:
                self.counters.num_disk_failures += 1
                _log.warning("The disk is slower than the engine: a snapshot was not written.")
                return False
            self._queued.insert(snapshot.namespace, snapshot.tokens, key)
            self._queued_bytes += num_bytes
        self._writer.submit(self._write, snapshot)
        return True

    def _write(self, snapshot: KVSnapshot) -> None:
        assert self.disk is not None
        try:
            if not self.disk.put(snapshot):
                raise SnapshotError(f"the store has no room for {snapshot.num_bytes} bytes.")
            self.counters.num_disk_writes += 1
        except SnapshotError as error:
            self._note_failure("written", error)
        finally:
            with self._lock:
                self._queued.remove(snapshot.key)
                self._queued_bytes -= snapshot.num_bytes

    def flush(self) -> None:
        """Wait until everything that was queued is on disk."""
        self._writer.submit(lambda: None).result()

    def clear_memory(self) -> None:
        """Forget what memory holds."""
        self.memory.clear()

    def close(self) -> None:
        """Write what is queued, under WRITE_BACK also what only memory holds, and close all."""
        if self._policy is SnapshotPolicy.WRITE_BACK:
            for snapshot in self.memory.snapshots():
                self.write(snapshot)
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.memory.close()
        if self.disk is not None:
            self.disk.close()

    def _note_failure(self, verb: str, error: SnapshotError) -> None:
        self.counters.num_disk_failures += 1
        _log.warning("A snapshot could not be %s: %s", verb, error)
