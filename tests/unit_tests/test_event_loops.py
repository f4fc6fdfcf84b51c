"""Event loops that must not stand still: nothing blocks on one, a load holds up nobody.

`blockbuster`, which `langgraph dev` uses too, raises where something on a loop may block: files,
locks that are held, sleeping. Its findings are kept as well, as whoever calls may swallow them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import blockbuster.blockbuster as detector
import pytest
from blockbuster import BlockingError, blockbuster_ctx
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langgraph.graph import START, StateGraph
from pydantic import BaseModel, Field

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.config import EngineConfig
from langchain_swarmkv.engine.contract import Engine
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import ConfigurationError, ModelError
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState
from langchain_swarmkv.prompts.document import document_message
from langchain_swarmkv.scheduling import engine_loop
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.chat_support import (
    PATIENCE_SECONDS,
    FakeModelFiles,
    eventually_async,
    fake_model_files,
)

TEXT = "Either party may terminate with three months' notice."
DOCUMENT = document_message(TEXT)


class Answer(BaseModel):
    """An answer."""

    ok: bool
    number: int = Field(ge=1, le=9)


@contextmanager
def nothing_blocks() -> Iterator[None]:
    """Fails if something blocks on an event loop in the block, whoever catches it."""
    found: list[str] = []

    class Noted(BlockingError):
        def __init__(self, function: str) -> None:
            super().__init__(function)
            found.append(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "BlockingError", Noted)
        with blockbuster_ctx():
            yield
    assert found == []


Make = Callable[..., ChatSwarmKV]


@pytest.fixture(params=["fake", "gguf"])
def model_path(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_llama: Path,
) -> Path:
    """A file whose engine is a fake, and a real one."""
    if request.param == "gguf":
        return tiny_llama
    return fake_model_files(tmp_path, monkeypatch).path()


async def invoke(llm: ChatSwarmKV, folder: Path) -> None:
    assert (await llm.ainvoke("Hi")).response_metadata["finish_reason"] in ("stop", "length")


async def invoke_with_a_cache(llm: ChatSwarmKV, folder: Path) -> None:
    cached = llm.model_copy(update={"cache": InMemoryCache()})
    first = await cached.ainvoke("Hi")
    again = await cached.ainvoke("Hi")
    assert again.content == first.content
    assert again.usage_metadata is not None
    await cached.aclose()


async def stream(llm: ChatSwarmKV, folder: Path) -> None:
    assert [chunk async for chunk in llm.astream("Hi")]
    assert [event async for event in llm.astream_events("Hi", version="v2")]


async def batch(llm: ChatSwarmKV, folder: Path) -> None:
    assert len(await llm.abatch(["Hi", "Ho"])) == 2
    result = await llm.agenerate([[HumanMessage("Hi")]], n=3, temperature=1.0)
    assert len(result.generations[0]) == 3


async def structure(llm: ChatSwarmKV, folder: Path) -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        bound = llm.with_structured_output(Answer, method=method)
        assert isinstance(await bound.ainvoke("Hi"), Answer)


async def call_tools(llm: ChatSwarmKV, folder: Path) -> None:
    bound = llm.bind_tools([Answer], tool_choice="any")
    assert (await bound.ainvoke("Hi")).tool_calls  # type: ignore[attr-defined]


async def log_probabilities_and_stops(llm: ChatSwarmKV, folder: Path) -> None:
    await llm.ainvoke("Hi", logprobs=2, stop=["<|im_start|>", "x"])


async def prefill(llm: ChatSwarmKV, folder: Path) -> None:
    ref = await llm.aprefill([DOCUMENT], persist=True)
    assert llm.document_of(ref) == TEXT
    assert llm.release(ref)


async def save_and_load(llm: ChatSwarmKV, folder: Path) -> None:
    ref = await llm.aprefill([DOCUMENT])
    await llm.asave(ref, folder / "document.kv")
    assert await llm.aload(folder / "document.kv") == ref


async def hand_off(llm: ChatSwarmKV, folder: Path) -> None:
    await llm.ahandoff([DOCUMENT, HumanMessage("Hi")])


async def run_a_graph(llm: ChatSwarmKV, folder: Path) -> None:
    graph = StateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("free", AnalystNode(llm, "What?", max_task_tokens=500))
    graph.add_node("held", AnalystNode(llm, "What?", schema=Answer))
    graph.add_edge(START, "document")
    graph.add_edge("document", "free")
    graph.add_edge("document", "held")
    app = graph.compile()
    state = await app.ainvoke({"document": TEXT})
    assert isinstance(state["findings"]["held"], Answer)
    assert [event async for event in app.astream({"document": TEXT}, stream_mode="custom")]


async def ask_what_it_is(llm: ChatSwarmKV, folder: Path) -> None:
    """What LangChain asks on its loops."""
    assert llm.profile is not None
    assert llm.profile["max_input_tokens"] > 0
    assert llm._get_ls_params()["ls_provider"] == "swarmkv"
    assert llm._get_llm_string()
    assert llm._get_invocation_params()["model_identity"] is not None
    assert llm.model_name
    assert repr(llm)


async def copy(llm: ChatSwarmKV, folder: Path) -> None:
    async with llm.model_copy(update={"max_tokens": 2}) as other:
        await other.bind(stop=["x"]).ainvoke("Hi")
    await llm.with_retry().ainvoke("Hi")


async def count(llm: ChatSwarmKV, folder: Path) -> None:
    """Once the vocabulary is there: LangChain counts on its loops."""
    await llm.ainvoke("Hi")
    assert llm.get_num_tokens("Hi") > 0
    assert llm.get_num_tokens_from_messages([HumanMessage("Hi")]) > 0
    assert llm.engine_statistics().num_finished


SCENARIOS: list[Callable[[ChatSwarmKV, Path], Awaitable[None]]] = [
    invoke,
    invoke_with_a_cache,
    stream,
    batch,
    structure,
    call_tools,
    log_probabilities_and_stops,
    prefill,
    save_and_load,
    hand_off,
    run_a_graph,
    ask_what_it_is,
    copy,
    count,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_nothing_blocks_an_event_loop(
    scenario: Callable[[ChatSwarmKV, Path], Awaitable[None]], model_path: Path, tmp_path: Path
) -> None:
    """Made, loaded by the first call, called again, and closed: all of it on one loop."""
    with nothing_blocks():
        async with ChatSwarmKV(
            model_path=model_path,
            n_ctx=4096,
            max_tokens=300,
            n_threads=1,
            snapshot_dir=tmp_path / "kv",
        ) as llm:
            for _ in ("cold", "warm"):
                await scenario(llm, tmp_path)


async def test_the_detector_sees_what_blocks(model_path: Path) -> None:
    """Of ours, too: a count that must read the vocabulary first."""
    llm = ChatSwarmKV(model_path=model_path)
    with (
        pytest.raises(AssertionError, match=r"os\.stat"),
        nothing_blocks(),
        pytest.raises(BlockingError),
    ):
        llm.get_num_tokens("Hi")


async def test_a_given_engine_does_not_block_either(tmp_path: Path) -> None:
    """Whose owner closes it elsewhere."""
    with SwarmEngine(FakeEngine(num_cells=8192), snapshot_dir=tmp_path / "kv") as engine:
        with nothing_blocks():
            async with ChatSwarmKV(engine=engine, max_tokens=300) as llm:
                for scenario in SCENARIOS:
                    if scenario is not copy:
                        await scenario(llm, tmp_path)
        assert not engine.closed


# -- loads -----------------------------------------------------------------------------------------


class GatedLoad:
    """A load that ends when it may."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.error: Exception | None = None

    def __call__(self, config: EngineConfig) -> Engine:
        self.entered.set()
        assert self.gate.wait(PATIENCE_SECONDS), "the load was not let on"
        if self.error is not None:
            raise self.error
        return FakeEngine(num_cells=config.n_ctx)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeModelFiles:
    return fake_model_files(tmp_path, monkeypatch)


