"""Submitting requests from coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["on_thread"]

_Started = TypeVar("_Started")


class _Cancellable(Protocol):
    def cancel(self) -> None: ...


async def on_thread(
    start: Callable[[], _Started], *, handle_of: Callable[[_Started], _Cancellable]
) -> _Started:
    """Submit on a thread. If the caller is cancelled meanwhile, so is the request.

    Dropping the handle would not do: asyncio's futures keep it in a reference cycle, and the
    request would run on until the next garbage collection.
    """
    handles: list[_Cancellable] = []
    is_abandoned = threading.Event()

    def work() -> _Started:
        started = start()
        handles.append(handle_of(started))
        if is_abandoned.is_set():
            handles[0].cancel()
        return started

    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        is_abandoned.set()
        for handle in handles:
            handle.cancel()
        raise
