"""The cell ledger: exact accounting of shared cells, against a model of plain cell ids."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from langchain_swarmkv.engine.cells import CellLedger

NUM_CELLS = 60
SEQ_IDS = st.integers(0, 5)


class LedgerAgainstCellIds(RuleBasedStateMachine):
    """The ledger and a naive model, where each sequence is a list of the ids of its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = CellLedger(NUM_CELLS)
        self.cells: dict[int, list[int]] = {seq_id: [] for seq_id in range(6)}

    def take_lowest(self, num_cells: int) -> list[int]:
        """What llama.cpp gives to new tokens."""
        return sorted(set(range(NUM_CELLS)) - self.used())[:num_cells]

    def used(self) -> set[int]:
        return {cell for cells in self.cells.values() for cell in cells}

    @rule(seq_id=SEQ_IDS, num_tokens=st.integers(0, 12))
    def append(self, seq_id: int, num_tokens: int) -> None:
        if num_tokens > NUM_CELLS - len(self.used()):
            with pytest.raises(AssertionError, match="are free"):
                self.ledger.append(seq_id, num_tokens)
            return
        self.ledger.append(seq_id, num_tokens)
        self.cells[seq_id] += self.take_lowest(num_tokens)

    @precondition(lambda self: any(self.cells.values()) and not all(self.cells.values()))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from([s for s, cells in self.cells.items() if cells]))
        target = data.draw(st.sampled_from([s for s, cells in self.cells.items() if not cells]))
        num_tokens = data.draw(st.integers(0, len(self.cells[source])))
        self.ledger.fork(source, target, num_tokens)
        self.cells[target] = self.cells[source][:num_tokens]

    @rule(source=SEQ_IDS, into=SEQ_IDS, excess=st.integers(1, 3))
    def fork_too_many(self, source: int, into: int, excess: int) -> None:
        with pytest.raises(AssertionError):
            self.ledger.fork(source, into, len(self.cells[source]) + excess)

    @rule(seq_id=SEQ_IDS)
    def clear(self, seq_id: int) -> None:
        self.ledger.clear(seq_id)
        self.cells[seq_id] = []

    @rule()
    def compact(self) -> None:
        """Moving what lies above leaves no hole, and every sequence keeps its length."""
        for cell_range in self.ledger.ranges_from(self.ledger.used):
            moved = self.cells[cell_range.holders[0]][cell_range.first : cell_range.end]
            others = self.used() - set(moved)
            new = sorted(set(range(NUM_CELLS)) - others)[: len(moved)]
            for seq_id, cells in self.cells.items():
                holds = cells[cell_range.first : cell_range.end] == moved
                assert holds == (seq_id in cell_range.holders)
                if holds:
                    cells[cell_range.first : cell_range.end] = new
            self.ledger.move(cell_range)
        assert self.ledger.top == self.ledger.used

    @rule(seq_id=SEQ_IDS)
    def exclusive(self, seq_id: int) -> None:
        """Asked at random moments, because the answer may rearrange the ledger's insides."""
        others = {c for s, cells in self.cells.items() if s != seq_id for c in cells}
        assert self.ledger.exclusive(seq_id) == len(set(self.cells[seq_id]) - others)

    @rule(seq_ids=st.lists(SEQ_IDS))
    def distinct(self, seq_ids: list[int]) -> None:
        together = {cell for seq_id in seq_ids for cell in self.cells[seq_id]}
        assert self.ledger.distinct(seq_ids) == len(together)

    @invariant()
    def ledger_agrees_with_the_model(self) -> None:
        self.ledger.check()
        assert self.ledger.used == len(self.used())
        assert self.ledger.free == NUM_CELLS - len(self.used())
        assert self.ledger.top == max(self.used(), default=-1) + 1
        for seq_id, cells in self.cells.items():
            assert self.ledger.num_tokens(seq_id) == len(cells)


