"""The engine as callers see it: threads, event loops, cancelling, closing, forking, ending."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from langchain_swarmkv.config import EngineConfig, SamplingParams
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import END_ID, START_ID, FakeEngine
from langchain_swarmkv.errors import (
    ConfigurationError,
    ContextBudgetError,
    DecodeFatalError,
    EngineClosedError,
    GrammarError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestCancelledError,
    RequestTimeoutError,
)
from langchain_swarmkv.scheduling import engine_loop
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.request import PrefillProgress, RequestHandle, TokenChunk
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.support.gates import Gate, Steps
from tests.support.processes import WITHOUT_LANGCHAIN
from tests.unit_tests.scheduling.support import (
    WAIT_SECONDS,
    answer_alone,
    answer_of,
    open_swarm,
    piece,
)

DOCUMENT = piece("Document", 2000)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def engine() -> Iterator[SwarmEngine]:
    with open_swarm(FakeEngine(num_cells=8192)) as swarm:
        yield swarm


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def gated(gate: Gate) -> Iterator[SwarmEngine]:
    """An engine whose first decode waits for the gate."""
    swarm = open_swarm(FakeEngine(num_cells=8192, on_decode=gate))
    yield swarm
    gate.open()
    swarm.close()


@pytest.fixture
def steps() -> Steps:
    """The permits of `stepwise`."""
    return Steps()


@pytest.fixture
def stepwise(steps: Steps) -> Iterator[SwarmEngine]:
    """An engine that takes only the steps that a test allows."""
    swarm = open_swarm(FakeEngine(num_cells=8192, on_decode=steps))
    yield swarm
    steps.set_free()
    swarm.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def pass_a_step(engine: SwarmEngine) -> None:
    """Return when the engine thread has been between two steps twice: one step at least is over."""
    engine.check()
    engine.check()


def drop(held: list[Any]) -> None:
    """Let go of everything in the list, which must hold the last references."""
    held.clear()
    gc.collect()


def assert_right(handle: RequestHandle, tokens: list[int], params: SamplingParams) -> None:
    assert answer_of(handle.result(WAIT_SECONDS)) == answer_alone(tokens, params)


def assert_usable(engine: SwarmEngine) -> None:
    """Nothing runs any more, nothing is held, and the next request is served."""
    statistics = engine.statistics()
    assert statistics.num_running == statistics.num_waiting == 0
    assert statistics.cells_reserved == 0
    assert statistics.sequences_used == statistics.num_resident_prefixes
    tokens = piece("next", 50)
    assert_right(engine.submit(tokens, SHORT), tokens, SHORT)
    engine.check()


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_cut", [True, False])
def test_threads_that_come_together_share_one_prefill(
    can_cut: bool, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    """Eight threads at the same moment, 2,000 shared tokens, cold: computed once."""
    fake = FakeEngine(can_cut=can_cut, on_decode=gate)
    prompts = [[*DOCUMENT, *piece(name, 20)] for name in "abcdefgh"]
    start, submitted = threading.Barrier(8), threading.Barrier(9)
    with open_swarm(fake) as engine:

        def call(tokens: list[int]) -> None:
            start.wait(WAIT_SECONDS)
            handle = engine.submit(tokens, SHORT)
            submitted.wait(WAIT_SECONDS)
            assert_right(handle, tokens, SHORT)

        calls = [pool.submit(call, tokens) for tokens in prompts]
        submitted.wait(WAIT_SECONDS)
        gate.open()
        for one in calls:
            one.result(WAIT_SECONDS)
        statistics = engine.statistics()
        assert statistics.num_prefill_tokens == 2000 + 8 * 20
        assert fake.decoded_tokens == 2000 + 8 * 20 + statistics.num_decode_tokens
        assert statistics.num_finished == 8


def test_threads_and_loops_at_once(engine: SwarmEngine, pool: ThreadPoolExecutor) -> None:
    """Sync and async readers of 32 requests, in eight threads and four loops: all right."""
    prompts = [[*DOCUMENT[: 100 * (i % 4)], *piece(f"{i}-", 20)] for i in range(32)]

    def read_sync(tokens: list[int]) -> str:
        return "".join(chunk.text for chunk in engine.submit(tokens, SHORT))

    async def read_async(tokens: list[int]) -> str:
        return "".join([chunk.text async for chunk in engine.submit(tokens, SHORT)])

    async def read_all(some: list[list[int]]) -> list[str]:
        return await asyncio.gather(*map(read_async, some))

    sync = [pool.submit(read_sync, tokens) for tokens in prompts[:16]]
    in_loops = [
        pool.submit(asyncio.run, read_all(prompts[16 + 4 * i : 20 + 4 * i])) for i in range(4)
    ]
    texts = [one.result(WAIT_SECONDS) for one in sync]
    texts += [text for one in in_loops for text in one.result(WAIT_SECONDS)]
    assert texts == [answer_alone(tokens, SHORT).text for tokens in prompts]
    assert_usable(engine)


def test_a_stream_equals_its_result(engine: SwarmEngine) -> None:
    """The chunks together, the result, and a second reading; the handle may be the loop's only."""
    handle = engine.submit(DOCUMENT[:50], SHORT)
    chunks = list(handle)
    result = handle.result()
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
    assert chunks[-1].finish_reason == result.finish_reason
    assert list(handle) == chunks
    assert list(engine.submit(DOCUMENT[:50], SHORT)) == chunks


def test_the_engine_lives_as_long_as_a_handle() -> None:
    """Dropping the engine's last name does not stop what is still awaited."""
    held = [open_swarm().submit(DOCUMENT[:50], SHORT)]
    gc.collect()
    assert_right(held[0], DOCUMENT[:50], SHORT)
    with pytest.warns(ResourceWarning, match="was not closed"):
        drop(held)


