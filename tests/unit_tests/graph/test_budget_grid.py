"""The budget's verdict against what the engine really does, one token either side of each limit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.errors import ContextBudgetError
from langchain_swarmkv.graph.budget import check_budget
from tests.support.gates import Together
from tests.unit_tests.graph.support import fake_llm, fan_out

# Nothing stands between the document and the task, so that branches share the document alone: of
# ChatML's opening of a turn the budget counts one for each branch, but they share it.
NO_OPENING = (
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@dataclass
class Load:
    """A graph to run: `num_branches` analysts on one document, all at the same moment."""

    document: str
    num_branches: int
    task_length: int
    max_tokens: int

    def graph(self, model: ChatSwarmKV) -> Any:
        # Tasks that differ from the first character on share the document and nothing else.
        names = tuple("abcdefgh"[: self.num_branches])
        return fan_out(
            model, names, task=lambda name: name * self.task_length, max_tokens=self.max_tokens
        )


class BranchesTogether(Together):
    """Holds the engine at the first branch's first step until all branches have been submitted."""

    def __init__(self, load: Load) -> None:
        super().__init__(1 + load.num_branches)

    def __call__(self, batch: Batch) -> None:
        if batch.output_rows and self.num_coming > 1:  # not the document's own prefill
            super().__call__(batch)


def observed(load: Load, **limits: int) -> tuple[bool, bool, int]:
    """Run a load on an engine with these limits.

    Returns:
        Whether the check said that it fits; whether it ran; and how many requests ran at once.
    """
    together = BranchesTogether(load)
    options: dict[str, Any] = {"max_batch_tokens": 64, "reply": "x" * 1000, **limits}
    options["chat_template"] = NO_OPENING
    with fake_llm(on_decode=together, **options) as model:
        graph = load.graph(model)
        verdict = check_budget(graph, document=load.document).fits
        assert verdict == check_budget(graph, document_tokens=len(load.document)).fits
        assert model.engine is not None
        together.watch(model.engine)
        try:
            # Sync nodes would share a thread pool as small as the machine.
            result = asyncio.run(graph.compile().ainvoke({"document": load.document}))
        except ContextBudgetError:
            return verdict, False, 0
        answers = result["findings"].values()
        assert [len(answer) for answer in answers] == [load.max_tokens] * load.num_branches
        return verdict, True, model.engine_statistics().peak_running


def exact_needs(load: Load) -> tuple[int, int]:
    """Cells of the whole load, and positions of one branch."""
    with fake_llm(num_cells=100_000, max_batch_tokens=64, chat_template=NO_OPENING) as model:
        report = check_budget(load.graph(model), document=load.document)
        return report.pools[0].needed_cells, report.rows[0].needed_positions


LOADS = [
    Load("x" * document_length, num_branches, task_length, max_tokens)
    for document_length in (1, 63, 64, 65, 500)
    for num_branches in (2, 3, 8)
    for task_length, max_tokens in ((1, 4), (40, 16), (130, 3))
]


def name_of(load: Load) -> str:
    branch = f"({load.task_length}+{load.max_tokens})"
    return f"{len(load.document)}+{load.num_branches}x{branch}"


@pytest.mark.parametrize("load", LOADS, ids=name_of)
def test_all_run_at_once_exactly_when_the_check_says_so(load: Load) -> None:
    """With the cells it asks for, and one more; with one less, one branch waits for another."""
    cells, _ = exact_needs(load)
    for spare in (-1, 0, 1):
        verdict, has_run, peak = observed(load, num_cells=cells + spare)
        assert has_run
        assert verdict == (spare >= 0)
        assert (peak == load.num_branches) == verdict, (spare, peak)


@pytest.mark.parametrize("load", [load for load in LOADS if load.num_branches == 2], ids=name_of)
def test_a_branch_runs_exactly_when_its_positions_fit(load: Load) -> None:
    """With one position less than needed the engine refuses it outright."""
    _, positions = exact_needs(load)
    for spare in (-1, 0, 1):
        verdict, has_run, _ = observed(load, num_cells=50_000, n_ctx_train=positions + spare)
        assert verdict == has_run == (spare >= 0)


@pytest.mark.parametrize("document_length", [1, 64, 500])
def test_a_single_branch_runs_exactly_when_its_cells_fit(document_length: int) -> None:
    """There is nobody to wait for, so one cell less is refused."""
    load = Load("x" * document_length, 1, 40, 16)
    cells, _ = exact_needs(load)
    for spare in (-1, 0, 1):
        verdict, has_run, _ = observed(load, num_cells=cells + spare, n_ctx_train=50_000)
        assert verdict == has_run == (spare >= 0)


@pytest.mark.parametrize("num_branches", [2, 3, 8])
def test_all_run_at_once_exactly_when_there_are_sequences_for_them(num_branches: int) -> None:
    """One for each branch, and one for the document."""
    load = Load("x" * 100, num_branches, 20, 4)
    for spare in (-1, 0, 1):
        verdict, has_run, peak = observed(load, max_sequences=num_branches + 1 + spare)
        assert has_run
        assert verdict == (spare >= 0)
        assert (peak == num_branches) == verdict, (spare, peak)
