"""Checkpoints, interrupts and restarts: the state is plain data, and the cache may be gone."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph.state import StateGraph
from langgraph.types import Command, interrupt

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.state import SwarmState
from tests.unit_tests.graph.support import DOCUMENT, echo_task, fake_llm, fan_out

NAMES = ("novelty", "claims", "ethics")
FINDINGS = {name: f"read: Tell me about {name}." for name in NAMES}
INPUT = {"document": DOCUMENT}
THREAD = {"configurable": {"thread_id": "1"}}

# Nothing but plain data is allowed out of a checkpoint.
SERIALIZER = JsonPlusSerializer(allowed_msgpack_modules=())
memory = InMemorySaver(serde=SERIALIZER)


@asynccontextmanager
async def saver(kind: str, directory: Path) -> AsyncIterator[Any]:
    """Opened anew each time, as another process would."""
    path = str(directory / "checkpoints.sqlite")
    if kind == "memory":
        yield memory
    elif kind == "sqlite":
        with SqliteSaver.from_conn_string(path) as sync_saver:
            sync_saver.serde = SERIALIZER
            yield sync_saver
    else:
        async with AsyncSqliteSaver.from_conn_string(path) as async_saver:
            async_saver.serde = SERIALIZER
            yield async_saver


async def run(app: Any, given: Any, *, is_async: bool, config: Any = THREAD) -> Any:
    return await app.ainvoke(given, config) if is_async else app.invoke(given, config)


@pytest.mark.parametrize(
    ("kind", "is_async"),
    [("memory", False), ("memory", True), ("sqlite", False), ("async sqlite", True)],
)
async def test_a_thread_goes_on_in_a_fresh_process(
    kind: str, is_async: bool, tmp_path: Path
) -> None:
    """Another graph, another engine: the document is rebuilt from the text, once (G2)."""
    thread = {"configurable": {"thread_id": f"{kind} {is_async}"}}
    async with saver(kind, tmp_path) as checkpointer:
        with fake_llm(max_tokens=64, reply=echo_task) as model:
            app = fan_out(model).compile(checkpointer, interrupt_before=list(NAMES))
            stopped = await run(app, INPUT, is_async=is_async, config=thread)
            assert not stopped.get("findings")
            json.dumps(stopped)
    async with saver(kind, tmp_path) as checkpointer:
        with fake_llm(max_tokens=64, reply=echo_task) as model:
            app = fan_out(model).compile(checkpointer)
            events: list[dict[str, Any]] = []
            if is_async:
                async for event in app.astream(None, thread, stream_mode="custom"):
                    events.append(event)
                values = (await app.aget_state(thread)).values
            else:
                events.extend(app.stream(None, thread, stream_mode="custom"))
                values = app.get_state(thread).values
            assert values["findings"] == FINDINGS
            total = values["document_ref"]["num_tokens"]
            rebuilt = [e["computed_tokens"] for e in events if e["type"] == "document"]
            assert sum(rebuilt) == total
            answers = [e for e in events if e["type"] == "analyst"]
            assert len(answers) == len(NAMES)
            assert all(e["cached_tokens"] >= total for e in answers)
            assert model.engine_statistics().num_prefill_tokens < 1.2 * total


# LangGraph's `interrupt` needs Python 3.11 in async nodes.
@pytest.mark.parametrize("is_async", [False, True] if sys.version_info >= (3, 11) else [False])
async def test_an_interrupt_in_a_task_resumes_without_a_prefill(
    llm: ChatSwarmKV, is_async: bool
) -> None:
    """The node runs again from its start, which is idempotent."""

    def ask(state: SwarmState) -> str:
        return f"Explain {interrupt('What shall I explain?')}."

    graph = fan_out(llm, ())
    graph.add_node("explain", AnalystNode(llm, ask))
    graph.add_edge("document", "explain")
    app = graph.compile(InMemorySaver(serde=SERIALIZER))
    stopped = await run(app, INPUT, is_async=is_async)
    assert [i.value for i in stopped["__interrupt__"]] == ["What shall I explain?"]
    computed = llm.engine_statistics().num_prefill_tokens
    result = await run(app, Command(resume="the hinge"), is_async=is_async)
    assert result["findings"] == {"explain": "read: Explain the hinge."}
    task = len("Explain the hinge.") + len("<|im_end|>\n<|im_start|>assistant\n")
    assert llm.engine_statistics().num_prefill_tokens - computed < task


def test_time_travel_to_before_the_analysts_answers_again(llm: ChatSwarmKV) -> None:
    """From a checkpoint whose reference is old."""
    app = fan_out(llm).compile(InMemorySaver(serde=SERIALIZER))
    app.invoke(INPUT, THREAD)
    earlier = next(s for s in app.get_state_history(THREAD) if set(s.next) == set(NAMES))
    computed = llm.engine_statistics().num_prefill_tokens
    assert app.invoke(None, earlier.config)["findings"] == FINDINGS
    assert llm.engine_statistics().num_prefill_tokens - computed < len(DOCUMENT)


def test_another_document_on_the_same_thread_is_another_document(llm: ChatSwarmKV) -> None:
    """The old reference is replaced with the text."""
    app = fan_out(llm).compile(InMemorySaver(serde=SERIALIZER))
    first = app.invoke(INPUT, THREAD)
    second = app.invoke({"document": "A new lamp. " * 30}, THREAD)
    assert second["document_ref"]["digest"] != first["document_ref"]["digest"]
    assert second["findings"] == {
        name: text.replace("read", "UNREAD") for name, text in FINDINGS.items()
    }


def test_a_graph_and_its_nodes_can_be_copied(llm: ChatSwarmKV) -> None:
    """The copies use the same engine (G2)."""
    graph: StateGraph[Any, Any, Any, Any] = copy.deepcopy(fan_out(llm))
    assert graph.compile().invoke(INPUT)["findings"] == FINDINGS
    assert llm.engine_statistics().num_finished == 1 + len(NAMES)
