"""llama.cpp's sampler chain for one request.

Candidates are given to the chain by hand, and its choice is looked at before the chain accepts it:
`llama_sampler_sample` does both at once, and ends the process when a grammar allows no token.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.errors import GrammarError, InvalidRequestError, ModelError
from langchain_swarmkv.native.library import forget_errors, last_errors, library
from langchain_swarmkv.native.model import ModelHandle

__all__ = ["Candidates", "SamplerChain"]

_LEAST_TEMPERATURE = 1e-6
"""Greedy in all but name; dividing by less leaves the range of a float."""
# struct llama_token_data, llama.h
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Candidates:
    """The `llama_token_data_array` that all chains of a context use in turn."""

    def __init__(self, n_vocab: int) -> None:
        llama_cpp = library()
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._data = np.zeros(n_vocab, dtype=_CANDIDATE)
        self._pointer = self._data.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        self._array = llama_cpp.llama_token_data_array()
        self.reference = ctypes.byref(self._array)

    def fill(
        self, logits: npt.NDArray[np.float32], allowed: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """One candidate for each token of the vocabulary, or for each that is allowed."""
        if allowed is None:
            size = len(self._ids)
            self._data["id"] = self._ids  # samplers reorder
            self._data["logit"] = logits
        else:
            ids = np.flatnonzero(allowed)
            size = len(ids)
            self._data["id"][:size] = ids
            self._data["logit"][:size] = logits[ids]
        self._array.data = self._pointer
        self._array.size = size
        self._array.selected = -1
        self._array.sorted = False

    def selected(self) -> tuple[int, float] | None:
        """(token id, logit) of the chain's choice, if it made one."""
        index = int(self._array.selected)
        if not 0 <= index < self._array.size:
            return None
        chosen = self._array.data[index]
        return int(chosen.id), float(chosen.logit)


class SamplerChain:
    """Owns a `llama_sampler` chain. Use it on the engine thread only.

    Raises:
        GrammarError: llama.cpp does not accept the grammar.
        InvalidRequestError: a biased token id is outside the vocabulary.
    """

    def __init__(self, model: ModelHandle, params: SamplingParams, prompt: Sequence[int]) -> None:
        llama_cpp = library()
        self.seed = params.seed if params.seed is not None else secrets.randbits(31)
        self._has_grammar = params.grammar is not None or params.guide is not None
        self._is_greedy = _is_greedy(params)
        self._pointer: Any = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        try:
            for part in self._parts(model, params, prompt):
                llama_cpp.llama_sampler_chain_add(self._pointer, part)
        except BaseException:
            self.close()
            raise

    def _parts(
        self, model: ModelHandle, params: SamplingParams, prompt: Sequence[int]
    ) -> Iterator[Any]:
        """The chain in order; each part is the chain's own before the next is made."""
        llama_cpp = library()
        if params.logit_bias:
            yield _logit_bias(model, params.logit_bias)
        window = params.penalty_window_tokens
        if window and _has_penalties(params):
            penalties = llama_cpp.llama_sampler_init_penalties(
                model.n_vocab,
                window,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            for token_id in prompt[-window:]:
                llama_cpp.llama_sampler_accept(penalties, token_id)
            yield penalties
        if params.grammar is not None:
            yield _grammar(model, params.grammar)
        if params.temperature == 0:
            yield llama_cpp.llama_sampler_init_greedy()
            return
        if params.top_k:
            yield llama_cpp.llama_sampler_init_top_k(params.top_k)
        if params.top_p < 1:
            yield llama_cpp.llama_sampler_init_top_p(params.top_p, 1)
        if params.min_p > 0:
            yield llama_cpp.llama_sampler_init_min_p(params.min_p, 1)
        yield llama_cpp.llama_sampler_init_temp(max(params.temperature, _LEAST_TEMPERATURE))
        yield llama_cpp.llama_sampler_init_dist(self.seed)

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        candidates: Candidates,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> int:
        """Choose a token by logits of shape (n_vocab,), and take it into the chain's state.

        Args:
            logits: what the model computed; not changed.
            candidates: what the chain works on.
            allowed: the tokens to choose from, shape (n_vocab,); None: all.

        Raises:
            GrammarError: no token is allowed here.
            InvalidRequestError: logit biases forbid every token.
            ModelError: the model's logits are not numbers.
        """
        llama_cpp = library()
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):  # samplers sort, and NaN has no place in an order
            raise ModelError(
                "The model's logits are not numbers: its weights are damaged, or the RoPE settings "
                "or the KV type do not suit it."
            )
        if self._is_greedy and (allowed is None or allowed[best]):
            return best  # as the chain would, which has no state to keep
        candidates.fill(logits, allowed)
        llama_cpp.llama_sampler_apply(self._pointer, candidates.reference)
        chosen = candidates.selected()
        if chosen is None or not np.isfinite(chosen[1]):
            raise self._nothing_allowed()
        llama_cpp.llama_sampler_accept(self._pointer, chosen[0])
        return chosen[0]

    def _nothing_allowed(self) -> GrammarError | InvalidRequestError:
        if self._has_grammar:
            return GrammarError(
                "The grammar allows no token of this vocabulary here; check that it can end, and "
                "that logit_bias does not forbid what it needs."
            )
        return InvalidRequestError("logit_bias forbids every token of the vocabulary.")

    def close(self) -> None:
        """Free the chain and its parts; harmless twice."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            library().llama_sampler_free(pointer)


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.repeat_penalty != 1 or params.frequency_penalty or params.presence_penalty)


def _is_greedy(params: SamplingParams) -> bool:
    """Whether the chain does nothing but take the likeliest token."""
    return not (params.temperature or params.logit_bias or params.grammar or _has_penalties(params))


def _logit_bias(model: ModelHandle, bias: dict[int, float]) -> Any:
    llama_cpp = library()
    for token_id in bias:
        if not 0 <= token_id < model.n_vocab:
            raise InvalidRequestError(
                f"logit_bias names token {token_id}; the vocabulary has {model.n_vocab}.",
                token_id=token_id,
            )
    entries = (llama_cpp.llama_logit_bias * len(bias))(*bias.items())
    return llama_cpp.llama_sampler_init_logit_bias(model.n_vocab, len(bias), entries)


def _grammar(model: ModelHandle, grammar: str) -> Any:
    llama_cpp = library()
    forget_errors()
    pointer = llama_cpp.llama_sampler_init_grammar(model.vocabulary, grammar.encode(), b"root")
    if not pointer:
        reason = last_errors() or "it does not parse, or has no rule named root"
        raise GrammarError(f"llama.cpp refuses the grammar: {reason}.", grammar=grammar)
    return pointer
