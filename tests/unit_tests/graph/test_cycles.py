"""Cycles, the edge that closes them, and the number of supersteps of a bounded run."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

import pytest
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START
from langgraph.graph.state import StateGraph
from typing_extensions import TypedDict

from langchain_swarmkv.graph.cycles import find_cycles, recursion_limit
from langchain_swarmkv.graph.topology import read_topology

Graph = StateGraph[Any, Any, Any, Any]


class Count(TypedDict):
    turns: Annotated[int, lambda old, new: old + new]


def graph_of(*edges: tuple[str, str]) -> Graph:
    """Nodes in order of appearance; every edge but those from START may be left untaken."""
    graph = StateGraph(Count)
    for name in dict.fromkeys(name for edge in edges for name in edge):
        if name not in (START, END):
            graph.add_node(name, lambda state: {})
    for start, end in edges:
        graph.add_edge(start, end)
    return graph


def closing_edges(graph: Graph) -> list[tuple[str, str]]:
    return [cycle.closing_edge for cycle in find_cycles(read_topology(graph).root)]


@pytest.mark.parametrize(
    ("edges", "closing"),
    [
        ([(START, "a"), ("a", "b"), ("b", END)], []),
        ([(START, "a"), ("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")], []),
        ([(START, "a"), ("a", "a")], [("a", "a")]),
        ([(START, "a"), ("a", "b"), ("b", "c"), ("c", "a")], [("c", "a")]),
        ([(START, "a"), ("a", "b"), ("b", "a"), ("b", "c"), ("c", "c")], [("b", "a"), ("c", "c")]),
        ([(START, "a"), ("a", "b"), ("b", "c"), ("c", "b"), ("c", "a")], [("c", "a")]),
    ],
)
def test_the_edge_that_closes_each_cycle_is_named(
    edges: list[tuple[str, str]], closing: list[tuple[str, str]]
) -> None:
    """It leads back from the order in which nodes are met; cycles that share a node are one."""
    assert closing_edges(graph_of(*edges)) == closing


def test_a_join_can_close_a_cycle() -> None:
    """Its sources lead to its target."""
    graph = graph_of((START, "a"), ("a", "b"), ("a", "c"))
    graph.add_edge(["b", "c"], "a")
    assert closing_edges(graph) == [("b", "a")]


def loop(turns_wanted: int, body: int = 1, tail: int = 1) -> Graph:
    """A counter of turns: enter -> body... -> enter again, or tail..."""
    graph = StateGraph(Count)
    graph.add_node("enter", lambda state: {"turns": 1})
    graph.add_edge(START, "enter")
    names = ["enter", *(f"body{number}" for number in range(body))]
    for before, name in pairwise(names):
        graph.add_node(name, lambda state: {"turns": 0})
        graph.add_edge(before, name)
    tails = [f"tail{number}" for number in range(tail)]
    for name in tails:
        graph.add_node(name, lambda state: {"turns": 0})
    for before, name in pairwise(tails):
        graph.add_edge(before, name)
    graph.add_conditional_edges(
        names[-1],
        lambda state: tails[0] if state["turns"] >= turns_wanted else "enter",
        [tails[0], "enter"],
    )
    return graph


@pytest.mark.parametrize("body", [1, 3])
@pytest.mark.parametrize("tail", [1, 4])
@pytest.mark.parametrize("max_turns", [1, 2, 5])
def test_the_recursion_limit_allows_all_turns_and_not_one_more(
    body: int, tail: int, max_turns: int
) -> None:
    """However long the body and the way out are."""
    limit = recursion_limit(read_topology(loop(1, body, tail)).root, max_turns)
    config = {"recursion_limit": limit}
    result = loop(max_turns, body, tail).compile().invoke({"turns": 0}, config)
    assert result["turns"] == max_turns
    with pytest.raises(GraphRecursionError):
        loop(max_turns + 1, body, tail).compile().invoke({"turns": 0}, config)


def test_a_long_subgraph_is_not_cut_short_by_its_parents_limit() -> None:
    """LangGraph hands the limit down, so it must be enough for every level."""
    inner = graph_of((START, "i0"), *((f"i{n}", f"i{n + 1}") for n in range(12)))
    graph = loop(1)
    graph.add_node("inner", inner.compile())
    graph.add_edge("tail0", "inner")
    limit = recursion_limit(read_topology(graph).root, 1)
    assert graph.compile().invoke({"turns": 0}, {"recursion_limit": limit})["turns"] >= 1
