"""How fast an engine prefills a document, and decodes branches that share it.

    measure_rates(engine, document_tokens=1024)

The document is prefilled in one sequence; branches are forked from it and decode one token a step,
all in one batch, as the scheduler does it. No scheduler runs, so these are the engine's own rates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_swarmkv.engine.contract import Batch, Engine, Tokenizer

__all__ = [
    "NUM_BRANCHES",
    "DecodeRate",
    "Rates",
    "affordable_document",
    "cells_needed",
    "measure_rates",
]

NUM_BRANCHES = (1, 4, 16)
_NUM_PREFILLS = 3
_NUM_STEPS = 8
_MAX_SECONDS = 10.0
"""After so long a measurement is not repeated."""
_PROBE_TOKENS = 128
_TEXT = (
    "The strip lies under the carpet and listens to the floor. When someone falls, the sound "
    "differs from that of a chair, and the device calls for help within seconds. "
)

Phase = Callable[[str], None]
"""Told what is measured next, in a few words."""


@dataclass(frozen=True)
class DecodeRate:
    """Branches that decode together."""

    num_branches: int
    step_seconds: float
    """Median of one step, which gives each branch a token."""
    tokens_per_second: float
    """Of all branches together."""


@dataclass(frozen=True)
class Rates:
    """What one engine does with one document."""

    document_tokens: int
    prefill_tokens_per_second: float
    """At the median of the prefills."""
    decode: tuple[DecodeRate, ...]

    def step_seconds(self, num_branches: int) -> float:
        """Of so many branches, one of those that were measured."""
        return next(r.step_seconds for r in self.decode if r.num_branches == num_branches)

    @property
    def fan_out_seconds(self) -> float:
        """Prefill the document and decode 64 tokens of each of the most branches."""
        prefill = self.document_tokens / self.prefill_tokens_per_second
        return prefill + 64 * self.decode[-1].step_seconds


def cells_needed(document_tokens: int) -> int:
    """Cells that `measure_rates` uses."""
    return document_tokens + NUM_BRANCHES[-1] * (_NUM_STEPS + 1)


def affordable_document(engine: Engine, limit_tokens: int) -> int:
    """Tokens that can be prefilled in about 10 seconds, as far as the engine has room for them."""
    limits = engine.limits
    room = limits.num_cells - cells_needed(0)
    positions = engine.facts.n_ctx_train - _NUM_STEPS - 1
    probe_tokens = max(
        1, min(_PROBE_TOKENS, limits.max_batch_tokens, limit_tokens, room, positions)
    )
    tokens = _document(engine.tokenizer, probe_tokens)
    _prefill(engine, tokens)  # reads the weights from disk
    seconds = _timed(lambda: _prefill(engine, tokens))
    engine.clear(0)
    affordable = int(_MAX_SECONDS * probe_tokens / max(seconds, 1e-6))
    return max(1, min(limit_tokens, room, positions, max(affordable, probe_tokens)))


def measure_rates(
    engine: Engine, *, document_tokens: int, on_phase: Phase = lambda _: None
) -> Rates:
    """Measure; sequences 0 to 16 must be empty, and are so afterwards.

    Args:
        engine: With `cells_needed(document_tokens)` cells and 17 sequences.
        document_tokens: Length of the document.
        on_phase: Told what is measured next.
    """
    document = _document(engine.tokenizer, document_tokens)
    try:
        on_phase(f"prefill of {document_tokens} tokens")
        prefills = _repeat(lambda: _prefill(engine, document), _NUM_PREFILLS)
        rates = []
        for num_branches in NUM_BRANCHES:
            on_phase(f"decode of {num_branches} branch{'es' if num_branches > 1 else ''}")
            rates.append(_measure_decode(engine, num_branches, document[0]))
    finally:
        engine.clear(0)
    return Rates(
        document_tokens=document_tokens,
        prefill_tokens_per_second=document_tokens / statistics.median(prefills),
        decode=tuple(rates),
    )


def _measure_decode(engine: Engine, num_branches: int, token: int) -> DecodeRate:
    branches = range(1, num_branches + 1)
    try:
        for branch in branches:
            engine.fork(0, branch, engine.num_tokens(0))
        _step(engine, branches, token)  # the first one of its size builds a graph
        steps = _repeat(lambda: _step(engine, branches, token), _NUM_STEPS)
    finally:
        for branch in branches:
            engine.clear(branch)
    seconds = statistics.median(steps)
    return DecodeRate(num_branches, seconds, num_branches / seconds)


def _prefill(engine: Engine, tokens: Sequence[int]) -> None:
    engine.clear(0)
    size = engine.limits.max_batch_tokens
    for start in range(0, len(tokens), size):
        batch = Batch()
        row = batch.add(0, tokens[start : start + size], start, want_logits=True)
        engine.decode(batch)
        engine.logits(row)  # a GPU computes on until someone asks


def _step(engine: Engine, branches: Sequence[int], token: int) -> None:
    batch = Batch()
    for branch in branches:
        row = batch.add(branch, [token], engine.num_tokens(branch), want_logits=True)
    engine.decode(batch)
    engine.logits(row)


def _repeat(action: Callable[[], None], times: int) -> list[float]:
    seconds: list[float] = []
    while len(seconds) < times and sum(seconds) < _MAX_SECONDS:
        seconds.append(_timed(action))
    return seconds


def _timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _document(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    text = tokenizer.encode(_TEXT) or [0]
    return (text * -(-num_tokens // len(text)))[:num_tokens]
