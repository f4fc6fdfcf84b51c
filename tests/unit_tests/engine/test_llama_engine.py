"""LlamaEngine keeps the contract of engines on every kind of model, and samples as it should."""

from __future__ import annotations

import os
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from langchain_swarmkv.config import EngineConfig, FlashAttention, KVType, SamplingParams
from langchain_swarmkv.engine import llama
from langchain_swarmkv.engine.contract import Batch, Engine
from langchain_swarmkv.engine.cores import available_cores
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.engine.llama import _STATE_HEADER, LlamaEngine, _checksum
from langchain_swarmkv.errors import (
    DecodeFatalError,
    GrammarError,
    NoRoomError,
    SequenceError,
    UnsupportedModelError,
)
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.support.oracle import Oracle
from tests.support.tiny_gguf import ARCHITECTURES, ATTENTION_ARCHITECTURES
from tests.support.tolerances import F32_ROUNDING, FLASH_ROUNDING
from tests.unit_tests.engine.engine_contract import (
    DOCUMENT,
    SUFFIXES,
    EngineContract,
    Logits,
    OpenEngine,
    append,
)

TinyGguf = Callable[..., Path]
FloatArray = npt.NDArray[np.float64]


def tiny_config(path: Path, **options: Any) -> EngineConfig:
    """Small, single-threaded, with F32 cells, so that rounding hides nothing."""
    defaults: dict[str, Any] = {
        "n_ctx": 512,
        "n_batch": 64,
        "max_sequences": 8,
        "n_threads": 1,
        "kv_type_k": KVType.F32,
        "kv_type_v": KVType.F32,
    }
    return EngineConfig(model_path=path, **{**defaults, **options})


def opener(path: Path, **options: Any) -> OpenEngine:
    """Opens small engines on one file."""

    def open_llama(
        *, num_cells: int = 512, max_sequences: int = 8, max_batch_tokens: int = 64
    ) -> LlamaEngine:
        sizes = {"n_ctx": num_cells, "n_batch": max_batch_tokens, "max_sequences": max_sequences}
        return LlamaEngine(tiny_config(path, **sizes, **options))

    return open_llama


class TestLlamaEngine(EngineContract):
    """On each architecture."""

    tolerance = F32_ROUNDING

    @pytest.fixture(params=ARCHITECTURES)
    def open_engine(self, request: pytest.FixtureRequest, tiny_gguf: TinyGguf) -> OpenEngine:
        return opener(tiny_gguf(request.param))

    @staticmethod
    def foreign_state() -> bytes:
        engine = FakeEngine()
        append(engine, 0, DOCUMENT[:10])
        return engine.save(0)


class TestLlamaEngineWithTwoContexts(EngineContract):
    """Long chunks prefilled with flash attention in a context of their own."""

    tolerance = FLASH_ROUNDING

    @pytest.fixture(params=ATTENTION_ARCHITECTURES)
    def open_engine(self, request: pytest.FixtureRequest, tiny_gguf: TinyGguf) -> OpenEngine:
        return opener(tiny_gguf(request.param), prefill_flash_attention=True)

    foreign_state = staticmethod(TestLlamaEngine.foreign_state)


