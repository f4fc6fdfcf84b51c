"""The device lock inside one process: exclusion, order, limits, and owners that die."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from langchain_swarmkv.errors import (
    ConfigurationError,
    DeviceLockError,
    DeviceLockNotHeldError,
    DeviceLockTimeoutError,
)
from langchain_swarmkv.scheduling.device_claims import MAX_OWNERS, WINDOW
from langchain_swarmkv.scheduling.device_locks import DeviceLease, DeviceLockManager
from langchain_swarmkv.statistics import DeviceStatistics, OwnerLockStatistics, PercentileSeconds

GENEROUS_SECONDS = 60.0


class FakeClock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class OneAtATime:
    """Fails, then or at `check`, if two are inside at once."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.num_entries = 0
        self.most_inside = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        entries = self.num_entries
        time.sleep(0)  # A chance for others to come in.
        self.num_entries = entries + 1
        self.num_inside -= 1
        yield

    @asynccontextmanager
    async def inside_async(self) -> AsyncIterator[None]:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        entries = self.num_entries
        try:
            await asyncio.sleep(0)
            self.num_entries = entries + 1
        finally:
            self.num_inside -= 1
        yield

    def check(self, num_entries: int) -> None:
        assert self.most_inside == 1
        assert self.num_entries == num_entries


@pytest.fixture(params=[True, False], ids=["with files", "process only"])
def locks(request: pytest.FixtureRequest, tmp_path: Path) -> DeviceLockManager:
    return DeviceLockManager(
        lock_dir=tmp_path / "locks", across_processes=request.param, cores=range(4)
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def timed(clock: FakeClock) -> DeviceLockManager:
    return DeviceLockManager(across_processes=False, cores=range(4), clock=clock)


def device_statistics(locks: DeviceLockManager, device: str = "cpu") -> DeviceStatistics:
    return next(one for one in locks.statistics().devices if one.device == device)


def owner_statistics(locks: DeviceLockManager, owner: str) -> OwnerLockStatistics:
    return next(one for one in device_statistics(locks).owners if one.owner == owner)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds that another thread is about to make true."""
    deadline = time.monotonic() + GENEROUS_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.001)


async def settle() -> None:
    """Let every task of this loop go as far as it can without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


def is_free(locks: DeviceLockManager, device: str = "cpu") -> bool:
    """Nobody holds it, nobody waits, and it can be had at once."""
    with locks.acquire_nowait(device, owner="probe"):
        pass
    statistics = device_statistics(locks, device)
    return not statistics.locked and statistics.tasks_waiting == 0


# --- Exclusion ------------------------------------------------------------------------------


def test_threads_exclude_each_other(locks: DeviceLockManager) -> None:
    """One thread at a time is inside, also under one owner name, and each gets in."""
    room = OneAtATime()

    def work(owner: str) -> None:
        for _ in range(25):
            with locks.acquire("cpu", owner=owner), room.inside():
                pass

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, ["same", "same", "a", "b", "c", "d", "e", "f"]))
    room.check(200)
    assert is_free(locks)


def test_event_loops_and_threads_exclude_each_other(locks: DeviceLockManager) -> None:
    """Four loops with five tasks each and four threads, on one device."""
    room = OneAtATime()

    async def task(owner: str) -> None:
        for _ in range(5):
            async with await locks.acquire_async("cpu", owner=owner), room.inside_async():
                pass

    async def tasks(owner: str) -> None:
        await asyncio.gather(*(task(owner) for _ in range(5)))

    def loop(owner: str) -> None:
        asyncio.run(tasks(owner))

    def thread(owner: str) -> None:
        for _ in range(25):
            with locks.acquire("cpu", owner=owner), room.inside():
                pass

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(loop, f"loop {i}") for i in range(4)]
        futures += [pool.submit(thread, f"thread {i}") for i in range(4)]
        for future in futures:
            future.result(GENEROUS_SECONDS)
    room.check(200)
    assert is_free(locks)


def test_devices_are_independent(locks: DeviceLockManager) -> None:
    """Holding one device leaves the others free."""
    with locks.acquire("cuda:0", owner="a"):
        assert is_free(locks, "cuda:1")
        with pytest.raises(DeviceLockTimeoutError):
            locks.acquire_nowait("cuda:0", owner="b")


