"""Work beside an event loop, on threads of our own.

Not on the loop's: whoever waits for a model there keeps everybody else's `to_thread` waiting.
Short work shares a few threads. What may wait for long (a load, a prefill, a disk) has a thread of
its own; and of equal loads one thread makes one, for which any number of tasks wait without any.
All see the caller's context variables. The interpreter waits for them before it ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from langchain_swarmkv.scheduling.channel import Channel

__all__ = ["MAX_SHORT_THREADS", "on_own_thread", "on_thread", "once_for_all", "start_on_thread"]

MAX_SHORT_THREADS = 32

_Result = TypeVar("_Result")


class _Cancellable(Protocol):
    def cancel(self) -> None: ...


class _Threads:
    """What a forked child must not take over: threads, and what waits for them."""

    def __init__(self) -> None:
        self.short = ThreadPoolExecutor(MAX_SHORT_THREADS, thread_name_prefix="swarmkv-call")
        self.lock = threading.Lock()
        self.shared: dict[Callable[[], object], Channel[None]] = {}


_threads = _Threads()


def _forget_parent() -> None:
    global _threads
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


async def on_thread(work: Callable[[], _Result]) -> _Result:
    """What short work returns or raises. If the caller is cancelled first, it may not begin."""
    return await asyncio.wrap_future(_submit(work))


async def on_own_thread(work: Callable[[], _Result]) -> _Result:
    """What long work returns or raises. It goes on when the caller is cancelled."""
    outcome: Future[_Result] = Future()
    _start(lambda: _settle(outcome, work))
    return await asyncio.wrap_future(outcome)


async def once_for_all(work: Callable[[], object]) -> None:
    """Have long work done, once for all who ask for it before it has ended; raises its error.

    It goes on when callers are cancelled.

    Args:
        work: equal, as methods of one object are, for all who want the same.
    """
    threads = _threads
    with threads.lock:
        channel = threads.shared.get(work)
        is_new = channel is None
        if channel is None:
            channel = threads.shared[work] = Channel()

    def run() -> None:
        error = None
        try:
            work()
        except BaseException as raised:
            error = raised
        end(error)

    def end(error: BaseException | None) -> None:
        with threads.lock:
            del threads.shared[work]
        channel.end(error)

    if is_new:
        try:
            _start(run)
        except BaseException as error:
            end(error)
    await channel.wait_async()


async def start_on_thread(
    start: Callable[[], _Result], *, handle_of: Callable[[_Result], _Cancellable]
) -> _Result:
    """Submit on a thread. If the caller is cancelled meanwhile, so is the request.

    Dropping the handle would not do: asyncio's futures keep it in a reference cycle, and the
    request would run on until the next garbage collection.
    """
    handles: list[_Cancellable] = []
    is_abandoned = threading.Event()

    def work() -> _Result:
        started = start()
        handles.append(handle_of(started))
        if is_abandoned.is_set():
            handles[0].cancel()
        return started

    try:
        return await on_thread(work)
    except asyncio.CancelledError:
        is_abandoned.set()
        for handle in handles:
            handle.cancel()
        raise


def _submit(work: Callable[[], _Result]) -> Future[_Result]:
    context: Any = contextvars.copy_context()
    submitted: Future[_Result] = _threads.short.submit(context.run, work)
    return submitted


def _start(run: Callable[[], None]) -> None:
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="swarmkv-beside-loop").start()


def _settle(outcome: Future[_Result], work: Callable[[], _Result]) -> None:
    outcome.set_running_or_notify_cancel()
    try:
        result = work()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
