"""The disk store: the contract of all stores, and what is its own: processes, crashes, files."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any, BinaryIO, ClassVar

import pytest
from filelock import FileLock, lock_descriptor

from langchain_swarmkv.errors import (
    ConfigurationError,
    SnapshotError,
    SnapshotFormatError,
    SnapshotStorageError,
)
from langchain_swarmkv.snapshots import disk_store, snapshot_file
from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore
from langchain_swarmkv.snapshots.store import StoredPrefix
from tests.support.fuzz import length
from tests.support.processes import WITHOUT_LANGCHAIN
from tests.unit_tests.snapshots.store_contract import (
    NAMESPACE,
    PLENTY,
    ROOM_FOR_TWO,
    A,
    B,
    C,
    SnapshotStoreContract,
    snapshot_of,
    stored,
)

KEY = bytes(range(32))


class TestDiskSnapshotStore(SnapshotStoreContract):
    """Runs the conformance suite."""

    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _folder(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder:
            self._root, self._count = Path(folder), 0
            yield

    def make_store(self, max_bytes: int) -> DiskSnapshotStore:
        self._count += 1
        return DiskSnapshotStore(self._root / str(self._count), max_bytes, **self.options)


class TestEncryptedDiskSnapshotStore(TestDiskSnapshotStore):
    """With a key."""

    options: ClassVar[dict[str, Any]] = {"key": KEY}


class TestCompressedDiskSnapshotStore(TestDiskSnapshotStore):
    """With zstd, which random bytes do not need."""

    options: ClassVar[dict[str, Any]] = {"compression": "zstd"}


def get(store: DiskSnapshotStore, snapshot: Any) -> StoredPrefix | None:
    return store.get(snapshot.namespace, snapshot.tokens, can_cut=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".swarmkv-lock")


# -- files -----------------------------------------------------------------------------------------


def test_a_new_store_on_the_folder_finds_everything(tmp_path: Path) -> None:
    """What a process left is there for the next, least recently used still first."""
    with DiskSnapshotStore(tmp_path / "deep" / "folder", ROOM_FOR_TWO) as store:
        store.put(A)
        store.put(B)
        get(store, A)
    with DiskSnapshotStore(tmp_path / "deep" / "folder", ROOM_FOR_TWO) as again:
        assert get(again, A) == StoredPrefix(A, A.num_tokens)
        assert again.put(C)
        assert get(again, B) is None
        assert get(again, A) is not None


@pytest.mark.parametrize("days", [2, 36_500, 3_000_000])
def test_a_time_of_use_in_the_future_is_not_believed(days: int, tmp_path: Path) -> None:
    """Such a file is the first to go, and is young again once it has been used."""
    with DiskSnapshotStore(tmp_path, ROOM_FOR_TWO) as store:
        store.put(A)
        store.put(B)
        future = (time.time() + days * 86_400,) * 2
        os.utime(tmp_path / f"{B.key}.swarmkv", future)
        assert [file.path.stem for file in store.files()] == [A.key, B.key]
        store.put(C)
        assert [stored(store, each) for each in (A, B, C)] == [True, False, True]
        os.utime(tmp_path / f"{C.key}.swarmkv", future)
        get(store, C)
        store.put(B)
        assert [stored(store, each) for each in (A, B, C)] == [False, True, True]


def test_files_and_folder_are_private(tmp_path: Path) -> None:
    """Modes 0600 and 0700, whatever the umask allows; no salt, and nothing else, in the names."""
    old = os.umask(0)
    try:
        with DiskSnapshotStore(tmp_path / "folder", PLENTY) as store:
            store.put(snapshot_of([1, 2, 3], salt="tenant-seven"))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    (path,) = (tmp_path / "folder").glob("*.swarmkv")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path / "folder") == [path.name]
    assert b"tenant-seven" not in path.read_bytes()


def test_a_replaced_file_is_a_new_file(tmp_path: Path) -> None:
    """Never written in place: an open reader keeps the old one."""
    with DiskSnapshotStore(tmp_path, PLENTY) as store:
        store.put(A)
        (path,) = tmp_path.glob("*.swarmkv")
        before, inode = path.read_bytes(), path.stat().st_ino
        with path.open("rb") as reader:
            store.put(A)
            assert path.stat().st_ino != inode
            assert reader.read() == before


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    """Names that are not ours are neither counted, read nor deleted."""
    others = ["notes.txt", "README.swarmkv", "x.swarmkv.bak", ".hidden"]
    for name in others:
        (tmp_path / name).write_text("mine")
    with DiskSnapshotStore(tmp_path, ROOM_FOR_TWO) as store:
        for snapshot in (A, B, C):
            assert store.put(snapshot)
        assert len(store) == 2
        store.clear()
        assert store.num_bytes == 0
    assert names(tmp_path) == sorted(others)


def test_links_are_not_followed(tmp_path: Path) -> None:
    """H4: a link under a snapshot's name, or at a temporary one: nothing outside is touched."""
    outside = tmp_path / "outside"
    with DiskSnapshotStore(tmp_path / "other", PLENTY) as other:
        other.put(A)
        (path,) = (tmp_path / "other").glob("*.swarmkv")
        outside.write_bytes(path.read_bytes())
    before = outside.read_bytes()
    folder = tmp_path / "folder"
    with DiskSnapshotStore(folder, PLENTY) as store:
        (folder / f"{A.key}.swarmkv").symlink_to(outside)
        assert get(store, A) is None
        assert store.put(A)
        assert get(store, A) == StoredPrefix(A, A.num_tokens)
        store.clear()
    assert outside.read_bytes() == before


