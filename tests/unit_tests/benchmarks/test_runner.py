"""Rounds, workers that die, and the settings that are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.fanout.process import WorkerProcess
from benchmarks.fanout.runner import run_rounds
from benchmarks.fanout.tune import best_settings
from tests.unit_tests.benchmarks.fakes import entry, plan, small_case


def ignore(text: str) -> None:
    """Nobody is told."""


def test_rounds_alternate_and_the_slow_one_runs_less_often(tmp_path: Path) -> None:
    """All in order, then again; over three times the fastest's first run: `slow_repeat` runs."""
    diary = tmp_path / "diary"
    scripts = {"a": [1.0, 1.5, 2.0], "slow": [3.5], "b": [3.0, 2.0, 1.0]}
    entries = []
    for label, script in scripts.items():
        fake = entry("Scripted", script=script, label=label, diary=str(diary))
        fake.name = label
        entries.append(fake)
    run_rounds(plan(tmp_path, small_case()), entries, ignore)
    assert diary.read_text().split() == ["a", "slow", "b", "a", "b", "a", "b"]
    assert [fake.seconds for fake in entries] == list(scripts.values())
    assert [fake.median_seconds for fake in entries] == [1.5, 3.5, 2.0]
    for fake in entries:
        assert fake.error is None
        assert fake.outcomes[0].outputs == [[[7, 8], [7, 8]]]
        assert fake.peak_rss_bytes > 1 << 20


def test_a_contender_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    """A crash, an exception while loading, and no answer in time."""
    crashing, unopened = entry("Crashing", script=[1.0]), entry("Unopened", script=[1.0])
    sound = entry("Scripted", script=[1.0, 1.0])
    run_rounds(plan(tmp_path, small_case(), repeat=2), [crashing, unopened, sound], ignore)
    assert "SIGSEGV" in (crashing.error or "")
    assert unopened.error == "OSError: no such luck"
    assert (sound.error, len(sound.outcomes)) == (None, 2)


def test_a_contender_that_hangs_is_killed(tmp_path: Path) -> None:
    """After the time that it was given."""
    hanging = entry("Hanging", script=[1.0])
    run_rounds(plan(tmp_path, small_case(), timeout_seconds=4), [hanging], ignore)
    assert hanging.error == "no answer within 4 s"


def test_an_interrupt_kills_the_worker() -> None:
    """Leaving the block by an exception does not wait for anything."""
    worker = WorkerProcess()
    with pytest.raises(KeyboardInterrupt), worker:
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_the_fastest_candidate_is_kept(tmp_path: Path) -> None:
    """Of those that answer; what all start from stays."""
    case = small_case()
    settings = best_settings(plan(tmp_path, case), case, entry("Scripted"), ignore)
    assert settings == {"threads": 1, "script": [3.0]}
