"""One thread that runs what it is given, in order.

No ThreadPoolExecutor: those end before atexit handlers run, and an engine that nobody closed saves
what it holds in one of these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from langchain_swarmkv.errors import EngineClosedError

__all__ = ["Worker"]

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class Worker:
    """A daemon thread; close it."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = self._is_cancelled = False
        # Started at once: an interpreter that ends starts no thread any more.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have it called after all that was submitted before.

        Raises:
            EngineClosedError: the worker is closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("The engine is closed.")
            self._jobs.put((future, function))
        return future

    def close(self, *, cancel: bool = False) -> None:
        """Wait for what was submitted or, with `cancel`, for what runs now."""
        with self._lock:
            self._is_cancelled = cancel
            if not self._is_closed:
                self._jobs.put(None)
            self._is_closed = True
        self._thread.join()

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if self._is_cancelled:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
