"""Settings are validated when they are made, frozen afterwards, and unknown names refused."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from langchain_swarmkv.config import (
    MAX_SEQUENCES,
    EngineConfig,
    FlashAttention,
    KVType,
    LoraAdapter,
    SamplingParams,
)

PATH = Path("/models/model.gguf")


def engine_config(**options: Any) -> EngineConfig:
    return EngineConfig(model_path=PATH, **options)


def refusal(make: Any, **options: Any) -> str:
    """The message of the only thing that is wrong."""
    with pytest.raises(ValidationError) as refused:
        make(**options)
    (error,) = refused.value.errors()
    return str(error["msg"])


# The engine's.


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 0},
        {"n_ctx": -1},
        {"n_ctx": 1 << 31},
        {"n_ctx": 1.5},
        {"n_batch": 0},
        {"n_batch": 1 << 32},
        {"n_ubatch": 0},
        {"max_sequences": 1},
        {"max_sequences": 0},
        {"mixed_prefill_tokens": 0},
        {"n_threads": 0},
        {"n_threads": 513},
        {"n_threads_batch": 0},
        {"n_threads_batch": 513},
        {"n_gpu_layers": -2},
        {"n_gpu_layers": 1 << 40},
        {"rope_freq_base": 0.0},
        {"rope_freq_base": math.inf},
        {"rope_freq_base": math.nan},
        {"rope_freq_scale": -1.0},
        {"rope_freq_scale": math.inf},
        {"kv_type_k": "q3_k"},
        {"adapters": [{"path": "a.gguf", "scale": math.nan}]},
        {"adapters": [{"path": "a.gguf", "scale": math.inf}]},
        {"adapters": [{"path": "a.gguf", "scale": 1e7}]},
        {"adapters": [{"path": "a.gguf", "scales": 1}]},
        {"adapters": [{"scale": 1}]},
        {"flash_attention": "sometimes"},
        {"n_contex": 8192},
        {"temperature": 0.5},
    ],
)
def test_engine_settings_out_of_bounds_are_refused(options: dict[str, Any]) -> None:
    """Each alone, misspelt and misplaced ones too."""
    assert refusal(engine_config, **options)


def test_more_sequences_than_llama_cpp_has_are_refused_by_name() -> None:
    """With the limit; the limit itself is allowed."""
    assert engine_config(max_sequences=256).max_sequences == MAX_SEQUENCES == 256
    assert "256" in refusal(engine_config, max_sequences=257)


def test_settings_that_contradict_each_other_are_refused_with_both_values() -> None:
    """A step must have room for one token of each branch, and so on."""
    assert "n_ubatch=600 is more than n_batch=512" in refusal(engine_config, n_ubatch=600)
    message = refusal(engine_config, max_sequences=65, n_batch=64)
    assert "max_sequences=65 is more than n_batch=64" in message
    for kv_type in (KVType.Q8_0, KVType.Q4_0):
        options = {"kv_type_v": kv_type, "flash_attention": FlashAttention.OFF}
        assert "needs flash attention" in refusal(engine_config, **options)
        assert engine_config(kv_type_k=kv_type, flash_attention="off").kv_type_k is kv_type
        assert engine_config(kv_type_v=kv_type).flash_attention is FlashAttention.AUTO


def test_a_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that equal files are equal settings, wherever the process is and however it is spelt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("model.gguf", "~/model.gguf", Path("model.gguf"), tmp_path / "model.gguf"):
        assert EngineConfig(model_path=path).model_path == tmp_path / "model.gguf"


def test_an_adapter_is_given_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under one path, however it is spelt; what counts is what is in which file, in which order."""
    monkeypatch.chdir(tmp_path)
    first, second = LoraAdapter(path="a.gguf"), LoraAdapter(path=tmp_path / "b.gguf", scale=0)
    config = engine_config(adapters=[first, {"path": "b.gguf", "scale": 0}])
    assert config.adapters == (first, second)
    assert config.files == (PATH, tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert config != engine_config(adapters=[second, first])
    assert hash(config) == hash(engine_config(adapters=(first, second)))
    again = {"path": tmp_path / "a.gguf", "scale": 0.5}
    assert "a.gguf is given more than once" in refusal(engine_config, adapters=[first, again])


def test_the_shards_of_a_model_are_files_of_it(tmp_path: Path) -> None:
    """Named as llama.cpp names them, as far as they exist; the adapters' come after them."""
    shards = [tmp_path / f"a-00001-of-3.gguf-{k:05}-of-00012.gguf" for k in range(1, 13)]
    for shard in shards:
        shard.touch()
    others = [tmp_path / name for name in ("a-00001-of-00002.gguf", "a-00002-of-00003.gguf", "b")]
    for other in others:
        other.touch()
    adapter = {"path": tmp_path / "b"}
    config = EngineConfig(model_path=shards[0], adapters=[adapter])
    assert config.files == (*shards, tmp_path / "b")
    shards.pop(6).unlink()
    assert config.files == (*shards, tmp_path / "b")
    for alone in (shards[1], *others):
        assert EngineConfig(model_path=alone).files == (alone,)


def test_making_settings_touches_no_file() -> None:
    """A missing model is found out when it is opened."""
    assert not PATH.exists()
    assert engine_config().model_path == PATH


def test_equal_settings_are_one_key() -> None:
    """Engines are shared by them; words and enums are the same."""
    first = engine_config(kv_type_k="q8_0", n_threads=2)
    second = engine_config(kv_type_k=KVType.Q8_0, n_threads=2)
    assert first == second
    assert len({first, second, engine_config(n_threads=3)}) == 2
    assert pickle.loads(pickle.dumps(first)) == first


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({}, "cpu"),
        ({"n_gpu_layers": -1}, "cuda:0"),
        ({"n_gpu_layers": 12}, "cuda:0"),
        ({"device": "cuda:1"}, "cuda:1"),
        ({"n_gpu_layers": 5, "device": "cpu"}, "cpu"),
    ],
)
def test_the_device_follows_from_the_layers_unless_named(
    options: dict[str, Any], device: str
) -> None:
    """Which lock a step takes."""
    assert engine_config(**options).device_name == device


