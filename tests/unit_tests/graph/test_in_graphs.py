"""The nodes inside LangGraph: fan-out, loops, Send, subgraphs, states, streams, failures."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Annotated, Any

import pytest
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.cache.memory import InMemoryCache
from langgraph.errors import InvalidUpdateError, NodeTimeoutError
from langgraph.graph import END, START
from langgraph.graph.state import StateGraph
from langgraph.types import CachePolicy, RetryPolicy, Send
from pydantic import BaseModel
from typing_extensions import TypedDict

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.errors import DecodeError, DocumentMissingError, EngineClosedError
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget import check_budget
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState, merge_findings
from tests.unit_tests.graph.support import (
    DOCUMENT,
    AfterDocument,
    echo_task,
    fake_llm,
    fan_out,
    is_idle,
    tell_every_chunk,
    wait_until,
)

NAMES = ("novelty", "claims", "ethics")
FINDINGS = {name: f"read: Tell me about {name}." for name in NAMES}
INPUT = {"document": DOCUMENT}


async def run(app: Any, given: Any = INPUT, config: Any = None, *, is_async: bool) -> Any:
    return await app.ainvoke(given, config) if is_async else app.invoke(given, config)


both = pytest.mark.parametrize("is_async", [False, True])


# -- states --------------------------------------------------------------------------------------


@both
async def test_a_fan_out_answers_everything_from_one_prefill(
    llm: ChatSwarmKV, is_async: bool
) -> None:
    """Document once, each task once."""
    result = await run(fan_out(llm).compile(), is_async=is_async)
    assert result["findings"] == FINDINGS
    ref = result["document_ref"]
    tasks = sum(
        len(llm.prompt_token_ids([("system", "x"), ("user", f"Tell me about {name}.")]))
        - len(llm.prefix_token_ids([("system", "x")]))
        for name in NAMES
    )
    assert ref["num_tokens"] < llm.engine_statistics().num_prefill_tokens
    assert llm.engine_statistics().num_prefill_tokens <= ref["num_tokens"] + tasks


class Typed(TypedDict, total=False):
    question: str
    document: str
    document_ref: Any
    findings: Annotated[dict[str, str], merge_findings]


class Model(BaseModel):
    question: str = ""
    document: str = ""
    document_ref: dict[str, Any] | None = None
    findings: Annotated[dict[str, str], merge_findings] = {}


@dataclass
class Data:
    question: str = ""
    document: str = ""
    document_ref: Any = None
    findings: Annotated[Any, merge_findings] = field(default_factory=dict)


@both
@pytest.mark.parametrize("schema", [SwarmState, Typed, Model, Data])
async def test_any_kind_of_state_will_do(llm: ChatSwarmKV, schema: Any, is_async: bool) -> None:
    """Nodes write their own keys only: a `question` without a reducer is safe (G1 i, iii, iv)."""
    given = {**INPUT, "question": "?"} if schema is not SwarmState else INPUT
    app = fan_out(llm, graph=StateGraph(schema)).compile()
    result = await run(app, given, is_async=is_async)
    assert result["findings"] == FINDINGS
    if schema is not SwarmState:
        assert result["question"] == "?"


def test_without_a_reducer_langgraph_names_the_key(llm: ChatSwarmKV) -> None:
    """In a plain graph the first run says so (G1); SwarmStateGraph says so at compile time."""

    class NoReducer(Typed):
        findings: dict[str, str]

    with pytest.raises(InvalidUpdateError, match="'findings'"):
        fan_out(llm, graph=StateGraph(NoReducer)).compile().invoke(INPUT)


@both
async def test_a_bound_method_is_a_node_too(llm: ChatSwarmKV, is_async: bool) -> None:
    """It is still given its config, so the finding has the node's name."""
    node = AnalystNode(llm, "Why?")
    graph = StateGraph(SwarmState)
    graph.add_node("why", node.ainvoke if is_async else node.invoke)
    graph.add_edge(START, "why")
    result = await run(graph.compile(), is_async=is_async)
    assert result["findings"] == {"why": "read: Why?"}


