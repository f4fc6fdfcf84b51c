"""What is known of edges before a graph runs."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langgraph.graph import END, START
from langgraph.graph.state import StateGraph
from langgraph.types import Command, Send
from langgraph.types import Send as Dispatch

from langchain_swarmkv.graph.edges import read_edges
from langchain_swarmkv.graph.state import SwarmState


def nothing(state: SwarmState) -> dict[str, Any]:
    return {}


def graph_of(*names: str) -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(SwarmState)
    for name in names:
        graph.add_node(name, nothing)
    return graph


def test_edges_are_listed_in_the_order_in_which_nodes_were_added() -> None:
    """LangGraph keeps edges in a set, whose order changes from run to run."""
    graph = graph_of("c", "a", "b")
    for name in ("b", "a", "c"):
        graph.add_edge(START, name)
    assert read_edges(graph).plain == {START: ("c", "a", "b")}


def test_the_end_is_no_target() -> None:
    """Nothing runs at END."""
    graph = graph_of("a")
    graph.add_edge(START, "a")
    graph.add_edge("a", END)
    assert list(read_edges(graph).known("a")) == []


def test_a_list_edge_is_a_join() -> None:
    """It is known, but taken only when all sources have run."""
    graph = graph_of("a", "b", "c")
    graph.add_edge(["a", "b"], "c")
    edges = read_edges(graph)
    assert edges.joins == ((("a", "b"), "c"),)
    assert list(edges.known("a")) == ["c"]


def test_a_path_map_or_a_literal_return_type_declares_the_targets() -> None:
    """Either makes a conditional edge a choice among known targets."""

    def route(state: SwarmState) -> Literal["b", "c"]:
        return "b"

    graph = graph_of("a", "b", "c")
    graph.add_conditional_edges(START, lambda state: "a", {"x": "a", "y": END})
    graph.add_conditional_edges("a", route)
    edges = read_edges(graph)
    assert edges.choices == {START: ("a",), "a": ("b", "c")}
    assert not edges.sent
    assert not edges.notes


def test_destinations_of_a_command_are_choices() -> None:
    """From the annotation, or from `destinations=`."""

    def jump(state: SwarmState) -> Command[Literal["b"]]:
        return Command(goto="b")

    graph = graph_of("b", "c")
    graph.add_node("a", jump)
    graph.add_node("d", nothing, destinations=("c", END))
    assert read_edges(graph).choices == {"a": ("b",), "d": ("c",)}


def test_an_undeclared_command_may_lead_anywhere_and_is_noted() -> None:
    """It is taken to lead to nodes that nothing else leads to."""

    def jump(state: SwarmState) -> Any:
        return Command(goto="b")

    graph = graph_of("b", "c")
    graph.add_node("a", jump)
    graph.add_edge(START, "a")
    graph.add_edge("a", "c")
    edges = read_edges(graph)
    assert edges.guesses == {"a": ("b",)}
    assert "'a'" in edges.notes[0]
    assert "destinations=" in edges.notes[0]


def test_a_command_that_goes_nowhere_is_no_edge() -> None:
    """`Command(update=...)` is a plain result."""

    def update(state: SwarmState) -> Any:
        return Command(update={"document": "x"})

    graph = graph_of("b")
    graph.add_node("a", update)
    assert not read_edges(graph).guesses


def test_a_conditional_edge_without_a_path_map_leads_to_orphans() -> None:
    """Its real targets are unknown, which is noted."""
    graph = graph_of("a", "b", "orphan")
    graph.add_edge(START, "a")
    graph.add_edge("a", "b")
    graph.add_conditional_edges("a", lambda state: "orphan")
    edges = read_edges(graph)
    assert edges.guesses == {"a": ("orphan",)}
    assert edges.sent == {"orphan"}
    assert "path map" in edges.notes[0]


def annotated(state: SwarmState) -> list[Send]:
    return [make("b")]


def unannotated(state: SwarmState):
    return [Send("b", {}) for _ in range(3)]


def renamed(state: SwarmState):
    return [Dispatch("b", {})]


def make(name: str) -> Any:
    return Dispatch(name, {})


class Router:
    def __call__(self, state: SwarmState) -> list[Send]:
        return []


async def asynchronous(state: SwarmState) -> list[Send]:
    return []


@pytest.mark.parametrize("path", [annotated, unannotated, renamed, Router(), asynchronous])
def test_a_function_that_can_send_is_recognised(path: Any) -> None:
    """By its annotation, or by the names in its code, nested code included."""
    graph = graph_of("a", "b")
    graph.add_conditional_edges("a", path, ["b", END])
    assert read_edges(graph).sent == {"b"}


def test_a_send_imported_inside_a_function_is_recognised() -> None:
    """As in a test or a notebook, where it is a free variable."""
    from langgraph.types import Send as Local

    graph = graph_of("a", "b")
    graph.add_conditional_edges("a", lambda state: [Local("b", {})], ["b"])
    edges = read_edges(graph)
    assert edges.sent == {"b"}


def test_a_command_can_send() -> None:
    """`Command(goto=[Send(...)])`."""

    def jump(state: SwarmState) -> Command[Literal["b"]]:
        return Command(goto=[Send("b", {})])

    graph = graph_of("b")
    graph.add_node("a", jump)
    assert read_edges(graph).sent == {"b"}


def test_an_edge_to_an_unknown_node_is_left_to_langgraph() -> None:
    """Its own validation has the better message."""
    graph = graph_of("a")
    graph.add_edge("a", "nowhere")
    graph.add_conditional_edges("a", lambda state: "x", ["nowhere"])
    assert list(read_edges(graph).possible("a")) == []


def test_an_error_handler_comes_after_its_node() -> None:
    """LangGraph adds it as a node of its own."""
    graph = StateGraph(SwarmState)
    graph.add_node("a", nothing, error_handler=nothing)
    assert list(read_edges(graph).possible("a")) == ["__error_handler__a"]
