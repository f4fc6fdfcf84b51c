"""How one waiting thread or task is woken: set from anywhere, waited for in one place.

And which threads must not wait: those of engines, which make what others wait for, and those of
event loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from langchain_swarmkv.errors import InvalidRequestError

__all__ = [
    "LoopSignal",
    "Signal",
    "ThreadSignal",
    "check_may_wait",
    "inside_callback",
    "is_engine_thread",
    "is_loop_thread",
    "set_engine_thread",
]

_local = threading.local()


def set_engine_thread() -> None:
    """Say that the current thread is an engine's from now on."""
    _local.is_engine = True


def is_engine_thread() -> bool:
    """Whether the caller runs on an engine's thread, be it this engine or another: a callback."""
    return getattr(_local, "is_engine", False)


class _Callback:
    """A call of a progress callback; over once it returns, whoever still holds its context."""

    is_running = True


_callback: ContextVar[_Callback | None] = ContextVar("swarmkv_callback", default=None)


@contextmanager
def inside_callback() -> Iterator[None]:
    """Mark what runs inside as a callback, also on threads that are given its context."""
    call = _Callback()
    before = _callback.set(call)
    try:
        yield
    finally:
        call.is_running = False
        _callback.reset(before)


def _waits_for_callback() -> bool:
    """Whether a running callback waits for this thread: LangChain's pools copy the context.

    An event loop's thread is none of them; what a callback hands to it goes on by itself.
    """
    call = _callback.get()
    return call is not None and call.is_running and not is_loop_thread()


def check_may_wait(what: str) -> None:
    """Refuse to wait on an engine's thread, or on one that a callback there waits for.

    Nor for another engine: the step that told the callback holds the device, which the other may
    need before it can go on.

    Raises:
        InvalidRequestError: naming what would wait.
    """
    if is_engine_thread() or _waits_for_callback():
        raise InvalidRequestError(
            f"{what} was called by a progress callback, on an engine's own thread, and would wait "
            "for that thread itself. Have another thread wait; the callback may submit and cancel."
        )


def is_loop_thread() -> bool:
    """Whether the caller runs on an event loop, which must not stand still."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Signal(Protocol):
    """Wakes the one thread or task that waits for a claim."""

    def set(self) -> None:
        """Wake it, from any thread; kept until it waits."""


class ThreadSignal:
    """A signal that a thread waits for."""

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """See `Signal`."""
        try:
            self._unset.release()
        except RuntimeError:
            pass  # NOTE: it was set already.

    def wait(self, timeout_seconds: float) -> None:
        """Return when it was set, or after the timeout; either way it is unset again."""
        self._unset.acquire(timeout=timeout_seconds)


class LoopSignal:
    """A signal that a task waits for; only `set` may be called off its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """See `Signal`."""
        try:
            self._loop.call_soon_threadsafe(self._fire)
        except RuntimeError:
            pass  # NOTE: the loop was closed; those who wait after it see that its owner is dead.

    async def wait(self, timeout_seconds: float) -> None:
        """Return when it was set, or after the timeout; either way it is unset again."""
        if not self._is_set:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_seconds, self._fire)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        self._is_set = False

    def _fire(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
