"""Graphs and models that the tests of this folder share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START
from langgraph.graph.state import StateGraph
from langgraph.runtime import Runtime

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.graph import node_run
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.request import RequestHandle
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

DOCUMENT = "The lamp has a hinge of brass. " * 20
"""620 characters, and as many tokens for `FakeEngine`."""


@contextmanager
def fake_llm(
    *,
    max_tokens: int = 8,
    num_cells: int = 4096,
    max_sequences: int = 32,
    n_ctx_train: int = 100_000,
    **engine_options: Any,
) -> Iterator[ChatSwarmKV]:
    """A chat model on a `FakeEngine` of its own; `llm.engine` is the `SwarmEngine`."""
    fake = FakeEngine(
        num_cells=num_cells,
        max_sequences=max_sequences,
        n_ctx_train=n_ctx_train,
        **engine_options,
    )
    # A lock of its own: tests that hold the engine in a step must not hold other processes too.
    locks = DeviceLockManager(across_processes=False)
    with SwarmEngine(fake, device_locks=locks) as engine:
        yield ChatSwarmKV(engine=engine, max_tokens=max_tokens)


def idle_llm(path: str = "no-such-file.gguf", **options: Any) -> ChatSwarmKV:
    """A chat model that is never called: nothing is loaded for it."""
    return ChatSwarmKV(model_path=path, **options)


def fan_out(
    llm: ChatSwarmKV,
    names: tuple[str, ...] = ("novelty", "claims", "ethics"),
    *,
    graph: StateGraph[Any, Any, Any, Any] | None = None,
    task: Callable[[str], Any] = "Tell me about {}.".format,
    **analyst_options: Any,
) -> StateGraph[Any, Any, Any, Any]:
    """START -> document -> each analyst -> END."""
    graph = StateGraph(SwarmState) if graph is None else graph
    graph.add_node("document", DocumentNode(llm))
    graph.add_edge(START, "document")
    for name in names:
        graph.add_node(name, AnalystNode(llm, task(name), **analyst_options))
        graph.add_edge("document", name)
        graph.add_edge(name, END)
    return graph


def echo_task(prompt: str) -> str:
    """A `FakeEngine` reply: the task, and whether its document was seen with it."""
    task = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
    return f"{'read' if DOCUMENT in prompt else 'UNREAD'}: {task}"


def listening(write: Callable[[Any], None], **metadata: Any) -> RunnableConfig:
    """A config as LangGraph passes it to a node, with `write` on the custom stream."""
    runtime: Runtime[None] = Runtime(stream_writer=write)
    return {"configurable": {"any_key": runtime}, "metadata": metadata}


def wait_until(condition: Callable[[], bool], *, timeout_seconds: float = 30) -> None:
    """Wait for another thread to make something true."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.002)


def is_idle(llm: ChatSwarmKV) -> bool:
    """Whether nothing waits or runs in the model's engine."""
    statistics = llm.engine_statistics()
    return statistics.num_waiting == statistics.num_running == statistics.cells_reserved == 0


def tell_every_chunk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Batch], None]:
    """Lift the throttle, and return an `on_decode` that waits at the second step for a listener.

    A node begins to listen just after it has submitted its prefill, and the fake engine is quick.
    """
    listening = threading.Event()
    register = RequestHandle.on_progress
    steps: list[int] = []

    def registered(handle: RequestHandle, callback: Any) -> None:
        register(handle, callback)
        listening.set()

    def wait(batch: Batch) -> None:
        steps.append(len(batch))
        assert len(steps) != 2 or listening.wait(60)

    monkeypatch.setattr(RequestHandle, "on_progress", registered)
    monkeypatch.setattr(node_run, "_PROGRESS_SECONDS", 0)
    return wait


class AfterDocument:
    """An `on_decode` that sees only what comes after the first prefill, which is the document's."""

    def __init__(self, hook: Callable[[Batch], None]) -> None:
        self._hook = hook
        self._is_prefilled = False

    def __call__(self, batch: Batch) -> None:
        if self._is_prefilled:
            self._hook(batch)
        self._is_prefilled = self._is_prefilled or bool(batch.output_rows)
