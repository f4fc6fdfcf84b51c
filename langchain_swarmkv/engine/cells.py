"""Who uses which cells of the unified KV pool, counted without asking native code.

Sequences form a forest of **segments**, runs of cells; a sequence is the path from a root down to
its tip. All that share a cell share everything before it, for a fork shares a prefix:

    document ──┬── branch 1
               └── branch 2 ── branch 2's own fork

`num_users` of a segment counts the tips at it and the segments below it. A segment with one user
whose user is a tip belongs to that sequence alone; at zero users its cells are free.

Which cells these are is known too: llama.cpp gives new tokens the lowest free cells (`find_slot` in
llama-kv-cache.cpp, whose search starts at or below the lowest one), and every decode step attends
over all cells up to the highest used one, so a hole below costs time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CellLedger", "CellRange"]


@dataclass(eq=False, slots=True)
class _Segment:
    cells: list[int]
    """Indices into the pool, in the order of the tokens."""
    parent: _Segment | None
    num_users: int = 1

    @property
    def num_cells(self) -> int:
        return len(self.cells)

    def join_parents(self) -> None:
        """Take in the segments above that only this one uses, so that paths stay short."""
        while self.parent is not None and self.parent.num_users == 1:
            self.cells = self.parent.cells + self.cells
            self.parent = self.parent.parent

    def split(self, num_cells: int) -> _Segment:
        """Move the first `num_cells` into a new parent, which has this segment as its user."""
        self.parent = _Segment(self.cells[:num_cells], self.parent)
        del self.cells[:num_cells]
        return self.parent


class _Pool:
    """Which cells are taken; the lowest free ones go first, as in llama.cpp."""

    def __init__(self, num_cells: int) -> None:
        self._taken = bytearray(num_cells)
        self._lowest = 0  # no free cell lies below

    @property
    def top(self) -> int:
        return self._taken.rfind(1) + 1

    def take(self, num_cells: int) -> list[int]:
        cells = []
        for _ in range(num_cells):
            cell = self._taken.find(0, self._lowest)
            self._taken[cell] = 1
            self._lowest = cell + 1
            cells.append(cell)
        return cells

    def give_back(self, cells: list[int]) -> None:
        for cell in cells:
            self._taken[cell] = 0
        self._lowest = min(self._lowest, *cells)

    def taken(self) -> set[int]:
        return {cell for cell, is_taken in enumerate(self._taken) if is_taken}


@dataclass(frozen=True)
class CellRange:
    """A run of positions [first, end) whose cells exactly these sequences share."""

    holders: tuple[int, ...]
    first: int
    end: int

    @property
    def num_cells(self) -> int:
        """Its length."""
        return self.end - self.first


class CellLedger:
    """The cells of a pool of `num_cells`, by the sequences that use them.

    A sequence that was never named holds no tokens. Calls that contradict the ledger are bugs of
    this package: they raise AssertionError and change nothing. Not thread safe.
    """

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self._pool = _Pool(num_cells)
        self._used = 0
        self._tips: dict[int, _Segment] = {}
        self._num_tokens: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Cells in use, a shared one counted once."""
        return self._used

    @property
    def free(self) -> int:
        """Cells that nobody uses."""
        return self.num_cells - self._used

    @property
    def top(self) -> int:
        """One more than the highest cell in use: what each decode step attends over."""
        return self._pool.top

    def num_tokens(self, seq_id: int) -> int:
        """Tokens in the sequence, shared or not."""
        return self._num_tokens.get(seq_id, 0)

    def exclusive(self, seq_id: int) -> int:
        """Cells that `clear(seq_id)` would free."""
        tip = self._tips.get(seq_id)
        if tip is None or tip.num_users > 1:
            return 0
        tip.join_parents()
        return tip.num_cells

    def distinct(self, seq_ids: Iterable[int]) -> int:
        """Cells that these sequences use together, a shared one counted once."""
        seen: set[_Segment] = set()
        for seq_id in seq_ids:
            segment = self._tips.get(seq_id)
            while segment is not None and segment not in seen:
                seen.add(segment)
                segment = segment.parent
        return sum(segment.num_cells for segment in seen)

    def append(self, seq_id: int, num_tokens: int) -> None:
        """Add `num_tokens` new cells of its own to the end of the sequence; constant time."""
        if not 0 <= num_tokens <= self.free:
            raise AssertionError(
                f"sequence {seq_id} appends {num_tokens} cells, but {self.free} of "
                f"{self.num_cells} are free"
            )
        if num_tokens == 0:
            return
        tip, cells = self._tips.get(seq_id), self._pool.take(num_tokens)
        if tip is not None and tip.num_users == 1:
            tip.cells += cells
        else:
            # The new segment takes over this sequence's place among the old tip's users.
            self._tips[seq_id] = _Segment(cells, parent=tip)
        self._num_tokens[seq_id] = self.num_tokens(seq_id) + num_tokens
        self._used += num_tokens

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """Make the empty `target` share the first `num_tokens` cells of `source`."""
        if target in self._tips:
            raise AssertionError(f"sequence {target} is in use and cannot be forked into")
        if not 0 <= num_tokens <= self.num_tokens(source):
            raise AssertionError(
                f"sequence {source} has {self.num_tokens(source)} tokens, "
                f"so {num_tokens} of them cannot be shared"
            )
        if num_tokens == 0:
            return
        segment = self._segment_ending_at(source, num_tokens)
        segment.num_users += 1
        self._tips[target] = segment
        self._num_tokens[target] = num_tokens

    def clear(self, seq_id: int) -> None:
        """Empty the sequence; cells that another one shares stay in use."""
        segment = self._tips.pop(seq_id, None)
        self._num_tokens.pop(seq_id, None)
        while segment is not None:
            segment.num_users -= 1
            if segment.num_users:
                return
            self._used -= segment.num_cells
            self._pool.give_back(segment.cells)
            segment = segment.parent

    def ranges_from(self, cell: int) -> list[CellRange]:
        """The segments that have a cell at or above `cell`.

        If each of them moves to the lowest free cells (`move`), and `cell` is `used`, then no hole
        is left: below `cell` as many cells are free as are in use above it.
        """
        holders: dict[_Segment, list[int]] = {}
        ends: dict[_Segment, int] = {}
        for seq_id, tip in self._tips.items():
            end = self._num_tokens[seq_id]
            for segment in _path(tip):
                holders.setdefault(segment, []).append(seq_id)
                ends[segment] = end
                end -= segment.num_cells
        return [
            CellRange(tuple(holders[segment]), end - segment.num_cells, end)
            for segment, end in ends.items()
            if max(segment.cells) >= cell
        ]

    def move(self, cell_range: CellRange) -> None:
        """Note that the cells of a range were freed and its tokens put into the lowest free."""
        # Another ledger may cut the same cells into other segments: what joins them is when it was
        # asked, not who uses them.
        segment = self._segment_ending_at(cell_range.holders[0], cell_range.end)
        if segment.num_cells > cell_range.num_cells:
            segment.split(segment.num_cells - cell_range.num_cells)
        if segment.num_cells != cell_range.num_cells:
            raise AssertionError(f"{cell_range} is not shared by just these sequences")
        self._pool.give_back(segment.cells)
        segment.cells = self._pool.take(segment.num_cells)

    def check(self) -> None:
        """Recompute everything from the paths of all sequences; AssertionError on a difference."""
        assert self._tips.keys() == self._num_tokens.keys()
        num_users: Counter[_Segment] = Counter()
        for seq_id, tip in self._tips.items():
            assert sum(s.num_cells for s in _path(tip)) == self._num_tokens[seq_id]
            num_users[tip] += 1
        segments = {segment for tip in self._tips.values() for segment in _path(tip)}
        num_users.update(s.parent for s in segments if s.parent is not None)
        for segment in segments:
            assert segment.num_cells > 0
            assert segment.num_users == num_users[segment]
        assert self._used == sum(segment.num_cells for segment in segments) <= self.num_cells
        assert self._pool.taken() == {cell for segment in segments for cell in segment.cells}
        assert len(self._pool.taken()) == self._used

    def _segment_ending_at(self, seq_id: int, position: int) -> _Segment:
        """The segment of the sequence whose last cell is `position - 1`, split off if needed."""
        segment: _Segment | None = self._tips[seq_id]
        end = self._num_tokens[seq_id]
        while segment is not None:
            segment.join_parents()
            start = end - segment.num_cells
            if start < position:
                return segment if position == end else segment.split(position - start)
            segment, end = segment.parent, start
        raise AssertionError(f"sequence {seq_id} has no cell before position {position}")


def _path(tip: _Segment) -> list[_Segment]:
    """The segments of a sequence, from its tip up to its root."""
    path = [tip]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    return path
