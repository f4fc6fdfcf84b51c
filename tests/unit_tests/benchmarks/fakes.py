"""Contenders that misbehave, for workers to load, and a case without a model."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from benchmarks.fanout.case import Case, Document
from benchmarks.fanout.contender import Contender, Outcome, Settings
from benchmarks.fanout.contenders.fresh_context import FreshContext
from benchmarks.fanout.runner import ContenderRun, Plan

HERE = __name__


def entry(name: str, **settings: object) -> ContenderRun:
    """A fake of this module by its class's name."""
    return ContenderRun(name, f"{HERE}:{name}", {"threads": 1, **settings})


def small_case(branches: int = 2) -> Case:
    """Ids that stand for nothing."""
    prompts = tuple((1, 2, 3, 4 + number) for number in range(branches))
    document = Document(
        text="text", instructions="", prefix=(1, 2, 3), tasks=("a",) * branches, prompts=prompts
    )
    return Case(name="small", documents=(document,), max_tokens=2)


def plan(folder: Path, case: Case, *, model: Path = Path("none"), **options: float) -> Plan:
    """A plan with the case written for the workers."""
    case_file = folder / "case.json"
    case_file.write_text(case.model_dump_json())
    numbers = {"repeat": 3, "slow_repeat": 1, "timeout_seconds": 60.0, **options}
    return Plan(model, case_file, **numbers)  # type: ignore[arg-type]


class Scripted(Contender):
    """Says that its runs took the seconds that its settings list, and what ran when."""

    name = "scripted"
    uses_flash_attention = False

    @classmethod
    def candidates(cls, case: Case) -> list[Settings]:
        return [{"script": [9.0]}, {"script": [3.0]}, {"script": []}, {"script": [5.0]}]

    def open(self) -> None:
        self._script = list(self.settings["script"])

    def prepare(self) -> None:
        os.write(1, b"what native code prints")

    def run(self) -> Outcome:
        if "diary" in self.settings:
            with open(self.settings["diary"], "a") as diary:
                print(f"{self.settings['label']}", file=diary)
        outputs = [[[7, 8] for _ in document.prompts] for document in self.case.documents]
        return Outcome(self._script.pop(0), outputs, computed_tokens=5)

    def close(self) -> None:
        pass


class Crashing(Scripted):
    """Ends its process as a fault in native code does."""

    def run(self) -> Outcome:
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError("unreachable")


class Hanging(Scripted):
    """Never answers."""

    def run(self) -> Outcome:
        threading.Event().wait()
        raise AssertionError("unreachable")


class Unopened(Scripted):
    """Cannot load."""

    def open(self) -> None:
        raise OSError("no such luck")


class Wrong(FreshContext):
    """Fast by being wrong: one token of one branch is another one."""

    name = "wrong"

    def run(self) -> Outcome:
        outcome = super().run()
        tokens = outcome.outputs[0][0]
        tokens[1] = tokens[1] - 1 if tokens[1] > 40 else tokens[1] + 1
        return outcome
