"""Tasks for a small model: their form holds whatever the model would rather write."""

from __future__ import annotations

import re

from examples.patent_analysis.graph import SMALL_MODEL_TASKS, TASKS, HeldTask, build_graph
from langchain_swarmkv import FakeEngine
from langchain_swarmkv.graph.budget import check_budget
from tests.unit_tests.graph.support import DOCUMENT, fake_llm

SENTENCE = " A reply that is long enough to be a sentence and has no other marks."


def test_both_sets_make_a_graph_with_a_report_in_their_order() -> None:
    """Findings in the order of the tasks, under their titles."""
    for tasks, reply in ((TASKS, "Found."), (SMALL_MODEL_TASKS, _fitting)):
        with fake_llm(max_tokens=256, num_cells=32_768, reply=reply) as llm:
            app = build_graph(llm, tasks).compile(document=DOCUMENT)
            report = app.invoke({"document": DOCUMENT})["report"]
        titles = re.findall(r"^## (.*)$", report, re.MULTILINE)
        assert [t.lower().replace(" ", "_") for t in titles] == list(tasks)


def _fitting(prompt: str) -> str:
    for task in SMALL_MODEL_TASKS.values():
        if task.task in prompt:
            return _answer(task)
    raise AssertionError(prompt)


def _answer(task: HeldTask) -> str:
    if task.num_bullets:
        return "\n".join(["- A point that is long enough."] * task.num_bullets)
    rest = task.opening + "something that is described at some length."
    return rest + SENTENCE * (task.num_sentences - 1)


def test_a_form_takes_what_fits_and_nothing_else() -> None:
    """Each begins with its opening, ends by itself and knows no other lines."""
    engine = FakeEngine()
    try:
        for task in SMALL_MODEL_TASKS.values():
            engine.guides.check(task.guide)
    finally:
        engine.close()
    for name, task in SMALL_MODEL_TASKS.items():
        with fake_llm(max_tokens=400, num_cells=8192, reply=f"I would rather say: {name}") as llm:
            node = build_graph(llm, {name: task}).nodes[name].runnable
            (text,) = node.invoke({"document": DOCUMENT})["findings"].values()
        assert text.startswith(task.opening or "- ")


def test_the_budget_counts_the_tasks_of_either_set() -> None:
    """The held ones as well."""
    with fake_llm(max_tokens=64, num_cells=32_768) as llm:
        for tasks in (TASKS, SMALL_MODEL_TASKS):
            rows = check_budget(build_graph(llm, tasks), document=DOCUMENT).rows
            assert [row.node for row in rows] == list(tasks)
            assert all(row.task_tokens for row in rows)
