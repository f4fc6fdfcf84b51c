"""How `FakeEngine` picks tokens: from a reply, or from noise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.contract import Engine, Sampler, check_logits
from langchain_swarmkv.engine.fake_tokenizer import END_ID, NUM_TOKENS
from langchain_swarmkv.engine.guide import GuideMatcher
from langchain_swarmkv.errors import GrammarError, InvalidRequestError

__all__ = ["NoiseSampler", "ReplySampler"]

_LEAST_TEMPERATURE = 1e-6


class ReplySampler(Sampler):
    """The bytes of a text, as far as a guide allows them, then the end."""

    def __init__(self, engine: Engine, text: str, seed: int, guide: GuideMatcher | None) -> None:
        self.seed = seed
        self._engine = engine
        self._guide = guide
        self._rest = [*reversed(text.encode("utf-8"))]

    def sample(self, row: int) -> int:
        """See `Sampler.sample`; without a guide, the row does not matter."""
        if self._guide is None:
            return self._rest.pop() if self._rest else END_ID
        return self.sample_from(self._engine.logits(row))

    def sample_from(self, logits: npt.NDArray[np.float32]) -> int:
        """See `Sampler.sample_from`."""
        check_logits(logits, NUM_TOKENS)
        wanted = self._rest[-1] if self._rest else END_ID
        if self._guide is not None:
            allowed = self._guide.allowed()
            if not allowed[wanted]:
                wanted = int(np.where(allowed, logits, -np.inf).argmax())
                self._guide.accept(wanted)
                return wanted
            self._guide.accept(wanted)
        if self._rest:
            self._rest.pop()
        return wanted

    def close(self) -> None:
        """See `Sampler.close`."""
        self._rest = []


class NoiseSampler(Sampler):
    """Draws from the noise as `SamplingParams` say, but for the penalties."""

    def __init__(self, engine: Engine, params: SamplingParams, guide: GuideMatcher | None) -> None:
        self.seed = (
            params.seed
            if params.seed is not None
            else int(np.random.default_rng().integers(1 << 32))
        )
        self._engine = engine
        self._params = params
        self._guide = guide
        self._draws = np.random.default_rng(self.seed)

    def sample(self, row: int) -> int:
        """See `Sampler.sample`."""
        return self.sample_from(self._engine.logits(row))

    def sample_from(self, logits: npt.NDArray[np.float32]) -> int:
        """See `Sampler.sample_from`."""
        check_logits(logits, NUM_TOKENS)
        if self._guide is None:
            return self._draw(logits.astype(np.float64))
        token_id = self._draw(np.where(self._guide.allowed(), logits.astype(np.float64), -np.inf))
        self._guide.accept(token_id)
        return token_id

    def _draw(self, logits: npt.NDArray[np.float64]) -> int:
        params = self._params
        for token_id, bias in params.logit_bias.items():
            logits[token_id] += bias
        if not np.isfinite(logits.max()):
            if self._guide is not None:
                raise GrammarError("logit_bias forbids every token that the guide allows.")
            raise InvalidRequestError("logit_bias forbids every token of the vocabulary.")
        if params.temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")
        if params.top_k:
            order = order[: params.top_k]
        temperature = max(params.temperature, _LEAST_TEMPERATURE)
        weights = np.exp((logits[order] - logits[order[0]]) / temperature)
        keep = weights >= params.min_p
        keep &= np.cumsum(weights) - weights < params.top_p * weights.sum()
        order, weights = order[keep], weights[keep]
        return int(self._draws.choice(order, p=weights / weights.sum()))

    def close(self) -> None:
        """See `Sampler.close`."""