async def test_waiting_leaves_the_event_loop_free(gated: SwarmEngine, gate: Gate) -> None:
    """C7: while a result and a stream are awaited, another task runs; it opens the gate."""
    handle = gated.submit(DOCUMENT[:50], SHORT)

    async def read() -> str:
        return "".join([chunk.text async for chunk in handle])

    waiting = [asyncio.create_task(read()), asyncio.create_task(read())]
    result = asyncio.create_task(handle.aresult())
    await asyncio.sleep(0)
    assert not result.done()
    gate.open()
    text = (await asyncio.wait_for(result, WAIT_SECONDS)).text
    assert await asyncio.gather(*waiting) == [text, text]


async def test_giving_up_waiting_does_not_cancel(gated: SwarmEngine, gate: Gate) -> None:
    """A timeout around `aresult` ends the waiting; the request goes on, as documented."""
    handle = gated.submit(DOCUMENT[:50], SHORT)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(handle.aresult(), 0.001)
    gate.open()
    result = await asyncio.wait_for(handle.aresult(), WAIT_SECONDS)
    assert answer_of(result) == answer_alone(DOCUMENT[:50], SHORT)


def test_statistics_are_consistent_at_any_moment(
    engine: SwarmEngine, pool: ThreadPoolExecutor
) -> None:
    """Read in a loop while others submit and cancel: never a contradiction in one picture."""
    at_end = threading.Event()

    def watch() -> int:
        pictures = 0
        while not at_end.is_set():
            now = engine.statistics()
            assert now.cells_used + now.cells_reserved <= now.cells_total
            assert now.cells_idle + now.cells_pinned <= now.cells_used
            assert now.num_running <= now.peak_running <= now.sequences_total
            assert now.num_running + now.num_resident_prefixes == now.sequences_used
            assert now.prefix_cache_hits <= now.prefix_cache_queries
            pictures += 1
        return pictures

    watcher = pool.submit(watch)
    for i in range(20):
        handles = [engine.submit([*DOCUMENT[:200], *piece(name, 20)], SHORT) for name in "abcd"]
        handles[i % 4].cancel()
        for handle in handles:
            try:
                handle.result(WAIT_SECONDS)
            except RequestCancelledError:
                pass
    at_end.set()
    assert watcher.result(WAIT_SECONDS) > 0
    assert_usable(engine)


# -- submitting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([1, 259], "token id 259 is outside the vocabulary of 259"),
        ([1, -1], "token id -1 is outside"),
        ([1.5], "must be integers"),
        (["1"], "must be integers"),
        ([[1, 2]], "no tokens"),
        ([1, [2, 3]], "must be integers"),
        (3, "no tokens"),
        ([1 << 70], "must be integers"),
        (None, "must be integers"),
    ],
)
def test_wrong_tokens_are_refused_at_once(engine: SwarmEngine, tokens: Any, message: str) -> None:
    """A typed error from `submit` itself, which says what is wrong."""
    with pytest.raises(InvalidRequestError, match=message):
        engine.submit(tokens)


def test_token_ids_may_be_any_integers(engine: SwarmEngine) -> None:
    """A tuple, a range, numpy arrays of any width."""
    expected = answer_alone(range(65, 80), SHORT)
    for tokens in (tuple(range(65, 80)), range(65, 80), np.arange(65, 80, dtype=np.int16)):
        assert answer_of(engine.submit(tokens, SHORT).result(WAIT_SECONDS)) == expected


def test_a_guide_decides_what_an_answer_is() -> None:
    """The model writes its newlines wherever it may, and the numbers are those before the guide."""
    guide = 'start: "{" /\\s{0,3}/ "a" /\\s{0,3}/ "}"'
    with open_swarm(FakeEngine(reply="\n" * 100)) as engine:
        params = SamplingParams(guide=guide, logprobs=1)
        result = engine.submit([1, 2], params).result(WAIT_SECONDS)
        again = engine.submit([1, 2], params).result(WAIT_SECONDS)
    assert result.text == again.text == "{\n\n\na\n\n\n}"
    assert result.finish_reason == "stop"
    assert all(told.top[0][1] >= told.logprob for told in result.logprobs)
    assert any(told.top[0][0] != told.token_id for told in result.logprobs)


@pytest.mark.parametrize("marks", [{}, {START_ID: "\ud800", END_ID: "\ud801"}])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|im_start|>", "abc"),
        ("c<|im_start|>", "ab"),
        ("<|im_start|>d", "abc"),
        ("c<|im_start|>d", "ab"),
        ("e<|im_end|>", "abc{mark}d"),
        ("<", "abc{mark}de"),
    ],
)
def test_a_stop_string_with_a_control_token_stops(
    marks: dict[int, str], stop: str, text: str
) -> None:
    """I4: also one that ends answers by itself, and beside marks; the stop is not told."""
    guide = "start: /abc/ <|im_start|> /de/"
    with open_swarm(FakeEngine()) as engine:
        params = SamplingParams(guide=guide, stop=(stop,))
        handle = engine.submit([1, 2], params, marks=marks)
        pieces = [chunk.text for chunk in handle]
        result = handle.result(WAIT_SECONDS)
    assert result.text == text.format(mark=marks.get(START_ID, ""))
    assert "".join(pieces) == result.text
    assert result.finish_reason == "stop"


def test_a_stop_string_outdoes_ignore_eos() -> None:
    """I4: an end that is ignored, and named as a stop string."""
    wanted: dict[str, Any] = {"logit_bias": {END_ID: 1e6}, "max_tokens": 5, "ignore_eos": True}
    with open_swarm(FakeEngine()) as engine:
        free = engine.submit([1, 2], SamplingParams(**wanted)).result(WAIT_SECONDS)
        held = engine.submit([1, 2], SamplingParams(stop=("<|im_end|>",), **wanted)).result(
            WAIT_SECONDS
        )
    assert (free.text, free.token_ids, free.finish_reason) == ("", (END_ID,) * 5, "length")
    assert (held.text, held.token_ids, held.finish_reason) == ("", (END_ID,), "stop")


