"""The device lock across processes: exclusion, turns, death, forks, and the folder of its files."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from langchain_swarmkv.errors import DeviceLockError, DeviceLockTimeoutError
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.process_lock import ProcessLock, private_lock_dir
from tests.support.processes import WITHOUT_LANGCHAIN

GENEROUS_SECONDS = 60.0
PREAMBLE = """
import os, sys, threading, time
from pathlib import Path
from langchain_swarmkv.errors import DeviceLockNotHeldError, DeviceLockTimeoutError
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager

locks = DeviceLockManager(lock_dir=Path(sys.argv[1]), cores=range(4))

def say(text):
    print(text, flush=True)

def hear():
    return sys.stdin.readline().strip()
"""
HOLD = """
lease = locks.acquire("cpu", owner="child")
say("held")
hear()
lease.release()
say("released")
hear()
"""


class Child:
    """Another Python process, spoken to in lines."""

    def __init__(self, script: str, lock_dir: Path) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                WITHOUT_LANGCHAIN + PREAMBLE + textwrap.dedent(script),
                str(lock_dir),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, text: str = "") -> None:
        assert self.process.stdin is not None
        print(text, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


Spawn = Callable[[str], Child]


@pytest.fixture
def lock_dir(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def locks(lock_dir: Path) -> DeviceLockManager:
    return DeviceLockManager(lock_dir=lock_dir, cores=range(4))


@pytest.fixture
def spawn(lock_dir: Path) -> Iterator[Spawn]:
    children: list[Child] = []

    def start(script: str) -> Child:
        children.append(Child(script, lock_dir))
        return children[-1]

    yield start
    for child in children:
        child.close()


# --- Processes ------------------------------------------------------------------------------


def test_another_process_waits_and_proceeds(locks: DeviceLockManager, spawn: Spawn) -> None:
    """It is blocked while this one holds the device, and gets it afterwards; and the reverse."""
    child = spawn(
        """
        hear()
        try:
            locks.acquire_nowait("cpu", owner="child")
        except DeviceLockTimeoutError as error:
            say(error.holder)
        lease = locks.acquire("cpu", owner="child")
        say("held")
        hear()
        lease.release()
        say("released")
        hear()
        """
    )
    lease = locks.acquire("cpu", owner="parent")
    child.say()
    assert child.hear() == f"process {os.getpid()}"
    lease.release()
    assert child.hear() == "held"
    with pytest.raises(DeviceLockTimeoutError) as caught:
        locks.acquire("cpu", owner="parent", timeout_seconds=0.01)
    assert caught.value.facts["holder"] == f"process {child.process.pid}"
    child.say()
    assert child.hear() == "released"
    locks.acquire("cpu", owner="parent", timeout_seconds=GENEROUS_SECONDS).release()


def test_processes_exclude_each_other(spawn: Spawn, tmp_path: Path) -> None:
    """Three processes count in one file, by reading, adding and writing: no count is lost."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    script = f"""
        counter = Path({str(counter)!r})
        hear()
        for _ in range(50):
            with locks.acquire("cpu", owner="child"):
                counter.write_text(str(int(counter.read_text()) + 1))
        say("done")
        hear()
        """
    children = [spawn(script) for _ in range(3)]
    for child in children:
        child.say()
    assert [child.hear() for child in children] == ["done"] * 3
    assert counter.read_text() == "150"


def test_the_main_thread_keeps_its_lock_while_exit_handlers_run(spawn: Spawn) -> None:
    """It counts as ended by then; engines are closed there, and must not be robbed."""
    child = spawn(
        """
        import atexit
        held, tried = threading.Event(), threading.Event()

        def try_in_vain():
            held.wait()
            try:
                locks.acquire("cpu", owner="daemon", timeout_seconds=0.6)
            except DeviceLockTimeoutError:
                say("kept out")
            tried.set()

        def at_exit():
            with locks.acquire("cpu", owner="exit handler") as lease:
                held.set()
                tried.wait()
                say(lease.held)

        atexit.register(at_exit)
        threading.Thread(target=try_in_vain, daemon=True).start()
        """
    )
    assert [child.hear(), child.hear()] == ["kept out", "True"]


def test_the_lock_of_a_killed_process_is_free(locks: DeviceLockManager, spawn: Spawn) -> None:
    """SIGKILL while it holds the device, and while a waiter is in line."""
    child = spawn(HOLD)
    assert child.hear() == "held"
    with pytest.raises(DeviceLockTimeoutError):
        locks.acquire_nowait("cpu", owner="parent")
    killer = threading.Timer(0.05, child.kill)
    killer.start()
    locks.acquire("cpu", owner="parent", timeout_seconds=GENEROUS_SECONDS).release()
    killer.join()


def test_the_turn_of_a_killed_waiter_is_free(locks: DeviceLockManager, spawn: Spawn) -> None:
    """A process that dies while it is next in line holds up nobody."""
    child = spawn(
        """
        from langchain_swarmkv.scheduling.process_lock import ProcessLock
        hear()
        lock = ProcessLock(Path(sys.argv[1]), "cpu")
        lock.try_acquire()
        say("in line")
        hear()
        """
    )
    with locks.acquire("cpu", owner="parent"):
        child.say()
        assert child.hear() == "in line"
    with pytest.raises(DeviceLockTimeoutError):
        locks.acquire_nowait("cpu", owner="parent")
    child.kill()
    locks.acquire("cpu", owner="parent", timeout_seconds=GENEROUS_SECONDS).release()


def test_a_process_that_asks_again_at_once_starves_nobody(
    locks: DeviceLockManager, spawn: Spawn
) -> None:
    """Both ask again as soon as they have released: neither gets many steps for one of the other.

    Counted, not timed: an unfair lock gives the greedy process hundreds for each of ours.
    """
    greedy = spawn(
        """
        stop = threading.Event()
        threading.Thread(target=lambda: (hear(), stop.set())).start()
        num_grants = 0
        while not stop.is_set():
            with locks.acquire("cpu", owner="greedy"):
                num_grants += 1
                if num_grants == 1:
                    say("running")
                time.sleep(0.005)
        say(num_grants)
        """
    )
    assert greedy.hear() == "running"
    num_grants = 20
    for _ in range(num_grants):
        with locks.acquire("cpu", owner="ours", timeout_seconds=GENEROUS_SECONDS):
            pass
    greedy.say()
    # A few more may pass before the word to stop arrives, and while we are not scheduled.
    assert int(greedy.hear()) <= 10 * num_grants


def test_two_managers_of_one_process_exclude_each_other(
    locks: DeviceLockManager, lock_dir: Path
) -> None:
    """They share no queue, but they share the files."""
    other = DeviceLockManager(lock_dir=lock_dir, cores=range(4))
    with locks.acquire("cpu", owner="a"):
        with pytest.raises(DeviceLockTimeoutError) as caught:
            other.acquire("cpu", owner="b", timeout_seconds=0.01)
        assert caught.value.facts["holder"] == "another manager of this process"
    other.acquire_nowait("cpu", owner="b").release()


def test_a_waiter_that_gives_up_hands_its_turn_back(
    locks: DeviceLockManager, lock_dir: Path
) -> None:
    """After its timeout another one can be next in line."""
    with locks.acquire("cpu", owner="a"):
        waiter, third = (
            DeviceLockManager(lock_dir=lock_dir, cores=range(4)),
            ProcessLock(lock_dir, "cpu"),
        )
        with pytest.raises(DeviceLockTimeoutError):
            waiter.acquire("cpu", owner="b", timeout_seconds=0.01)
        assert not third.try_acquire()
    assert third.try_acquire()
    third.release()


def test_who_waits_goes_before_who_has_just_released(lock_dir: Path) -> None:
    """The turnstile: the one in line gets the device before its last holder does again."""
    lock_dir.mkdir()
    first, second = ProcessLock(lock_dir, "cpu"), ProcessLock(lock_dir, "cpu")
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert not first.try_acquire()
    assert second.try_acquire()
    assert not first.try_acquire()
    second.release()
    assert first.try_acquire()
    first.release()


# --- Cores ----------------------------------------------------------------------------------

HOLD_CORES = """
while (word := hear()) != "end":
    if word == "release":
        lease.release()
        say("released")
    else:
        lease = locks.acquire("cpu", owner="child", num_cores=int(word))
        say("held")
