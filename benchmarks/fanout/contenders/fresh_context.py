"""The article's baseline: every branch prefills the whole prompt in a context of its own."""

from __future__ import annotations

import time

from ..case import Case
from ..contender import Contender, Outcome, Settings
from ..native import BATCH_TOKENS, Chunk, Context, Model, rounded_cells

__all__ = ["FreshContext"]


class FreshContext(Contender):
    """One branch after the other; only the weights are shared."""

    name = "fresh-context"

    @classmethod
    def candidates(cls, case: Case) -> list[Settings]:
        """Both kernels."""
        return [{"flash_attention": False}, {"flash_attention": True}]

    def open(self) -> None:
        """Load, and compute one batch."""
        self.uses_flash_attention = self.settings["flash_attention"]
        self._model = Model(self.model, gpu_layers=self.settings.get("gpu_layers", 0))
        with self._context() as context:
            prompt = self.case.documents[0].prompts[0][:BATCH_TOKENS]
            self._answer(context, prompt, 0, max_tokens=2)

    def _context(self) -> Context:
        return Context(
            self._model,
            rounded_cells(self.case.num_positions),
            n_threads=self.settings["threads"],
            flash_attention=self.uses_flash_attention,
        )

    def prepare(self) -> None:
        """Nothing: no context outlives its branch."""

    def run(self) -> Outcome:
        """In the order of submission."""
        started = time.perf_counter()
        outcome = Outcome(0.0, [[[] for _ in d.prompts] for d in self.case.documents], 0)
        self._read_documents(outcome)
        for d, b in self.case.interleaved:
            turn = time.perf_counter()
            prompt = self.case.documents[d].prompts[b]
            with self._context() as context:
                num_present = self._start(context, d)
                answer = self._answer(context, prompt, num_present, self.case.max_tokens)
            outcome.computed_tokens += len(prompt) - num_present
            outcome.outputs[d][b], first_token_at = answer
            outcome.activation_seconds.append(first_token_at - turn)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _read_documents(self, outcome: Outcome) -> None:
        """What is done once for all branches."""

    def _start(self, context: Context, document: int) -> int:
        """Put what is known of a document into a new context; how many tokens that was."""
        return 0

    def _answer(
        self, context: Context, prompt: tuple[int, ...], num_present: int, max_tokens: int
    ) -> tuple[list[int], float]:
        tokens = context.next_tokens([Chunk(0, prompt[num_present:], num_present)])
        first_token_at = time.perf_counter()
        for position in range(len(prompt), len(prompt) + max_tokens - 1):
            tokens += context.next_tokens([Chunk(0, [tokens[-1]], position)])
        return tokens, first_token_at

    def close(self) -> None:
        """Free the model."""
        if hasattr(self, "_model"):
            self._model.close()
