"""`ModelFacts.kv_bytes_per_token` is what a cell really takes, whatever the layout of the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from langchain_swarmkv.config import EngineConfig, KVType
from langchain_swarmkv.engine.llama import LlamaEngine
from langchain_swarmkv.errors import ModelLoadError
from tests.support.vocabularies import BYTE_LEVEL
from tests.unit_tests.engine.engine_contract import append

TinyGguf = Callable[..., Path]

BITS_PER_VALUE = {KVType.F32: 32, KVType.F16: 16, KVType.Q8_0: 8.5, KVType.Q4_0: 4.5}
CELL_TABLE_BYTES = 12
"""Position, number of sequences and sequence id: what a state holds of a cell besides K and V."""
N_LAYER = 3
N_EMBD = 64
TEXT = np.random.default_rng(0).integers(32, 127, 300).tolist()


def write_attention_gguf(path: Path, *, n_head: int, n_head_kv: int, head_dim: int) -> Path:
    """A llama of these heads; `head_dim` need not be n_embd / n_head."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_EMBD)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    BYTE_LEVEL.write(writer, add_bos=False, add_eos=False)
    shapes = {"token_embd": (len(BYTE_LEVEL), N_EMBD), "output_norm": (N_EMBD,)}
    for layer in range(N_LAYER):
        block = f"blk.{layer}"
        shapes |= {
            f"{block}.attn_norm": (N_EMBD,),
            f"{block}.attn_q": (n_head * head_dim, N_EMBD),
            f"{block}.attn_k": (n_head_kv * head_dim, N_EMBD),
            f"{block}.attn_v": (n_head_kv * head_dim, N_EMBD),
            f"{block}.attn_output": (N_EMBD, n_head * head_dim),
            f"{block}.ffn_norm": (N_EMBD,),
            f"{block}.ffn_gate": (N_EMBD, N_EMBD),
            f"{block}.ffn_up": (N_EMBD, N_EMBD),
            f"{block}.ffn_down": (N_EMBD, N_EMBD),
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_engine(path: Path, kv_type: KVType = KVType.F16) -> LlamaEngine:
    """With 1,000 cells, which llama.cpp rounds up to 1,024."""
    return LlamaEngine(
        EngineConfig(
            model_path=path,
            n_ctx=1000,
            n_batch=128,
            max_sequences=4,
            n_threads=1,
            kv_type_k=kv_type,
            kv_type_v=kv_type,
        )
    )


def state_growth(engine: LlamaEngine, start: int, end: int) -> float:
    """Bytes a token by which a sequence's state grows between two lengths."""
    engine.clear(0)
    append(engine, 0, TEXT[:start])
    first = len(engine.save(0))
    append(engine, 0, TEXT[start:end])
    return (len(engine.save(0)) - first) / (end - start)


@pytest.mark.parametrize("kv_type", BITS_PER_VALUE)
@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "head_dim"),
    [
        pytest.param(2, 2, 32, id="multi-head"),
        pytest.param(8, 2, 32, id="grouped"),
        pytest.param(8, 1, 32, id="multi-query"),
        pytest.param(2, 2, 96, id="explicit-head-dim"),
    ],
)
def test_full_attention(
    tmp_path: Path, kv_type: KVType, n_head: int, n_head_kv: int, head_dim: int
) -> None:
    """Exactly what a state grows by, which is K and V of the KV heads of all layers."""
    shape = {"n_head": n_head, "n_head_kv": n_head_kv, "head_dim": head_dim}
    engine = open_engine(write_attention_gguf(tmp_path / "model.gguf", **shape), kv_type)
    kv_bytes = N_LAYER * 2 * n_head_kv * head_dim * BITS_PER_VALUE[kv_type] / 8
    assert engine.facts.kv_bytes_per_token == kv_bytes + CELL_TABLE_BYTES
    assert state_growth(engine, 1, 100) == engine.facts.kv_bytes_per_token
    assert state_growth(engine, 100, 300) == engine.facts.kv_bytes_per_token
    assert engine.limits.num_cells == 1000
    engine.close()


@pytest.mark.parametrize("kv_type", BITS_PER_VALUE)
def test_windows(tiny_gguf: TinyGguf, kv_type: KVType) -> None:
    """A cell of the pool has all layers; a state keeps of windowed ones what the window sees."""
    engine = open_engine(tiny_gguf("gemma3", window=32), kv_type)
    per_layer = 2 * 64 * BITS_PER_VALUE[kv_type] / 8 + CELL_TABLE_BYTES
    assert engine.facts.kv_bytes_per_token == 2 * per_layer
    assert state_growth(engine, 1, 20) == 2 * per_layer
    assert state_growth(engine, 100, 300) == per_layer
    engine.close()


@pytest.mark.parametrize("kv_type", BITS_PER_VALUE)
def test_hybrid_and_recurrent(tiny_gguf: TinyGguf, kv_type: KVType) -> None:
    """Only attention layers grow; a running state is as large after one token as after 300."""
    hybrid = open_engine(tiny_gguf("jamba"), kv_type)
    assert hybrid.facts.kv_bytes_per_token == (
        2 * 64 * BITS_PER_VALUE[kv_type] / 8 + CELL_TABLE_BYTES
    )
    assert state_growth(hybrid, 1, 300) == hybrid.facts.kv_bytes_per_token
    hybrid.close()
    recurrent = open_engine(tiny_gguf("mamba"), kv_type)
    assert recurrent.facts.kv_bytes_per_token == 0
    assert state_growth(recurrent, 1, 300) == 0
    recurrent.close()


def test_heads_that_a_kv_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    """Quantised cells come in blocks of 32 values."""
    path = write_attention_gguf(tmp_path / "model.gguf", n_head=2, n_head_kv=2, head_dim=48)
    with pytest.raises(ModelLoadError, match="could not make a context"):
        open_engine(path, KVType.Q8_0)
    open_engine(path).close()