def test_a_lease_is_held_until_released(locks: DeviceLockManager) -> None:
    """`held` follows the lease; the block releases, also when an exception leaves it."""

    def failing_step(leases: list[DeviceLease]) -> None:
        with locks.acquire("cpu", owner="a") as lease:
            leases.append(lease)
            assert lease.held
            raise ZeroDivisionError

    leases: list[DeviceLease] = []
    with pytest.raises(ZeroDivisionError):
        failing_step(leases)
    assert not leases[0].held
    assert is_free(locks)


def test_releasing_twice_is_an_error(locks: DeviceLockManager) -> None:
    """The second release says so and disturbs nobody who holds the device since."""
    lease = locks.acquire("cpu", owner="a")
    lease.release()
    with locks.acquire("cpu", owner="b") as other:
        with pytest.raises(DeviceLockNotHeldError, match="'a' does not hold 'cpu'") as caught:
            lease.release()
        assert other.held
    assert (caught.value.device, caught.value.owner) == ("cpu", "a")  # type: ignore[attr-defined]
    assert not caught.value.retryable


def test_releasing_inside_the_block_is_fine(locks: DeviceLockManager) -> None:
    """The block's end does not release a second time."""
    with locks.acquire("cpu", owner="a") as lease:
        lease.release()
        assert is_free(locks)
    assert is_free(locks)


def test_of_many_that_release_one_lease_one_succeeds(locks: DeviceLockManager) -> None:
    """Concurrent releases: one passes the lock on, the others get the error."""
    for _ in range(20):
        lease = locks.acquire("cpu", owner="a")
        barrier = threading.Barrier(4)

        def release(lease: DeviceLease = lease, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(GENEROUS_SECONDS)
            try:
                lease.release()
            except DeviceLockNotHeldError:
                return False
            return True

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(release) for _ in range(4)]
            assert sum(future.result() for future in futures) == 1
    assert is_free(locks)


def test_another_thread_may_release(locks: DeviceLockManager) -> None:
    """A lease taken here is released there (a stream closed in another thread)."""
    lease = locks.acquire("cpu", owner="a")
    thread = threading.Thread(target=lease.release)
    thread.start()
    thread.join()
    assert is_free(locks)


def test_wrong_arguments_are_refused(timed: DeviceLockManager) -> None:
    """Weights and timeouts out of range, and empty names, before anything is locked."""
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="weight"):
            timed.acquire("cpu", owner="a", weight=weight)
    for timeout_seconds in (-1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="timeout_seconds"):
            timed.acquire("cpu", owner="a", timeout_seconds=timeout_seconds)
    with pytest.raises(ConfigurationError, match="empty"):
        timed.acquire("", owner="a")
    with pytest.raises(ConfigurationError, match="empty"):
        timed.acquire("cpu", owner="")


# --- Order ----------------------------------------------------------------------------------


async def test_who_waits_longest_goes_first(locks: DeviceLockManager) -> None:
    """Among equals the order of arrival counts, for tasks and threads alike."""
    order: list[str] = []

    async def step(owner: str) -> None:
        async with await locks.acquire_async("cpu", owner=owner):
            order.append(owner)

    def step_in_thread(owner: str) -> None:
        with locks.acquire("cpu", owner=owner):
            order.append(owner)

    async def wait_for_waiters(count: int) -> None:
        while device_statistics(locks).tasks_waiting < count:
            await asyncio.sleep(0.001)

    lease = await locks.acquire_async("cpu", owner="holder")
    steps: list[asyncio.Future[None]] = []
    for number, owner in enumerate(["c", "a", "d", "b"]):
        work = step(owner) if number % 2 else asyncio.to_thread(step_in_thread, owner)
        steps.append(asyncio.ensure_future(work))
        await asyncio.wait_for(wait_for_waiters(number + 1), GENEROUS_SECONDS)
    lease.release()
    await asyncio.gather(*steps)
    assert order == ["c", "a", "d", "b"]


