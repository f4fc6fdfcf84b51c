"""What `check_budget` found: value objects that print themselves and say what would fit."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from rich import box
from rich.console import Console, Group
from rich.table import Table

from langchain_swarmkv.errors import ContextBudgetError

__all__ = [
    "AnalystBudget",
    "BudgetReport",
    "BudgetWarning",
    "GraphWarning",
    "PoolBudget",
    "Verdict",
]

_A_DOCUMENT = "a document of at most"
_WHAT_LIMITS = {
    "n_ctx": "",
    "n_ctx_train": ", what the model was trained for; n_ctx cannot raise it",
}


class BudgetWarning(UserWarning):
    """Part of a graph's budget will only be known when it runs."""


class GraphWarning(UserWarning):
    """A graph may do, when it runs, what its author did not mean."""


class Verdict(str, Enum):
    """Whether something fits."""

    FITS = "fits"
    OVER = "over"
    UNKNOWN = "checked at run time"


def _verdict(*, is_over: bool, is_known: bool) -> Verdict:
    if is_over:
        return Verdict.OVER
    return Verdict.FITS if is_known else Verdict.UNKNOWN


@dataclass(frozen=True)
class AnalystBudget:
    """One analyst's share. None: known only at run time, and counted as nothing (one copy)."""

    node: str
    """Path of the node: "review:novelty" for node "novelty" of subgraph "review"."""
    document_tokens: int | None
    """The shared part of its prompt: document, instructions and markup."""
    overhead_tokens: int
    """Tokens of the shared part that are not the document's text."""
    task_tokens: int | None
    """The rest of its prompt: the task and the markup around it."""
    max_tokens: int
    fanout: int | None
    """Most copies at once."""
    n_ctx: int
    n_ctx_train: int | None
    """None: not read, since nothing was counted."""

    @property
    def limit_tokens(self) -> int:
        """Most positions of one copy: the smaller of `n_ctx` and `n_ctx_train`."""
        return min(self.n_ctx, self.n_ctx if self.n_ctx_train is None else self.n_ctx_train)

    @property
    def limit_name(self) -> str:
        """Which of the two that is."""
        return "n_ctx" if self.limit_tokens == self.n_ctx else "n_ctx_train"

    @property
    def branch_tokens(self) -> int:
        """Cells that one copy needs for itself."""
        return (self.task_tokens or 0) + self.max_tokens

    @property
    def num_copies(self) -> int:
        """Copies that are counted."""
        return 1 if self.fanout is None else self.fanout

    @property
    def needed_positions(self) -> int:
        """Positions of one copy: its whole prompt and answer."""
        return (self.document_tokens or 0) + self.branch_tokens

    @property
    def is_known(self) -> bool:
        """Whether every number is."""
        return None not in (self.document_tokens, self.task_tokens, self.n_ctx_train)

    @property
    def verdict(self) -> Verdict:
        """Whether one copy alone fits."""
        return _verdict(is_over=self.needed_positions > self.limit_tokens, is_known=self.is_known)

    @property
    def text_tokens(self) -> int:
        """Tokens of the document's text that it reads."""
        return (self.document_tokens or 0) - self.overhead_tokens

    @property
    def document_room_tokens(self) -> int:
        """The longest text with which one copy fits."""
        return self.limit_tokens - self.branch_tokens - self.overhead_tokens


