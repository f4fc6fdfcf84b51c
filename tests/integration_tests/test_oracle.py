"""Every branch must equal the oracle: a fresh context that prefills the whole prompt, alone.

Batches of other shapes round differently, so nothing is bit-equal: see `tests.support.tolerances`.
A greedy token may differ only where the oracle's first two candidates are closer than twice the
tolerance, for both may be off by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from langchain_swarmkv.config import EngineConfig, FlashAttention, KVType, SamplingParams
from langchain_swarmkv.scheduling.request import RequestResult
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.statistics import PrefixSource
from tests.support.fuzz import length
from tests.support.gates import let_restoring_take
from tests.support.oracle import Oracle, assert_matches_oracle
from tests.support.raw import Logits
from tests.support.tolerances import (
    F32_ROUNDING,
    FLASH_ROUNDING,
    SMOLLM2_F16_ROUNDING,
    SMOLLM2_Q4_1_ROUNDING,
)

SUFFIX_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 48, 64, 90, 120, 150, 200, 250, 300)
GREEDY = SamplingParams(max_tokens=8, logprobs=64, ignore_eos=True)


@pytest.fixture(autouse=True)
def _restoring_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quicker than computing, whatever else the machine does."""
    let_restoring_take(monkeypatch, 0.0)


def _tokens(seed: int, count: int) -> list[int]:
    """Printable bytes: the tiny vocabularies keep them as single tokens."""
    return np.random.default_rng(seed).integers(32, 127, count).tolist()


class _Judge:
    """An oracle and how far from it an engine of the same settings may be."""

    def __init__(self, oracle: Oracle, tolerance: float) -> None:
        self._oracle = oracle
        self._tolerance = tolerance

    def check(self, prompt: Sequence[int], result: RequestResult) -> None:
        first, steps = self._oracle.answer(prompt, len(result.token_ids))
        difference = self._difference(first, result)
        assert difference <= self._tolerance, f"a first-token logit is off by {difference:.3g}"
        assert_matches_oracle(result.token_ids, steps, 2 * self._tolerance)

    def check_that_it_tells(
        self, others: Sequence[Sequence[int]], results: Sequence[RequestResult]
    ) -> None:
        """Results for these other prompts would not all pass, by far."""
        differences = [
            self._difference(self._oracle.first_logits(other), result)
            for other, result in zip(others, results, strict=True)
        ]
        assert max(differences) > 2 * self._tolerance

    def _difference(self, first: Logits, result: RequestResult) -> float:
        logits = first.astype(np.float64)
        logprobs = logits - np.logaddexp.reduce(logits)
        ids, values = zip(*result.logprobs[0].top, strict=True)
        assert len(ids) == 64
        return float(np.abs(np.array(values) - logprobs[list(ids)]).max())


def _tiny_config(path: Path, **options: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model_path": path,
            "n_ctx": 4096,
            "n_batch": 256,
            "max_sequences": 24,
            "n_threads": 1,
            "flash_attention": FlashAttention.OFF,
            "kv_type_k": KVType.F32,
            "kv_type_v": KVType.F32,
            **options,
        }
    )


@pytest.fixture
def tiny_judge(tiny_models: Path) -> Iterator[_Judge]:
    """The oracle of each tiny architecture, all in F32."""
    with Oracle(
        tiny_models,
        n_ctx=2048,
        flash_attention=False,
        n_threads=1,
        kv_type=llama_cpp.GGML_TYPE_F32,
    ) as oracle:
        yield _Judge(oracle, F32_ROUNDING)


def _fan_out(engine: SwarmEngine, prompts: Sequence[list[int]]) -> list[RequestResult]:
    handles = [engine.submit(prompt, GREEDY, keep_prefix=False) for prompt in prompts]
    return [handle.result() for handle in handles]


def _prompts(document: list[int]) -> list[list[int]]:
    """Each suffix begins with another token, so that they share the document and no more."""
    return [
        [*document, 33 + number, *_tokens(100 + length, length - 1)]
        for number, length in enumerate(SUFFIX_LENGTHS)
    ]


def test_sixteen_branches_over_a_prefilled_document_equal_the_oracle(
    tiny_models: Path, tiny_judge: _Judge
) -> None:
    """Forked from a resident document, decoded together: as if each had been alone."""
    document = _tokens(1, 500)
    with SwarmEngine(_tiny_config(tiny_models)) as engine:
        engine.submit(document, SamplingParams(max_tokens=0), pin="document").result()
        prompts = _prompts(document)
        results = _fan_out(engine, prompts)
        engine.check()
        for result in results:
            assert result.statistics.num_cached_tokens == len(document)
    for prompt, result in zip(prompts, results, strict=True):
        tiny_judge.check(prompt, result)


def test_sixteen_cold_branches_equal_the_oracle(tiny_models: Path, tiny_judge: _Judge) -> None:
    """All at once, nothing resident: one prefills for all, and the document is computed once."""
    document = _tokens(2, 500)
    with SwarmEngine(_tiny_config(tiny_models)) as engine:
        prompts = _prompts(document)
        results = _fan_out(engine, prompts)
        engine.check()
        computed = engine.statistics().num_prefill_tokens
    assert computed == len(document) + sum(SUFFIX_LENGTHS)
    for prompt, result in zip(prompts, results, strict=True):
        tiny_judge.check(prompt, result)


