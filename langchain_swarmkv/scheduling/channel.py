"""From the engine thread to whoever waits: any number of threads and event loops.

The producer appends; each reader keeps its own place, so that a stream may be read twice and a
result asked for after it. An async reader is woken once however many items came meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

from langchain_swarmkv.errors import ForkedProcessError
from langchain_swarmkv.scheduling.signals import check_may_wait

__all__ = ["Channel"]

Item = TypeVar("Item")
_WAIT = "Waiting for a request"
_Waiter: TypeAlias = "asyncio.Future[None]"


class Channel(Generic[Item]):
    """An append-only list that can be waited on; ended once, with or without an error.

    Whoever would wait on an engine's thread gets InvalidRequestError instead: there is nobody else
    who could end it.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition(threading.Lock())
        self._item_waiters: set[_Waiter] = set()
        self._end_waiters: set[_Waiter] = set()
        self._pid = os.getpid()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ended

    def put(self, item: Item) -> None:
        """Append an item and wake the readers."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
            waiters = _take_all(self._item_waiters)
        _wake(waiters)

    def end(self, error: BaseException | None = None) -> None:
        """End the stream; readers get `error` after the last item. Only the first call counts."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._error = error
            self._changed.notify_all()
            waiters = _take_all(self._item_waiters) + _take_all(self._end_waiters)
        _wake(waiters)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until the end; False if it did not come in time. Raises the stream's error."""
        self._check_process()
        with self._changed:
            if not self._ended:
                check_may_wait(_WAIT)
            ended = self._changed.wait_for(lambda: self._ended, timeout_seconds)
        self._raise_error()
        return ended

    async def wait_async(self) -> None:
        """Like `wait` without a limit, and without blocking the loop: woken once, at the end."""
        self._check_process()
        with self._changed:
            future = None if self._ended else self._register(self._end_waiters)
        if future is not None:
            await self._woken(future, self._end_waiters)
        self._raise_error()

    def read(self) -> Iterator[Item]:
        """Items from the first on, blocking for the next; raises the stream's error at its end."""
        place = 0
        while True:
            self._check_process()
            with self._changed:
                if not (self._ended or len(self._items) > place):
                    check_may_wait(_WAIT)
                self._changed.wait_for(lambda: self._ended or len(self._items) > place)  # noqa: B023
                items = self._items[place:]
            if not items:
                break
            place += len(items)
            yield from items
        self._raise_error()

    async def item(self, place: int) -> Item:
        """The item at `place`, when it has come; for a reader that must not block its loop.

        Raises:
            StopAsyncIteration: the stream ended before it; or the stream's error.
        """
        self._check_process()
        while True:
            with self._changed:
                if place < len(self._items):
                    return self._items[place]
                future = None if self._ended else self._register(self._item_waiters)
            if future is None:
                self._raise_error()
                raise StopAsyncIteration
            await self._woken(future, self._item_waiters)

    def _register(self, waiters: set[_Waiter]) -> _Waiter:
        check_may_wait(_WAIT)  # a callback may run a loop of its own
        future = asyncio.get_running_loop().create_future()
        waiters.add(future)
        return future

    async def _woken(self, future: _Waiter, waiters: set[_Waiter]) -> None:
        try:
            await future
        finally:
            with self._changed:
                waiters.discard(future)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_process(self) -> None:
        if os.getpid() != self._pid and not self._ended:
            raise ForkedProcessError("This request belongs to the parent process.")


def _take_all(waiters: set[_Waiter]) -> list[_Waiter]:
    taken = list(waiters)
    waiters.clear()
    return taken


def _wake(waiters: list[_Waiter]) -> None:
    for future in waiters:
        try:
            future.get_loop().call_soon_threadsafe(_resolve, future)
        except RuntimeError:
            pass  # NOTE: that loop was closed while it waited; nobody is there to wake.


def _resolve(future: _Waiter) -> None:
    if not future.done():
        future.set_result(None)
