"""A worker as the benchmark holds it: started, asked, given up on, ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

__all__ = ["WorkerError", "WorkerProcess", "WorkerTimeoutError"]

_CLOSE_SECONDS = 60.0


class WorkerError(Exception):
    """The worker failed, or it died; the message says how."""


class WorkerTimeoutError(WorkerError):
    """The worker took too long and was killed."""


class WorkerProcess:
    """A process that answers requests. A context manager; leaving it kills what still runs.

    It has a session of its own: Ctrl-C comes to the benchmark alone, which then ends the worker
    and the processes that it started.
    """

    def __init__(self) -> None:
        root, module = _worker_module()
        # Whatever can be imported here can be imported there.
        paths = [str(root), *filter(None, sys.path)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self._replies: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def ask(self, command: str, timeout_seconds: float, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            WorkerTimeoutError: there is none in time.
            WorkerError: the reply is an error, or the process has ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reader sees the end
            print(
                json.dumps({"command": command, **arguments}),
                file=self._process.stdin,
                flush=True,
            )
        try:
            line = self._replies.get(timeout=timeout_seconds)
        except queue.Empty:
            self.kill()
            raise WorkerTimeoutError(f"no answer within {timeout_seconds:g} s") from None
        if not line:
            raise WorkerError(self._epitaph())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def _epitaph(self) -> str:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", errors="replace").strip().splitlines()
        return f"the process ended with {how}" + (f": {said[-1].strip()}" if said else "")

    def close(self) -> None:
        """Let the contender close itself; kill what does not end. Harmless twice."""
        if self._process.poll() is None:
            with contextlib.suppress(WorkerError):
                self.ask("close", _CLOSE_SECONDS)
                self._process.wait(_CLOSE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the process and those it started; harmless twice."""
        if self._errors.closed:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()


def _worker_module() -> tuple[Path, str]:
    """Where to import the worker from, and its name there.

    A fresh process cannot use `__package__`: in a checkout the command line imports this package
    under a name that exists in its own process only.
    """
    folder = Path(__file__).parent
    names = ["worker"]
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)