def test_long_chunks_are_prefilled_apart(tiny_llama: Path) -> None:
    """Exactly as the kernels round: what flash attention computes differs, and then is forked.

    The first chunk is long, the second continues behind a prefix that two sequences share.
    """
    paired = LlamaEngine(tiny_config(tiny_llama, prefill_flash_attention=True))
    plain = LlamaEngine(tiny_config(tiny_llama))
    flash = LlamaEngine(tiny_config(tiny_llama, flash_attention=FlashAttention.ON))
    engines = paired, plain, flash
    of_paired, of_plain, of_flash = (append(engine, 0, DOCUMENT[:64]) for engine in engines)
    assert np.array_equal(of_paired, of_flash)
    assert not np.array_equal(of_paired, of_plain)
    for engine in engines:
        engine.fork(0, 1, 64)
        append(engine, 0, DOCUMENT[64:70])
    of_paired, of_plain, of_flash = (append(engine, 1, DOCUMENT[80:144]) for engine in engines)
    assert np.abs(of_paired - of_flash).max() < F32_ROUNDING
    assert not np.array_equal(of_paired, of_plain)
    for engine in engines:
        assert engine.num_tokens(1) == 128
        engine.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_failed_decode_leaves_nothing_in_the_second_context(
    is_first: bool, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleared, the sequence can be computed again: cells that stay would refuse every retry."""
    engine = LlamaEngine(tiny_config(tiny_llama, prefill_flash_attention=True))
    if not is_first:
        append(engine, 0, DOCUMENT[:10])  # lent to the other context by the long chunk
    prefiller = engine._native._prefiller  # type: ignore[attr-defined]
    decode = prefiller.decode

    def fail(*arguments: Any) -> None:
        decode(*arguments)
        raise DecodeFatalError("torn", return_code=-3)

    with monkeypatch.context() as patch:
        patch.setattr(prefiller, "decode", fail)
        with pytest.raises(DecodeFatalError):
            append(engine, 0, DOCUMENT[engine.num_tokens(0) :][:80])
    engine.clear(0)
    assert [context.num_tokens(0) for context in (engine._native, prefiller)] == [0, 0]
    again = append(engine, 0, DOCUMENT[:80])
    fresh = LlamaEngine(tiny_config(tiny_llama, prefill_flash_attention=True))
    assert np.array_equal(again, append(fresh, 0, DOCUMENT[:80]))
    fresh.close()
    engine.close()


def test_a_state_is_written_once_where_it_stays(tiny_llama: Path) -> None:
    """At no moment do two copies of it exist."""
    engine = LlamaEngine(tiny_config(tiny_llama))
    append(engine, 0, DOCUMENT)
    engine.save(0)
    tracemalloc.start()
    try:
        state = engine.save(0)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(state) == engine.state_bytes(0) > 100_000
    assert len(state) <= peak_bytes < 1.5 * len(state)
    engine.close()


def test_untouched_bytes_of_ours_are_not_looked_through_again(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process made and kept is restored as it is; what it was given is checked once."""
    num_checks = []
    monkeypatch.setattr(llama, "_checksum", lambda state: num_checks.append(1) or _checksum(state))
    other = np.roll(DOCUMENT, 1).tolist()
    prefill = SamplingParams(max_tokens=0)
    locks = DeviceLockManager(across_processes=False)
    config = tiny_config(tiny_llama, n_ctx=256)
    with SwarmEngine(config, device_locks=locks) as engine:
        engine.submit(DOCUMENT, prefill).result(60)
        engine.submit(other, prefill).result(60)
        num_checks.clear()  # of saving the document
        result = engine.submit([*DOCUMENT, 1], SamplingParams(max_tokens=2)).result(60)
        assert result.statistics.num_cached_tokens == len(DOCUMENT)
        assert len(num_checks) == 1  # of saving the other
        snapshot = engine.snapshot(DOCUMENT)
    with SwarmEngine(config, device_locks=locks) as engine:
        engine.insert(snapshot)
        num_checks.clear()
        result = engine.submit([*DOCUMENT, 1], SamplingParams(max_tokens=2)).result(60)
        assert result.statistics.num_cached_tokens == len(DOCUMENT)
        assert len(num_checks) == 1


def test_two_contexts_share_a_pool_without_losing_a_cell(tiny_llama: Path) -> None:
    """Several long prompts at once: as many as fit are prefilled apart, and all fit in the end."""
    engine = LlamaEngine(
        tiny_config(tiny_llama, n_ctx=768, n_batch=256, prefill_flash_attention=True)
    )
    for turn in range(6):
        batch = Batch()
        for seq_id in range(4):
            batch.add(seq_id, DOCUMENT[seq_id : seq_id + 64], 64 * (turn % 3), want_logits=False)
        engine.decode(batch)
        if turn % 3 == 2:
            assert [engine.num_tokens(seq_id) for seq_id in range(4)] == [192] * 4
            with pytest.raises(NoRoomError):
                append(engine, 4, [65])
            for seq_id in range(4):
                engine.clear(seq_id)
    engine.close()


@pytest.mark.parametrize("architecture", ["gemma3", "mamba", "jamba"])
def test_caches_that_cannot_be_rewritten_are_refused(
    tiny_gguf: TinyGguf, architecture: str
) -> None:
    """With the reason, when the engine opens."""
    config = tiny_config(tiny_gguf(architecture), prefill_flash_attention=True)
    with pytest.raises(UnsupportedModelError, match="prefill_flash_attention"):
        LlamaEngine(config)


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[LlamaEngine]:
    engine = LlamaEngine(tiny_config(tiny_llama))
    yield engine
    engine.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_full_attention_can_be_cut(tiny_gguf: TinyGguf, architecture: str) -> None:
    """Windows and running states forget."""
    engine = LlamaEngine(tiny_config(tiny_gguf(architecture)))
    assert engine.limits.can_cut == (architecture in ATTENTION_ARCHITECTURES)
    assert engine.facts.architecture == architecture
    engine.close()


@pytest.mark.parametrize("flash_attention", list(FlashAttention))
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "jamba"])
def test_logits_are_those_of_plain_llama_cpp(
    tiny_gguf: TinyGguf, architecture: str, flash_attention: FlashAttention
) -> None:
    """Against an oracle that shares no code with the package, fork and both kernels included.

    A lost token moves these logits by 0.25 and more.
    """
    path = tiny_gguf(architecture)
    uses_flash = flash_attention is FlashAttention.ON  # AUTO is plain attention on a CPU
    engine = LlamaEngine(tiny_config(path, flash_attention=flash_attention))
    append(engine, 0, DOCUMENT)
    engine.fork(0, 1, len(DOCUMENT))
    logits = append(engine, 1, SUFFIXES[2])
    with Oracle(path, 512, uses_flash, n_threads=1, kv_type=0) as oracle:
        expected = oracle.first_logits(DOCUMENT + SUFFIXES[2])
        other = oracle.first_logits(DOCUMENT[1:] + SUFFIXES[2])
    tolerance = FLASH_ROUNDING if uses_flash else F32_ROUNDING
    assert np.abs(logits - expected).max() < tolerance
    assert np.abs(logits - other).max() > 2 * tolerance
    engine.close()


