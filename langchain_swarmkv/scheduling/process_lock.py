"""One device's lock across processes: a lock file for each unit, behind a turnstile.

A process takes `next`, then the units that it needs, one by one as they become free, then gives
`next` back. Only who holds `next` takes units, so nobody holds some and waits for others that wait
in turn: no deadlock; and one who needs many is not overtaken by those who need few. Whoever waits
holds `next` meanwhile, so a process that releases units and asks again at once queues behind it.
Which of several processes gets `next` is left to chance, equal for all: each tries about once a
millisecond, at uneven intervals.

The operating system frees the locks of a process that died, however it died (flock). It ties them
to the open file, which a forked child shares: so a child closes its copies at once (which does
not unlock), and a lock never outlives the parent that took it.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from filelock import lock_descriptor, unlock_descriptor

from langchain_swarmkv.errors import DeviceLockError

__all__ = ["LOCK_DIR_VARIABLE", "ProcessLock", "lock_folder", "private_lock_dir"]

LOCK_DIR_VARIABLE = "SWARMKV_LOCK_DIR"
"""Environment variable: the folder for lock files where none is given."""
_REMEDY = (
    "Set lock_dir (of ChatSwarmKV, EngineConfig or DeviceLockManager), or the environment "
    f"variable {LOCK_DIR_VARIABLE}, to a folder that this process can write to, on a file system "
    "with locks (under /dev/shm, for instance). Or guard this process alone: SwarmEngine(..., "
    "device_locks=DeviceLockManager(across_processes=False))."
)

_OPENING = threading.Lock()
"""Held while files are opened and while the process forks: a child knows every file it inherits."""
_OPEN_FILES: weakref.WeakSet[_LockFile] = weakref.WeakSet()
_NAMES_ITS_HOLDER = hasattr(os, "pread")
"""Windows locks keep others from reading the file, so there the holder stays unnamed."""


class ProcessLock:
    """Counts the units of one device among processes, by files in `lock_dir`.

    Not thread safe: one thread at a time may be in a call, and one claim at a time may ask.

    Args:
        lock_dir: see `private_lock_dir`.
        device: name of the device, any text.
        units: numbers of the units that this process may take. Other processes may know others.

    Raises:
        DeviceLockError: the files cannot be made.
    """

    def __init__(self, lock_dir: Path, device: str, units: Sequence[int] = (0,)) -> None:
        stem = quote(device, safe="")
        self._next = _LockFile(lock_dir / f"{stem}.next.lock")
        self._files = {unit: _LockFile(lock_dir / f"{stem}.{unit}.lock") for unit in units}
        self._free = list(units)
        """Units that no claim of this process has."""
        self._taken: list[int] = []
        """Units that the claim at the turnstile has by now."""
        self._has_turn = False
        self._in_the_way: int | None = None

    def check(self) -> None:
        """See that the files can be locked.

        Raises:
            DeviceLockError: not on this file system.
        """
        if not self._has_turn and self._next.try_lock():
            self._next.unlock()

    def try_acquire(self, num_units: int = 1) -> tuple[int, ...] | None:
        """Go one step further if possible, never blocking; the units, once they are ours.

        After None, call it again (some may be ours by now), or `give_up`.

        Args:
            num_units: how many; at most those that other claims of this process leave.
        """
        if not self._has_turn:
            self._has_turn = self._next.try_lock()
        if not self._has_turn:
            self._in_the_way = None
            return None
        for unit in [unit for unit in self._free if unit not in self._taken]:
            if len(self._taken) == num_units:
                break
            if self._files[unit].try_lock():
                self._taken.append(unit)
            else:
                self._in_the_way = unit
        if len(self._taken) < num_units:
            return None
        units, self._taken = tuple(self._taken), []
        for unit in units:
            self._free.remove(unit)
            self._files[unit].sign()
        self._give_turn_back()
        return units

    def release(self, units: Sequence[int] = (0,)) -> None:
        """Give back units that `try_acquire` returned."""
        for unit in units:
            self._files[unit].unlock()
        # In their order again: the same ones are tried first each time.
        self._free = [unit for unit in self._files if unit in self._free or unit in units]

    def give_up(self) -> None:
        """Ask no longer: give back the turn at `next`, and what was taken so far."""
        for unit in self._taken:
            self._files[unit].unlock()
        self._taken = []
        self._give_turn_back()

    def holder_pid(self) -> int | None:
        """A process that has units which we need, by its own account; None if unknown."""
        unit = self._in_the_way
        files = list(self._files.values()) if unit is None else [self._files[unit]]
        return next((pid for file in files if (pid := file.signer()) is not None), None)

    def _give_turn_back(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._next.unlock()


class _LockFile:
    """One open lock file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature = b"%-20d\n" % os.getpid()
        self._open()

    def try_lock(self) -> bool:
        try:
            while lock_descriptor(self._descriptor, blocking=False):
                if os.fstat(self._descriptor).st_nlink:
                    return True
                # Somebody cleaned the folder: others lock a new file of this name by now.
                close_removed_file = self._finalizer
                self._open()
                close_removed_file()
        except OSError as error:
            raise _unusable(self._path, error) from error
        return False

    def unlock(self) -> None:
        unlock_descriptor(self._descriptor)

    def sign(self) -> None:
        """Write our process id into the file, for the messages of those who wait."""
        if not _NAMES_ITS_HOLDER or os.pread(self._descriptor, 32, 0) == self._signature:
            return
        try:
            os.pwrite(self._descriptor, self._signature, 0)
        except OSError:
            pass  # NOTE: a full disk costs a name in a message, not the lock.

    def signer(self) -> int | None:
        if not _NAMES_ITS_HOLDER:
            return None
        text = os.pread(self._descriptor, 32, 0).strip()
        return int(text) if text.isdigit() else None

    def close(self) -> None:
        """Close this process's copy; in a forked child, the parent's lock stays as it is."""
        self._finalizer()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with _OPENING:
            try:
                try:
                    self._descriptor = os.open(self._path, flags, 0o600)
                except FileNotFoundError:  # cleaned away, with its folder
                    private_lock_dir(self._path.parent)
                    self._descriptor = os.open(self._path, flags, 0o600)
            except OSError as error:
                raise _unusable(self._path, error) from error
            self._finalizer = weakref.finalize(self, os.close, self._descriptor)
            # Daemon threads may hold the lock until the very end of the process.
            self._finalizer.atexit = False
            _OPEN_FILES.add(self)


