"""Rates: what is decoded to measure them, by a clock that only decoding moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from langchain_swarmkv.config import EngineConfig, FlashAttention
from langchain_swarmkv.doctor import rates as rates_module
from langchain_swarmkv.doctor.rates import affordable_document, cells_needed, measure_rates
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.engine.llama import LlamaEngine
from langchain_swarmkv.errors import DecodeFatalError
from tests.support.tiny_gguf import ARCHITECTURES

Costs = Callable[[Batch], float]


class Clock:
    """Stands still, but for what each batch costs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Costs) -> None:
        self.now = 0.0
        self.batches: list[Batch] = []
        self._cost = cost
        monkeypatch.setattr(rates_module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def tick(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.now += self._cost(batch)


def fake_engine(clock: Clock, **options: int) -> FakeEngine:
    defaults = {"num_cells": 2048, "max_sequences": 17, "max_batch_tokens": 64}
    return FakeEngine(on_decode=clock.tick, **{**defaults, **options})


def per_token(seconds: float) -> Costs:
    return lambda batch: len(batch) * seconds


def test_rates_are_tokens_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill token takes 1 ms; a step 10 ms and 2 ms for each branch."""

    def cost(batch: Batch) -> float:
        if batch.seq_ids[0] == 0:
            return 0.001 * len(batch)
        return 0.010 + 0.002 * len(batch)

    engine = fake_engine(Clock(monkeypatch, cost))
    rates = measure_rates(engine, document_tokens=100)
    assert rates.document_tokens == 100
    assert rates.prefill_tokens_per_second == pytest.approx(1000)
    steps = {1: 0.012, 4: 0.018, 16: 0.042}
    assert [rate.num_branches for rate in rates.decode] == list(steps)
    for rate in rates.decode:
        assert rate.step_seconds == pytest.approx(steps[rate.num_branches])
        assert rate.tokens_per_second == pytest.approx(rate.num_branches / rate.step_seconds)
    assert rates.fan_out_seconds == pytest.approx(0.1 + 64 * 0.042)


def test_one_slow_step_does_not_change_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first step of a size, which builds a graph, nor a hiccup later."""
    slow = iter([5.0, 0.0, 0.0, 3.0])

    def cost(batch: Batch) -> float:
        return 0.01 if batch.seq_ids[0] == 0 else 0.02 + next(slow, 0.0)

    rates = measure_rates(fake_engine(Clock(monkeypatch, cost)), document_tokens=50)
    assert [rate.step_seconds for rate in rates.decode] == pytest.approx([0.02] * 3)


def test_branches_share_the_document_and_decode_in_one_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step is one token of every branch, behind the document; nothing is left in the pool."""
    clock = Clock(monkeypatch, per_token(1e-4))
    engine = fake_engine(clock)
    phases: list[str] = []
    measure_rates(engine, document_tokens=100, on_phase=phases.append)
    steps = [batch for batch in clock.batches if batch.seq_ids[0] != 0]
    assert {len(batch) for batch in steps} == {1, 4, 16}
    for batch in steps:
        assert batch.seq_ids == list(range(1, len(batch) + 1))
        assert min(batch.positions) >= 100
    assert [engine.num_tokens(seq_id) for seq_id in range(17)] == [0] * 17
    assert phases == [
        "prefill of 100 tokens",
        "decode of 1 branch",
        "decode of 4 branches",
        "decode of 16 branches",
    ]


def test_the_cells_asked_for_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """With exactly so many, and one sequence for each branch and the document."""
    engine = fake_engine(Clock(monkeypatch, per_token(1e-4)), num_cells=cells_needed(100))
    measure_rates(engine, document_tokens=100)


def test_what_is_slow_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill or a step of more than ten seconds is measured once."""
    clock = Clock(monkeypatch, lambda batch: 11.0)
    measure_rates(fake_engine(clock), document_tokens=64)
    prefills = [batch for batch in clock.batches if batch.seq_ids[0] == 0]
    assert len(prefills) == 1
    assert len(clock.batches) == 1 + 3 * 2  # the first step of a size is not counted


def test_a_failure_leaves_no_sequence_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it comes, or Ctrl-C, in the middle of a decode."""

    def fail(batch: Batch) -> float:
        if len(batch) == 4:
            raise DecodeFatalError("llama_decode returned -3.", return_code=-3)
        return 1e-3

    engine = fake_engine(Clock(monkeypatch, fail))
    with pytest.raises(DecodeFatalError):
        measure_rates(engine, document_tokens=100)
    assert [engine.num_tokens(seq_id) for seq_id in range(17)] == [0] * 17


@pytest.mark.parametrize(
    ("token_seconds", "expected"), [(0.001, 1024), (0.02, 500), (1.0, 64), (0.0, 1024)]
)
def test_the_document_is_as_long_as_ten_seconds_allow(
    monkeypatch: pytest.MonkeyPatch, token_seconds: float, expected: int
) -> None:
    """Up to the limit, and at least what the probe needs."""
    engine = fake_engine(Clock(monkeypatch, per_token(token_seconds)))
    assert affordable_document(engine, 1024) == expected
    assert engine.num_tokens(0) == 0


def test_the_document_fits_pool_and_trained_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all that the branches decode."""
    clock = Clock(monkeypatch, per_token(1e-4))
    short = fake_engine(clock, n_ctx_train=200)
    document_tokens = affordable_document(short, 1024)
    assert 180 < document_tokens < 200
    measure_rates(short, document_tokens=document_tokens)
    small = fake_engine(clock, num_cells=cells_needed(77))
    assert affordable_document(small, 1024) == 77


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kind_of_model_can_be_measured(
    tiny_gguf: Callable[..., Path], architecture: str
) -> None:
    """With both kernels; also those whose sequences can only be forked whole."""
    for flash_attention in (FlashAttention.OFF, FlashAttention.ON):
        engine = LlamaEngine(
            EngineConfig(
                model_path=tiny_gguf(architecture),
                n_ctx=cells_needed(64),
                n_batch=64,
                max_sequences=17,
                n_threads=1,
                flash_attention=flash_attention,
            )
        )
        rates = measure_rates(engine, document_tokens=64)
        assert rates.prefill_tokens_per_second > 0
        assert all(rate.tokens_per_second > 0 for rate in rates.decode)
        assert engine.num_tokens(0) == engine.num_tokens(16) == 0
        engine.close()
