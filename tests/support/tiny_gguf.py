"""Models of one or two megabytes with random weights, one for each kind of KV cache.

The weights are scaled so that a fault in the KV shows. Attention is sharp but not one-hot, the
recurrent states forget slowly, and what the layers add outweighs the embedding of the last token:
every token of the context moves the logits, and the best token leads the next by more than
rounding. Only printable text can win, so greedy runs never end by themselves and their text says
as much as their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, RopeScalingType

from tests.support.vocabularies import BYTE_LEVEL, Vocabulary

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_WITH_BOS = "{{ bos_token }}" + CHATML

N_HEAD = 4
N_HEAD_KV = 2
HEAD_DIM = 32
N_EMBD = N_HEAD * HEAD_DIM
N_FF = 2 * N_EMBD

SSM_INNER = 2 * N_EMBD
SSM_STATE = 16
SSM_CONV = 4
SSM_RANK = 8

QK_GAIN = 1.5
"""Its square is the standard deviation of attention scores: a few tokens stand out."""
ATTENTION_GAIN = 6.0
"""Makes up for averaging over the values of many tokens."""
OUTPUT_GAIN = 4.0
"""Standard deviation of the logits of printable tokens."""


@dataclass
class _Tensors:
    """Random tensors by name, drawn in the order in which they are added."""

    rng: np.random.Generator
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        """Map unit-variance inputs to outputs with standard deviation `gain`."""
        weights = self.rng.standard_normal((n_out, n_in)) * (gain / np.sqrt(n_in))
        self.add(f"{name}.weight", weights)

    def vector(self, name: str, size: int, mean: float, spread: float = 0.1) -> None:
        self.add(name, mean + spread * self.rng.standard_normal(size))

    def add(self, name: str, values: np.ndarray) -> None:
        self.arrays[name] = np.ascontiguousarray(values, dtype=np.float32)


def _attention(
    tensors: _Tensors, block: str, *, biases: bool = False, head_norms: bool = False
) -> None:
    sizes = {"q": N_EMBD, "k": N_HEAD_KV * HEAD_DIM, "v": N_HEAD_KV * HEAD_DIM}
    for name, size in sizes.items():
        tensors.matrix(f"{block}.attn_{name}", size, N_EMBD, 1.0 if name == "v" else QK_GAIN)
        if biases:
            tensors.vector(f"{block}.attn_{name}.bias", size, 0.0)
    if head_norms:
        tensors.vector(f"{block}.attn_q_norm.weight", HEAD_DIM, QK_GAIN)
        tensors.vector(f"{block}.attn_k_norm.weight", HEAD_DIM, QK_GAIN)
    tensors.matrix(f"{block}.attn_output", N_EMBD, N_EMBD, ATTENTION_GAIN)


def _feed_forward(tensors: _Tensors, block: str) -> None:
    tensors.vector(f"{block}.ffn_norm.weight", N_EMBD, 1.0)
    tensors.matrix(f"{block}.ffn_gate", N_FF, N_EMBD)
    tensors.matrix(f"{block}.ffn_up", N_FF, N_EMBD)
    tensors.matrix(f"{block}.ffn_down", N_EMBD, N_FF)


def _state_space(tensors: _Tensors, block: str, *, inner_norms: bool = False) -> None:
    """A Mamba block whose channels remember from tens to thousands of tokens."""
    tensors.matrix(f"{block}.ssm_in", 2 * SSM_INNER, N_EMBD)
    tensors.matrix(f"{block}.ssm_conv1d", SSM_INNER, SSM_CONV, 2.0)
    tensors.vector(f"{block}.ssm_conv1d.bias", SSM_INNER, 0.0)
    tensors.matrix(f"{block}.ssm_x", SSM_RANK + 2 * SSM_STATE, SSM_INNER, 2.0)
    if inner_norms:
        tensors.vector(f"{block}.ssm_dt_norm.weight", SSM_RANK, 1.0)
        tensors.vector(f"{block}.ssm_b_norm.weight", SSM_STATE, 1.0)
        tensors.vector(f"{block}.ssm_c_norm.weight", SSM_STATE, 1.0)
    tensors.matrix(f"{block}.ssm_dt", SSM_INNER, SSM_RANK)
    tensors.vector(f"{block}.ssm_dt.bias", SSM_INNER, -2.0)
    decays = np.geomspace(0.003, 0.3, SSM_STATE)
    tensors.add(f"{block}.ssm_a", -np.tile(decays, (SSM_INNER, 1)))
    tensors.vector(f"{block}.ssm_d", SSM_INNER, 1.0)
    tensors.matrix(f"{block}.ssm_out", N_EMBD, SSM_INNER, 2.0)


def _llama_block(tensors: _Tensors, block: str, layer: int) -> None:
    _attention(tensors, block)
    _feed_forward(tensors, block)


def _qwen2_block(tensors: _Tensors, block: str, layer: int) -> None:
    _attention(tensors, block, biases=True)
    _feed_forward(tensors, block)


def _qwen3_block(tensors: _Tensors, block: str, layer: int) -> None:
    _attention(tensors, block, head_norms=True)
    _feed_forward(tensors, block)


def _gemma3_block(tensors: _Tensors, block: str, layer: int) -> None:
    _attention(tensors, block, head_norms=True)
    tensors.vector(f"{block}.post_attention_norm.weight", N_EMBD, 1.5)
    _feed_forward(tensors, block)
    tensors.vector(f"{block}.post_ffw_norm.weight", N_EMBD, 1.0)


def _mamba_block(tensors: _Tensors, block: str, layer: int) -> None:
    _state_space(tensors, block)


def _jamba_block(tensors: _Tensors, block: str, layer: int) -> None:
    if layer % 2:
        _attention(tensors, block)
    else:
        _state_space(tensors, block, inner_norms=True)
    _feed_forward(tensors, block)


_BLOCKS: Mapping[str, Callable[[_Tensors, str, int], None]] = {
    "llama": _llama_block,
    "qwen2": _qwen2_block,
    "qwen3": _qwen3_block,
    "gemma3": _gemma3_block,
    "mamba": _mamba_block,
    "jamba": _jamba_block,
}
ATTENTION_ARCHITECTURES: Sequence[str] = ("llama", "qwen2", "qwen3")
"""One KV cache over the whole context: a sequence can be cut anywhere."""
RECURRENT_ARCHITECTURES: Sequence[str] = ("mamba", "jamba")
"""A running state, alone (mamba) or beside attention (jamba)."""
ARCHITECTURES: Sequence[str] = (*ATTENTION_ARCHITECTURES, "gemma3", *RECURRENT_ARCHITECTURES)


def write_tiny_gguf(
    path: Path,
    architecture: str,
    *,
    seed: int = 0,
    n_ctx_train: int = 4096,
    n_layer: int = 2,
    window: int = 32,
    chat_template: str | Sequence[Mapping[str, str]] | None = CHATML,
    vocabulary: Vocabulary = BYTE_LEVEL,
    add_bos: bool = False,
    add_eos: bool = False,
    merged: TinyLora | None = None,
    merged_scale: float = 1.0,
    max_shard_tensors: int = 0,
    n_ctx_short: int | None = None,
) -> Path:
    """Write a model; equal arguments give equal bytes.

    Args:
        path: The file to write.
        architecture: One of `ARCHITECTURES`.
        seed: Of the weights. Models that differ in it alone have KV states of one shape.
        n_ctx_train: Most positions of a sequence.
        n_layer: Layers, at least 2. In gemma3 and jamba the odd ones attend to everything; the
            even ones see a window or keep a running state.
        window: Tokens that gemma3's windowed layers see.
        chat_template: Jinja source, or several with a "name" each, or None for a base model.
        vocabulary: Of `tests.support.vocabularies`.
        add_bos: Whether the tokenizer is told to put a start token before every text.
        add_eos: Whether the tokenizer is told to put an end token after every text.
        merged: An adapter that is added to the weights.
        merged_scale: Its scale.
        max_shard_tensors: If given, the model is split into files of so many tensors.
        n_ctx_short: If given, longer contexts have other RoPE factors (LongRoPE; llama only).

    Returns:
        `path`, or the first of the files.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=max_shard_tensors)
    writer.add_name(f"tiny-{architecture}")
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layer)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_shape(writer, architecture, n_layer, window)
    vocabulary.write(writer, add_bos=add_bos, add_eos=add_eos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    tensors = _tensors(architecture, seed, n_layer, vocabulary)
    for name, (a, b) in (merged.pairs() if merged else {}).items():
        assert merged is not None
        tensors[name] += merged_scale * merged.alpha / merged.rank * (b @ a)
    if n_ctx_short is not None:
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(n_ctx_short)
        for kind, factor in {"short": 1.0, "long": 4.0}.items():
            tensors[f"rope_factors_{kind}.weight"] = np.full(HEAD_DIM // 2, factor, np.float32)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    _write(writer)
    return writer.format_shard_names(path)[0]


@dataclass(frozen=True)
class TinyLora:
    """A LoRA adapter for tiny models of two layers; it moves the logits by about their size."""

    architecture: str = "llama"
    seed: int = 0
    rank: int = 4
    alpha: float = 8.0

    def pairs(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """A of shape (rank, n_in) and B of shape (n_out, rank), by the name of the matrix."""
        rng = np.random.default_rng(1000 + self.seed)
        pairs = {}
        for name, matrix in _tensors(self.architecture, 0, 2, BYTE_LEVEL).items():
            if name.endswith(("attn_q.weight", "attn_v.weight", "ffn_down.weight", "_in.weight")):
                n_out, n_in = matrix.shape
                a = rng.standard_normal((self.rank, n_in)) / np.sqrt(n_in)
                b = rng.standard_normal((n_out, self.rank)) / np.sqrt(self.rank) / 4
                pairs[name] = a.astype(np.float32), b.astype(np.float32)
        return pairs

    def write(self, path: Path) -> Path:
        """Write it as llama.cpp's converter would."""
        tensors = {}
        for name, (a, b) in self.pairs().items():
            tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
        return write_lora_gguf(path, tensors, architecture=self.architecture, alpha=self.alpha)


def write_lora_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    alpha: object = 8.0,
    general_type: object = "adapter",
    adapter_type: object = "lora",
    more: Mapping[str, object] | None = None,
) -> Path:
    """Write an adapter, or what is none: nothing is checked, and None leaves a value out."""
    writer = GGUFWriter(path, architecture)
    values = {
        "general.type": general_type,
        "adapter.type": adapter_type,
        "adapter.lora.alpha": alpha,
        **(more or {}),
    }
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    _write(writer)
    return path


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: GGUFWriter, architecture: str, n_layer: int, window: int) -> None:
    if architecture == "mamba":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    else:
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(N_HEAD)
        writer.add_head_count_kv(
            [N_HEAD_KV if layer % 2 else 0 for layer in range(n_layer)]
            if architecture in RECURRENT_ARCHITECTURES
            else N_HEAD_KV
        )
    if architecture in RECURRENT_ARCHITECTURES:
        writer.add_ssm_conv_kernel(SSM_CONV)
        writer.add_ssm_inner_size(SSM_INNER)
        writer.add_ssm_state_size(SSM_STATE)
        writer.add_ssm_time_step_rank(SSM_RANK)
    elif architecture == "gemma3":
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([layer % 2 == 0 for layer in range(n_layer)])


def _tensors(
    architecture: str, seed: int, n_layer: int, vocabulary: Vocabulary
) -> dict[str, np.ndarray]:
    tensors = _Tensors(np.random.default_rng(seed))
    embeddings = tensors.rng.standard_normal((len(vocabulary), N_EMBD))
    # Gemma multiplies embeddings by sqrt(n_embd).
    tensors.add("token_embd.weight", embeddings / (N_EMBD**0.5 if architecture == "gemma3" else 1))
    for layer in range(n_layer):
        block = f"blk.{layer}"
        tensors.vector(f"{block}.attn_norm.weight", N_EMBD, 1.0)
        _BLOCKS[architecture](tensors, block, layer)
    tensors.vector("output_norm.weight", N_EMBD, 1.0)
    tensors.matrix("output", len(vocabulary), N_EMBD, OUTPUT_GAIN)
    tensors.arrays["output.weight"][[not _is_printable(text) for text in vocabulary.texts]] = 0.0
    return tensors.arrays


def _is_printable(text: bytes) -> bool:
    return text.isascii() and text.decode("ascii", "ignore").isprintable() and text != b""