ROUNDING = {
    KVType.F32: F32_ROUNDING,
    KVType.F16: 100 / 2**11,
    KVType.BF16: 100 / 2**9,
    KVType.Q8_0: 100 / 2**8,
    KVType.Q4_0: 100 / 2**4,
}
"""A hundred times half the relative step of each type. Seen: 0, 0.01, 0.07, 0.2 and 2.1: F16 is not
taken for BF16, nor Q8_0 for Q4_0. The last is as much as a lost first token moves."""


@pytest.mark.parametrize("architecture", ATTENTION_ARCHITECTURES)
@pytest.mark.parametrize("first", [FlashAttention.ON, FlashAttention.OFF])
def test_a_state_goes_to_the_other_kernel_and_back_bit_for_bit(
    tiny_gguf: TinyGguf, architecture: str, first: FlashAttention
) -> None:
    """From one sequence to another in an engine with the other kernel, and into its own again."""
    second = FlashAttention.OFF if first is FlashAttention.ON else FlashAttention.ON
    one, other = (
        LlamaEngine(tiny_config(tiny_gguf(architecture), flash_attention=kernel))
        for kernel in (first, second)
    )
    append(one, 3, DOCUMENT)
    state = one.save(3)
    for seq_id in (0, 5):
        other.restore(seq_id, state, len(DOCUMENT))
        assert other.save(seq_id) != state
        one.clear(3)
        one.restore(3, other.save(seq_id), len(DOCUMENT))
        assert one.save(3) == state
    one.close()
    other.close()


