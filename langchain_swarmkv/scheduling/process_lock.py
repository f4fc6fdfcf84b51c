"""One device's lock across processes: two lock files that make a turnstile.

A process takes `next`, then `device`, then gives `next` back. Whoever waits for the device holds
`next` meanwhile, so a process that releases the device and asks again at once queues behind it.
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
from pathlib import Path
from urllib.parse import quote

from filelock import lock_descriptor, unlock_descriptor

from langchain_swarmkv.errors import DeviceLockError

__all__ = ["ProcessLock", "private_lock_dir"]

_OPENING = threading.Lock()
"""Held while files are opened and while the process forks: a child knows every file it inherits."""
_OPEN_FILES: weakref.WeakSet[_LockFile] = weakref.WeakSet()
_NAMES_ITS_HOLDER = hasattr(os, "pread")
"""Windows locks keep others from reading the file, so there the holder stays unnamed."""


class ProcessLock:
    """Mutual exclusion of one device among processes, by files in `lock_dir`.

    Not thread safe: within a process one thread or task at a time may use it.

    Args:
        lock_dir: see `private_lock_dir`.
        device: name of the device, any text.

    Raises:
        DeviceLockError: the files cannot be made.
    """

    def __init__(self, lock_dir: Path, device: str) -> None:
        stem = quote(device, safe="")
        self._next = _LockFile(lock_dir / f"{stem}.next.lock")
        self._device = _LockFile(lock_dir / f"{stem}.device.lock")
        self._has_turn = False
        self._is_held = False

    def try_acquire(self) -> bool:
        """Go one step further if possible, never blocking; True when the device is ours.

        After False, call it again (the turn at `next` may be ours by now), or call `release`.
        """
        if not self._has_turn:
            self._has_turn = self._next.try_lock()
        if self._has_turn and self._device.try_lock():
            self._is_held = True
            self._device.sign()
            self._give_turn_back()
        return self._is_held

    def release(self) -> None:
        """Give back whatever we have: the device, or our turn at `next`."""
        if self._is_held:
            self._is_held = False
            self._device.unlock()
        self._give_turn_back()

    def holder_pid(self) -> int | None:
        """Process that took the device last, by its own account; None if unknown."""
        return self._device.signer()

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
                self._descriptor = os.open(self._path, flags, 0o600)
            except OSError as error:
                raise _unusable(self._path, error) from error
            self._finalizer = weakref.finalize(self, os.close, self._descriptor)
            # Daemon threads may hold the lock until the very end of the process.
            self._finalizer.atexit = False
            _OPEN_FILES.add(self)


def private_lock_dir(lock_dir: Path | None) -> Path:
    """The folder for lock files, made if missing (mode 0700), refused if others could meddle.

    Args:
        lock_dir: None: `$XDG_RUNTIME_DIR/swarmkv-locks` where that is ours, else
            `swarmkv-locks-<user id>` in the temporary directory. Processes exclude each other
            only if they use the same folder.

    Raises:
        DeviceLockError: it cannot be made, it belongs to somebody else, or others may write to it.
    """
    folder = lock_dir if lock_dir is not None else _default_lock_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _default_lock_dir() -> Path:
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
                f"runs as user {os.geteuid()}. Give another lock_dir.",
                lock_dir=str(folder),
                owner_uid=owner,
                retryable=False,
            )
    if target.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DeviceLockError(
            f"Others may write to the folder {folder} for device locks "
            f"(mode {stat.S_IMODE(target.st_mode):04o}). Run `chmod 700` on it, or give another "
            "lock_dir.",
            lock_dir=str(folder),
            mode=stat.S_IMODE(target.st_mode),
            retryable=False,
        )


def _unusable(path: Path, error: OSError) -> DeviceLockError:
    return DeviceLockError(
        f"The lock file or folder {path} cannot be used: {error.strerror or error}. Give a "
        "lock_dir that this process can write to, on a file system with locks, or "
        "across_processes=False.",
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
