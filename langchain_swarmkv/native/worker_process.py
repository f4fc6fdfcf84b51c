"""Calls into llama.cpp that may end their process, in a process that may end.

A damaged file can run into an assert, a call cannot be interrupted, and what it allocates is given
back late: none of that reaches the caller of `run_worker`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    with ThreadPoolExecutor(1) as starter:
        # NOTE: on a thread of its own, for an interrupt within Popen would leave a child that
        # nobody knows, and that goes on writing.
        starting = starter.submit(_start, arguments)
        try:
            process = starting.result()
            _read(process, said, on_tensor)
            process.wait()
        except BaseException:
            starting.result().kill()
            raise
        finally:
            with starting.result():  # closes its pipe, and waits
                pass
    if process.returncode == 0:
        return None
    told = "; ".join(line for line in said[-_MAX_REASON_LINES:] if line)
    return told or f"no reason given, exit code {process.returncode}"


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