@pytest.mark.parametrize("architecture", ["gemma3", "jamba", "mamba"])
def test_what_a_made_up_state_leaves_behind_is_never_computed_with(
    tiny_gguf: TinyGguf, architecture: str
) -> None:
    """With a last position that llama.cpp never removes, in each part of the cache.

    The sequence is as good as new, or the engine says that it cannot be: as it restores or clears.
    """
    open_engine = opener(tiny_gguf(architecture))
    engine = open_engine()
    expected = append(engine, 0, DOCUMENT[:45])
    header, payload = np.split(np.frombuffer(engine.save(0), np.uint8), [_STATE_HEADER.size])
    engine.close()
    fields = _STATE_HEADER.unpack(header.tobytes())
    words = payload[: len(payload) // 4 * 4].view("<i4")
    num_refused = 0
    for place in np.flatnonzero(words == 44):
        for position in (2**31 - 1, -(2**31), -1):
            forged = payload.copy()
            forged[: 4 * len(words)].view("<i4")[place] = position
            state = _STATE_HEADER.pack(*fields[:-1], _checksum(forged.data)) + forged.tobytes()
            engine = open_engine()
            try:
                with suppress(SequenceError):
                    engine.restore(1, state, 45)
                engine.clear(1)
            except DecodeFatalError:
                num_refused += 1
            else:
                assert np.array_equal(append(engine, 1, DOCUMENT[:45]), expected)
            engine.close()
    assert num_refused >= 3


@pytest.mark.parametrize("kv_type", list(KVType))
def test_every_kv_type_computes_saves_and_restores(tiny_llama: Path, kv_type: KVType) -> None:
    """Logits near those of F32 cells; a restored state continues as the original does."""
    engine = LlamaEngine(tiny_config(tiny_llama, kv_type_k=kv_type, kv_type_v=kv_type))
    exact = LlamaEngine(tiny_config(tiny_llama))
    expected = append(exact, 0, DOCUMENT)
    assert np.abs(append(engine, 0, DOCUMENT) - expected).max() < ROUNDING[kv_type]
    engine.restore(1, engine.save(0), len(DOCUMENT))
    logits = [append(engine, seq_id, SUFFIXES[0]) for seq_id in (0, 1)]
    assert np.abs(logits[0] - logits[1]).max() < F32_ROUNDING
    engine.close()
    exact.close()


@pytest.mark.parametrize("n_ctx", [1, 2, 7, 255, 257, 1000])
def test_any_context_size_opens_with_any_number_of_sequences(tiny_llama: Path, n_ctx: int) -> None:
    """llama.cpp rounds the pool up; the limits say what was asked for."""
    engine = LlamaEngine(tiny_config(tiny_llama, n_ctx=n_ctx, max_sequences=64))
    assert (engine.limits.num_cells, engine.limits.max_sequences) == (n_ctx, 64)
    assert engine.limits.max_batch_tokens == 64
    append(engine, 63, DOCUMENT[: min(n_ctx, 100)])
    engine.close()


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 128, 200])
def test_the_batch_size_does_not_change_the_result(tiny_llama: Path, num_tokens: int) -> None:
    """Prompts around multiples of the batch, and computed in smaller pieces inside of it."""
    logits = []
    for n_batch, n_ubatch in ((64, None), (64, 16), (2048, None)):
        config = tiny_config(tiny_llama, n_batch=n_batch, n_ubatch=n_ubatch)
        engine = LlamaEngine(config)
        logits.append(append(engine, 0, (DOCUMENT + DOCUMENT)[:num_tokens]))
        engine.close()
    for other in logits[1:]:
        assert np.abs(other - logits[0]).max() < F32_ROUNDING


