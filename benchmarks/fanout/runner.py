"""Rounds: every contender in its own process, one at a time, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from .contender import Outcome, Settings
from .process import WorkerError, WorkerProcess

__all__ = ["ContenderRun", "Plan", "run_rounds"]

_SLOW_FACTOR = 3.0

Told = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How a case is run."""

    model: Path
    case_file: Path
    """The case as JSON."""
    repeat: int
    slow_repeat: int
    """Runs of a contender whose first took more than three times as long as the fastest's."""
    timeout_seconds: float
    """For loading, and for each run."""


@dataclass
class ContenderRun:
    """What one contender did with one case."""

    name: str
    reference: str
    """`module:Class`, for the worker."""
    settings: Settings
    outcomes: list[Outcome] = field(default_factory=list)
    peak_rss_bytes: int = 0
    uses_flash_attention: bool = False
    masks_end: bool = False
    error: str | None = None

    @property
    def seconds(self) -> list[float]:
        """Of all runs."""
        return [outcome.seconds for outcome in self.outcomes]

    @property
    def median_seconds(self) -> float | None:
        """None: no run came to its end."""
        return median(self.seconds) if self.outcomes else None


def run_rounds(plan: Plan, entries: Sequence[ContenderRun], tell: Told) -> None:
    """Run all contenders `plan.repeat` times, alternating; `entries` take the results.

    One that fails is left out from then on. Each worker ends when its runs are done.
    """
    workers: dict[str, WorkerProcess] = {}
    try:
        for number in range(1, plan.repeat + 1):
            for entry in entries:
                if entry.error is None and len(entry.outcomes) < _num_runs(plan, entry, entries):
                    tell(f"round {number} of {plan.repeat}: {entry.name}")
                    _run_once(plan, entry, workers)
            for entry in entries:
                if entry.error or len(entry.outcomes) >= _num_runs(plan, entry, entries):
                    _end(workers, entry)
    finally:
        for worker in workers.values():
            worker.kill()


def _num_runs(plan: Plan, entry: ContenderRun, entries: Sequence[ContenderRun]) -> int:
    if not all(other.outcomes or other.error for other in entries):
        return 1  # the first round
    fastest = min(other.seconds[0] for other in entries if other.outcomes)
    is_slow = bool(entry.outcomes) and entry.seconds[0] > _SLOW_FACTOR * fastest
    return min(plan.repeat, plan.slow_repeat) if is_slow else plan.repeat


def _run_once(plan: Plan, entry: ContenderRun, workers: dict[str, WorkerProcess]) -> None:
    try:
        if entry.name not in workers:
            workers[entry.name] = WorkerProcess()
            open_worker(plan, entry, workers[entry.name])
        reply = workers[entry.name].ask("run", plan.timeout_seconds)
    except WorkerError as error:
        entry.error = str(error)
        workers[entry.name].kill()
        return
    entry.outcomes.append(Outcome(**reply["outcome"]))
    entry.peak_rss_bytes = max(entry.peak_rss_bytes, reply["peak_rss_bytes"])


def open_worker(plan: Plan, entry: ContenderRun, worker: WorkerProcess) -> None:
    """Load a contender with its settings.

    Raises:
        WorkerError: it failed.
    """
    reply = worker.ask(
        "open",
        plan.timeout_seconds,
        case=str(plan.case_file),
        contender=entry.reference,
        model=str(plan.model),
        settings=entry.settings,
    )
    entry.uses_flash_attention = reply["uses_flash_attention"]
    entry.masks_end = reply["masks_end"]


def _end(workers: dict[str, WorkerProcess], entry: ContenderRun) -> None:
    if worker := workers.pop(entry.name, None):
        worker.close()