TestLedgerAgainstCellIds = LedgerAgainstCellIds.TestCase
TestLedgerAgainstCellIds.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_document_is_counted_once_however_many_branches_share_it() -> None:
    """Document + own cells of each branch; freed when the last user goes."""
    ledger = CellLedger(1000)
    ledger.append(0, 300)
    for branch in range(1, 65):
        ledger.fork(0, branch, 300)
        ledger.append(branch, 5)
    assert ledger.used == 300 + 64 * 5
    assert ledger.exclusive(0) == 0
    ledger.clear(0)
    assert ledger.used == 300 + 64 * 5
    for branch in range(1, 64):
        ledger.clear(branch)
    assert ledger.exclusive(64) == ledger.used == 305
    ledger.clear(64)
    assert ledger.free == 1000


def test_a_shared_last_segment_is_not_extended_for_the_others() -> None:
    """After a fork at its end, what the source appends is the source's alone."""
    ledger = CellLedger(100)
    ledger.append(0, 10)
    ledger.fork(0, 1, 10)
    ledger.append(0, 3)
    ledger.append(1, 4)
    assert (ledger.num_tokens(0), ledger.num_tokens(1), ledger.used) == (13, 14, 17)
    assert (ledger.exclusive(0), ledger.exclusive(1)) == (3, 4)


def test_a_cut_inside_a_segment_moves_every_sequence_that_uses_it() -> None:
    """Three users of one run of cells, cut in the middle by a fourth."""
    ledger = CellLedger(100)
    ledger.append(0, 20)
    ledger.fork(0, 1, 20)
    ledger.fork(1, 2, 20)
    ledger.fork(2, 3, 7)
    for seq_id in (0, 1, 2):
        ledger.clear(seq_id)
    assert ledger.used == ledger.exclusive(3) == 7
    ledger.check()


def test_a_refused_call_changes_nothing() -> None:
    """One cell too many, a target in use, a source too short, a negative count."""
    ledger = CellLedger(10)
    ledger.append(0, 8)
    ledger.append(1, 1)
    for refused in (
        lambda: ledger.append(0, 2),
        lambda: ledger.append(0, -1),
        lambda: ledger.fork(0, 1, 4),
        lambda: ledger.fork(0, 2, 9),
        lambda: ledger.fork(3, 2, 1),
        lambda: ledger.fork(0, 2, -1),
    ):
        with pytest.raises(AssertionError):
            refused()
        ledger.check()
        assert (ledger.num_tokens(0), ledger.num_tokens(1), ledger.num_tokens(2)) == (8, 1, 0)
        assert ledger.used == 9
    ledger.append(0, 1)
    assert ledger.free == 0


def test_a_document_cut_at_many_points_keeps_a_short_path() -> None:
    """Branches that came and went leave no trail of segments behind."""
    ledger = CellLedger(2000)
    ledger.append(0, 1000)
    for cut in range(1, 1000):
        ledger.fork(0, 1, cut)
        ledger.append(1, 1)
        ledger.clear(1)
    assert ledger.exclusive(0) == 1000
    assert ledger._tips[0].parent is None
    ledger.check()


def test_a_check_finds_a_wrong_count() -> None:
    """The check recomputes: it does not believe the counters that it checks."""
    ledger = CellLedger(100)
    ledger.append(0, 10)
    ledger.fork(0, 1, 4)
    ledger._used += 1
    with pytest.raises(AssertionError):
        ledger.check()


def test_ledgers_that_joined_at_other_times_agree_on_what_moves() -> None:
    """Two ledgers of one history, of which one was asked what a sequence has to itself."""
    asked, other = CellLedger(100), CellLedger(100)
    for ledger in (asked, other):
        ledger.append(9, 10)
        ledger.append(0, 20)
        ledger.fork(0, 1, 20)
        ledger.append(1, 5)
        ledger.clear(0)
        ledger.clear(9)
    assert asked.exclusive(1) == 25
    for ranges, mover in ((asked.ranges_from(25), other), (other.ranges_from(0), asked)):
        for cell_range in ranges:
            mover.move(cell_range)
        mover.check()
        assert mover.num_tokens(1) == mover.top == 25