@both
async def test_a_document_piped_into_its_analyst_is_one_node(
    llm: ChatSwarmKV, is_async: bool
) -> None:
    """The analyst is handed the reference alone, and the budget sees both."""
    graph = StateGraph(SwarmState)
    graph.add_node("both", DocumentNode(llm) | AnalystNode(llm, "Why?"))
    graph.add_edge(START, "both")
    assert check_budget(graph, document=DOCUMENT).fits
    result = await run(graph.compile(), is_async=is_async)
    assert result["findings"] == {"both": "read: Why?"}


# -- subgraphs and Send --------------------------------------------------------------------------


@both
async def test_subgraphs_run_twice_in_parallel(llm: ChatSwarmKV, is_async: bool) -> None:
    """Each returns its own findings; the shared document does not conflict (G1 ii)."""

    def review(region: str) -> Any:
        inner = StateGraph(SwarmState)
        inner.add_node("novelty", AnalystNode(llm, f"New in {region}?", name=f"{region}_novelty"))
        inner.add_edge(START, "novelty")
        return inner.compile()

    graph = fan_out(llm, ())
    for region in ("eu", "us"):
        graph.add_node(region, review(region))
        graph.add_edge("document", region)
    result = await run(graph.compile(), is_async=is_async)
    assert result["findings"] == {
        "eu_novelty": "read: New in eu?",
        "us_novelty": "read: New in us?",
    }
    assert result["document"] == DOCUMENT


def sections(llm: ChatSwarmKV, number: int, **passed_on: Any) -> StateGraph[Any, Any, Any, Any]:
    """A document, and `number` copies of one analyst, each told which section it has."""

    def send(state: SwarmState) -> list[Send]:
        common = {key: state[value] for key, value in passed_on.items()}
        return [Send("section", {**common, "section": i}) for i in range(number)]

    graph = fan_out(llm, ())
    task = lambda state: f"Sum up section {state['section']}."  # noqa: E731
    graph.add_node("section", AnalystNode(llm, task, max_fanout=number))
    graph.add_conditional_edges("document", send, ["section"])
    return graph


@both
@pytest.mark.parametrize(
    "passed_on",
    [{"document_ref": "document_ref"}, {"document": "document"}],
    ids=["only the reference", "only the text"],
)
async def test_send_may_pass_on_part_of_the_state(
    llm: ChatSwarmKV, passed_on: dict[str, str], is_async: bool
) -> None:
    """The reference is enough, and so is the text; either way the document is computed once."""
    result = await run(sections(llm, 3, **passed_on).compile(), is_async=is_async)
    assert result["findings"] == {f"section[{i}]": f"read: Sum up section {i}." for i in range(3)}
    total = result["document_ref"]["num_tokens"]
    assert llm.engine_statistics().num_prefill_tokens < 1.2 * total


def test_send_without_any_document_says_what_to_pass_on(llm: ChatSwarmKV) -> None:
    """Rather than an answer without the document."""
    with pytest.raises(DocumentMissingError, match=r"Send.*'document'"):
        sections(llm, 2).compile().invoke(INPUT)


@both
@pytest.mark.parametrize("cap", [None, 1, 3])
async def test_ten_copies_keep_to_the_concurrency_cap_and_lose_nothing(
    cap: int | None, is_async: bool
) -> None:
    """Results in input order, observed peak at most the cap (G7)."""
    with fake_llm(max_tokens=64, reply=echo_task) as model:
        app = sections(model, 10, document_ref="document_ref").compile()
        config = RunnableConfig(max_concurrency=cap) if cap else None
        result = await run(app, config=config, is_async=is_async)
        assert list(result["findings"].items()) == [
            (f"section[{i}]", f"read: Sum up section {i}.") for i in range(10)
        ]
        assert model.engine_statistics().peak_running <= (cap or 10)
        assert is_idle(model)


# -- joins, loops --------------------------------------------------------------------------------