@pytest.mark.parametrize("name", [".swarmkv-lock", ".0-1-x.swarmkv-tmp", f"{'0' * 64}.swarmkv"])
def test_a_link_or_a_folder_under_a_name_of_ours_harms_nothing(name: str, tmp_path: Path) -> None:
    """H4: made before by another: what it points to stays, and others are stored or refused."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(outside)
    os.utime(folder / name, (0, 0), follow_symlinks=False)
    with DiskSnapshotStore(folder, ROOM_FOR_TWO) as store:
        if name == ".swarmkv-lock":
            with pytest.raises(SnapshotStorageError, match="symbolic link"):
                store.put(A)
        else:
            assert store.put(A)
            assert get(store, A) is not None
    assert outside.read_text() == "mine"
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    os.utime(folder / name, (0, 0))
    with DiskSnapshotStore(folder, ROOM_FOR_TWO) as store:
        for snapshot in (A, B, C):
            if name == ".swarmkv-lock":
                with pytest.raises(SnapshotStorageError, match="locked"):
                    store.put(snapshot)
            else:
                assert store.put(snapshot)
                assert get(store, snapshot) is not None
    assert (folder / name).is_dir()


def test_a_folder_behind_a_link_of_ours_works(tmp_path: Path) -> None:
    """Such as a cache on another disk."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with DiskSnapshotStore(tmp_path / "link", PLENTY) as store:
        assert store.put(A)
    with DiskSnapshotStore(tmp_path / "real", PLENTY) as store:
        assert get(store, A) is not None


@pytest.mark.parametrize("path", ["a\0b", "/proc/nothing/here", "file/below", "~no-such-user/x"])
def test_a_folder_that_cannot_be_is_a_typed_error(path: str, tmp_path: Path) -> None:
    """At once, with the path in it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotStorageError):
        DiskSnapshotStore(path if path.startswith("~") else tmp_path / path)


def test_wrong_arguments_are_refused() -> None:
    """Before any folder is made."""
    wrong = (-1, None, "20G", 1e9)
    for options in (
        *({"max_bytes": value} for value in wrong),
        {"compression": "gzip"},
        {"key": b"short"},
    ):
        with pytest.raises(ConfigurationError):
            DiskSnapshotStore("never-made", **options)  # type: ignore[arg-type]
    assert not Path("never-made").exists()


# -- damage ----------------------------------------------------------------------------------------


def test_a_damaged_file_is_passed_over_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Head or payload: a miss, the next best is found, room is made of it first or last."""
    longer = snapshot_of([*A.tokens, 77])
    with DiskSnapshotStore(tmp_path, PLENTY) as store:
        store.put(A)
        store.put(longer)
        path = tmp_path / f"{longer.key}.swarmkv"
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                found = store.get(NAMESPACE, longer.tokens, can_cut=True)
                assert found == StoredPrefix(A, A.num_tokens)
        assert len(caplog.records) == 1
        assert str(path) in caplog.text
        (tmp_path / f"{A.key}.swarmkv").write_bytes(b"nothing")
        assert store.get(NAMESPACE, longer.tokens, can_cut=True) is None
        assert len(store) == 0
        assert [file.head for file in store.files()] == [None, store.files()[1].head]
        assert store.put(A)
        assert get(store, A) == StoredPrefix(A, A.num_tokens)


