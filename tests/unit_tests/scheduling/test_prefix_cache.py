"""The prefix cache: what is found, what is shared, who must go, and that the books stay right."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import SequenceError
from langchain_swarmkv.scheduling.prefix_cache import PrefixCache, PrefixMatch
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.tiers import SnapshotTiers
from tests.unit_tests.scheduling.support import NAMESPACE, piece

DOCUMENT = piece("document", 100)


class Pool:
    """A cache, its engine and its store, and the steps that a scheduler would take."""

    def __init__(self, *, store_bytes: int = 1 << 20, num_cells: int = 1000, **engine: Any) -> None:
        self.engine = FakeEngine(num_cells=num_cells, max_batch_tokens=num_cells, **engine)
        self.store = MemorySnapshotStore(store_bytes)
        self.tiers = SnapshotTiers(self.store, can_cut=self.engine.limits.can_cut)
        self.cache = PrefixCache(self.engine, self.tiers)

    def open(self, tokens: list[int], *, match: PrefixMatch | None = None, extra: int = 0) -> int:
        """Open a sequence for tokens that are not computed yet."""
        opened = self.cache.open(NAMESPACE, tokens, match, len(tokens) + extra)
        assert opened is not None
        return opened[0]

    def write(self, seq_id: int, tokens: list[int]) -> None:
        """Compute tokens at the end of a running sequence."""
        batch = Batch()
        batch.add(seq_id, tokens, self.engine.num_tokens(seq_id), want_logits=False)
        self.engine.decode(batch)
        self.cache.written(seq_id, len(tokens))

    def run(self, tokens: list[int]) -> int:
        """A running sequence that forks what it can and has computed the rest."""
        match = self.cache.computed_match(NAMESPACE, tokens)
        seq_id = self.open(tokens, match=match)
        shared = match.num_tokens if match else 0
        if shared < len(tokens):
            self.write(seq_id, tokens[shared:])
        return seq_id

    def leave(self, tokens: list[int], *, pin: str | None = None) -> int:
        """A resident prefix."""
        seq_id = self.run(tokens)
        self.cache.keep(seq_id, tokens, pin)
        self.cache.check()
        return seq_id

    def restore(
        self, namespace: str, tokens: list[int], min_tokens: int, reserved_cells: int
    ) -> bool:
        """Bring back what memory holds of a prompt, if that is enough."""
        stored = self.tiers.get(namespace, tokens, min_tokens)
        return stored is not None and self.cache.restore(stored.snapshot, reserved_cells)

    def resident(self, tokens: list[int]) -> bool:
        return self.cache.is_resident(NAMESPACE, tokens)


# -- finding ---------------------------------------------------------------------------------------


def test_the_longest_computed_prefix_is_found() -> None:
    """Among residents and running sequences, cut to what is shared and what is written."""
    pool = Pool()
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT) is None
    resident = pool.leave(DOCUMENT[:60])
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT) == PrefixMatch(resident, 60)
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT[:40]) == PrefixMatch(resident, 40)
    running = pool.run(DOCUMENT[:80])
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT) == PrefixMatch(running, 80)
    assert pool.cache.computed_match("other salt", DOCUMENT) is None


def test_only_what_is_written_counts_as_computed() -> None:
    """A running sequence is found as far as it has come; the rest of its prompt is a plan."""
    pool = Pool()
    seq_id = pool.open(DOCUMENT)
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT) is None
    assert pool.cache.planned_match(NAMESPACE, DOCUMENT[:70]) == PrefixMatch(seq_id, 70)
    pool.write(seq_id, DOCUMENT[:50])
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT) == PrefixMatch(seq_id, 50)
    assert pool.cache.planned_match(NAMESPACE, DOCUMENT[:70]) == PrefixMatch(seq_id, 70)
    assert pool.cache.planned_match(NAMESPACE, DOCUMENT[:50]) is None
    assert pool.cache.planned_match("other salt", DOCUMENT) is None


def test_the_plan_that_is_furthest_is_waited_for() -> None:
    """Of two that will compute the same prefix, the one that has come further."""
    pool = Pool()
    ahead, behind = pool.open(DOCUMENT), pool.open(DOCUMENT)
    pool.write(ahead, DOCUMENT[:10])
    pool.write(behind, DOCUMENT[:5])
    assert pool.cache.planned_match(NAMESPACE, DOCUMENT) == PrefixMatch(ahead, 100)


def test_what_cannot_be_cut_is_offered_whole_only() -> None:
    """A5: half of a document is no prefix to fork, the whole of it is, and it stays usable."""
    pool = Pool(can_cut=False)
    half = pool.leave(DOCUMENT[:50])
    whole = pool.leave(DOCUMENT)
    assert pool.cache.computed_match(NAMESPACE, [*DOCUMENT, 1]) == PrefixMatch(whole, 100)
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT[:99]) == PrefixMatch(half, 50)
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT[:49]) is None
    assert pool.resident(DOCUMENT)
    assert not pool.resident(DOCUMENT[:99])


def test_a_running_sequence_is_forked_where_it_stands() -> None:
    """Where nothing can be cut, a prefill that happens to stand at a shared length will do."""
    pool = Pool(can_cut=False)
    seq_id = pool.open(DOCUMENT)
    pool.write(seq_id, DOCUMENT[:30])
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT) == PrefixMatch(seq_id, 30)
    assert pool.cache.computed_match(NAMESPACE, DOCUMENT[:29]) is None


# -- keeping ---------------------------------------------------------------------------------------


def test_a_prefix_that_is_there_already_is_not_kept_twice() -> None:
    """Equal or shorter tokens need no second sequence; longer ones do."""
    pool = Pool()
    pool.leave(DOCUMENT)
    pool.leave(DOCUMENT)
    pool.leave(DOCUMENT[:50])
    assert pool.cache.num_residents == 1
    pool.leave([*DOCUMENT, 1])
    assert pool.cache.num_residents == 2
    assert pool.cache.cells_used == 101


def test_where_nothing_can_be_cut_a_shorter_prefix_is_kept() -> None:
    """A longer resident does not serve for it."""
    pool = Pool(can_cut=False)
    pool.leave(DOCUMENT)
    pool.leave(DOCUMENT[:50])
    pool.leave(DOCUMENT[:50])
    assert pool.cache.num_residents == 2


def test_pins_are_idempotent_and_released_once() -> None:
    """C6: a repeated pin takes no second sequence; a release more is harmless; counts are right."""
    pool = Pool()
    pool.leave(DOCUMENT, pin="a")
    pool.leave(DOCUMENT, pin="a")
    assert (pool.cache.num_residents, pool.cache.num_pinned, pool.cache.pins(NAMESPACE)) == (
        1,
        1,
        {"a"},
    )
    assert pool.cache.cells_pinned == 100
    assert pool.cache.cells_idle == 0
    assert not pool.cache.release(NAMESPACE, "b")
    assert pool.cache.release(NAMESPACE, "a")
    assert not pool.cache.release(NAMESPACE, "a")
    assert (pool.cache.num_residents, pool.cache.num_pinned, pool.cache.pins(NAMESPACE)) == (
        1,
        0,
        set(),
    )
    assert pool.cache.cells_idle == 100


def test_a_pin_names_what_it_pinned_first() -> None:
    """The key in force is not moved to other tokens: those stay, but may be evicted."""
    pool = Pool()
    pool.leave(DOCUMENT, pin="a")
    other = piece("other", 50)
    pool.leave(other, pin="a")
    assert pool.cache.cells_pinned == 100
    assert pool.resident(other)


def test_an_empty_sequence_is_not_kept() -> None:
    """One that wrote nothing leaves nothing, pinned or not."""
    pool = Pool()
    for pin in (None, "a"):
        pool.cache.keep(pool.open(DOCUMENT), [], pin)
    assert pool.cache.sequences_used == 0
    assert pool.cache.pins(NAMESPACE) == set()
    pool.cache.check()


# -- room ------------------------------------------------------------------------------------------


def test_the_least_recently_used_leaves_first() -> None:
    """A fork is a use."""
    pool = Pool(num_cells=400)
    documents = [piece(name, 100) for name in "abc"]
    for tokens in documents:
        pool.leave(tokens)
    pool.cache.close(pool.run([*documents[0], 1]))
    assert pool.cache.make_room(150)
    assert [pool.resident(tokens) for tokens in documents] == [True, False, True]
    assert pool.cache.make_room(250)
    assert [pool.resident(tokens) for tokens in documents] == [True, False, False]
    assert pool.cache.counters.num_evictions == 2


def test_leaves_go_before_what_they_share() -> None:
    """A document is evicted after all that continue it, though it was used before them."""
    pool = Pool(num_cells=300)
    pool.leave(DOCUMENT)
    branches = [[*DOCUMENT, *piece(name, 50)] for name in "abc"]
    for tokens in branches:
        pool.leave(tokens)
    for room, left in ((51, [False, True, True]), (101, [False, False, True])):
        assert pool.cache.make_room(room)
        assert [pool.resident(tokens) for tokens in branches] == left
    assert pool.cache.make_room(200)
    assert pool.resident(DOCUMENT)
    assert pool.cache.make_room(201)
    assert not pool.resident(DOCUMENT)


def test_what_others_hold_as_well_leaves_first() -> None:
    """A sequence id is taken from a prefix of another resident, before anything is lost."""
    pool = Pool(max_sequences=3)
    old = piece("old", 50)
    pool.leave(old)
    pool.leave(DOCUMENT)
    pool.leave([*DOCUMENT, 1])
    pool.open(piece("new", 10))
    assert pool.resident(old)
    assert pool.resident([*DOCUMENT, 1])
    assert pool.cache.num_residents == 2


def test_eviction_that_cannot_help_does_not_happen() -> None:
    """More than everything unpinned: refused, and all is still there."""
    pool = Pool(num_cells=300)
    pool.leave(DOCUMENT, pin="a")
    idle = piece("idle", 50)
    pool.leave(idle)
    running = pool.run(piece("running", 80))
    assert pool.cache.free_cells_after_eviction() == 120
    assert not pool.cache.make_room(121)
    assert pool.resident(idle)
    assert pool.cache.make_room(120)
    assert not pool.resident(idle)
    assert pool.resident(DOCUMENT)
    assert pool.engine.num_tokens(running) == 80


def test_cells_that_a_running_sequence_shares_are_not_idle() -> None:
    """An unpinned document under a running branch frees only what the branch does not use."""
    pool = Pool()
    pool.leave(DOCUMENT)
    branch = pool.run([*DOCUMENT[:60], 1, 2])
    assert pool.cache.cells_used == 102
    assert pool.cache.cells_idle == 40
    assert pool.cache.free_cells_after_eviction() == 1000 - 62
    pool.cache.close(branch)
    assert pool.cache.cells_idle == 100


# -- opening ---------------------------------------------------------------------------------------


def test_opening_counts_a_shared_cell_once() -> None:
    """One token either side of the limit, with and without a prefix to fork."""
    for extra, fits in ((0, True), (1, False)):
        pool = Pool(num_cells=150)
        pool.leave(DOCUMENT, pin="a")
        tokens = [*DOCUMENT, *piece("task", 50)]
        match = pool.cache.computed_match(NAMESPACE, tokens)
        assert (pool.cache.open(NAMESPACE, tokens, match, 150 + extra) is not None) == fits
        other = piece("other", 50)
        pool = Pool(num_cells=150)
        pool.leave(DOCUMENT, pin="a")
        assert (pool.cache.open(NAMESPACE, other, None, 50 + extra) is not None) == fits


def test_a_sequence_that_cannot_be_opened_leaves_no_trace() -> None:
    """The cells of an idle document become the branch's own, so both do not fit: books as before.

    The first look counts the document's cells as free, as far as they are shared; only after the
    fork is it known that they are not.
    """
    pool = Pool(num_cells=250)
    pool.leave(DOCUMENT)
    running = pool.run(piece("running", 120))
    tokens = [*DOCUMENT, *piece("task", 60)]
    match = pool.cache.computed_match(NAMESPACE, tokens)
    assert match == PrefixMatch(0, 100)
    assert pool.cache.open(NAMESPACE, tokens, match, 160) is None
    pool.cache.check()
    assert pool.cache.counters.num_forks == 0
    assert pool.cache.sequences_used == 2
    assert pool.resident(DOCUMENT)
    pool.cache.close(running)
    assert pool.cache.open(NAMESPACE, tokens, match, 160) == (1, 100)
    assert pool.cache.counters.num_forks == 1


@pytest.mark.parametrize("error", [SequenceError("cannot be saved"), MemoryError()])
def test_a_prefix_that_cannot_be_saved_leaves_without_a_copy(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is needed, and what it holds can be computed again."""
    pool = Pool(num_cells=150)
    pool.leave(DOCUMENT)

    def fail(seq_id: int) -> bytes:
        raise error

    monkeypatch.setattr(pool.engine, "save", fail)
    pool.run(piece("other", 100))
    assert not pool.resident(DOCUMENT)
    assert (pool.cache.counters.num_evictions, pool.cache.counters.num_spills) == (1, 0)
    pool.cache.check()


