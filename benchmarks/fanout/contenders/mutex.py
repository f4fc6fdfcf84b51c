"""One `llama_cpp.Llama` behind a mutex. It keeps its last prompt and reuses what it can of it."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import llama_cpp
import numpy as np

from ..case import Case
from ..contender import Contender, Outcome, Settings
from ..native import BATCH_TOKENS, rounded_cells

__all__ = ["Mutex"]


class Mutex(Contender):
    """A thread for each branch, all of them at one lock."""

    name = "mutex"

    @classmethod
    def candidates(cls, case: Case) -> list[Settings]:
        """Both kernels."""
        return [{"flash_attention": False}, {"flash_attention": True}]

    def open(self) -> None:
        """Load, and compute one batch."""
        self.uses_flash_attention = self.settings["flash_attention"]
        self._lock = threading.Lock()
        self._llama = llama_cpp.Llama(
            str(self.model),
            n_ctx=rounded_cells(self.case.num_positions),
            n_batch=BATCH_TOKENS,
            n_ubatch=BATCH_TOKENS,
            n_threads=self.settings["threads"],
            n_threads_batch=self.settings["threads"],
            n_gpu_layers=self.settings.get("gpu_layers", 0),
            flash_attn=self.uses_flash_attention,
            verbose=False,
        )
        self._generate(self.case.documents[0].prompts[0][:BATCH_TOKENS], 2)

    def prepare(self) -> None:
        """Forget the last prompt."""
        self._llama.reset()  # type: ignore[no-untyped-call]

    def run(self) -> Outcome:
        """Read a single document first, then let all branches come at once."""
        outcome = Outcome(0.0, [[[] for _ in d.prompts] for d in self.case.documents], 0)
        started = time.perf_counter()
        if len(self.case.documents) == 1 and not self.case.is_cold:
            prefix = self.case.documents[0].prefix
            self._llama.eval(prefix)
            outcome.computed_tokens = len(prefix)
            outcome.prefill_seconds = time.perf_counter() - started
        with ThreadPoolExecutor(self.case.num_branches) as pool:
            list(pool.map(partial(self._answer, outcome), self.case.interleaved))
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _answer(self, outcome: Outcome, place: tuple[int, int]) -> None:
        d, b = place
        prompt = self.case.documents[d].prompts[b]
        with self._lock:
            turn = time.perf_counter()
            outcome.computed_tokens += len(prompt) - self._num_reused(prompt)
            outcome.outputs[d][b], first_token_at = self._generate(prompt, self.case.max_tokens)
            outcome.activation_seconds.append(first_token_at - turn)

    def _num_reused(self, prompt: tuple[int, ...]) -> int:
        size = min(self._llama.n_tokens, len(prompt))
        differs = np.nonzero(self._llama.input_ids[:size] != np.asarray(prompt[:size]))[0]
        return int(differs[0]) if differs.size else min(size, len(prompt) - 1)

    def _generate(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], float]:
        answer = self._llama.generate(prompt, temp=0.0)
        first = next(answer)
        first_token_at = time.perf_counter()
        return [first, *itertools.islice(answer, max_tokens - 1)], first_token_at

    def close(self) -> None:
        """Free it."""
        if hasattr(self, "_llama"):
            self._llama.close()
