"""Graphs that are refused as they are drawn, and those that are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from langchain_core.runnables import RunnableLambda
from langgraph.graph import END, START
from langgraph.graph.state import StateGraph
from langgraph.types import Send
from pydantic import BaseModel
from typing_extensions import TypedDict

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import (
    GraphError,
    MissingReducerError,
    UnboundedCycleError,
    UnreachableAnalystError,
)
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget import check_budget
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState, merge_findings
from tests.unit_tests.graph.support import fan_out, idle_llm

Graph = StateGraph[Any, Any, Any, Any]


@pytest.fixture
def llm() -> ChatSwarmKV:
    return idle_llm()


class OwnState(TypedDict):
    """A state of the user's, with no reducers."""

    question: str
    document: str
    document_ref: dict[str, Any]
    answer: str
    findings: dict[str, str]


def started(llm: ChatSwarmKV, schema: Any = SwarmState) -> Graph:
    graph = StateGraph(schema)
    graph.add_node("document", DocumentNode(llm))
    graph.add_edge(START, "document")
    return graph


def with_analysts(graph: Graph, llm: ChatSwarmKV, *names: str, **options: Any) -> Graph:
    for name in names:
        graph.add_node(name, AnalystNode(llm, "What is new?", **options))
        graph.add_edge("document", name)
    return graph


# -- documents -----------------------------------------------------------------------------------


def test_an_analyst_without_a_document_before_it_is_refused(llm: ChatSwarmKV) -> None:
    """The error names it and says what to do."""
    graph = StateGraph(SwarmState)
    graph.add_node("novelty", AnalystNode(llm, "What is new?"))
    graph.add_edge(START, "novelty")
    with pytest.raises(UnreachableAnalystError, match=r"'novelty'.*Add a DocumentNode") as caught:
        check_budget(graph)
    assert caught.value.node == "novelty"


def test_a_document_of_another_key_does_not_count(llm: ChatSwarmKV) -> None:
    """The message lists the document nodes there are, with what they write."""
    graph = started(llm)
    with_analysts(graph, llm, "novelty", ref_key="patent_ref")
    with pytest.raises(UnreachableAnalystError, match=r"'document' \(writes 'document_ref'\)"):
        check_budget(graph)


def test_an_analyst_beside_its_document_is_refused(llm: ChatSwarmKV) -> None:
    """Nothing is prefilled when it starts."""
    graph = started(llm)
    graph.add_node("novelty", AnalystNode(llm, "What is new?"))
    graph.add_edge(START, "novelty")
    with pytest.raises(UnreachableAnalystError):
        check_budget(graph)


def test_a_subgraph_of_analysts_is_checked_as_part_of_its_parent(llm: ChatSwarmKV) -> None:
    """By itself it is refused, and told how to be one."""
    inner = StateGraph(SwarmState)
    inner.add_node("novelty", AnalystNode(llm, "What is new?"))
    inner.add_edge(START, "novelty")
    with pytest.raises(UnreachableAnalystError, match="plain StateGraph"):
        check_budget(inner)
    graph = started(llm)
    graph.add_node("review", inner.compile())
    graph.add_edge("document", "review")
    check_budget(graph)


# -- cycles --------------------------------------------------------------------------------------


def looping(llm: ChatSwarmKV) -> Graph:
    graph = with_analysts(started(llm), llm, "novelty")
    graph.add_node("critic", lambda state: {})
    graph.add_edge("novelty", "critic")
    graph.add_conditional_edges("critic", lambda state: END, {"again": "document", "done": END})
    return graph


def test_a_cycle_with_analysts_is_refused_and_its_edge_named(llm: ChatSwarmKV) -> None:
    """Nothing in the graph says that it ends."""
    with pytest.raises(UnboundedCycleError, match=r"'critic' -> 'document'.*'novelty'") as caught:
        check_budget(looping(llm))
    assert caught.value.edge == ("critic", "document")


def test_a_cycle_with_a_bound_is_accepted(llm: ChatSwarmKV) -> None:
    """The report carries the bound in supersteps."""
    assert check_budget(looping(llm), max_turns=3).recursion_limit == 3 + 2 * 3 + 1


def test_a_cycle_without_analysts_is_not_our_business(llm: ChatSwarmKV) -> None:
    """A tool loop of the user's own, say."""
    graph = with_analysts(started(llm), llm, "novelty")
    graph.add_node("poll", lambda state: {})
    graph.add_edge("novelty", "poll")
    graph.add_conditional_edges("poll", lambda state: END, ["poll", END])
    assert check_budget(graph).recursion_limit is None


