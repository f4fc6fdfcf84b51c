"""The vocabulary of a GGUF file, without its weights."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from langchain_swarmkv.engine.contract import SpecialToken, Tokenizer
from langchain_swarmkv.engine.tiktoken_counter import TiktokenCounter, proved_counter
from langchain_swarmkv.errors import EngineClosedError, InvalidRequestError
from langchain_swarmkv.native.model import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_LSTRIP,
    ATTRIBUTE_NORMAL,
    ATTRIBUTE_RSTRIP,
    ATTRIBUTE_UNKNOWN,
    ATTRIBUTE_USER_DEFINED,
    ModelHandle,
)

__all__ = ["LlamaTokenizer"]


_LONG_TEXT_CHARACTERS = 1000
_NUM_LONG_TEXTS = 16
_PROOF_CHARACTERS_PER_TOKEN = 24
"""Proving tiktoken's ids takes as long as counting that many characters for each token: all their
texts twice, and each one's bytes."""


class LlamaTokenizer(Tokenizer):
    """llama.cpp's own tokeniser. Loads in a fraction of a second; thread safe.

    Raises:
        ModelError: the file is missing, no GGUF, or llama.cpp refuses it.
    """

    def __init__(self, path: Path) -> None:
        model = ModelHandle(path, vocab_only=True)
        self.n_vocab = model.n_vocab
        self.n_ctx_train = model.n_ctx_train
        self.name = path.stem
        self.bos_id = model.bos_id
        self.eos_id = model.eos_id
        self.adds_bos = model.adds_bos
        self.chat_template = model.chat_template
        self.tool_use_template = model.tool_use_template
        self._handle: ModelHandle | None = model
        self._bytes: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self._counter: TiktokenCounter | None = None
        self._characters_until_proof = _PROOF_CHARACTERS_PER_TOKEN * self.n_vocab
        self._proof = threading.Lock()
        """Taken once, and kept: there is one proof."""
        # Every analyst's prompt holds the same document; its ids are worth keeping.
        self._encode_long = functools.lru_cache(maxsize=_NUM_LONG_TEXTS)(self._encode)

    @property
    def _model(self) -> ModelHandle:
        # Whoever is in a call holds a reference, so `close` on another thread frees nothing in use.
        model = self._handle
        if model is None:
            raise EngineClosedError(f"The tokenizer of {self.name} is closed.")
        if model.pid != os.getpid():
            # A forked child loads its own, if it may use llama.cpp at all.
            model = self._handle = ModelHandle(model.path, vocab_only=True)
        return model

    @functools.cached_property
    def _tokens_with_text(self) -> tuple[dict[str, SpecialToken], dict[str, SpecialToken]]:
        # One pass for both kinds: vocabularies are long.
        control: dict[str, SpecialToken] = {}
        user_defined: dict[str, SpecialToken] = {}
        model = self._model
        for token_id in range(self.n_vocab):
            attributes = model.attributes(token_id)
            if attributes & (ATTRIBUTE_CONTROL | ATTRIBUTE_UNKNOWN):
                found = control
            elif attributes & ATTRIBUTE_USER_DEFINED:
                found = user_defined
            else:
                continue
            text = model.token_text(token_id)
            if text:
                found[text] = SpecialToken(
                    token_id,
                    text,
                    strips_left=bool(attributes & ATTRIBUTE_LSTRIP),
                    strips_right=bool(attributes & ATTRIBUTE_RSTRIP),
                )
        return control, user_defined

    @functools.cached_property
    def special_tokens(self) -> Mapping[str, SpecialToken]:  # type: ignore[override]
        """Control and unknown tokens by their text, as llama.cpp's special parsing finds them."""
        return self._tokens_with_text[0]

    @functools.cached_property
    def user_defined_tokens(self) -> Mapping[str, SpecialToken]:  # type: ignore[override]
        """User-defined tokens by their text, which llama.cpp finds in plain text."""
        return self._tokens_with_text[1]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over all tokens' texts and attributes, in order, hexadecimal."""
        model, digest = self._model, hashlib.sha256()
        for token_id in range(self.n_vocab):
            text = model.token_text(token_id).encode("utf-8", "surrogateescape")
            digest.update(b"%d %d:" % (model.attributes(token_id), len(text)))
            digest.update(text)
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        model = self._model  # also for texts that are known: closed is closed
        if len(text) < _LONG_TEXT_CHARACTERS:
            return model.tokenize(text)
        return list(self._encode_long(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._model.tokenize(text))

    def count(self, text: str) -> int:
        """See `Tokenizer.count`.

        By tiktoken, where that is proved to give the same ids. The proof is made once as much has
        been counted without it, so that it costs at most what was spent anyway.
        """
        counter, _ = self._counter, self._model  # closed is closed
        num_tokens = None if counter is None else counter.count(text)
        if num_tokens is None:
            num_tokens = len(self.encode(text))
            self._characters_until_proof -= len(text)
            if self._characters_until_proof <= 0:
                self.prove_counter()
        return num_tokens

    def prove_counter(self) -> bool:
        """Prove tiktoken's ids now, unless it was tried; whether `count` uses tiktoken."""
        if self._proof.acquire(blocking=False):
            self._counter = self._proved_counter(self._model)
        return self._counter is not None

    def _proved_counter(self, model: ModelHandle) -> TiktokenCounter | None:
        attributes = [model.attributes(token_id) for token_id in range(self.n_vocab)]
        ordinary = [i for i, bits in enumerate(attributes) if bits & ATTRIBUTE_NORMAL]
        return proved_counter(
            model.metadata("tokenizer.ggml.pre"),
            {self.token_bytes(token_id): token_id for token_id in ordinary},
            cut_out=[
                model.token_text(i)
                for i, bits in enumerate(attributes)
                if bits & ATTRIBUTE_USER_DEFINED
            ],
            encode=model.tokenize,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        data = self._bytes.get(token_id)
        if data is None:
            self._check_id(token_id)
            data = self._bytes[token_id] = self._model.token_bytes(token_id)
        return data

    def is_end(self, token_id: int) -> bool:
        """See `Tokenizer.is_end`."""
        is_end = self._ends.get(token_id)
        if is_end is None:
            self._check_id(token_id)
            is_end = self._ends[token_id] = self._model.is_end(token_id)
        return is_end

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.n_vocab:
            raise InvalidRequestError(
                f"token id {token_id} is outside the vocabulary of {self.n_vocab}.",
                token_id=token_id,
            )

    def close(self) -> None:
        """See `Tokenizer.close`."""
        self._handle = self._counter = None
        self._encode_long.cache_clear()
