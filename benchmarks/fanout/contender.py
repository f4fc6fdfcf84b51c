"""What a contender is: opened once in a process of its own, run several times on one case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .case import Case

__all__ = ["Contender", "Outcome", "Settings"]

Settings = dict[str, Any]
"""Names and plain values, printed in the report.

`threads` is always given, `gpu_layers` where it is not 0; a candidate adds flash attention, wave
size, ...
"""


@dataclass
class Outcome:
    """One run."""

    seconds: float
    """From the first call to the last token of the last branch."""
    outputs: list[list[list[int]]]
    """Output token ids by document and branch; an empty list where the contender gives only text
    that does not map back to ids."""
    computed_tokens: int
    """Prompt tokens that were computed, not reused."""
    prefill_seconds: float = 0.0
    """Until the (first) document was in the cache; 0 where the contender has no such moment."""
    activation_seconds: list[float] = field(default_factory=list)
    """For each branch, from the moment it could start (document ready, or before it its turn) to
    its first token; empty where it cannot be told."""


class Contender(ABC):
    """One way of answering a case. Subclasses stand in `contenders/`, one a module.

    The constructor only stores its arguments; `open` loads. A run starts with the model loaded and
    nothing cached but `case.cached`.
    """

    name: ClassVar[str]
    tuning_branches: ClassVar[int | None] = 4
    """Branches of each document that are enough to compare candidates; None: it takes all."""
    masks_end: ClassVar[bool] = False
    """Whether it takes the next best token where the text would end, since its interface cannot go
    on after an end; the others write the end and go on. For the oracle."""
    uses_flash_attention: bool
    """Which kernel decodes, for the oracle; set by `open` at the latest."""

    def __init__(self, model: Path, case: Case, settings: Settings) -> None:
        self.model = model
        self.case = case
        self.settings = settings

    @classmethod
    def candidates(cls, case: Case) -> list[Settings]:
        """The settings worth trying; the benchmark measures and keeps the fastest.

        A single one where there is no choice.
        """
        return [{}]

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this contender cannot run here (a package that is missing, ...); None if it can."""
        return None

    @abstractmethod
    def open(self) -> None:
        """Load the model and make every thread, page and buffer warm."""

    @abstractmethod
    def prepare(self) -> None:
        """Before each run, outside the clock: empty all caches, then read `case.cached`."""

    @abstractmethod
    def run(self) -> Outcome:
        """Answer the case once."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; harmless after a failed `open`."""

    def child_pids(self) -> list[int]:
        """Processes whose memory counts as this contender's, beside the worker's own."""
        return []
