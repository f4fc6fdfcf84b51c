"""An identity names weights and settings, never a path: states cannot cross between models."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_swarmkv.config import EngineConfig, FlashAttention, KVType, LoraAdapter
from langchain_swarmkv.engine import weights
from langchain_swarmkv.engine.identity import ModelIdentity
from langchain_swarmkv.engine.llama import LlamaEngine
from langchain_swarmkv.engine.weights import weights_digest
from langchain_swarmkv.errors import SequenceError
from langchain_swarmkv.native.library import library, library_build
from tests.support.tiny_gguf import TinyLora
from tests.support.tolerances import F16_CELLS_ROUNDING
from tests.unit_tests.engine.engine_contract import DOCUMENT, append

TinyGguf = Callable[..., Path]


def open_engine(path: Path, **options: Any) -> LlamaEngine:
    defaults = {"n_ctx": 256, "n_batch": 32, "max_sequences": 4, "n_threads": 1}
    return LlamaEngine(EngineConfig(model_path=path, **{**defaults, **options}))


def identity(path: Path, **options: Any) -> ModelIdentity:
    engine = open_engine(path, **options)
    engine.close()
    return engine.facts.identity


def test_other_weights_under_one_path_are_another_model(
    tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    """Equal in shape, vocabulary, name and size: only the identity tells, and it is checked."""
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_gguf("llama", seed=1), path)
    first = open_engine(path)
    append(first, 0, DOCUMENT[:40])
    state = first.save(0)
    first.close()

    shutil.copy(tiny_gguf("llama", seed=2), path)
    second = open_engine(path)
    assert second.facts.identity != first.facts.identity
    assert second.facts.name == first.facts.name
    with pytest.raises(SequenceError, match="another model"):
        second.restore(0, state, 40)
    assert second.num_tokens(0) == 0
    second.close()

    shutil.copy(tiny_gguf("llama", seed=1), path)
    again = open_engine(path)
    again.restore(0, state, 40)
    assert again.num_tokens(0) == 40
    again.close()


def test_every_shard_of_a_split_model_counts(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """Also one that is replaced under the same name; adapters are told from shards."""
    first, other = (tiny_gguf("llama", seed=seed, max_shard_tensors=9) for seed in (1, 2))
    model, others = (EngineConfig(model_path=path).files for path in (first, other))
    assert len(model) == 3
    for shard in model:
        shutil.copy(shard, tmp_path / shard.name)
    path = tmp_path / first.name
    engine = open_engine(path)
    append(engine, 0, DOCUMENT[:40])
    state, ours = engine.save(0), engine.facts.identity
    engine.close()
    adapter = LoraAdapter(path=TinyLora().write(tmp_path / "adapter.gguf"))
    adapted = identity(path, adapters=(adapter,))
    assert adapted.weights == ours.weights
    assert adapted.adapters == f"{weights_digest(adapter.path)} x 1.0"

    for shard, replacement in zip(model[1:], others[1:], strict=True):
        shutil.copy(replacement, tmp_path / shard.name)
        changed = open_engine(path)
        difference = ours.difference(changed.facts.identity)
        assert difference is not None
        assert difference.field == "weights"
        with pytest.raises(SequenceError, match="another model"):
            changed.restore(0, state, 40)
        changed.close()
        shutil.copy(shard, tmp_path / shard.name)
    assert identity(path) == ours


def test_a_touched_file_is_the_same_model(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """As is a copy of other name and place: the content counts."""
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_gguf("llama"), path)
    before = identity(path)
    os.utime(path, (0, 0))
    assert identity(path) == before
    copy = tmp_path / "copy.gguf"
    shutil.copy(path, copy)
    assert identity(copy) == before


@pytest.mark.parametrize(
    "options",
    [
        {"kv_type_k": KVType.Q8_0},
        {"kv_type_k": KVType.F32},
        {"kv_type_v": KVType.F32},
        {"rope_freq_base": 20000.0},
        {"rope_freq_scale": 0.5},
    ],
)
def test_what_changes_kv_changes_the_identity(tiny_llama: Path, options: dict[str, Any]) -> None:
    """In the field of that setting; and a state of one is refused by the other, both ways."""
    plain, other = open_engine(tiny_llama), open_engine(tiny_llama, **options)
    difference = plain.facts.identity.difference(other.facts.identity)
    assert difference is not None
    assert difference.field in (*options, "rope")
    for source, target in ((plain, other), (other, plain)):
        append(source, 0, DOCUMENT[:40])
        with pytest.raises(SequenceError):
            target.restore(1, source.save(0), 40)
        assert target.num_tokens(1) == 0
    plain.close()
    other.close()


def test_another_build_of_llama_cpp_is_another_identity(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one version of its Python package, too."""
    ours = identity(tiny_llama)
    assert ours.llama_cpp == library_build()
    monkeypatch.setattr("langchain_swarmkv.native.library.library_version", lambda: "0")
    monkeypatch.setattr(library(), "llama_version", lambda: b"1")
    difference = ours.difference(identity(tiny_llama))
    assert difference is not None
    assert difference.field == "llama_cpp"
    assert difference.theirs.startswith("0 (llama.cpp 1, commit ")


