"""The report and the numbers of a run, printed."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from .display import printable
from .results import Analysis


def print_analysis(console: Console, analysis: Analysis, note: str = "") -> None:
    """Print the report, a row of numbers for each analyst, and what sharing saved.

    Args:
        console: where to; a terminal gets rendered Markdown, anything else the text as it is.
        analysis: the run.
        note: one sentence for the reader, after the numbers.
    """
    report = printable(analysis.report)
    if console.is_terminal:
        console.print(Markdown(report))
    else:
        console.print(Text(report), soft_wrap=True)
    console.print(_table(analysis))
    for line in (*saving_lines(analysis), note):
        console.print(line, markup=False, highlight=False)


def _table(analysis: Analysis) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for heading in ("prompt", "cached", "computed", "output", "queue", "TTFT", "TPOT"):
        table.add_column(heading, justify="right", no_wrap=True)
    document = analysis.document
    table.add_row(
        "document",
        str(document.prompt_tokens),
        str(document.cached_tokens),
        str(document.computed_tokens),
        "",
        seconds(document.timings.queue_seconds),
        "",
        "",
    )
    for analyst in analysis.analysts:
        table.add_row(
            analyst.name,
            str(analyst.prompt_tokens),
            str(analyst.cached_tokens),
            str(analyst.computed_tokens),
            str(analyst.output_tokens),
            seconds(analyst.timings.queue_seconds),
            seconds(analyst.timings.ttft_seconds),
            seconds(analyst.timings.tpot_seconds),
        )
    return table


def saving_lines(analysis: Analysis) -> list[str]:
    """What was computed, what an unshared run would compute, and the time between the two."""
    lines = [
        f"Prompt tokens computed: {analysis.computed_tokens}; "
        f"without sharing: {analysis.unshared_tokens}.",
    ]
    rate, saved = analysis.prefill_tokens_per_second, analysis.saved_seconds
    if rate is not None and saved is not None:
        lines.append(
            f"Estimate: sharing saved about {saved:.1f} s of prefill "
            f"(the difference at the {rate:.0f} tokens/s measured on the document): this run took "
            f"{analysis.wall_seconds:.1f} s, without sharing it would have taken about "
            f"{analysis.wall_seconds + saved:.0f} s."
        )
    else:
        lines.append(f"Wall time of the run: {analysis.wall_seconds:.1f} s.")
    cut = [analyst.name for analyst in analysis.analysts if analyst.end == "cut"]
    if cut:
        lines.append(f"Cut by max_tokens: {', '.join(cut)}. Give a larger --max-tokens.")
    lines.append(
        "cached: reused tokens; queue: until there was a place in the pool; TTFT: until the first "
        "token; TPOT: for each further token."
    )
    return lines


def seconds(value: float | None) -> str:
    """A duration in about three digits; nothing where it was not measured."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
