"""Whether a contender answered what the model says: every token against a context of its own.

Teacher-forced: the oracle is given the contender's tokens and looks at each place whether the token
there is the best, or so close to it that rounding may decide. It computes each prompt alone, in one
sequence, with the kernel that the contender decoded with; only the document is kept between the
prompts, and one prompt for each kernel is computed from nothing to show that this changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .case import Case
from .native import Chunk, Context, Logits, Model, rounded_cells

__all__ = ["Agreement", "Answer", "judge"]

TOLERANCE_QUANTISED = 0.5
"""How far rounding moves the leading logits of a model with quantised weights: in the 60,000 tokens
of benchmarks/results none is further than 0.54 behind the best, twice this being allowed. An answer
without the first or last 64 tokens of its document was 1.5 to 2.3 behind."""
TOLERANCE = 0.1
"""The same with weights of 16 or 32 bits; 0.08 was the most seen."""

Answer = tuple[int, int, tuple[int, ...]]
"""Document, branch, output tokens."""


class Gaps(NamedTuple):
    """For each token of an answer, by how many logits it is behind the best."""

    free: npt.NDArray[np.float64]
    """Behind the best of all tokens."""
    masked: npt.NDArray[np.float64]
    """Behind the best that does not end the text."""


class Agreement(NamedTuple):
    """What the oracle says of all answers of one contender."""

    tokens: int
    """All output tokens that were due; none of a branch that gave only text."""
    agreeing: int
    """Those that are the oracle's best, or behind it by at most the margin."""
    exact: int
    """Those that are the oracle's best."""
    worst_gap: float
    """Most that a token was behind the best, in logits."""
    unjudged_branches: int
    """Branches that gave only text."""
    branches: int
    """Branches that were due, those of all runs; missing ones count as tokens that disagree."""


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """Judge what several contenders answered; the worker's command.

    Args:
        request: `case` and `model`, paths; `threads` and `gpu_layers`; and `answers`, a list with
            `flash_attention`, `masks_end` and `runs` (the outputs of each run) of each contender.

    Returns:
        `agreements` in the same order, the `margin`, and of each kernel under `shortcut_difference`
        how far a prompt computed from nothing was from the one on the kept document.
    """
    case = Case.model_validate_json(Path(request["case"]).read_text(encoding="utf-8"))
    agreements: list[Agreement | None] = [None] * len(request["answers"])
    differences = {}
    with Model(Path(request["model"]), gpu_layers=request["gpu_layers"]) as model:
        tolerance = TOLERANCE_QUANTISED if model.is_quantised else TOLERANCE
        for flash_attention in (False, True):
            judged = {
                number: _answers(contender["runs"])
                for number, contender in enumerate(request["answers"])
                if contender["flash_attention"] == flash_attention
            }
            if not judged:
                continue
            oracle = _Oracle(model, case, request["threads"], flash_attention)
            gaps = oracle.gaps({answer for answers in judged.values() for answer in answers})
            for number, answers in judged.items():
                masks_end = request["answers"][number]["masks_end"]
                found = [gaps[answer][masks_end] for answer in answers if answer[2]]
                num_due = case.num_branches * len(request["answers"][number]["runs"])
                agreements[number] = _agreement(case, answers, found, 2 * tolerance, num_due)
            differences["flash" if flash_attention else "plain"] = oracle.shortcut_difference()
    return {
        "agreements": [agreement._asdict() for agreement in agreements if agreement],
        "margin": 2 * tolerance,
        "tolerance": tolerance,
        "shortcut_difference": differences,
    }


def _answers(runs: Iterable[Sequence[Sequence[Sequence[int]]]]) -> list[Answer]:
    return [
        (d, b, tuple(tokens))
        for outputs in runs
        for d, document in enumerate(outputs)
        for b, tokens in enumerate(document)
    ]


def _agreement(
    case: Case,
    answers: Sequence[Answer],
    gaps: Sequence[npt.NDArray[np.float64]],
    margin: float,
    num_due: int,
) -> Agreement:
    behind = np.concatenate([*gaps, np.zeros(0)])
    tokens = sum(max(len(tokens), case.max_tokens) for _, _, tokens in answers if tokens)
    return Agreement(
        tokens=tokens + case.max_tokens * max(0, num_due - len(answers)),
        agreeing=int((behind <= margin).sum()),
        exact=int((behind <= 0).sum()),
        worst_gap=float(behind.max(initial=0.0)),
        unjudged_branches=len(answers) - len(gaps),
        branches=num_due,
    )


class _Oracle:
    """One kernel's context for all prompts of a case."""

    def __init__(self, model: Model, case: Case, n_threads: int, flash_attention: bool) -> None:
        self._model = model
        self._case = case
        self._n_threads = n_threads
        self._flash_attention = flash_attention
        self._end_tokens = model.end_tokens()

    def _context(self) -> Context:
        return Context(
            self._model,
            rounded_cells(self._case.num_positions),
            n_threads=self._n_threads,
            flash_attention=self._flash_attention,
        )

    def gaps(self, answers: Iterable[Answer]) -> dict[Answer, Gaps]:
        """The gaps of each answer that has tokens."""
        by_place = sorted(answer for answer in answers if answer[2])
        gaps = {}
        with self._context() as context:
            present = -1
            for answer in by_place:
                if answer[0] != present:
                    present = answer[0]
                    context.clear()
                    context.prefill(0, self._case.documents[present].prefix)
                gaps[answer] = self._gaps(context, answer)
        return gaps

    def _gaps(self, context: Context, answer: Answer) -> Gaps:
        document, branch, tokens = answer
        valid = [token for token in tokens if 0 <= token < self._model.n_vocab]
        if len(valid) < len(tokens) or len(tokens) > self._case.max_tokens:
            return Gaps(*np.full((2, len(tokens)), np.inf))
        logits = self._step_logits(context, document, branch, tokens)
        chosen = logits[np.arange(len(tokens)), list(tokens)]
        free = logits.max(axis=1) - chosen
        logits[:, self._end_tokens] = -np.inf
        return Gaps(free.astype(float), (logits.max(axis=1) - chosen).astype(float))

    def _step_logits(
        self, context: Context, document: int, branch: int, tokens: Sequence[int]
    ) -> Logits:
        num_shared = len(self._case.documents[document].prefix)
        rest = self._case.documents[document].rests[branch]
        context.cut(0, num_shared)
        return context.logits(Chunk(0, [*rest, *tokens[:-1]], num_shared), skip=len(rest) - 1)

    def shortcut_difference(self) -> float:
        """Largest difference of a logit after the first prompt, computed both ways."""
        document = self._case.documents[0]
        with self._context() as context:
            context.prefill(0, document.prefix)
            short = self._step_logits(context, 0, 0, [0])
            context.clear()
            whole = context.logits(
                Chunk(0, document.prompts[0], 0), skip=len(document.prompts[0]) - 1
            )
        return float(np.abs(short - whole).max())
