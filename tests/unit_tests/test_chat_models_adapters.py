"""The chat model with LoRA adapters: they are engine settings like the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from pydantic import ValidationError

from langchain_swarmkv import (
    ChatSwarmKV,
    LoraAdapter,
    ModelNotFoundError,
    SnapshotMismatchError,
    document_message,
)
from tests.support.tiny_gguf import TinyLora

TALK = [document_message("The lamp reads the room. " * 8), HumanMessage("What does it read?")]


@pytest.fixture
def adapter(tmp_path: Path) -> LoraAdapter:
    return LoraAdapter(path=TinyLora().write(tmp_path / "adapter.gguf"))


def open_llm(path: Path, *adapters: Any, **options: Any) -> ChatSwarmKV:
    defaults = {"n_ctx": 1024, "max_tokens": 12, "n_threads": 1, "ignore_eos": True}
    return ChatSwarmKV(model_path=path, adapters=adapters, **{**defaults, **options})


def test_an_adapter_changes_the_answer(tiny_llama: Path, adapter: LoraAdapter) -> None:
    """Equal adapters share an engine, however they are given; another scale does not."""
    with (
        open_llm(tiny_llama) as plain,
        open_llm(tiny_llama, adapter) as one,
        open_llm(tiny_llama, {"path": str(adapter.path)}) as same,
        one.model_copy(update={"adapters": ()}) as without,
        open_llm(tiny_llama, LoraAdapter(path=adapter.path, scale=0.0)) as zero,
    ):
        answers = [str(llm.invoke(TALK).text) for llm in (plain, one, same, without, zero)]
        assert answers[0] == answers[3] == answers[4]
        assert answers[1] == answers[2] != answers[0]
        assert one._engine() is same._engine()
        assert plain._engine() is without._engine()
        assert len({id(llm._engine()) for llm in (plain, one, zero)}) == 3


def test_the_response_cache_tells_adapters_apart(tiny_llama: Path, adapter: LoraAdapter) -> None:
    """By path, scale, and what is in the file; and equal ones are equal."""
    llm = open_llm(tiny_llama, adapter)
    before = llm._identifying_params
    assert before == open_llm(tiny_llama, adapter)._identifying_params
    assert before != open_llm(tiny_llama)._identifying_params
    scaled = LoraAdapter(path=adapter.path, scale=0.5)
    assert before != open_llm(tiny_llama, scaled)._identifying_params
    os.utime(adapter.path, (0, 0))
    assert before != llm._identifying_params


def test_a_document_of_another_adapter_is_refused(
    tiny_llama: Path, adapter: LoraAdapter, tmp_path: Path
) -> None:
    """`load` names the field."""
    path = tmp_path / "document.kv"
    with open_llm(tiny_llama, adapter) as llm:
        llm.save(llm.prefill(TALK[:1]), path)
        llm.load(path)
    with (
        open_llm(tiny_llama) as other,
        pytest.raises(SnapshotMismatchError, match="adapters") as refused,
    ):
        other.load(path)
    assert refused.value.facts["field"] == "adapters"


def test_wrong_adapters_are_refused(tiny_llama: Path, adapter: LoraAdapter) -> None:
    """Twice the same when the object is made; a missing file at the first call."""
    with pytest.raises(ValidationError, match="more than once"):
        open_llm(tiny_llama, adapter, {"path": adapter.path, "scale": 0.5})
    missing = open_llm(tiny_llama, {"path": adapter.path.parent / "missing.gguf"})
    with pytest.raises(ModelNotFoundError, match=r"missing\.gguf"):
        missing.invoke(TALK)