async def grants_of_busy_engines(
    locks: DeviceLockManager, clock: FakeClock, engines: dict[str, tuple[float, float]], count: int
) -> list[str]:
    """First `count` grants among engines (weight, step seconds) that ask again at once."""
    grants: list[str] = []

    async def engine(owner: str, weight: float, step_seconds: float) -> None:
        while len(grants) < count:
            async with await locks.acquire_async("cpu", owner=owner, weight=weight):
                grants.append(owner)
                clock.now += step_seconds
        clock.now += 1.0  # It does not come back: what was reserved for it lapses.

    gate = locks.acquire("cpu", owner="gate")
    tasks = [asyncio.create_task(engine(owner, *engines[owner])) for owner in engines]
    await settle()
    gate.release()
    await asyncio.wait_for(asyncio.gather(*tasks), GENEROUS_SECONDS)
    return grants[:count]


async def test_two_engines_with_equal_steps_interleave(
    timed: DeviceLockManager, clock: FakeClock
) -> None:
    """Step by step, though the one that releases asks again before the other has woken."""
    engines = {"a": (1.0, 0.02), "b": (1.0, 0.02)}
    assert await grants_of_busy_engines(timed, clock, engines, 8) == ["a", "b"] * 4


async def test_held_time_follows_the_weights(timed: DeviceLockManager, clock: FakeClock) -> None:
    """Weights 3 and 1: three quarters of the time, also with only two engines."""
    engines = {"heavy": (3.0, 0.02), "light": (1.0, 0.02)}
    grants = await grants_of_busy_engines(timed, clock, engines, 80)
    assert 58 <= grants.count("heavy") <= 62


async def test_time_is_shared_and_not_turns(timed: DeviceLockManager, clock: FakeClock) -> None:
    """After one prefill of a second, a decoding engine gets about a second of short steps."""
    engines = {"prefill": (1.0, 1.0), "decode": (1.0, 0.02)}
    grants = await grants_of_busy_engines(timed, clock, engines, 100)
    assert grants.count("prefill") <= 3


async def test_an_owed_owner_that_stays_away_blocks_nobody(
    timed: DeviceLockManager, clock: FakeClock
) -> None:
    """The lock is kept free for it for a moment, then granted to who waits."""

    async def ask(owner: str) -> asyncio.Task[DeviceLease]:
        task = asyncio.create_task(timed.acquire_async("cpu", owner=owner))
        await settle()
        return task

    async def use(asking: asyncio.Task[DeviceLease], seconds: float) -> None:
        lease = await asyncio.wait_for(asking, GENEROUS_SECONDS)
        clock.now += seconds
        lease.release()

    gate = timed.acquire("cpu", owner="gate")
    short, long = await ask("short"), await ask("long")
    gate.release()
    await use(short, 0.02)
    short = await ask("short")
    await use(long, 1.0)
    long = await ask("long")
    await use(short, 0.02)
    await settle()
    assert not long.done()
    clock.now += 1.0
    await use(long, 1.0)
    assert is_free(timed)


# --- A place that is kept -------------------------------------------------------------------


def test_who_waits_in_slices_goes_before_who_comes_later(locks: DeviceLockManager) -> None:
    """Between two slices too, and the slices that passed are no timeouts."""
    looked, go_on = threading.Event(), threading.Event()

    def wait_in_slices() -> None:
        with locks.enqueue("cpu", owner="patient") as place:
            assert place.wait(0.001) is None
            looked.set()
            go_on.wait(GENEROUS_SECONDS)
            lease = place.wait(GENEROUS_SECONDS)
            assert lease is not None
            lease.release()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with locks.acquire("cpu", owner="busy"):
            patient = pool.submit(wait_in_slices)
            assert looked.wait(GENEROUS_SECONDS)
        with pytest.raises(DeviceLockTimeoutError):
            locks.acquire_nowait("cpu", owner="busy")
        go_on.set()
        patient.result(GENEROUS_SECONDS)
    assert is_free(locks)
    assert owner_statistics(locks, "patient").num_timeouts == 0
    assert owner_statistics(locks, "patient").wait.count == 1


