"""Everybody at once: 32 threads and 4 event loops, 500 mixed calls on one small engine.

The pool holds neither all documents nor all branches, so that requests wait, prefixes are evicted,
spilled and restored, and pins come and go, while calls are cancelled, time out and are abandoned.
Nothing may crash, hang or be lost, and every answer is the one that the prompt has alone.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Protocol

import llama_cpp
import pytest

from langchain_swarmkv.config import EngineConfig, FlashAttention, KVType, SamplingParams
from langchain_swarmkv.engine.contract import Batch, Engine
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import RequestCancelledError, RequestTimeoutError
from langchain_swarmkv.scheduling import prefix_cache
from langchain_swarmkv.scheduling.request import RequestHandle
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.support.gates import let_restoring_take
from tests.support.oracle import Oracle, OracleStep, assert_matches_oracle
from tests.support.tolerances import F32_ROUNDING
from tests.unit_tests.scheduling.support import WAIT_SECONDS, answer_alone, open_swarm, piece

NUM_CELLS = 1280
MAX_SEQUENCES = 12
THREADS, CALLS_A_THREAD = 32, 10
LOOPS, TASKS_A_LOOP, CALLS_A_TASK = 4, 9, 5
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
DOCUMENTS = [piece(f"{name}ocument", 300) for name in "WXYZ"]
PROMPTS = [[*document, *piece(task, 25)] for document in DOCUMENTS for task in "abcdef"]
PINNED = 2
"""Documents that are pinned now and then: not so many that they could fill the pool."""


class Judge(Protocol):
    """Knows what the answer to a prompt begins with."""

    def check(self, prompt: list[int], token_ids: Sequence[int]) -> None: ...


class Swarm:
    """The calls, each with its own way to end, and what came of them."""

    def __init__(self, engine: SwarmEngine) -> None:
        self.engine = engine
        self.received: list[tuple[list[int], list[int], bool]] = []
        """(prompt, output tokens, whether the answer is whole)"""
        self.calls: Counter[str] = Counter()
        self._cancellable: weakref.WeakSet[RequestHandle] = weakref.WeakSet()
        self._stepping = threading.Lock()
        self._let_hold(engine._loop.engine)

    def _let_hold(self, engine: Engine) -> None:
        """Let no step of the engine begin while somebody has `_stepping`."""
        decode = engine.decode

        def held(batch: Batch) -> None:
            with self._stepping:
                pass
            decode(batch)

        engine.decode = held  # type: ignore[method-assign]

    # -- from a thread ---------------------------------------------------------------------------

    def call(self, rng: random.Random) -> None:
        """One call, drawn by lot."""
        kinds = [
            self._result,
            self._stream,
            self._abandon,
            self._cancel,
            self._time_out,
            self._prefill,
            self._look,
        ]
        kind = rng.choices(kinds, weights=[4, 4, 2, 2, 1, 2, 1])[0]
        kind(rng)
        self.calls[kind.__name__] += 1

    def _submit(self, rng: random.Random, **options: float) -> tuple[list[int], RequestHandle]:
        prompt = rng.choice(PROMPTS)
        keep_prefix = rng.random() < 0.5
        handle = self.engine.submit(prompt, PARAMS, keep_prefix=keep_prefix, **options)
        return prompt, handle

    def _result(self, rng: random.Random) -> None:
        prompt, handle = self._submit(rng)
        self.received.append((prompt, list(handle.result(WAIT_SECONDS).token_ids), True))

    def _stream(self, rng: random.Random) -> None:
        prompt, handle = self._submit(rng)
        self._read(prompt, handle)

    def _read(self, prompt: list[int], handle: RequestHandle, most: int = 1000) -> None:
        tokens: list[int] = []
        is_whole = False
        try:
            for chunk, _ in zip(handle, range(most), strict=False):
                tokens.extend(chunk.token_ids)
                is_whole = chunk.finish_reason is not None
        finally:
            self.received.append((prompt, tokens, is_whole))

    def _abandon(self, rng: random.Random) -> None:
        self._read(*self._submit(rng), most=rng.randrange(20))

    def _cancel(self, rng: random.Random) -> None:
        with self._stepping:  # or it might be answered first
            prompt, handle = self._submit(rng)
            self._cancellable.add(handle)
            victim = rng.choice([*self._cancellable])  # perhaps another thread's
            for one in (victim, handle):
                one.cancel()
        try:
            self._read(prompt, handle)
        except RequestCancelledError:
            pass

    def _time_out(self, rng: random.Random) -> None:
        prompt, handle = self._submit(rng, timeout_seconds=rng.choice([0.001, 0.05]))
        try:
            self._read(prompt, handle)
        except RequestTimeoutError:
            pass

    def _prefill(self, rng: random.Random) -> None:
        number = rng.randrange(PINNED)
        handle = self.engine.submit(
            DOCUMENTS[number], SamplingParams(max_tokens=0), pin=f"pin {number}"
        )
        with handle:
            handle.result(WAIT_SECONDS)
        self._stream(rng)
        self.engine.release(f"pin {number}")

    def _look(self, rng: random.Random) -> None:
        statistics = self.engine.statistics()
        assert statistics.cells_used + statistics.cells_reserved <= statistics.cells_total
        assert statistics.cells_pinned <= PINNED * len(DOCUMENTS[0])
        self.engine.is_resident(rng.choice(PROMPTS))

    # -- from an event loop ----------------------------------------------------------------------

    async def acall(self, rng: random.Random) -> None:
        """One call of a task, drawn by lot."""
        kinds = [self._aresult, self._astream, self._abreak, self._acancel]
        kind = rng.choice(kinds)
        await kind(rng)
        self.calls[kind.__name__] += 1

    async def _aresult(self, rng: random.Random) -> None:
        prompt, handle = self._submit(rng)
        try:
            result = await asyncio.wait_for(handle.aresult(), rng.choice([0.001, WAIT_SECONDS]))
        except asyncio.TimeoutError:
            result = await asyncio.wait_for(handle.aresult(), WAIT_SECONDS)
        self.received.append((prompt, list(result.token_ids), True))

    async def _astream(self, rng: random.Random) -> None:
        await self._aread(*self._submit(rng))

    async def _aread(self, prompt: list[int], handle: RequestHandle, most: int = 1000) -> None:
        tokens: list[int] = []
        is_whole = False
        try:
            async for chunk in handle:
                tokens.extend(chunk.token_ids)
                is_whole = chunk.finish_reason is not None
                most -= 1
                if most < 0:
                    break
        finally:
            self.received.append((prompt, tokens, is_whole))

    async def _abreak(self, rng: random.Random) -> None:
        await self._aread(*self._submit(rng), most=rng.randrange(20))

    async def _acancel(self, rng: random.Random) -> None:
        task = asyncio.create_task(self._aread(*self._submit(rng)))
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass


def run_threads_and_loops(swarm: Swarm) -> None:
    """All calls, begun together; the first fault of any of them is raised."""
    start = threading.Barrier(THREADS + LOOPS)

    def run_thread(number: int) -> None:
        rng = random.Random(number)
        start.wait(WAIT_SECONDS)
        for _ in range(CALLS_A_THREAD):
            swarm.call(rng)

    async def run_task(number: int) -> None:
        rng = random.Random(1000 + number)
        for _ in range(CALLS_A_TASK):
            await swarm.acall(rng)

    async def run_loop(number: int) -> None:
        tasks = [run_task(TASKS_A_LOOP * number + i) for i in range(TASKS_A_LOOP)]
        await asyncio.to_thread(start.wait, WAIT_SECONDS)
        await asyncio.gather(*tasks)

    with ThreadPoolExecutor(THREADS + LOOPS) as pool:
        running = [pool.submit(run_thread, number) for number in range(THREADS)]
        running += [pool.submit(asyncio.run, run_loop(number)) for number in range(LOOPS)]
        for one in running:
            one.result()


class FakeJudge:
    """The answers of fresh fake engines."""

    def check(self, prompt: list[int], token_ids: Sequence[int]) -> None:
        expected = answer_alone(prompt, PARAMS).token_ids
        assert tuple(token_ids) == expected[: len(token_ids)]


class OracleJudge:
    """The answers of plain llama.cpp in F32."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._steps = cache(self._greedy)

    def _greedy(self, prompt: tuple[int, ...]) -> list[OracleStep]:
        return self._oracle.greedy(prompt, PARAMS.max_tokens)

    def check(self, prompt: list[int], token_ids: Sequence[int]) -> None:
        if token_ids:
            assert_matches_oracle(token_ids, self._steps(tuple(prompt)), margin=2 * F32_ROUNDING)


