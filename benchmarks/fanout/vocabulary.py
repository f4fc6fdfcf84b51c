"""A model's vocabulary without its weights, for peers that speak text or stop at its end."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from typing_extensions import Self

from .native import NativeError

__all__ = ["END_BIAS", "Vocabulary"]

END_BIAS = -1e4
"""Added to a logit, it keeps the token from being the best one."""
_PIECE_BYTES = 1024


class Vocabulary:
    """The token ids of a GGUF. A context manager."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_log_set(_drop_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise NativeError(f"llama.cpp cannot read the vocabulary of {path.name}")
        self._handle: Any = llama_cpp.llama_model_get_vocab(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free it; harmless twice."""
        if self._model:
            llama_cpp.llama_model_free(self._model)
        self._model = None

    def end_bias(self) -> dict[int, float]:
        """Logit biases under which no text ends, by token id."""
        return {
            token: END_BIAS
            for token in range(llama_cpp.llama_vocab_n_tokens(self._handle))
            if llama_cpp.llama_vocab_is_eog(self._handle, token)
        }

    def encode_exactly(self, text: str, num_tokens: int) -> list[int]:
        """The ids of a generated text.

        Returns:
            As many as were generated and of the same text; else an empty list, for then the model
            wrote it with other tokens than the tokenizer would.
        """
        encoded = text.encode()
        ids = (llama_cpp.llama_token * (len(encoded) + 1))()
        count = llama_cpp.llama_tokenize(
            self._handle, encoded, len(encoded), ids, len(ids), False, False
        )
        tokens = list(ids[: max(count, 0)])
        return tokens if len(tokens) == num_tokens and self._decode(tokens) == encoded else []

    def _decode(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._piece, tokens))

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        size = llama_cpp.llama_token_to_piece(self._handle, token, buffer, _PIECE_BYTES, 0, False)
        return buffer.raw[: max(size, 0)]


_drop_log: Any = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