def test_a_place_that_is_left_holds_up_nobody(locks: DeviceLockManager) -> None:
    """Left while it waits, and left when it had been granted and nobody had looked."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        lease = locks.acquire("cpu", owner="busy")

        def wait_a_moment() -> None:
            with locks.enqueue("cpu", owner="hasty") as place:
                assert place.wait(0.001) is None
                lease.release()

        pool.submit(wait_a_moment).result(GENEROUS_SECONDS)
    assert is_free(locks)


# --- Cores ----------------------------------------------------------------------------------


def test_a_cpu_is_shared_by_cores(locks: DeviceLockManager) -> None:
    """Claims hold it together as long as their cores add up to what there is."""
    held = [locks.acquire_nowait("cpu", owner=str(n), num_cores=n) for n in (1, 2)]
    with pytest.raises(DeviceLockTimeoutError) as caught:
        locks.acquire_nowait("cpu", owner="wide", num_cores=2)
    assert caught.value.facts["holder"] == "1, 2"
    held.append(locks.acquire_nowait("cpu", owner="last", num_cores=1))
    statistics = device_statistics(locks)
    assert (statistics.num_units, statistics.num_units_held) == (4, 4)
    assert (statistics.holder, statistics.holders) == ("1", ("1", "2", "last"))
    for lease in held:
        lease.release()
    assert device_statistics(locks).num_units_held == 0
    assert is_free(locks)


def test_no_number_and_too_many_are_all_cores(locks: DeviceLockManager) -> None:
    """And any other device than a CPU is taken whole, whatever is asked for."""
    for device, num_cores in (("cpu", None), ("cpu", 9), ("cpu:1", 9), ("cuda:0", 1)):
        with (
            locks.acquire(device, owner="a", num_cores=num_cores),
            pytest.raises(DeviceLockTimeoutError),
        ):
            locks.acquire_nowait(device, owner="b", num_cores=1)


def test_a_wide_claim_is_not_starved(timed: DeviceLockManager, clock: FakeClock) -> None:
    """While it waits nobody who came later gets a core, though cores are free."""
    first, second = (timed.acquire("cpu", owner=name, num_cores=1) for name in "ab")
    granted: list[str] = []

    def ask(owner: str, num_cores: int) -> None:
        with timed.acquire("cpu", owner=owner, num_cores=num_cores):
            granted.append(owner)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        wide = pool.submit(ask, "wide", 4)
        eventually(lambda: device_statistics(timed).tasks_waiting == 1)
        with pytest.raises(DeviceLockTimeoutError):
            timed.acquire_nowait("cpu", owner="late", num_cores=1)
        first.release()
        late = pool.submit(ask, "late", 1)
        eventually(lambda: device_statistics(timed).tasks_waiting == 2)
        assert granted == []
        second.release()
        for one in (wide, late):
            one.result(GENEROUS_SECONDS)
    assert granted == ["wide", "late"]


def test_never_more_cores_than_there_are(locks: DeviceLockManager) -> None:
    """Claims of every width at once: all are served, and the sum never exceeds the cores."""
    used, most_used, lock = 0, 0, threading.Lock()

    def work(num_cores: int) -> None:
        nonlocal used, most_used
        for _ in range(25):
            with locks.acquire("cpu", owner=f"of {num_cores}", num_cores=num_cores):
                with lock:
                    used += num_cores
                    most_used = max(most_used, used)
                time.sleep(0)
                with lock:
                    used -= num_cores

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [1, 1, 2, 3, 4, 1, 2, 1]))
    assert most_used <= 4
    assert is_free(locks)


# --- Timeouts and self-made deadlocks -------------------------------------------------------


def test_a_timeout_says_who_holds_the_device(locks: DeviceLockManager) -> None:
    """Device, owner, seconds waited and holder are attributes; the waiter leaves no trace."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with locks.acquire("cpu", owner="busy"):
            attempt = pool.submit(locks.acquire, "cpu", owner="hasty", timeout_seconds=0.01)
            with pytest.raises(DeviceLockTimeoutError, match="held by busy") as caught:
                attempt.result(GENEROUS_SECONDS)
        facts = caught.value.facts
        assert (facts["device"], facts["owner"], facts["holder"]) == ("cpu", "hasty", "busy")
        waited_seconds = facts["waited_seconds"]
        assert isinstance(waited_seconds, float)
        assert waited_seconds >= 0.01
        assert caught.value.retryable
    assert is_free(locks)
    assert owner_statistics(locks, "hasty").num_timeouts == 1


