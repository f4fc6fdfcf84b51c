"""Prompts, the oracle and a scheduler that is stepped by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.request import Request, RequestResult, RequestStatus
from langchain_swarmkv.scheduling.scheduler import Scheduler
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.tiers import SnapshotTiers
from langchain_swarmkv.statistics import EngineStatistics, PrefixSource

NAMESPACE = "namespace"
WAIT_SECONDS = 60.0
"""Far more than anything here takes: only a fault comes near it."""


def piece(name: str, num_tokens: int) -> list[int]:
    """Tokens that begin with `name`: pieces whose names differ in the first letter share none."""
    rest = random.Random(name).choices(range(32, 127), k=num_tokens)
    return [*name.encode(), *rest][:num_tokens]


class Answer(NamedTuple):
    """What can be compared of a request's end."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


def answer_alone(tokens: Iterable[int], params: SamplingParams) -> Answer:
    """The oracle: a fresh engine, the whole prompt in one batch, then one token at a time."""
    return _answer_alone(tuple(tokens), params.model_dump_json())


@cache
def _answer_alone(tokens: tuple[int, ...], params_json: str) -> Answer:
    params = SamplingParams.model_validate_json(params_json)
    if params.max_tokens == 0:
        return Answer("", (), "length")
    size = len(tokens) + params.max_tokens
    engine = FakeEngine(num_cells=size, max_batch_tokens=size, max_sequences=1)
    sampler = engine.create_sampler(params, tokens)
    output: list[int] = []
    fed: list[int] = list(tokens)
    while True:
        batch = Batch()
        row = batch.add(0, fed, engine.num_tokens(0), want_logits=True)
        engine.decode(batch)
        token = sampler.sample(row)
        if engine.tokenizer.is_end(token) and not params.ignore_eos:
            return Answer(engine.tokenizer.decode(output), tuple(output), "stop")
        output.append(token)
        text = engine.tokenizer.decode(output)
        ends = [text.find(stop) + len(stop) for stop in params.stop if stop in text]
        if ends:
            # Looked at after each token, so all that are found end here; the longest begins first.
            assert set(ends) == {len(text)}
            longest = max(len(stop) for stop in params.stop if text.endswith(stop))
            return Answer(text[:-longest], tuple(output), "stop")
        if len(output) == params.max_tokens:
            return Answer(text, tuple(output), "length")
        fed = [token]


def answer_of(result: RequestResult) -> Answer:
    """The comparable part of a result."""
    return Answer(result.text, result.token_ids, result.finish_reason)


