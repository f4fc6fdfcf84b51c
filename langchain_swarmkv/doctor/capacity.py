"""How many branches of a document a pool of cells holds at once."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Capacity", "branches_that_fit", "capacities"]

_DOCUMENT_TOKENS = (1_000, 4_000, 16_000, 64_000)


@dataclass(frozen=True)
class Capacity:
    """Branches beside one document."""

    document_tokens: int
    num_branches: int
    needed_cells: int
    """By the document and these branches: each is counted once, whoever shares it."""


def branches_that_fit(
    document_tokens: int,
    branch_tokens: int,
    *,
    n_ctx: int,
    n_ctx_train: int,
    max_sequences: int,
) -> int:
    """Branches that can run at once.

    Args:
        document_tokens: The shared part.
        branch_tokens: Task and longest answer of one branch.
        n_ctx: Cells of the pool.
        n_ctx_train: Positions of one sequence.
        max_sequences: Sequence ids; the document needs one.
    """
    if document_tokens + branch_tokens > min(n_ctx, n_ctx_train):
        return 0
    return min((n_ctx - document_tokens) // branch_tokens, max_sequences - 1)


def capacities(
    branch_tokens: int, *, n_ctx: int, n_ctx_train: int, max_sequences: int
) -> tuple[Capacity, ...]:
    """For documents of 1,000, 4,000, 16,000 and 64,000 tokens that the pool can hold at all."""
    rows: list[Capacity] = []
    for document_tokens in _DOCUMENT_TOKENS:
        num_branches = branches_that_fit(
            document_tokens,
            branch_tokens,
            n_ctx=n_ctx,
            n_ctx_train=n_ctx_train,
            max_sequences=max_sequences,
        )
        if num_branches or not rows:
            cells = document_tokens + num_branches * branch_tokens
            rows.append(Capacity(document_tokens, num_branches, cells))
    return tuple(rows)