"""


def test_processes_share_the_cores(locks: DeviceLockManager, spawn: Spawn) -> None:
    """Two that need one core and one that needs two hold a CPU of four; a fifth core is none."""
    children = [spawn(HOLD_CORES) for _ in range(3)]
    for child, num_cores in zip(children, (1, 1, 2), strict=True):
        child.say(str(num_cores))
        assert child.hear() == "held"
    with pytest.raises(DeviceLockTimeoutError) as caught:
        locks.acquire_nowait("cpu", owner="parent", num_cores=1)
    pids = {f"process {child.process.pid}" for child in children}
    assert caught.value.facts["holder"] in pids
    children[0].say("release")
    assert children[0].hear() == "released"
    with locks.acquire_nowait("cpu", owner="parent", num_cores=1):
        pass


def test_the_cores_of_a_killed_process_are_free(locks: DeviceLockManager, spawn: Spawn) -> None:
    """All that it held, and what it had taken while it waited for more."""
    holder, waiter = (
        spawn(HOLD_CORES),
        spawn(
            """
        from langchain_swarmkv.scheduling.process_lock import ProcessLock
        hear()
        lock = ProcessLock(Path(sys.argv[1]), "cpu", range(4))
        say(lock.try_acquire(3))
        hear()
        """
        ),
    )
    holder.say("2")
    assert holder.hear() == "held"
    waiter.say()
    assert waiter.hear() == "None"
    for num_cores in (1, 4):
        with pytest.raises(DeviceLockTimeoutError):
            locks.acquire_nowait("cpu", owner="parent", num_cores=num_cores)
    waiter.kill()
    with locks.acquire("cpu", owner="a", num_cores=2, timeout_seconds=GENEROUS_SECONDS):
        pass
    holder.kill()
    with locks.acquire("cpu", owner="parent", timeout_seconds=GENEROUS_SECONDS):
        pass


def test_a_wide_claim_is_not_overtaken_by_another_process(lock_dir: Path) -> None:
    """It keeps the cores that it got, and its turn: whoever needs fewer comes after it."""
    lock_dir.mkdir()
    narrow, wide, late = (ProcessLock(lock_dir, "cpu", range(4)) for _ in range(3))
    held = narrow.try_acquire(1)
    assert held == (0,)
    assert wide.try_acquire(4) is None
    assert late.try_acquire(1) is None
    narrow.release(held)
    assert narrow.try_acquire(1) is None
    units = wide.try_acquire(4)
    assert units is not None
    assert sorted(units) == [0, 1, 2, 3]


def test_a_claim_that_gives_up_frees_what_it_had_taken(lock_dir: Path) -> None:
    """The cores that it had while it waited for the rest, and its turn."""
    lock_dir.mkdir()
    holder, waiter, third = (ProcessLock(lock_dir, "cpu", range(4)) for _ in range(3))
    assert holder.try_acquire(2) == (0, 1)
    assert waiter.try_acquire(3) is None
    assert third.try_acquire(2) is None
    waiter.give_up()
    assert third.try_acquire(2) == (2, 3)


def test_claims_of_one_process_take_different_cores(lock_dir: Path) -> None:
    """And give back their own, in any order."""
    lock_dir.mkdir()
    ours, theirs = (ProcessLock(lock_dir, "cpu", range(4)) for _ in range(2))
    first, second = ours.try_acquire(1), ours.try_acquire(2)
    assert first == (0,)
    assert second == (1, 2)
    ours.release(first)
    assert theirs.try_acquire(3) is None
    theirs.give_up()
    assert ours.try_acquire(1) == (0,)
    ours.release(second)
    assert theirs.try_acquire(2) == (1, 2)


def test_a_process_takes_only_cores_of_its_own(lock_dir: Path) -> None:
    """Bound to other cores than the holder, it does not wait for it; bound to some, it does."""
    lock_dir.mkdir()
    low, high, middle = (ProcessLock(lock_dir, "cpu", units) for units in ((0, 1), (2, 3), (1, 2)))
    assert low.try_acquire(2) == (0, 1)
    assert middle.try_acquire(2) is None
    middle.give_up()
    assert high.try_acquire(2) == (2, 3)


# --- Forks ----------------------------------------------------------------------------------


def run_forking(spawn: Spawn, script: str, expected: list[str]) -> None:
    """Run a script that forks in a process of its own: a deadlock fails the test there."""
    child = spawn(script)
    assert [child.hear() for _ in expected] == expected
    child.say()
    assert child.process.wait(GENEROUS_SECONDS) == 0


def test_a_forked_child_holds_nothing(spawn: Spawn) -> None:
    """The lease is the parent's: not held in the child, which waits like any other process."""
    run_forking(
        spawn,
        """
        lease = locks.acquire("cpu", owner="parent")
        if os.fork() == 0:
            say(f"child holds: {lease.held}, {locks.statistics().devices}")
            try:
                lease.release()
            except DeviceLockNotHeldError:
                say("not ours")
            try:
                locks.acquire_nowait("cpu", owner="child")
            except DeviceLockTimeoutError as error:
                say(error.holder == f"process {os.getppid()}")
            lease = None
            os._exit(0)
        os.wait()
        say(f"parent holds: {lease.held}")
        lease.release()
        say("released")
        hear()
        """,
        ["child holds: False, ()", "not ours", "True", "parent holds: True", "released"],
    )