async def test_a_task_times_out_too(locks: DeviceLockManager) -> None:
    """And the holder is not disturbed."""
    async with await locks.acquire_async("cpu", owner="busy") as lease:
        with pytest.raises(DeviceLockTimeoutError, match="'hasty' waited"):
            await locks.acquire_async("cpu", owner="hasty", timeout_seconds=0.01)
        assert lease.held
    assert is_free(locks)


def test_a_waiter_behind_one_that_timed_out_is_served(locks: DeviceLockManager) -> None:
    """Its place in the queue does not stay behind."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        lease = locks.acquire("cpu", owner="busy")
        hasty = pool.submit(locks.acquire, "cpu", owner="hasty", timeout_seconds=0.01)
        patient = pool.submit(locks.acquire, "cpu", owner="patient")
        with pytest.raises(DeviceLockTimeoutError):
            hasty.result(GENEROUS_SECONDS)
        lease.release()
        patient.result(GENEROUS_SECONDS).release()
    assert is_free(locks)


def test_the_time_limit_is_told_by_the_clock(timed: DeviceLockManager, clock: FakeClock) -> None:
    """No time passes, no timeout; it passes, and the waiter gives up."""
    with timed.acquire("cpu", owner="busy"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(timed.acquire, "cpu", owner="hasty", timeout_seconds=5.0)
        eventually(lambda: device_statistics(timed).tasks_waiting == 1)
        assert not attempt.done()
        clock.now += 6.0
        with pytest.raises(DeviceLockTimeoutError, match=r"waited 6\.000 s"):
            attempt.result(GENEROUS_SECONDS)


def test_a_thread_that_holds_the_device_and_asks_again_is_told(locks: DeviceLockManager) -> None:
    """An error at once instead of a deadlock, whatever the owner's name."""
    with locks.acquire("cpu", owner="a"):
        for owner in ("a", "b"):
            with pytest.raises(DeviceLockError, match="would wait for itself") as caught:
                locks.acquire("cpu", owner=owner)
            assert not caught.value.retryable
        with pytest.raises(DeviceLockTimeoutError):
            locks.acquire_nowait("cpu", owner="a")
    assert is_free(locks)


async def test_blocking_the_loop_that_holds_the_device_is_told(locks: DeviceLockManager) -> None:
    """A blocking acquire would keep the task that holds it from ever releasing."""
    async with await locks.acquire_async("cpu", owner="task"):
        with pytest.raises(DeviceLockError, match="event loop"):
            locks.acquire("cpu", owner="blocking call")
    assert is_free(locks)