@both
async def test_a_join_runs_once_with_all_results(llm: ChatSwarmKV, is_async: bool) -> None:
    """Though one side has one node and the other three (G4)."""
    seen: list[list[str]] = []
    graph = fan_out(llm, ())
    for name in ("short", "long1", "long2", "long3"):
        graph.add_node(name, AnalystNode(llm, f"{name}?"))
    for start, end in (
        ("document", "short"),
        ("document", "long1"),
        ("long1", "long2"),
        ("long2", "long3"),
    ):
        graph.add_edge(start, end)

    def join(state: SwarmState) -> dict[str, Any]:
        seen.append(sorted(state["findings"]))
        return {}

    graph.add_node("join", join)
    graph.add_edge(["short", "long3"], "join")
    await run(graph.compile(), is_async=is_async)
    assert seen == [["long1", "long2", "long3", "short"]]


@both
async def test_a_loop_replaces_the_findings_of_its_last_turn(is_async: bool) -> None:
    """Three fan-outs in one run: three joins, none mixed with an earlier turn's results (G4)."""

    class Turns(SwarmState):
        turn: int

    seen: list[dict[str, str]] = []

    def join(state: Turns) -> dict[str, Any]:
        seen.append(dict(state["findings"]))
        return {"turn": state["turn"] + 1}

    with fake_llm(max_tokens=64, reply=echo_task) as model:
        graph = fan_out(
            model,
            ("a", "b"),
            graph=StateGraph(Turns),
            task=lambda name: lambda state: f"{name} in turn {state['turn']}",
        )
        graph.add_node("join", join)
        graph.add_edge(["a", "b"], "join")
        graph.add_conditional_edges(
            "join", lambda state: "document" if state["turn"] < 3 else END, ["document", END]
        )
        await run(graph.compile(), {**INPUT, "turn": 0}, is_async=is_async)
        assert seen == [
            {name: f"read: {name} in turn {turn}" for name in ("a", "b")} for turn in range(3)
        ]
        document = model.prefix_token_ids([("system", "x")])
        assert model.engine_statistics().num_prefill_tokens < 2 * len(DOCUMENT) + len(document)


# -- streams -------------------------------------------------------------------------------------


@both
async def test_tokens_go_out_on_messages_and_events_on_custom(
    llm: ChatSwarmKV, is_async: bool
) -> None:
    """Each with the node it comes from; the joined tokens are the finding."""
    app = fan_out(llm).compile()
    modes = ["messages", "custom", "updates"]
    if is_async:
        parts = [part async for part in app.astream(INPUT, stream_mode=modes)]
    else:
        parts = list(app.stream(INPUT, stream_mode=modes))
    texts: dict[str, str] = dict.fromkeys(NAMES, "")
    for message, metadata in (part for mode, part in parts if mode == "messages"):
        texts[metadata["langgraph_node"]] += message.text
    assert texts == FINDINGS

    events = [part for mode, part in parts if mode == "custom"]
    kinds = {kind: [e["node"] for e in group] for kind, group in _by_type(events)}
    assert kinds["document"] == ["document"]
    assert sorted(kinds["analyst"]) == sorted(NAMES)
    assert set(kinds["prefill"]) == {"document"}

    updates = [part for mode, part in parts if mode == "updates"]
    assert list(updates[0]) == ["document"]
    assert {name: update[name] for update in updates[1:] for name in update} == {
        name: {"findings": {name: FINDINGS[name]}} for name in NAMES
    }


def _by_type(events: list[dict[str, Any]]) -> Any:
    return groupby(sorted(events, key=lambda e: e["type"]), key=lambda e: e["type"])