@pytest.fixture(params=["fake", "fake that cannot cut", "tiny llama"])
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def engine(kind: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwarmEngine]:
    monkeypatch.setattr(prefix_cache, "MIN_IDLE_CELLS", 0)
    let_restoring_take(monkeypatch, 0.0)
    store_bytes = 1 << 20 if kind == "tiny llama" else 4 << 10  # three documents or so
    if kind == "tiny llama":
        config = EngineConfig(
            model_path=tiny_llama,
            n_ctx=NUM_CELLS,
            n_batch=128,
            max_sequences=MAX_SEQUENCES,
            max_running=10,
            mixed_prefill_tokens=64,
            n_threads=1,
            flash_attention=FlashAttention.OFF,
            kv_type_k=KVType.F32,
            kv_type_v=KVType.F32,
        )
        made = SwarmEngine(config, snapshot_memory_bytes=store_bytes)
    else:
        fake = FakeEngine(
            num_cells=NUM_CELLS,
            max_sequences=MAX_SEQUENCES,
            max_batch_tokens=128,
            can_cut=kind == "fake",
            max_running=6,
            move_cost_tokens=1,
        )
        made = open_swarm(fake, snapshot_memory_bytes=store_bytes)
    with made as swarm_engine:
        yield swarm_engine


@pytest.fixture
def judge(kind: str, tiny_llama: Path) -> Iterator[Judge]:
    if kind != "tiny llama":
        yield FakeJudge()
        return
    with Oracle(
        tiny_llama, 512, flash_attention=False, n_threads=1, kv_type=llama_cpp.GGML_TYPE_F32
    ) as oracle:
        yield OracleJudge(oracle)


