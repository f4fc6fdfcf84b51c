"""A llama.cpp context with one KV pool for all sequences, and its return codes as errors.

`kv_unified=True` is not an option: without it `llama_memory_seq_cp` copies, and a partial copy ends
the process (llama-kv-cache.cpp). Sequence ids, positions and sizes are checked before each call.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.errors import (
    DecodeAbortedError,
    DecodeError,
    DecodeFatalError,
    InvalidBatchError,
    ModelLoadError,
    NoRoomError,
    SequenceError,
)
from langchain_swarmkv.native.library import forget_errors, last_errors, library
from langchain_swarmkv.native.model import ModelHandle

__all__ = ["ContextHandle", "ContextSettings", "Head"]

Head = tuple[int, Callable[[memoryview], bytes]]
"""How many bytes stand before a state, and what makes them from the state's."""

_HUGE_BYTES = 4 << 20
_CELLS_STEP = 256  # llama.cpp rounds the number of cells up to this
# enum ggml_type, ggml.h; llama_cpp does not name all of them
_KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


@dataclass(frozen=True)
class ContextSettings:
    """What `llama_context_params` is filled with."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_threads: int
    n_threads_batch: int
    flash_attention: bool | None
    """None: llama.cpp decides."""
    kv_type_k: str
    kv_type_v: str
    rope_freq_base: float | None
    rope_freq_scale: float | None


class ContextHandle:
    """Owns a `llama_context` and the arrays of its batch. One thread at a time.

    It computes with the adapters that the model has when the context is made.

    Raises:
        ModelLoadError: llama.cpp cannot make such a context (too large, or settings that the model
            does not allow).
    """

    def __init__(self, model: ModelHandle, settings: ContextSettings) -> None:
        llama_cpp = library()
        forget_errors()
        self.pointer: Any = llama_cpp.llama_init_from_model(model.pointer, _params(settings))
        if not self.pointer:
            raise ModelLoadError(
                f"llama.cpp could not make a context of n_ctx={settings.n_ctx} for {model.path}: "
                f"{last_errors() or 'no reason given'}.",
                path=model.path,
            )
        _set_adapters(self.pointer, model)
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._n_vocab = model.n_vocab
        self.n_batch = int(llama_cpp.llama_n_batch(self.pointer))
        self.n_seq_max = int(llama_cpp.llama_n_seq_max(self.pointer))
        self.n_ctx = int(llama_cpp.llama_n_ctx(self.pointer))
        self._batch = _BatchArrays(self.n_batch)

    def decode(
        self, tokens: list[int], positions: list[int], seq_ids: list[int], output_rows: list[int]
    ) -> None:
        """One `llama_decode`. The caller has checked ids and positions.

        Raises:
            DecodeError: by return code.
        """
        batch = self._batch.fill(tokens, positions, seq_ids, output_rows)
        forget_errors()
        code = int(library().llama_decode(self.pointer, batch))
        if code != 0:
            raise _decode_error(code, len(tokens))

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """View of a row's logits, shape (n_vocab,); valid until the next decode."""
        pointer = library().llama_get_logits_ith(self.pointer, row)
        if not pointer:
            raise InvalidBatchError(f"row {row} of the last batch has no logits", return_code=-1)
        return np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))

    def num_tokens(self, seq_id: int) -> int:
        """One more than the highest position of the sequence; 0 if it is empty."""
        return int(library().llama_memory_seq_pos_max(self._memory, seq_id)) + 1

    def fork(self, source: int, target: int, num_tokens: int | None) -> None:
        """Share the first `num_tokens` cells; None: all, the only way for recurrent states."""
        end = -1 if num_tokens is None else num_tokens
        library().llama_memory_seq_cp(self._memory, source, target, 0 if end >= 0 else -1, end)

    def share(self, source: int, target: int, first: int, end: int) -> None:
        """Let `target` have the cells of positions [first, end) of `source` too."""
        library().llama_memory_seq_cp(self._memory, source, target, first, end)

    def clear(self, seq_id: int) -> None:
        """Empty a sequence; whole sequences can always be removed (llama.h)."""
        library().llama_memory_seq_rm(self._memory, seq_id, -1, -1)

    def move_down(self, holders: Sequence[int], first: int, end: int, scratch: int) -> bool:
        """Save the cells of [first, end), free them, and restore them into the lowest free ones.

        False: they could not be restored, and the holders lack them now.
        """
        self.share(holders[0], scratch, first, end)
        state = self.save(scratch)
        self.clear(scratch)
        for holder in holders:
            library().llama_memory_seq_rm(self._memory, holder, first, end)
        if not self.restore(scratch, state):
            return False
        for holder in holders:
            self.share(scratch, holder, first, end)
        self.clear(scratch)
        return True

    def state_size(self, seq_id: int) -> int:
        """Bytes that `save` will return."""
        return int(library().llama_state_seq_get_size(self.pointer, seq_id))

    def save(self, seq_id: int, *, head: Head | None = None) -> bytes:
        """The sequence's state, written once, where it stays.

        Args:
            seq_id: what to save.
            head: its number of bytes, and what makes them from the state's; they come first.

        Raises:
            SequenceError: llama.cpp did not write as many bytes as it had announced.
            MemoryError: the host has no room for it.
        """
        head_bytes, make_head = head or (0, None)
        size = self.state_size(seq_id)
        saved, address = _new_bytes(head_bytes + size)
        pointer = ctypes.cast(address + head_bytes, ctypes.POINTER(ctypes.c_uint8))
        written = int(library().llama_state_seq_get_data(self.pointer, pointer, size, seq_id))
        if written != size:
            raise SequenceError(
                f"llama.cpp wrote {written} of the {size} bytes of sequence {seq_id}."
            )
        if make_head is not None:
            made = make_head(memoryview(saved)[head_bytes:])
            assert len(made) == head_bytes
            ctypes.memmove(address, made, head_bytes)
        return saved

    def restore(self, seq_id: int, state: bytes | memoryview) -> bool:
        """Fill an empty sequence from `save`'s bytes; False: refused, and nothing is left of it."""
        data = np.frombuffer(state, dtype=np.uint8)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = int(library().llama_state_seq_set_data(self.pointer, pointer, len(data), seq_id))
        if read != len(data):
            self.clear(seq_id)
            return False
        return True

    def close(self) -> None:
        """Free the context; harmless twice."""
        pointer, self.pointer = self.pointer, None
        if pointer:
            library().llama_free(pointer)


