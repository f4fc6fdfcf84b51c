"""`DocumentNode`: what it computes, what it returns and what it tells."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.errors import (
    ConfigurationError,
    ContextBudgetError,
    DocumentMissingError,
    PromptError,
)
from langchain_swarmkv.graph import node_run
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState
from langchain_swarmkv.graph.state_graph import SwarmStateGraph
from langchain_swarmkv.prompts.document import document_message, document_text
from tests.unit_tests.graph.support import (
    DOCUMENT,
    fake_llm,
    is_idle,
    listening,
    tell_every_chunk,
    wait_until,
)


async def run(node: DocumentNode, state: Any, config: Any, *, is_async: bool) -> dict[str, Any]:
    return await node.ainvoke(state, config) if is_async else node.invoke(state, config)


both = pytest.mark.parametrize("is_async", [False, True])


@both
async def test_it_prefills_the_document_and_returns_only_a_reference(
    llm: ChatSwarmKV, is_async: bool
) -> None:
    """The state keeps the text; the cache has exactly the shared prefix."""
    state = {"document": DOCUMENT, "question": "?"}
    before = copy.deepcopy(state)
    result = await run(DocumentNode(llm), state, None, is_async=is_async)
    assert list(result) == ["document_ref"]
    assert state == before
    prefix = llm.prefix_token_ids([document_message(DOCUMENT)])
    assert llm.engine is not None
    assert llm.engine.is_resident(prefix)
    ref = result["document_ref"]
    assert (ref["num_tokens"], ref["text_key"]) == (len(prefix), "document")
    assert llm.document_of(ref) == DOCUMENT


async def test_a_reference_is_plain_data(llm: ChatSwarmKV) -> None:
    """It survives JSON, and msgpack in strict mode (G2)."""
    ref = DocumentNode(llm).invoke({"document": DOCUMENT})["document_ref"]
    assert json.loads(json.dumps(ref)) == ref
    serializer = JsonPlusSerializer(allowed_msgpack_modules=())
    assert serializer.loads_typed(serializer.dumps_typed(ref)) == ref


@both
async def test_running_it_again_computes_nothing(llm: ChatSwarmKV, is_async: bool) -> None:
    """A retry, a resumed thread and a loop all run nodes again."""
    node = DocumentNode(llm)
    first = await run(node, {"document": DOCUMENT}, None, is_async=is_async)
    computed = llm.engine_statistics().num_prefill_tokens
    assert await run(node, {"document": DOCUMENT}, None, is_async=is_async) == first
    assert llm.engine_statistics().num_prefill_tokens == computed


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        ({}, "empty or missing"),
        ({"document": ""}, "empty or missing"),
        ({"document": " \n"}, "empty or missing"),
        ({"document": None}, "empty or missing"),
        ({"document": ["text"]}, "a list"),
        ({"document": b"text"}, "a bytes"),
    ],
)
def test_a_missing_document_is_named(llm: ChatSwarmKV, state: Any, seen: str) -> None:
    """With the key, and nothing is computed."""
    with pytest.raises(PromptError, match=rf"state\['document'\] is {seen}"):
        DocumentNode(llm).invoke(state)
    assert llm.engine_statistics().num_prefill_tokens == 0


def test_a_document_that_cannot_fit_is_refused_before_it_is_computed(llm: ChatSwarmKV) -> None:
    """In a plain graph too, where no budget was checked."""
    with pytest.raises(ContextBudgetError):
        DocumentNode(llm).invoke({"document": DOCUMENT * 10})
    assert llm.engine_statistics().num_prefill_tokens == 0


def test_a_pinned_document_stays_until_it_is_released(llm: ChatSwarmKV) -> None:
    """Without `pin` it may be evicted."""
    DocumentNode(llm).invoke({"document": DOCUMENT})
    assert llm.engine_statistics().num_pinned_prefixes == 0
    ref = DocumentNode(llm, pin=True).invoke({"document": DOCUMENT})["document_ref"]
    assert llm.engine_statistics().num_pinned_prefixes == 1
    assert llm.release(ref)
    assert llm.engine_statistics().num_pinned_prefixes == 0


def test_a_model_that_cannot_share_prefixes_is_refused() -> None:
    """Another model, and a chain, whose last step is no model."""
    with pytest.raises(ConfigurationError, match="FakeListChatModel; the node needs a ChatSwarmKV"):
        DocumentNode(FakeListChatModel(responses=["x"]))
    with fake_llm() as model, pytest.raises(ConfigurationError, match="schema="):
        DocumentNode(model.with_structured_output({"title": "X", "type": "object"}))


# -- events --------------------------------------------------------------------------------------


@both
async def test_progress_and_the_end_are_told_on_the_nodes_own_thread(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread only hands them over."""
    events: list[tuple[int, dict[str, Any]]] = []

    def write(event: dict[str, Any]) -> None:
        events.append((threading.get_ident(), event))

    config = listening(write, langgraph_node="reader")
    gate = tell_every_chunk(monkeypatch)
    with fake_llm(max_batch_tokens=100, on_decode=gate) as model:
        result = await run(DocumentNode(model), {"document": DOCUMENT}, config, is_async=is_async)
    total = result["document_ref"]["num_tokens"]
    assert {thread for thread, _ in events} == {threading.get_ident()}
    *progress, end = [event for _, event in events]
    computed = [event.pop("computed_tokens") for event in progress]
    assert computed == sorted(set(computed))
    assert len(computed) >= total // 100
    assert computed[-1] == total
    fixed = {"type": "prefill", "node": "reader", "cached_tokens": 0, "total_tokens": total}
    assert progress == [fixed] * len(progress)
    assert end["type"] == "document"
    assert end["node"] == "reader"
    assert (end["document_tokens"], end["cached_tokens"], end["computed_tokens"]) == (
        total,
        0,
        total,
    )
    assert end["prefix_source"] == "none"
    assert end["prefill_seconds"] >= 0