def test_a_forked_child_does_not_free_the_parents_lock(spawn: Spawn) -> None:
    """The child left the block, dropped the lease and ended: others are still kept out."""
    run_forking(
        spawn,
        """
        other = DeviceLockManager(lock_dir=Path(sys.argv[1]))
        lease = locks.acquire("cpu", owner="parent")
        pid = os.fork()
        if pid == 0:
            with lease:
                pass
            del lease, locks
            say("child leaves")
            os._exit(0)
        os.waitpid(pid, 0)
        try:
            other.acquire_nowait("cpu", owner="other")
        except DeviceLockTimeoutError:
            say("kept out")
        lease.release()
        other.acquire_nowait("cpu", owner="other").release()
        say("free")
        hear()
        """,
        ["child leaves", "kept out", "free"],
    )


def test_a_fork_in_the_middle_of_a_critical_section_does_not_deadlock(spawn: Spawn) -> None:
    """Another thread had our mutex at the fork; the child acquires and releases all the same."""
    run_forking(
        spawn,
        """
        locks.acquire("cpu", owner="parent").release()
        mutex = locks._devices["cpu"]._mutex
        taken, done = threading.Event(), threading.Event()

        def take():
            with mutex:
                taken.set()
                done.wait()

        threading.Thread(target=take).start()
        taken.wait()
        pid = os.fork()
        if pid == 0:
            with locks.acquire("cpu", owner="child"):
                say("child held")
            os._exit(0)
        os.waitpid(pid, 0)
        done.set()
        locks.acquire("cpu", owner="parent").release()
        say("parent held")
        hear()
        """,
        ["child held", "parent held"],
    )