class Bench:
    """A scheduler over a `FakeEngine`; its clock stands still, and the books are checked always.

    Args:
        store_bytes: of the snapshot store.
        mixed_prefill_tokens: as in `EngineConfig`.
        on_decode: may raise, as in `FakeEngine`.
        **engine: further arguments of `FakeEngine`.
    """

    def __init__(
        self,
        *,
        store_bytes: int = 1 << 20,
        mixed_prefill_tokens: int = 128,
        on_decode: Callable[[Batch], None] | None = None,
        **engine: Any,
    ) -> None:
        self.batches: list[Batch] = []
        self._on_decode = on_decode
        self.engine = FakeEngine(on_decode=self._note_batch, **engine)
        self.store = MemorySnapshotStore(store_bytes)
        tiers = SnapshotTiers(self.store, can_cut=self.engine.limits.can_cut)
        self.now = 0.0
        self.scheduler = Scheduler(
            self.engine,
            tiers,
            mixed_prefill_tokens=mixed_prefill_tokens,
            clock=lambda: self.now,
        )
        self.requests: list[Request] = []

    def _note_batch(self, batch: Batch) -> None:
        self.batches.append(batch)
        if self._on_decode is not None:
            self._on_decode(batch)

    def add(
        self,
        tokens: list[int],
        max_tokens: int = 8,
        *,
        name: str = "",
        namespace: str = NAMESPACE,
        keep_prefix: bool = True,
        pin: str | None = None,
        timeout_seconds: float | None = None,
        **params: Any,
    ) -> Request:
        """Queue a request; `params` are those of `SamplingParams`."""
        request = Request(
            tokens,
            SamplingParams(max_tokens=max_tokens, **params),
            name=name,
            namespace=namespace,
            keep_prefix=keep_prefix,
            pin=pin,
            timeout_seconds=timeout_seconds,
            now=self.scheduler.now,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        """One step, a second of the bench's clock, and a look at the books."""
        self.scheduler.step()
        self.now += 1.0
        self.check()

    def run(self) -> None:
        """Step until nothing is left to do, and see that nothing is left over."""
        self.finish()
        self.check_quiet()

    def finish(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(100_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def serve(self, tokens: list[int], max_tokens: int = 8, **options: Any) -> Request:
        """Queue a request and run it to its end."""
        request = self.add(tokens, max_tokens, **options)
        self.run()
        return request

    @property
    def statistics(self) -> EngineStatistics:
        return self.scheduler.statistics()

    def check(self) -> None:
        """What holds between any two steps."""
        self.scheduler.cache.check()
        statistics = self.statistics
        assert statistics.cells_used == self.engine._ledger.used
        assert statistics.cells_used + statistics.cells_reserved <= statistics.cells_total
        assert self.engine.decoded_tokens == (
            statistics.num_prefill_tokens + statistics.num_decode_tokens
        )

    def check_quiet(self) -> None:
        """What holds when every request has ended."""
        statistics = self.statistics
        assert statistics.num_running == statistics.num_waiting == 0
        assert statistics.cells_reserved == 0
        assert statistics.sequences_used == statistics.num_resident_prefixes
        assert statistics.cells_used == self.scheduler.cache._ledger.distinct(
            self.scheduler.cache._residents
        )
        assert len(self.requests) == (
            statistics.num_finished + statistics.num_failed + statistics.num_cancelled
        )
        for request in self.requests:
            check_ended(request)


def check_ended(request: Request) -> None:
    """A request's own numbers agree with each other."""
    assert request.status is RequestStatus.FINISHED
    assert request.channel.ended
    assert request.sampler is None
    statistics = request.statistics()
    assert statistics.num_prompt_tokens == len(request.tokens)
    assert (statistics.num_cached_tokens == 0) == (statistics.prefix_source is PrefixSource.NONE)
    times = [
        statistics.submitted_at,
        statistics.admitted_at,
        statistics.prefilled_at,
        statistics.first_token_at,
        statistics.finished_at,
    ]
    known = [time for time in times if time is not None]
    assert known == sorted(known)
    if error_of(request) is None:
        assert statistics.num_prompt_tokens == (
            statistics.num_cached_tokens + statistics.num_computed_tokens
        )
        assert statistics.prefilled_at is not None
    else:
        computed = statistics.num_cached_tokens + statistics.num_computed_tokens
        assert computed <= statistics.num_prompt_tokens


def error_of(request: Request) -> BaseException | None:
    """What an ended request failed with."""
    assert request.channel.ended
    try:
        request.channel.wait(0)
    except BaseException as error:
        return error
    return None


def answer_of_request(request: Request) -> Answer:
    """The answer of an ended request; raises its error."""
    chunks = list(request.channel.read())
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    reason = chunks[-1].finish_reason
    assert reason is not None
    return Answer(
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        reason,
    )


def assert_equals_alone(*requests: Request) -> None:
    """Each answer is the one of a fresh engine that is given the whole prompt alone."""
    for request in requests:
        assert answer_of_request(request) == answer_alone(request.tokens, request.params)


def open_swarm(engine: FakeEngine | None = None, **options: Any) -> SwarmEngine:
    """A `SwarmEngine` over a `FakeEngine`, with a device lock of its own."""
    options.setdefault("device_locks", DeviceLockManager(across_processes=False))
    return SwarmEngine(engine or FakeEngine(), **options)