def test_equal_branches_of_one_batch_agree(engine: LlamaEngine) -> None:
    """Eight times the same question in one batch, and the same in batches of one and three."""
    append(engine, 0, DOCUMENT)
    for branch in range(1, 8):
        engine.fork(0, branch, len(DOCUMENT))
    rows: list[Logits] = []
    for branches in ([0], [1, 2, 3], [4, 5, 6, 7]):
        batch = Batch()
        ends = [batch.add(b, SUFFIXES[0], len(DOCUMENT), want_logits=True) for b in branches]
        engine.decode(batch)
        rows += [engine.logits(row) for row in ends]
    assert np.abs(np.stack(rows) - rows[0]).max() < F32_ROUNDING


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000\n", 4), ("150000 100000\n", 2), ("10000 100000\n", 1), ("odd", 4), (None, 4)],
)
def test_threads_are_the_cores_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, cpu_max: str | None, cores: int
) -> None:
    """By affinity, or fewer if the control group says so; a container has less than its host."""

    def read_text(path: Path) -> str:
        if cpu_max is None:
            raise FileNotFoundError(path)
        return cpu_max

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6}, raising=False)
    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_cores() == cores


# Sampling, on logits after DOCUMENT[:30].

ROW = 29


@pytest.fixture
def logits(engine: LlamaEngine) -> FloatArray:
    return append(engine, 0, DOCUMENT[:30]).astype(np.float64)


def drawn(engine: Engine, count: int = 400, **params: Any) -> Counter[int]:
    """How often each token is picked from the same logits."""
    return Counter(TestLlamaEngine().draws(engine, ROW, count, **params))


def test_top_p_keeps_the_smallest_set_that_holds_enough(
    engine: LlamaEngine, logits: FloatArray
) -> None:
    """Every token of the nucleus comes, and no other."""
    weights = np.exp(logits - logits.max())
    order = np.argsort(-logits)
    held = np.cumsum(weights[order]) / weights.sum()
    nucleus = set(order[: int(np.searchsorted(held, 0.9)) + 1].tolist())
    seen = set(drawn(engine, 1000, temperature=1.0, top_p=0.9, seed=0))
    assert seen <= nucleus
    assert set(order[:2].tolist()) <= seen


def test_min_p_drops_what_is_much_less_likely_than_the_best(
    engine: LlamaEngine, logits: FloatArray
) -> None:
    """A token comes only if its probability is at least a tenth of the best one's."""
    likely = set(np.flatnonzero(logits - logits.max() >= np.log(0.1)).tolist())
    assert set(drawn(engine, 1000, temperature=1.0, min_p=0.1, seed=0)) == likely


def test_temperature_flattens(engine: LlamaEngine, logits: FloatArray) -> None:
    """The best token's share falls as the temperature rises, and it is what softmax says."""
    best = int(logits.argmax())
    shares = []
    for temperature in (0.5, 1.0, 4.0):
        weights = np.exp((logits - logits.max()) / temperature)
        share = drawn(engine, 1000, temperature=temperature, seed=0)[best] / 1000
        assert share == pytest.approx(1 / weights.sum(), abs=0.06)
        shares.append(share)
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    "penalty",
    [{"repeat_penalty": 1000.0}, {"presence_penalty": 100.0}, {"frequency_penalty": 100.0}],
)
def test_penalties_push_away_what_was_seen_in_prompt_or_answer(
    engine: LlamaEngine, logits: FloatArray, penalty: dict[str, float]
) -> None:
    """The best token, seen in the prompt, is passed over; then each that was just said."""
    ranking = np.argsort(-logits).tolist()
    params = SamplingParams(**penalty)
    sampler = engine.create_sampler(params, [ranking[0]])
    assert [sampler.sample(ROW) for _ in range(3)] == ranking[1:4]
    sampler.close()


def test_penalties_look_no_further_back_than_their_window(
    engine: LlamaEngine, logits: FloatArray
) -> None:
    """Window 2: a token is free again two tokens later; window 0: no penalties."""
    first, second, third = np.argsort(-logits)[:3].tolist()
    for window, expected in ((2, [first, second, third, first]), (0, [first] * 4)):
        params = SamplingParams(presence_penalty=100.0, penalty_window_tokens=window)
        sampler = engine.create_sampler(params, [first, 65, 66])
        assert [sampler.sample(ROW) for _ in range(4)] == expected
        sampler.close()