def test_a_cycle_inside_a_subgraph_is_named_by_its_path(llm: ChatSwarmKV) -> None:
    """And one around a subgraph counts the analysts inside it."""
    inner = StateGraph(SwarmState)
    inner.add_node("novelty", AnalystNode(llm, "What is new?"))
    inner.add_edge(START, "novelty")
    inner.add_conditional_edges("novelty", lambda state: END, ["novelty", END])
    graph = started(llm)
    graph.add_node("review", inner.compile())
    graph.add_edge("document", "review")
    with pytest.raises(UnboundedCycleError, match="'review:novelty' -> 'review:novelty'"):
        check_budget(graph)

    calm = StateGraph(SwarmState)
    calm.add_node("novelty", AnalystNode(llm, "What is new?"))
    calm.add_edge(START, "novelty")
    around = started(llm)
    around.add_node("review", calm.compile())
    around.add_edge("document", "review")
    around.add_conditional_edges("review", lambda state: END, ["document", END])
    with pytest.raises(UnboundedCycleError, match=r"'review' -> 'document'.*'review:novelty'"):
        check_budget(around)


def test_an_edge_that_is_only_guessed_closes_no_cycle(llm: ChatSwarmKV) -> None:
    """It is listed as unknown instead."""
    graph = with_analysts(started(llm), llm, "novelty")
    graph.add_conditional_edges("novelty", lambda state: "document")
    report = check_budget(graph)
    assert any("path map" in note for note in report.unknown)


# -- keys ----------------------------------------------------------------------------------------


def test_a_key_that_the_state_lacks_is_named(llm: ChatSwarmKV) -> None:
    """LangGraph would drop the analyst's answer without a word."""

    class Bare(TypedDict):
        document: str
        document_ref: dict[str, Any]

    graph = with_analysts(started(llm, Bare), llm, "novelty")
    with pytest.raises(GraphError, match=r"'novelty'.*'findings'.*Bare"):
        check_budget(graph)
    check_budget(with_analysts(started(llm, OwnState), llm, "novelty", output_key="answer"))


def test_a_document_reference_needs_its_key_too(llm: ChatSwarmKV) -> None:
    """Else the analysts would not learn the instructions."""

    class NoRef(TypedDict):
        document: str

    with pytest.raises(GraphError, match="'document_ref'"):
        check_budget(started(llm, NoRef))


def test_pydantic_and_dataclass_states_have_keys_as_well(llm: ChatSwarmKV) -> None:
    """The schema is LangGraph's, whatever it is made of."""

    class Model(BaseModel):
        document: str = ""
        document_ref: dict[str, Any] | None = None
        findings: Annotated[dict[str, str], merge_findings] = {}

    @dataclass
    class Data:
        document: str
        document_ref: Any = None
        findings: Annotated[Any, merge_findings] = None

    for schema in (Model, Data):
        check_budget(with_analysts(started(llm, schema), llm, "novelty", "claims"))


# -- writers -------------------------------------------------------------------------------------


def test_parallel_analysts_need_a_reducer_for_findings(llm: ChatSwarmKV) -> None:
    """The error names the key and the fix (G1)."""
    graph = with_analysts(started(llm, OwnState), llm, "novelty", "claims")
    with pytest.raises(MissingReducerError, match=r"'findings'.*merge_findings") as caught:
        check_budget(graph)
    assert caught.value.key == "findings"
    assert caught.value.nodes == ("novelty", "claims")


def test_parallel_analysts_with_one_output_key_need_a_reducer(llm: ChatSwarmKV) -> None:
    """A key of the user's, and how to give it one."""
    graph = with_analysts(started(llm, OwnState), llm, "novelty", "claims", output_key="answer")
    with pytest.raises(MissingReducerError, match=r"'answer'.*Annotated"):
        check_budget(graph)


def test_a_reducer_of_the_users_will_do(llm: ChatSwarmKV) -> None:
    """Whatever it does."""

    class Listed(SwarmState):
        answers: Annotated[list[str], lambda old, new: [*old, new]]

    check_budget(with_analysts(started(llm, Listed), llm, "a", "b", output_key="answers"))


def test_analysts_in_a_row_need_no_reducer(llm: ChatSwarmKV) -> None:
    """They never write in the same step."""
    graph = with_analysts(started(llm, OwnState), llm, "novelty")
    graph.add_node("claims", AnalystNode(llm, "What is claimed?"))
    graph.add_edge("novelty", "claims")
    check_budget(graph)


def test_either_of_two_analysts_needs_no_reducer(llm: ChatSwarmKV) -> None:
    """A router may well take only one of its targets."""
    graph = started(llm, OwnState)
    for name in ("short", "long"):
        graph.add_node(name, AnalystNode(llm, "What is new?", output_key="answer"))
    graph.add_conditional_edges("document", lambda state: "short", ["short", "long"])
    check_budget(graph)


