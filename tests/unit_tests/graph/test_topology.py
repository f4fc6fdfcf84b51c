"""Which of our nodes are found in a graph, what comes before them and what runs at once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.runnables import RunnableLambda
from langgraph.func import entrypoint
from langgraph.graph import END, START
from langgraph.graph.state import StateGraph
from langgraph.types import Send

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.edges import read_edges
from langchain_swarmkv.graph.state import SwarmState
from langchain_swarmkv.graph.topology import Topology, read_topology, supersteps
from tests.unit_tests.graph.support import fan_out, idle_llm

Graph = StateGraph[Any, Any, Any, Any]


@pytest.fixture
def llm() -> ChatSwarmKV:
    return idle_llm()


def analyst(llm: ChatSwarmKV, **options: Any) -> AnalystNode:
    return AnalystNode(llm, "What is new?", **options)


def nothing(state: SwarmState) -> dict[str, Any]:
    return {}


def paths(topology: Topology) -> list[str]:
    return [member.path for member in topology.analysts]


def documents_before(topology: Topology, path: str) -> list[str]:
    return [member.path for member in topology.reached_by[path]]


# -- finding nodes -------------------------------------------------------------------------------


def test_nodes_are_found_in_a_builder_and_in_a_compiled_graph(llm: ChatSwarmKV) -> None:
    """Both show the same."""
    graph = fan_out(llm)
    for given_graph in (graph, graph.compile()):
        topology = read_topology(given_graph)
        assert [member.path for member in topology.documents] == ["document"]
        assert paths(topology) == ["novelty", "claims", "ethics"]


@pytest.mark.parametrize(
    ("wrap", "is_bare"),
    [
        (lambda node: node.invoke, True),
        (lambda node: node.ainvoke, True),
        (lambda node: RunnableLambda(node.invoke), True),
        (lambda node: node.with_retry(stop_after_attempt=2), True),
        (lambda node: node.with_config(tags=["x"]), True),
        (lambda node: node | RunnableLambda(lambda found: {"findings": {}}), False),
    ],
)
def test_wrappings_that_langchain_shows_are_seen_through(
    llm: ChatSwarmKV, wrap: Any, is_bare: bool
) -> None:
    """A bare one returns what our node returns; behind a pipe it may be anything."""
    graph = StateGraph(SwarmState)
    graph.add_node("a", wrap(analyst(llm)))
    graph.add_edge(START, "a")
    (member,) = read_topology(graph).analysts
    assert (member.path, member.is_bare) == ("a", is_bare)


def test_a_node_inside_a_function_or_a_partial_is_not_seen(llm: ChatSwarmKV) -> None:
    """They are opaque; the graph is then checked without them."""
    node = analyst(llm)
    graph = StateGraph(SwarmState)
    graph.add_node("a", lambda state: node.invoke(state))
    graph.add_node("b", functools.partial(node.invoke, config=None))
    graph.add_edge(START, "a")
    graph.add_edge("a", "b")
    assert read_topology(graph).analysts == ()


def test_nodes_of_subgraphs_are_named_by_their_path(llm: ChatSwarmKV) -> None:
    """At any depth; one subgraph used twice gives two of each."""
    inner = StateGraph(SwarmState)
    inner.add_node("novelty", analyst(llm))
    inner.add_edge(START, "novelty")
    middle = StateGraph(SwarmState)
    middle.add_node("review", inner.compile())
    middle.add_edge(START, "review")
    outer = StateGraph(SwarmState)
    for name in ("eu", "us"):
        outer.add_node(name, middle.compile())
        outer.add_edge(START, name)
    assert paths(read_topology(outer)) == ["eu:review:novelty", "us:review:novelty"]


def test_what_is_no_state_graph_is_refused() -> None:
    """A functional entrypoint has no builder to look into."""

    @entrypoint()
    def workflow(value: int) -> int:
        return value

    with pytest.raises(ConfigurationError, match="StateGraph"):
        read_topology(workflow)


# -- who comes before whom -----------------------------------------------------------------------


def test_a_document_reaches_what_comes_after_it_only(llm: ChatSwarmKV) -> None:
    """Through other nodes too, but not its neighbours."""
    graph = StateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("between", nothing)
    graph.add_node("after", analyst(llm))
    graph.add_node("beside", analyst(llm))
    graph.add_edge(START, "document")
    graph.add_edge(START, "beside")
    graph.add_edge("document", "between")
    graph.add_edge("between", "after")
    topology = read_topology(graph)
    assert documents_before(topology, "after") == ["document"]
    assert documents_before(topology, "beside") == []


def test_documents_reach_into_subgraphs_and_out_of_them(llm: ChatSwarmKV) -> None:
    """A subgraph's document serves the nodes after the subgraph."""
    prepare = StateGraph(SwarmState)
    prepare.add_node("document", DocumentNode(llm))
    prepare.add_edge(START, "document")
    review = StateGraph(SwarmState)
    review.add_node("novelty", analyst(llm))
    review.add_edge(START, "novelty")
    graph = StateGraph(SwarmState)
    graph.add_node("prepare", prepare.compile())
    graph.add_node("review", review.compile())
    graph.add_edge(START, "prepare")
    graph.add_edge("prepare", "review")
    topology = read_topology(graph)
    assert documents_before(topology, "review:novelty") == ["prepare:document"]


