"""Plain llama_cpp calls for tests: a model, a context, decode, fork, save, restore.

No code of the package is used, so that what is judged here shares no fault with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


class DecodeRefusedError(Exception):
    """`llama_decode` returned something other than 0."""


class Chunk(NamedTuple):
    """Tokens of one sequence at the positions `[start, start + len(tokens))`."""

    seq_id: int
    tokens: Sequence[int]
    start: int

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


class RawModel:
    """A GGUF in memory, on the CPU. A context manager."""

    def __init__(self, path: Path) -> None:
        silence_llama_log()
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.handle: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.vocab: Any = llama_cpp.llama_model_get_vocab(self.handle)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def __enter__(self) -> RawModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model, after its contexts; harmless twice."""
        if self.handle:
            llama_cpp.llama_model_free(self.handle)
        self.handle = None

    def tokenize(self, text: str, *, special: bool = False, affixes: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: The text.
            special: Whether control tokens are read in it.
            affixes: Whether start and end tokens are added where the vocabulary says so.
        """
        data = text.encode()
        buffer = (llama_cpp.llama_token * (len(data) + 3))()
        count = llama_cpp.llama_tokenize(
            self.vocab, data, len(data), buffer, len(buffer), affixes, special
        )
        return list(buffer[:count])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text; empty for control tokens."""
        buffer = ctypes.create_string_buffer(64)
        size = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[:size]


class RawContext:
    """A context with one unified pool of cells. A context manager.

    Args:
        model: Stays open as long as the context.
        n_ctx: Cells of the pool.
        n_seq_max: Sequences.
        flash_attention: The attention kernel.
        kv_type: Of the cache, as llama_cpp numbers them.
        kv_type_v: Of V, if another one than that of K.
        n_threads: For prefill and decode alike. More than one pays for real models only, on an idle
            machine: llama.cpp's threads wait for each other by spinning.
    """

    def __init__(
        self,
        model: RawModel,
        n_ctx: int,
        *,
        n_seq_max: int = 1,
        flash_attention: bool = False,
        kv_type: int = llama_cpp.GGML_TYPE_F16,
        kv_type_v: int | None = None,
        n_threads: int = 1,
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = n_seq_max
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k = kv_type
        params.type_v = kv_type if kv_type_v is None else kv_type_v
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._model = model
        self._handle: Any = llama_cpp.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise ValueError(f"llama.cpp cannot make a context of {n_ctx} cells")
        self._memory: Any = llama_cpp.llama_get_memory(self._handle)
        # At most n_ctx; a larger batch would abort the process.
        self.n_batch: int = llama_cpp.llama_n_batch(self._handle)

    def __enter__(self) -> RawContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the context; harmless twice."""
        if self._handle:
            llama_cpp.llama_free(self._handle)
        self._handle = None

    def prefill(self, seq_id: int, tokens: Sequence[int]) -> Logits:
        """Fill an empty sequence; logits after the last token, shape (n_vocab,)."""
        chunks = [
            Chunk(seq_id, tokens[start : start + self.n_batch], start)
            for start in range(0, len(tokens), self.n_batch)
        ]
        rows = [self.decode([chunk]) for chunk in chunks]
        return rows[-1].squeeze(0)

    def decode(self, chunks: Sequence[Chunk]) -> Logits:
        """Compute the chunks in one batch; logits after each, shape (len(chunks), n_vocab).

        Raises:
            DecodeRefusedError: the pool has no room, or the batch is invalid.
        """
        size = sum(len(chunk.tokens) for chunk in chunks)
        assert size <= self.n_batch, f"{size} tokens in a batch of {self.n_batch}"
        batch = llama_cpp.llama_batch_init(size, 0, 1)
        last_rows = []
        try:
            for seq_id, tokens, start in chunks:
                for position, token in enumerate(tokens, start):
                    _append(batch, token, position, seq_id)
                last_rows.append(batch.n_tokens - 1)
                batch.logits[last_rows[-1]] = 1
            code = llama_cpp.llama_decode(self._handle, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if code != 0:
            raise DecodeRefusedError(f"llama_decode returned {code} for {size} tokens")
        return np.stack([self._logits(row) for row in last_rows])

    def _logits(self, row: int) -> Logits:
        values = llama_cpp.llama_get_logits_ith(self._handle, row)
        return np.array(np.ctypeslib.as_array(values, (self._model.n_vocab,)), dtype=np.float32)

    def fork(self, source: int, target: int, num_tokens: int = -1) -> None:
        """Share the first `num_tokens` cells of `source`, or all, with an empty sequence."""
        self.share(source, target, 0, num_tokens)

    def share(self, source: int, target: int, first: int, end: int) -> None:
        """Add the cells of `source` at positions [first, end) to `target`; -1: all that follow."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, first, end)

    def clear(self, seq_id: int) -> None:
        """Empty a sequence."""
        llama_cpp.llama_memory_seq_rm(self._memory, seq_id, -1, -1)

    def positions(self, seq_id: int) -> tuple[int, int]:
        """Lowest and highest position that the cache holds; (-1, -1) for an empty sequence."""
        return (
            llama_cpp.llama_memory_seq_pos_min(self._memory, seq_id),
            llama_cpp.llama_memory_seq_pos_max(self._memory, seq_id),
        )

    def save(self, seq_id: int) -> bytes:
        """The state of a sequence."""
        size = llama_cpp.llama_state_seq_get_size(self._handle, seq_id)
        buffer = (ctypes.c_uint8 * size)()
        written = llama_cpp.llama_state_seq_get_data(self._handle, buffer, size, seq_id)
        return bytes(buffer[:written])

    def restore(self, seq_id: int, state: bytes) -> bool:
        """Fill an empty sequence from `save`'s bytes; whether llama.cpp took them."""
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        taken = llama_cpp.llama_state_seq_set_data(self._handle, buffer, len(state), seq_id)
        return bool(taken == len(state))


def _append(batch: Any, token: int, position: int, seq_id: int) -> None:
    row = batch.n_tokens
    batch.token[row] = token
    batch.pos[row] = position
    batch.n_seq_id[row] = 1
    batch.seq_id[row][0] = seq_id
    batch.logits[row] = 0
    batch.n_tokens += 1


@llama_cpp.llama_log_callback
def _drop_log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    pass


def silence_llama_log() -> None:
    """Drop what llama.cpp logs, process-wide. This module keeps the callback alive."""
    llama_cpp.llama_log_set(_drop_log, ctypes.c_void_p(0))