def test_marks_show_control_tokens_in_the_text() -> None:
    """At their places, in chunks and result; one that ends the answer is not written."""
    guide = "start: /[a]é/ <|im_start|> /b/ <|im_start|>"
    marks = {START_ID: "\ud800", END_ID: "\ud801"}
    with open_swarm(FakeEngine()) as engine:
        params = SamplingParams(guide=guide)
        plain = engine.submit([1, 2], params).result(WAIT_SECONDS)
        handle = engine.submit([1, 2], params, marks=marks)
        assert "".join(chunk.text for chunk in handle) == "aé\ud800b\ud800"
        marked = handle.result(WAIT_SECONDS)
    assert plain.text == "aéb"
    assert marked.text == "aé\ud800b\ud800"
    assert marked.token_ids == plain.token_ids
    assert marked.finish_reason == "stop"


def test_other_wrong_arguments_are_refused_at_once(engine: SwarmEngine) -> None:
    """A deadline that is no time; grammars, guides and marks that are none; a negative store."""
    for seconds in (0, -1.0, math.nan):
        with pytest.raises(InvalidRequestError, match="timeout_seconds"):
            engine.submit([1], timeout_seconds=seconds)
    nested = "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000
    with pytest.raises(GrammarError):
        engine.submit([1], SamplingParams(grammar=nested))
    with pytest.raises(GrammarError, match="unknown name"):
        engine.submit([1], SamplingParams(guide="start: missing"))
    for mark in ("", "ab", 3):
        with pytest.raises(InvalidRequestError, match="mark of token 257"):
            engine.submit([1], marks={257: mark})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="snapshot_memory_bytes=-1"):
        SwarmEngine(FakeEngine(), snapshot_memory_bytes=-1)
    assert_usable(engine)