def test_a_document_that_can_only_be_sent_to_still_reaches(llm: ChatSwarmKV) -> None:
    """Edges without a path map are taken to lead to nodes that nothing else leads to."""
    graph = StateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("section", analyst(llm))
    graph.add_edge(START, "document")
    graph.add_conditional_edges("document", lambda state: [Send("section", state)])
    topology = read_topology(graph)
    assert documents_before(topology, "section") == ["document"]
    assert topology.analysts[0].is_sent


def test_an_analyst_that_waits_for_a_slice_may_run_beside_the_document(llm: ChatSwarmKV) -> None:
    """That is what `required_prefix_tokens` is for; without it nothing was prefilled."""
    graph = StateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("early", analyst(llm, required_prefix_tokens=10))
    graph.add_node("hasty", analyst(llm))
    for name in ("document", "early", "hasty"):
        graph.add_edge(START, name)
    topology = read_topology(graph)
    served = {a.path: [d.path for d in topology.documents_of(a)] for a in topology.analysts}
    assert served == {"early": ["document"], "hasty": []}


def test_documents_are_told_apart_by_their_keys(llm: ChatSwarmKV) -> None:
    """An analyst reads the one whose reference (or text) it names."""
    graph = StateGraph(SwarmState)
    graph.add_node("a", DocumentNode(llm, input_key="text_a", output_key="ref_a"))
    graph.add_node("b", DocumentNode(llm, input_key="text_b", output_key="ref_b"))
    graph.add_node("of_a", analyst(llm, ref_key="ref_a"))
    graph.add_node("of_b", analyst(llm, document_key="text_b"))
    for start, end in ((START, "a"), ("a", "b"), ("b", "of_a"), ("b", "of_b")):
        graph.add_edge(start, end)
    topology = read_topology(graph)
    served = {a.path: [d.path for d in topology.documents_of(a)] for a in topology.analysts}
    assert served == {"of_a": ["a"], "of_b": ["b"]}


# -- who runs at once ----------------------------------------------------------------------------


def steps_of(graph: Graph) -> set[frozenset[str]]:
    return set(read_topology(graph).steps)


def test_targets_of_one_node_run_at_once(llm: ChatSwarmKV) -> None:
    """Plain fan-out."""
    assert steps_of(fan_out(llm)) == {
        frozenset({"document"}),
        frozenset({"novelty", "claims", "ethics"}),
    }


def test_chains_of_different_length_coincide_step_by_step(llm: ChatSwarmKV) -> None:
    """The second of one chain runs beside the second of the other, not beside the first."""
    graph = StateGraph(SwarmState)
    for name in ("a1", "a2", "b1", "b2"):
        graph.add_node(name, analyst(llm))
    for start, end in ((START, "a1"), ("a1", "a2"), (START, "b1"), ("b1", "b2")):
        graph.add_edge(start, end)
    assert steps_of(graph) == {frozenset({"a1", "b1"}), frozenset({"a2", "b2"})}


def test_a_join_waits_for_its_last_source(llm: ChatSwarmKV) -> None:
    """And runs once, after the longer side; plain edges would run it twice."""
    graph = StateGraph(SwarmState)
    for name in ("short", "long1", "long2", "join"):
        graph.add_node(name, analyst(llm))
    for start, end in ((START, "short"), (START, "long1"), ("long1", "long2")):
        graph.add_edge(start, end)
    graph.add_edge(["short", "long2"], "join")
    assert steps_of(graph) == {
        frozenset({"short", "long1"}),
        frozenset({"long2"}),
        frozenset({"join"}),
    }


