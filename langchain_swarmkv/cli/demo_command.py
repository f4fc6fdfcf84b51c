"""`swarmkv demo`: the patent example of `examples/patent_analysis`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.cli.console import (
    DEFAULT_MODEL_NOTE,
    DocumentEncoding,
    check_distinct,
    check_writable,
    companion,
    errors_in_one_line,
    notice_on_stderr,
    write_text,
)
from langchain_swarmkv.cli.demo_model import demo_model
from langchain_swarmkv.documents import read_document
from langchain_swarmkv.errors import ConfigurationError, ContextBudgetError

__all__ = ["demo"]


def demo(
    document: Annotated[
        Path | None,
        typer.Option(help="A .txt, .md or .pdf file; without it, the disclosure of the example."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file; without it, SmolLM2-135M-Instruct.")
    ] = None,
    encoding: DocumentEncoding = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 128,
    n_ctx: Annotated[
        int, typer.Option(min=1, help="Tokens that document, tasks and answers share.")
    ] = 8192,
    allow_waves: Annotated[
        bool,
        typer.Option(
            "--allow-waves", help="Let analysts wait for each other where not all fit at once."
        ),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; without it, one for each core.")
    ] = None,
    snapshot_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for snapshots: the next run with it need not prefill."),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the measurements here.")
    ] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Write report and timeline here.")
    ] = None,
) -> None:
    """Let six analysts read one invention disclosure that is prefilled once."""
    with errors_in_one_line():
        outputs = [out for out in (json_out, html_out) if out]
        for out in outputs:
            check_writable(out)
        check_distinct([path for path in (document, model) if path], outputs)
        path = document or companion("examples", "patent_analysis").DISCLOSURE
        read = read_document(path, encoding=encoding, on_notice=notice_on_stderr)
        graph, notes = _example("graph"), list[str]()
        tasks = graph.TASKS
        if model is None:
            model, about_file = demo_model()
            tasks = graph.SMALL_MODEL_TASKS
            notes = [text for text in (DEFAULT_MODEL_NOTE, about_file) if text]
        llm = ChatSwarmKV(
            model_path=model,
            n_ctx=n_ctx,
            max_tokens=max_tokens,
            n_threads=threads,
            snapshot_dir=snapshot_dir,
        )
        display = _example("display").display_for(Console(stderr=True), tasks)
        with llm:
            run = _example("run").analyse(
                llm, read.page_content, display, tasks, allow_waves=allow_waves
            )
            try:
                analysis = asyncio.run(run)
            except ContextBudgetError as error:
                raise ConfigurationError(_in_options(str(error))) from error
        try:
            _example("summary").print_analysis(Console(), analysis, " ".join(notes))
        finally:  # stdout may be a pipe to `head`, which ends before the report does
            if json_out:
                found = {**analysis.to_dict(), "document_source": read.metadata}
                measured = json.dumps(found, indent=2, ensure_ascii=False)
                write_text(json_out, measured + "\n")
            if html_out:
                told = " ".join([*read.metadata["notices"], *notes[:1]])
                write_text(html_out, _example("page").render_page(analysis, told))


def _in_options(message: str) -> str:
    """What a budget says would fit, spelled as this command's options."""
    for name, option in (
        ("allow_waves=True", "--allow-waves"),
        ("n_ctx=", "--n-ctx "),
        ("max_tokens=", "--max-tokens "),
    ):
        message = message.replace(f"with {name}", f"with {option}")
        message = message.replace(f"or {name}", f"or {option}")
    return message


def _example(module: str) -> ModuleType:
    return companion("examples", f"patent_analysis.{module}")