def test_a_file_overwritten_in_place_is_passed_over(tmp_path: Path) -> None:
    """`cp b a`, of equal size: neither a hang nor another one's state, and the good one is found.

    Before this store reads its head, or after.
    """
    with DiskSnapshotStore(tmp_path, PLENTY) as store, DiskSnapshotStore(tmp_path) as late:
        for snapshot in (A, B):
            store.put(snapshot)
        assert len(store) == 2
        path = tmp_path / f"{A.key}.swarmkv"
        path.write_bytes((tmp_path / f"{B.key}.swarmkv").read_bytes())
        for each in (store, late):
            assert get(each, A) is None
            for _ in range(2):
                assert get(each, B) == StoredPrefix(B, B.num_tokens)
            (error,) = [file.error for file in each.files() if file.head is None]
            assert isinstance(error, SnapshotFormatError)
            assert error.facts["reason"] == "its name is not its key"
        assert store.put(A)
        assert get(store, A) == StoredPrefix(A, A.num_tokens)


def test_a_look_up_ends_whatever_the_files_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that never agrees with what is read, as if another wrote in between each time."""
    with DiskSnapshotStore(tmp_path, PLENTY) as store:
        store.put(A)
        monkeypatch.setattr(disk_store, "read_snapshot", lambda *args: B)
        assert get(store, A) is None
        monkeypatch.undo()
        assert get(store, A) is not None


def test_files_under_another_key_are_not_seen_and_make_room(tmp_path: Path) -> None:
    """They are another's: a miss, counted, evicted as the least recently used."""
    with DiskSnapshotStore(tmp_path, ROOM_FOR_TWO, key=bytes(32)) as theirs:
        theirs.put(A)
        theirs.put(B)
    with DiskSnapshotStore(tmp_path, ROOM_FOR_TWO, key=KEY) as ours:
        assert get(ours, A) is None
        assert len(ours) == 0
        assert ours.num_bytes > 20_000
        assert ours.put(C)
        assert get(ours, C) is not None
    assert len(names(tmp_path)) == 2