@dataclass(frozen=True)
class PoolBudget:
    """One engine's KV pool in the superstep that asks most of it."""

    model: str
    n_ctx: int
    max_sequences: int
    branches: tuple[AnalystBudget, ...]
    """The analysts that can run at once then."""
    document_tokens: int
    """Documents that must be in the pool then, each counted once; pinned ones are always there."""
    num_documents: int
    largest_alone_cells: int
    """The branch that needs most, with what it reads, if all others wait (in any superstep)."""
    waves: int
    """In how many turns the branches run, at most, given the cells and sequences there are."""
    is_known: bool
    """Whether every number of every superstep is."""
    allow_waves: bool

    @property
    def num_branches(self) -> int:
        """Branches at once, copies counted."""
        return sum(branch.num_copies for branch in self.branches)

    @property
    def branch_tokens(self) -> int:
        """Cells of all branches together."""
        return sum(branch.num_copies * branch.branch_tokens for branch in self.branches)

    @property
    def needed_cells(self) -> int:
        """Cells, were all branches to run at once."""
        return self.document_tokens + self.branch_tokens

    @property
    def needed_sequences(self) -> int:
        """Sequence ids, were all branches to run at once."""
        return self.num_documents + self.num_branches

    @property
    def document_room_tokens(self) -> int | None:
        """The longest text with which all branches fit at once; None: there are several texts."""
        if self.num_documents != 1:
            return None
        overhead = max((b.overhead_tokens for b in self.branches), default=0)
        return self.document_tokens - overhead - (self.needed_cells - self.n_ctx)

    @property
    def verdict(self) -> Verdict:
        """Whether the pool is large enough."""
        if self.allow_waves:
            is_over = self.largest_alone_cells > self.n_ctx
        else:
            is_over = self.needed_cells > self.n_ctx or self.needed_sequences > self.max_sequences
        return _verdict(is_over=is_over, is_known=self.is_known)

    def what_would_fit(self) -> Iterator[str]:
        """Changes that would let all branches run at once, or one after the other."""
        excess = self.needed_cells - self.n_ctx
        if excess > 0:
            yield f"n_ctx={self.needed_cells}"
            task_tokens = sum(b.num_copies * (b.task_tokens or 0) for b in self.branches)
            room = self.n_ctx - self.document_tokens - task_tokens
            if self.num_branches and room >= self.num_branches:
                yield f"max_tokens={room // self.num_branches} for each"
            length = self.document_room_tokens
            if length is not None and length > 0:
                yield f"{_A_DOCUMENT} {length} tokens"
        if self.needed_sequences > self.max_sequences:
            yield f"max_sequences={self.needed_sequences}"
        if not self.allow_waves and self.largest_alone_cells <= self.n_ctx:
            yield f"allow_waves=True (they would run in about {self.waves} turns)"