@pytest.mark.parametrize(
    ("limits", "limit_name"),
    [
        ({"num_cells": 512, "n_ctx_train": 4096}, "n_ctx"),
        ({"num_cells": 4096, "n_ctx_train": 512}, "n_ctx_train"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(limits: dict[str, int], limit_name: str) -> None:
    """One token either side of the limit, with the numbers and what would fit."""
    with open_swarm(FakeEngine(**limits)) as engine:
        params = SamplingParams(max_tokens=212, ignore_eos=True)
        assert_right(engine.submit(DOCUMENT[:300], params), DOCUMENT[:300], params)
        with pytest.raises(ContextBudgetError) as caught:
            engine.submit(DOCUMENT[:300], SamplingParams(max_tokens=213))
        assert caught.value.facts == {
            "needed_tokens": 513,
            "limit_tokens": 512,
            "limit_name": limit_name,
        }
        assert "300 tokens" in str(caught.value)
        assert "max_tokens=212 would fit" in str(caught.value)
        with pytest.raises(ContextBudgetError, match="Even without an answer"):
            engine.submit(DOCUMENT[:600], SamplingParams(max_tokens=0))
        assert_usable(engine)


def test_a_branch_that_cannot_fit_does_not_harm_the_others() -> None:
    """D6: pool 512, document 300, branches of 20, 20 and 400: the last is refused, alone."""
    with open_swarm(FakeEngine(num_cells=512)) as engine:
        document = DOCUMENT[:300]
        engine.submit(document, SamplingParams(max_tokens=0), pin="document").result(WAIT_SECONDS)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        prompts = [[*document, 1], [*document, 2]]
        handles = [engine.submit(tokens, params, keep_prefix=False) for tokens in prompts]
        with pytest.raises(ContextBudgetError, match=r"max_tokens=211 would fit"):
            engine.submit([*document, 3], SamplingParams(max_tokens=400))
        for handle, tokens in zip(handles, prompts, strict=True):
            assert_right(handle, tokens, params)


def test_pins_and_salts(engine: SwarmEngine) -> None:
    """C6, H2: resident under its salt only; pinned until released; one release more is harmless."""
    prefill = SamplingParams(max_tokens=0)
    document = DOCUMENT[:100]
    assert not engine.is_resident(document)
    for _ in range(2):
        engine.submit(document, prefill, pin="key", cache_salt="a").result(WAIT_SECONDS)
    assert engine.is_resident(document, cache_salt="a")
    assert engine.is_resident(document[:40], cache_salt="a")
    assert not engine.is_resident([*document, 1], cache_salt="a")
    assert not engine.is_resident(document)
    assert engine.submit(document, SHORT).result(WAIT_SECONDS).statistics.num_cached_tokens == 0
    statistics = engine.statistics()
    assert (statistics.num_pinned_prefixes, statistics.cells_pinned) == (1, 100)
    assert not engine.release("other", cache_salt="a")
    assert not engine.release("key")
    assert engine.release("key", cache_salt="a")
    assert not engine.release("key", cache_salt="a")
    assert engine.statistics().cells_pinned == 0
    assert engine.is_resident(document, cache_salt="a")
    with pytest.raises(InvalidRequestError):
        engine.is_resident([])


@pytest.mark.parametrize("pin", [["a"], 1, b"a"])
def test_a_pin_that_is_no_string_is_refused(engine: SwarmEngine, pin: Any) -> None:
    """By the caller's thread, not by the engine's, which serves others."""
    with pytest.raises(InvalidRequestError, match="pin"):
        engine.submit([1, 2, 3], SHORT, pin=pin)
    assert_usable(engine)


def test_nobody_waits_for_ever_when_the_cache_fails() -> None:
    """Whatever is raised while a request leaves: it and all others get an error."""

    class Broken(FakeEngine):
        def clear(self, seq_id: int) -> None:
            raise ZeroDivisionError("a fault")

    with open_swarm(Broken()) as engine:
        handles = [engine.submit([n, 2, 3], SHORT, keep_prefix=False) for n in range(4)]
        for handle in handles:
            with pytest.raises(EngineClosedError, match="ZeroDivisionError"):
                handle.result(WAIT_SECONDS)


def test_a_prefix_that_cannot_be_copied_is_computed_again() -> None:
    """The host has no memory for it: it is gone, and the engine goes on."""

    class Full(FakeEngine):
        def save(self, seq_id: int) -> bytes:
            raise MemoryError

    with open_swarm(Full(num_cells=500)) as engine:
        for name in ("first", "second", "first"):
            tokens = [*piece(name, 300), 1]
            assert_right(engine.submit(tokens, SHORT), tokens, SHORT)
        engine.check()


def test_a_reset_forgets_what_nobody_holds() -> None:
    """Idle prefixes go, spilled ones too; a pin and what runs stay, and answers are right."""
    prefill, long = SamplingParams(max_tokens=0), SamplingParams(max_tokens=200, ignore_eos=True)
    pinned, idle, spilled = DOCUMENT[:300], piece("idle", 300), piece("spilled", 600)
    with open_swarm(FakeEngine(num_cells=1000)) as engine:
        engine.submit(spilled, prefill).result(WAIT_SECONDS)
        engine.submit(pinned, prefill, pin="key").result(WAIT_SECONDS)
        engine.submit(idle, prefill).result(WAIT_SECONDS)
        assert engine.statistics().store_bytes > 0
        assert engine.is_resident(idle)
        engine.reset_prefix_cache()
        assert engine.statistics().store_bytes == 0
        assert not engine.is_resident(idle)
        assert engine.is_resident(pinned)
        running = engine.submit([*pinned, 1], long)
        next(iter(running))
        engine.reset_prefix_cache()
        assert_right(running, [*pinned, 1], long)
        for tokens in (idle, spilled):
            handle = engine.submit([*tokens, 1], SHORT)
            assert_right(handle, [*tokens, 1], SHORT)
            assert handle.statistics.num_cached_tokens == 0
        engine.check()
    with pytest.raises(EngineClosedError):
        engine.reset_prefix_cache()


def test_progress_can_be_watched(gated: SwarmEngine, gate: Gate) -> None:
    """By a callback after each chunk, and by looking; the callback may use the engine."""
    handle = gated.submit(DOCUMENT[:1000], SHORT)
    assert gate.entered.wait(WAIT_SECONDS)
    assert handle.progress == PrefillProgress(1000, 0, 0)
    seen: list[PrefillProgress] = []
    more: list[RequestHandle] = []

    def listen(progress: PrefillProgress) -> None:
        seen.append(progress)
        if len(seen) == 1:
            assert gated.statistics().num_running == 1
            gated.check()
            more.append(gated.submit(piece("x", 20), SHORT))

    handle.on_progress(listen)
    gate.open()
    assert_right(handle, DOCUMENT[:1000], SHORT)
    assert seen == [PrefillProgress(1000, 0, 512), PrefillProgress(1000, 0, 1000)]
    assert handle.progress == seen[-1]
    assert_right(more[0], piece("x", 20), SHORT)


def wait_by_result(handle: RequestHandle) -> object:
    return handle.result()


def wait_a_little(handle: RequestHandle) -> object:
    return handle.result(timeout_seconds=0.001)


def wait_by_reading(handle: RequestHandle) -> object:
    return list(handle)


def wait_on_a_loop(handle: RequestHandle) -> object:
    return asyncio.run(handle.aresult())


def wait_by_reading_on_a_loop(handle: RequestHandle) -> object:
    async def read() -> object:
        return [chunk async for chunk in handle]

    return asyncio.run(read())


WAITS = [
    wait_by_result,
    wait_a_little,
    wait_by_reading,
    wait_on_a_loop,
    wait_by_reading_on_a_loop,
]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("whose", ["its own", "a new one", "another engine's"])
def test_a_callback_that_would_wait_is_told_so(
    gated: SwarmEngine, gate: Gate, wait: Callable[[RequestHandle], object], whose: str
) -> None:
    """Nobody else could end its wait; what has ended can be read, and the engine goes on."""
    first = gated.submit(DOCUMENT[:20], SHORT)
    assert gate.entered.wait(WAIT_SECONDS)
    num_told = 0
    with open_swarm(FakeEngine(num_cells=4096)) as other:
        handle = gated.submit(DOCUMENT[:1000], SHORT)
        handles = {
            "its own": lambda: handle,
            "a new one": lambda: gated.submit(piece("x", 20), SHORT),
            "another engine's": lambda: other.submit(piece("y", 2000), LONG),
        }

        def listen(_: PrefillProgress) -> None:
            nonlocal num_told
            made = handles[whose]()
            with pytest.raises(InvalidRequestError, match="progress callback"):
                wait(made)
            num_told += 1
            if made is not handle:
                made.cancel()

        handle.on_progress(listen)
        gate.open()
        assert_right(handle, DOCUMENT[:1000], SHORT)
        assert num_told
        assert_right(first, DOCUMENT[:20], SHORT)
        wait(first)  # here it may
        pass_a_step(gated)
        assert_usable(gated)


def test_what_has_ended_can_be_read_in_a_callback(engine: SwarmEngine) -> None:
    """Also as a stream, and on a loop: nothing waits."""
    first = engine.submit(DOCUMENT[:50], SHORT)
    first.result(WAIT_SECONDS)
    second = engine.submit(piece("x", 900), SHORT)
    seen: list[object] = []
    second.on_progress(lambda _: seen.extend(wait(first) for wait in WAITS))
    second.result(WAIT_SECONDS)
    assert len(seen) >= len(WAITS)


def test_a_callback_may_use_what_waits_for_no_step(tmp_path: Path) -> None:
    """Flushing, inserting and releasing; closing another engine, and no more than that of it."""
    other = open_swarm(FakeEngine(num_cells=4096))
    with open_swarm(FakeEngine(num_cells=8192), snapshot_dir=tmp_path) as engine:
        snapshot = engine.snapshot(DOCUMENT[:50])

        def listen(_: PrefillProgress) -> None:
            engine.flush()
            engine.insert(snapshot)
            engine.release("none")
            engine.reset_prefix_cache()
            if not other.closed:
                with pytest.raises(InvalidRequestError, match="another engine's thread"):
                    other.reset_prefix_cache()
            other.close()

        handle = engine.submit(piece("x", 900), SHORT)
        handle.on_progress(listen)
        assert_right(handle, piece("x", 900), SHORT)
    other.close()


class Arrivals:
    """In place of the engine's condition: time passes only in waits, and requests never end."""

    def __init__(self, loop: engine_loop.EngineLoop, every_seconds: float) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._loop = loop
        self._every_seconds = every_seconds

    def wait(self, timeout_seconds: float) -> None:
        self.waits.append(timeout_seconds)
        self.now += min(timeout_seconds, self._every_seconds)
        if timeout_seconds >= self._every_seconds:
            self._loop._inbox.append(Any)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("every_seconds", "num_waits"), [(0.004, 3), (0.009, 2), (0.02, 1), (0.0001, 63)]
)
def test_gathering_ends_under_a_stream_of_arrivals(
    monkeypatch: pytest.MonkeyPatch, every_seconds: float, num_waits: int
) -> None:
    """10 ms after the first request, or with as many as can run, whatever keeps coming."""
    with open_swarm(FakeEngine(num_cells=8192, max_sequences=64)) as engine:
        loop = engine_loop.EngineLoop(
            engine._loop.engine, engine._loop._stores, DeviceLockManager()
        )
        loop.engine = engine._loop.engine
        arrivals = Arrivals(loop, every_seconds)
        monkeypatch.setattr(loop, "_changed", arrivals)
        monkeypatch.setattr(engine_loop, "monotonic", lambda: arrivals.now)
        loop._inbox.append(Any)  # type: ignore[arg-type]
        loop._gather()
        monkeypatch.undo()
    assert len(arrivals.waits) == num_waits
    assert arrivals.now <= engine_loop._GATHER_SECONDS + 1e-9


def test_check_finds_a_difference(engine: SwarmEngine) -> None:
    """When the cache and the books differ, `check` says so, and the engine goes on."""
    engine.submit(DOCUMENT[:50], SHORT, pin="key").result(WAIT_SECONDS)
    engine.check()
    engine._loop.engine.clear(0)
    with pytest.raises(AssertionError, match="sequence 0"):
        engine.check()
    assert not engine.closed


# -- streams that are not read to the end ----------------------------------------------------------


def leave_by_close(engine: SwarmEngine) -> None:
    stream: Any = iter(engine.submit(DOCUMENT[:50], LONG))
    next(stream)
    next(stream)
    stream.close()


def leave_by_dropping(engine: SwarmEngine) -> None:
    stream = iter(engine.submit(DOCUMENT[:50], LONG))
    next(stream)
    next(stream)
    del stream


def leave_by_block(engine: SwarmEngine) -> None:
    with engine.submit(DOCUMENT[:50], LONG) as handle:
        next(iter(handle))


def leave_by_break(engine: SwarmEngine) -> None:
    for _ in engine.submit(DOCUMENT[:50], LONG):
        break


def leave_by_async_break(engine: SwarmEngine) -> None:
    async def read() -> None:
        async for _ in engine.submit(DOCUMENT[:50], LONG):
            break

    asyncio.run(read())


@contextmanager
def leave_by_a_loop_that_stands_still(engine: SwarmEngine) -> Iterator[None]:
    async def read_one() -> TokenChunk:
        return await anext(aiter(engine.submit(DOCUMENT[:50], LONG)))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(read_one())
    yield  # the loop is open and does not run
    loop.close()


def leave_from_another_task(engine: SwarmEngine) -> None:
    async def texts() -> AsyncIterator[str]:
        async for chunk in engine.submit(DOCUMENT[:50], LONG):
            yield chunk.text

    async def read() -> None:
        stream: Any = texts()
        await asyncio.create_task(anext(stream))
        await asyncio.create_task(stream.aclose())

    asyncio.run(read())


def leave_by_cancelling_the_task(engine: SwarmEngine) -> None:
    async def read(begun: asyncio.Event) -> None:
        async for _ in engine.submit(DOCUMENT[:50], LONG):
            begun.set()

    async def run() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(read(begun))
        await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def leave_a_result_by_cancelling_the_task(engine: SwarmEngine) -> None:
    async def run() -> None:
        task = asyncio.create_task(engine.submit(DOCUMENT[:50], LONG).aresult())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_close,
        leave_by_dropping,
        leave_by_block,
        leave_by_break,
        leave_by_async_break,
        leave_by_a_loop_that_stands_still,
        leave_from_another_task,
        leave_by_cancelling_the_task,
        leave_a_result_by_cancelling_the_task,
    ],
)
def test_an_abandoned_stream_ends_within_a_step(
    leave: Callable[[SwarmEngine], AbstractContextManager[None] | None],
    stepwise: SwarmEngine,
    steps: Steps,
) -> None:
    """C2, C4: the step that was under way is the last; sequence and cells are free."""
    steps.allow(3)  # the prompt and two tokens; before the next step the engine waits
    with leave(stepwise) or nullcontext():
        gc.collect()
        steps.set_free()
        pass_a_step(stepwise)
        statistics = stepwise.statistics()
        assert statistics.num_cancelled == 1
        assert statistics.num_running == 0
        assert steps.count <= 4
        assert statistics.cells_used == statistics.sequences_used == 0
    assert_usable(stepwise)


