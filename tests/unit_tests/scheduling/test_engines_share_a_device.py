"""Engines on one device: turns whatever the length of a step, and cores side by side."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from langchain_swarmkv.config import EngineConfig, SamplingParams
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import DeviceLockError, DeviceLockTimeoutError, EngineClosedError
from langchain_swarmkv.scheduling import engine_loop
from langchain_swarmkv.scheduling.device_locks import DeviceLease, DeviceLockManager, DevicePlace
from langchain_swarmkv.scheduling.request import RequestHandle
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.statistics import OwnerLockStatistics
from tests.unit_tests.scheduling.support import WAIT_SECONDS, open_swarm, piece

ROOT = Path(__file__).parents[3]
NUM_STEPS = 12
ANSWER = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True)


class Slices:
    """Counts the slices in which an engine waited for a device in vain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self.num_passed = 0
        real_wait = DevicePlace.wait

        def wait(place: DevicePlace, timeout_seconds: float | None = None) -> DeviceLease | None:
            lease = real_wait(place, timeout_seconds)
            if lease is None:
                with self._changed:
                    self.num_passed += 1
                    self._changed.notify_all()
            return lease

        monkeypatch.setattr(DevicePlace, "wait", wait)
        monkeypatch.setattr(engine_loop, "_LOCK_SLICE_SECONDS", 0.001)

    def pass_some(self) -> None:
        """Return after three more slices."""
        with self._changed:
            until = self.num_passed + 3
            assert self._changed.wait_for(lambda: self.num_passed >= until, WAIT_SECONDS)


def owner_statistics(locks: DeviceLockManager, engine: SwarmEngine) -> OwnerLockStatistics:
    (device,) = locks.statistics().devices
    return next(one for one in device.owners if one.owner == engine._loop._owner)


def test_engines_take_turns_though_steps_are_longer_than_a_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step lasts until the other engine has waited for three slices; both get as many.

    The clock tells ten seconds for each step, beside which it does not matter how long it took.
    """
    slices = Slices(monkeypatch)
    steps: list[str] = []
    engines: dict[str, SwarmEngine] = {}
    handles: list[RequestHandle] = []
    locks = DeviceLockManager(
        across_processes=False, clock=lambda: 10.0 * len(steps) + time.monotonic()
    )

    def step(name: str, other: str) -> Callable[[Batch], None]:
        def on_decode(batch: Batch) -> None:
            if not steps:
                # The other asks for the device, too, before the first step is over.
                handles.append(engines[other].submit(piece(other, 20), ANSWER))
            steps.append(name)
            if steps.count(other) < NUM_STEPS:
                slices.pass_some()

        return on_decode

    for name, other in (("a", "b"), ("b", "a")):
        engines[name] = open_swarm(FakeEngine(on_decode=step(name, other)), device_locks=locks)
    with engines["a"], engines["b"]:
        engines["a"].submit(piece("a", 20), ANSWER).result(WAIT_SECONDS)
        handles[0].result(WAIT_SECONDS)
        assert steps[:2] == ["a", "b"]
        for count in range(2, 2 * NUM_STEPS):
            assert abs(steps[:count].count("a") - steps[:count].count("b")) <= 1
        assert slices.num_passed >= 3 * (2 * NUM_STEPS - 1)
        for engine in engines.values():
            assert owner_statistics(locks, engine).num_timeouts == 0


def test_an_engine_keeps_its_place_while_it_looks_at_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two slices, as within one, who has released and asks again comes after it."""
    monkeypatch.setattr(engine_loop, "_LOCK_SLICE_SECONDS", 0.001)
    locks = DeviceLockManager(across_processes=False)
    looks, go_on = threading.Event(), threading.Event()
    with open_swarm(device_locks=locks) as engine:
        reap = engine._loop.scheduler.reap

        def look() -> None:
            looks.set()
            assert go_on.wait(WAIT_SECONDS)
            reap()

        lease = locks.acquire("fake", owner="another")
        with monkeypatch.context() as patch:
            patch.setattr(engine._loop.scheduler, "reap", look)
            handle = engine.submit(piece("a", 20), ANSWER)
            assert looks.wait(WAIT_SECONDS)
            lease.release()
            with pytest.raises(DeviceLockTimeoutError):
                locks.acquire_nowait("fake", owner="another")
            go_on.set()
            handle.result(WAIT_SECONDS)
        assert owner_statistics(locks, engine).num_timeouts == 0


CHILD = """
import sys
from pathlib import Path
from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.scheduling import engine_loop
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.request import RequestHandle
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

engine_loop._LOCK_SLICE_SECONDS = 0.001
locks = DeviceLockManager(lock_dir=Path(sys.argv[1]))
with SwarmEngine(FakeEngine(), device_locks=locks) as engine:
    reap = engine._loop.scheduler.reap
    waits = True

    def look():
        global waits
        if waits:
            print("waits", flush=True)
            sys.stdin.readline()
            waits = False
        reap()

    engine._loop.scheduler.reap = look
    print("ready", flush=True)
    sys.stdin.readline()
    engine.submit([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)).result()
    (device,) = locks.statistics().devices
    print(sum(owner.num_timeouts for owner in device.owners), flush=True)
"""


