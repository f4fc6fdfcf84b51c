"""Who uses which cells of the unified KV pool, counted without asking native code.

Sequences form a forest of **segments**, runs of cells; a sequence is the path from a root down to
its tip. All that share a cell share everything before it, for a fork shares a prefix:

    document ──┬── branch 1
               └── branch 2 ── branch 2's own fork

`num_users` of a segment counts the tips at it and the segments below it. A segment with one user
whose user is a tip belongs to that sequence alone; at zero users its cells are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CellLedger"]


@dataclass(eq=False, slots=True)
class _Segment:
    num_cells: int
    parent: _Segment | None
    num_users: int = 1

    def join_parents(self) -> None:
        """Take in the segments above that only this one uses, so that paths stay short."""
        while self.parent is not None and self.parent.num_users == 1:
            self.num_cells += self.parent.num_cells
            self.parent = self.parent.parent

    def split(self, num_cells: int) -> _Segment:
        """Move the first `num_cells` into a new parent, which has this segment as its user."""
        self.parent = _Segment(num_cells, self.parent)
        self.num_cells -= num_cells
        return self.parent


class CellLedger:
    """The cells of a pool of `num_cells`, by the sequences that use them.

    A sequence that was never named holds no tokens. Calls that contradict the ledger are bugs of
    this package: they raise AssertionError and change nothing. Not thread safe.
    """

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
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
        tip = self._tips.get(seq_id)
        if tip is not None and tip.num_users == 1:
            tip.num_cells += num_tokens
        else:
            # The new segment takes over this sequence's place among the old tip's users.
            self._tips[seq_id] = _Segment(num_tokens, parent=tip)
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
            segment = segment.parent

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
