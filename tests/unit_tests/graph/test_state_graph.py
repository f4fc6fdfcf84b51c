"""`SwarmStateGraph`: a `StateGraph` that is refused at compile time if it cannot fit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START
from langgraph.graph.state import CompiledStateGraph, StateGraph
from langgraph.types import RetryPolicy
from pydantic import BaseModel

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import (
    ContextBudgetError,
    MissingReducerError,
    UnboundedCycleError,
    UnreachableAnalystError,
)
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget import BudgetWarning, check_budget
from langchain_swarmkv.graph.state import SwarmState
from langchain_swarmkv.graph.state_graph import CompiledSwarmGraph, SwarmStateGraph
from tests.unit_tests.graph.support import DOCUMENT, echo_task, fake_llm, fan_out, idle_llm

INPUT = {"document": DOCUMENT}


def swarm(llm: ChatSwarmKV, *names: str, **options: Any) -> SwarmStateGraph[Any, Any, Any, Any]:
    graph = fan_out(llm, names or ("a", "b"), graph=SwarmStateGraph(SwarmState), **options)
    assert isinstance(graph, SwarmStateGraph)
    return graph


def test_a_graph_that_fits_compiles_and_runs(llm: ChatSwarmKV) -> None:
    """Silently, with the report on the compiled graph."""
    app = swarm(llm).compile(document=DOCUMENT)
    assert isinstance(app, CompiledStateGraph)
    assert app.budget_report == check_budget(swarm(llm), document=DOCUMENT)
    assert app.budget_report.fits
    assert set(app.invoke(INPUT)["findings"]) == {"a", "b"}


def test_a_graph_that_cannot_fit_is_refused_before_anything_is_computed() -> None:
    """The error has the numbers, and the report."""
    with fake_llm(num_cells=500) as model:
        with pytest.raises(ContextBudgetError, match="n_ctx=500") as caught:
            swarm(model).compile(document=DOCUMENT)
        assert caught.value.report.rows[0].node == "a"
        assert model.engine_statistics().num_steps == 0


def test_the_same_graph_can_be_compiled_again_with_a_shorter_document() -> None:
    """A refusal leaves the builder as it was."""
    with fake_llm(num_cells=500, reply="ok") as model:
        graph = swarm(model)
        with pytest.raises(ContextBudgetError):
            graph.compile(document=DOCUMENT)
        graph.add_node("c", AnalystNode(model, "Why?"))
        graph.add_edge("document", "c")
        app = graph.compile(document=DOCUMENT[:100])
        assert set(app.invoke({"document": DOCUMENT[:100]})["findings"]) == {"a", "b", "c"}


def test_a_graph_that_fits_in_waves_runs_in_waves() -> None:
    """`allow_waves` accepts it, and the engine queues what has to wait."""
    with fake_llm(max_tokens=30, reply="x" * 100) as model:
        row = check_budget(swarm(model), document=DOCUMENT).rows[0]
    cells = row.needed_positions + row.branch_tokens
    with fake_llm(num_cells=cells, max_tokens=30, reply="x" * 100) as model:
        names = tuple("abcdef")
        with pytest.raises(ContextBudgetError, match=r"allow_waves=True"):
            swarm(model, *names).compile(document=DOCUMENT)
        app = swarm(model, *names).compile(document=DOCUMENT, allow_waves=True)
        assert app.budget_report.waves == 3
        assert set(app.invoke(INPUT)["findings"]) == set(names)
        assert model.engine_statistics().peak_running <= 2


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda graph, llm: graph.add_edge("a", "document"), UnboundedCycleError),
        (
            lambda graph, llm: graph.add_node("c", AnalystNode(llm, "Why?")).add_edge(START, "c"),
            UnreachableAnalystError,
        ),
        (
            lambda graph, llm: [
                graph.add_node(name, AnalystNode(llm, "Why?", output_key="document"))
                and graph.add_edge("document", name)
                for name in ("c", "d")
            ],
            None,
        ),
    ],
)
def test_the_structure_is_checked_by_compile(
    llm: ChatSwarmKV, change: Any, error: type[Exception] | None
) -> None:
    """Whether a document is given or not; `document` has a reducer, so two may write it."""
    graph = swarm(llm)
    change(graph, llm)
    if error is None:
        graph.compile(document=DOCUMENT)
        return
    with pytest.raises(error):
        graph.compile()
    with pytest.raises(error):
        graph.compile(document=DOCUMENT)


def test_a_missing_reducer_is_named_by_compile(llm: ChatSwarmKV) -> None:
    """LangGraph would say so only when it runs."""

    class Answer(SwarmState):
        answer: str

    graph = fan_out(llm, ("a", "b"), graph=SwarmStateGraph(Answer), output_key="answer")
    with pytest.raises(MissingReducerError, match="'answer'"):
        graph.compile()


def test_langgraphs_own_errors_come_first(llm: ChatSwarmKV) -> None:
    """Its messages are about its own rules."""
    graph = swarm(llm)
    graph.add_edge("a", "nowhere")
    with pytest.raises(ValueError, match="unknown node"):
        graph.compile(document=DOCUMENT)


# -- what is not known ---------------------------------------------------------------------------


def test_compiling_without_a_document_warns_once_and_opens_nothing() -> None:
    """It stays usable, and is not silent."""
    graph = swarm(idle_llm())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        app = graph.compile()
    (warning,) = caught
    assert issubclass(warning.category, BudgetWarning)
    assert issubclass(warning.category, UserWarning)
    assert "document=" in str(warning.message)
    assert warning.filename == __file__
    assert app.budget_report.unknown


def test_the_warning_can_be_silenced_like_any_other(llm: ChatSwarmKV) -> None:
    """By its category."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        assert swarm(llm).compile().invoke(INPUT)


