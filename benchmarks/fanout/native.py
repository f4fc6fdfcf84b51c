"""Bare llama.cpp: a model, a context, batches from arrays. What floor, baselines and oracle share.

No code of the package is used, so that what is judged and timed here shares no fault with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt
from typing_extensions import Self

__all__ = [
    "BATCH_TOKENS",
    "Chunk",
    "Context",
    "Model",
    "NativeError",
    "rounded_cells",
    "system_info",
]

Logits = npt.NDArray[np.float32]

BATCH_TOKENS = 512
"""Tokens of one `llama_decode`, for every contender."""
CELLS_STEP = 256
_UNQUANTISED_FILE_TYPES = (0, 1, 32)  # enum llama_ftype: F32, F16, BF16
_GUESSED = 1024  # LLAMA_FTYPE_GUESSED


class NativeError(Exception):
    """llama.cpp said no."""


class Chunk(NamedTuple):
    """Tokens of one sequence at the positions `[start, start + len(tokens))`."""

    seq_id: int
    tokens: Sequence[int]
    start: int


def rounded_cells(num_tokens: int) -> int:
    """A context size that holds that many tokens."""
    return -(-num_tokens // CELLS_STEP) * CELLS_STEP


def system_info() -> str:
    """Features that this build of llama.cpp uses."""
    return " ".join(llama_cpp.llama_print_system_info().decode().split())


class Model:
    """A GGUF in memory. A context manager."""

    def __init__(self, path: Path, *, gpu_layers: int = 0) -> None:
        llama_cpp.llama_log_set(_drop_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        self.handle: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise NativeError(f"llama.cpp cannot load {path.name}")
        self._vocabulary: Any = llama_cpp.llama_model_get_vocab(self.handle)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._vocabulary))

    def end_tokens(self) -> list[int]:
        """Tokens that end a text."""
        return [
            token
            for token in range(self.n_vocab)
            if llama_cpp.llama_vocab_is_eog(self._vocabulary, token)
        ]

    @property
    def is_quantised(self) -> bool:
        """Whether the weights are less than 16 bit wide."""
        file_type = int(llama_cpp.llama_model_ftype(self.handle)) & ~_GUESSED
        return file_type not in _UNQUANTISED_FILE_TYPES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free it, after its contexts; harmless twice."""
        if self.handle:
            llama_cpp.llama_model_free(self.handle)
        self.handle = None


