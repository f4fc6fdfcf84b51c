"""Threads beside event loops: who waits, who does not, and what is left of them."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from textwrap import dedent
from typing import Any

import pytest

from langchain_swarmkv.chat_models.threads import (
    MAX_SHORT_THREADS,
    on_own_thread,
    on_thread,
    once_for_all,
    start_on_thread,
)
from tests.unit_tests.chat_support import PATIENCE_SECONDS, eventually_async

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="nobody's")
Way = Callable[[Callable[[], Any]], Awaitable[Any]]
WAYS: list[Way] = [on_thread, on_own_thread]


@pytest.mark.parametrize("way", WAYS)
async def test_work_gives_its_result_or_its_error(way: Way) -> None:
    """On another thread, in the caller's context."""
    VARIABLE.set("the caller's")
    seen = await way(lambda: (threading.current_thread(), VARIABLE.get()))
    assert seen[0] is not threading.current_thread()
    assert seen[1] == "the caller's"

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await way(fail)


async def test_long_work_does_not_hold_up_short_work_or_the_loops_own() -> None:
    """However much of it waits; and short work, not the loop's `to_thread`."""
    gate = threading.Event()
    waiting = [
        asyncio.create_task(on_own_thread(lambda: gate.wait(PATIENCE_SECONDS))) for _ in range(50)
    ]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(on_thread(lambda: 1), PATIENCE_SECONDS) == 1
    short = [
        asyncio.create_task(on_thread(lambda: gate.wait(PATIENCE_SECONDS)))
        for _ in range(MAX_SHORT_THREADS + 5)
    ]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 2), PATIENCE_SECONDS) == 2
    gate.set()
    assert all(await asyncio.gather(*waiting, *short))


async def test_work_that_is_cancelled_before_it_begins_never_does() -> None:
    gate = threading.Event()
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        gate.wait(PATIENCE_SECONDS)

    tasks = [
        asyncio.create_task(on_thread(lambda number=number: work(number)))  # type: ignore[misc]
        for number in range(MAX_SHORT_THREADS + 2)
    ]
    await eventually_async(lambda: len(begun) == MAX_SHORT_THREADS)
    for task in tasks[-2:]:
        task.cancel()
    await asyncio.gather(*tasks[-2:], return_exceptions=True)
    gate.set()
    await asyncio.gather(*tasks[:-2])
    assert sorted(begun) == list(range(MAX_SHORT_THREADS))


class Handle:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize("has_started", [False, True])
async def test_what_was_submitted_for_a_cancelled_task_is_cancelled(has_started: bool) -> None:
    """Whether the request was there already when the task was cancelled, or came after."""
    handle, entered, gate = Handle(), threading.Event(), threading.Event()

    def start() -> Handle:
        entered.set()
        gate.wait(PATIENCE_SECONDS)
        return handle

    task = asyncio.create_task(start_on_thread(start, handle_of=lambda made: made))
    await eventually_async(entered.is_set)
    if has_started:
        gate.set()
        assert await task is handle
        assert not handle.is_cancelled
        return
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await eventually_async(lambda: handle.is_cancelled)


class Loads:
    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: list[threading.Thread] = []
        self.error: Exception | None = None

    def load(self) -> str:
        self.threads.append(threading.current_thread())
        self.gate.wait(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        return "loaded"


async def test_equal_work_is_done_once_for_all_who_wait() -> None:
    """By one thread, while no other waits; who gives up stops nothing; later it is done again."""
    loads = Loads()
    before = threading.active_count()
    tasks = [asyncio.create_task(once_for_all(loads.load)) for _ in range(200)]
    await eventually_async(lambda: len(loads.threads) == 1)
    assert threading.active_count() <= before + 1
    tasks.pop(0).cancel()  # the one that began it
    await asyncio.sleep(0)
    loads.gate.set()
    await asyncio.gather(*tasks)
    await once_for_all(loads.load)
    assert len(loads.threads) == 2
    await eventually_async(lambda: not any(thread.is_alive() for thread in loads.threads))


async def test_all_who_wait_get_the_error_and_the_next_tries_again() -> None:
    loads = Loads()
    loads.error = ZeroDivisionError("no model")
    tasks = [asyncio.create_task(once_for_all(loads.load)) for _ in range(3)]
    await eventually_async(lambda: len(loads.threads) == 1)
    loads.gate.set()
    for task in tasks:
        with pytest.raises(ZeroDivisionError, match="no model"):
            await task
    loads.error = None
    await once_for_all(loads.load)


async def test_other_work_is_not_taken_for_equal() -> None:
    """Methods of two objects are two."""
    one, other = Loads(), Loads()
    tasks = [asyncio.create_task(once_for_all(loads.load)) for loads in (one, other)]
    await eventually_async(lambda: len(one.threads) == len(other.threads) == 1)
    one.gate.set()
    other.gate.set()
    await asyncio.gather(*tasks)


def run(source: str) -> str:
    """What a process prints, warnings and errors included; it must end by itself."""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", dedent(source)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS * 2,
        check=False,
    )
    return f"{ended.returncode} {ended.stdout}{ended.stderr}"


def test_a_process_ends_with_its_threads() -> None:
    """Idle ones, and those that still work when the loop was left and closed."""
    source = """
        import asyncio, threading, time
        from langchain_swarmkv.chat_models.threads import on_own_thread, on_thread, once_for_all

        gate = threading.Event()

        async def main():
            await on_thread(lambda: None)
            for way in (on_thread, on_own_thread, once_for_all):
                asyncio.ensure_future(way(gate.wait))
            await asyncio.sleep(0.01)

        asyncio.run(main())
        gate.set()
        print("end")
    """
    assert run(source) == "0 end\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    """What the parent had running is not waited for."""
    source = """
        import asyncio, os, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        from langchain_swarmkv.chat_models.threads import on_thread, once_for_all

        gate = threading.Event()

        def load():
            assert gate.wait(60)

        async def ask():
            await once_for_all(load)
            return await on_thread(lambda: "answered")

        parent = threading.Thread(target=lambda: asyncio.run(ask()))
        parent.start()
        while not any(t.name == "swarmkv-beside-loop" for t in threading.enumerate()):
            pass
        if os.fork() == 0:
            gate.set()
            print(asyncio.run(ask()), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
        gate.set()
        parent.join()
    """
    assert run(source) == "0 answered\n"