def test_five_hundred_mixed_calls(engine: SwarmEngine, judge: Judge) -> None:
    """No crash, no hang, nothing lost, and every token that was handed out is right."""
    swarm = Swarm(engine)
    run_threads_and_loops(swarm)
    gc.collect()
    engine.check()
    engine.check()  # between the two, the requests that were abandoned last are let go

    assert swarm.calls.total() == 500
    for prompt, token_ids, is_whole in swarm.received:
        assert not is_whole or len(token_ids) == PARAMS.max_tokens
        judge.check(prompt, token_ids)
    assert sum(is_whole for _, _, is_whole in swarm.received) > 200

    statistics = engine.statistics()
    assert statistics.num_running == statistics.num_waiting == statistics.cells_reserved == 0
    assert statistics.num_pinned_prefixes == statistics.cells_pinned == 0
    assert statistics.sequences_used == statistics.num_resident_prefixes
    assert statistics.cells_used == statistics.cells_idle
    # The scene was what it was meant to be.
    assert statistics.num_cancelled > 20
    assert statistics.num_evictions > 0
    assert statistics.num_spills > 0
    assert statistics.num_restores > 0
    assert statistics.num_forks > 50

    # One request gets every cell there is; after it all sequence ids are free.
    whole = engine.submit(
        piece("whole", NUM_CELLS - 4), SamplingParams(max_tokens=4), keep_prefix=False
    )
    assert len(whole.result(WAIT_SECONDS).token_ids) <= 4
    statistics = engine.statistics()
    assert statistics.cells_used == statistics.sequences_used == 0
    engine.check()
