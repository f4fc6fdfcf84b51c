"""A list of Sends may be empty; LangGraph then runs nothing that stands behind them."""

from __future__ import annotations

import operator
import warnings
from typing import Annotated, Any, Literal

import pytest
from langgraph.graph import END, START
from langgraph.types import Command, Send

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget import check_budget
from langchain_swarmkv.graph.budget_report import GraphWarning
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState
from langchain_swarmkv.graph.state_graph import SwarmStateGraph
from tests.unit_tests.graph.support import DOCUMENT


class Sections(SwarmState):
    sections: list[str]
    seen: Annotated[list[str], operator.add]


def spread(state: Sections) -> list[Send]:
    return [Send("section", {**state, "title": title}) for title in state["sections"]]


def spread_or_join(state: Sections) -> list[Send] | str:
    return spread(state) or "join"


def spread_or_end(state: Sections) -> list[Send] | str:
    return [Send("section", state) for _ in state["sections"]] or END


def join(state: Sections) -> dict[str, Any]:
    return {"seen": ["join"]}


def sectioned(llm: ChatSwarmKV, function: Any, path_map: Any) -> Any:
    graph = SwarmStateGraph(Sections)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("section", AnalystNode(llm, "Section.", max_fanout=4))
    graph.add_node("join", join)
    graph.add_edge(START, "document")
    graph.add_conditional_edges("document", function, path_map)
    graph.add_edge("section", "join")
    graph.add_edge("join", END)
    return graph


def told(graph: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.compile(document=DOCUMENT)
    return [str(w.message) for w in caught if issubclass(w.category, GraphWarning)]


@pytest.mark.parametrize("path_map", [["section"], None], ids=["path map", "no path map"])
def test_a_list_that_may_be_empty_is_told(llm: ChatSwarmKV, path_map: Any) -> None:
    """With the function, the node that would not run, and what to do."""
    graph = sectioned(llm, spread, path_map)
    (message,) = told(graph)
    assert "'spread', after 'document', returns an empty list" in message
    assert "neither does 'join'" in message
    assert "Have it return 'join'" in message
    assert message in check_budget(graph, document=DOCUMENT).remarks


def test_the_warning_is_true_and_its_advice_helps(llm: ChatSwarmKV) -> None:
    """What LangGraph does with an empty list."""
    state = {"document": DOCUMENT, "sections": []}
    with pytest.warns(GraphWarning):
        app = sectioned(llm, spread, ["section"]).compile(document=DOCUMENT)
    assert "join" not in app.invoke(state).get("seen", [])
    mended = sectioned(llm, spread_or_join, ["section", "join"]).compile(document=DOCUMENT)
    assert mended.invoke(state)["seen"] == ["join"]
    assert mended.invoke({**state, "sections": ["a", "b"]})["seen"] == ["join"]


@pytest.mark.parametrize(
    ("function", "path_map"),
    [
        (spread_or_join, ["section", "join"]),
        (spread_or_end, ["section", END]),
        (spread_or_join, None),
        (spread_or_end, None),
        (lambda state: "section", ["section"]),
    ],
)
def test_a_function_that_can_lead_elsewhere_is_not(
    llm: ChatSwarmKV, function: Any, path_map: Any
) -> None:
    """Its author has thought of it; and one that names no Send has no list."""
    assert not told(sectioned(llm, function, path_map))


def test_nothing_behind_or_another_way_there_is_not(llm: ChatSwarmKV) -> None:
    """An empty list costs nothing then."""
    graph = sectioned(llm, spread, ["section"])
    graph.add_edge("document", "join")
    assert not told(graph)


def test_a_list_edge_waits_for_the_copies_too(llm: ChatSwarmKV) -> None:
    """A join of two, one of which never runs, does not run either."""
    graph = SwarmStateGraph(Sections)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("section", AnalystNode(llm, "Section.", max_fanout=4))
    graph.add_node("other", AnalystNode(llm, "Other."))
    graph.add_node("join", join)
    graph.add_edge(START, "document")
    graph.add_conditional_edges("document", spread, ["section"])
    graph.add_edge("document", "other")
    graph.add_edge(["section", "other"], "join")
    assert len(told(graph)) == 1


def test_a_command_with_sends_is_told_too(llm: ChatSwarmKV) -> None:
    """Of a node that declares where it leads."""

    def route(state: Sections) -> Command[Literal["section"]]:
        return Command(goto=[Send("section", state) for _ in state["sections"]])

    graph = SwarmStateGraph(Sections)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("route", route)
    graph.add_node("section", AnalystNode(llm, "Section.", max_fanout=4))
    graph.add_node("join", join)
    graph.add_edge(START, "document")
    graph.add_edge("document", "route")
    graph.add_edge("section", "join")
    (message,) = told(graph)
    assert "after 'route'" in message