@dataclass(frozen=True)
class BudgetReport:
    """The budget of a graph; print it for a table."""

    rows: tuple[AnalystBudget, ...]
    """One for each analyst."""
    pools: tuple[PoolBudget, ...]
    """One for each engine."""
    unknown: tuple[str, ...]
    """What will only be known when the graph runs, and how to make it known."""
    remarks: tuple[str, ...] = ()
    """What may surprise when the graph runs, whatever its budget, and what to do."""
    recursion_limit: int | None = None
    """What bounds the graph's cycles to `max_turns`; None: there are none, or no bound."""

    @property
    def verdict(self) -> Verdict:
        """The worst of all verdicts."""
        verdicts = {*(row.verdict for row in self.rows), *(pool.verdict for pool in self.pools)}
        return _verdict(
            is_over=Verdict.OVER in verdicts,
            is_known=Verdict.UNKNOWN not in verdicts and not self.unknown,
        )

    @property
    def fits(self) -> bool:
        """Whether everything is known and fits."""
        return self.verdict is Verdict.FITS

    @property
    def waves(self) -> int:
        """In how many turns the fullest superstep runs, at most."""
        return max((pool.waves for pool in self.pools), default=0)

    def raise_if_over(self) -> None:
        """Refuse what cannot fit.

        Raises:
            ContextBudgetError: with the numbers and what would fit.
        """
        error = next(self._errors(), None)
        if error is not None:
            raise error

    def _errors(self) -> Iterator[ContextBudgetError]:
        """What is wrong, the least curable first: the trained context cannot be raised."""
        untrained = [
            row
            for row in self.rows
            if row.n_ctx_train is not None and row.needed_positions > row.n_ctx_train
        ]
        if untrained:
            yield self._positions_error(untrained, "n_ctx_train")
        for pool in self.pools:
            if pool.verdict is Verdict.OVER and not pool.allow_waves:
                yield self._pool_error(pool)
        if too_long := [row for row in self.rows if row.needed_positions > row.n_ctx]:
            yield self._positions_error(too_long, "n_ctx")
        for pool in self.pools:
            if pool.verdict is Verdict.OVER:
                yield self._pinned_error(pool)

    def _positions_error(self, over: list[AnalystBudget], name: str) -> ContextBudgetError:
        row = max(over, key=lambda row: row.needed_positions)
        limit = row.n_ctx if row.n_ctx_train is None or name == "n_ctx" else row.n_ctx_train
        return ContextBudgetError(
            f"Analyst {row.node!r} alone needs {row.needed_positions} tokens (document "
            f"{row.document_tokens or 0}, task {row.task_tokens or 0}, max_tokens "
            f"{row.max_tokens}), but {name}={limit}{_WHAT_LIMITS[name]}. "
            f"{_would_fit(self._what_would_fit(row, over))}",
            needed_tokens=row.needed_positions,
            limit_tokens=limit,
            limit_name=name,
            node=row.node,
            report=self,
        )

    def _what_would_fit(self, worst: AnalystBudget, over: list[AnalystBudget]) -> Iterator[str]:
        """Changes with which every analyst fits alone; a length, with which all fit together."""
        if worst.n_ctx_train is None or worst.needed_positions <= worst.n_ctx_train:
            yield f"n_ctx={worst.needed_positions}"
        max_tokens = min(row.max_tokens - row.needed_positions + row.limit_tokens for row in over)
        if max_tokens > 0:
            yield f"max_tokens={max_tokens}{' for each' if len(over) > 1 else ''}"
        same_text = [row for row in self.rows if row.text_tokens == worst.text_tokens]
        rooms = [row.document_room_tokens for row in same_text]
        # Other ways out of a full pool (more cells, waves) do not help with the trained context.
        pools = [p for p in self.pools if p.verdict is Verdict.OVER and not p.allow_waves]
        rooms += [room for pool in pools if (room := pool.document_room_tokens) is not None]
        if min(rooms) > 0:
            yield f"{_A_DOCUMENT} {min(rooms)} tokens"

    def _pool_error(self, pool: PoolBudget) -> ContextBudgetError:
        is_cells = pool.needed_cells > pool.n_ctx
        needed = pool.needed_cells if is_cells else pool.needed_sequences
        name = "n_ctx" if is_cells else "max_sequences"
        limit = pool.n_ctx if is_cells else pool.max_sequences
        return ContextBudgetError(
            f"{_listed(pool)} {needed} {'cells' if is_cells else 'sequences'} "
            f"({_sum(pool, is_cells)}), but {name}={limit}. {_would_fit(pool.what_would_fit())}",
            needed_tokens=needed,
            limit_tokens=limit,
            limit_name=name,
            report=self,
        )

    def _pinned_error(self, pool: PoolBudget) -> ContextBudgetError:
        return ContextBudgetError(
            f"Even one at a time, the branches of {pool.model!r} need {pool.largest_alone_cells} "
            f"cells with their documents and the pinned ones, but n_ctx={pool.n_ctx}. It would fit "
            f"with n_ctx={pool.largest_alone_cells}, or with fewer pinned documents.",
            needed_tokens=pool.largest_alone_cells,
            limit_tokens=pool.n_ctx,
            limit_name="n_ctx",
            report=self,
        )

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __rich__(self) -> Group:
        return Group(
            self._table(),
            *map(_pool_line, self.pools),
            *(f"? {note}" for note in (*self.unknown, *self.remarks)),
        )

    def _table(self) -> Table:
        table = Table(title="Context budget, in tokens", title_justify="left", box=box.SIMPLE)
        table.add_column("analyst")
        for column in ("document", "task", "max_tokens", "copies", "positions", "limit"):
            table.add_column(column, justify="right")
        table.add_column("alone")
        for row in self.rows:
            table.add_row(
                row.node,
                _number(row.document_tokens),
                _number(row.task_tokens),
                _number(row.max_tokens),
                _number(row.fanout),
                ("" if row.is_known else ">= ") + _number(row.needed_positions),
                f"{row.limit_name} {row.limit_tokens:,}",
                row.verdict.value,
            )
        return table


def _would_fit(changes: Iterator[str]) -> str:
    listed = list(changes)
    if not listed:
        return "Shorten the tasks, or use a model with a longer context."
    return f"It would fit with {', or '.join(listed)}."


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _listed(pool: PoolBudget) -> str:
    names = [
        repr(b.node) if b.num_copies == 1 else f"{b.num_copies} x {b.node!r}" for b in pool.branches
    ]
    if not names:
        return "The documents need"
    if pool.num_branches == 1:
        return f"Analyst {names[0]} needs"
    return f"Analysts {', '.join(names)} can run at once and need"


def _sum(pool: PoolBudget, is_cells: bool) -> str:
    branches = "1 branch" if pool.num_branches == 1 else f"{pool.num_branches} branches"
    if is_cells:
        return (
            f"document {pool.document_tokens}, {branches} of task and max_tokens "
            f"{pool.branch_tokens}"
        )
    return f"{pool.num_documents} for documents, {branches}"


def _pool_line(pool: PoolBudget) -> str:
    line = (
        f"{pool.model}: {_listed(pool)} {'' if pool.is_known else 'at least '}"
        f"{pool.needed_cells:,} of {pool.n_ctx:,} cells and {pool.needed_sequences} of "
        f"{pool.max_sequences} sequences: {pool.verdict.value}"
    )
    return f"{line}, in about {pool.waves} turns" if pool.waves > 1 else line
