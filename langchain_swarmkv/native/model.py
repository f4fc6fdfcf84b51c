"""A GGUF file opened by llama.cpp, with or without its weights, and its vocabulary."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from langchain_swarmkv.errors import ForkedProcessError, ModelLoadError
from langchain_swarmkv.native.library import forget_errors, last_errors, library, loading
from langchain_swarmkv.native.model_file import check_model

__all__ = ["ModelHandle"]

# enum llama_token_attr, llama.h
ATTRIBUTE_UNKNOWN, ATTRIBUTE_CONTROL = 1 << 0, 1 << 3
ATTRIBUTE_NORMAL, ATTRIBUTE_USER_DEFINED = 1 << 2, 1 << 4
ATTRIBUTE_LSTRIP, ATTRIBUTE_RSTRIP = 1 << 7, 1 << 8


class ModelHandle:
    """Owns a `llama_model`. Its vocabulary calls are thread safe; `close` is not.

    Freed by `close`, or when the last reference is dropped.

    Raises:
        ModelError: the file is missing, no GGUF, no model that writes, or llama.cpp refuses it or
            would end the process over it.
    """

    def __init__(
        self, path: Path, *, vocab_only: bool, n_gpu_layers: int = 0, use_mmap: bool = True
    ) -> None:
        check_model(path)
        llama_cpp = library()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = vocab_only
        params.n_gpu_layers = n_gpu_layers
        if not use_mmap:
            params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        forget_errors()
        with loading(weights=not vocab_only):
            self.pointer: Any = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise ModelLoadError(
                f"llama.cpp could not load {path}: {last_errors() or 'no reason given'}.", path=path
            )
        self._free = weakref.finalize(self, _free_model, self.pointer)
        self._free.atexit = False  # the process ends anyway, and a thread may still be using it
        self.path = path
        self.pid = os.getpid()
        self.adapters: list[tuple[Any, float]] = []
        """Pointers to what `load_adapter` loaded, and their scales; freed with the model."""
        self.vocabulary: Any = llama_cpp.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocabulary))
        # NOTE: llama.cpp reads no hyperparameters, and says 0, if only the vocabulary is loaded.
        self.n_ctx_train = (
            int(llama_cpp.llama_model_n_ctx_train(self.pointer)) or self._context_length()
        )

    def _context_length(self) -> int:
        architecture = self.metadata("general.architecture")
        return int(self.metadata(f"{architecture}.context_length") or 0)

    def metadata(self, key: str) -> str | None:
        """A value of the GGUF's metadata as text."""
        buffer = ctypes.create_string_buffer(1024)
        length = library().llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace") if length >= 0 else None

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if the file has one."""
        return self._chat_template(None)

    @property
    def tool_use_template(self) -> str | None:
        """The chat template named `tool_use`, if the file has one."""
        return self._chat_template(b"tool_use")

    def _chat_template(self, name: bytes | None) -> str | None:
        text = library().llama_model_chat_template(self.pointer, name)
        return text.decode("utf-8", errors="replace") if text else None

    @property
    def can_cut(self) -> bool:
        """Whether sequences of this model can be cut at any length.

        Sliding windows forget what lies behind them, recurrent states hold only their end.
        """
        llama_cpp = library()
        return not (
            llama_cpp.llama_model_n_swa(self.pointer) > 0
            or llama_cpp.llama_model_is_recurrent(self.pointer)
            or llama_cpp.llama_model_is_hybrid(self.pointer)
        )

    @property
    def num_parameters(self) -> int:
        """Weights of all tensors; 0 if only the vocabulary is loaded."""
        return int(library().llama_model_n_params(self.pointer))

    @property
    def num_layers(self) -> int:
        """Layers of the model; 0 if only the vocabulary is loaded."""
        return int(library().llama_model_n_layer(self.pointer))

    @property
    def weights_bytes(self) -> int:
        """Size of all tensors; 0 if only the vocabulary is loaded."""
        return int(library().llama_model_size(self.pointer))

    @property
    def file_type(self) -> int:
        """How most weights are stored, of `enum llama_ftype`; guessed if the file does not say."""
        llama_cpp = library()
        guessed = int(llama_cpp.LLAMA_FTYPE_GUESSED)
        return int(llama_cpp.llama_model_ftype(self.pointer)) & ~guessed

    @property
    def is_decoder(self) -> bool:
        """Whether the model generates text by decoding alone."""
        llama_cpp = library()
        return bool(
            llama_cpp.llama_model_has_decoder(self.pointer)
            and not llama_cpp.llama_model_has_encoder(self.pointer)
        )

    @property
    def adds_bos(self) -> bool:
        """Whether prompts start with the start token."""
        return bool(library().llama_vocab_get_add_bos(self.vocabulary))

    @property
    def bos_id(self) -> int | None:
        """The start token."""
        token_id = int(library().llama_vocab_bos(self.vocabulary))
        return token_id if token_id >= 0 else None

    @property
    def eos_id(self) -> int | None:
        """The end token."""
        token_id = int(library().llama_vocab_eos(self.vocabulary))
        return token_id if token_id >= 0 else None

    def is_end(self, token_id: int) -> bool:
        """Whether the token ends a generation."""
        return bool(library().llama_vocab_is_eog(self.vocabulary, token_id))

    def attributes(self, token_id: int) -> int:
        """Bits of `enum llama_token_attr`."""
        return int(library().llama_vocab_get_attr(self.vocabulary, token_id))

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token."""
        text = library().llama_vocab_get_text(self.vocabulary, token_id)
        return text.decode("utf-8", errors="replace") if text else ""

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids, without start and end tokens."""
        data = text.encode("utf-8", errors="replace")
        if not data:
            return []
        tokenize = library().llama_tokenize
        capacity = len(data) + 8
        while True:
            ids = np.empty(capacity, dtype=np.int32)
            pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            count = int(
                tokenize(self.vocabulary, data, len(data), pointer, capacity, False, parse_special)
            )
            if count >= 0:
                result: list[int] = ids[:count].tolist()
                return result
            capacity = -count

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for control tokens."""
        capacity = 64
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            length = int(
                library().llama_token_to_piece(
                    self.vocabulary, token_id, buffer, capacity, 0, False
                )
            )
            if length >= 0:
                return buffer.raw[:length]
            capacity = -length

    def close(self) -> None:
        """Free the model; harmless twice. Contexts made from it must be gone."""
        self._free()


def _free_model(pointer: Any) -> None:
    try:
        library().llama_model_free(pointer)
    except ForkedProcessError:
        pass  # it is the parent's