def test_a_conditional_edge_may_take_all_its_targets(llm: ChatSwarmKV) -> None:
    """The budget must hold whichever are chosen."""
    graph = StateGraph(SwarmState)
    for name in ("a", "b"):
        graph.add_node(name, analyst(llm))
    graph.add_conditional_edges(START, lambda state: "a", ["a", "b", END])
    assert steps_of(graph) == {frozenset({"a", "b"})}


def test_a_deferred_node_runs_when_nothing_else_is_left(llm: ChatSwarmKV) -> None:
    """However early its edge was taken."""
    graph = StateGraph(SwarmState)
    graph.add_node("last", analyst(llm), defer=True)
    for name in ("a1", "a2"):
        graph.add_node(name, analyst(llm))
    for start, end in ((START, "last"), (START, "a1"), ("a1", "a2")):
        graph.add_edge(start, end)
    assert steps_of(graph) == {frozenset({"a1"}), frozenset({"a2"}), frozenset({"last"})}


def test_a_loop_is_followed_until_a_step_comes_round_again(llm: ChatSwarmKV) -> None:
    """Turns of different length shift against each other, and every coincidence is found."""
    graph = StateGraph(SwarmState)
    for name in ("a1", "a2", "b1", "b2", "b3"):
        graph.add_node(name, analyst(llm))
    for start, end in (
        (START, "a1"),
        ("a1", "a2"),
        ("a2", "a1"),
        (START, "b1"),
        ("b1", "b2"),
        ("b2", "b3"),
        ("b3", "b1"),
    ):
        graph.add_edge(start, end)
    assert steps_of(graph) == {frozenset({a, b}) for a in ("a1", "a2") for b in ("b1", "b2", "b3")}


def test_any_step_of_a_subgraph_may_coincide_with_its_parents_nodes(llm: ChatSwarmKV) -> None:
    """A subgraph runs as a whole inside one step."""
    inner = StateGraph(SwarmState)
    for name in ("first", "second"):
        inner.add_node(name, analyst(llm))
    inner.add_edge(START, "first")
    inner.add_edge("first", "second")
    graph = StateGraph(SwarmState)
    graph.add_node("sub", inner.compile())
    graph.add_node("beside", analyst(llm))
    graph.add_edge(START, "sub")
    graph.add_edge(START, "beside")
    assert steps_of(graph) == {
        frozenset({"sub:first", "beside"}),
        frozenset({"sub:second", "beside"}),
    }


def test_many_parallel_subgraphs_are_counted_whole(llm: ChatSwarmKV) -> None:
    """Past a number of combinations the count is too high rather than slow or too low."""
    inner = StateGraph(SwarmState)
    for name in ("first", "second"):
        inner.add_node(name, analyst(llm))
    inner.add_edge(START, "first")
    inner.add_edge("first", "second")
    graph = StateGraph(SwarmState)
    names = [f"sub{number}" for number in range(20)]
    for name in names:
        graph.add_node(name, inner.compile())
        graph.add_edge(START, name)
    assert steps_of(graph) == {
        frozenset(f"{name}:{part}" for name in names for part in ("first", "second"))
    }


NODES = [f"n{number}" for number in range(6)]


@given(
    edges=st.sets(st.tuples(st.sampled_from([START, *NODES]), st.sampled_from(NODES)), max_size=14),
    joins=st.lists(
        st.tuples(
            st.lists(st.sampled_from(NODES), min_size=2, max_size=3, unique=True),
            st.sampled_from(NODES),
        ),
        max_size=2,
    ),
)
def test_the_replay_agrees_with_langgraph(
    edges: set[tuple[str, str]], joins: list[tuple[list[str], str]]
) -> None:
    """For graphs of plain edges and joins, LangGraph's own steps are exactly the replayed ones."""
    graph = StateGraph(SwarmState)
    for name in NODES:
        graph.add_node(name, nothing)
    for start, end in sorted({(START, NODES[0]), *edges}):
        graph.add_edge(start, end)
    for sources, target in joins:
        graph.add_edge(sources, target)
    replayed = supersteps(read_edges(graph), [START])[1:]

    seen: dict[int, set[str]] = {}
    app = graph.compile()
    limit = len(replayed) + 1
    events = app.stream({"document": "x"}, {"recursion_limit": limit}, stream_mode="debug")
    try:
        for event in events:
            if event["type"] == "task":
                seen.setdefault(event["step"], set()).add(event["payload"]["name"])
    except RecursionError:
        pass  # a loop; the replay stopped where it came round
    assert [seen[step] for step in sorted(seen)][: len(replayed)] == replayed
