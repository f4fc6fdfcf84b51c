"""The article's own report, with our measurements in it: for its workload, W1."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .case import Case
from .runner import ContenderRun

__all__ = ["ARTICLE", "article_fields", "print_article"]

ARTICLE = {"end_to_end_ratio": 1.95, "activation_ratio": 52.0}
"""What the article says it reached."""


def article_fields(case: Case, entries: Sequence[ContenderRun]) -> dict[str, Any] | None:
    """Baseline against graph; None unless both came to their end with two branches or more."""
    runs = {entry.name: entry for entry in entries if entry.outcomes}
    baseline, graph = runs.get("fresh-context"), runs.get("graph")
    if baseline is None or graph is None or case.num_branches < 2:
        return None
    # A fresh context activates its branch by prefilling the whole prompt.
    prefill = _median_activation(baseline, branch=1)
    activation = _median_activation(graph, branch=1)
    before, after = baseline.median_seconds, graph.median_seconds
    assert before is not None
    assert after is not None
    redundant = baseline.outcomes[-1].computed_tokens - graph.outcomes[-1].computed_tokens
    return {
        "baseline_end_to_end_seconds": before,
        "graph_end_to_end_seconds": after,
        "end_to_end_ratio": before / after,
        "improvement_percent": 100 * (1 - after / before),
        "branch_2_prefill_seconds": prefill,
        "branch_2_activation_seconds": activation,
        "activation_ratio": prefill / activation,
        "document_prefill_seconds": median(o.prefill_seconds for o in graph.outcomes),
        "redundant_prefill_tokens_eliminated": redundant,
        "redundant_prefill_eliminated_percent": 100
        * redundant
        / (baseline.outcomes[-1].computed_tokens - case.num_shared_tokens),
        "article": ARTICLE,
    }


def _median_activation(entry: ContenderRun, branch: int) -> float:
    return median(outcome.activation_seconds[branch] for outcome in entry.outcomes)


def print_article(console: Console, fields: dict[str, Any]) -> None:
    """The fields that the article reports, and the prefill time that its report lost."""
    claimed = fields["article"]
    table = Table(title="The article's fields", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for heading in ("fresh context", "graph", "ratio", "article"):
        table.add_column(heading, justify="right")
    table.add_row(
        "end to end",
        f"{fields['baseline_end_to_end_seconds']:.2f} s",
        f"{fields['graph_end_to_end_seconds']:.2f} s",
        f"{fields['end_to_end_ratio']:.2f} ({fields['improvement_percent']:.0f} % less)",
        f"{claimed['end_to_end_ratio']}",
    )
    table.add_row(
        "branch 2: its prefill, its activation",
        f"{fields['branch_2_prefill_seconds']:.3f} s",
        f"{fields['branch_2_activation_seconds']:.3f} s",
        f"{fields['activation_ratio']:.1f}",
        f"{claimed['activation_ratio']:.0f}",
    )
    table.add_row(
        "redundant prefill eliminated",
        "",
        f"{fields['redundant_prefill_tokens_eliminated']:,} tokens",
        f"{fields['redundant_prefill_eliminated_percent']:.0f} %",
        "",
    )
    table.add_row("prefill of the document", "", f"{fields['document_prefill_seconds']:.2f} s")
    console.print(table)