def test_branches_of_a_restored_document_equal_the_oracle(
    tiny_models: Path, tiny_judge: _Judge
) -> None:
    """A document that had to leave the pool comes back from the store, not by prefill."""
    documents = [_tokens(seed, 500) for seed in (3, 4, 5)]
    with SwarmEngine(_tiny_config(tiny_models, n_ctx=1024)) as engine:
        for document in documents:
            engine.submit(document, SamplingParams(max_tokens=0)).result()
        prompts = [document + _tokens(seed, 20) for seed, document in enumerate(documents, 300)]
        results = [engine.submit(prompt, GREEDY, keep_prefix=False).result() for prompt in prompts]
        engine.check()
        statistics = engine.statistics()
    assert statistics.num_restores >= 1
    assert statistics.num_prefill_tokens == 3 * 500 + 3 * 20
    assert PrefixSource.MEMORY in {result.statistics.prefix_source for result in results}
    for prompt, result in zip(prompts, results, strict=True):
        tiny_judge.check(prompt, result)


def test_branches_of_a_document_from_disk_equal_the_oracle(
    tiny_models: Path, tiny_judge: _Judge, tmp_path: Path
) -> None:
    """Another engine wrote it, and is closed: nothing but the questions is computed."""
    document = _tokens(6, 600)
    with SwarmEngine(_tiny_config(tiny_models), snapshot_dir=tmp_path) as engine:
        engine.submit(document, SamplingParams(max_tokens=0)).result()
    prompts = [document + _tokens(seed, length) for seed, length in enumerate((1, 7, 40), 400)]
    with SwarmEngine(_tiny_config(tiny_models), snapshot_dir=tmp_path) as engine:
        results = _fan_out(engine, prompts)
        engine.check()
        statistics = engine.statistics()
    assert statistics.num_disk_reads == 1
    assert statistics.num_prefill_tokens == 1 + 7 + 40
    assert {result.statistics.prefix_source for result in results} == {
        PrefixSource.DISK,
        PrefixSource.RESIDENT,
    }
    for prompt, result in zip(prompts, results, strict=True):
        tiny_judge.check(prompt, result)


@pytest.mark.parametrize("kernel", [FlashAttention.ON, FlashAttention.OFF])
def test_a_state_of_one_kernel_serves_the_other(
    kernel: FlashAttention, tiny_llama: Path, tmp_path: Path
) -> None:
    """V is rewritten between its two layouts, both ways, exactly: judged with F16 cells."""
    other = FlashAttention.OFF if kernel is FlashAttention.ON else FlashAttention.ON
    f16 = {"kv_type_k": KVType.F16, "kv_type_v": KVType.F16}
    document = _tokens(7, 500)
    first = _tiny_config(tiny_llama, flash_attention=kernel, **f16)
    with SwarmEngine(first, snapshot_dir=tmp_path) as engine:
        engine.submit(document, SamplingParams(max_tokens=0)).result()
    prompts = [document + _tokens(seed, 30) for seed in range(500, 504)]
    second = _tiny_config(tiny_llama, flash_attention=other, **f16)
    with SwarmEngine(second, snapshot_dir=tmp_path) as engine:
        # One by one, as the oracle: of 64 queries and more flash attention sums V in F32, of fewer
        # in F16, and that alone moves logits by up to 0.06.
        results = [engine.submit(prompt, GREEDY, keep_prefix=False).result() for prompt in prompts]
        engine.check()
        assert engine.statistics().num_prefill_tokens == 4 * 30
    with Oracle(
        tiny_llama, n_ctx=2048, flash_attention=other is FlashAttention.ON, n_threads=1
    ) as oracle:
        for prompt, result in zip(prompts, results, strict=True):
            _Judge(oracle, FLASH_ROUNDING).check(prompt, result)


def test_branches_beside_documents_that_are_idle_equal_the_oracle(
    tiny_models: Path, tiny_judge: _Judge
) -> None:
    """What is idle leaves, the running document moves down into the hole, and all come back.

    States that do not grow with their tokens stay: they slow down nobody.
    """
    documents = [_tokens(seed, 500) for seed in (11, 12, 13)]
    answered: list[tuple[list[int], RequestResult]] = []
    with SwarmEngine(_tiny_config(tiny_models)) as engine:
        for document in documents:
            engine.submit(document, SamplingParams(max_tokens=0)).result()
        for document in (documents[2], documents[0], documents[1]):
            prompts = [[*document, 33 + branch, *_tokens(branch, 20)] for branch in range(4)]
            answered += zip(prompts, _fan_out(engine, prompts), strict=True)
            engine.check()
        statistics = engine.statistics()
        can_cut = engine.limits.can_cut
        grows = engine.facts.kv_bytes_per_token > 0
    assert statistics.num_spills >= 3 if grows else statistics.num_spills == 0
    assert statistics.num_restores >= 2 if grows else statistics.num_restores == 0
    assert (statistics.num_compactions > 0) == can_cut
    assert statistics.num_prefill_tokens == 3 * (500 + 4 * 21)
    for prompt, result in answered:
        tiny_judge.check(prompt, result)