def test_the_lock_does_not_outlive_a_killed_parent_whose_child_lives(
    locks: DeviceLockManager, spawn: Spawn
) -> None:
    """The child inherited the open files, and closed them."""
    parent = spawn(
        """
        lease = locks.acquire("cpu", owner="parent")
        if os.fork() == 0:
            say("child lives")
            hear()
            os._exit(0)
        time.sleep(600)
        """
    )
    assert parent.hear() == "child lives"
    parent.kill()
    locks.acquire("cpu", owner="heir", timeout_seconds=GENEROUS_SECONDS).release()
    parent.say()


# --- The folder and its files ---------------------------------------------------------------


def test_the_folder_and_its_files_are_private(locks: DeviceLockManager, lock_dir: Path) -> None:
    """Mode 0700 and 0600, whatever the device's name holds."""
    locks.acquire("../cuda:0/é", owner="a").release()
    assert stat.S_IMODE(lock_dir.stat().st_mode) == 0o700
    files = sorted(lock_dir.iterdir())
    assert len(files) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert sorted(lock_dir.parent.iterdir()) == [lock_dir]


def test_the_default_folder_is_in_the_runtime_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`$XDG_RUNTIME_DIR` if it is ours, else the temporary directory, with the user's number."""
    runtime, temporary = tmp_path / "runtime", tmp_path / "tmp"
    runtime.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert private_lock_dir(None) == runtime / "swarmkv-locks"
    expected = temporary / f"swarmkv-locks-{os.geteuid()}"
    for value in ("", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert private_lock_dir(None) == expected
    assert stat.S_IMODE(expected.stat().st_mode) == 0o700


def test_a_folder_of_somebody_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, locks: DeviceLockManager, lock_dir: Path
) -> None:
    """They could remove the files, or keep us out for ever."""
    lock_dir.mkdir(mode=0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(DeviceLockError, match=f"belongs to user {user}") as caught:
        locks.acquire("cpu", owner="a")
    assert not caught.value.retryable


def test_a_link_by_somebody_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A link planted in the temporary directory that leads to a folder of ours."""
    ours, link = tmp_path / "ours", tmp_path / "link"
    ours.mkdir(mode=0o700)
    link.symlink_to(ours)
    assert private_lock_dir(link) == link
    foreign = os.stat_result((*link.lstat()[:4], os.geteuid() + 1, *link.lstat()[5:]))
    monkeypatch.setattr(Path, "lstat", lambda self: foreign)
    with pytest.raises(DeviceLockError, match="belongs to user"):
        private_lock_dir(link)


def test_a_folder_that_others_may_write_to_is_refused(
    locks: DeviceLockManager, lock_dir: Path
) -> None:
    """With the command that mends it."""
    lock_dir.mkdir()
    lock_dir.chmod(0o770)
    with pytest.raises(DeviceLockError, match="chmod 700"):
        locks.acquire("cpu", owner="a")
    lock_dir.chmod(0o700)
    locks.acquire("cpu", owner="a").release()


def test_files_that_cannot_be_made_are_one_clear_error(tmp_path: Path) -> None:
    """No folder where a file stands; no lock file where a folder stands; the device stays free."""
    (tmp_path / "file").touch()
    locks = DeviceLockManager(lock_dir=tmp_path / "file" / "locks")
    with pytest.raises(DeviceLockError, match="across_processes=False") as caught:
        locks.acquire("cpu", owner="a")
    assert not caught.value.retryable
    locks = DeviceLockManager(lock_dir=tmp_path / "locks", cores=range(4))
    (tmp_path / "locks" / "cpu.0.lock").mkdir(parents=True)
    with pytest.raises(DeviceLockError, match=r"cpu\.0\.lock"):
        locks.acquire("cpu", owner="a")
    (tmp_path / "locks" / "cpu.0.lock").rmdir()
    locks.acquire("cpu", owner="a").release()


def test_a_failing_lock_operation_passes_the_lock_on(
    monkeypatch: pytest.MonkeyPatch, locks: DeviceLockManager
) -> None:
    """A file system without locks: a clear error, and no claim left behind."""
    module = "langchain_swarmkv.scheduling.process_lock"

    def fail(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.lock_descriptor", fail)
        with pytest.raises(DeviceLockError, match="No locks available"):
            locks.acquire("cpu", owner="a")
    locks.acquire_nowait("cpu", owner="a").release()


def test_a_removed_folder_is_made_anew(locks: DeviceLockManager, lock_dir: Path) -> None:
    """Cleaners of temporary files remove it, too, under an engine that lives for weeks."""
    locks.acquire("cpu", owner="a").release()
    shutil.rmtree(lock_dir)
    with locks.acquire("cpu", owner="a"):
        assert stat.S_IMODE(lock_dir.stat().st_mode) == 0o700
        newcomer = DeviceLockManager(lock_dir=lock_dir, cores=range(4))
        with pytest.raises(DeviceLockTimeoutError):
            newcomer.acquire_nowait("cpu", owner="b", num_cores=1)


def test_a_folder_can_be_named_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It goes before the default, and a folder that is given goes before it."""
    monkeypatch.setenv("SWARMKV_LOCK_DIR", str(tmp_path / "named"))
    assert private_lock_dir(None) == tmp_path / "named"
    assert private_lock_dir(tmp_path / "given") == tmp_path / "given"
    DeviceLockManager(cores=[0]).acquire("cpu", owner="a").release()
    assert {path.name for path in (tmp_path / "named").iterdir()} == {
        "cpu.next.lock",
        "cpu.0.lock",
    }


def test_no_temporary_folder_is_an_error_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container with a read-only root."""

    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("SWARMKV_LOCK_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", fail)
    with pytest.raises(DeviceLockError, match=r"No usable temporary .* SWARMKV_LOCK_DIR") as caught:
        DeviceLockManager().acquire("cpu", owner="a")
    assert not caught.value.retryable


def test_removed_lock_files_are_made_anew(locks: DeviceLockManager, lock_dir: Path) -> None:
    """A cleaner of temporary files must not split the processes: all meet at the new file."""
    locks.acquire("cpu", owner="a").release()
    for path in lock_dir.iterdir():
        path.unlink()
    newcomer = DeviceLockManager(lock_dir=lock_dir, cores=range(4))
    with newcomer.acquire("cpu", owner="b"), pytest.raises(DeviceLockTimeoutError):
        locks.acquire_nowait("cpu", owner="a")
    with locks.acquire("cpu", owner="a"), pytest.raises(DeviceLockTimeoutError):
        newcomer.acquire_nowait("cpu", owner="b")


def test_a_manager_that_is_dropped_closes_its_files(lock_dir: Path) -> None:
    """No descriptor stays behind."""

    def open_lock_files() -> int:
        links = (os.path.realpath(f"/dev/fd/{name}") for name in os.listdir("/dev/fd"))
        return sum(link.startswith(str(lock_dir)) for link in links)

    locks = DeviceLockManager(lock_dir=lock_dir, cores=range(4))
    locks.acquire("cpu", owner="a").release()
    assert open_lock_files() == 5  # a turnstile and four cores
    del locks
    assert open_lock_files() == 0