@pytest.fixture
async def load(monkeypatch: pytest.MonkeyPatch, files: FakeModelFiles) -> AsyncIterator[GatedLoad]:
    load = GatedLoad()
    monkeypatch.setattr(engine_loop, "open_engine", load)
    yield load
    load.gate.set()


def open_tasks(llm: ChatSwarmKV, number: int) -> list[asyncio.Task[Any]]:
    """Calls of all kinds that wait for the load."""
    kinds = (
        lambda: llm.ainvoke("Hi"),
        lambda: llm.aprefill([DOCUMENT]),
        lambda: llm.ahandoff([DOCUMENT]),
        lambda: anext(llm.astream("Hi")),
    )
    return [asyncio.ensure_future(kinds[place % len(kinds)]()) for place in range(number)]


async def test_calls_that_wait_for_a_load_hold_up_nobody(
    load: GatedLoad, files: FakeModelFiles
) -> None:
    """Neither the loop's threads, nor another model's calls, nor a copy; one thread waits."""
    with SwarmEngine(FakeEngine()) as engine:
        other = ChatSwarmKV(engine=engine, max_tokens=2)
        await other.ainvoke("Hi")  # now the threads for short work are there
        llm = ChatSwarmKV(model_path=files.path(), max_tokens=2)
        tasks = open_tasks(llm, 80)
        await eventually_async(load.entered.is_set)
        for _ in range(3):
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), PATIENCE_SECONDS)
            await asyncio.wait_for(other.ainvoke("Hi"), PATIENCE_SECONDS)
        waiting = [t for t in threading.enumerate() if t.name == "swarmkv-beside-loop"]
        assert len(waiting) == 1
        copied = llm.model_copy(update={"max_tokens": 3})
        moved = llm.model_copy(update={"n_ctx": 512})
        assert not any(task.done() for task in tasks)
        load.gate.set()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
        for model in (copied, moved, llm):
            await model.aclose()


