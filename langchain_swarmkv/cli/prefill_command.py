"""`swarmkv prefill`: compute a document ahead of time, so that the first question finds it warm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.cli.console import companion, default_model, errors_in_one_line
from langchain_swarmkv.config import SnapshotPolicy
from langchain_swarmkv.prompts.document import DEFAULT_INSTRUCTIONS, DocumentRef, document_message
from langchain_swarmkv.scheduling.request import PrefillProgress
from langchain_swarmkv.statistics import PrefixSource, RequestStatistics

__all__ = ["prefill"]


def prefill(
    document: Annotated[Path, typer.Argument(help="A .txt, .md or .pdf file.")],
    snapshot_dir: Annotated[Path, typer.Option(help="The folder for snapshots.")],
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file; without it, SmolLM2-135M-Instruct.")
    ] = None,
    n_ctx: Annotated[int, typer.Option(min=1, help="Tokens that fit into the pool.")] = 8192,
    instructions: Annotated[
        str, typer.Option(help="What analysts are told before the document; as in DocumentNode.")
    ] = DEFAULT_INSTRUCTIONS,
    cache_salt: Annotated[
        str, typer.Option(envvar="SWARMKV_CACHE_SALT", help="Only for callers with this salt.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; without it, one for each core.")
    ] = None,
) -> None:
    """Prefill a document and leave its KV in a folder, for runs to come."""
    with errors_in_one_line():
        text = companion("examples", "patent_analysis.reader").read_document(document)
        llm = ChatSwarmKV(
            model_path=model or default_model(),
            n_ctx=n_ctx,
            n_threads=threads,
            cache_salt=cache_salt,
            snapshot_dir=snapshot_dir,
            snapshot_policy=SnapshotPolicy.NEVER,  # this document, and nothing else
        )
        with llm:
            started = time.perf_counter()
            ref, statistics = _prefill(llm, text, instructions)
            seconds = time.perf_counter() - started
        Console().print(_result(ref, statistics, snapshot_dir, seconds), highlight=False)


def _prefill(
    llm: ChatSwarmKV, text: str, instructions: str
) -> tuple[DocumentRef, RequestStatistics]:
    finished: list[RequestStatistics] = []
    columns = TextColumn("Prefilling"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens")
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: PrefillProgress) -> None:
            done = progress.num_cached_tokens + progress.num_computed_tokens
            bar.update(task, completed=done, total=progress.num_prompt_tokens)

        ref = llm.prefill(
            [document_message(text, instructions)],
            pin=False,
            persist=True,
            on_progress=show,
            on_finish=finished.append,
        )
    return ref, finished[0]


def _result(ref: DocumentRef, statistics: RequestStatistics, folder: Path, seconds: float) -> str:
    if statistics.prefix_source is PrefixSource.DISK and not statistics.num_computed_tokens:
        return f"{ref['num_tokens']:,} tokens were in {folder} already."
    return (
        f"{ref['num_tokens']:,} tokens, {statistics.num_computed_tokens:,} of them computed, "
        f"are in {folder} after {seconds:.1f} s."
    )
