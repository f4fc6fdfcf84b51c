"""Snapshots in a folder: one file each, shared by any number of processes.

    put:  write a temporary file -> fsync -> (folder lock) evict -> rename -> fsync the folder
    get:  choose by heads -> read the file -> check every byte

A name in the folder always stands for a whole file: readers take no lock, and a process that is
killed leaves at most a temporary file, which whoever opens the folder later removes. A file's time
of modification is that of its last use; what was used longest ago is evicted first.

The folder is looked at again whenever it has changed, so what other processes save is found. Heads
are kept in memory, payloads are not.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from langchain_swarmkv.errors import (
    ConfigurationError,
    SnapshotError,
    SnapshotFormatError,
    SnapshotStorageError,
)
from langchain_swarmkv.snapshots.prefix_index import PrefixIndex, TokenIds
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.snapshot_file import (
    TEMPORARY_SUFFIX,
    SnapshotHead,
    expanded,
    format_error,
    read_head,
    read_snapshot,
    storage_error,
    sync_folder,
    write_temporary,
)
from langchain_swarmkv.snapshots.store import FoundPrefix, SnapshotStore, StoredPrefix
from langchain_swarmkv.snapshots.wrapping import Compression, SnapshotCipher

__all__ = ["DiskSnapshotStore", "StoredFile"]

_log = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<key>[0-9a-f]+)\.swarmkv")
_LOCK_NAME = ".swarmkv-lock"
_LOCK_SECONDS = 10.0
_SHORT_LOCK_SECONDS = 0.1
"""Of a lock that was not let go in time: it may be a stopped process's, which keeps it for long."""
_MAX_TRIES = 100
"""Files that one look-up passes over, before it says that there is none."""
_TIMER_TICK_NS = 50_000_000
"""A folder that was changed this shortly ago may change again under the same time stamp."""
_DAY_NS = 86_400 * 10**9
_YOUNG_SECONDS = 600.0
"""A temporary file this young may be one whose writer has not locked it yet, or waits for the
folder's lock to rename it; far longer than `_LOCK_SECONDS`, for threads wait in a row."""


@dataclass(frozen=True, eq=False)
class StoredFile:
    """One file of the folder."""

    path: Path
    inode: int
    num_bytes: int
    used_ns: int
    """When it was last used, nanoseconds since the epoch."""
    head: SnapshotHead | None
    """None: it cannot be used."""
    error: SnapshotError | None = None
    """Why it cannot."""

    @property
    def is_damaged(self) -> bool:
        """Whether it is no snapshot of this release, whatever the key."""
        return isinstance(self.error, SnapshotFormatError)