@both
async def test_a_document_that_is_in_the_cache_says_so(llm: ChatSwarmKV, is_async: bool) -> None:
    """Reuse is reported, and the progress bar still reaches its end."""
    DocumentNode(llm).invoke({"document": DOCUMENT})
    events: list[dict[str, Any]] = []
    node = DocumentNode(llm)
    result = await run(node, {"document": DOCUMENT}, listening(events.append), is_async=is_async)
    total = result["document_ref"]["num_tokens"]
    assert [event["type"] for event in events] == ["prefill", "document"]
    assert [(e["cached_tokens"], e["computed_tokens"]) for e in events] == [(total, 0)] * 2
    assert events[-1]["prefix_source"] == "resident"


def test_progress_is_throttled_but_for_the_first_and_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A document of thousands of chunks does not flood the stream."""
    clock = iter(step * 0.03 for step in range(1000))
    monkeypatch.setattr(node_run.time, "monotonic", lambda: next(clock))
    told: list[int] = []
    throttle = node_run._Throttle(lambda progress: told.append(progress.num_computed_tokens))
    for computed in range(1, 11):
        throttle(node_run.PrefillProgress(10, 0, computed))
    assert told == [1, 5, 9, 10]


# -- cancelling ----------------------------------------------------------------------------------


class Gate:
    """Holds the engine at its second step until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.steps = 0

    def __call__(self, batch: Batch) -> None:
        self.steps += 1
        if self.steps == 2:
            self.reached.set()
            assert self.opened.wait(60)