def test_a_conversation_equals_the_oracle(tiny_models: Path, tiny_judge: _Judge) -> None:
    """Each turn continues the sequence that the turn before left behind."""
    prompt = _tokens(6, 100)
    turns: list[tuple[list[int], RequestResult]] = []
    with SwarmEngine(_tiny_config(tiny_models)) as engine:
        for turn in range(4):
            result = engine.submit(prompt, GREEDY).result()
            turns.append((prompt, result))
            prompt = prompt + list(result.token_ids) + _tokens(400 + turn, 15)
        engine.check()
    for prompt, result in turns:
        tiny_judge.check(prompt, result)
    # The last output token is never written, so it is computed with the next turn.
    assert [r.statistics.num_computed_tokens for _, r in turns[1:]] == [16, 16, 16]


def test_the_same_prompt_again_equals_the_oracle(tiny_models: Path, tiny_judge: _Judge) -> None:
    """A prompt that is wholly in the cache still gets logits of its own (not stale ones)."""
    prompt, other = _tokens(7, 64), _tokens(8, 64)
    with SwarmEngine(_tiny_config(tiny_models)) as engine:
        results = [
            engine.submit(tokens, GREEDY).result() for tokens in (prompt, other, prompt, prompt)
        ]
        engine.check()
    for tokens, result in zip((prompt, other, prompt, prompt), results, strict=True):
        tiny_judge.check(tokens, result)


@pytest.mark.long
@pytest.mark.parametrize("flash_attention", [FlashAttention.OFF, FlashAttention.ON])
def test_branches_on_f16_smollm2_equal_the_oracle(
    smollm2_f16: Path, flash_attention: FlashAttention
) -> None:
    """On a real model with F16 weights, with either attention kernel."""
    step = length(4, 1) if flash_attention is FlashAttention.OFF else 4
    lengths = SUFFIX_LENGTHS[::step]
    _check_smollm2(smollm2_f16, flash_attention, lengths, tolerance=SMOLLM2_F16_ROUNDING)


def test_branches_of_a_document_from_the_prefill_context_equal_the_oracle(
    smollm2_f16: Path,
) -> None:
    """Prefilled with flash attention and decoded without it; the two differ by up to 0.1 here."""
    _check_smollm2(
        smollm2_f16,
        FlashAttention.OFF,
        SUFFIX_LENGTHS[::4],
        tolerance=2 * SMOLLM2_F16_ROUNDING,
        prefill_flash_attention=True,
    )


@pytest.mark.long
def test_branches_on_shipped_smollm2_equal_the_oracle(smollm2: Path) -> None:
    """On the quantised weights that the demo uses, as far as their rounding allows."""
    lengths = SUFFIX_LENGTHS[:: length(5, 3)]
    _check_smollm2(smollm2, FlashAttention.OFF, lengths, tolerance=SMOLLM2_Q4_1_ROUNDING)


TEXT = (
    "The reading lamp measures the light of the room and of the page and keeps their ratio. "
    "A first sensor (12) faces the page, a second sensor (14) faces the ceiling. A controller "
    "(20) raises the current of the diodes (30) until the ratio of both signals is the one that "
    "the reader chose with the ring (40). When the reader falls asleep the page no longer moves, "
    "and after ten minutes the controller dims the diodes over another five. "
)


def _starts(words: Sequence[int]) -> list[int]:
    """Where each token first occurs: suffixes from there share the document and no more."""
    return sorted(words.index(token) for token in set(words))


def _check_smollm2(
    path: Path,
    flash_attention: FlashAttention,
    lengths: Sequence[int],
    *,
    tolerance: float,
    prefill_flash_attention: bool = False,
) -> None:
    config = EngineConfig(
        model_path=path,
        n_ctx=4096,
        flash_attention=flash_attention,
        prefill_flash_attention=prefill_flash_attention,
    )
    with SwarmEngine(config) as engine:
        words = engine.tokenizer.encode(TEXT * 8)
        document = words[:250]
        prompts = [
            [*document, *words[start : start + length]]
            for start, length in zip(_starts(words), lengths, strict=False)
        ]
        engine.submit(document, SamplingParams(max_tokens=0), pin="document").result()
        results = _fan_out(engine, prompts)
        engine.check()
        assert engine.statistics().num_prefill_tokens == len(document) + sum(lengths)
    is_on = flash_attention is FlashAttention.ON
    with Oracle(path, n_ctx=1024, flash_attention=is_on) as oracle:
        judge = _Judge(oracle, tolerance)
        for prompt, result in zip(prompts, results, strict=True):
            judge.check(prompt, result)
        judge.check_that_it_tells([prompt[len(document) :] for prompt in prompts], results)
