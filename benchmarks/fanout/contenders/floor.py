"""The floor: the same work by a bare loop of native calls.

Prefill, fork, the rest of all prompts in one batch, then one token of each branch a step. It knows
the whole case beforehand and shares nothing between runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..case import Case
from ..contender import Contender, Outcome, Settings
from ..native import BATCH_TOKENS, Chunk, Context, Model, rounded_cells

__all__ = ["Floor", "FloorLoop", "FloorRun"]

_WAVES = (16, 8)


@dataclass
class FloorRun:
    """One document answered."""

    outputs: list[list[int]]
    prefill_seconds: float
    activation_seconds: list[float]
    """For each branch, from the begin of its wave to its first token."""


class FloorLoop:
    """One context, and the loop over it.

    Args:
        model: stays open as long as the loop.
        n_ctx: cells: the prefix, and rest and output of each branch of a wave.
        wave: most branches at once.
        n_threads: for prefill and decode alike.
        flash_attention: the attention kernel.
    """

    def __init__(
        self, model: Model, *, n_ctx: int, wave: int, n_threads: int, flash_attention: bool
    ) -> None:
        self._wave = wave
        self._context = Context(
            model,
            n_ctx,
            n_threads=n_threads,
            flash_attention=flash_attention,
            n_seq_max=wave + 1,
        )

    def close(self) -> None:
        """Free the context."""
        self._context.close()

    def run(
        self, prefix: Sequence[int], rests: Sequence[Sequence[int]], max_tokens: int
    ) -> FloorRun:
        """Clear, prefill, and answer wave by wave.

        Args:
            prefix: what all prompts begin with.
            rests: what follows it in each.
            max_tokens: output tokens of each branch.
        """
        started = time.perf_counter()
        self._context.clear()
        self._context.prefill(0, prefix)
        self._context.wait()
        run = FloorRun([], time.perf_counter() - started, [])
        for start in range(0, len(rests), self._wave):
            self._run_wave(run, len(prefix), rests[start : start + self._wave], max_tokens)
        return run

    def _run_wave(
        self, run: FloorRun, num_shared: int, rests: Sequence[Sequence[int]], max_tokens: int
    ) -> None:
        started = time.perf_counter()
        branches = range(1, len(rests) + 1)
        for branch in branches:
            self._context.fork(0, branch, num_shared)
        tokens = self._context.next_tokens(
            [Chunk(branch, rest, num_shared) for branch, rest in zip(branches, rests, strict=True)]
        )
        run.activation_seconds += [time.perf_counter() - started] * len(rests)
        outputs = [[token] for token in tokens]
        ends = [num_shared + len(rest) for rest in rests]
        for step in range(max_tokens - 1):
            tokens = self._context.next_tokens(
                [
                    Chunk(branch, [token], end + step)
                    for branch, token, end in zip(branches, tokens, ends, strict=True)
                ]
            )
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        for branch in branches:
            self._context.cut(branch)
        run.outputs += outputs


class Floor(Contender):
    """`FloorLoop` on one document after the other, whatever the order of the questions."""

    name = "floor"
    tuning_branches = None

    @classmethod
    def candidates(cls, case: Case) -> list[Settings]:
        """Both kernels, and waves; first those of 16, the best where it was measured."""
        most = max(len(document.prompts) for document in case.documents)
        waves = list(dict.fromkeys(min(wave, most) for wave in (*_WAVES, most)))
        return [
            {"wave": wave, "flash_attention": flash} for flash in (False, True) for wave in waves
        ]

    def open(self) -> None:
        """Load; then compute one batch, and one wave on it."""
        self.uses_flash_attention = self.settings["flash_attention"]
        wave = self.settings["wave"]
        self._model = Model(self.model, gpu_layers=self.settings.get("gpu_layers", 0))
        self._loop = FloorLoop(
            self._model,
            n_ctx=self._num_cells(wave),
            wave=wave,
            n_threads=self.settings["threads"],
            flash_attention=self.uses_flash_attention,
        )
        document = self.case.documents[0]
        self._loop.run(document.prefix[:BATCH_TOKENS], document.rests[:wave], 2)

    def _num_cells(self, wave: int) -> int:
        needed = [
            len(document.prefix)
            + sum(sorted(len(rest) + self.case.max_tokens for rest in document.rests)[-wave:])
            for document in self.case.documents
        ]
        return rounded_cells(max(needed))

    def prepare(self) -> None:
        """Nothing: each document starts from an empty context."""

    def run(self) -> Outcome:
        """Document after document."""
        started = time.perf_counter()
        runs = [
            self._loop.run(document.prefix, document.rests, self.case.max_tokens)
            for document in self.case.documents
        ]
        return Outcome(
            seconds=time.perf_counter() - started,
            outputs=[run.outputs for run in runs],
            computed_tokens=self.case.num_shared_tokens,
            prefill_seconds=runs[0].prefill_seconds,
            activation_seconds=[s for run in runs for s in run.activation_seconds],
        )

    def close(self) -> None:
        """Free context and model."""
        for owner in ("_loop", "_model"):
            if hasattr(self, owner):
                getattr(self, owner).close()