def test_parallel_analysts_behind_a_router_are_still_found(llm: ChatSwarmKV) -> None:
    """What follows one node by plain edges runs together, whenever that node runs."""
    graph = started(llm, OwnState)
    graph.add_node("fan", lambda state: {})
    graph.add_conditional_edges("document", lambda state: "fan", ["fan", END])
    for name in ("novelty", "claims"):
        graph.add_node(name, AnalystNode(llm, "What is new?"))
        graph.add_edge("fan", name)
    with pytest.raises(MissingReducerError):
        check_budget(graph)


def send_all(state: dict[str, Any]) -> list[Send]:
    return [Send("section", {"document": "x"}) for _ in range(3)]


def test_copies_from_a_send_need_a_reducer(llm: ChatSwarmKV) -> None:
    """Unless there is at most one."""
    for max_fanout in (None, 3):
        graph = started(llm, OwnState)
        graph.add_node("section", AnalystNode(llm, "Sum up.", max_fanout=max_fanout))
        graph.add_conditional_edges("document", send_all, ["section"])
        with pytest.raises(MissingReducerError, match=r"Send.*'section'.*'findings'"):
            check_budget(graph)
    graph = started(llm, OwnState)
    graph.add_node("section", AnalystNode(llm, "Sum up.", max_fanout=1))
    graph.add_conditional_edges("document", send_all, ["section"])
    check_budget(graph)


def test_copies_of_a_subgraph_must_not_overwrite_each_others_findings(llm: ChatSwarmKV) -> None:
    """Inside, an analyst cannot know which copy it is in."""

    class Collected(SwarmState):
        answers: Annotated[list[str], lambda old, new: [*old, new]]

    for options in ({}, {"output_key": "answers"}, {"max_fanout": 1}):
        inner = StateGraph(Collected)
        inner.add_node("novelty", AnalystNode(llm, "What is new?", **options))
        inner.add_edge(START, "novelty")
        graph = started(llm, Collected)
        graph.add_node("review", inner.compile())
        graph.add_conditional_edges("document", lambda state: [Send("review", state)], ["review"])
        if options:
            check_budget(graph)
        else:
            with pytest.raises(GraphError, match=r"'review'.*finding 'novelty'.*output_key"):
                check_budget(graph)


def test_parallel_subgraphs_hand_back_every_key_of_theirs(llm: ChatSwarmKV) -> None:
    """So a key without a reducer, such as the document, cannot be shared by two of them (G1)."""

    def review(name: str, schema: Any) -> Any:
        inner = StateGraph(schema)
        inner.add_node(name, AnalystNode(llm, "What is new?"))
        inner.add_edge(START, name)
        return inner.compile()

    for schema in (OwnState, SwarmState):
        graph = started(llm, schema)
        for name in ("eu", "us"):
            graph.add_node(name, review(f"{name}_novelty", schema))
            graph.add_edge("document", name)
        if schema is OwnState:
            with pytest.raises(MissingReducerError, match="'eu' and 'us'"):
                check_budget(graph)
        else:
            check_budget(graph)


def test_findings_that_would_overwrite_each_other_are_refused(llm: ChatSwarmKV) -> None:
    """The reducer unites by name, so parallel analysts need different names."""
    inner = StateGraph(SwarmState)
    inner.add_node("novelty", AnalystNode(llm, "What is new?"))
    inner.add_edge(START, "novelty")
    graph = started(llm)
    for name in ("eu", "us"):
        graph.add_node(name, inner.compile())
        graph.add_edge("document", name)
    with pytest.raises(GraphError, match=r"'eu:novelty' and 'us:novelty'.*name="):
        check_budget(graph)
    with pytest.raises(GraphError, match="same finding 'x'"):
        check_budget(with_analysts(started(llm), llm, "a", "b", name="x"))


def test_what_is_piped_behind_an_analyst_writes_what_it_likes(llm: ChatSwarmKV) -> None:
    """Nothing is known of it, so nothing is refused."""
    graph = started(llm, OwnState)
    for name in ("a", "b"):
        graph.add_node(name, AnalystNode(llm, "Why?") | RunnableLambda(lambda found: {}))
        graph.add_edge("document", name)
    check_budget(graph)


def test_a_plain_fan_out_is_accepted(llm: ChatSwarmKV) -> None:
    """The graph of the README."""
    check_budget(fan_out(llm))


def test_a_command_with_declared_destinations_leads_to_its_analysts(llm: ChatSwarmKV) -> None:
    """The check follows the declaration."""
    graph = started(llm)
    graph.add_node("choose", lambda state: {}, destinations=("novelty",))
    graph.add_node("novelty", AnalystNode(llm, "What is new?"))
    graph.add_edge("document", "choose")
    check_budget(graph)
