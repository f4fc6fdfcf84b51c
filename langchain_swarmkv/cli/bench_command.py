"""`swarmkv bench fanout`: the benchmark of `benchmarks/fanout`."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console

from langchain_swarmkv.cli.console import (
    check_distinct,
    check_writable,
    companion,
    default_model,
    errors_in_one_line,
    status_on_stderr,
    write_text,
)
from langchain_swarmkv.errors import ConfigurationError

__all__ = ["bench_app"]

_COLUMNS = 100
"""Of the tables in a file or a pipe."""

bench_app = typer.Typer(no_args_is_help=True, help="Measure against peers and against the floor.")


@bench_app.command()
def fanout(
    workload: Annotated[
        str | None,
        typer.Option(
            help="W1 (the article's), W2 (16 branches), W3 (50), W4 (cold), W5 (four documents) or "
            "W6 (scaling); without it, one document of the sizes below."
        ),
    ] = None,
    document_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of each document.")
    ] = None,
    branches: Annotated[
        int | None, typer.Option(min=1, max=200, help="Branches of each document.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each answer, all of them written.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file; without it, SmolLM2-135M-Instruct.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each contender.")] = 3,
    slow_repeat: Annotated[
        int,
        typer.Option(min=1, help="Runs of one that takes over three times as long as the fastest."),
    ] = 1,
    contenders: Annotated[
        str | None, typer.Option(help="Names with commas between, or all that can run here.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=512, help="Threads; without it, one for each core.")
    ] = None,
    gpu_layers: Annotated[
        int, typer.Option(min=-1, help="Layers on the GPU, -1 for all; peers may stay on the CPU.")
    ] = 0,
    tune: Annotated[
        bool, typer.Option(help="Measure each contender's settings first and keep the fastest.")
    ] = True,
    server_script: Annotated[
        Path | None,
        typer.Option(help="llama-cpp-python's examples/server/server.py, for example-server."),
    ] = None,
    timeout_seconds: Annotated[
        float, typer.Option(min=1, max=1e6, help="Most that loading, or one run, may take.")
    ] = 3600,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write all figures here.")
    ] = None,
    plot_out: Annotated[
        Path | None,
        typer.Option("--plot", metavar="OUT", help="Draw the figures into this folder or file."),
    ] = None,
) -> None:
    """Many branches on one document: the same work by every contender, in turn."""
    with errors_in_one_line():
        _check_outputs(json_out, plot_out, [path for path in (model, server_script) if path])
        if server_script is not None and not server_script.is_file():
            raise ConfigurationError(f"there is no file {str(server_script)!r}.")
        bench = _module("bench")
        options = bench.Options(
            model=model or default_model(),
            workload=workload,
            sizes=_module("workloads").Sizes(document_tokens, branches, max_tokens),
            contenders=contenders or bench.Options.contenders,
            repeat=repeat,
            slow_repeat=slow_repeat,
            threads=threads,
            gpu_layers=gpu_layers,
            tunes=tune,
            server_script=server_script,
            timeout_seconds=timeout_seconds,
        )
        with status_on_stderr() as tell:
            result = bench.run_benchmark(
                options,
                command=_command(),
                console=_wide(),
                tell=tell,
                save=lambda so_far: _write_json(json_out, so_far),
            )
        if plot_out:
            for path in _module("plots").plot_results(result, plot_out):
                Console(stderr=True).print(f"drawn: {path}", markup=False, highlight=False)
        if not bench.is_good(result):
            raise typer.Exit(1)


def _write_json(json_out: Path | None, result: dict[str, Any]) -> None:
    if json_out:
        write_text(json_out, json.dumps(result, indent=2) + "\n")


def _module(name: str) -> ModuleType:
    return companion("benchmarks", f"fanout.{name}")


def _command() -> list[str]:
    """As it was given, but for folders: results are shown to others."""
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    return ["swarmkv", *words]


def _check_outputs(json_out: Path | None, plot_out: Path | None, inputs: list[Path]) -> None:
    if json_out:
        check_writable(json_out)
    if plot_out:
        if find_spec("matplotlib") is None:
            raise ConfigurationError(
                "--plot needs matplotlib: pip install 'langchain-swarmkv[bench]', in a checkout "
                "pip install '.[bench]'."
            )
        if not plot_out.is_dir():
            check_writable(plot_out)
    check_distinct(inputs, [path for path in (json_out, plot_out) if path])


def _wide() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _COLUMNS)
    return console