def lock_folder(lock_dir: Path | None) -> Path:
    """The folder for lock files, which may not exist yet.

    Args:
        lock_dir: None: what the environment variable SWARMKV_LOCK_DIR names, else
            `$XDG_RUNTIME_DIR/swarmkv-locks` where that is ours, else `swarmkv-locks-<user id>` in
            the temporary directory. Processes exclude each other only if they use the same folder.

    Raises:
        DeviceLockError: none was given, and there is no folder for temporary files.
    """
    try:
        return Path(os.path.abspath(lock_dir or _default_lock_dir()))
    except OSError as error:
        raise DeviceLockError(
            f"There is no folder for the lock files of devices: {error.strerror or error}. "
            f"{_REMEDY}",
            retryable=False,
        ) from error


def private_lock_dir(lock_dir: Path | None) -> Path:
    """That folder, made if missing (mode 0700), refused if others could meddle.

    Raises:
        DeviceLockError: it cannot be made, it belongs to somebody else, or others may write to it.
    """
    folder = lock_folder(lock_dir)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _default_lock_dir() -> Path:
    named = os.environ.get(LOCK_DIR_VARIABLE)
    if named:
        return Path(os.path.expanduser(named))
    if not hasattr(os, "geteuid"):
        return Path(tempfile.gettempdir()) / "swarmkv-locks"
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # NOTE: sudo may keep the variable of another user; a container may lack the folder.
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == user:
        return Path(runtime) / "swarmkv-locks"
    return Path(tempfile.gettempdir()) / f"swarmkv-locks-{user}"


def _check_private(folder: Path) -> None:
    if not hasattr(os, "geteuid"):
        return
    target = folder.stat()
    # A symbolic link must be ours too, not only what it leads to.
    for owner in (folder.lstat().st_uid, target.st_uid):
        if owner != os.geteuid():
            raise DeviceLockError(
                f"The folder {folder} for device locks belongs to user {owner}, and this process "
                f"runs as user {os.geteuid()}. Give another lock_dir, or set {LOCK_DIR_VARIABLE}.",
                lock_dir=str(folder),
                owner_uid=owner,
                retryable=False,
            )
    if target.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DeviceLockError(
            f"Others may write to the folder {folder} for device locks "
            f"(mode {stat.S_IMODE(target.st_mode):04o}). Run `chmod 700` on it, or give another "
            f"lock_dir, or set {LOCK_DIR_VARIABLE}.",
            lock_dir=str(folder),
            mode=stat.S_IMODE(target.st_mode),
            retryable=False,
        )


def _unusable(path: Path, error: OSError) -> DeviceLockError:
    return DeviceLockError(
        f"The lock file or folder {path} cannot be used: {error.strerror or error}. {_REMEDY}",
        path=str(path),
        retryable=False,
    )


def _close_inherited_files() -> None:
    _OPENING.release()
    for lock_file in list(_OPEN_FILES):
        lock_file.close()
    _OPEN_FILES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_OPENING.acquire,
        after_in_parent=_OPENING.release,
        after_in_child=_close_inherited_files,
    )