class DiskSnapshotStore(SnapshotStore):
    """Keeps snapshots as files in `path`, up to `max_bytes` together, for all processes.

    Files can be read by their owner alone (mode 0600). They hold the documents in a recoverable
    form: give a `key` where that must not be. Pins hold against this object's own evictions.

    Args:
        path: the folder; made if missing (mode 0700). Other files in it are left alone.
        max_bytes: of all snapshot files; a file that is being written comes on top.
        compression: "zstd" for smaller files (needs the package zstandard).
        key: 32 bytes; files are then encrypted (needs the package cryptography). Files under
            another key count, but cannot be used.

    Raises:
        ConfigurationError: an argument is wrong, or a package is missing.
        SnapshotStorageError: the folder cannot be made or read.
    """

    def __init__(
        self,
        path: Path | str,
        max_bytes: int = 16 << 30,
        *,
        compression: Compression | str | None = None,
        key: bytes | None = None,
    ) -> None:
        if not isinstance(max_bytes, int) or max_bytes < 0:
            raise ConfigurationError(
                f"max_bytes is {max_bytes!r}, but must be a whole number, at least 0",
                max_bytes=max_bytes,
            )
        self.path = expanded(path).absolute()
        self.max_bytes = max_bytes
        self._compression = _checked_compression(compression)
        self.cipher = None if key is None else SnapshotCipher(key)
        self._lock = threading.RLock()
        self._committing = threading.Lock()  # the folder's lock tells processes apart, not threads
        self._closed = False
        # Invariant under the lock: the index holds the keys of the files that can be used.
        self._files: dict[str, StoredFile] = {}
        self._index: PrefixIndex[str] = PrefixIndex()
        self._pins: dict[str, int] = {}
        self._looked_at_ns: int | None = None
        self._last_use_ns = 0
        with _as_storage_error(self.path, "used as a folder for snapshots"):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_litter()
        self._folder_lock = FileLock(self.path / _LOCK_NAME, mode=0o600, thread_local=False)
        self._lock_seconds = _LOCK_SECONDS

    @property
    def num_bytes(self) -> int:
        """Bytes of all snapshot files in the folder, whoever wrote them."""
        with self._lock:
            self._look()
            return self._bytes_beside(None)

    def __len__(self) -> int:
        with self._lock:
            self._look()
            return len(self._index)

    def files(self) -> list[StoredFile]:
        """All snapshot files of the folder, those used last first; unusable ones too."""
        with self._lock:
            self._check_open()
            self._look(again=True)
            return sorted(self._files.values(), key=_believed_use, reverse=True)

    # -- the contract ----------------------------------------------------------------------------

    def may_take(self, num_bytes: int) -> bool:
        """See `SnapshotStore.may_take`; compressed it may be smaller than it is."""
        return self._compression is not None or num_bytes <= self.max_bytes

    def put(self, snapshot: KVSnapshot) -> bool:
        """See `SnapshotStore.put`.

        Raises:
            SnapshotStorageError: it cannot be written (a full disk, no permission); what was there
                before still is.
        """
        with self._lock:
            self._check_open()
            self._look()
            # Compressed it may be smaller; then only the file itself tells.
            least = 0 if self._compression else snapshot.num_bytes
            if not self._may_take(snapshot, least):
                return False
        temporary = self._write(snapshot)
        try:
            return self._commit(snapshot, temporary)
        finally:
            with suppress(OSError):  # litter, which is removed later
                temporary.unlink(missing_ok=True)

    def find(
        self, namespace: str, tokens: TokenIds, *, can_cut: bool, min_tokens: int = 1
    ) -> FoundPrefix | None:
        """See `SnapshotStore.find`. Reads heads only."""
        with self._lock:
            self._check_open()
            self._look()
            match = self._index.best(namespace, tokens, can_cut=can_cut)
            if match is None or match.num_tokens < min_tokens:
                return None
            key = min(match.holders, key=lambda key: self._files[key].num_bytes)
            head = self._files[key].head
            assert head is not None  # it is in the index
            return FoundPrefix(
                key,
                match.num_tokens,
                head.num_tokens,
                self._files[key].num_bytes,
                has_logits=head.metadata.logits_bytes > 0,
            )

    def get(
        self, namespace: str, tokens: TokenIds, *, can_cut: bool, min_tokens: int = 1
    ) -> StoredPrefix | None:
        """See `SnapshotStore.get`. A file that turns out to be damaged is passed over."""
        for _ in range(_MAX_TRIES):
            found = self.find(namespace, tokens, can_cut=can_cut, min_tokens=min_tokens)
            if found is None:
                break
            snapshot = self._load(found.key)
            if snapshot is None:
                continue
            # Another process may have put something else under this name since, to the same place.
            shared = tuple(map(int, tokens[: found.num_tokens]))
            if snapshot.namespace == namespace and snapshot.tokens[: found.num_tokens] == shared:
                self._touch(found.key)
                return StoredPrefix(snapshot, found.num_tokens)
            with self._lock:
                self._forget(found.key)
                self._look(again=True)
        return None

    def remove(self, key: str) -> bool:
        """See `SnapshotStore.remove`."""
        with self._lock:
            if self._closed:
                return False
            self._look()
            return self._drop(key)

    def pin(self, key: str) -> bool:
        """See `SnapshotStore.pin`."""
        with self._lock:
            self._check_open()
            self._look()
            if key not in self._index:
                return False
            self._pins[key] = self._pins.get(key, 0) + 1
            return True

    def unpin(self, key: str) -> bool:
        """See `SnapshotStore.unpin`."""
        with self._lock:
            num_pins = self._pins.get(key, 0)
            if num_pins > 1:
                self._pins[key] = num_pins - 1
            else:
                self._pins.pop(key, None)
            return num_pins > 0

    def clear(self) -> None:
        """Delete all snapshot files that this store can use, pinned ones too."""
        with self._lock:
            if not self._closed:
                self._look(again=True)
                for key in [key for key in self._files if key in self._index]:
                    self._drop(key)

    def close(self) -> None:
        """Let go of the heads; the files stay."""
        with self._lock:
            self._closed = True
            for key in list(self._files):
                self._forget(key)

    # -- writing ---------------------------------------------------------------------------------

    def _may_take(self, snapshot: KVSnapshot, num_bytes: int) -> bool:
        """Whether the snapshot may have its key, and fits beside what is pinned."""
        key = snapshot.key
        old = self._files.get(key)
        if old is not None and key in self._pins and not _is_of(old.head, snapshot):
            return False
        pinned = sum(f.num_bytes for k, f in self._files.items() if k in self._pins and k != key)
        return pinned + num_bytes <= self.max_bytes

    def _write(self, snapshot: KVSnapshot) -> Path:
        with _as_storage_error(self.path, "written to"):
            return write_temporary(
                self.path, snapshot, compression=self._compression, cipher=self.cipher
            )

    def _commit(self, snapshot: KVSnapshot, temporary: Path) -> bool:
        # `_lock` comes last, for look-ups wait for it: another process may hold the folder's long.
        with self._committing, self._locked_folder():
            with self._lock:
                if not self._replace(snapshot, temporary):
                    return False
            with _as_storage_error(self.path, "written to"):
                sync_folder(self.path)
            return True

    def _replace(self, snapshot: KVSnapshot, temporary: Path) -> bool:
        self._check_open()
        self._look(again=True)
        with _as_storage_error(self.path, "written to"):
            num_bytes = temporary.stat().st_size
        if not self._may_take(snapshot, num_bytes):
            return False
        key = snapshot.key
        self._evict_until(self.max_bytes - num_bytes, spare=key)
        with _as_storage_error(self.path, "written to"):
            os.utime(temporary, ns=(self._next_use_ns(),) * 2)
            os.replace(temporary, self.path / f"{key}.swarmkv")
        self._look(again=True)
        return True

    @contextmanager
    def _locked_folder(self) -> Iterator[None]:
        try:
            self._folder_lock.acquire(timeout=self._lock_seconds)
        except Timeout:
            self._lock_seconds = _SHORT_LOCK_SECONDS
            raise SnapshotStorageError(
                f"Another process has held the lock of the folder {self.path} for "
                f"{_LOCK_SECONDS:g} s.",
                path=str(self.path),
            ) from None
        except OSError as error:
            raise storage_error(self.path, "locked", error) from error
        self._lock_seconds = _LOCK_SECONDS
        try:
            yield
        finally:
            self._folder_lock.release()

    def _evict_until(self, num_bytes: int, spare: str) -> None:
        """Delete files that are not pinned until the others, without `spare`, fit."""
        for key, _ in sorted(self._files.items(), key=lambda item: _believed_use(item[1])):
            if self._bytes_beside(spare) <= num_bytes:
                return
            if key not in self._pins and key != spare:
                self._drop(key)

    def _bytes_beside(self, spare: str | None) -> int:
        return sum(file.num_bytes for key, file in self._files.items() if key != spare)

    def _drop(self, key: str) -> bool:
        file = self._files.get(key)
        if file is None:
            return False
        with _as_storage_error(file.path, "deleted"):
            file.path.unlink(missing_ok=True)
        self._forget(key)
        self._pins.pop(key, None)
        return True

    # -- reading ---------------------------------------------------------------------------------

    def _look(self, *, again: bool = False) -> None:
        """Learn what the folder holds now; cheap while it has not changed."""
        if self._closed:
            return
        with _as_storage_error(self.path, "read"):
            now_ns, changed_ns = time.time_ns(), os.stat(self.path).st_mtime_ns
            if changed_ns == self._looked_at_ns and not again:
                return
            seen = {}
            with os.scandir(self.path) as entries:
                for entry in entries:
                    match = _NAME.fullmatch(entry.name)
                    if match is not None and not entry.is_dir(follow_symlinks=False):
                        with suppress(FileNotFoundError):  # it has just been evicted
                            seen[match["key"]] = entry.stat(follow_symlinks=False)
        for key in [key for key in self._files if key not in seen]:
            self._forget(key)
        for key, status in seen.items():
            self._note(key, status)
        is_settled = now_ns - changed_ns > _TIMER_TICK_NS
        self._looked_at_ns = changed_ns if is_settled else None

    def _note(self, key: str, status: os.stat_result) -> None:
        known = self._files.get(key)
        is_known = known is not None and (
            (known.inode, known.num_bytes) == (status.st_ino, status.st_size)
            # One that could not be used may have been written again, to the same place even.
            and (known.head is not None or known.used_ns == status.st_mtime_ns)
        )
        if known is not None and is_known:
            self._files[key] = replace(known, used_ns=status.st_mtime_ns)
            return
        self._forget(key)
        path = self.path / f"{key}.swarmkv"
        head, problem = None, None
        try:
            head = _named_head(path, self.cipher)
        except SnapshotError as error:
            if not os.path.lexists(path):
                return
            _log.warning("passed over: %s", error)
            problem = error.with_traceback(None)
        self._files[key] = StoredFile(
            path, status.st_ino, status.st_size, status.st_mtime_ns, head, problem
        )
        if head is not None:
            self._index.insert(head.namespace, head.tokens, key)

    def _load(self, key: str) -> KVSnapshot | None:
        """The snapshot of a file; None: it cannot be used, and is not found any more."""
        with self._lock:
            file = self._files.get(key)
        if file is None:
            return None
        try:
            return read_snapshot(file.path, self.cipher)
        except SnapshotError as error:
            with self._lock:
                if not os.path.lexists(file.path):
                    self._forget(key)
                elif self._files.get(key) is not None:
                    _log.warning("passed over: %s", error)
                    problem = error.with_traceback(None)
                    self._files[key] = replace(self._files[key], head=None, error=problem)
                    self._index.remove(key)
            return None

    def _forget(self, key: str) -> None:
        self._files.pop(key, None)
        self._index.remove(key)

    def _touch(self, key: str) -> None:
        # A folder that may only be read serves as well; its files just do not grow younger.
        with suppress(OSError):
            os.utime(self.path / f"{key}.swarmkv", ns=(self._next_use_ns(),) * 2)

    def _next_use_ns(self) -> int:
        """Now, and later than the last time it was asked."""
        with self._lock:
            self._last_use_ns = max(time.time_ns(), self._last_use_ns + 1)
            return self._last_use_ns

    def _remove_litter(self) -> None:
        """Delete the temporary files of processes that ended while they wrote."""
        for path in self.path.glob(f".*{TEMPORARY_SUFFIX}"):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > _YOUNG_SECONDS and not _is_locked(path):
                    path.unlink()

    def _check_open(self) -> None:
        if self._closed:
            raise SnapshotError("the snapshot store is closed")


