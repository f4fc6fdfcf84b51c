"""Calls into llama.cpp that may end their process, in a process that may end.

A damaged file can run into an assert, a call cannot be interrupted, and what it allocates is given
back late: none of that reaches the caller of `run_worker`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["run_worker"]

_WORKER = Path(__file__).with_name("worker.py")
_MAX_REASON_LINES = 3
_SOURCE_FOLDER = re.compile(r"\S*[/\\](?=[\w.-]+:\d+: )")


def run_worker(
    *arguments: str | Path, on_tensor: Callable[[int, int], None] | None = None
) -> str | None:
    """Run a task of `worker`, and kill it if this is interrupted.

    Args:
        arguments: The task, and what it wants.
        on_tensor: Called with the tensors begun and the tensors there are, in a conversion.

    Returns:
        Why it failed, in llama.cpp's words; None: it was done.
    """
    said: list[str] = []
    process: subprocess.Popen[str] | None = None
    try:
        with _interrupts_later():
            process = _start(arguments)
        _read(process, said, on_tensor)
        process.wait()
    finally:
        if process is not None:
            process.kill()  # harmless where it has ended
            with process:  # closes its pipe, and waits
                pass
    if process.returncode == 0:
        return None
    told = "; ".join(line for line in said[-_MAX_REASON_LINES:] if line)
    return told or f"no reason given, exit code {process.returncode}"


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Raise at the end what would interrupt: within Popen it would leave a child nobody knows."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [getattr(signal, name) for name in names]
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: noted.append(number))
        for number in numbers
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in noted:
        signal.raise_signal(number)


def _start(arguments: tuple[str | Path, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, _WORKER, *arguments],
        # llama.cpp would start a debugger to print a backtrace before it aborts.
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )


def _read(
    process: subprocess.Popen[str],
    said: list[str],
    on_tensor: Callable[[int, int], None] | None,
) -> None:
    """Tell the tensors as they come, and collect in `said` what else it prints."""
    assert process.stdout is not None
    for line in process.stdout:
        word, *numbers = line.split() or [""]
        if word != "tensor":
            said.append(_SOURCE_FOLDER.sub("", line.strip()))
        elif on_tensor is not None:
            on_tensor(int(numbers[0]), int(numbers[1]))
