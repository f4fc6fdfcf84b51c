"""Streams that are left, calls that are cancelled, and event loops that must not stand still."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import EngineClosedError
from langchain_swarmkv.prompts.document import document_message
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.support.gates import PATIENCE_SECONDS, Steps
from tests.unit_tests.chat_support import chat, eventually, eventually_async, is_idle

LONG = {"max_tokens": 2000, "ignore_eos": True}
MakeEngine = Callable[..., SwarmEngine]


@pytest.fixture
def steps() -> Steps:
    """The gate in front of the engine's steps."""
    return Steps()


@pytest.fixture
def engine(steps: Steps) -> Iterator[SwarmEngine]:
    """An engine that takes only the steps that a test allows."""
    engine = SwarmEngine(FakeEngine(num_cells=20_000, max_batch_tokens=64, on_decode=steps))
    yield engine
    steps.set_free()
    engine.close()


@pytest.fixture
def llm(engine: SwarmEngine) -> ChatSwarmKV:
    return chat(engine, **LONG)


async def settle(steps: Steps, number: int) -> None:
    """Wait until the engine stands before the step after the ones that it was allowed."""
    await eventually_async(lambda: steps.count == number)


def assert_one_step_ends_it(steps: Steps, engine: SwarmEngine | None) -> None:
    """The step that the engine stands before is the last for a request that was left."""
    assert engine is not None
    before = steps.count
    steps.allow()
    eventually(lambda: is_idle(engine))
    assert steps.count <= before + 1


async def let_the_loop_clean_up() -> None:
    """The loop itself closes async generators that were abandoned, a few turns later."""
    for _ in range(50):
        await asyncio.sleep(0)


# -- C2: a stream that is not read to the end ----------------------------------------------------


def test_closing_a_stream_ends_its_request(llm: ChatSwarmKV, steps: Steps) -> None:
    """(i) Sequence and cells are free within one step, and the next call works."""
    stream = llm.stream("Hello")
    steps.allow(3)
    next(stream)
    next(stream)
    eventually(lambda: steps.count == 3)
    stream.close()  # type: ignore[attr-defined]
    assert_one_step_ends_it(steps, llm.engine)
    steps.set_free()
    assert llm.invoke("Again", max_tokens=5).content


def test_dropping_a_stream_ends_its_request(llm: ChatSwarmKV, steps: Steps) -> None:
    """(ii) The last reference is enough."""
    stream = llm.stream("Hello")
    steps.allow(3)
    next(stream)
    eventually(lambda: steps.count == 3)
    del stream
    gc.collect()
    assert_one_step_ends_it(steps, llm.engine)


def test_an_open_stream_does_not_block_other_calls(llm: ChatSwarmKV, steps: Steps) -> None:
    """(iii) A call from the same thread is answered while the stream is still held."""
    stream = llm.stream("Hello")
    steps.set_free()
    first = next(stream)
    assert llm.invoke("Something else", max_tokens=5).content
    rest = "".join(str(chunk.content) for chunk in stream)
    assert str(first.content) + rest == llm.invoke("Hello").content


async def test_leaving_an_async_stream_ends_its_request(llm: ChatSwarmKV, steps: Steps) -> None:
    """(iv) `async for` with break."""
    steps.allow(3)

    async def read_one() -> str:
        async for chunk in llm.astream("Hello"):
            await settle(steps, 3)
            return str(chunk.content)
        raise AssertionError("no chunk came")

    assert await read_one()
    await let_the_loop_clean_up()
    assert_one_step_ends_it(steps, llm.engine)
    steps.set_free()
    assert (await llm.ainvoke("Again", max_tokens=5)).content


async def test_an_async_stream_may_be_closed_by_another_task(
    llm: ChatSwarmKV, steps: Steps
) -> None:
    """(v) Nothing is bound to the task that began it."""
    stream = llm.astream("Hello")
    steps.allow(3)
    await asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await settle(steps, 3)
    await asyncio.create_task(stream.aclose())  # type: ignore[attr-defined]
    await let_the_loop_clean_up()
    assert_one_step_ends_it(steps, llm.engine)


def test_a_cancelled_stream_reports_no_usage(llm: ChatSwarmKV, steps: Steps) -> None:
    """Only an answer that came to its end has usage."""
    stream = llm.stream("Hello")
    steps.allow(4)
    chunks = [next(stream) for _ in range(3)]
    eventually(lambda: steps.count == 4)
    stream.close()  # type: ignore[attr-defined]
    assert all(chunk.usage_metadata is None for chunk in chunks)
    assert_one_step_ends_it(steps, llm.engine)


