"""What a benchmark leaves: a JSON object and a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .case import Case
from .runner import ContenderRun

__all__ = ["case_result", "is_judged", "is_right", "print_case", "workload_facts"]


def case_result(
    case: Case, entries: Sequence[ContenderRun], verdict: dict[str, Any]
) -> dict[str, Any]:
    """One case as plain data.

    Args:
        case: what was answered.
        entries: the contenders, errors included.
        verdict: the oracle's: `agreements` by contender name, and what it says of itself; or its
            `error`.
    """
    agreements = verdict.get("agreements", {})
    return {
        "workload": workload_facts(case),
        "contenders": [_contender(entry, agreements.get(entry.name)) for entry in entries],
        "oracle": {name: value for name, value in verdict.items() if name != "agreements"},
    }


def workload_facts(case: Case) -> dict[str, Any]:
    """A case's name and sizes."""
    return {
        "name": case.name,
        "documents": len(case.documents),
        "cached_documents": len(case.cached),
        "is_cold": case.is_cold,
        "document_tokens": max(document.num_tokens for document in case.documents),
        "prefix_tokens": max(len(document.prefix) for document in case.documents),
        "branches": case.num_branches,
        "max_tokens": case.max_tokens,
        "shared_prompt_tokens": case.num_shared_tokens,
    }


def _contender(entry: ContenderRun, agreement: dict[str, Any] | None) -> dict[str, Any]:
    last = entry.outcomes[-1] if entry.outcomes else None
    if agreement and not math.isfinite(agreement["worst_gap"]):
        agreement = {**agreement, "worst_gap": None}
    return {
        "name": entry.name,
        "settings": {k: v for k, v in entry.settings.items() if k != "server_script"},
        "seconds": entry.seconds,
        "median_seconds": entry.median_seconds,
        "computed_tokens": last.computed_tokens if last else None,
        "output_tokens": _num_output_tokens(last.outputs) if last else None,
        "peak_rss_bytes": entry.peak_rss_bytes or None,
        "oracle_agreement": agreement,
        "prefill_seconds": median(o.prefill_seconds for o in entry.outcomes) if last else None,
        "activation_seconds": _median_activations(entry),
        "error": entry.error,
    }


def _num_output_tokens(outputs: list[list[list[int]]]) -> int | None:
    """None where a branch gave only text."""
    branches = [tokens for document in outputs for tokens in document]
    return sum(map(len, branches)) if all(branches) else None


def _median_activations(entry: ContenderRun) -> list[float]:
    runs = [outcome.activation_seconds for outcome in entry.outcomes]
    return [median(branch) for branch in zip(*runs, strict=False)] if all(runs) else []


_LEAST_EXACT = 0.8
"""Share of tokens that are the oracle's best: 0.98 and more in benchmarks/results, 0.6 without the
document."""


def is_judged(oracle: dict[str, Any]) -> bool:
    """Whether the oracle came to its end, and keeping the document changed nothing for it."""
    differences = oracle.get("shortcut_difference", {}).values()
    return "error" not in oracle and all(d <= oracle["tolerance"] for d in differences)


def is_right(contender: dict[str, Any]) -> bool:
    """Whether a contender came to its end, and its answers are the model's but for rounding.

    No token may be further behind the best than the margin, most must be the best, and of those
    that give text alone most branches must map back to tokens.
    """
    agreement = contender["oracle_agreement"]
    if contender["error"] or agreement is None:
        return False
    tokens, branches = agreement["tokens"], agreement["branches"]
    return bool(
        agreement["agreeing"] == tokens
        and agreement["exact"] >= _LEAST_EXACT * tokens
        and agreement["unjudged_branches"] <= branches / 2
    )


def print_case(console: Console, result: dict[str, Any]) -> None:
    """The table of one case, and what went wrong."""
    table = Table(title=_title(result["workload"]), title_justify="left", box=SIMPLE_HEAD)
    table.add_column("contender", no_wrap=True)
    for heading in ("median s", "range s", "runs", "x floor", "computed", "peak MB", "oracle"):
        table.add_column(heading, justify="right", no_wrap=True)
    floor = next((c["median_seconds"] for c in result["contenders"] if c["name"] == "floor"), None)
    for contender in result["contenders"]:
        style = None if is_right(contender) else "red"
        table.add_row(contender["name"], *_cells(contender, floor), style=style)
    console.print(table)
    for contender in result["contenders"]:
        settings = ", ".join(f"{name}={value}" for name, value in contender["settings"].items())
        _print_line(console, f"{contender['name']}: {settings}")
        if contender["error"]:
            _print_line(console, f"{contender['name']} failed: {contender['error']}", style="red")
    if error := result["oracle"].get("error"):
        _print_line(console, f"the answers were not judged: {error}", style="red")
    for kernel, difference in result["oracle"].get("shortcut_difference", {}).items():
        _print_line(
            console,
            f"oracle ({kernel}): a token may be {result['oracle']['margin']:g} behind the best; a "
            f"prompt computed from nothing differs by {difference:.3g}",
            style=None if is_judged(result["oracle"]) else "red",
        )


def _title(facts: dict[str, Any]) -> str:
    documents = facts["documents"]
    return (
        f"{facts['name']}: {documents} document{'s' if documents > 1 else ''} of "
        f"{facts['document_tokens']} tokens, {facts['branches']} branches x "
        f"{facts['max_tokens']} tokens"
    )


def _cells(contender: dict[str, Any], floor: float | None) -> Iterator[str]:
    seconds, middle = contender["seconds"], contender["median_seconds"]
    if middle is None:
        yield from ("-",) * 7
    else:
        yield f"{middle:.2f}"
        yield f"{min(seconds):.2f}-{max(seconds):.2f}"
        yield str(len(seconds))
        yield f"{middle / floor:.2f}" if floor else "-"
        yield f"{contender['computed_tokens']:,}"
        yield f"{contender['peak_rss_bytes'] / 1e6:,.0f}" if contender["peak_rss_bytes"] else "-"
        yield _agreement(contender["oracle_agreement"])


def _agreement(agreement: dict[str, Any] | None) -> str:
    if agreement is None:
        return "not judged"
    if not agreement["tokens"]:
        return "text only"
    return f"{agreement['agreeing']}/{agreement['tokens']}"


def _print_line(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
