"""Contexts: llama.cpp's return codes as errors, and what is given back when opening fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import pytest

from langchain_swarmkv.config import EngineConfig
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.llama import LlamaEngine
from langchain_swarmkv.errors import (
    DecodeAbortedError,
    DecodeError,
    DecodeFatalError,
    InvalidBatchError,
    ModelLoadError,
    NoRoomError,
    UnsupportedModelError,
)
from langchain_swarmkv.native.context import ContextHandle
from langchain_swarmkv.native.model import ModelHandle
from tests.unit_tests.engine.engine_contract import append


@pytest.fixture
def config(tiny_llama: Path) -> EngineConfig:
    return EngineConfig(model_path=tiny_llama, n_ctx=256, n_batch=32, max_sequences=4, n_threads=1)


@pytest.fixture
def engine(config: EngineConfig) -> Iterator[LlamaEngine]:
    engine = LlamaEngine(config)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("code", "error", "retryable"),
    [
        (1, NoRoomError, True),
        (2, DecodeAbortedError, True),
        (-1, InvalidBatchError, False),
        (-2, DecodeFatalError, True),
        (-3, DecodeFatalError, True),
    ],
)
def test_each_return_code_has_its_error(
    engine: LlamaEngine,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[DecodeError],
    retryable: bool,
) -> None:
    """With the code as a fact; the rows of the failed batch have no logits, nor have older ones."""
    append(engine, 0, [65])
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", lambda context, batch: code)
        batch = Batch()
        row = batch.add(0, [66], 1, want_logits=True)
        with pytest.raises(error, match=f"returned {code} for a batch of 1") as failed:
            engine.decode(batch)
    assert type(failed.value) is error
    assert failed.value.facts["return_code"] == code
    assert failed.value.retryable is retryable
    with pytest.raises(InvalidBatchError):
        engine.logits(row)
    assert append(engine, 0, [66]).any()


def test_a_model_that_cannot_continue_a_prompt_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders load in llama.cpp and say nothing useful."""
    monkeypatch.setattr(ModelHandle, "is_decoder", False)
    with pytest.raises(UnsupportedModelError, match="decoder"):
        LlamaEngine(config)


def test_a_context_that_cannot_be_made_is_an_error(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model's path, and the model is freed."""
    freed: list[object] = []
    free = llama_cpp.llama_model_free

    def count_and_free(pointer: object) -> None:
        freed.append(pointer)
        free(pointer)

    monkeypatch.setattr(llama_cpp, "llama_model_free", count_and_free)
    monkeypatch.setattr(llama_cpp, "llama_init_from_model", lambda model, params: None)
    with pytest.raises(ModelLoadError, match="n_ctx=256") as failed:
        LlamaEngine(config)
    assert failed.value.facts["path"] == config.model_path
    assert len(freed) == 2  # the vocabulary and the weights


def test_everything_is_freed_once(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context before model, each once, however often the engine is closed."""
    freed: list[str] = []

    def watch(name: str) -> None:
        free = getattr(llama_cpp, name)

        def note_and_free(pointer: object) -> None:
            freed.append(name)
            free(pointer)

        monkeypatch.setattr(llama_cpp, name, note_and_free)

    engine = LlamaEngine(config)
    for name in ("llama_free", "llama_model_free"):
        watch(name)
    for _ in range(3):
        engine.close()
    assert freed == ["llama_free", "llama_model_free", "llama_model_free"]


def test_a_closed_context_frees_nothing_again(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handle itself is safe, not only the engine around it."""
    engine = LlamaEngine(config)
    handle = engine._native
    assert isinstance(handle, ContextHandle)
    engine.close()
    monkeypatch.setattr(llama_cpp, "llama_free", lambda pointer: pytest.fail("freed twice"))
    handle.close()
