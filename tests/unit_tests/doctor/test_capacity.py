"""Branches that fit, judged by the budget that graphs are checked with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from langchain_swarmkv.doctor.capacity import branches_that_fit, capacities
from langchain_swarmkv.graph.budget_report import AnalystBudget, PoolBudget, Verdict


def verdict(
    document_tokens: int,
    branch_tokens: int,
    num_branches: int,
    n_ctx: int,
    n_ctx_train: int,
    max_sequences: int,
) -> Verdict:
    """Whether a graph of one document and so many equal analysts would be allowed."""
    row = AnalystBudget(
        node="analyst",
        document_tokens=document_tokens,
        overhead_tokens=0,
        task_tokens=branch_tokens - 1,
        max_tokens=1,
        fanout=num_branches,
        n_ctx=n_ctx,
        n_ctx_train=n_ctx_train,
    )
    pool = PoolBudget(
        model="model",
        n_ctx=n_ctx,
        max_sequences=max_sequences,
        branches=(row,),
        document_tokens=document_tokens,
        num_documents=1,
        largest_alone_cells=document_tokens + branch_tokens,
        waves=1,
        is_known=True,
        allow_waves=False,
    )
    return Verdict.OVER if Verdict.OVER in (row.verdict, pool.verdict) else Verdict.FITS


@given(
    document_tokens=st.integers(1, 5000),
    branch_tokens=st.integers(1, 600),
    n_ctx=st.integers(1, 6000),
    n_ctx_train=st.integers(1, 6000),
    max_sequences=st.integers(2, 64),
)
def test_the_budget_allows_so_many_and_not_one_more(
    document_tokens: int, branch_tokens: int, n_ctx: int, n_ctx_train: int, max_sequences: int
) -> None:
    """The two are one arithmetic, on different floors."""
    limits = {"n_ctx": n_ctx, "n_ctx_train": n_ctx_train, "max_sequences": max_sequences}
    num_branches = branches_that_fit(document_tokens, branch_tokens, **limits)
    if num_branches:
        assert verdict(document_tokens, branch_tokens, num_branches, **limits) is Verdict.FITS
    assert verdict(document_tokens, branch_tokens, num_branches + 1, **limits) is Verdict.OVER


def test_documents_that_do_not_fit_are_left_out_but_the_first() -> None:
    """There is always a row, so that the table says something."""
    limits = {"n_ctx_train": 1 << 20, "max_sequences": 64}
    rows = capacities(320, n_ctx=8192, **limits)
    assert [(row.document_tokens, row.num_branches) for row in rows] == [(1000, 22), (4000, 13)]
    assert [row.needed_cells for row in rows] == [1000 + 22 * 320, 4000 + 13 * 320]
    (only,) = capacities(320, n_ctx=512, **limits)
    assert (only.document_tokens, only.num_branches) == (1000, 0)
    assert len(capacities(320, n_ctx=100_000, **limits)) == 4
