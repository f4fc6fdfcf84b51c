"""Engines with LoRA adapters: what they compute, and whose KV it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_swarmkv.config import EngineConfig, KVType, LoraAdapter, SamplingParams
from langchain_swarmkv.engine.llama import LlamaEngine
from langchain_swarmkv.engine.weights import weights_digest
from langchain_swarmkv.errors import SequenceError, SnapshotMismatchError
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.statistics import PrefixSource
from tests.support.oracle import Oracle, OracleStep, assert_matches_oracle
from tests.support.tiny_gguf import ARCHITECTURES, ATTENTION_ARCHITECTURES, TinyLora
from tests.support.tolerances import F16_CELLS_ROUNDING, F32_ROUNDING, FLASH_ROUNDING
from tests.unit_tests.engine.engine_contract import (
    DOCUMENT,
    EngineContract,
    Logits,
    OpenEngine,
    append,
)

TinyGguf = Callable[..., Path]

SCALE = 0.7
PREFILL = SamplingParams(max_tokens=0)


@pytest.fixture
def adapter(tmp_path: Path) -> LoraAdapter:
    """Of the plainest tiny model."""
    return LoraAdapter(path=TinyLora().write(tmp_path / "adapter.gguf"), scale=SCALE)


def config(path: Path, *adapters: LoraAdapter, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "n_ctx": 512,
        "n_batch": 64,
        "max_sequences": 8,
        "n_threads": 1,
        "kv_type_k": KVType.F32,
        "kv_type_v": KVType.F32,
    }
    return EngineConfig(model_path=path, adapters=adapters, **{**defaults, **options})


def logits(config: EngineConfig) -> Logits:
    engine = LlamaEngine(config)
    found = append(engine, 0, DOCUMENT[:60])
    engine.close()
    return found


def scaled(adapter: LoraAdapter, scale: float) -> LoraAdapter:
    return LoraAdapter(path=adapter.path, scale=scale)


def adapters_of(config: EngineConfig) -> str:
    engine = LlamaEngine(config)
    engine.close()
    return engine.facts.identity.adapters


class TestLlamaEngineWithAdapter(EngineContract):
    """Forks, cuts and states, with an adapter at work."""

    tolerance = F32_ROUNDING

    @pytest.fixture(params=["llama", "jamba"])
    def open_engine(
        self, request: pytest.FixtureRequest, tiny_gguf: TinyGguf, tmp_path: Path
    ) -> OpenEngine:
        lora = TinyLora(request.param)
        adapter = LoraAdapter(path=lora.write(tmp_path / "adapter.gguf"), scale=SCALE)

        def open_llama(
            *, num_cells: int = 512, max_sequences: int = 8, max_batch_tokens: int = 64
        ) -> LlamaEngine:
            sizes = {
                "n_ctx": num_cells,
                "n_batch": max_batch_tokens,
                "max_sequences": max_sequences,
            }
            return LlamaEngine(config(tiny_gguf(request.param), adapter, **sizes))

        return open_llama


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_is_what_merging_it_gives(
    architecture: str, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    """The oracle is a model without adapters, whose weights hold this one; with its scale."""
    lora = TinyLora(architecture)
    adapter = LoraAdapter(path=lora.write(tmp_path / "adapter.gguf"), scale=SCALE)
    plain = tiny_gguf(architecture)
    adapted = logits(config(plain, adapter))
    assert np.abs(adapted - logits(config(plain))).max() > 1
    merged = tiny_gguf(architecture, merged=lora, merged_scale=SCALE)
    assert np.abs(adapted - logits(config(merged))).max() < F32_ROUNDING


def test_adapters_add_up(tiny_llama: Path, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """One merged and the other beside it, or both beside it."""
    first, second = (
        LoraAdapter(path=TinyLora(seed=seed).write(tmp_path / f"{seed}.gguf"), scale=scale)
        for seed, scale in ((1, SCALE), (2, -0.3))
    )
    both = logits(config(tiny_llama, first, second))
    assert np.abs(both - logits(config(tiny_llama, first))).max() > 1
    merged = tiny_gguf("llama", merged=TinyLora(seed=1), merged_scale=SCALE)
    assert np.abs(both - logits(config(merged, second))).max() < F32_ROUNDING


def test_a_scale_of_zero_adds_nothing(tiny_llama: Path, adapter: LoraAdapter) -> None:
    """Bit for bit; yet it is another identity."""
    without, zero = config(tiny_llama), config(tiny_llama, scaled(adapter, 0))
    assert np.array_equal(logits(without), logits(zero))
    assert adapters_of(without) == ""
    assert adapters_of(zero) == f"{weights_digest(adapter.path)} x 0.0"


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("architecture", ATTENTION_ARCHITECTURES)
def test_branches_with_an_adapter_equal_the_oracle(
    pair: bool, architecture: str, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    """A fan-out over one document; also where a second context prefills it."""
    lora = TinyLora(architecture)
    adapter = LoraAdapter(path=lora.write(tmp_path / "adapter.gguf"), scale=SCALE)
    settings = config(tiny_gguf(architecture), adapter, prefill_flash_attention=pair)
    document, params = DOCUMENT[:100], SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[*document, *range(50, 50 + length)] for length in (1, 5, 30)]
    with SwarmEngine(settings) as engine:
        engine.submit(document, PREFILL, pin="document").result()
        handles = [engine.submit(prompt, params, keep_prefix=False) for prompt in prompts]
        answers = [handle.result() for handle in handles]
        engine.check()
    merged = tiny_gguf(architecture, merged=lora, merged_scale=SCALE)
    with (
        Oracle(merged, 256, flash_attention=pair, n_threads=1) as oracle,
        Oracle(tiny_gguf(architecture), 256, flash_attention=pair, n_threads=1) as unadapted,
    ):
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.statistics.num_cached_tokens == len(document)
            steps: list[OracleStep] = oracle.greedy(prompt, 12)
            rounding = FLASH_ROUNDING if pair else F16_CELLS_ROUNDING
            assert_matches_oracle(answer.token_ids, steps, margin=2 * rounding)
            assert [step.token for step in unadapted.greedy(prompt, 12)] != list(answer.token_ids)


def test_both_contexts_of_a_pair_have_the_adapter(
    tiny_llama: Path, tiny_gguf: TinyGguf, adapter: LoraAdapter
) -> None:
    """A long chunk, which the one computes, and a short one behind it, which the other does."""

    def both(settings: EngineConfig) -> list[Logits]:
        engine = LlamaEngine(settings)
        rows = [append(engine, 0, DOCUMENT[:64]), append(engine, 0, DOCUMENT[64:70])]
        engine.close()
        return rows

    adapted = both(config(tiny_llama, adapter, prefill_flash_attention=True))
    merged = tiny_gguf("llama", merged=TinyLora(), merged_scale=SCALE)
    expected = both(config(merged, prefill_flash_attention=True))
    for ours, theirs in zip(adapted, expected, strict=True):
        assert np.abs(ours - theirs).max() < FLASH_ROUNDING


def test_the_content_of_an_adapter_counts_and_its_place_does_not(
    tiny_llama: Path, adapter: LoraAdapter, tmp_path: Path
) -> None:
    """Touched or copied: the same. Another content, scale or order: another."""
    ours = adapters_of(config(tiny_llama, adapter))
    os.utime(adapter.path, (0, 0))
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(adapter.path.read_bytes())
    assert ours == adapters_of(config(tiny_llama, adapter))
    assert ours == adapters_of(config(tiny_llama, LoraAdapter(path=copy, scale=SCALE)))
    other = LoraAdapter(path=TinyLora(seed=1).write(tmp_path / "other.gguf"), scale=SCALE)
    seen = [
        ours,
        adapters_of(config(tiny_llama, scaled(adapter, 0.6))),
        adapters_of(config(tiny_llama, other)),
        adapters_of(config(tiny_llama, adapter, other)),
        adapters_of(config(tiny_llama, other, adapter)),
    ]
    assert len(set(seen)) == len(seen)


def test_a_snapshot_of_another_scale_or_adapter_is_refused_by_name(
    tiny_llama: Path, adapter: LoraAdapter
) -> None:
    """By the engine with another scale, none, or another adapter under the same path."""
    with SwarmEngine(config(tiny_llama, adapter)) as engine:
        engine.submit(DOCUMENT[:100], PREFILL).result()
        snapshot = engine.snapshot(DOCUMENT[:100])
    assert snapshot is not None
    digest = weights_digest(adapter.path)

    def refusal(*adapters: LoraAdapter) -> SnapshotMismatchError:
        with (
            SwarmEngine(config(tiny_llama, *adapters)) as other,
            pytest.raises(SnapshotMismatchError, match="adapters") as refused,
        ):
            other.insert(snapshot)
        assert refused.value.facts["field"] == "adapters"
        assert refused.value.facts["seen"] == f"{digest} x {SCALE}"
        return refused.value

    assert refusal(scaled(adapter, 0.5)).facts["expected"] == f"{digest} x 0.5"
    assert "this engine has none" in str(refusal())
    with SwarmEngine(config(tiny_llama, adapter)) as same:
        same.insert(snapshot)
        result = same.submit([*DOCUMENT[:100], 65], PREFILL).result()
        assert result.statistics.num_cached_tokens == 100
    TinyLora(seed=1).write(adapter.path)
    refusal(adapter)


def test_the_state_of_another_scale_is_refused(tiny_llama: Path, adapter: LoraAdapter) -> None:
    """Below snapshots, too."""
    ours, theirs = (LlamaEngine(config(tiny_llama, one)) for one in (adapter, scaled(adapter, 0.5)))
    append(theirs, 0, DOCUMENT[:40])
    with pytest.raises(SequenceError, match="another model or to other settings"):
        ours.restore(0, theirs.save(0), 40)
    ours.close()
    theirs.close()


def test_engines_of_two_scales_share_a_folder_and_nothing_in_it(
    tiny_llama: Path, adapter: LoraAdapter, tmp_path: Path
) -> None:
    """What one wrote the other computes; what it wrote itself it finds."""
    folder = tmp_path / "kv"

    def source(*adapters: LoraAdapter) -> PrefixSource:
        with SwarmEngine(config(tiny_llama, *adapters), snapshot_dir=folder) as engine:
            return engine.submit(DOCUMENT[:200], PREFILL).result().statistics.prefix_source

    one, other = (adapter,), (scaled(adapter, 0.5),)
    assert [source(*one), source(*other), source()] == [PrefixSource.NONE] * 3
    assert [source(*one), source(*other), source()] == [PrefixSource.DISK] * 3
