"""Memory over disk, as one engine uses them.

    find    which tier holds the most of a prompt; reads heads only
    fetch   read a snapshot from disk, on another thread
    put     keep one: in memory, and on disk as the policy says, on another thread

The engine's thread calls these and never waits for a disk. What cannot be read or written is told
in the log and counted: a snapshot is a copy of what can be computed again, so no request fails for
it, but those that asked to be written. Stores may be the caller's own, so whatever they raise is
caught.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from langchain_swarmkv.config import SnapshotPolicy
from langchain_swarmkv.errors import SnapshotError, SnapshotStorageError
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.prefix_index import PrefixIndex, TokenIds
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.store import FoundPrefix, SnapshotStore, StoredPrefix
from langchain_swarmkv.snapshots.worker import Worker

__all__ = ["Fetch", "SnapshotTiers", "Tier", "TierCounters", "TierMatch", "Writing"]

_log = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 2 << 30
"""Snapshots that wait to be written take memory too; more than this is not queued."""

_TELL_AGAIN_SECONDS = 60.0
"""A folder that is gone is looked for at every step."""
_READING_TOKENS = 16
"""So few tokens are computed sooner than a file is read."""

Fetch = Future[StoredPrefix | None]
"""What was read from disk; None: it is gone, or cannot be used."""

Writing = Future[None]
"""Done when a snapshot is on disk, or with the error that kept it from there."""


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
        wake: called on another thread when a reading or a writing has ended.
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
        self._reader = Worker("swarmkv-snapshot-reader") if disk is not None else None
        self._writer = Worker("swarmkv-snapshot-writer") if disk is not None else None
        self._told_at: dict[str, float] = {}
        self._lock = threading.Lock()
        # Under the lock: what is being read, and the snapshots that wait to be written, by key.
        self._fetches: dict[str, Fetch] = {}
        self._queued: PrefixIndex[str] = PrefixIndex()
        self._writings: dict[str, Writing] = {}
        self._queued_bytes = 0
        if self._policy is SnapshotPolicy.WRITE_BACK:
            memory.on_evict = self._write_back

    @property
    def writes_through(self) -> bool:
        """Whether a prefix goes to disk as soon as it has been computed."""
        return self._policy is SnapshotPolicy.WRITE_THROUGH

    @property
    def saves_at_the_end(self) -> bool:
        """Whether what is still in the pool shall be put here when the engine closes."""
        return self._policy is not SnapshotPolicy.NEVER

    # -- finding ---------------------------------------------------------------------------------

    def find(
        self, namespace: str, tokens: TokenIds, min_tokens: int, *, needs_logits: bool
    ) -> list[TierMatch]:
        """The best snapshot of each tier for a prompt; that to be tried first is first.

        Args:
            namespace: only snapshots of this one are seen.
            tokens: the whole prompt.
            min_tokens: what shares less is left out.
            needs_logits: where all of the prompt is held, the logits after it must be, too; without
                them its last token is left to be computed.
        """
        matches = []
        for tier in Tier:
            found = self._find_in(tier, namespace, tokens, min_tokens)
            if found and needs_logits and _lacks_logits(found, len(tokens)):
                found = self._find_in(tier, namespace, tokens[:-1], min_tokens)
            if found:
                matches.append(TierMatch(tier, found))
        matches.sort(key=_worth_tokens, reverse=True)
        return matches

    def holds(self, tier: Tier, namespace: str, tokens: TokenIds) -> bool:
        """Whether a snapshot of all these tokens, or of more, lies there or is on its way."""
        is_coming = tier is Tier.DISK and self.pending(namespace, tokens) is not None
        return is_coming or self._find_in(tier, namespace, tokens, len(tokens)) is not None

    def is_on_disk(self, namespace: str, tokens: TokenIds) -> bool:
        """Whether a snapshot of all these tokens, or of more, lies there by now."""
        return self._find_in(Tier.DISK, namespace, tokens, len(tokens)) is not None

    def pending(self, namespace: str, tokens: TokenIds) -> Writing | None:
        """The writing of a snapshot of all these tokens, or of more, that has not ended."""
        with self._lock:
            queued = self._queued.best(namespace, tokens, can_cut=self._can_cut)
            if queued is None or queued.num_tokens < len(tokens):
                return None
            return self._writings[next(iter(queued.holders))]

    def _find_in(
        self, tier: Tier, namespace: str, tokens: TokenIds, min_tokens: int
    ) -> FoundPrefix | None:
        store = self.memory if tier is Tier.MEMORY else self.disk
        if store is None:
            return None
        try:
            found = store.find(namespace, tokens, can_cut=self._can_cut, min_tokens=min_tokens)
            if found is not None:
                _check_found(found, tokens)
        except BaseException as error:
            self._note_failure("looked for", error)
            return None
        return found

    # -- reading ---------------------------------------------------------------------------------

    def fetch(self, match: TierMatch, namespace: str, tokens: TokenIds) -> Fetch:
        """Begin to read what was found on disk for `tokens`; all who want it share one reading."""
        key = match.found.key
        with self._lock:
            fetch = self._fetches.get(key)
            if fetch is None:
                assert self._reader is not None  # only a disk finds something to fetch
                fetch = self._reader.submit(lambda: self._read(key, namespace, tokens))
                self._fetches[key] = fetch
        fetch.add_done_callback(lambda _: self._wake())
        return fetch

    def _read(self, key: str, namespace: str, tokens: TokenIds) -> StoredPrefix | None:
        try:
            # A reading that has just ended may have brought it.
            return self.get(namespace, tokens, len(tokens)) or self._read_disk(namespace, tokens)
        finally:
            with self._lock:
                del self._fetches[key]

    def _read_disk(self, namespace: str, tokens: TokenIds) -> StoredPrefix | None:
        assert self.disk is not None
        started, min_tokens = time.perf_counter(), len(tokens)
        try:
            stored = self.disk.get(namespace, tokens, can_cut=self._can_cut, min_tokens=min_tokens)
            if stored is None:
                return None
            _check_stored(stored, namespace, tokens)
            self.memory.put(stored.snapshot)
        except BaseException as error:
            self._note_failure("read", error)
            return None
        self.counters.num_disk_reads += 1
        self.counters.disk_read_bytes += stored.snapshot.num_bytes
        self.counters.disk_read_seconds += time.perf_counter() - started
        return stored

    # -- writing ---------------------------------------------------------------------------------

    def put(self, snapshot: KVSnapshot) -> bool:
        """Keep what leaves the pool. False: neither tier takes it."""
        kept = self.memory.put(snapshot)
        if self._policy is SnapshotPolicy.NEVER or (kept and not self.writes_through):
            return kept
        if self.holds(Tier.DISK, snapshot.namespace, snapshot.tokens):
            return True
        return self.write(snapshot) is not None or kept

    def has_room(self, num_bytes: float) -> bool:
        """Whether so much could be put, and nothing be lost for it that the disk does not hold."""
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
            try:
                self.disk.remove(key)
            except BaseException as error:
                self._note_failure("removed", error)

    def write(self, snapshot: KVSnapshot, *, must: bool = False) -> Writing | None:
        """Queue a snapshot for the disk, whatever the policy.

        Args:
            snapshot: what to write.
            must: somebody waits for it, so it is queued however long the queue is.

        Returns:
            None: there is no disk, or no room in the queue.
        """
        key, num_bytes = snapshot.key, snapshot.num_bytes
        if self._writer is None:
            return None
        with self._lock:
            if key in self._writings:
                return self._writings[key]
            queued_bytes = self._queued_bytes + num_bytes
            is_full = queued_bytes > num_bytes and queued_bytes > _MAX_QUEUED_BYTES
            if not is_full or must:
                self._queued.insert(snapshot.namespace, snapshot.tokens, key)
                self._queued_bytes = queued_bytes
                writing = self._writings[key] = self._writer.submit(lambda: self._write(snapshot))
                writing.add_done_callback(lambda _: self._wake())
                return writing
        self._note_failure("written", "the disk is slower than the engine")
        return None

    def _write(self, snapshot: KVSnapshot) -> None:
        assert self.disk is not None
        try:
            if not self.disk.put(snapshot):
                raise SnapshotStorageError(
                    f"A snapshot of {snapshot.num_bytes} bytes has no room in a store of "
                    f"{self.disk.max_bytes} bytes; raise its max_bytes.",
                    num_bytes=snapshot.num_bytes,
                    max_bytes=self.disk.max_bytes,
                )
            self.counters.num_disk_writes += 1
        except BaseException as error:
            self._note_failure("written", error)
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotStorageError(f"The store did not take a snapshot: {error!r}.") from error
        finally:
            with self._lock:
                self._queued.remove(snapshot.key)
                del self._writings[snapshot.key]
                self._queued_bytes -= snapshot.num_bytes

    def flush(self) -> None:
        """Wait until everything that was queued is on disk."""
        if self._writer is not None:
            self._writer.submit(lambda: None).result()

    def clear_memory(self) -> None:
        """Forget what memory holds."""
        self.memory.clear()

    def close(self) -> None:
        """Write what is queued, under WRITE_BACK also what only memory holds, and close all."""
        if self._policy is SnapshotPolicy.WRITE_BACK:
            for snapshot in self.memory.snapshots():
                self._write_back(snapshot)
        if self._reader is not None:
            self._reader.close(cancel=True)
        if self._writer is not None:
            self._writer.close()
        self.memory.close()
        if self.disk is not None:
            try:
                self.disk.close()
            except BaseException as error:
                self._note_failure("closed", error)

    def _write_back(self, snapshot: KVSnapshot) -> None:
        if not self.holds(Tier.DISK, snapshot.namespace, snapshot.tokens):
            self.write(snapshot)

    def _note_failure(self, verb: str, error: BaseException | str) -> None:
        text, now = f"A snapshot could not be {verb}: {error}", time.monotonic()
        with self._lock:
            self.counters.num_disk_failures += 1
            told_at = {t: at for t, at in self._told_at.items() if now - at < _TELL_AGAIN_SECONDS}
            self._told_at = {text: now, **told_at}
        if text not in told_at:
            _log.warning("%s", text)


def _lacks_logits(found: FoundPrefix, num_tokens: int) -> bool:
    """Whether all of a prompt is held, but not what follows it."""
    is_whole = found.num_tokens == found.snapshot_tokens
    return found.num_tokens == num_tokens and not (is_whole and found.has_logits)


def _worth_tokens(match: TierMatch) -> int:
    """Tokens that need not be computed, less those that could be while a file is read."""
    return match.found.num_tokens - _READING_TOKENS * (match.tier is Tier.DISK)


def _check_found(found: FoundPrefix, tokens: TokenIds) -> None:
    """A store of the caller's own may say anything."""
    numbers = found.num_tokens, found.snapshot_tokens, found.num_bytes
    if not (
        isinstance(found.key, str)
        and all(isinstance(number, int) for number in numbers)
        and 0 < found.num_tokens <= min(found.snapshot_tokens, len(tokens))
    ):
        raise SnapshotError(f"the store found what cannot be: {found!r}")


def _check_stored(stored: StoredPrefix, namespace: str, tokens: TokenIds) -> None:
    """A store of the caller's own may give anything, and wrong KV would be wrong answers."""
    snapshot, shared = stored.snapshot, tuple(map(int, tokens))
    if not (
        snapshot.namespace == namespace
        and stored.num_tokens == len(shared)
        and snapshot.tokens[: len(shared)] == shared
    ):
        raise SnapshotError("the store gave a snapshot of something else than it had found")