def test_a_long_context_counts_where_its_rope_factors_are_others(tiny_gguf: TinyGguf) -> None:
    """On each side of the length in the file KV is the same, whatever the size; across, it is not.

    Sizes are those that llama.cpp rounded up.
    """
    path = tiny_gguf("llama", n_ctx_short=512)
    sizes = (200, 512, 513, 1000)
    engines = [open_engine(path, n_ctx=n_ctx) for n_ctx in sizes]
    logits = [append(engine, 0, DOCUMENT[:40]) for engine in engines]
    ropes = [engine.facts.identity.rope for engine in engines]
    for engine in engines:
        engine.close()
    kinds = [rope.rpartition(", ")[2] for rope in ropes]
    assert kinds == ["short context", "short context", "long context", "long context"]
    assert engines[0].facts.identity == engines[1].facts.identity
    assert engines[2].facts.identity == engines[3].facts.identity
    for ours, theirs, is_same in ((0, 1, True), (1, 2, False), (2, 3, True)):
        assert np.allclose(logits[ours], logits[theirs], atol=F16_CELLS_ROUNDING) is is_same


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 700},
        {"n_batch": 64, "n_ubatch": 16},
        {"max_sequences": 9},
        {"n_threads": 2},
        {"use_mmap": False},
        {"mixed_prefill_tokens": 7},
        {"device": "shelf"},
        {"flash_attention": FlashAttention.OFF},
        {"flash_attention": FlashAttention.ON},
        {"prefill_flash_attention": True},
    ],
)
def test_what_does_not_change_kv_keeps_the_identity(
    tiny_llama: Path, options: dict[str, Any]
) -> None:
    """Sizes, threads, names and kernels: a state of either kernel serves the other."""
    assert identity(tiny_llama, **options) == identity(tiny_llama)


@pytest.mark.parametrize("architecture", ["gemma3", "jamba", "mamba", "qwen3"])
def test_a_kernel_counts_where_no_state_can_be_rewritten_for_the_other(
    tiny_gguf: TinyGguf, architecture: str
) -> None:
    """Windows and hybrids; a recurrent state has no V. Whoever is called equal takes the state."""
    engines = [
        open_engine(tiny_gguf(architecture), flash_attention=kernel)
        for kernel in (FlashAttention.ON, FlashAttention.OFF)
    ]
    difference = engines[0].facts.identity.difference(engines[1].facts.identity)
    if architecture in ("gemma3", "jamba"):
        assert difference is not None
        assert difference.field == "kernel"
    else:
        assert difference is None
        append(engines[0], 0, DOCUMENT[:40])
        engines[1].restore(1, engines[0].save(0), 40)
    for engine in engines:
        engine.close()


def test_a_large_file_is_read_once(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is remembered while path, size, times and inode stay; whatever the cache holds.

    One file is one path, however it is spelt.
    """
    monkeypatch.setattr(weights, "_REMEMBERED_BYTES", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache" / "swarmkv" / "digests.json"
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_llama, path)
    num_reads = 0
    digest_file = weights._digest

    def counted(path: Path) -> str:
        nonlocal num_reads
        num_reads += 1
        return digest_file(path)

    monkeypatch.setattr(weights, "_digest", counted)
    digest = weights_digest(path)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not cache.exists()  # just written, it may change again unseen
    os.utime(path, (0, 0))
    for _ in range(3):
        assert weights_digest(path) == digest
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.gguf").symlink_to(path)
    for spelling in ("model.gguf", "cache/../model.gguf", "link.gguf"):
        assert weights_digest(Path(spelling)) == digest
    assert num_reads == 2
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    for nonsense in ("", "[]", "{", '{"a": 1}', "[" * 100_000, json.dumps({str(path): [1]})):
        cache.write_text(nonsense)
        assert weights_digest(path) == digest
    os.utime(path, (1, 1))
    assert weights_digest(path) == digest
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, (1, 1))  # as it was, but for the time of change of the inode
    assert weights_digest(path) != digest
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert weights_digest(path) != digest
