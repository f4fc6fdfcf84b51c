"""`swarmkv doctor`: what this machine makes of a model, and the settings to choose."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from langchain_swarmkv.cli.console import (
    check_distinct,
    check_writable,
    default_model,
    errors_in_one_line,
    status_on_stderr,
    write_text,
)
from langchain_swarmkv.cli.doctor_report import print_diagnosis
from langchain_swarmkv.config import EngineConfig
from langchain_swarmkv.doctor.diagnosis import Diagnosis, diagnose
from langchain_swarmkv.native.model_file import check_model

__all__ = ["doctor"]

_PIPE_WIDTH = 200
"""Tables are as wide as what they hold; rich would break their cells at 80 columns."""


def doctor(
    model: Annotated[
        Path | None, typer.Argument(help="A GGUF file; without it, SmolLM2-135M-Instruct.")
    ] = None,
    n_ctx: Annotated[
        int, typer.Option(min=1, help="The context to count branches for, in tokens.")
    ] = 8192,
    task_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each branch's own prompt.")
    ] = 64,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of each answer.")] = 256,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; without it, one for each core.")
    ] = None,
    gpu_layers: Annotated[int, typer.Option(min=-1, help="Layers to offload; -1: all.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure the file as it is, no converted copies.")
    ] = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write it all here.")
    ] = None,
) -> None:
    """Measure a model on this machine and choose settings. Run it when nothing else computes."""
    with errors_in_one_line():
        path = model or default_model()
        if json_out:
            check_writable(json_out)
            check_distinct([path], [json_out])
        config = EngineConfig(
            model_path=path, n_ctx=n_ctx, n_threads=threads, n_gpu_layers=gpu_layers
        )
        check_model(config.model_path)
        with status_on_stderr() as on_phase:
            diagnosis = diagnose(
                config,
                task_tokens=task_tokens,
                max_tokens=max_tokens,
                compare_types=not quick,
                on_phase=on_phase,
            )
        try:
            print_diagnosis(_report_console(), diagnosis)
        finally:  # stdout may be a pipe to `head`, which ends before the report does
            if json_out:
                write_text(json_out, json.dumps(_as_data(diagnosis), indent=2, default=str) + "\n")


def _as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    return dataclasses.asdict(diagnosis)


def _report_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)