class _FullDisk:
    """A file that takes so many bytes."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file = file
        self._room = room

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)


def test_the_folder_is_made_safe_after_each_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5: a name that is not on disk is gone with the power: by `put` and by `save_snapshot`."""
    names_at_sync: list[set[str]] = []
    sync = os.fsync

    def recorded(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            assert os.path.samestat(os.fstat(descriptor), tmp_path.stat())
            names_at_sync.append(set(names(tmp_path)))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    with DiskSnapshotStore(tmp_path, PLENTY) as store:
        store.put(A)
    assert names_at_sync == [{f"{A.key}.swarmkv"}]
    snapshot_file.save_snapshot(tmp_path / "saved", A)
    assert names_at_sync[1:] == [{f"{A.key}.swarmkv", "saved"}]


@pytest.mark.parametrize("room", [0, 10, 500, 5000, 10_300])
def test_a_full_disk_leaves_the_old_state(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5: a typed error, no litter, and what was there is still found."""
    write = snapshot_file.write_snapshot
    with DiskSnapshotStore(tmp_path, PLENTY) as store:
        store.put(A)
        monkeypatch.setattr(
            snapshot_file,
            "write_snapshot",
            lambda file, *args, **options: write(_FullDisk(file, room), *args, **options),
        )
        for snapshot in (A, B):
            with pytest.raises(SnapshotStorageError, match="No space left"):
                store.put(snapshot)
        monkeypatch.undo()
        assert get(store, A) == StoredPrefix(A, A.num_tokens)
        assert get(store, B) is None
        assert names(tmp_path) == [f"{A.key}.swarmkv"]
        assert store.put(B)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_at_the_last_moment_leaves_the_old_state(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5: file systems may find that out when they are made to write."""

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with DiskSnapshotStore(tmp_path, PLENTY) as store:
        store.put(A)
        monkeypatch.setattr(os, call, refuse)
        for snapshot in (A, B):
            with pytest.raises(SnapshotStorageError, match="No space left"):
                store.put(snapshot)
        monkeypatch.undo()
        assert get(store, A) == StoredPrefix(A, A.num_tokens)
        assert names(tmp_path) == [f"{A.key}.swarmkv"]
        assert store.put(B)


def test_a_folder_that_may_only_be_read() -> None:
    """Its snapshots are found; a put is a typed error."""
    with _as_no_superuser():
        folder = Path(tempfile.mkdtemp())
        try:
            with DiskSnapshotStore(folder, PLENTY) as store:
                store.put(A)
            folder.chmod(0o500)
            with DiskSnapshotStore(folder, PLENTY) as store:
                assert get(store, A) == StoredPrefix(A, A.num_tokens)
                with pytest.raises(SnapshotStorageError):
                    store.put(B)
        finally:
            folder.chmod(0o700)
            shutil.rmtree(folder)


@contextmanager
def _as_no_superuser() -> Iterator[None]:
    """Root may write anywhere, so that nothing would be refused."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


# -- processes -------------------------------------------------------------------------------------

_PRELUDE = (
    WITHOUT_LANGCHAIN
    + """
import os, random, time
sys.path.insert(0, os.getcwd())
from contextlib import contextmanager
from pathlib import Path
from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore
from tests.unit_tests.snapshots.store_contract import snapshot_of
folder = Path(sys.argv[1])
"""
)


def start(code: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + dedent(code), str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_another_process_saves_and_deletes_is_seen(tmp_path: Path) -> None:
    """By a store that was open all the time, in the order in which it happens."""
    code = """
        with DiskSnapshotStore(folder) as store:
            for line in sys.stdin: pass
            store.put(snapshot_of([5, 6, 7]))
    """
    snapshot = snapshot_of([5, 6, 7])
    with DiskSnapshotStore(tmp_path) as store:
        assert get(store, snapshot) is None
        assert (
            subprocess.run(
                [sys.executable, "-c", _PRELUDE + dedent(code), str(tmp_path)],
                stdin=subprocess.DEVNULL,
                timeout=100,
            ).returncode
            == 0
        )
        assert get(store, snapshot) == StoredPrefix(snapshot, 3)
        with DiskSnapshotStore(tmp_path) as other:
            other.clear()
        assert get(store, snapshot) is None
        assert (len(store), store.num_bytes) == (0, 0)


def test_a_folder_that_was_quiet_for_long_is_looked_at_again(tmp_path: Path) -> None:
    """It is not read while its time stamp stays, but what another store does after that is seen."""
    with DiskSnapshotStore(tmp_path) as store, DiskSnapshotStore(tmp_path) as other:
        other.put(A)
        for _ in range(2):
            os.utime(tmp_path, (1e9, 1e9))
            assert len(store) == 1
            assert store._looked_at_ns == 10**18
        other.put(B)
        assert get(store, B) == StoredPrefix(B, B.num_tokens)
        os.utime(tmp_path, (2e9, 2e9))
        assert stored(store, A)
        other.remove(A.key)
        assert not stored(store, A)


_KILLER = """
    import signal
    rng = random.Random(int(sys.argv[2]))
    num_turns = int(sys.argv[3])
    for turn in range(num_turns):
        saved, has_saved = os.pipe()
        saver = os.fork()
        if not saver:
            with DiskSnapshotStore(folder, 400_000) as store:
                while True:
                    store.put(snapshot_of([1, 2, 3, rng.randrange(12)], size=50_000))
                    os.write(has_saved, b"!")
        os.close(has_saved)  # so that a saver that ended by itself is seen
        for _ in range(rng.randrange(3)):
            assert os.read(saved, 1), "a save failed"
        if turn % 2:
            time.sleep(rng.uniform(0.0, 0.01))
        else:
            while not list(folder.glob(f".{saver}-*")):
                assert os.waitpid(saver, os.WNOHANG) == (0, 0)
                time.sleep(0.0005)
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
        os.close(saved)
        rng.random()  # the next one saves in another order
    print(f"killed {num_turns}")
"""


@pytest.mark.long
def test_kill_9_at_any_moment_leaves_whole_files(tmp_path: Path) -> None:
    """E5: up to 200 writers, four at a time, on few names; read meanwhile.

    Each is killed after some saves: while it writes the next one, or at a random moment.
    """
    rng, num_turns = random.Random(7), length(12, 50)
    expected = {(1, 2, 3, n): snapshot_of([1, 2, 3, n], size=50_000) for n in range(12)}
    num_reads = 0
    killers = [start(_KILLER, tmp_path, str(seed), str(num_turns)) for seed in range(4)]
    with DiskSnapshotStore(tmp_path, 400_000) as reader:
        while any(killer.poll() is None for killer in killers):
            tokens = (1, 2, 3, rng.randrange(12))
            found = reader.get(NAMESPACE, tokens, can_cut=False)
            if found is not None:
                assert found.snapshot == expected[tokens]
                num_reads += 1
        for killer in killers:
            stdout, stderr = killer.communicate(timeout=100)
            assert stdout == f"killed {num_turns}\n", stderr
        assert num_reads
        assert len(reader) == len(reader.files()) > 4
        for file in reader.files():
            snapshot = snapshot_file.read_snapshot(file.path)
            assert snapshot == expected[snapshot.tokens]
        assert reader.num_bytes <= 400_000
    litter = list(tmp_path.glob(".*-tmp"))
    assert litter  # some ended while they wrote
    for path in litter:
        os.utime(path, (0, 0))
    DiskSnapshotStore(tmp_path).close()
    assert all(name.endswith(".swarmkv") for name in names(tmp_path))


@pytest.mark.long
def test_two_writers_of_one_file_leave_one_whole(tmp_path: Path) -> None:
    """E5: `save_snapshot` from two processes at once, read all the time; nothing else is left."""
    code = """
        from langchain_swarmkv.snapshots.snapshot_file import save_snapshot
        snapshot = snapshot_of([1, 2, int(sys.argv[2])], size=50_000)
        while not (folder / "enough").exists():
            save_snapshot(folder / "document.kv", snapshot)
    """
    path = tmp_path / "document.kv"
    writers = [start(code, tmp_path, str(number)) for number in range(2)]
    expected = [snapshot_of([1, 2, number], size=50_000) for number in range(2)]
    num_seen = [0, 0]
    while min(num_seen) < length(30, 200):
        assert all(writer.poll() is None for writer in writers)
        if path.exists():
            num_seen[expected.index(snapshot_file.read_snapshot(path))] += 1
    (tmp_path / "enough").touch()
    for writer in writers:
        assert writer.communicate(timeout=100)[1] == ""
        assert writer.returncode == 0
    (tmp_path / "enough").unlink()
    assert names(tmp_path) == ["document.kv"]


@pytest.mark.parametrize("key", ["../x", "/etc/x", "a/../../x", "..\\x", "x\0y", "", ".", "CON"])
def test_a_key_that_is_a_path_names_nothing(key: str, tmp_path: Path) -> None:
    """H4: also where the path leads to a snapshot."""
    (tmp_path / "x.swarmkv").write_text("mine")
    with DiskSnapshotStore(tmp_path / "folder", PLENTY) as store:
        store.put(A)
        assert not store.remove(key)
        assert not store.pin(key)
        assert not store.unpin(key)
        assert len(store) == 1
    assert (tmp_path / "x.swarmkv").read_text() == "mine"


def test_a_file_that_is_being_written_is_no_litter(tmp_path: Path) -> None:
    """However old it looks, while its writer lives."""
    path = tmp_path / ".0-1-x.swarmkv-tmp"
    with path.open("wb") as file:
        lock_descriptor(file.fileno(), blocking=False)
        os.utime(path, (0, 0))
        DiskSnapshotStore(tmp_path).close()
        assert path.exists()
    DiskSnapshotStore(tmp_path).close()
    assert not path.exists()


def test_a_file_that_waits_for_the_lock_is_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written and no longer locked, as old as a wait can make it, it outlives another's start."""
    with DiskSnapshotStore(tmp_path) as store:
        commit = store._commit

        def delayed(snapshot: Any, temporary: Path) -> bool:
            waited = time.time() - 10 * disk_store._LOCK_SECONDS
            os.utime(temporary, (waited, waited))
            DiskSnapshotStore(tmp_path).close()
            return commit(snapshot, temporary)

        monkeypatch.setattr(store, "_commit", delayed)
        assert store.put(A)
        assert get(store, A) == StoredPrefix(A, A.num_tokens)


def test_a_temporary_file_that_is_gone_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted by a person or a cleaner before it got its name."""
    with DiskSnapshotStore(tmp_path) as store:
        write = store._write

        def written_and_deleted(snapshot: Any) -> Path:
            temporary = write(snapshot)
            temporary.unlink()
            return temporary

        monkeypatch.setattr(store, "_write", written_and_deleted)
        with pytest.raises(SnapshotStorageError, match="No such file"):
            store.put(A)


def test_a_lock_that_is_held_for_long_delays_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a stopped process's: the next ones only ask, until it is free again."""
    monkeypatch.setattr(disk_store, "_LOCK_SECONDS", 0.3)
    monkeypatch.setattr(disk_store, "_SHORT_LOCK_SECONDS", 0.01)
    waits: list[float] = []
    with DiskSnapshotStore(tmp_path) as store:
        acquire = store._folder_lock.acquire

        def recorded(timeout: float) -> Any:
            waits.append(timeout)
            return acquire(timeout=timeout)

        monkeypatch.setattr(store._folder_lock, "acquire", recorded)
        with FileLock(tmp_path / ".swarmkv-lock"):
            for _ in range(3):
                with pytest.raises(SnapshotStorageError, match="lock"):
                    store.put(A)
        assert names(tmp_path) == []
        for snapshot in (A, B):
            assert store.put(snapshot)
    assert waits == [0.3, 0.01, 0.01, 0.01, 0.3]


@pytest.mark.long
def test_several_processes_share_one_folder(tmp_path: Path) -> None:
    """Four put, find, remove and evict at once: never a wrong byte, never over the limit."""
    code = """
        rng = random.Random(int(sys.argv[2]))
        with DiskSnapshotStore(folder, 150_000) as store:
            for _ in range(int(sys.argv[3])):
                tokens = [1, rng.randrange(10), 3]
                snapshot = snapshot_of(tokens)
                store.put(snapshot)
                found = store.get(snapshot.namespace, tokens, can_cut=False)
                assert found is None or found.snapshot == snapshot
                if rng.random() < 0.2:
                    store.remove(snapshot.key)
                assert store.num_bytes <= 150_000
    """
    num_rounds = str(length(40, 150))
    processes = [start(code, tmp_path, str(seed), num_rounds) for seed in range(4)]
    for process in processes:
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr
    with DiskSnapshotStore(tmp_path, 150_000) as store:
        assert all(file.head is not None for file in store.files())


def test_a_pin_holds_against_the_own_evictions(tmp_path: Path) -> None:
    """It is this object's, and gone with it."""
    with DiskSnapshotStore(tmp_path, ROOM_FOR_TWO) as store:
        store.put(A)
        store.pin(A.key)
        with DiskSnapshotStore(tmp_path, ROOM_FOR_TWO) as other:
            other.put(B)
            other.put(C)
            assert not stored(other, A)
        assert not store.pin(A.key)
        assert store.put(A)


def test_a_closed_store_keeps_its_files(tmp_path: Path) -> None:
    """Closing is not clearing."""
    store = DiskSnapshotStore(tmp_path)
    store.put(A)
    store.close()
    store.clear()
    assert store.num_bytes == 0
    with pytest.raises(SnapshotError, match="closed"):
        store.files()
    with DiskSnapshotStore(tmp_path) as again:
        assert get(again, A) == StoredPrefix(A, A.num_tokens)
