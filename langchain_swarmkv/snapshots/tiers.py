"""Memory over disk, as one engine uses them.

    look    what the disk holds of a prompt; reads heads only, on a thread of its own
    find    which tier holds the most of a prompt, once the disk was asked
    fetch   read a snapshot from disk, on another thread
    put     keep one: in memory, and on disk as the policy says, on another thread

The engine's thread calls these and never waits for a disk: all that touches the disk's store runs
on the three threads here (finder, reader, writer). What is believed to be on disk saves copies that
nobody needs; the writer looks again before it writes, and every `look` corrects the belief.

What waits to be written counts against memory's limit, but for one snapshot: that in the writer's
hands. What cannot be read, written or kept is told in the log and counted: a snapshot is a copy of
what can be computed again, so no request fails for it, but those that asked to be written. Stores
may be the caller's own, so whatever they raise is caught.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import numpy as np

from langchain_swarmkv.config import SnapshotPolicy
from langchain_swarmkv.errors import SnapshotError, SnapshotStorageError
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.prefix_index import PrefixIndex, TokenIds
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.store import FoundPrefix, SnapshotStore, StoredPrefix
from langchain_swarmkv.snapshots.worker import Worker

__all__ = ["Fetch", "Look", "SnapshotTiers", "Tier", "TierCounters", "TierMatch", "Writing"]

_log = logging.getLogger(__name__)

_TELL_AGAIN_SECONDS = 60.0
"""A folder that is gone is looked for at every step."""
_READING_TOKENS = 16
"""So few tokens are computed sooner than a file is read."""

Fetch = Future[StoredPrefix | None]
"""What was read from disk; None: it is gone, or cannot be used."""

Look = Future[FoundPrefix | None]
"""What the disk holds of a prompt; None: nothing of use."""

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
    """Look-ups, reads, writes and removals that failed."""
    num_dropped_disk_slow: int = 0
    """Not written, for what waits to be written had no room in memory for it."""
    num_dropped_no_room: int = 0
    """Left the pool uncopied, for neither memory nor the disk could take it."""
    num_refused: int = 0
    """Found in memory or on disk, and did not load."""
    num_evicted_from_memory: int = 0
    """Left memory for others, and was not to be written."""


class SnapshotTiers:
    """One engine's stores; it closes them.

    Args:
        memory: the tier for what had to leave the pool.
        can_cut: whether the engine can use a part of a snapshot.
        disk: the tier that outlives the process; None: there is none.
        policy: what goes to disk by itself.
        wake: called on another thread when a look, a reading or a writing has ended.
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
        self._finder = Worker("swarmkv-snapshot-finder") if disk is not None else None
        self._reader = Worker("swarmkv-snapshot-reader") if disk is not None else None
        self._writer = Worker("swarmkv-snapshot-writer") if disk is not None else None
        self._told_at: dict[str, float] = {}
        self._lock = threading.Lock()
        self._queue_changed = threading.Condition(self._lock)
        # Under the lock: what is being read, and the snapshots that wait to be written, by key.
        self._fetches: dict[str, Fetch] = {}
        self._queued: PrefixIndex[str] = PrefixIndex()
        self._writings: dict[str, Writing] = {}
        self._queued_bytes = 0
        """Of those that wait; what the writer has in its hands is no longer one of them."""
        self._on_disk: PrefixIndex[str] = PrefixIndex()
        """What was seen there, by key: a belief, since others may delete it."""
        self._refused: set[str] = set()
        """Keys of what did not load: not to be found again before it has left the disk."""
        memory.reserved_bytes = lambda: self._queued_bytes
        memory.keeps_evicted = self._policy is SnapshotPolicy.WRITE_BACK
        memory.on_evict = self._note_evicted

    @property
    def writes_through(self) -> bool:
        """Whether a prefix goes to disk as soon as it has been computed."""
        return self._policy is SnapshotPolicy.WRITE_THROUGH

    @property
    def saves_at_the_end(self) -> bool:
        """Whether what is still in the pool shall be put here when the engine closes."""
        return self._policy is not SnapshotPolicy.NEVER

    # -- finding ---------------------------------------------------------------------------------

    def look(
        self, namespace: str, tokens: TokenIds, min_tokens: int, *, needs_logits: bool
    ) -> Look | None:
        """Begin to ask the disk what it holds of a prompt, for `find`. None: there is no disk."""
        if self._finder is None:
            return None
        tokens = np.array(tokens, dtype=np.int32)  # the caller's may go on growing
        look = self._finder.submit(
            lambda: self._found(Tier.DISK, namespace, tokens, min_tokens, needs_logits=needs_logits)
        )
        look.add_done_callback(lambda _: self._wake())
        return look

    def find(
        self,
        namespace: str,
        tokens: TokenIds,
        min_tokens: int,
        *,
        needs_logits: bool,
        on_disk: FoundPrefix | None = None,
    ) -> list[TierMatch]:
        """The best snapshot of each tier for a prompt; that to be tried first is first.

        Args:
            namespace: only snapshots of this one are seen.
            tokens: the whole prompt.
            min_tokens: what shares less is left out.
            needs_logits: where all of the prompt is held, the logits after it must be, too; without
                them its last token is left to be computed.
            on_disk: what a `look` has found.
        """
        matches = []
        found = self._found(Tier.MEMORY, namespace, tokens, min_tokens, needs_logits=needs_logits)
        if found is not None:
            matches.append(TierMatch(Tier.MEMORY, found))
        if on_disk is not None and on_disk.num_tokens >= min_tokens:
            with self._lock:
                if on_disk.key not in self._refused:
                    matches.append(TierMatch(Tier.DISK, on_disk))
        matches.sort(key=_worth_tokens, reverse=True)
        return matches

    def _found(
        self, tier: Tier, namespace: str, tokens: TokenIds, min_tokens: int, *, needs_logits: bool
    ) -> FoundPrefix | None:
        found = self._find_in(tier, namespace, tokens, min_tokens)
        if found and needs_logits and _lacks_logits(found, len(tokens)):
            found = self._find_in(tier, namespace, tokens[:-1], min_tokens)
        return found

    def is_in_memory(self, namespace: str, tokens: TokenIds) -> bool:
        """Whether memory has a snapshot of all these tokens, or of more."""
        return self._find_in(Tier.MEMORY, namespace, tokens, len(tokens)) is not None

    def will_be_on_disk(self, namespace: str, tokens: TokenIds) -> bool:
        """Whether all these tokens, or more, were seen on disk or are on their way."""
        with self._lock:
            seen = self._on_disk.best(namespace, tokens, can_cut=self._can_cut)
        if seen is not None and seen.num_tokens == len(tokens):
            return True
        return self.pending(namespace, tokens) is not None

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
            if tier is Tier.DISK:
                self._believe(namespace, tokens, found)
        except BaseException as error:
            self._note_failure("looked for", error)
            return None
        return found

    def _believe(self, namespace: str, tokens: TokenIds, found: FoundPrefix | None) -> None:
        """Correct what is believed to be on disk by what was found there just now."""
        num_tokens = 0 if found is None else found.num_tokens
        with self._lock:
            seen = self._on_disk.best(namespace, tokens, can_cut=self._can_cut)
            if seen is not None and seen.num_tokens > num_tokens:
                for key in seen.holders:
                    self._on_disk.remove(key)
            if found is not None and (seen is None or seen.num_tokens < num_tokens):
                self._on_disk.insert(namespace, tokens[:num_tokens], found.key)

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

    def is_wanted(self, namespace: str, tokens: TokenIds, num_bytes: int) -> bool:
        """Whether a copy of so many bytes should be made of what leaves the pool, for `put`.

        Asked before there are such bytes. What is lost for want of room is told and counted.
        """
        if self.is_in_memory(namespace, tokens):
            return False
        if self.memory.may_take(num_bytes):
            return True
        if self._policy is not SnapshotPolicy.NEVER:
            if self.will_be_on_disk(namespace, tokens):
                return False
            if self._disk_may_take(num_bytes) and self._queue_has_room(num_bytes):
                return True
        with self._lock:
            self.counters.num_dropped_no_room += 1
        if self.memory.max_bytes:  # who set it to 0 wants nothing kept
            self._tell(
                "no room",
                f"A prefix of {len(tokens)} tokens left the pool without a copy, and is computed "
                f"again when it is needed: its {num_bytes} bytes have no room in "
                f"snapshot_memory_bytes={self.memory.max_bytes}.",
            )
        return False

    def note_uncopied(self, num_tokens: int, error: BaseException) -> None:
        """Count and tell a prefix that left the pool, for it could not be copied."""
        with self._lock:
            self.counters.num_dropped_no_room += 1
        self._tell("not copied", f"A prefix of {num_tokens} tokens could not be copied: {error!r}")

    def put(self, snapshot: KVSnapshot) -> bool:
        """Keep what leaves the pool. False: neither tier takes it."""
        kept = self.memory.put(snapshot)
        if self._policy is SnapshotPolicy.NEVER or (kept and not self.writes_through):
            return kept
        if self.will_be_on_disk(snapshot.namespace, snapshot.tokens):
            return True
        return self.write(snapshot) is not None or kept

    def has_room(self, num_bytes: float) -> bool:
        """Whether so much could be put, and nothing be lost for it that the disk does not hold."""
        if self._policy is not SnapshotPolicy.NEVER:
            return self.memory.may_take(int(num_bytes)) or self._queue_has_room(num_bytes)
        return self.memory.num_bytes + num_bytes <= self.memory.max_bytes

    def may_write(self, num_bytes: int) -> bool:
        """Whether a copy of so many bytes should be made to be written by itself."""
        if not self._disk_may_take(num_bytes):
            self._note_failure("written", _no_room_on_disk(num_bytes, self.disk))
            return False
        if not self._queue_has_room(num_bytes):
            self._note_slow_disk(num_bytes)
            return False
        return True

    def await_room(self, num_bytes: int) -> None:
        """Wait until so much has room in the queue: when the engine closes, nothing is lost."""
        with self._queue_changed:
            self._queue_changed.wait_for(lambda: self._queue_has_room(num_bytes))

    def _disk_may_take(self, num_bytes: int) -> bool:
        if self.disk is None:
            return False
        try:
            return bool(self.disk.may_take(num_bytes))
        except BaseException as error:
            self._note_failure("asked for", error)
            return False

    def _queue_has_room(self, num_bytes: float) -> bool:
        """One may always wait: else nothing could be written where memory keeps nothing."""
        if self._queued_bytes == 0:
            return True
        held_bytes = self.memory.num_bytes + self._queued_bytes
        return held_bytes + num_bytes <= self.memory.max_bytes

    def get(self, namespace: str, tokens: TokenIds, min_tokens: int) -> StoredPrefix | None:
        """What memory holds of a prompt."""
        return self.memory.get(namespace, tokens, can_cut=self._can_cut, min_tokens=min_tokens)

    def remove(self, key: str) -> None:
        """Drop what turned out not to load, from both tiers."""
        self.memory.remove(key)
        with self._lock:
            self.counters.num_refused += 1
            self._on_disk.remove(key)
            if self._writer is not None:
                self._refused.add(key)
        if self._writer is not None:
            self._writer.submit(lambda: self._remove(key))

    def _remove(self, key: str) -> None:
        assert self.disk is not None
        try:
            self.disk.remove(key)
        except BaseException as error:
            self._note_failure("removed", error)
        else:
            with self._lock:
                self._refused.discard(key)

    def write(self, snapshot: KVSnapshot, *, must: bool = False) -> Writing | None:
        """Queue a snapshot for the disk, whatever the policy.

        Args:
            snapshot: what to write.
            must: somebody waits for it, or memory holds it anyway, so it is queued however long
                the queue is.

        Returns:
            None: there is no disk, or no room in the queue, which is told and counted.
        """
        key, num_bytes = snapshot.key, snapshot.num_bytes
        if self._writer is None:
            return None
        with self._lock:
            if key in self._writings:
                return self._writings[key]
            if must or self._queue_has_room(num_bytes):
                self._queued.insert(snapshot.namespace, snapshot.tokens, key)
                self._queued_bytes += num_bytes
                writing = self._writings[key] = self._writer.submit(lambda: self._write(snapshot))
                writing.add_done_callback(lambda _: self._wake())
                return writing
        self._note_slow_disk(num_bytes)
        return None

    def _write(self, snapshot: KVSnapshot) -> None:
        assert self.disk is not None
        key, namespace, tokens = snapshot.key, snapshot.namespace, snapshot.tokens
        with self._queue_changed:
            self._queued_bytes -= snapshot.num_bytes
            self._queue_changed.notify_all()
            is_refused = key in self._refused
        try:
            if not is_refused and self._find_in(Tier.DISK, namespace, tokens, len(tokens)):
                return  # another process wrote it, or this one long ago
            if not self.disk.put(snapshot):
                raise SnapshotStorageError(
                    _no_room_on_disk(snapshot.num_bytes, self.disk),
                    num_bytes=snapshot.num_bytes,
                    max_bytes=self.disk.max_bytes,
                )
            self.counters.num_disk_writes += 1
            with self._lock:
                self._refused.discard(key)
                self._on_disk.insert(namespace, tokens, key)
        except BaseException as error:
            self._note_failure("written", error)
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotStorageError(f"The store did not take a snapshot: {error!r}.") from error
        finally:
            with self._lock:
                self._queued.remove(key)
                del self._writings[key]

    def flush(self) -> None:
        """Wait until everything that was queued is on disk."""
        if self._writer is not None:
            self._writer.submit(lambda: None).result()

    def clear_memory(self) -> None:
        """Forget what memory holds."""
        self.memory.clear()

    def statistics(self) -> dict[str, int]:
        """The numbers of `EngineStatistics` that are known here."""
        counters = self.counters
        return {
            "num_disk_reads": counters.num_disk_reads,
            "num_disk_writes": counters.num_disk_writes,
            "num_disk_failures": counters.num_disk_failures,
            "num_snapshots_dropped_disk_slow": counters.num_dropped_disk_slow,
            "num_snapshots_dropped_no_room": counters.num_dropped_no_room,
            "num_snapshots_refused": counters.num_refused,
            "num_snapshots_evicted": counters.num_evicted_from_memory,
        }

    def close(self) -> None:
        """Write what is queued, under WRITE_BACK also what only memory holds, and close all."""
        if self._policy is SnapshotPolicy.WRITE_BACK:
            for snapshot in self.memory.snapshots():
                self.write(snapshot, must=True)  # memory holds it anyway: none is left out
        for worker in (self._finder, self._reader):
            if worker is not None:
                worker.close(cancel=True)
        if self._writer is not None:
            self._writer.close()
        self.memory.close()
        if self.disk is not None:
            try:
                self.disk.close()
            except BaseException as error:
                self._note_failure("closed", error)

    def _note_evicted(self, snapshot: KVSnapshot) -> None:
        """Under the store's lock. What was evicted is in memory still, so it is always queued."""
        if self._policy is SnapshotPolicy.WRITE_BACK:
            self.write(snapshot, must=True)
        elif not self.will_be_on_disk(snapshot.namespace, snapshot.tokens):
            with self._lock:
                self.counters.num_evicted_from_memory += 1

    def _note_slow_disk(self, num_bytes: int) -> None:
        with self._lock:
            self.counters.num_dropped_disk_slow += 1
        self._tell(
            "slow disk",
            f"A snapshot of {num_bytes} bytes is not written: the disk is slower than the engine, "
            f"and what waits has no room in snapshot_memory_bytes={self.memory.max_bytes}.",
        )

    def _note_failure(self, verb: str, error: BaseException | str) -> None:
        with self._lock:
            self.counters.num_disk_failures += 1
        text = f"A snapshot could not be {verb}: {error}"
        self._tell(text, text)

    def _tell(self, kind: str, text: str) -> None:
        """Warn, but of the same kind not at every step: the counters have them all."""
        now = time.monotonic()
        with self._lock:
            told_at = {t: at for t, at in self._told_at.items() if now - at < _TELL_AGAIN_SECONDS}
            self._told_at = {kind: now, **told_at}
        if kind not in told_at:
            _log.warning("%s", text)


def _no_room_on_disk(num_bytes: int, disk: SnapshotStore | None) -> str:
    max_bytes = getattr(disk, "max_bytes", 0)
    return (
        f"A snapshot of {num_bytes} bytes has no room in a store of {max_bytes} bytes; raise its "
        "max_bytes."
    )


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