def _params(settings: ContextSettings) -> Any:
    llama_cpp = library()
    params = llama_cpp.llama_context_default_params()
    # NOTE: n_batch is cut to n_ctx before n_ctx is rounded up, and a batch smaller than n_seq_max
    # ends the process; so it is rounded up here.
    params.n_ctx = -(-settings.n_ctx // _CELLS_STEP) * _CELLS_STEP
    params.n_batch = settings.n_batch
    params.n_ubatch = settings.n_ubatch
    params.n_seq_max = settings.n_seq_max
    params.n_threads = settings.n_threads
    params.n_threads_batch = settings.n_threads_batch
    params.kv_unified = True
    # A window cache of full size: a small one runs out of cells when many sequences share it.
    params.swa_full = True
    params.no_perf = True
    params.flash_attn_type = {
        None: llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
        True: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        False: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    }[settings.flash_attention]
    params.type_k = _KV_TYPES[settings.kv_type_k]
    params.type_v = _KV_TYPES[settings.kv_type_v]
    if settings.rope_freq_base is not None:
        params.rope_freq_base = settings.rope_freq_base
    if settings.rope_freq_scale is not None:
        params.rope_freq_scale = settings.rope_freq_scale
    return params


def _set_adapters(context: Any, model: ModelHandle) -> None:
    llama_cpp = library()
    count = len(model.adapters)
    pointers = (llama_cpp.llama_adapter_lora_p_ctypes * count)(*(p for p, _ in model.adapters))
    scales = (ctypes.c_float * count)(*(scale for _, scale in model.adapters))
    llama_cpp.llama_set_adapters_lora(context, pointers, count, scales)


def _decode_error(code: int, num_tokens: int) -> DecodeError:
    reason = last_errors()
    message = f"llama_decode returned {code} for a batch of {num_tokens} tokens"
    message += f": {reason}." if reason else "."
    if code == 1:
        return NoRoomError(message, return_code=code)
    if code == 2:
        return DecodeAbortedError(message, return_code=code)
    if code == -1:
        return InvalidBatchError(message, return_code=code)
    return DecodeFatalError(message, return_code=code)


def _new_bytes(num_bytes: int) -> tuple[bytes, int]:
    """A bytes object whose content is not set yet, and its address, to set it before others see it.

    CPython's API allows just that; a buffer that is copied to bytes would hold the state twice.
    """
    new: Any = ctypes.pythonapi.PyBytes_FromStringAndSize
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
    saved: bytes = new(None, num_bytes)
    address = ctypes.cast(ctypes.c_char_p(saved), ctypes.c_void_p).value
    assert address is not None
    _ask_for_huge_pages(address, num_bytes)
    return saved, address


def _ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """A hint, as numpy gives it for its arrays: a tenth of the page faults while 46 MB are filled.

    Those would take longer than writing the state does.
    """
    if num_bytes < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise: Any = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(first, end - first, mmap.MADV_HUGEPAGE)


class _BatchArrays:
    """A `llama_batch` over numpy arrays that are filled anew for each step.

    llama_batch wants a pointer to the sequence ids of each token; one id each, so the pointers into
    `_seq_ids` are computed once.
    """

    def __init__(self, capacity: int) -> None:
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._seq_ids = np.zeros(capacity, dtype=np.int32)
        self._outputs = np.zeros(capacity, dtype=np.int8)
        self._num_seq_ids = np.ones(capacity, dtype=np.int32)
        first = self._seq_ids.ctypes.data
        self._seq_pointers = first + 4 * np.arange(capacity, dtype=np.uintp)
        self._batch = self._struct()

    def _struct(self) -> Any:
        batch = library().llama_batch()
        int32 = ctypes.POINTER(ctypes.c_int32)
        batch.token = self._tokens.ctypes.data_as(int32)
        batch.pos = self._positions.ctypes.data_as(int32)
        batch.n_seq_id = self._num_seq_ids.ctypes.data_as(int32)
        batch.seq_id = self._seq_pointers.ctypes.data_as(ctypes.POINTER(int32))
        batch.logits = self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        return batch

    def fill(
        self, tokens: list[int], positions: list[int], seq_ids: list[int], output_rows: list[int]
    ) -> Any:
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._seq_ids[:count] = seq_ids
        self._outputs[:count] = 0
        self._outputs[output_rows] = 1
        self._batch.n_tokens = count
        return self._batch
