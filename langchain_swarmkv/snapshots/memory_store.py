"""Snapshots in host memory: bounded by bytes, least recently used evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from langchain_swarmkv.engine.identity import ModelIdentity
from langchain_swarmkv.errors import ConfigurationError, SnapshotError
from langchain_swarmkv.snapshots.prefix_index import PrefixIndex, TokenIds
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.store import FoundPrefix, SnapshotStore, StoredPrefix

__all__ = ["MemorySnapshotStore"]


@dataclass
class _Entry:
    snapshot: KVSnapshot
    num_pins: int = 0


class MemorySnapshotStore(SnapshotStore):
    """Keeps snapshots of up to `max_bytes` together; 0 keeps none.

    Raises:
        ConfigurationError: `max_bytes` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ConfigurationError(
                f"max_bytes is {max_bytes}, but must be at least 0", max_bytes=max_bytes
            )
        self.max_bytes = max_bytes
        self.on_evict: Callable[[KVSnapshot], object] = lambda snapshot: None
        """Called with each snapshot that had to make room, under the store's lock: be quick."""
        self.reserved_bytes: Callable[[], int] = lambda: 0
        """Bytes of `max_bytes` that something else holds: what waits to be written. Takes no lock
        that may be held while this store is called."""
        self.keeps_evicted = False
        """Whether what was evicted stays in memory, among the reserved, until it is written."""
        self._lock = threading.Lock()
        self._closed = False
        self._num_bytes = 0
        # Invariant under the lock: entries and index have the same keys and the same tokens.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._index: PrefixIndex[str] = PrefixIndex()

    @property
    def num_bytes(self) -> int:
        """Bytes held, of `max_bytes`."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def may_take(self, num_bytes: int) -> bool:
        """See `SnapshotStore.may_take`."""
        with self._lock:
            return not self._closed and self._has_room(None, num_bytes)

    def _has_room(self, key: str | None, num_bytes: int) -> bool:
        """Whether so much has room under this key beside what cannot leave."""
        reserved_bytes = self.reserved_bytes()
        if reserved_bytes and self.keeps_evicted:
            # Evicting frees nothing before the queue has been written.
            old = self._entries.get(key) if key else None
            kept_bytes = self._num_bytes - (old.snapshot.num_bytes if old else 0)
        else:
            kept_bytes = self._pinned_bytes_beside(key)
        return kept_bytes + reserved_bytes + num_bytes <= self.max_bytes

    def put(self, snapshot: KVSnapshot) -> bool:
        """Keep a snapshot, evicting the least recently used if room is needed."""
        key = snapshot.key
        with self._lock:
            self._check_open()
            old = self._entries.get(key)
            if old and old.num_pins and _subject(old.snapshot) != _subject(snapshot):
                return False
            if not self._has_room(key, snapshot.num_bytes):
                return False
            self._drop(key)
            self._evict_until(self.max_bytes - self.reserved_bytes() - snapshot.num_bytes)
            self._entries[key] = _Entry(snapshot, old.num_pins if old else 0)
            self._index.insert(snapshot.namespace, snapshot.tokens, key)
            self._num_bytes += snapshot.num_bytes
            return True

    def get(
        self, namespace: str, tokens: TokenIds, *, can_cut: bool, min_tokens: int = 1
    ) -> StoredPrefix | None:
        """Find the snapshot that serves the prompt best."""
        with self._lock:
            found = self._find(namespace, tokens, can_cut, min_tokens)
            if found is None:
                return None
            self._entries.move_to_end(found.key)
            return StoredPrefix(self._entries[found.key].snapshot, found.num_tokens)

    def find(
        self, namespace: str, tokens: TokenIds, *, can_cut: bool, min_tokens: int = 1
    ) -> FoundPrefix | None:
        """What `get` would find."""
        with self._lock:
            return self._find(namespace, tokens, can_cut, min_tokens)

    def _find(
        self, namespace: str, tokens: TokenIds, can_cut: bool, min_tokens: int
    ) -> FoundPrefix | None:
        self._check_open()
        match = self._index.best(namespace, tokens, can_cut=can_cut)
        if match is None or match.num_tokens < min_tokens:
            return None
        key = min(match.holders, key=lambda key: self._entries[key].snapshot.num_bytes)
        return FoundPrefix.of(self._entries[key].snapshot, match.num_tokens)

    def snapshots(self) -> list[KVSnapshot]:
        """All that are held, least recently used first."""
        with self._lock:
            return [entry.snapshot for entry in self._entries.values()]

    def remove(self, key: str) -> bool:
        """Drop a snapshot with its pins."""
        with self._lock:
            return self._drop(key)

    def pin(self, key: str) -> bool:
        """Protect a snapshot from eviction."""
        with self._lock:
            self._check_open()
            entry = self._entries.get(key)
            if entry is None:
                return False
            entry.num_pins += 1
            return True

    def unpin(self, key: str) -> bool:
        """Take back one `pin`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.num_pins == 0:
                return False
            entry.num_pins -= 1
            return True

    def clear(self) -> None:
        """Drop all snapshots, pinned ones too."""
        with self._lock:
            self._drop_all()

    def close(self) -> None:
        """Drop all snapshots and take no more."""
        with self._lock:
            self._closed = True
            self._drop_all()

    def _check_open(self) -> None:
        if self._closed:
            raise SnapshotError("the snapshot store is closed")

    def _pinned_bytes_beside(self, key: str | None) -> int:
        return sum(
            entry.snapshot.num_bytes
            for other, entry in self._entries.items()
            if entry.num_pins and other != key
        )

    def _evict_until(self, num_bytes: int) -> None:
        """Drop unpinned snapshots, least recently used first, until at most `num_bytes` remain."""
        for key in [key for key, entry in self._entries.items() if not entry.num_pins]:
            if self._num_bytes <= num_bytes:
                return
            evicted = self._entries[key].snapshot
            self._drop(key)
            self.on_evict(evicted)

    def _drop(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._index.remove(key)
        self._num_bytes -= entry.snapshot.num_bytes
        return True

    def _drop_all(self) -> None:
        for key in list(self._entries):
            self._drop(key)


def _subject(snapshot: KVSnapshot) -> tuple[ModelIdentity, str, tuple[int, ...]]:
    """What the key stands for; compared, because keys may collide."""
    return snapshot.identity, snapshot.namespace, snapshot.tokens