async def test_a_blocking_call_does_not_wait_for_a_task_of_its_own_loop(
    locks: DeviceLockManager,
) -> None:
    """A task that waits first cannot take the lock while its loop is blocked: told, too."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        lease = await asyncio.wrap_future(pool.submit(locks.acquire, "cpu", owner="thread"))
        task = asyncio.create_task(locks.acquire_async("cpu", owner="task"))
        await settle()
        releaser = threading.Timer(0.05, lease.release)
        releaser.start()
        with pytest.raises(DeviceLockError, match="would wait for itself"):
            locks.acquire("cpu", owner="blocking call")
        releaser.join()
        (await asyncio.wait_for(task, GENEROUS_SECONDS)).release()
    assert is_free(locks)


# --- Cancellation ---------------------------------------------------------------------------


class ManualTask:
    """A coroutine driven by hand, so that it can be cancelled wherever it is suspended."""

    def __init__(self, coroutine: Coroutine[Any, Any, DeviceLease]) -> None:
        self._coroutine = coroutine
        self._waits_for: asyncio.Future[None]
        self.lease: DeviceLease | None = None

    def run(self) -> None:
        """Run to the next suspension or to the end."""
        try:
            self._waits_for = self._coroutine.send(None)
        except StopIteration as end:
            self.lease = end.value

    async def is_due(self) -> None:
        """Wait until a loop would resume it."""
        while not self._waits_for.done():
            await asyncio.sleep(0.001)

    def cancel(self) -> None:
        with pytest.raises(asyncio.CancelledError):
            self._coroutine.throw(asyncio.CancelledError())


@pytest.mark.parametrize("moment", range(4))
async def test_a_task_cancelled_at_any_suspension_leaves_no_ghost(
    tmp_path: Path, moment: int
) -> None:
    """0: queued. 1: granted, not resumed. 2: waiting for the files. 3: files free, not resumed."""
    locks = DeviceLockManager(lock_dir=tmp_path)
    foreign = DeviceLockManager(lock_dir=tmp_path)
    held = locks.acquire("cpu", owner="holder")
    task = ManualTask(locks.acquire_async("cpu", owner="task"))
    task.run()
    leases = [held]
    if moment >= 1:
        leases.pop().release()
    if moment >= 2:
        leases.append(foreign.acquire_nowait("cpu", owner="another process"))
        await task.is_due()
        task.run()
        assert task.lease is None
    if moment >= 3:
        leases.pop().release()
    assert device_statistics(locks).tasks_waiting == 1
    task.cancel()
    for lease in leases:
        lease.release()
    assert is_free(locks)
    assert is_free(foreign)


async def test_a_task_that_is_not_cancelled_gets_there(tmp_path: Path) -> None:
    """The same course as above to its end: so those four are all of its suspensions."""
    locks = DeviceLockManager(lock_dir=tmp_path)
    foreign = DeviceLockManager(lock_dir=tmp_path)
    held = locks.acquire("cpu", owner="holder")
    task = ManualTask(locks.acquire_async("cpu", owner="task"))
    task.run()
    held.release()
    other = foreign.acquire_nowait("cpu", owner="another process")
    await task.is_due()
    task.run()
    other.release()
    await task.is_due()
    task.run()
    assert task.lease is not None
    task.lease.release()
    assert is_free(locks)


async def test_a_grant_that_meets_a_cancellation_is_passed_on(locks: DeviceLockManager) -> None:
    """Released and cancelled in the same turn of the loop: the next waiter gets the lock."""
    lease = await locks.acquire_async("cpu", owner="holder")
    first = asyncio.create_task(locks.acquire_async("cpu", owner="first"))
    second = asyncio.create_task(locks.acquire_async("cpu", owner="second"))
    await settle()
    lease.release()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    (await asyncio.wait_for(second, GENEROUS_SECONDS)).release()
    assert is_free(locks)


async def test_random_cancellations_lose_nothing(locks: DeviceLockManager) -> None:
    """Two hundred tasks, every third cancelled after some turns of the loop; the rest get in."""
    room = OneAtATime()

    async def step(number: int) -> None:
        owner = f"owner {number % 5}"
        async with await locks.acquire_async("cpu", owner=owner), room.inside_async():
            pass

    tasks = []
    for number in range(200):
        tasks.append(asyncio.create_task(step(number)))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        if number % 3 == 0:
            tasks[number // 2].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), GENEROUS_SECONDS)
    room.check(sum(not task.cancelled() for task in tasks))
    assert is_free(locks)


async def test_waiting_never_blocks_the_loop(tmp_path: Path) -> None:
    """Other tasks of the loop run on while one waits for this process, then for another."""
    locks = DeviceLockManager(lock_dir=tmp_path)
    foreign = DeviceLockManager(lock_dir=tmp_path)
    for holder in (locks, foreign):
        lease = holder.acquire_nowait("cpu", owner="holder")
        waiter = asyncio.create_task(locks.acquire_async("cpu", owner="task"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiter.done()
        lease.release()
        (await asyncio.wait_for(waiter, GENEROUS_SECONDS)).release()


# --- Owners that die ------------------------------------------------------------------------


def test_a_dropped_lease_is_released(locks: DeviceLockManager) -> None:
    """With a ResourceWarning that names the device and the owner."""
    with pytest.warns(ResourceWarning, match="'cpu' by 'careless'"):
        locks.acquire("cpu", owner="careless")
    assert is_free(locks)


def test_a_lease_in_a_cycle_is_released_when_collected(locks: DeviceLockManager) -> None:
    """The collector releases it like any other."""
    lease = locks.acquire("cpu", owner="careless")
    lease.itself = lease  # type: ignore[attr-defined]
    del lease
    with pytest.warns(ResourceWarning, match="'careless'"):
        gc.collect()
    assert is_free(locks)


def test_a_waiter_is_served_when_a_lease_is_dropped(locks: DeviceLockManager) -> None:
    """The dropped lock goes to who waits, without another call."""
    leases = [locks.acquire("cpu", owner="careless")]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(locks.acquire, "cpu", owner="patient")
        eventually(lambda: device_statistics(locks).tasks_waiting == 1)
        with pytest.warns(ResourceWarning, match="'careless'"):
            leases.clear()
        waiter.result(GENEROUS_SECONDS).release()


def test_collecting_a_lease_inside_the_lock_does_not_deadlock(locks: DeviceLockManager) -> None:
    """A collector may run in the middle of our critical section, in the same thread."""
    leases = [locks.acquire("cpu", owner="careless")]
    mutex = locks._devices["cpu"]._mutex
    with mutex, pytest.warns(ResourceWarning, match="'careless'"):
        leases.clear()
    assert is_free(locks)


def test_a_suspended_acquire_that_is_dropped_leaves_no_ghost(locks: DeviceLockManager) -> None:
    """A loop that ends with a task still waiting: its place goes with it."""

    async def abandon() -> ManualTask:
        task = ManualTask(locks.acquire_async("cpu", owner="abandoned"))
        task.run()
        return task

    with locks.acquire("cpu", owner="holder"):
        task = asyncio.run(abandon())
        assert device_statistics(locks).tasks_waiting == 1
        del task
        gc.collect()
        assert device_statistics(locks).tasks_waiting == 0
    assert is_free(locks)


def test_the_lock_of_a_thread_that_ended_is_taken_over(locks: DeviceLockManager) -> None:
    """The lease lives on in a list; who waits notices, warns and takes over."""
    leases: list[DeviceLease] = []
    thread = threading.Thread(
        target=lambda: leases.append(locks.acquire("cpu", owner="dead")), name="worker 7"
    )
    thread.start()
    thread.join()
    with pytest.warns(ResourceWarning, match=r"'dead' \(thread 'worker 7'\) ended"):
        locks.acquire("cpu", owner="heir").release()
    assert not leases[0].held
    with pytest.raises(DeviceLockNotHeldError, match="another took over"):
        leases[0].release()
    assert is_free(locks)


def test_a_waiter_notices_that_the_holder_ends_while_it_waits(locks: DeviceLockManager) -> None:
    """Death after the waiting has begun, with nobody to wake the waiter."""
    leases: list[DeviceLease] = []
    may_end = threading.Event()

    def hold() -> None:
        leases.append(locks.acquire("cpu", owner="dead"))
        may_end.wait(GENEROUS_SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    eventually(lambda: bool(leases))

    def end_the_holder() -> None:
        eventually(lambda: device_statistics(locks).tasks_waiting == 1)
        may_end.set()

    ender = threading.Thread(target=end_the_holder)
    ender.start()
    with pytest.warns(ResourceWarning, match="'dead'"):
        locks.acquire("cpu", owner="heir").release()
    thread.join()
    ender.join()
    assert is_free(locks)


async def test_the_lock_of_a_closed_event_loop_is_taken_over(locks: DeviceLockManager) -> None:
    """The loop was closed, though its thread lives; a task of another loop takes over."""
    leases: list[DeviceLease] = []

    async def hold() -> None:
        leases.append(await locks.acquire_async("cpu", owner="dead"))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        await asyncio.wrap_future(pool.submit(lambda: asyncio.run(hold())))
        with pytest.warns(ResourceWarning, match=r"'dead' \(event loop"):
            async with await locks.acquire_async("cpu", owner="heir"):
                pass
    assert not leases[0].held
    assert is_free(locks)


def test_a_waiter_whose_loop_was_closed_is_passed_over(locks: DeviceLockManager) -> None:
    """The grant goes to the next that lives."""
    tasks: list[ManualTask] = []

    async def wait() -> None:
        tasks.append(ManualTask(locks.acquire_async("cpu", owner="dead")))
        tasks[0].run()

    lease = locks.acquire("cpu", owner="holder")
    asyncio.run(wait())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(locks.acquire, "cpu", owner="heir")
        eventually(lambda: device_statistics(locks).tasks_waiting == 2)
        lease.release()
        waiter.result(GENEROUS_SECONDS).release()
    assert is_free(locks)


def test_a_holder_that_lives_is_never_robbed(locks: DeviceLockManager) -> None:
    """However often a waiter looks, a live thread, or the task of a running loop, keeps it."""

    def wait_in_vain() -> None:
        with pytest.raises(DeviceLockTimeoutError):
            locks.acquire("cpu", owner="greedy", timeout_seconds=0.6)

    async def hold() -> bool:
        async with await locks.acquire_async("cpu", owner="task") as lease:
            await asyncio.to_thread(wait_in_vain)
            return lease.held

    assert asyncio.run(hold())
    with (
        locks.acquire("cpu", owner="thread") as lease,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(wait_in_vain).result(GENEROUS_SECONDS)
        assert lease.held


# --- Statistics -----------------------------------------------------------------------------


def test_statistics_show_waits_and_holds_by_owner(
    timed: DeviceLockManager, clock: FakeClock
) -> None:
    """Percentiles by nearest rank, exact under a clock that the test moves."""
    for seconds in range(1, 101):
        with timed.acquire("cpu", owner="a"):
            clock.now += seconds
    assert owner_statistics(timed, "a") == OwnerLockStatistics(
        owner="a",
        num_acquired=100,
        num_timeouts=0,
        wait=PercentileSeconds(100, 0.0, 0.0, 0.0),
        hold=PercentileSeconds(100, 50.0, 95.0, 99.0),
        num_waiting=0,
    )


def test_statistics_show_who_holds_and_who_waits(
    timed: DeviceLockManager, clock: FakeClock
) -> None:
    """By name, while it lasts; the wait is counted when it ends."""
    lease = timed.acquire("cpu", owner="holder")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiters = [pool.submit(timed.acquire, "cpu", owner="patient") for _ in range(2)]
        eventually(lambda: device_statistics(timed).tasks_waiting == 2)
        statistics = device_statistics(timed)
        assert statistics.locked
        assert statistics.holder == "holder"
        assert {one.owner: one.num_waiting for one in statistics.owners} == {
            "holder": 0,
            "patient": 2,
        }
        assert owner_statistics(timed, "patient").wait == PercentileSeconds(0, 0.0, 0.0, 0.0)
        clock.now += 3.0
        lease.release()
        for waiter in concurrent.futures.as_completed(waiters, GENEROUS_SECONDS):
            waiter.result().release()
    assert owner_statistics(timed, "patient").wait == PercentileSeconds(2, 3.0, 3.0, 3.0)
    assert not device_statistics(timed).locked
    assert device_statistics(timed).holder is None


def test_statistics_are_bounded(timed: DeviceLockManager, clock: FakeClock) -> None:
    """The newest uses of an owner count, and not every name that was ever used is kept."""
    for number in range(WINDOW + 10):
        with timed.acquire("cpu", owner="a"):
            clock.now += 0.0 if number < 10 else 1.0
    assert owner_statistics(timed, "a").num_acquired == WINDOW + 10
    assert owner_statistics(timed, "a").hold == PercentileSeconds(WINDOW, 1.0, 1.0, 1.0)
    for number in range(2 * MAX_OWNERS):
        timed.acquire("cpu", owner=f"owner {number}").release()
    assert len(device_statistics(timed).owners) == MAX_OWNERS


def test_a_manager_that_was_never_used_has_nothing_to_show(tmp_path: Path) -> None:
    """Making one touches no file."""
    folder = tmp_path / "locks"
    assert DeviceLockManager(lock_dir=folder).statistics().devices == ()
    assert not folder.exists()