def test_a_fault_while_saving_leaves_the_books_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eviction that opening needs raises: no id and no cell is lost, and it can be tried again.

    What was to leave is still there.
    """
    pool = Pool(num_cells=150)
    pool.leave(DOCUMENT)

    def fail(seq_id: int) -> bytes:
        raise ZeroDivisionError

    other = piece("other", 100)
    with monkeypatch.context() as patch:
        patch.setattr(pool.engine, "save", fail)
        with pytest.raises(ZeroDivisionError):
            pool.cache.open(NAMESPACE, other, None, 100)
    pool.cache.check()
    assert pool.cache.sequences_used == 1
    assert pool.resident(DOCUMENT)
    pool.run(other)
    assert pool.cache.counters.num_spills == 1


def test_the_last_sequence_id_is_waited_for_rather_than_taken_from_the_match() -> None:
    """D4: a branch does not evict the idle document that it wants to fork, while others run."""
    pool = Pool(max_sequences=2)
    pool.leave(DOCUMENT)
    running = pool.run([*DOCUMENT, 1])
    tokens = [*DOCUMENT, 2]
    match = pool.cache.computed_match(NAMESPACE, tokens)
    assert match is not None
    assert pool.cache.open(NAMESPACE, tokens, match, 101) is None
    assert pool.resident(DOCUMENT)
    pool.cache.close(running)
    assert pool.cache.open(NAMESPACE, tokens, match, 101) == (running, 100)


def test_where_nobody_runs_the_match_itself_makes_way() -> None:
    """With every id taken by idle or pinned prefixes a request is served, without the fork."""
    pool = Pool(max_sequences=2)
    pool.leave(piece("pinned", 50), pin="a")
    pool.leave(DOCUMENT)
    tokens = [*DOCUMENT, 2]
    match = pool.cache.computed_match(NAMESPACE, tokens)
    assert pool.cache.open(NAMESPACE, tokens, match, 101) == (1, 0)
    pool.cache.check()


def test_a_branch_point_is_left_where_an_id_can_be_spared() -> None:
    """The copy is a resident; without an id to spare nothing happens."""
    pool = Pool(max_sequences=2, can_cut=False)
    running = pool.open(DOCUMENT)
    pool.write(running, DOCUMENT[:60])
    pool.cache.keep_branch_point(running, DOCUMENT[:60])
    pool.write(running, DOCUMENT[60:])
    assert pool.resident(DOCUMENT[:60])
    assert pool.cache.cells_used == 100
    pool.cache.check()

    pool = Pool(max_sequences=2, can_cut=False)
    pool.leave(piece("pinned", 10), pin="a")
    running = pool.open(DOCUMENT)
    pool.write(running, DOCUMENT[:60])
    pool.cache.keep_branch_point(running, DOCUMENT[:60])
    pool.write(running, DOCUMENT[60:])
    assert not pool.resident(DOCUMENT[:60])
    pool.cache.check()


# -- the store -------------------------------------------------------------------------------------


def test_an_evicted_prefix_comes_back() -> None:
    """Spilled when it leaves, restored when it is asked for, with the same tokens."""
    pool = Pool(num_cells=150)
    pool.leave(DOCUMENT)
    assert pool.cache.make_room(150)
    assert not pool.resident(DOCUMENT)
    assert pool.cache.counters.num_spills == len(pool.store) == 1
    assert not pool.restore(NAMESPACE, DOCUMENT, 101, 0)
    assert not pool.restore("other salt", DOCUMENT, 1, 0)
    assert pool.restore(NAMESPACE, [*DOCUMENT, 1], 100, 0)
    assert pool.resident(DOCUMENT)
    assert pool.cache.counters.num_restores == 1
    pool.cache.check()


@pytest.mark.parametrize(("own", "total", "saved"), [(31, 31, 0), (32, 32, 1), (40, 161, 0)])
def test_only_what_is_worth_it_is_saved(own: int, total: int, saved: int) -> None:
    """Not a short prefix, nor one whose greater part another resident holds as well."""
    pool = Pool()
    shared = piece("shared", total - own)
    if shared:
        pool.leave([*shared, *piece("other", 50)])
        pool.cache.close(pool.run([*shared, *piece("other", 50)]))
    pool.leave([*shared, *piece("mine", own)])
    if shared:
        pool.cache.close(pool.run([*shared, *piece("other", 50)]))  # the other is used later
    assert pool.cache.make_room(pool.engine.limits.num_cells - pool.cache.cells_used + 1)
    assert not pool.resident([*shared, *piece("mine", own)])
    assert pool.cache.counters.num_spills == saved


def test_a_store_without_room_saves_nothing() -> None:
    """Eviction works all the same, and nothing is counted as saved."""
    pool = Pool(store_bytes=0)
    pool.leave(DOCUMENT)
    assert pool.cache.make_room(1000)
    assert pool.cache.counters.num_spills == 0
    assert pool.cache.counters.num_evictions == 1
    assert not pool.restore(NAMESPACE, DOCUMENT, 1, 0)


def test_a_restore_takes_no_promised_cells() -> None:
    """What running requests may still write is theirs: one cell less, and it is refused."""
    pool = Pool(num_cells=150)
    pool.leave(DOCUMENT)
    assert pool.cache.make_room(150)
    assert not pool.restore(NAMESPACE, DOCUMENT, 1, 51)
    assert pool.cache.sequences_used == 0
    assert pool.restore(NAMESPACE, DOCUMENT, 1, 50)


def test_a_restore_evicts_what_is_idle() -> None:
    """Cells and the sequence id of another prefix, which goes to the store in turn."""
    for limits in ({"num_cells": 150, "max_sequences": 4}, {"num_cells": 400, "max_sequences": 2}):
        pool = Pool(**limits)
        pool.leave(DOCUMENT)
        pool.cache.make_room(limits["num_cells"])
        pool.leave(piece("pinned", 10), pin="a")
        other = piece("other", 60)
        pool.leave(other)
        assert pool.restore(NAMESPACE, DOCUMENT, 1, 0)
        assert pool.resident(DOCUMENT)
        assert not pool.resident(other)
        assert len(pool.store) == 2
        pool.cache.check()


def test_a_restore_without_an_id_is_none() -> None:
    """All ids are pinned or running: refused, and the snapshot stays for another time."""
    pool = Pool(max_sequences=2)
    pool.leave(DOCUMENT)
    pool.cache.make_room(1000)
    pool.leave(piece("pinned", 10), pin="a")
    running = pool.run(piece("running", 10))
    assert not pool.restore(NAMESPACE, DOCUMENT, 1, 0)
    pool.cache.check()
    pool.cache.close(running)
    assert pool.restore(NAMESPACE, DOCUMENT, 1, 0)


def test_a_state_that_does_not_load_is_thrown_away() -> None:
    """E1: the sequence stays empty, its id free, and it is not tried again."""
    pool = Pool()
    pool.store.put(
        KVSnapshot(
            identity=pool.engine.facts.identity,
            namespace=NAMESPACE,
            tokens=tuple(DOCUMENT),
            state=b"damaged",
        )
    )
    assert not pool.restore(NAMESPACE, DOCUMENT, 1, 0)
    assert len(pool.store) == 0
    assert pool.cache.sequences_used == 0
    pool.cache.check()


# -- what runs comes first -------------------------------------------------------------------------

IDLE = piece("idle", 400)


def test_what_is_idle_leaves_before_room_is_needed() -> None:
    """To the store, and only while something runs that does not share it."""
    pool = Pool(num_cells=4000, move_cost_tokens=4)
    pool.leave(IDLE)
    pool.run(DOCUMENT)
    pool.cache.spill_idle([])
    assert not pool.resident(IDLE)
    assert pool.cache.counters.num_spills == len(pool.store) == 1
    assert pool.cache.cells_used == len(DOCUMENT)
    assert pool.restore(NAMESPACE, IDLE, 1, 0)
    pool.cache.spill_idle([])
    assert not pool.resident(IDLE)
    assert pool.cache.counters.num_spills == 1  # it was still in the store
    pool.cache.check()


def test_what_is_needed_or_cannot_be_saved_stays() -> None:
    """Shared with one that runs, wanted by one that waits, pinned, few, or the store is full."""
    pool = Pool(num_cells=4000, move_cost_tokens=4)
    branch = pool.run(IDLE)
    pool.cache.keep(branch, IDLE, None)
    branch = pool.run([*IDLE, 1])
    pool.cache.spill_idle([])
    assert pool.resident(IDLE)
    pool.cache.close(branch)
    pool.run(DOCUMENT)
    pool.cache.spill_idle([("other salt", IDLE), (NAMESPACE, [*IDLE, 2])])
    assert pool.resident(IDLE)
    pool.leave(IDLE, pin="a")
    pool.cache.spill_idle([])
    assert pool.resident(IDLE)
    pool.cache.release(NAMESPACE, "a")

    for other in (
        Pool(num_cells=4000),  # moving never pays
        Pool(num_cells=4000, move_cost_tokens=4, store_bytes=1000),
    ):
        other.leave(IDLE)
        other.run(DOCUMENT)
        other.cache.spill_idle([])
        assert other.resident(IDLE)
    few = Pool(num_cells=4000, move_cost_tokens=4)
    few.leave(IDLE[:256])
    few.run(DOCUMENT)
    few.cache.spill_idle([])
    assert few.resident(IDLE[:256])


def test_an_early_leave_evicts_no_snapshot() -> None:
    """The store has room for one of two: the other stays in the pool."""
    pool = Pool(num_cells=4000, move_cost_tokens=4, store_bytes=2 * 4 * 400 + 600)
    other = piece("other", 400)
    pool.leave(IDLE)
    pool.leave(other)
    pool.run(DOCUMENT)
    pool.cache.spill_idle([])
    assert not pool.resident(IDLE)
    assert pool.resident(other)
    assert pool.restore(NAMESPACE, IDLE, len(IDLE), 0)


def test_a_hole_is_closed_where_that_pays() -> None:
    """Moving 100 cells down over a hole of 400 costs as much as attending to it for 4 tokens."""
    pool = Pool(num_cells=4000, move_cost_tokens=16)
    pool.leave(IDLE)
    document = pool.run(DOCUMENT)
    branch = pool.run([*DOCUMENT, *piece("task", 7)])
    pool.cache.clear_idle()
    pool.cache.compact(remaining_tokens=4)
    assert pool.cache.counters.num_compactions == 0
    pool.cache.compact(remaining_tokens=17)
    assert pool.cache.counters.num_compactions == 1
    pool.cache.check()
    assert pool.engine.num_tokens(document) == 100
    assert pool.engine.num_tokens(branch) == 107
    pool.cache.compact(remaining_tokens=1000)
    assert pool.cache.counters.num_compactions == 1


def test_a_hole_stays_without_a_spare_sequence() -> None:
    """Moving goes through an empty sequence; where all are in use nothing happens."""
    pool = Pool(num_cells=4000, move_cost_tokens=1, max_sequences=2)
    pool.leave(IDLE)
    pool.run(DOCUMENT)
    pool.cache.clear_idle()
    pool.run(piece("b", 20))
    assert pool.cache.sequences_used == 2
    pool.cache.compact(remaining_tokens=1000)
    assert pool.cache.counters.num_compactions == 0


def test_clearing_the_idle_spares_the_rest() -> None:
    """Nothing is saved; pinned and running sequences stay."""
    pool = Pool()
    pool.leave(DOCUMENT, pin="a")
    pool.leave(piece("idle", 60))
    running = pool.run(piece("running", 10))
    pool.cache.clear_idle()
    assert pool.resident(DOCUMENT)
    assert not pool.resident(piece("idle", 60))
    assert pool.engine.num_tokens(running) == 10
    assert len(pool.store) == 0
    pool.cache.check()
