"""Which sequences are in the pool, what they share, and who must go when room is needed.

A sequence id is in one of three states:

    free       empty, in `_free`
    running    opened for a request; its whole prompt is indexed from the start, so that others
               can see what it is going to compute
    resident   left behind by a request: a prefix to fork from, pinned or not

Only unpinned residents are ever evicted. A resident worth keeping is saved to the host's store
first, if its tokens are not also held by another sequence. That happens when room is needed, and
on CPUs sooner (`spill_idle`): every token attends over all cells up to the highest used one, so
what is idle slows down what runs.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.engine.cells import CellLedger
from langchain_swarmkv.engine.contract import Engine
from langchain_swarmkv.errors import SequenceError
from langchain_swarmkv.snapshots.prefix_index import PrefixIndex, TokenIds
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.tiers import SnapshotTiers

__all__ = ["CacheCounters", "Logits", "PrefixCache", "PrefixMatch"]

Logits = npt.NDArray[np.float32]

_log = logging.getLogger(__name__)

MIN_SPILL_TOKENS = 32
"""Shorter prefixes are recomputed sooner than they are worth a place in the store."""

MIN_IDLE_CELLS = 256
"""So few idle cells are left where they are: llama.cpp rounds what it attends over up to this."""


@dataclass(frozen=True)
class PrefixMatch:
    """A sequence that shares the first `num_tokens` tokens of a prompt."""

    seq_id: int
    num_tokens: int


@dataclass
class CacheCounters:
    """Counted since the engine started."""

    num_forks: int = 0
    num_evictions: int = 0
    num_spills: int = 0
    num_restores: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    num_compactions: int = 0


@dataclass
class _Resident:
    namespace: str
    pins: set[str] = field(default_factory=set)
    last_used: int = 0
    logits: Logits | None = None
    """After its last token, if they were computed."""


class PrefixCache:
    """The sequences of one engine. Not thread safe: the scheduler serialises all calls."""

    def __init__(self, engine: Engine, tiers: SnapshotTiers) -> None:
        self._engine = engine
        self._tiers = tiers
        self._can_cut = engine.limits.can_cut
        self._ledger = CellLedger(engine.limits.num_cells)
        self._running_index: PrefixIndex[int] = PrefixIndex()
        self._resident_index: PrefixIndex[int] = PrefixIndex()
        self._free = list(range(engine.limits.max_sequences))
        self._residents: dict[int, _Resident] = {}
        self._running: dict[int, str] = {}
        self._clock = itertools.count(1)
        # Snapshots that this cache made or has restored, by id: immutable, so while the object
        # lives its state is the one that was looked at.
        self._checked: WeakValueDictionary[int, KVSnapshot] = WeakValueDictionary()
        self.counters = CacheCounters()

    # -- looking up ------------------------------------------------------------------------------

    def computed_match(self, namespace: str, tokens: TokenIds) -> PrefixMatch | None:
        """The sequence to fork for the longest computed prefix of `tokens`.

        Where the model cannot cut sequences, only whole ones are offered.
        """
        best: PrefixMatch | None = None
        for index in (self._resident_index, self._running_index):
            for found in (
                index.longest(namespace, tokens),
                None if self._can_cut else index.longest_whole(namespace, tokens),
            ):
                for seq_id in found.holders if found else ():
                    num_tokens = self._forkable(seq_id, found.num_tokens if found else 0)
                    if num_tokens > (best.num_tokens if best else 0):
                        best = PrefixMatch(seq_id, num_tokens)
        return best

    def _forkable(self, seq_id: int, shared: int) -> int:
        written = self._ledger.num_tokens(seq_id)
        if self._can_cut:
            return min(written, shared)
        return written if written <= shared else 0

    def planned_match(self, namespace: str, tokens: TokenIds) -> PrefixMatch | None:
        """The running sequence that is going to compute the longest prefix of `tokens`.

        Only one that has not come that far yet: its prefill is worth waiting for.
        """
        found = self._running_index.longest(namespace, tokens)
        if found is None:
            return None
        ahead = [s for s in found.holders if self._ledger.num_tokens(s) < found.num_tokens]
        if not ahead:
            return None
        return PrefixMatch(max(ahead, key=self._ledger.num_tokens), found.num_tokens)

    def is_resident(self, namespace: str, tokens: TokenIds) -> bool:
        """Whether all of `tokens` could be forked now."""
        found = self.computed_match(namespace, tokens)
        return found is not None and found.num_tokens == len(tokens)

    def last_logits(self, namespace: str, tokens: TokenIds) -> Logits | None:
        """What follows exactly `tokens`, if a resident holds them and knows."""
        known = (resident.logits for resident in self._holders_of(namespace, tokens))
        return next((logits for logits in known if logits is not None), None)

    def _note_logits(self, namespace: str, tokens: TokenIds, logits: Logits) -> None:
        for resident in self._holders_of(namespace, tokens):
            resident.logits = logits

    def _holders_of(self, namespace: str, tokens: TokenIds) -> list[_Resident]:
        """The residents of exactly `tokens`."""
        found = self._resident_index.longest_whole(namespace, tokens)
        if found is None or found.num_tokens < len(tokens):
            return []
        return [self._residents[seq_id] for seq_id in found.holders]

    # -- room ------------------------------------------------------------------------------------

    def free_cells_after_eviction(self) -> int:
        """Cells that would be free if every unpinned resident left."""
        held = [seq_id for seq_id, resident in self._residents.items() if resident.pins]
        return self._ledger.num_cells - self._ledger.distinct([*held, *self._running])

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether the pool could hold so much, if all left that is not pinned."""
        return num_tokens <= self._ledger.num_cells - self.cells_pinned

    def make_room(self, num_cells: int) -> bool:
        """Evict unpinned residents, least recently used first, until `num_cells` are free.

        False: not even without all of them; then none is evicted.
        """
        if num_cells > self.free_cells_after_eviction():
            return False
        while self._ledger.free < num_cells:
            victim = self._victim(None, needs_cells=True)
            assert victim is not None  # free_cells_after_eviction counted on it
            self._evict(victim)
        return True

    def _victim(self, spare: int | None, *, needs_cells: bool) -> int | None:
        def cost(seq_id: int) -> tuple[bool, bool, int]:
            frees_nothing = needs_cells and self._ledger.exclusive(seq_id) == 0
            is_lost = self._own_tokens(seq_id) > 0
            return frees_nothing, is_lost, self._residents[seq_id].last_used

        idle = [s for s, resident in self._residents.items() if not resident.pins and s != spare]
        return min(idle, key=cost, default=None)

    def _own_tokens(self, seq_id: int) -> int:
        """Tokens of a resident that no other resident holds."""
        return self._ledger.num_tokens(seq_id) - self._resident_index.covered(seq_id)

    def _evict(self, seq_id: int) -> None:
        if self._is_worth_saving(seq_id):
            self._spill(seq_id)
        self.close(seq_id)
        self.counters.num_evictions += 1

    def _is_worth_saving(self, seq_id: int) -> bool:
        """A snapshot holds the whole sequence: worth it only if much of it is nowhere else."""
        own = self._own_tokens(seq_id)
        return own >= MIN_SPILL_TOKENS and 4 * own >= self._ledger.num_tokens(seq_id)

    def _spill(self, seq_id: int) -> None:
        namespace = self._residents[seq_id].namespace
        tokens = self._resident_index.tokens_of(seq_id)
        if not self._tiers.is_wanted(namespace, tokens, self._snapshot_bytes(seq_id)):
            return
        snapshot = self._resident_snapshot(seq_id)
        if snapshot is not None:
            self.counters.num_spills += self._tiers.put(snapshot)

    def _snapshot_bytes(self, seq_id: int) -> int:
        """`KVSnapshot.num_bytes` of the copy that could be made."""
        logits, num_tokens = self._residents[seq_id].logits, self._ledger.num_tokens(seq_id)
        logits_bytes = 0 if logits is None else 4 * len(logits)
        return self._engine.state_bytes(seq_id) + logits_bytes + 4 * num_tokens

    def _resident_snapshot(self, seq_id: int) -> KVSnapshot | None:
        """None: the host has no room for a copy; the tokens are computed again when needed."""
        resident, tokens = self._residents[seq_id], self._resident_index.tokens_of(seq_id)
        try:
            snapshot = self.snapshot(seq_id, resident.namespace, tokens, resident.logits)
        except (MemoryError, SequenceError) as error:
            self._tiers.note_uncopied(len(tokens), error)
            return None
        self._checked[id(snapshot)] = snapshot
        return snapshot

    def snapshot(
        self, seq_id: int, namespace: str, tokens: TokenIds, logits: Logits | None
    ) -> KVSnapshot:
        """A sequence that holds exactly `tokens`, as it is now."""
        facts = self._engine.facts
        return KVSnapshot(
            identity=facts.identity,
            namespace=namespace,
            tokens=tuple(map(int, tokens)),
            state=self._engine.save(seq_id),
            logits=None if logits is None else logits.astype("<f4").tobytes(),
            model_name=facts.name,
        )

    # -- what runs comes first -------------------------------------------------------------------

    def spill_idle(self, waiting: Iterable[tuple[str, TokenIds]]) -> None:
        """Let unpinned residents leave that nothing running shares, nor a prompt that waits.

        Nothing is lost: only those leave whose tokens another resident holds, or for which memory
        has room by the size of their cells, or which the disk gets.
        """
        if self._engine.limits.move_cost_tokens is None or self.cells_idle <= MIN_IDLE_CELLS:
            return
        pinned = [seq_id for seq_id, resident in self._residents.items() if resident.pins]
        matches = [self.computed_match(namespace, tokens) for namespace, tokens in waiting]
        needed = {*self._running, *pinned, *(match.seq_id for match in matches if match)}
        num_needed = self._ledger.distinct(needed)
        idle = [seq_id for seq_id in self._residents if seq_id not in needed]
        for seq_id in sorted(idle, key=lambda seq_id: self._residents[seq_id].last_used):
            if self._ledger.used - num_needed <= MIN_IDLE_CELLS:
                return
            if self._can_leave(seq_id):
                self._evict(seq_id)

    def _can_leave(self, seq_id: int) -> bool:
        if self._own_tokens(seq_id) == 0:
            return True
        cell_bytes = self._ledger.num_tokens(seq_id) * self._engine.facts.kv_bytes_per_token
        # A tenth more, for token ids and headers.
        return self._is_worth_saving(seq_id) and self._tiers.has_room(1.1 * cell_bytes)

    def compact(self, remaining_tokens: int) -> None:
        """Move what lies above a hole into it, if the tokens still to be computed gain from that.

        Args:
            remaining_tokens: most tokens that the running requests may still compute.
        """
        ledger, cost = self._ledger, self._engine.limits.move_cost_tokens
        hole = ledger.top - ledger.used
        if cost is None or not self._can_cut or hole <= MIN_IDLE_CELLS or not self._free:
            return
        if remaining_tokens <= cost:
            return  # at least as many cells must move as the hole has
        ranges = ledger.ranges_from(ledger.used)
        if hole * remaining_tokens <= cost * sum(r.num_cells for r in ranges):
            return
        for cells in ranges:
            self._engine.move_down(cells.holders, cells.first, cells.end, self._free[0])
            ledger.move(cells)
        self.counters.num_compactions += 1

    # -- opening and closing sequences -----------------------------------------------------------

    def open(
        self, namespace: str, tokens: TokenIds, match: PrefixMatch | None, num_cells: int
    ) -> tuple[int, int] | None:
        """Open a sequence for a request that will hold `tokens`, forked from `match` if any.

        `num_cells` is what the request and those that run may come to need together; less what is
        shared, so much is free afterwards.

        Returns:
            (seq_id, number of tokens shared), or None if a sequence id or cells must be waited for.
        """
        if num_cells - _shared(match) > self.free_cells_after_eviction():
            return None
        seq_id = self._take_id(match.seq_id if match else None)
        if seq_id is None and not self._running:
            # Nobody is there to wait for: the matched prefix itself makes way.
            match, seq_id = None, self._take_id(None)
        if seq_id is None:
            return None
        if match is not None:
            self._fork(match.seq_id, seq_id, match.num_tokens)
            self._touch(match.seq_id)
        self._running[seq_id] = namespace
        self._running_index.insert(namespace, tokens, seq_id)
        try:
            # Exact now: cells shared with a prefix that may leave count as this sequence's own.
            fits = self.make_room(num_cells - _shared(match))
        except BaseException:
            self.close(seq_id)
            raise
        if not fits:
            self.close(seq_id)
            return None
        self.counters.num_forks += match is not None
        return seq_id, _shared(match)

    def _touch(self, seq_id: int) -> None:
        if seq_id in self._residents:
            self._residents[seq_id].last_used = next(self._clock)

    def _take_id(self, spare: int | None) -> int | None:
        if not self._free:
            victim = self._victim(spare, needs_cells=False)
            if victim is None:
                return None
            self._evict(victim)
        return heapq.heappop(self._free)

    def _fork(self, source: int, target: int, num_tokens: int) -> None:
        try:
            self._engine.fork(source, target, num_tokens)
        except BaseException:
            heapq.heappush(self._free, target)
            raise
        self._ledger.fork(source, target, num_tokens)

    def written(self, seq_id: int, num_tokens: int) -> None:
        """Note that a decode appended `num_tokens` to a running sequence."""
        self._ledger.append(seq_id, num_tokens)

    def close(self, seq_id: int) -> None:
        """Empty a sequence, running or resident, and free its id."""
        self._running_index.remove(seq_id)
        self._resident_index.remove(seq_id)
        self._ledger.clear(seq_id)
        self._running.pop(seq_id, None)
        self._residents.pop(seq_id, None)
        self._engine.clear(seq_id)
        heapq.heappush(self._free, seq_id)

    def keep(
        self, seq_id: int, tokens: TokenIds, pin: str | None, logits: Logits | None = None
    ) -> None:
        """Turn a running sequence that holds exactly `tokens` into a resident prefix."""
        holder = None if pin is None else self._pinned_by(self._running[seq_id], pin)
        if holder is not None:
            if not np.array_equal(self._resident_index.tokens_of(holder), tokens):
                _log.warning(
                    "The pin %r holds other tokens; %d more were not pinned. Release it first, or "
                    "take another name.",
                    pin,
                    len(tokens),
                )
            pin = None
        if logits is not None:
            self._note_logits(self._running[seq_id], tokens, logits)
        if not len(tokens) or (pin is None and self._is_redundant(self._running[seq_id], tokens)):
            self.close(seq_id)
            return
        namespace = self._running.pop(seq_id)
        self._running_index.remove(seq_id)
        self._add_resident(seq_id, namespace, tokens, logits)
        if pin is not None:
            self._residents[seq_id].pins.add(pin)
        if self._tiers.writes_through:
            self._write(seq_id)

    def flush(self) -> None:
        """Have every resident worth saving written to disk: the engine closes."""
        for seq_id in self._residents:
            self._write(seq_id, waits=True)

    def _write(self, seq_id: int, *, waits: bool = False) -> None:
        resident, tokens = self._residents[seq_id], self._resident_index.tokens_of(seq_id)
        if not self._is_worth_saving(seq_id):
            return
        if self._tiers.will_be_on_disk(resident.namespace, tokens):
            return
        num_bytes = self._snapshot_bytes(seq_id)
        if waits:
            self._tiers.await_room(num_bytes)
        if not self._tiers.may_write(num_bytes):
            return
        snapshot = self._resident_snapshot(seq_id)
        if snapshot is not None:
            self._tiers.write(snapshot)

    def _add_resident(
        self, seq_id: int, namespace: str, tokens: TokenIds, logits: Logits | None
    ) -> None:
        self._resident_index.insert(namespace, tokens, seq_id)
        self._residents[seq_id] = _Resident(namespace, last_used=next(self._clock), logits=logits)

    def _is_redundant(self, namespace: str, tokens: TokenIds) -> bool:
        found = self._resident_index.best(namespace, tokens, can_cut=self._can_cut)
        return found is not None and found.num_tokens == len(tokens)

    def keep_branch_point(self, seq_id: int, tokens: TokenIds) -> None:
        """Leave a resident copy of a running sequence as it is now, for others to fork from.

        Needed where sequences cannot be cut: the running one will not stay at this length.
        Without a sequence id to spare nothing happens, and the others prefill by themselves.
        """
        namespace = self._running[seq_id]
        target = self._take_id(None)
        if target is None:
            return
        self._fork(seq_id, target, len(tokens))
        self.counters.num_forks += 1
        self._add_resident(target, namespace, tokens, None)
        if self._tiers.writes_through:
            self._write(target)

    # -- the store -------------------------------------------------------------------------------

    def restore(self, snapshot: KVSnapshot, reserved_cells: int) -> bool:
        """Bring back a snapshot as a resident. Others may be evicted for it.

        False: it does not fit beside what may not leave and `reserved_cells`, or does not load.
        """
        if not self.make_room(snapshot.num_tokens + reserved_cells):
            return False
        seq_id = self._take_id(None)
        if seq_id is None:
            return False
        started = time.perf_counter()
        try:
            is_checked = self._checked.get(id(snapshot)) is snapshot
            self._engine.restore(seq_id, snapshot.state, snapshot.num_tokens, is_checked=is_checked)
        except SequenceError as error:
            # NOTE: a state that does not load will not load the next time either.
            _log.warning(
                "A snapshot of %d tokens did not load, is dropped, and its tokens are computed "
                "again: %s",
                snapshot.num_tokens,
                error,
            )
            self._tiers.remove(snapshot.key)
            heapq.heappush(self._free, seq_id)
            return False
        except BaseException:
            self._tiers.remove(snapshot.key)  # the next engine must not meet it again
            raise
        self._checked[id(snapshot)] = snapshot
        self._ledger.append(seq_id, snapshot.num_tokens)
        logits = self._usable_logits(snapshot)
        self._add_resident(seq_id, snapshot.namespace, snapshot.tokens, logits)
        self.counters.num_restores += 1
        self.counters.restored_bytes += snapshot.num_bytes
        self.counters.restore_seconds += time.perf_counter() - started
        return True

    def _usable_logits(self, snapshot: KVSnapshot) -> Logits | None:
        """A snapshot's logits, unless they are none of this model: anyone can write a file."""
        if snapshot.num_logits != self._engine.facts.n_vocab:
            return None
        logits = np.frombuffer(snapshot.logits or b"", dtype="<f4").astype(np.float32)
        return logits if np.isfinite(logits).all() else None

    # -- pins and numbers ------------------------------------------------------------------------

    def pins(self, namespace: str) -> set[str]:
        """The pins in force of one namespace; the same name in another one is another pin."""
        residents = self._residents.values()
        return {pin for r in residents if r.namespace == namespace for pin in r.pins}

    def release(self, namespace: str, pin: str) -> bool:
        """Drop a pin; its prefix stays until room is needed. False: there was no such pin."""
        holder = self._pinned_by(namespace, pin)
        if holder is not None:
            self._residents[holder].pins.discard(pin)
        return holder is not None

    def _pinned_by(self, namespace: str, pin: str) -> int | None:
        """The resident that a pin keeps; None: there is no such pin."""
        for seq_id, resident in self._residents.items():
            if resident.namespace == namespace and pin in resident.pins:
                return seq_id
        return None

    @property
    def cells_used(self) -> int:
        """Cells in use, shared ones counted once."""
        return self._ledger.used

    @property
    def cells_pinned(self) -> int:
        """Cells of pinned residents."""
        return self._ledger.distinct([s for s, r in self._residents.items() if r.pins])

    @property
    def cells_idle(self) -> int:
        """Cells that would be freed if every unpinned resident left."""
        return self._ledger.used - (self._ledger.num_cells - self.free_cells_after_eviction())

    @property
    def sequences_used(self) -> int:
        """Sequence ids that are not free."""
        return self._engine.limits.max_sequences - len(self._free)

    @property
    def num_residents(self) -> int:
        """Resident prefixes, pinned ones included."""
        return len(self._residents)

    @property
    def num_pinned(self) -> int:
        """Pinned resident prefixes."""
        return sum(bool(resident.pins) for resident in self._residents.values())

    def clear_idle(self) -> None:
        """Drop every unpinned resident, without saving any."""
        for seq_id in [s for s, resident in self._residents.items() if not resident.pins]:
            self.close(seq_id)

    def check(self) -> None:
        """Compare the books with each other and with the engine; AssertionError if they differ."""
        self._ledger.check()
        self._running_index.check()
        self._resident_index.check()
        named = sorted([*self._free, *self._running, *self._residents])
        assert named == list(range(self._engine.limits.max_sequences)), named
        assert len(self._running_index) == len(self._running)
        assert len(self._resident_index) == len(self._residents)
        for seq_id in self._residents:
            assert len(self._resident_index.tokens_of(seq_id)) == self._ledger.num_tokens(seq_id)
        for seq_id in named:
            held, real = self._ledger.num_tokens(seq_id), self._engine.num_tokens(seq_id)
            assert held == real, f"sequence {seq_id}: {held} tokens in the ledger, {real} in truth"


def _shared(match: PrefixMatch | None) -> int:
    return match.num_tokens if match else 0
