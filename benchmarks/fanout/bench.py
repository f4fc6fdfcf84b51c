"""The benchmark from options to result; the command line calls this."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from langchain_swarmkv import ChatSwarmKV, ConfigurationError

from .article import article_fields, print_article
from .case import Case
from .contender import Settings
from .contenders import CONTENDERS, DEFAULT_CONTENDERS, load_contender
from .machine import core_count, machine, versions
from .process import WorkerError, WorkerProcess
from .report import case_result, is_judged, is_right, print_case
from .runner import ContenderRun, Plan, run_rounds
from .tune import best_settings
from .workloads import Sizes, build_cases

__all__ = ["Options", "is_good", "run_benchmark"]

ALL = "all"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    model: Path
    workload: str | None = None
    sizes: Sizes = field(default_factory=Sizes)
    contenders: str = ",".join(DEFAULT_CONTENDERS)
    """Names with commas between, or "all": those that can run here."""
    repeat: int = 3
    slow_repeat: int = 1
    threads: int | None = None
    gpu_layers: int = 0
    tunes: bool = True
    server_script: Path | None = None
    timeout_seconds: float = 3600.0


def run_benchmark(
    options: Options,
    *,
    command: Sequence[str],
    console: Console,
    tell: Tell,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run every case, print each table when it is there, and return the result as plain data.

    Args:
        options: what to run.
        command: as it was given, for the result.
        console: for the tables.
        tell: told what is being done.
        save: given the result so far after each case, so that an interrupt loses one case at most.

    Raises:
        ConfigurationError: an option is wrong; nothing was measured.
        ModelError: the model cannot be used.
    """
    names, unavailable = _chosen(options)
    with ChatSwarmKV(model_path=options.model) as llm:
        cases = build_cases(llm, options.workload, options.sizes)
    results = []
    for case in cases:
        results.append(_run_case(options, case, names, tell))
        save(_result(options, command, results, unavailable))  # printing may fail: a closed pipe
        print_case(console, results[-1])
        if fields := results[-1].get("article"):
            print_article(console, fields)
    for name, reason in unavailable.items():
        console.print(f"{name}: not run, {reason}", markup=False, highlight=False, soft_wrap=True)
    return _result(options, command, results, unavailable)


def _result(
    options: Options,
    command: Sequence[str],
    results: Sequence[dict[str, Any]],
    unavailable: dict[str, str],
) -> dict[str, Any]:
    return {
        "benchmark": "fanout",
        "workload": {"name": options.workload or "custom", **_sizes(results)},
        "model": {"name": options.model.name, "bytes": options.model.stat().st_size},
        **({"contenders": results[0]["contenders"]} if len(results) == 1 else {}),
        "cases": list(results),
        "unavailable": unavailable,
        "machine": machine(),
        "versions": versions(),
        "command": list(command),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _sizes(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(results) > 1:
        return {"cases": [result["workload"]["name"] for result in results]}
    return {name: value for name, value in results[0]["workload"].items() if name != "name"}


def is_good(result: dict[str, Any]) -> bool:
    """Whether every contender of every case came to its end with answers that the oracle shares."""
    return all(
        is_judged(case["oracle"]) and all(map(is_right, case["contenders"]))
        for case in result["cases"]
    )


def _chosen(options: Options) -> tuple[list[str], dict[str, str]]:
    """The contenders to run, in the order of the table, and why others do not."""
    wanted = [name.strip() for name in options.contenders.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in (*CONTENDERS, ALL)]
    if unknown or not wanted:
        raise ConfigurationError(
            f"--contenders {options.contenders!r}: give names with commas between, of "
            f"{', '.join(CONTENDERS)}, or all."
        )
    names = [name for name in CONTENDERS if name in wanted or ALL in wanted]
    reasons = {name: _why_not(name, options) for name in names}
    unavailable = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in unavailable.items():
        if name in wanted:
            raise ConfigurationError(f"{name} cannot run here: {reason}.")
    return [name for name in names if name not in unavailable], unavailable


def _why_not(name: str, options: Options) -> str | None:
    if name == "example-server" and options.server_script is None:
        return "it needs --server-script"
    return load_contender(CONTENDERS[name]).unavailable()


def _run_case(options: Options, case: Case, names: Sequence[str], tell: Tell) -> dict[str, Any]:
    entries = [ContenderRun(name, CONTENDERS[name], _settings(options, name)) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        case_file = Path(folder) / "case.json"
        case_file.write_text(case.model_dump_json(), encoding="utf-8")
        plan = Plan(
            options.model, case_file, options.repeat, options.slow_repeat, options.timeout_seconds
        )
        for entry in entries:
            entry.settings = (
                best_settings(plan, case, entry, _prefixed(tell, case))
                if options.tunes
                else {**entry.settings, **load_contender(entry.reference).candidates(case)[0]}
            )
        run_rounds(plan, entries, _prefixed(tell, case))
        tell(f"{case.name}: the oracle judges")
        verdict = _verdict(plan, entries, options)
    result = case_result(case, entries, verdict)
    if case.name == "W1" and (fields := article_fields(case, entries)):
        result["article"] = fields
    return result


def _settings(options: Options, name: str) -> Settings:
    settings: Settings = {"threads": options.threads or core_count()}
    if options.gpu_layers:
        settings["gpu_layers"] = options.gpu_layers
    if name == "example-server":
        settings["server_script"] = str(options.server_script)
    return settings


def _prefixed(tell: Tell, case: Case) -> Tell:
    return lambda text: tell(f"{case.name}: {text}")


def _verdict(plan: Plan, entries: Sequence[ContenderRun], options: Options) -> dict[str, Any]:
    """What the oracle says, in a process of its own, with its agreements by name."""
    judged = [entry for entry in entries if entry.outcomes]
    answers = [
        {
            "flash_attention": entry.uses_flash_attention,
            "masks_end": entry.masks_end,
            "runs": [outcome.outputs for outcome in entry.outcomes],
        }
        for entry in judged
    ]
    with WorkerProcess() as worker:
        try:
            verdict = worker.ask(
                "judge",
                plan.timeout_seconds,
                case=str(plan.case_file),
                model=str(plan.model),
                threads=options.threads or core_count(),
                gpu_layers=options.gpu_layers,
                answers=answers,
            )
        except WorkerError as error:
            return {"error": str(error)}
    names = [entry.name for entry in judged]
    return {**verdict, "agreements": dict(zip(names, verdict["agreements"], strict=True))}