# -- C4: cancelling ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_cancelling_a_call_stops_its_work(
    llm: ChatSwarmKV, steps: Steps, num_cancels: int
) -> None:
    """At most one more step; CancelledError reaches the caller; cancelling twice is harmless."""
    task = asyncio.create_task(llm.ainvoke("Hello"))
    steps.allow(3)
    await settle(steps, 3)
    for _ in range(num_cancels):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_one_step_ends_it(steps, llm.engine)
    assert llm.engine_statistics().num_cancelled == 1


async def test_cancelling_one_branch_leaves_the_others_whole(
    llm: ChatSwarmKV, steps: Steps
) -> None:
    """Three of four branches answer as they do alone."""
    prompts = [f"Branch {i}" for i in range(4)]
    tasks = [asyncio.create_task(llm.ainvoke(prompt, max_tokens=300)) for prompt in prompts]

    def all_run() -> bool:
        steps.allow()
        return llm.engine_statistics().num_running == 4

    await eventually_async(all_run)
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    steps.set_free()
    for place in (0, 2, 3):
        alone = await llm.ainvoke(prompts[place], max_tokens=300)
        assert (await tasks[place]).content == alone.content
    assert llm.engine_statistics().num_cancelled == 1


@pytest.mark.parametrize("prefills", [True, False])
async def test_cancelling_during_prefill_stops_within_a_chunk(
    llm: ChatSwarmKV, steps: Steps, prefills: bool
) -> None:
    """A document of fifty chunks is not computed to its end for nobody."""
    document = document_message("x" * 64 * 50)
    call = llm.aprefill([document]) if prefills else llm.ainvoke([document, HumanMessage("?")])
    task = asyncio.create_task(call)  # type: ignore[arg-type,var-annotated]
    steps.allow(5)
    await settle(steps, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_one_step_ends_it(steps, llm.engine)


async def test_cancelling_before_anything_was_submitted_leaves_nothing(
    llm: ChatSwarmKV, steps: Steps
) -> None:
    """The thread that prepares the call goes on, but what it submits is given up at once."""
    task = asyncio.create_task(llm.ainvoke("Hello"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps.set_free()
    steps.count = 0
    await asyncio.get_running_loop().shutdown_default_executor()
    await eventually_async(lambda: is_idle(llm.engine))  # type: ignore[arg-type]
    assert steps.count < 100


def test_closing_the_engine_ends_its_calls(llm: ChatSwarmKV, steps: Steps) -> None:
    """A stream that is being read ends with a typed error, and later calls get it at once."""
    stream = llm.stream("Hello")
    steps.allow(2)
    next(stream)
    assert llm.engine is not None
    closing = threading.Thread(target=llm.engine.close)
    closing.start()
    eventually(lambda: llm.engine is not None and llm.engine.closed)
    steps.set_free()
    with pytest.raises(EngineClosedError):
        list(stream)
    with pytest.raises(EngineClosedError):
        llm.invoke("Hello")
    closing.join()


# -- C7: the event loop goes on ------------------------------------------------------------------


class Ticker:
    """Counts turns of the event loop, and holds the engine until there were enough of them."""

    def __init__(self, steps: Steps, per_step: int) -> None:
        self.count = 0
        self._steps = steps
        self._per_step = per_step

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.count += 1
            if self.count % self._per_step == 0:
                self._steps.allow()


@pytest.fixture
async def ticker(steps: Steps) -> AsyncIterator[Ticker]:
    """The engine gets one step for each ten ticks: a blocked loop would block it for ever."""
    ticker = Ticker(steps, per_step=10)
    task = asyncio.create_task(ticker.run())
    yield ticker
    task.cancel()


async def _read(llm: ChatSwarmKV, prompt: Any) -> str:
    return "".join([str(chunk.content) async for chunk in llm.astream(prompt, max_tokens=10)])


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.ainvoke("Hello", max_tokens=10),
        lambda llm: llm.abatch(["a", "b", "c"], max_tokens=10),
        lambda llm: llm.aprefill([document_message("x" * 64 * 8)]),
        lambda llm: _read(llm, "Hello"),
        lambda llm: _read(llm, [document_message("x" * 64 * 8), HumanMessage("?")]),
    ],
)
async def test_the_event_loop_goes_on_while_the_model_works(
    llm: ChatSwarmKV, steps: Steps, ticker: Ticker, call: Callable[[ChatSwarmKV], Any]
) -> None:
    """The engine waits for ticks of the loop, so it ends only if the loop ran all the time."""
    await asyncio.wait_for(call(llm), PATIENCE_SECONDS)
    assert steps.count >= 8
    assert ticker.count >= 10 * steps.count