class Context:
    """A context with one unified pool of cells, F16, greedy. A context manager.

    Args:
        model: stays open as long as the context.
        n_ctx: cells of the pool.
        n_threads: for prefill and decode alike.
        flash_attention: the attention kernel.
        n_seq_max: sequences.
        fields: other fields of `llama_context_params`.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        *,
        n_threads: int,
        flash_attention: bool,
        n_seq_max: int = 1,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = n_seq_max
        params.n_threads = params.n_threads_batch = n_threads
        params.kv_unified = True
        params.no_perf = True
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        for name, value in (fields or {}).items():
            setattr(params, name, value)
        self.handle: Any = llama_cpp.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise NativeError(f"llama.cpp cannot make a context of {n_ctx} cells")
        self._memory: Any = llama_cpp.llama_get_memory(self.handle)
        # At most n_ctx; a larger batch would abort the process.
        self._n_batch = int(llama_cpp.llama_n_batch(self.handle))
        self._n_vocab = model.n_vocab
        self._batch = _Batch(self._n_batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free it; harmless twice."""
        if self.handle:
            llama_cpp.llama_free(self.handle)
        self.handle = None

    def prefill(self, seq_id: int, tokens: Sequence[int], start: int = 0) -> None:
        """Append tokens to a sequence; no logits are computed."""
        for _ in self._forward([Chunk(seq_id, tokens, start)], np.zeros(len(tokens), np.int8)):
            pass

    def next_tokens(self, chunks: Sequence[Chunk]) -> list[int]:
        """Append each chunk to its sequence, all in as few batches as they need.

        Returns:
            The best next token after each chunk.
        """
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks]) - 1
        wanted = np.zeros(ends[-1] + 1, np.int8)
        wanted[ends] = 1
        return [
            token
            for logits in self._forward(chunks, wanted)
            for token in np.argmax(logits, axis=1).tolist()
        ]

    def append(self, chunks: Sequence[Chunk]) -> None:
        """Append each chunk to its sequence, in one batch that wants the logits of all its rows."""
        size = sum(len(chunk.tokens) for chunk in chunks)
        for _ in self._forward(chunks, np.ones(size, np.int8)):
            pass

    def logits(self, chunk: Chunk, skip: int = 0) -> Logits:
        """Append a chunk; logits after each of its tokens but the first `skip`.

        Returns:
            Shape (len(chunk.tokens) - skip, n_vocab).
        """
        wanted = np.ones(len(chunk.tokens), np.int8)
        wanted[:skip] = 0
        return np.concatenate([logits.copy() for logits in self._forward([chunk], wanted)])

    def _forward(self, chunks: Sequence[Chunk], wanted: npt.NDArray[np.int8]) -> Iterator[Logits]:
        """Logits of the wanted rows, batch by batch; each is valid until the next batch."""
        tokens = np.concatenate([np.asarray(chunk.tokens, np.int32) for chunk in chunks])
        positions = np.concatenate(
            [np.arange(c.start, c.start + len(c.tokens), dtype=np.int32) for c in chunks]
        )
        seq_ids = np.repeat([c.seq_id for c in chunks], [len(c.tokens) for c in chunks])
        for start in range(0, len(tokens), self._n_batch):
            rows = slice(start, start + self._n_batch)
            batch = self._batch.fill(seq_ids[rows], tokens[rows], positions[rows], wanted[rows])
            if code := llama_cpp.llama_decode(self.handle, batch):
                raise NativeError(f"llama_decode returned {code} for {batch.n_tokens} tokens")
            num_rows = int(wanted[rows].sum())
            # None where they are sampled in the graph.
            if num_rows and (values := llama_cpp.llama_get_logits(self.handle)):
                yield np.ctypeslib.as_array(values, (num_rows, self._n_vocab))

    def wait(self) -> None:
        """Until all that was asked for is computed; a GPU works on by itself."""
        llama_cpp.llama_synchronize(self.handle)

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """Share the first cells of `source` with an empty sequence."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, 0, num_tokens)

    def cut(self, seq_id: int, num_tokens: int = 0) -> None:
        """Keep only the first tokens of a sequence."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq_id, num_tokens, -1):
            raise NativeError("this model's sequences cannot be cut")

    def clear(self) -> None:
        """Empty all sequences."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def save(self, seq_id: int) -> Any:
        """The state of a sequence, copied to a buffer of the host."""
        size = llama_cpp.llama_state_seq_get_size(self.handle, seq_id)
        buffer = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self.handle, buffer, size, seq_id) != size:
            raise NativeError("llama.cpp did not save the sequence")
        return buffer

    def restore(self, seq_id: int, state: Any) -> None:
        """Fill an empty sequence from what `save` returned."""
        if not llama_cpp.llama_state_seq_set_data(self.handle, state, len(state), seq_id):
            raise NativeError("llama.cpp did not restore the sequence")


class _Batch:
    """A `llama_batch` over arrays of our own, filled a column at a time."""

    def __init__(self, size: int) -> None:
        self._tokens, self._positions, self._seq_ids = np.zeros((3, size), np.int32)
        self._wanted = np.zeros(size, np.int8)
        self._ones = np.ones(size, np.int32)
        first = self._seq_ids.ctypes.data
        step = self._seq_ids.itemsize
        self._rows = np.arange(first, first + size * step, step, dtype=np.uintp)
        kinds: dict[str, Any] = {name: kind for name, kind, *_ in llama_cpp.llama_batch._fields_}
        self._struct = llama_cpp.llama_batch(
            token=self._tokens.ctypes.data_as(kinds["token"]),
            pos=self._positions.ctypes.data_as(kinds["pos"]),
            n_seq_id=self._ones.ctypes.data_as(kinds["n_seq_id"]),
            seq_id=self._rows.ctypes.data_as(kinds["seq_id"]),
            logits=self._wanted.ctypes.data_as(kinds["logits"]),
        )

    def fill(
        self,
        seq_ids: npt.NDArray[Any],
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.int8],
    ) -> Any:
        """The struct with these rows."""
        size = len(tokens)
        self._tokens[:size] = tokens
        self._positions[:size] = positions
        self._seq_ids[:size] = seq_ids
        self._wanted[:size] = wanted
        self._struct.n_tokens = size
        return self._struct


_drop_log: Any = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
