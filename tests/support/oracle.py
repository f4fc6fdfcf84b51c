"""The oracle: fresh context, one sequence, the whole prompt prefilled, greedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import numpy as np

from tests.support.raw import Chunk, Logits, RawContext, RawModel


class OracleStep(NamedTuple):
    """One greedy step: the best token, and its lead over the second best in logits."""

    token: int
    margin: float


class Oracle:
    """A model, and a fresh context for every question. A context manager.

    Args:
        model_path: The GGUF.
        n_ctx: Cells of each context: room for the prompt and what follows.
        flash_attention: The attention kernel. Give it the kernel of the run that it judges: on
            quantised weights the two differ more than a fault would.
        n_threads: For prefill and decode alike.
        kv_type: Of the cache. With F32 and plain attention a correct run of a tiny model is
            within 0.002 of the oracle; F16 rounding moves logits by up to 0.01.
    """

    def __init__(
        self,
        model_path: Path,
        n_ctx: int,
        flash_attention: bool,
        n_threads: int = 2,
        kv_type: int = llama_cpp.GGML_TYPE_F16,
    ) -> None:
        self._model = RawModel(model_path)
        self._n_ctx = n_ctx
        self._flash_attention = flash_attention
        self._n_threads = n_threads
        self._kv_type = kv_type

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; harmless twice."""
        self._model.close()

    def first_logits(self, tokens: Sequence[int]) -> Logits:
        """Logits after the prompt, shape (n_vocab,)."""
        return self.step_logits(tokens, ()).squeeze(0)

    def step_logits(self, tokens: Sequence[int], forced: Sequence[int]) -> Logits:
        """Logits after the prompt and after each token of a given answer.

        Args:
            tokens: The prompt.
            forced: The answer, fed token by token whatever the model would have said.

        Returns:
            Shape (len(forced) + 1, n_vocab).
        """
        with self._context() as context:
            rows = [context.prefill(0, tokens)]
            for position, token in enumerate(forced, len(tokens)):
                rows.append(context.decode([Chunk(0, [token], position)])[0])
        return np.stack(rows)

    def greedy(self, tokens: Sequence[int], n: int) -> list[OracleStep]:
        """The `n` tokens, at least one, that follow the prompt; it does not stop at an end."""
        return self.answer(tokens, n)[1]

    def answer(self, tokens: Sequence[int], n: int) -> tuple[Logits, list[OracleStep]]:
        """Both `first_logits` and `greedy`, from one prefill."""
        with self._context() as context:
            first = context.prefill(0, tokens)
            steps = [_best(first)]
            for position in range(len(tokens), len(tokens) + n - 1):
                logits = context.decode([Chunk(0, [steps[-1].token], position)])[0]
                steps.append(_best(logits))
        return first, steps

    def _context(self) -> RawContext:
        return RawContext(
            self._model,
            self._n_ctx,
            flash_attention=self._flash_attention,
            kv_type=self._kv_type,
            n_threads=self._n_threads,
        )


def _best(logits: Logits) -> OracleStep:
    second, best = np.partition(logits, -2)[-2:]
    return OracleStep(int(np.argmax(logits)), float(best - second))


def assert_matches_oracle(
    tokens: Sequence[int], steps: Sequence[OracleStep], margin: float
) -> None:
    """Greedy tokens equal the oracle's, up to the first near tie.

    The first difference is allowed only where the oracle's best token leads by at most `margin`.
    After it the two runs have other contexts, and nothing more is compared.

    Args:
        tokens: What the run under test answered, at most as many as `steps`, at least one.
        steps: `Oracle.greedy` of the same prompt.
        margin: Largest lead in logits that rounding may overturn.
    """
    assert 0 < len(tokens) <= len(steps), f"{len(tokens)} tokens, {len(steps)} of the oracle"
    for position, (token, step) in enumerate(zip(tokens, steps, strict=False)):
        if token != step.token:
            assert step.margin <= margin, (
                f"token {position} is {token}; the oracle's is {step.token} and leads by "
                f"{step.margin:.3g}, more than a near tie ({margin:.3g})"
            )
            return
