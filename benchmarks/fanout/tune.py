"""The settings of each contender: its candidates measured once, the fastest kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .case import Case
from .contender import Outcome, Settings
from .contenders import load_contender
from .process import WorkerError, WorkerProcess
from .runner import ContenderRun, Plan, open_worker

__all__ = ["best_settings"]

_PATIENCE = 1.3
"""A candidate that takes this many times as long as the best is given up."""
_SLACK_SECONDS = 5.0


def best_settings(
    plan: Plan, case: Case, entry: ContenderRun, tell: Callable[[str], None]
) -> Settings:
    """The candidate that answers `case` fastest; the first if none does.

    Few branches are enough for contenders whose branches cost the same each: the time that is
    compared counts the shared prefill once and the rest for all branches. (A cold case has no
    prefill that can be told from the rest, so it takes all branches.)

    Args:
        plan: of the case; the file of the reduced case is written beside its file.
        case: what will be run.
        entry: the contender; its settings are what all candidates start from.
        tell: told what is being measured.
    """
    contender = load_contender(entry.reference)
    candidates = [{**entry.settings, **settings} for settings in contender.candidates(case)]
    if len(candidates) == 1:
        return candidates[0]
    most = None if case.is_cold else contender.tuning_branches
    reduced = case.with_branches(most or case.num_branches)
    reduced_plan = replace(plan, case_file=plan.case_file.with_suffix(".tuning.json"))
    reduced_plan.case_file.write_text(reduced.model_dump_json(), encoding="utf-8")
    scale = case.num_branches / reduced.num_branches
    best, best_outcome = candidates[0], None
    for settings in candidates:
        tell(f"tuning {entry.name}: {_in_words(settings)}")
        trial = replace(entry, settings=settings)
        outcome = _measure(reduced_plan, trial, best_outcome)
        if outcome and (not best_outcome or _cost(outcome, scale) < _cost(best_outcome, scale)):
            best, best_outcome = settings, outcome
    return best


def _measure(plan: Plan, trial: ContenderRun, best: Outcome | None) -> Outcome | None:
    limit = plan.timeout_seconds
    if best:
        limit = min(limit, _PATIENCE * best.seconds + _SLACK_SECONDS)
    with WorkerProcess() as worker:
        try:
            open_worker(plan, trial, worker)
            return Outcome(**worker.ask("run", limit)["outcome"])
        except WorkerError:
            return None  # whatever is wrong with it shows when the first candidate is run


def _cost(outcome: Outcome, scale: float) -> float:
    return outcome.prefill_seconds + scale * (outcome.seconds - outcome.prefill_seconds)


def _in_words(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