def test_an_engine_of_another_process_keeps_its_turn(tmp_path: Path) -> None:
    """The one in line goes next, also while it looks at its requests; its waits are no timeouts."""
    locks = DeviceLockManager(lock_dir=tmp_path / "locks")
    process = subprocess.Popen(
        [sys.executable, "-c", dedent(CHILD), str(tmp_path / "locks")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            lease = locks.acquire("fake", owner="parent")
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "waits\n"
            lease.release()
            with pytest.raises(DeviceLockTimeoutError):
                locks.acquire_nowait("fake", owner="parent")
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n"
        finally:
            process.kill()


def test_requests_that_come_while_the_device_is_waited_for_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are cancelled, checked and counted as if the engine were idle."""
    locks = DeviceLockManager(across_processes=False)
    with open_swarm(device_locks=locks) as engine:
        with locks.acquire("fake", owner="another"):
            first = engine.submit(piece("a", 20), ANSWER)
            engine.check()  # runs between two slices
            second = engine.submit(piece("b", 20), ANSWER)
            engine.check()
            assert engine.statistics().num_waiting == 2
            first.cancel()
            second.cancel()
            engine.check()
            engine.check()
            assert engine.statistics().num_waiting == 0
            (device,) = locks.statistics().devices
        assert device.tasks_waiting == 0


def cpu_engine(num_cores: int, on_decode: Callable[[Batch], None]) -> FakeEngine:
    fake = FakeEngine(device="cpu", on_decode=on_decode)
    fake.num_cores = num_cores
    return fake


@pytest.mark.parametrize("across_processes", [False, True])
def test_engines_compute_side_by_side_as_far_as_there_are_cores(
    tmp_path: Path, across_processes: bool
) -> None:
    """Four engines of one thread each meet inside a step on a CPU of four cores."""
    locks = DeviceLockManager(
        lock_dir=tmp_path / "locks", across_processes=across_processes, cores=range(4)
    )
    met = threading.Barrier(4)

    def meet(batch: Batch) -> None:
        met.wait(WAIT_SECONDS)

    engines = [open_swarm(cpu_engine(1, meet), device_locks=locks) for _ in range(4)]
    try:
        handles = [engine.submit(piece("a", 20), ANSWER) for engine in engines]
        for handle in handles:
            handle.result(WAIT_SECONDS)
    finally:
        for engine in engines:
            engine.close()


def test_an_engine_with_many_threads_gets_its_turn_beside_those_with_few(tmp_path: Path) -> None:
    """It waits until all its cores are free, and nobody computes beside it then."""
    locks = DeviceLockManager(lock_dir=tmp_path / "locks", cores=range(3))
    lock, inside, seen = threading.Lock(), [0], []

    def on_cores(num_cores: int) -> Callable[[Batch], None]:
        def on_decode(batch: Batch) -> None:
            with lock:
                inside[0] += num_cores
                seen.append(inside[0])
            with lock:
                inside[0] -= num_cores

        return on_decode

    engines = [open_swarm(cpu_engine(n, on_cores(n)), device_locks=locks) for n in (1, 1, 2, 3)]
    try:
        long = SamplingParams(max_tokens=60, ignore_eos=True)
        handles = [engine.submit(piece("a", 20), long) for engine in engines]
        for handle in handles:
            handle.result(WAIT_SECONDS)
    finally:
        for engine in engines:
            engine.close()
    assert max(seen) <= 3


def test_an_engine_takes_the_cores_of_its_threads(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger of both numbers; all of them without a number."""
    widths: list[int | None] = []
    real_enqueue = DeviceLockManager.enqueue

    def enqueue(
        self: DeviceLockManager, device: str, *, num_cores: int | None, **options: object
    ) -> DevicePlace:
        assert device == "cpu"
        widths.append(num_cores)
        return real_enqueue(self, device, num_cores=num_cores, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceLockManager, "enqueue", enqueue)
    for threads, expected in (({"n_threads": 1, "n_threads_batch": 2}, 2), ({"n_threads": 1}, 1)):
        config = EngineConfig(
            model_path=tiny_llama, n_ctx=256, lock_dir=tmp_path / "locks", **threads
        )
        widths.clear()
        with SwarmEngine(config) as engine:
            engine.submit([1], SamplingParams(max_tokens=2)).result(WAIT_SECONDS)
        assert set(widths) == {expected}


# -- the folder of the lock files ------------------------------------------------------------------


def test_a_lock_folder_that_cannot_be_used_is_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to set; then it works in the folder that was set."""
    (tmp_path / "file").touch()
    missing = tmp_path / "missing.gguf"
    config = EngineConfig(model_path=missing, lock_dir=tmp_path / "file" / "locks")
    with pytest.raises(DeviceLockError, match=r"lock_dir.*SWARMKV_LOCK_DIR") as caught:
        SwarmEngine(config)
    assert not caught.value.retryable
    monkeypatch.setenv("SWARMKV_LOCK_DIR", str(tmp_path / "file"))
    with pytest.raises(DeviceLockError, match="SWARMKV_LOCK_DIR"):
        SwarmEngine(FakeEngine())
    monkeypatch.setenv("SWARMKV_LOCK_DIR", str(tmp_path / "good"))
    with SwarmEngine(FakeEngine()) as engine:
        engine.submit([1], ANSWER).result(WAIT_SECONDS)
    assert (tmp_path / "good" / "fake.0.lock").exists()


def test_a_lock_folder_on_a_file_system_without_locks_is_told_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none."""

    def fail(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("langchain_swarmkv.scheduling.process_lock.lock_descriptor", fail)
    with pytest.raises(DeviceLockError, match="No locks available"):
        SwarmEngine(FakeEngine(), device_locks=DeviceLockManager(lock_dir=tmp_path / "locks"))


def test_closing_while_another_has_the_device_ends_at_the_next_look(tmp_path: Path) -> None:
    """The place is left: the next who asks gets the device."""
    locks = DeviceLockManager(across_processes=False)
    with locks.acquire("fake", owner="another"):
        engine = open_swarm(device_locks=locks)
        handle = engine.submit(piece("a", 20), ANSWER)
        engine.close()
        with pytest.raises(EngineClosedError):
            handle.result(WAIT_SECONDS)
    locks.acquire_nowait("fake", owner="another").release()