# A request's.


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_k": 1 << 31},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repeat_penalty": 0.0},
        {"repeat_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"presence_penalty": math.inf},
        {"penalty_window_tokens": -1},
        {"penalty_window_tokens": (1 << 20) + 1},
        {"seed": -1},
        {"seed": (1 << 32) - 1},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {5: math.inf}},
        {"logit_bias": {5: 1e7}},
        {"logit_bias": {5: -1e39}},
        {"stop": ("",)},
        {"stop": ("a", "")},
        {"logprobs": -1},
        {"logprobs": 65},
        {"max_token": 5},
        {"stream": True},
    ],
)
def test_sampling_settings_out_of_bounds_are_refused(options: dict[str, Any]) -> None:
    """Each alone, misspelt and misplaced ones too."""
    assert refusal(SamplingParams, **options)


def test_sampling_bounds_themselves_are_allowed() -> None:
    """Zero tokens, certainty, a forbidden token."""
    params = SamplingParams(
        max_tokens=0,
        temperature=0,
        top_p=1,
        min_p=1,
        penalty_window_tokens=0,
        seed=(1 << 32) - 2,
        logit_bias={0: -math.inf, 1: 1e6, 2: -1e6},
        stop=("\n",),
        logprobs=0,
    )
    assert params.logit_bias[0] == -math.inf
    assert params.logprobs == 0


def test_a_grammar_decides_the_end() -> None:
    """Going on beyond it is a contradiction, refused before anything runs."""
    grammar = 'root ::= "a"'
    assert SamplingParams(grammar=grammar).grammar == grammar
    assert "contradicts" in refusal(SamplingParams, grammar=grammar, ignore_eos=True)
    assert "contradicts" in refusal(SamplingParams, guide="start: /a/", ignore_eos=True)
    assert "one of them" in refusal(SamplingParams, guide="start: /a/", grammar=grammar)


def test_the_default_is_greedy_and_neutral() -> None:
    """Nothing is cut, penalised or forced unless asked for."""
    assert SamplingParams().model_dump() == {
        "max_tokens": 256,
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repeat_penalty": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "penalty_window_tokens": 64,
        "seed": None,
        "logit_bias": {},
        "stop": (),
        "logprobs": None,
        "grammar": None,
        "guide": None,
        "ignore_eos": False,
    }


@pytest.mark.parametrize("settings", [engine_config(), SamplingParams()])
def test_settings_are_frozen(settings: BaseModel) -> None:
    """They may be shared between threads."""
    for name in type(settings).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(settings, name, None)


@pytest.mark.parametrize("settings", [engine_config(n_threads=2), SamplingParams(seed=3)])
def test_settings_survive_as_data(settings: BaseModel) -> None:
    """To JSON and back."""
    assert type(settings).model_validate_json(settings.model_dump_json()) == settings