def test_a_stream_kept_open_does_not_block_its_own_thread(engine: SwarmEngine) -> None:
    """C2 iii: two items read, the reference kept, another call in the same thread: both right."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    stream = iter(engine.submit(DOCUMENT[:50], params))
    first = [next(stream), next(stream)]
    assert_right(engine.submit(DOCUMENT[:60], SHORT), DOCUMENT[:60], SHORT)
    text = "".join(chunk.text for chunk in [*first, *stream])
    assert text == answer_alone(DOCUMENT[:50], params).text


def test_cancelling_twice_and_after_the_end(gated: SwarmEngine, gate: Gate) -> None:
    """C4: the same error however often; nothing at all when the answer is complete."""
    handle = gated.submit(DOCUMENT[:50], LONG)
    handle.cancel()
    handle.cancel()
    gate.open()
    for _ in range(2):
        with pytest.raises(RequestCancelledError):
            handle.result(WAIT_SECONDS)
    handle.cancel()
    done = gated.submit(DOCUMENT[:50], SHORT)
    result = done.result(WAIT_SECONDS)
    done.cancel()
    assert done.result() == result
    assert gated.statistics().num_cancelled == 1
    assert_usable(gated)


def test_cancelling_a_leader_helps_the_followers(gated: SwarmEngine, gate: Gate) -> None:
    """From another thread, in the middle of the prefill: the work done so far is used."""
    leader = gated.submit([*DOCUMENT, *piece("x", 20)], SHORT)
    assert gate.entered.wait(WAIT_SECONDS)
    prompts = [[*DOCUMENT, *piece(name, 20)] for name in "ab"]
    followers = [gated.submit(tokens, SHORT) for tokens in prompts]
    leader.cancel()
    gate.open()
    for follower, tokens in zip(followers, prompts, strict=True):
        assert_right(follower, tokens, SHORT)
    with pytest.raises(RequestCancelledError):
        leader.result(WAIT_SECONDS)
    # Nobody waited for the leader yet when it was cancelled, so its one chunk is computed again.
    assert gated.statistics().num_prefill_tokens == 512 + 2000 + 2 * 20


# -- the device lock -------------------------------------------------------------------------------


@pytest.fixture
def locked_out() -> Iterator[SwarmEngine]:
    """An engine whose device another holds."""
    locks = DeviceLockManager(across_processes=False)
    with locks.acquire("fake", owner="another"), open_swarm(device_locks=locks) as engine:
        yield engine


def test_requests_end_while_the_device_is_held_by_another(locked_out: SwarmEngine) -> None:
    """Cancels and deadlines are seen though no step can be made."""
    cancelled = locked_out.submit(DOCUMENT[:50], SHORT)
    timed_out = locked_out.submit(DOCUMENT[:50], SHORT, timeout_seconds=0.01)
    cancelled.cancel()
    with pytest.raises(RequestCancelledError):
        cancelled.result(WAIT_SECONDS)
    with pytest.raises(RequestTimeoutError):
        timed_out.result(WAIT_SECONDS)
    assert locked_out.statistics().num_steps == 0


def test_closing_while_the_device_is_held_by_another(locked_out: SwarmEngine) -> None:
    """It ends, and those who wait are told."""
    handle = locked_out.submit(DOCUMENT[:50], SHORT)
    locked_out.close()
    with pytest.raises(EngineClosedError):
        handle.result(WAIT_SECONDS)


def test_the_lock_is_free_between_requests_and_after_failures() -> None:
    """Held for a step, never longer: not when idle, nor when a step raised, nor when closed."""
    locks = DeviceLockManager(across_processes=False)
    fake = FakeEngine()
    with open_swarm(fake, device_locks=locks) as engine:
        engine.submit(DOCUMENT[:50], SHORT).result(WAIT_SECONDS)
        engine.check()
        locks.acquire_nowait("fake", owner="another").release()
        fake.on_decode = fail_with(DecodeFatalError("fatal", return_code=-3))
        with pytest.raises(DecodeFatalError):
            engine.submit(DOCUMENT[:50], SHORT).result(WAIT_SECONDS)
        engine.check()
        locks.acquire_nowait("fake", owner="another").release()
        fake.on_decode = fail_with(ZeroDivisionError("surprise"))
        with pytest.raises(EngineClosedError):
            engine.submit(DOCUMENT[:50], SHORT).result(WAIT_SECONDS)
        engine.close()
    locks.acquire_nowait("fake", owner="another").release()


# -- failures --------------------------------------------------------------------------------------


def fail_with(error: BaseException) -> Callable[[Batch], None]:
    def on_decode(batch: Batch) -> None:
        raise error

    return on_decode


def test_a_failed_step_leaves_the_engine_usable(gate: Gate) -> None:
    """Its requests get the typed error, in sync and async readers; later ones are served."""

    def fail_once(batch: Batch) -> None:
        gate(batch)
        fake.on_decode = None
        raise DecodeFatalError("fatal", return_code=-3)

    fake = FakeEngine(on_decode=fail_once)
    with open_swarm(fake) as engine:
        handle = engine.submit(DOCUMENT[:50], SHORT)
        gate.open()
        with pytest.raises(DecodeFatalError) as caught:
            handle.result(WAIT_SECONDS)
        assert caught.value.facts == {"return_code": -3}
        with pytest.raises(DecodeFatalError):
            list(handle)
        with pytest.raises(DecodeFatalError):
            asyncio.run(handle.aresult())
        assert_usable(engine)


def test_an_unexpected_failure_closes_the_engine_with_its_cause(
    gate: Gate, pool: ThreadPoolExecutor
) -> None:
    """Running, waiting, just submitted, a call between steps, later: everyone is told."""
    surprise = ZeroDivisionError("surprise")

    def fail(batch: Batch) -> None:
        gate(batch)
        raise surprise

    fake = FakeEngine(on_decode=fail, max_sequences=1)
    engine = open_swarm(fake)
    handles = [engine.submit(piece(name, 20), SHORT) for name in "ab"]
    assert gate.entered.wait(WAIT_SECONDS)
    handles.append(engine.submit(piece("c", 20), SHORT))
    check = pool.submit(engine.check)
    while not engine._loop._calls:
        assert not check.done()
    gate.open()
    for handle in handles:
        with pytest.raises(EngineClosedError) as caught:
            handle.result(WAIT_SECONDS)
        assert caught.value.__cause__ is surprise
        assert "by ZeroDivisionError: surprise" in str(caught.value)
    with pytest.raises(EngineClosedError):
        check.result(WAIT_SECONDS)
    with pytest.raises(EngineClosedError) as caught:
        engine.submit([1])
    assert caught.value.__cause__ is surprise
    assert "by ZeroDivisionError: surprise" in str(caught.value)
    assert engine.closed
    assert engine.statistics().num_failed == 3
    engine.close()


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The constructor raises what loading raised, and leaves no thread and no warning."""
    threads = threading.active_count()
    with pytest.raises(ModelNotFoundError):
        SwarmEngine(EngineConfig(model_path=tmp_path / "missing.gguf"))
    gc.collect()
    assert threading.active_count() == threads