def test_frequency_counts_and_presence_does_not(engine: LlamaEngine, logits: FloatArray) -> None:
    """Seen three times, the best token loses three times the frequency penalty."""
    first, second = np.argsort(-logits)[:2].tolist()
    gap = float(logits[first] - logits[second])
    for params, expected in (
        ({"frequency_penalty": gap / 2}, second),
        ({"presence_penalty": gap / 2}, first),
    ):
        sampler = engine.create_sampler(SamplingParams(**params), [first] * 3)
        assert sampler.sample(ROW) == expected
        sampler.close()


# Grammars.


def write(engine: LlamaEngine, grammar: str, limit: int = 60, **params: Any) -> str:
    """The text that follows the document under a grammar, until it ends."""
    engine.clear(0)
    append(engine, 0, DOCUMENT[:30])
    sampler = engine.create_sampler(SamplingParams(grammar=grammar, **params), DOCUMENT[:30])
    row = ROW
    tokens: list[int] = []
    try:
        while len(tokens) < limit:
            token = sampler.sample(row)
            if engine.tokenizer.is_end(token):
                return engine.tokenizer.decode(tokens)
            tokens.append(token)
            append(engine, 0, [token])
            row = 0
    finally:
        sampler.close()
    raise AssertionError(f"no end within {limit} tokens: {engine.tokenizer.decode(tokens)!r}")


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_text_matches_the_grammar(engine: LlamaEngine, temperature: float) -> None:
    """A choice, a fixed shape, characters of several bytes, optional and repeated parts."""
    for seed in range(4):
        settings: dict[str, Any] = {"temperature": temperature, "seed": seed}
        assert write(engine, 'root ::= "yes" | "no"', **settings) in ("yes", "no")
        date = write(engine, "root ::= [0-9]{4} [-] [01] [0-9]", **settings)
        assert len(date) == 7
        assert date[4] == "-"
        assert write(engine, 'root ::= "歪" [éü] "👩‍🚀"', **settings) in ("歪é👩‍🚀", "歪ü👩‍🚀")
        digits = write(engine, 'root ::= part part?\npart ::= "<" [0-9]{1,3} ">"', **settings)
        assert digits.strip("<>0123456789") == ""


def test_a_grammar_that_ends_ends_the_answer(engine: LlamaEngine) -> None:
    """Where nothing may follow, the end token comes; an empty answer is one."""
    assert write(engine, 'root ::= ""') == ""
    assert write(engine, 'root ::= "a"{50}') == "a" * 50


def test_markup_in_a_grammar_is_text(engine: LlamaEngine) -> None:
    """A literal that spells a control token is written letter by letter."""
    assert write(engine, 'root ::= "<|im_end|>"') == "<|im_end|>"


@pytest.mark.parametrize(
    ("grammar", "params"),
    [
        pytest.param("root ::= [z-a]", {}, id="empty-range"),
        pytest.param('root ::= "a" [\\xff]', {"logit_bias": {195: float("-inf")}}, id="bias"),
        pytest.param('root ::= "a"', {"logit_bias": {97: float("-inf")}}, id="forbidden-literal"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_dead_end_is_an_error(
    engine: LlamaEngine, grammar: str, params: dict[str, Any], temperature: float
) -> None:
    """The request fails where no token is left; the engine writes on for others."""
    with pytest.raises(GrammarError, match="allows no token"):
        write(engine, grammar, temperature=temperature, **params)
    assert write(engine, 'root ::= "a"') == "a"


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "a', 'x ::= "a"', "root ::= missing", "nonsense", 'root ::= "a"{1,2', "root ::= )"],
)
def test_what_does_not_parse_is_an_error(engine: LlamaEngine, grammar: str) -> None:
    """Told as GrammarError, with the grammar as its fact."""
    with pytest.raises(GrammarError) as refused:
        engine.create_sampler(SamplingParams(grammar=grammar), [])
    assert refused.value.facts["grammar"] == grammar
