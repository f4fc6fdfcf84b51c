"""What a store of snapshots promises, in the order of a snapshot's life there.

    put -> get (restored by an engine) -> pin / unpin -> evicted or removed -> close

A store holds at most `max_bytes`. When room is needed it **evicts** the snapshots that were used
longest ago; `put` and a `get` that finds are uses. A **pin** protects from eviction, not from
`remove` or `clear`, which are the owner's word. What `get` returned stays whole in the caller's
hands in any case, since snapshots are immutable.

Stores are thread safe. Each call takes effect whole or not at all. After `close`, `put`, `get` and
`pin` raise `SnapshotError`; calls that only let go stay harmless.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Self

from langchain_swarmkv.snapshots.prefix_index import TokenIds
from langchain_swarmkv.snapshots.snapshot import KVSnapshot

__all__ = ["FoundPrefix", "SnapshotStore", "StoredPrefix"]


@dataclass(frozen=True)
class FoundPrefix:
    """What a `get` would give, told without reading it."""

    key: str
    num_tokens: int
    """Tokens in common with the prompt."""
    snapshot_tokens: int
    """Tokens of the whole snapshot: the cells that a restore takes at first."""
    num_bytes: int
    has_logits: bool = False
    """Whether the snapshot has the logits after its last token."""

    @classmethod
    def of(cls, snapshot: KVSnapshot, num_tokens: int) -> Self:
        """A snapshot that is at hand and shares `num_tokens` with the prompt."""
        return cls(
            snapshot.key,
            num_tokens,
            snapshot.num_tokens,
            snapshot.num_bytes,
            has_logits=snapshot.num_logits > 0,
        )


@dataclass(frozen=True)
class StoredPrefix:
    """A snapshot whose first `num_tokens` tokens, at least one, are those of the prompt."""

    snapshot: KVSnapshot
    num_tokens: int

    @property
    def is_whole(self) -> bool:
        """False: the restored sequence must be cut to `num_tokens` before it is used."""
        return self.num_tokens == self.snapshot.num_tokens


class SnapshotStore(ABC):
    """See the module's docstring. `len(store)` is the number of snapshots."""

    max_bytes: int
    """Most bytes held."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held, of `max_bytes`. Changes nothing."""

    @abstractmethod
    def __len__(self) -> int: ...

    def may_take(self, num_bytes: int) -> bool:
        """Whether a snapshot of so many bytes is worth making for `put`.

        Asked on the engine's thread: looks at nothing but this object's own fields.
        """
        return num_bytes <= self.max_bytes

    @abstractmethod
    def put(self, snapshot: KVSnapshot) -> bool:
        """Keep a snapshot as the most recently used, evicting unpinned ones if room is needed.

        One with the same key is replaced and its pins stay. Nothing is evicted for a snapshot that
        is then refused.

        Returns:
            False when it is refused: it is larger than the store or than what pins leave free,
            or its key is that of a pinned snapshot of something else.
        """

    @abstractmethod
    def get(
        self, namespace: str, tokens: TokenIds, *, can_cut: bool, min_tokens: int = 1
    ) -> StoredPrefix | None:
        """Find what serves the prompt `tokens` best, comparing tokens; a find is a use.

        Args:
            namespace: only snapshots of this one are seen.
            tokens: the whole prompt.
            can_cut: whether the engine can cut a restored sequence. If so the longest prefix in
                common wins, and of several snapshots that share it the smallest; otherwise the
                longest snapshot that is, entire, a prefix of the prompt.
            min_tokens: a shorter match is none, and counts as no use.
        """

    def find(
        self, namespace: str, tokens: TokenIds, *, can_cut: bool, min_tokens: int = 1
    ) -> FoundPrefix | None:
        """What `get` would find. No use, where the store can tell without getting it."""
        stored = self.get(namespace, tokens, can_cut=can_cut, min_tokens=min_tokens)
        return None if stored is None else FoundPrefix.of(stored.snapshot, stored.num_tokens)

    @abstractmethod
    def remove(self, key: str) -> bool:
        """Drop a snapshot with its pins. False: there was none."""

    @abstractmethod
    def pin(self, key: str) -> bool:
        """Protect a snapshot from eviction until as many `unpin` calls. False: it is not here."""

    @abstractmethod
    def unpin(self, key: str) -> bool:
        """Take back one `pin`. False: there was none to take back, which is harmless."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all snapshots, pinned ones too."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything held in memory; harmless twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