def _believed_use(file: StoredFile) -> int:
    """When it was last used, to compare: never, where its time is far ahead.

    A clock that was wrong would keep a file for good.
    """
    return 0 if file.used_ns > time.time_ns() + _DAY_NS else file.used_ns


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        return not lock_descriptor(descriptor, blocking=False)
    finally:
        os.close(descriptor)


def _named_head(path: Path, cipher: SnapshotCipher | None) -> SnapshotHead:
    """The head of a file that bears its key as its name: another one would shadow those that do."""
    head = read_head(path, cipher)
    if head.key != path.stem:
        raise format_error(path, "its name is not its key")
    return head


def _is_of(head: SnapshotHead | None, snapshot: KVSnapshot) -> bool:
    """Whether a file holds a snapshot of the same; compared, because keys may collide."""
    return (
        head is not None
        and (head.identity, head.namespace) == (snapshot.identity, snapshot.namespace)
        and tuple(head.tokens.tolist()) == snapshot.tokens
    )


def _checked_compression(compression: Compression | str | None) -> Compression | None:
    if compression is None:
        return None
    try:
        return Compression(compression)
    except ValueError:
        known = ", ".join(item.value for item in Compression)
        raise ConfigurationError(
            f"compression={compression!r} is unknown; there are {known}, or None."
        ) from None


@contextmanager
def _as_storage_error(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a null byte in a path
        raise storage_error(path, verb, error) from error