# -- cycles --------------------------------------------------------------------------------------


class Turns(SwarmState):
    turn: int


def looping(llm: ChatSwarmKV, wanted: int) -> SwarmStateGraph[Any, Any, Any, Any]:
    graph = fan_out(llm, ("a", "b"), graph=SwarmStateGraph(Turns))
    graph.add_node("critic", lambda state: {"turn": state["turn"] + 1})
    graph.add_edge(["a", "b"], "critic")
    graph.add_conditional_edges(
        "critic", lambda state: "document" if state["turn"] < wanted else END, ["document", END]
    )
    assert isinstance(graph, SwarmStateGraph)
    return graph


def test_max_turns_bounds_the_run_for_real(llm: ChatSwarmKV) -> None:
    """As many turns run; one more ends with LangGraph's own error."""
    given = {**INPUT, "turn": 0}
    assert looping(llm, 3).compile(document=DOCUMENT, max_turns=3).invoke(given)["turn"] == 3
    with pytest.raises(GraphRecursionError):
        looping(llm, 4).compile(document=DOCUMENT, max_turns=3).invoke(given)
    with pytest.raises(UnboundedCycleError, match="max_turns"):
        looping(llm, 3).compile(document=DOCUMENT)


def test_a_recursion_limit_given_to_a_run_takes_its_place(llm: ChatSwarmKV) -> None:
    """As with any compiled graph."""
    app = looping(llm, 4).compile(document=DOCUMENT, max_turns=1)
    assert app.invoke({**INPUT, "turn": 0}, {"recursion_limit": 50})["turn"] == 4


def test_without_cycles_max_turns_changes_nothing(llm: ChatSwarmKV) -> None:
    """No limit is set where none is needed."""
    app = swarm(llm).compile(document=DOCUMENT, max_turns=1)
    assert "recursion_limit" not in (app.config or {})


# -- as a StateGraph -----------------------------------------------------------------------------


def test_ordinary_arguments_of_compile_pass_through(llm: ChatSwarmKV) -> None:
    """Checkpointer by position, the rest by keyword."""
    saver = InMemorySaver()
    app = swarm(llm).compile(saver, document=DOCUMENT, interrupt_before=["a"], name="patents")
    assert app.checkpointer is saver
    assert app.interrupt_before_nodes == ["a"]
    assert app.name == "patents"
    with pytest.raises(TypeError, match="no_such_option"):
        swarm(llm).compile(document=DOCUMENT, no_such_option=1)


def test_copies_of_the_compiled_graph_keep_the_report(llm: ChatSwarmKV) -> None:
    """`with_config` makes one."""
    app = swarm(llm).compile(document=DOCUMENT)
    copied = app.with_config(tags=["x"])
    assert isinstance(copied, CompiledSwarmGraph)
    assert copied.budget_report is app.budget_report
    assert copied.invoke(INPUT) == app.invoke(INPUT)


def test_a_state_of_pydantic_comes_back_as_one(llm: ChatSwarmKV) -> None:
    """A bound on cycles must not cost the output's type."""

    class Model(BaseModel):
        document: str
        document_ref: dict[str, Any] | None = None
        answer: str = ""
        again: bool = False

    graph = SwarmStateGraph(Model)
    fan_out(llm, ("a",), graph=graph, output_key="answer")
    graph.add_conditional_edges(
        "a", lambda state: "document" if state.again else END, ["document", END]
    )
    app = graph.compile(document=DOCUMENT, max_turns=2)
    result = app.invoke(INPUT, version="v2")
    assert isinstance(result.value, Model)


def test_it_is_a_parent_and_a_subgraph(llm: ChatSwarmKV) -> None:
    """A subgraph with its own document is checked by itself and again as a part."""
    inner = fan_out(llm, ("novelty",), graph=SwarmStateGraph(SwarmState))
    assert isinstance(inner, SwarmStateGraph)
    outer = SwarmStateGraph(SwarmState)
    outer.add_node("review", inner.compile(document=DOCUMENT))
    outer.add_edge(START, "review")
    app = outer.compile(document=DOCUMENT)
    assert [row.node for row in app.budget_report.rows] == ["review:novelty"]
    assert app.invoke(INPUT)["findings"] == {"novelty": "read: Tell me about novelty."}


def test_node_policies_and_a_plain_graph_inside_work_as_ever(llm: ChatSwarmKV) -> None:
    """Retry policies, defaults and subgraphs of plain analysts."""
    inner = StateGraph(SwarmState)
    inner.add_node("novelty", AnalystNode(llm, "New?"), retry_policy=RetryPolicy(max_attempts=2))
    inner.add_edge(START, "novelty")
    graph = swarm(llm, "claims").set_node_defaults(retry_policy=RetryPolicy(max_attempts=2))
    graph.add_node("review", inner.compile())
    graph.add_edge("document", "review")
    app = graph.compile(document=DOCUMENT)
    assert set(app.invoke(INPUT)["findings"]) == {"claims", "novelty"}


async def test_it_runs_async_too() -> None:
    """Nothing about the compiled graph is sync only."""
    with fake_llm(max_tokens=64, reply=echo_task) as model:
        app = swarm(model).compile(document=DOCUMENT)
        result = await app.ainvoke(INPUT)
        assert result["findings"] == {name: f"read: Tell me about {name}." for name in ("a", "b")}