@both
async def test_a_long_prefill_is_told_while_it_goes_on(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is held until the reader of the stream has seen it begin."""
    wait_for_listener = tell_every_chunk(monkeypatch)
    seen = threading.Event()
    steps: list[int] = []

    def gate(batch: Batch) -> None:
        wait_for_listener(batch)
        steps.append(len(batch))
        assert len(steps) != 4 or seen.wait(60)

    events: list[dict[str, Any]] = []

    def take(event: dict[str, Any]) -> None:
        events.append(event)
        seen.set()

    with fake_llm(max_batch_tokens=100, on_decode=gate) as model:
        app = fan_out(model, ()).compile()
        if is_async:
            async for event in app.astream(INPUT, stream_mode="custom"):
                take(event)
        else:
            for event in app.stream(INPUT, stream_mode="custom"):
                take(event)
    computed = [event["computed_tokens"] for event in events if event["type"] == "prefill"]
    assert len(computed) >= len(steps) - 1
    assert computed == sorted(set(computed))
    assert computed[-1] == events[-1]["document_tokens"]


async def test_events_of_subgraphs_are_streamed_with_their_namespace(llm: ChatSwarmKV) -> None:
    """LangGraph tells which subgraph an event is from."""
    inner = StateGraph(SwarmState)
    inner.add_node("novelty", AnalystNode(llm, "What is new?"))
    inner.add_edge(START, "novelty")
    graph = fan_out(llm, ())
    graph.add_node("review", inner.compile())
    graph.add_edge("document", "review")
    parts = [
        part async for part in graph.compile().astream(INPUT, stream_mode="custom", subgraphs=True)
    ]
    analysts = [(space, event["node"]) for space, event in parts if event["type"] == "analyst"]
    ((space, node),) = analysts
    assert space[0].startswith("review:")
    assert node == "novelty"


# -- retries, caches -----------------------------------------------------------------------------


class FailOnce:
    """Fails the first step that it sees, as a native failure would."""

    def __init__(self) -> None:
        self.has_failed = False

    def __call__(self, batch: Batch) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise DecodeError("simulated", return_code=-3)


@both
async def test_a_retry_does_not_prefill_the_document_again(is_async: bool) -> None:
    """LangGraph's default policy retries a failed step, and the document is still there (G5)."""
    failure = FailOnce()
    retry = RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False)
    with fake_llm(max_tokens=64, reply=echo_task, on_decode=AfterDocument(failure)) as model:
        graph = fan_out(model, ())
        for name in NAMES:
            node = AnalystNode(model, f"Tell me about {name}.")
            graph.add_node(name, node, retry_policy=retry)
            graph.add_edge("document", name)
        result = await run(graph.compile(), is_async=is_async)
        assert failure.has_failed
        assert result["findings"] == FINDINGS
        total = result["document_ref"]["num_tokens"]
        assert model.engine_statistics().num_prefill_tokens < 1.5 * total
        assert is_idle(model)


@both
async def test_a_retried_document_node_finds_its_document(is_async: bool) -> None:
    """What fails after the prefill does not cost another."""
    attempts: list[int] = []

    def fail_first(found: dict[str, Any]) -> dict[str, Any]:
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError
        return found

    retry = RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False)
    with fake_llm() as model:
        graph = StateGraph(SwarmState)
        node = DocumentNode(model) | RunnableLambda(fail_first)
        graph.add_node("document", node, retry_policy=retry)
        graph.add_edge(START, "document")
        result = await run(graph.compile(), is_async=is_async)
        assert len(attempts) == 2
        total = result["document_ref"]["num_tokens"]
        assert model.engine_statistics().num_prefill_tokens == total


@both
async def test_a_cached_document_node_hands_out_a_reference_that_still_works(
    is_async: bool,
) -> None:
    """In the same process, and with another engine under the same cache."""
    cache = InMemoryCache()
    for _ in range(2):
        with fake_llm(max_tokens=64, reply=echo_task) as model:
            graph = StateGraph(SwarmState)
            graph.add_node("document", DocumentNode(model), cache_policy=CachePolicy())
            graph.add_node("why", AnalystNode(model, "Why?"))
            graph.add_edge(START, "document")
            graph.add_edge("document", "why")
            app = graph.compile(cache=cache)
            for _ in range(2):
                result = await run(app, is_async=is_async)
                assert result["findings"] == {"why": "read: Why?"}
            total = result["document_ref"]["num_tokens"]
            assert model.engine_statistics().num_prefill_tokens < 1.2 * total


