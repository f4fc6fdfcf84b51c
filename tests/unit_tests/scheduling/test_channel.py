"""The channel: every reader, on any thread or event loop, gets every item and then the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from langchain_swarmkv.errors import EngineClosedError
from langchain_swarmkv.scheduling.channel import Channel
from tests.unit_tests.scheduling.support import WAIT_SECONDS


async def read_async(channel: Channel[int]) -> list[int]:
    items: list[int] = []
    try:
        while True:
            items.append(await channel.item(len(items)))
    except StopAsyncIteration:
        return items


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run in a thread of its own; the result comes with a limit, so that a fault cannot hang."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_late_readers_get_everything() -> None:
    """Each reader begins with the first item, also after the end, also the second time."""
    channel: Channel[int] = Channel()
    for item in range(3):
        channel.put(item)
    channel.end()
    assert list(channel.read()) == list(channel.read()) == [0, 1, 2]
    assert asyncio.run(read_async(channel)) == [0, 1, 2]
    assert channel.wait()


def test_a_reader_sees_items_before_the_end() -> None:
    """Items are read while the stream is open, one at a time or several at once."""
    channel: Channel[int] = Channel()
    reader = channel.read()
    channel.put(0)
    assert next(reader) == 0
    channel.put(1)
    channel.put(2)
    channel.end()
    assert list(reader) == [1, 2]


def test_the_error_comes_after_the_items() -> None:
    """Sync and async readers get what there was, then the error; `wait` raises it as well."""
    channel: Channel[int] = Channel()
    channel.put(7)
    channel.end(EngineClosedError("closed"))
    reader = channel.read()
    assert next(reader) == 7
    with pytest.raises(EngineClosedError, match="closed"):
        next(reader)
    with pytest.raises(EngineClosedError, match="closed"):
        channel.wait()

    async def read() -> None:
        assert await channel.item(0) == 7
        with pytest.raises(EngineClosedError, match="closed"):
            await channel.item(1)
        with pytest.raises(EngineClosedError, match="closed"):
            await channel.wait_async()

    asyncio.run(read())


def test_only_the_first_end_counts() -> None:
    """A second end changes neither outcome."""
    channel: Channel[int] = Channel()
    channel.end()
    channel.end(EngineClosedError("too late"))
    assert list(channel.read()) == []
    assert channel.ended


def test_wait_has_a_limit() -> None:
    """False when the end does not come in time, though items do."""
    channel: Channel[int] = Channel()
    channel.put(1)
    assert not channel.wait(0.01)
    channel.end()
    assert channel.wait(0)


def test_many_threads_and_loops_read_the_same() -> None:
    """Eight threads, four loops with three tasks each, one producer: nobody misses an item."""
    channel: Channel[int] = Channel()
    started = threading.Barrier(13)

    def read_in_loop() -> list[list[int]]:
        async def read_all() -> list[list[int]]:
            started.wait(WAIT_SECONDS)
            return await asyncio.gather(*(read_async(channel) for _ in range(3)))

        return asyncio.run(read_all())

    def read_in_thread() -> list[list[int]]:
        started.wait(WAIT_SECONDS)
        return [list(channel.read())]

    readers = [in_thread(read_in_thread) for _ in range(8)]
    readers += [in_thread(read_in_loop) for _ in range(4)]
    started.wait(WAIT_SECONDS)
    for item in range(500):
        channel.put(item)
    channel.end()
    for reader in readers:
        for items in reader.result(WAIT_SECONDS):
            assert items == list(range(500))


def test_waiting_for_the_end_is_woken_by_the_end_alone() -> None:
    """`wait` and `wait_async` return at the end, in threads and loops alike."""
    channel: Channel[int] = Channel()
    waiting = [in_thread(channel.wait, WAIT_SECONDS) for _ in range(3)]
    waiting += [in_thread(asyncio.run, channel.wait_async()) for _ in range(3)]
    for item in range(50):
        channel.put(item)
    assert not any(one.done() for one in waiting)
    channel.end()
    assert [one.result(WAIT_SECONDS) for one in waiting] == [True] * 3 + [None] * 3


async def test_a_cancelled_reader_takes_nothing_from_the_others() -> None:
    """One of two waiting tasks is cancelled; the other gets the item, and so does a later try."""
    channel: Channel[int] = Channel()
    cancelled, other = (asyncio.create_task(channel.item(0)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    channel.put(5)
    assert await asyncio.wait_for(other, WAIT_SECONDS) == 5
    assert await channel.item(0) == 5
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(channel.item(1), 0.001)
    channel.put(6)
    assert await channel.item(1) == 6


async def test_cancelled_waits_leave_nothing_behind() -> None:
    """Asking again and again with a timeout does not pile up waiters."""
    channel: Channel[int] = Channel()
    for _ in range(5):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.item(0), 0.001)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.wait_async(), 0.001)
    assert channel._item_waiters == channel._end_waiters == set()


@pytest.mark.parametrize("ends", [False, True])
def test_a_waiter_cancelled_while_others_are_woken_costs_no_wake_up(ends: bool) -> None:
    """A cancel on one loop, in the middle of a wake-up of many loops, leaves nobody asleep."""
    channel: Channel[int] = Channel()

    async def wait_for_it() -> None:
        await (channel.wait_async() if ends else channel.item(0))

    def start() -> tuple[asyncio.AbstractEventLoop, asyncio.Task[None], threading.Thread]:
        loop = asyncio.new_event_loop()
        task = loop.create_task(wait_for_it())
        loop.run_until_complete(asyncio.sleep(0))  # it waits now
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        return loop, task, thread

    loops, tasks, threads = zip(*(start() for _ in range(4)), strict=True)
    wakes = []

    def cancel_then_wake(loop: asyncio.AbstractEventLoop, wake: Callable[..., Any]) -> Any:
        def replacement(callback: Callable[..., Any], *args: Any) -> Any:
            if not wakes:
                wakes.append(loop)
                at_end = threading.Event()
                task = tasks[loops.index(loop)]
                task.add_done_callback(lambda _: at_end.set())
                wake(task.cancel)
                assert at_end.wait(WAIT_SECONDS)
            return wake(callback, *args)

        return replacement

    originals = [loop.call_soon_threadsafe for loop in loops]
    for loop, original in zip(loops, originals, strict=True):
        loop.call_soon_threadsafe = cancel_then_wake(loop, original)  # type: ignore[method-assign]
    if ends:
        channel.end()
    else:
        channel.put(1)

    async def outcome(task: asyncio.Task[None]) -> str:
        done, _ = await asyncio.wait([task], timeout=WAIT_SECONDS / 10)
        return "cancelled" if task.cancelled() else "woken" if done else "asleep"

    outcomes = [
        asyncio.run_coroutine_threadsafe(outcome(task), loop).result(WAIT_SECONDS)
        for loop, task in zip(loops, tasks, strict=True)
    ]
    for loop, original, thread in zip(loops, originals, threads, strict=True):
        original(loop.stop)
        thread.join(WAIT_SECONDS)
        loop.close()
    assert sorted(outcomes) == ["cancelled", "woken", "woken", "woken"]


def test_a_loop_that_is_closed_while_it_waits_is_passed_over() -> None:
    """The producer does not fail, and the other readers get the item."""
    channel: Channel[int] = Channel()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # a pending task is destroyed: meant here
    task = loop.create_task(channel.item(0))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(asyncio.run, channel.item(0))
        channel.put(3)
        assert other.result(WAIT_SECONDS) == 3
    channel.end()
    assert not task.done()
