"""`swarmkv optimize`: repack a model to a weight type with fast CPU kernels."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from langchain_swarmkv.cli.console import (
    check_distinct,
    check_writable,
    default_model,
    errors_in_one_line,
)
from langchain_swarmkv.engine.cores import available_cores
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.native.file_facts import FileFacts, read_file_facts
from langchain_swarmkv.native.quantize import estimated_bytes, quantize
from langchain_swarmkv.native.weight_types import (
    WeightType,
    find_weight_type,
    has_fast_kernels,
    is_quantised,
)

__all__ = ["optimize"]

_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}


def optimize(
    model: Annotated[
        Path | None,
        typer.Argument(help="A GGUF file, best of F16 or BF16; without it, SmolLM2-135M-Instruct."),
    ] = None,
    weight_type: Annotated[
        str, typer.Option("--type", help="f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m or q4_0.")
    ] = "q8_0",
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; without it, MODEL's name and the type, beside it."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, max=512, help="Threads; without it, one for each core.")
    ] = None,
) -> None:
    """Repack a model to a weight type that is fast on CPUs. Writes a new file."""
    with errors_in_one_line():
        wanted = find_weight_type(weight_type)
        source_path = _absolute(model or default_model())
        target = _absolute(out or _default_target(source_path, wanted))
        _check_target(source_path, target, force=force)
        source = read_file_facts(source_path)
        if source.file_type == wanted.file_type:
            raise ConfigurationError(
                f"{str(source_path)!r} is {source.file_type_name} already; nothing was written."
            )
        console = Console()
        for line in _plan(source, target, wanted):
            _print(console, line)
        started = time.perf_counter()
        written = _convert(source, target, wanted, threads or available_cores())
        for line in _result(written, time.perf_counter() - started):
            _print(console, line)


def _absolute(path: Path) -> Path:
    # NOTE: Path.expanduser raises where there is no such user.
    return Path(os.path.expanduser(path)).absolute()


def _default_target(source: Path, wanted: WeightType) -> Path:
    # The default model lies in the folder of a Python package, where nobody looks for files.
    folder = Path.cwd() if _PACKAGE_FOLDERS & set(source.parts) else source.parent
    return folder / f"{source.stem}.{wanted.label}.gguf"


def _check_target(source: Path, target: Path, *, force: bool) -> None:
    check_writable(target)
    check_distinct([source], [target])
    if target.exists() and not force:
        raise ConfigurationError(
            f"{str(target)!r} exists; give --force to replace it, or --out for another file."
        )


def _plan(source: FileFacts, target: Path, wanted: WeightType) -> list[str]:
    lines = [
        f"From {source.path}: {source.file_type_name}, {_megabytes(source.file_bytes)}, "
        f"{source.num_parameters / 1e6:,.0f} million parameters.",
        f"To   {target}: {wanted.label}, about {_megabytes(estimated_bytes(source, wanted))} "
        f"({wanted.note}).",
    ]
    if is_quantised(source.file_type):
        lines.append(_quantised_note(source, wanted))
    if not has_fast_kernels(wanted.file_type):
        lines.append(f"Note: {wanted.label} has no fast prefill kernels on x86 CPUs; q8_0 has.")
    return lines


def _quantised_note(source: FileFacts, wanted: WeightType) -> str:
    effect = "loses some more quality" if is_quantised(wanted.file_type) else "brings none back"
    return (
        f"Note: {source.file_type_name} is quantised already. What it lost stays lost, and "
        f"repacking it {effect}. Start from the model's F16 or BF16 file if you can get it."
    )


def _convert(source: FileFacts, target: Path, wanted: WeightType, n_threads: int) -> FileFacts:
    console = Console(stderr=True)
    if not console.is_terminal:
        _print(console, "converting")
        return quantize(source, target, wanted, n_threads=n_threads)
    columns = (SpinnerColumn(), TextColumn("Converting"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("tensors"), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(begun: int, total: int) -> None:
            progress.update(task, completed=begun - 1, total=total)

        return quantize(source, target, wanted, n_threads=n_threads, on_progress=show)


def _result(written: FileFacts, seconds: float) -> list[str]:
    return [
        f"Written in {seconds:.1f} s: {written.file_type_name}, "
        f"{_megabytes(written.file_bytes)}. It loads.",
        f"Next: use it with --model '{written.path}', or in "
        f"ChatSwarmKV(model_path={str(written.path)!r}); "
        f"swarmkv doctor '{written.path}' measures it.",
    ]


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
