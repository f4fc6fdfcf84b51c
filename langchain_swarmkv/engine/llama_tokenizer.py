"""The vocabulary of a GGUF file, without its weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from langchain_swarmkv.engine.contract import SpecialToken, Tokenizer
from langchain_swarmkv.native.model import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_LSTRIP,
    ATTRIBUTE_RSTRIP,
    ATTRIBUTE_UNKNOWN,
    ModelHandle,
)

__all__ = ["LlamaTokenizer"]


class LlamaTokenizer(Tokenizer):
    """llama.cpp's own tokeniser. Loads in a fraction of a second; thread safe.

    Raises:
        ModelError: the file is missing, no GGUF, or llama.cpp refuses it.
    """

    def __init__(self, path: Path) -> None:
        self._model = ModelHandle(path, vocab_only=True)
        self.n_vocab = self._model.n_vocab
        self.n_ctx_train = self._model.n_ctx_train
        self.name = path.stem
        self.bos_id = self._model.bos_id
        self.eos_id = self._model.eos_id
        self.adds_bos = self._model.adds_bos
        self.chat_template = self._model.chat_template
        self._bytes: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    @functools.cached_property
    def special_tokens(self) -> Mapping[str, SpecialToken]:  # type: ignore[override]
        """Control and unknown tokens by their text, as llama.cpp's special parsing finds them."""
        found = {}
        for token_id in range(self.n_vocab):
            attributes = self._model.attributes(token_id)
            if not attributes & (ATTRIBUTE_CONTROL | ATTRIBUTE_UNKNOWN):
                continue
            text = self._model.token_text(token_id)
            if text:
                found[text] = SpecialToken(
                    token_id,
                    text,
                    strips_left=bool(attributes & ATTRIBUTE_LSTRIP),
                    strips_right=bool(attributes & ATTRIBUTE_RSTRIP),
                )
        return found

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return self._model.tokenize(text)

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._model.token_bytes(token_id)
        return data

    def is_end(self, token_id: int) -> bool:
        """See `Tokenizer.is_end`."""
        is_end = self._ends.get(token_id)
        if is_end is None:
            is_end = self._ends[token_id] = self._model.is_end(token_id)
        return is_end

    def close(self) -> None:
        """Free the vocabulary; harmless twice. No other call is allowed afterwards."""
        self._model.close()
