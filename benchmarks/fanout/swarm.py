"""What the contenders of this package share: an engine whose requests are kept for the record."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from langchain_swarmkv import EngineConfig, RequestHandle, SamplingParams, SwarmEngine

from .case import Case
from .contender import Contender, Outcome, Settings
from .native import BATCH_TOKENS, rounded_cells

__all__ = ["RecordingEngine", "SwarmContender", "outcome_of"]


_SAMPLE_TOKENS = 64
_MAX_SEQUENCES = 256
"""LLAMA_MAX_SEQ of llama.cpp."""
_MAX_RUNNING = 16
"""Branches at once on a CPU, by default. The floor runs in waves of as many."""


class RecordingEngine(SwarmEngine):
    """A `SwarmEngine` that keeps the handle of every request.

    So token ids and statistics are known whoever submitted: a chat model hands on text alone.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.requests: list[tuple[Sequence[int], RequestHandle]] = []
        super().__init__(config)

    def submit(
        self, tokens: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> RequestHandle:
        """See `SwarmEngine.submit`."""
        handle = super().submit(tokens, params, **options)
        self.requests.append((tokens, handle))
        return handle

    def submit_all(
        self, tokens: Sequence[int], params: Sequence[SamplingParams], **options: Any
    ) -> list[RequestHandle]:
        """See `SwarmEngine.submit_all`."""
        handles = super().submit_all(tokens, params, **options)
        self.requests += [(tokens, handle) for handle in handles]
        return handles


class SwarmContender(Contender):
    """One engine for all runs; subclasses ask it. All but one setting are its defaults."""

    _engine: RecordingEngine | None = None

    @classmethod
    def candidates(cls, case: Case) -> list[Settings]:
        """One attention kernel, or another one for prefill."""
        return [{"prefill_flash_attention": False}, {"prefill_flash_attention": True}]

    def open(self) -> None:
        """Load, and answer a small case for all that happens only once."""
        # What EngineConfig's default comes to: off on CPUs, on where layers are offloaded.
        self.uses_flash_attention = self.uses_gpu
        self._engine = RecordingEngine(self._config())
        sample = type(self)(self.model, _sample(self.case), self.settings)
        sample._engine = self._engine
        sample.prepare()
        sample._ask()

    def prepare(self) -> None:
        """An empty cache; then what shall be cached."""
        self.engine.reset_prefix_cache()
        for cached in self.case.cached:
            self.engine.submit(cached.prefix, SamplingParams(max_tokens=0)).result()
        self.engine.requests.clear()

    def _config(self) -> EngineConfig:
        num_documents = len(self.case.documents) + len(self.case.cached)
        # A pool for what runs at once; the others wait, and need neither cells nor sequences.
        most = _MAX_SEQUENCES - num_documents - 2 if self.uses_gpu else _MAX_RUNNING
        lanes = min(self.case.num_branches, most)
        return EngineConfig(
            model_path=self.model,
            n_ctx=rounded_cells(max(self.case.cells_of(lanes), BATCH_TOKENS)),
            n_batch=BATCH_TOKENS,
            max_sequences=num_documents + lanes + 2,
            n_threads=self.settings["threads"],
            n_gpu_layers=self.settings.get("gpu_layers", 0),
            prefill_flash_attention=self.settings["prefill_flash_attention"],
        )

    @property
    def uses_gpu(self) -> bool:
        """Whether layers are offloaded; then all branches run at once by default."""
        return bool(self.settings.get("gpu_layers"))

    @property
    def engine(self) -> RecordingEngine:
        """The engine, from `open` to `close`."""
        assert self._engine is not None, "open comes before run"
        return self._engine

    def run(self) -> Outcome:
        """Ask, then read from the requests what happened."""
        return outcome_of(self.case, self.engine, self._ask())

    @abstractmethod
    def _ask(self) -> float:
        """Answer the case; the seconds that it took."""

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _sample(case: Case) -> Case:
    """The begin of the first document and one branch."""
    document = case.documents[0]
    prefix = document.prefix[:_SAMPLE_TOKENS]
    small = document.model_copy(
        update={
            "text": document.text[: 2 * _SAMPLE_TOKENS],
            "prefix": prefix,
            "tasks": document.tasks[:1],
            "prompts": (prefix + document.rests[0],),
        }
    )
    return case.model_copy(update={"documents": (small,), "cached": (), "max_tokens": 2})


def outcome_of(case: Case, engine: RecordingEngine, seconds: float) -> Outcome:
    """What the requests of one run amount to.

    Raises:
        ValueError: a branch is missing: another prompt was sent in its place.
    """
    answers = {tuple(tokens): handle for tokens, handle in engine.requests}
    ready = [_prefilled_at(answers.get(document.prefix)) for document in case.documents]
    outcome = Outcome(seconds, [[[] for _ in d.prompts] for d in case.documents], 0)
    outcome.computed_tokens = sum(h.statistics.num_computed_tokens for _, h in engine.requests)
    if ready[0] is not None:
        asked = answers[case.documents[0].prefix].statistics.submitted_at
        outcome.prefill_seconds = ready[0] - asked
    for d, b in case.interleaved:
        handle = answers.get(case.documents[d].prompts[b])
        if handle is None:
            raise ValueError(f"no request was made with the prompt of branch {b} of document {d}")
        outcome.outputs[d][b] = list(handle.result().token_ids)
        statistics, ready_at = handle.statistics, ready[d]
        assert statistics.first_token_at is not None
        could_start_at = statistics.submitted_at if ready_at is None else ready_at
        outcome.activation_seconds.append(statistics.first_token_at - could_start_at)
    return outcome


def _prefilled_at(handle: RequestHandle | None) -> float | None:
    return handle.statistics.prefilled_at if handle else None