async def test_cancelling_it_stops_the_prefill_within_a_chunk() -> None:
    """Nothing of it is left running, and the engine goes on."""
    gate = Gate()
    with fake_llm(max_batch_tokens=50, on_decode=gate) as model:
        task = asyncio.ensure_future(DocumentNode(model).ainvoke({"document": DOCUMENT}))
        await asyncio.to_thread(gate.reached.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.opened.set()
        await asyncio.to_thread(wait_until, lambda: is_idle(model))
        assert gate.steps == 2
        assert model.engine_statistics().num_cancelled == 1
        await DocumentNode(model).ainvoke({"document": DOCUMENT})


def test_an_interrupt_stops_the_prefill_within_a_chunk() -> None:
    """Ctrl-C reaches the node's thread, which only waits for the prefill."""

    def interrupted(event: Any) -> None:
        raise KeyboardInterrupt

    gate = Gate()
    with fake_llm(max_batch_tokens=50, on_decode=gate) as model:
        with pytest.raises(KeyboardInterrupt):
            DocumentNode(model).invoke({"document": DOCUMENT}, listening(interrupted))
        gate.opened.set()
        wait_until(lambda: is_idle(model))
        assert gate.steps == 2
        assert model.engine_statistics().num_cancelled == 1
        DocumentNode(model).invoke({"document": DOCUMENT})


def test_progress_that_comes_after_its_event_loop_hurts_nobody() -> None:
    """The engine's thread outlives the loop that a node ran on."""
    gate = Gate()
    events: list[Any] = []
    with fake_llm(max_batch_tokens=50, on_decode=gate) as model:

        async def start_and_leave() -> None:
            node = DocumentNode(model)
            task = asyncio.ensure_future(
                node.ainvoke({"document": DOCUMENT}, listening(events.append))
            )
            await asyncio.to_thread(gate.reached.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(start_and_leave())
        num_events = len(events)
        gate.opened.set()
        wait_until(lambda: is_idle(model))
        assert len(events) == num_events
        DocumentNode(model).invoke({"document": DOCUMENT})


# -- documents of LangChain ----------------------------------------------------------------------

PAGES = [
    Document(DOCUMENT[:200], metadata={"page": 1}),
    Document(DOCUMENT[200:], metadata={"page": 2}),
]
JOINED = f"{DOCUMENT[:200]}\n\n{DOCUMENT[200:]}"


@both
@pytest.mark.parametrize(
    ("document", "text"),
    [(Document(DOCUMENT, metadata={"source": "a.pdf"}), DOCUMENT), (PAGES, JOINED)],
)
async def test_documents_are_as_good_as_their_text(
    llm: ChatSwarmKV, document: Any, text: str, is_async: bool
) -> None:
    """The same reference, the same tokens, and an analyst after it computes only its task."""
    node = DocumentNode(llm)
    result = await run(node, {"document": document}, None, is_async=is_async)
    assert result == await run(node, {"document": text}, None, is_async=is_async)
    assert llm.document_of(result["document_ref"]) == text
    events: list[dict[str, Any]] = []
    analyst = AnalystNode(llm, "Count.", max_tokens=4)
    state = {"document": document, **result}
    config = listening(events.append)
    await (
        analyst.ainvoke(state, config)
        if is_async
        else asyncio.to_thread(analyst.invoke, state, config)
    )
    assert events[-1]["cached_tokens"] >= result["document_ref"]["num_tokens"] - 1


@pytest.mark.parametrize(
    ("document", "seen"),
    [
        ([], "empty or missing"),
        (Document(" \n"), "empty or missing"),
        ([Document(""), Document(" ")], "empty or missing"),
        ([Document("text"), "text"], "a list with a str"),
        ({"page_content": "text"}, "a dict"),
    ],
)
def test_what_is_no_document_is_named(llm: ChatSwarmKV, document: Any, seen: str) -> None:
    """By the node, by the analyst and by the budget."""
    with pytest.raises(PromptError, match=seen):
        DocumentNode(llm).invoke({"document": document})
    if seen == "empty or missing":
        with pytest.raises(DocumentMissingError):
            AnalystNode(llm, "Count.").invoke({"document": document})
    else:
        with pytest.raises(PromptError, match=seen):
            AnalystNode(llm, "Count.").invoke({"document": document})


@pytest.mark.parametrize("document", [Document(DOCUMENT), PAGES])
def test_a_graph_takes_documents_from_compile_to_checkpoint(
    llm: ChatSwarmKV, document: Any
) -> None:
    """The budget counts what is read, and a resumed thread has the documents again."""
    text = document_text(document)
    graph = SwarmStateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("count", AnalystNode(llm, "Count.", max_tokens=4))
    graph.add_edge(START, "document")
    graph.add_edge("document", "count")
    app = graph.compile(InMemorySaver(), document=document, interrupt_after=["document"])
    expected = graph.compile(document=text).budget_report
    assert app.budget_report == expected
    assert graph.compile(document={"document": document}).budget_report == expected
    config: Any = {"configurable": {"thread_id": "1"}}
    app.invoke({"document": document}, config)
    assert app.get_state(config).values["document"] == document
    state = app.invoke(None, config)
    assert state["document"] == document
    assert list(state["findings"]) == ["count"]
    with pytest.raises(ConfigurationError, match="a list with a int"):
        graph.compile(document=[7])  # type: ignore[list-item]
    with pytest.raises(PromptError, match="empty"):
        graph.compile(document=[])