# -- failures ------------------------------------------------------------------------------------


def failing(model: ChatSwarmKV) -> StateGraph[Any, Any, Any, Any]:
    """Five branches, of which the second fails before it asks and the fifth alters its input."""

    def refuse(state: dict[str, Any]) -> str:
        raise LookupError("no question")

    def careless(state: dict[str, Any]) -> str:
        state["notes"].append("mine")
        return "five"

    class Notes(SwarmState):
        notes: list[str]

    graph = fan_out(model, (), graph=StateGraph(Notes))
    tasks = {"one": "one", "two": refuse, "three": "three", "four": "four", "five": careless}
    for name, task in tasks.items():
        graph.add_node(name, AnalystNode(model, task))
        graph.add_edge("document", name)
    return graph


@both
async def test_a_failing_branch_fails_the_run_and_leaves_nothing_behind(is_async: bool) -> None:
    """One error that names the branch; sequences freed; inputs unchanged (G5)."""
    notes = ["theirs"]
    with fake_llm(max_tokens=64, reply=echo_task) as model:
        with pytest.raises(LookupError, match="no question") as caught:
            await run(failing(model).compile(), {**INPUT, "notes": notes}, is_async=is_async)
        if sys.version_info >= (3, 11):  # LangGraph adds notes from there on
            assert any("'two'" in note for note in caught.value.__notes__)
        assert notes == ["theirs"]
        await asyncio.to_thread(wait_until, lambda: is_idle(model))
        assert model.engine is not None
        model.engine.check()
        assert model.engine_statistics().sequences_used == 1


async def other_tasks() -> None:
    """Wait for the tasks that LangGraph has cancelled: it does not."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=60)


async def test_async_siblings_of_a_failing_branch_are_stopped() -> None:
    """No orphan goes on decoding after the run has failed (C4)."""
    decoding, opened = threading.Event(), threading.Event()
    steps: list[int] = []

    def gate(batch: Batch) -> None:
        steps.append(1)
        decoding.set()
        assert opened.wait(60)

    async def fail(state: SwarmState) -> dict[str, Any]:
        await asyncio.to_thread(decoding.wait, 60)
        raise LookupError("no question")

    with fake_llm(max_tokens=500, reply="x" * 500, on_decode=AfterDocument(gate)) as model:
        graph = fan_out(model, NAMES)
        graph.add_node("fail", fail)
        graph.add_edge("document", "fail")
        with pytest.raises(LookupError):
            await graph.compile().ainvoke(INPUT)
        await other_tasks()
        opened.set()
        await asyncio.to_thread(wait_until, lambda: is_idle(model))
        assert len(steps) <= 2
        assert model.engine_statistics().num_finished == 1


async def test_a_node_timeout_works_and_frees_the_branch() -> None:
    """LangGraph refuses timeouts for sync nodes; these have an async path of their own."""
    opened = threading.Event()

    def gate(batch: Batch) -> None:
        assert opened.wait(60)

    with fake_llm(max_tokens=500, reply="x" * 500, on_decode=AfterDocument(gate)) as model:
        graph = fan_out(model, ())
        graph.add_node("slow", AnalystNode(model, "?"), timeout=timedelta(milliseconds=200))
        graph.add_edge("document", "slow")
        with pytest.raises(NodeTimeoutError):
            await graph.compile().ainvoke(INPUT)
        await other_tasks()
        opened.set()
        await asyncio.to_thread(wait_until, lambda: is_idle(model))
        # On a busy machine it may have run out of time before it asked anything.
        assert model.engine_statistics().num_cancelled <= 1
        assert model.engine_statistics().num_finished == 1


@both
async def test_a_closed_engine_is_an_error_of_the_run(is_async: bool) -> None:
    """Not an answer."""
    with fake_llm() as model:
        app = fan_out(model).compile()
    with pytest.raises(EngineClosedError):
        await run(app, is_async=is_async)
