"""`swarmkv prefill`: compute a document ahead of time, so that the first question finds it warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.messages import BaseMessage
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.cli.console import (
    DocumentEncoding,
    errors_in_one_line,
    notice_on_stderr,
)
from langchain_swarmkv.cli.demo_model import demo_model
from langchain_swarmkv.cli.snapshots_command import KeyFile, read_key
from langchain_swarmkv.config import EngineConfig, SnapshotPolicy
from langchain_swarmkv.documents import read_document
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.document import DEFAULT_INSTRUCTIONS, DocumentRef, document_message
from langchain_swarmkv.scheduling.request import PrefillProgress
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore
from langchain_swarmkv.statistics import PrefixSource, RequestStatistics

__all__ = ["prefill"]


def prefill(
    document: Annotated[Path, typer.Argument(help="A .txt, .md or .pdf file.")],
    snapshot_dir: Annotated[Path, typer.Option(help="The folder for snapshots.")],
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file; without it, SmolLM2-135M-Instruct.")
    ] = None,
    encoding: DocumentEncoding = None,
    n_ctx: Annotated[int, typer.Option(min=1, help="Tokens that fit into the pool.")] = 8192,
    instructions: Annotated[
        str, typer.Option(help="What analysts are told before the document; as in DocumentNode.")
    ] = DEFAULT_INSTRUCTIONS,
    cache_salt: Annotated[
        str, typer.Option(envvar="SWARMKV_CACHE_SALT", help="Only for callers with this salt.")
    ] = "",
    key_file: KeyFile = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; without it, one for each core.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any field of EngineConfig that your program sets: kv_type_k=q8_0; lists as JSON.",
        ),
    ] = None,
) -> None:
    """Prefill a document and leave its KV in a folder, for runs to come."""
    with errors_in_one_line():
        read = read_document(document, encoding=encoding, on_notice=notice_on_stderr)
        chosen = {"model_path": model or demo_model().path, "n_ctx": n_ctx, "n_threads": threads}
        config = EngineConfig(**{**chosen, **dict(map(_setting, settings or []))})
        store = DiskSnapshotStore(snapshot_dir, key=read_key(key_file))
        ref, statistics = _prefill(config, store, cache_salt, document_message(read, instructions))
        Console().print(_result(ref, statistics, config, snapshot_dir), highlight=False)


def _too_long(num_tokens: int, engine: SwarmEngine) -> str | None:
    trained_tokens, cells = engine.facts.n_ctx_train, engine.limits.num_cells
    document = f"The document has {num_tokens:,} tokens, its instructions included, but "
    if num_tokens > trained_tokens:
        return (
            f"{document}the model was trained for {trained_tokens:,}, which --n-ctx cannot raise. "
            "Shorten it, or take a model with a longer context."
        )
    if num_tokens > cells:
        return f"{document}--n-ctx is {cells:,}. Raise it, or shorten the document."
    return None


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--set {text}: write NAME=VALUE.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a word


def _prefill(
    config: EngineConfig, store: DiskSnapshotStore, cache_salt: str, message: BaseMessage
) -> tuple[DocumentRef, RequestStatistics]:
    finished: list[RequestStatistics] = []
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    console = Console(stderr=True)
    is_silent = not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=is_silent
    ) as bar:
        task = bar.add_task("Loading the model", total=None)

        def show(progress: PrefillProgress) -> None:
            done = progress.num_cached_tokens + progress.num_computed_tokens
            bar.update(task, completed=done)

        # Only what is asked for goes to the folder: this document.
        policy = SnapshotPolicy.NEVER
        with SwarmEngine(config, snapshot_store=store, snapshot_policy=policy) as engine:
            llm = ChatSwarmKV(engine=engine, cache_salt=cache_salt)
            num_tokens = len(llm.prefix_token_ids([message]))
            refusal = _too_long(num_tokens, engine)
            if refusal is None:
                bar.update(task, description=f"Prefilling {num_tokens:,} tokens", total=num_tokens)
                ref = llm.prefill(
                    [message], pin=False, persist=True, on_progress=show, on_finish=finished.append
                )
    if refusal is not None:  # not before the bar is gone
        raise ConfigurationError(refusal)
    return ref, finished[0]


def _result(
    ref: DocumentRef, statistics: RequestStatistics, config: EngineConfig, folder: Path
) -> str:
    name = config.model_path  # the whole path: with another file nothing of it is found
    seconds = (statistics.finished_at or 0.0) - statistics.submitted_at
    if statistics.prefix_source is PrefixSource.DISK and not statistics.num_computed_tokens:
        return f"{ref['num_tokens']:,} tokens were in {folder} already, for {name}."
    return (
        f"{ref['num_tokens']:,} tokens, {statistics.num_computed_tokens:,} of them computed, "
        f"are in {folder} after {seconds:.1f} s, for {name}."
    )