async def test_calls_that_are_cancelled_while_they_wait_send_nothing(
    load: GatedLoad, files: FakeModelFiles
) -> None:
    """The load goes on, for others; who did not give up is answered."""
    async with ChatSwarmKV(model_path=files.path(), max_tokens=2) as llm:
        tasks = open_tasks(llm, 8)
        await eventually_async(load.entered.is_set)
        for task in tasks[:-1]:
            task.cancel()
        await asyncio.gather(*tasks[:-1], return_exceptions=True)
        load.gate.set()
        await asyncio.wait_for(tasks[-1], PATIENCE_SECONDS)
        seen = llm.engine_statistics()
        assert seen.num_finished + seen.num_cancelled + seen.num_running == 1


async def test_a_load_that_fails_fails_all_who_wait(load: GatedLoad, files: FakeModelFiles) -> None:
    """The next call tries again."""
    async with ChatSwarmKV(model_path=files.path(), max_tokens=2) as llm:
        tasks = open_tasks(llm, 4)
        await eventually_async(load.entered.is_set)
        load.error = ModelError("broken")
        load.gate.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in ended] == [ModelError] * 4
        load.error = None
        await llm.ainvoke("Hi")


async def test_a_wrong_prompt_is_told_before_the_load(
    load: GatedLoad, files: FakeModelFiles
) -> None:
    async with ChatSwarmKV(model_path=files.path()) as llm:
        with pytest.raises(ConfigurationError, match="typo"):
            await llm.ainvoke("Hi", typo=1)
        assert not load.entered.is_set()


# -- closing ---------------------------------------------------------------------------------------


async def test_aclose_frees_the_engine_and_comes_back_without_blocking(
    files: FakeModelFiles,
) -> None:
    """Twice is harmless; after `async with`, also one that an error leaves, it is closed."""
    llm = ChatSwarmKV(model_path=files.path(), max_tokens=2)
    await llm.ainvoke("Hi")
    engine = llm._seat.loaded_engine
    assert engine is not None
    await llm.aclose()
    await llm.aclose()
    assert engine.closed
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with ChatSwarmKV(model_path=files.path(), max_tokens=2) as second:
            await second.ainvoke("Hi")
            engine = second._seat.loaded_engine
            raise ZeroDivisionError
    assert engine is not None
    assert engine.closed


async def test_the_loop_runs_while_a_model_closes(
    files: FakeModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waits for the step that runs; whoever gives up waiting does not stop it."""
    gate, entered = threading.Event(), threading.Event()

    def step(batch: object) -> None:
        entered.set()
        assert gate.wait(PATIENCE_SECONDS)

    files.options["on_decode"] = step
    llm = ChatSwarmKV(model_path=files.path(), max_tokens=2)
    call = asyncio.ensure_future(llm.ainvoke("Hi"))
    await eventually_async(entered.is_set)
    engine = llm._seat.loaded_engine
    assert engine is not None
    closing = asyncio.ensure_future(llm.aclose())
    await eventually_async(lambda: engine.closed)
    assert not closing.done()
    closing.cancel()
    gate.set()
    await asyncio.gather(call, closing, return_exceptions=True)
    await eventually_async(lambda: not engine._loop._thread.is_alive())


# -- the key of LangChain's cache ------------------------------------------------------------------


async def test_a_cache_is_asked_with_the_files_as_they_are(files: FakeModelFiles) -> None:
    """Also on a loop, where nobody looks at them: a file that was replaced is another model."""
    cache = InMemoryCache()
    path = files.path()
    async with ChatSwarmKV(model_path=path, max_tokens=2, cache=cache) as llm:
        await llm.ainvoke("Hi")
        await llm.ainvoke("Hi")
        assert len(cache._cache) == 1
        sync_key = await asyncio.to_thread(llm._get_llm_string)
        assert llm._get_llm_string() == sync_key
        path.write_bytes(b"GGUF another and longer")
        await llm.ainvoke("Hi")
        assert len(cache._cache) == 2
