"""The command line, one module a command: `swarmkv demo`, `prefill`, `snapshots`, ...

Exit codes: 0 done, 1 the run failed, 2 something given is wrong and nothing was loaded,
130 interrupted.
"""

from __future__ import annotations

import sys
from importlib import metadata
from io import TextIOWrapper
from typing import Annotated

import typer
from rich.console import Console

from langchain_swarmkv.cli.bench_command import bench_app
from langchain_swarmkv.cli.demo_command import demo
from langchain_swarmkv.cli.doctor_command import doctor
from langchain_swarmkv.cli.optimize_command import optimize
from langchain_swarmkv.cli.prefill_command import prefill
from langchain_swarmkv.cli.snapshots_command import snapshots_app

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.command()(demo)
app.add_typer(bench_app, name="bench")
app.command()(doctor)
app.command()(optimize)
app.command()(prefill)
app.add_typer(snapshots_app, name="snapshots")


def main() -> None:
    """Entry point of the `swarmkv` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that cannot show a character of an answer shows a question mark.
            stream.reconfigure(errors="replace")
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"swarmkv {metadata.version('langchain-swarmkv')}", highlight=False)
        raise typer.Exit


@app.callback()
def _swarmkv(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Many agents on one document from a single prefill."""