# -- closing ---------------------------------------------------------------------------------------


def test_closing_twice_and_use_after_it(engine: SwarmEngine) -> None:
    """Every later call has one clear outcome; answers that were complete stay."""
    done = engine.submit(DOCUMENT[:50], SHORT, pin="key")
    answer = done.result(WAIT_SECONDS)
    before = engine.statistics()
    assert not engine.closed
    engine.close()
    engine.close()
    assert engine.closed
    assert done.result() == answer
    assert engine.statistics() == before
    assert not engine.release("key")
    assert not engine.is_resident(DOCUMENT[:50])
    assert "closed" in repr(engine)
    for use in (lambda: engine.submit([1]), engine.check):
        with pytest.raises(EngineClosedError):
            use()


def await_closing(engine: SwarmEngine, *closing: Future[None]) -> None:
    """Return when `close` has been called on an engine that is held in a step."""
    while not engine.closed:
        assert not any(one.done() for one in closing)
        time.sleep(0.001)


def test_closing_from_many_threads(
    gated: SwarmEngine, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    """All of them return."""
    handle = gated.submit(DOCUMENT[:50], LONG)
    assert gate.entered.wait(WAIT_SECONDS)
    closing = [pool.submit(gated.close) for _ in range(8)]
    await_closing(gated, *closing)
    gate.open()
    for one in closing:
        one.result(WAIT_SECONDS)
    with pytest.raises(EngineClosedError):
        handle.result(WAIT_SECONDS)


def test_closing_during_streams(
    stepwise: SwarmEngine, steps: Steps, pool: ThreadPoolExecutor
) -> None:
    """Sync and async readers get what there was, then EngineClosedError; `result` likewise."""
    handle = stepwise.submit(DOCUMENT[:50], LONG)
    steps.allow(3)
    begun = threading.Barrier(3)

    def read_sync() -> None:
        stream = iter(handle)
        next(stream)
        begun.wait(WAIT_SECONDS)
        for _ in stream:
            pass

    async def read_async() -> None:
        stream = aiter(handle)
        await anext(stream)
        await asyncio.to_thread(begun.wait, WAIT_SECONDS)
        async for _ in stream:
            pass

    readers = [
        pool.submit(read_sync),
        pool.submit(asyncio.run, read_async()),
        pool.submit(handle.result),
    ]
    begun.wait(WAIT_SECONDS)
    closing = pool.submit(stepwise.close)
    await_closing(stepwise, closing)
    steps.set_free()
    closing.result(WAIT_SECONDS)
    for reader in readers:
        with pytest.raises(EngineClosedError, match="request-"):
            reader.result(WAIT_SECONDS)


def test_closing_with_requests_everywhere(
    gated: SwarmEngine, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    """One runs, two wait for its prefill, five are in the inbox: nobody waits for ever."""
    handles = [gated.submit([*DOCUMENT, *piece(name, 20)], SHORT) for name in "abc"]
    assert gate.entered.wait(WAIT_SECONDS)
    handles += [gated.submit(piece(name, 20), SHORT) for name in "defgh"]
    closing = pool.submit(gated.close)
    await_closing(gated, closing)
    with pytest.raises(EngineClosedError):
        gated.submit([1])
    gate.open()
    closing.result(WAIT_SECONDS)
    for handle in handles:
        with pytest.raises(EngineClosedError):
            handle.result(WAIT_SECONDS)
    statistics = gated.statistics()
    assert statistics.num_running == statistics.num_waiting == statistics.cells_reserved == 0
    assert statistics.num_failed == 8


def test_closing_from_the_engine_thread(gated: SwarmEngine, gate: Gate) -> None:
    """A progress callback may close the engine: no deadlock, and its own request is told."""
    handle = gated.submit(DOCUMENT, SHORT)
    handle.on_progress(lambda progress: gated.close())
    gate.open()
    with pytest.raises(EngineClosedError):
        handle.result(WAIT_SECONDS)
    gated.close()
    assert gated.statistics().num_steps == 1


@pytest.mark.parametrize("engine", [None, "model.gguf", FakeEngine])
def test_what_is_no_engine_is_refused(engine: Any) -> None:
    """A path is not: its settings are missing."""
    with pytest.raises(ConfigurationError, match="EngineConfig"):
        SwarmEngine(engine)


def interrupt_waiting_in(function: Callable[..., Any]) -> None:
    """Ctrl-C for this thread, which must be the main one, once `function` waits for an event."""
    ident = threading.get_ident()

    def is_waiting() -> bool:
        frame = sys._current_frames()[ident]
        codes = [frame.f_code for frame, _ in traceback.walk_stack(frame)]
        return codes[1:3] == [threading.Event.wait.__code__, function.__code__]

    def interrupt() -> None:
        while not is_waiting():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_closing_again_after_an_interrupt_waits_for_the_step(gate: Gate) -> None:
    """Or the interpreter would be torn down around a thread in native code."""
    fake = FakeEngine(num_cells=8192, on_decode=gate)
    swarm = open_swarm(fake)
    handle = swarm.submit(DOCUMENT, LONG)
    assert gate.entered.wait(WAIT_SECONDS)
    interrupt_waiting_in(engine_loop.EngineLoop.close)
    with pytest.raises(KeyboardInterrupt):
        swarm.close()
    threading.Timer(0.1, gate.open).start()
    swarm.close()
    with pytest.raises(EngineClosedError):
        fake.num_tokens(0)
    with pytest.raises(EngineClosedError):
        handle.result()


def test_an_engine_whose_loading_was_interrupted_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has it, so nobody else could."""
    fake, is_loaded = FakeEngine(), threading.Event()

    def load(config: EngineConfig) -> FakeEngine:
        assert is_loaded.wait(WAIT_SECONDS)
        return fake

    monkeypatch.setattr(engine_loop, "open_engine", load)
    before = set(engine_threads())
    interrupt_waiting_in(engine_loop.EngineLoop.start)
    with pytest.raises(KeyboardInterrupt):
        SwarmEngine(EngineConfig(model_path=Path("model.gguf")))
    (thread,) = set(engine_threads()) - before
    is_loaded.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    with pytest.raises(EngineClosedError):
        fake.num_tokens(0)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swarmkv-engine"]


def test_an_engine_that_is_dropped_open_warns_and_ends() -> None:
    """ResourceWarning, and its thread does not stay."""
    before = set(engine_threads())
    held = [open_swarm()]
    (thread,) = set(engine_threads()) - before
    with pytest.warns(ResourceWarning, match="<SwarmEngine 'fake'.* was not closed"):
        drop(held)
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_dropping_an_engine_waits_for_nobody(gate: Gate) -> None:
    """The collector may do it on any thread, even on one that the engine thread waits for."""
    before = set(engine_threads())
    held: list[Any] = [open_swarm(FakeEngine(on_decode=gate))]
    (thread,) = set(engine_threads()) - before
    held.append(held[0].submit(DOCUMENT, LONG))
    assert gate.entered.wait(WAIT_SECONDS)
    with pytest.warns(ResourceWarning):
        drop(held)  # this thread opens the gate, below: the engine thread cannot be waited for
    gate.open()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_leaving_the_block_closes(gate: Gate, pool: ThreadPoolExecutor) -> None:
    """As a context manager, with a stream still running."""

    def open_once_closed() -> None:
        await_closing(engine)
        gate.open()

    with open_swarm(FakeEngine(on_decode=gate)) as engine:
        handle = engine.submit(DOCUMENT[:50], LONG)
        assert gate.entered.wait(WAIT_SECONDS)
        opening = pool.submit(open_once_closed)
    opening.result(WAIT_SECONDS)
    assert engine.closed
    with pytest.raises(EngineClosedError):
        handle.result(WAIT_SECONDS)


# -- processes -------------------------------------------------------------------------------------

PRELUDE = """
import asyncio, os, sys
from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import ForkedProcessError
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

from tests.support.gates import Steps

endless = SamplingParams(max_tokens=4000, ignore_eos=True)
steps = Steps()
engine = SwarmEngine(
    FakeEngine(num_cells=8192, on_decode=steps, step_seconds=0.001),
    device_locks=DeviceLockManager(across_processes=False),
)
"""


def run_python(code: str) -> str:
    """A process that must end by itself, with exit code 0 and silence on stderr."""
    warnings = ("-W", "error", "-W", "ignore::DeprecationWarning")
    process = subprocess.run(
        [sys.executable, *warnings, "-c", WITHOUT_LANGCHAIN + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    return process.stdout


@pytest.mark.parametrize(
    "ending",
    [
        """
        steps.set_free()
        handle = engine.submit([1], endless)
        async def read():
            stream = aiter(handle)
            await anext(stream)
            return stream
        stream = asyncio.run(read())
        """,
        """
        steps.set_free()
        async def read():
            async for chunk in engine.submit([1], endless):
                asyncio.get_running_loop().stop()
        try:
            asyncio.run(read())
        except RuntimeError:
            pass
        """,
    ],
    ids=["stream half read in a loop", "loop stopped in a stream"],
)
def test_the_interpreter_ends_whatever_is_open(ending: str) -> None:
    """Exit code 0 without a traceback; native/test_interpreter_exit.py does it with llama.cpp."""
    run_python(PRELUDE + dedent(ending))


def test_a_forked_child_is_told() -> None:
    """Every use in the child is a ForkedProcessError; it can end; the parent goes on."""
    code = """
    short = SamplingParams(max_tokens=3, ignore_eos=True)
    steps.allow(3)
    done = engine.submit([1], short, pin="key")
    answer = done.result().text
    steps.allow(2)
    running = engine.submit([1, 2], endless)
    stream = iter(running)
    next(stream)
    child = os.fork()
    if child == 0:
        def iterate_async():
            async def read():
                async for chunk in running:
                    pass
            asyncio.run(read())
        uses = {
            "submit": lambda: engine.submit([1]),
            "iterate": lambda: list(running),
            "read on": lambda: list(stream),
            "iterate async": iterate_async,
            "result": running.result,
            "aresult": lambda: asyncio.run(running.aresult()),
            "statistics": engine.statistics,
            "release": lambda: engine.release("key"),
            "is resident": lambda: engine.is_resident([1]),
            "check": engine.check,
        }
        for name, use in uses.items():
            try:
                use()
            except ForkedProcessError as error:
                assert "spawn" in error.__notes__[0]
                print(name, flush=True)
        assert done.result().text == answer
        running.cancel()
        engine.close()
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    steps.set_free()
    assert not engine.closed
    assert engine.submit([1], short).result().text == answer
    running.cancel()
    engine.check()
    engine.close()
    """
    assert run_python(PRELUDE + dedent(code)).splitlines() == [
        "submit",
        "iterate",
        "read on",
        "iterate async",
        "result",
        "aresult",
        "statistics",
        "release",
        "is resident",
        "check",
    ]
