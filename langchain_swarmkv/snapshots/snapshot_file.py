"""One snapshot as one file, in the order of its bytes.

    magic 8s, format version u32, metadata bytes u32, tokens u64, payload bytes u64
    metadata       JSON in UTF-8: model identity, namespace, sizes, how the payload is wrapped
    token ids      i32 each; if encrypted, a tag after them
    head digest    SHA-256 of all bytes before it
    payload        the engine's state, logits, the caller's own bytes; compressed, then encrypted
    digest         SHA-256 of all bytes before it

All numbers are little-endian. The sizes must add up to the file's, to the byte, before anything of
that size is read, so a damaged or hostile file costs no more memory than a few times its length (if
compressed, up to 32 times: see `wrapping`). A head can be read without the payload; a payload is
given out only under the second digest, so no native code sees what damage made of it. Digests are
no signature: who can write a file can write any state, and engines look at those once more.

Nothing in a file is executed or resolved: JSON, numbers and bytes.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import secrets
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from filelock import lock_descriptor
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from langchain_swarmkv.engine.identity import ModelIdentity
from langchain_swarmkv.errors import (
    SnapshotError,
    SnapshotFormatError,
    SnapshotKeyError,
    SnapshotStorageError,
)
from langchain_swarmkv.snapshots.snapshot import KVSnapshot, snapshot_key
from langchain_swarmkv.snapshots.wrapping import (
    Compression,
    Part,
    SnapshotCipher,
    compress,
    decompress,
)

__all__ = [
    "TEMPORARY_SUFFIX",
    "SnapshotHead",
    "expanded",
    "format_error",
    "open_no_follow",
    "read_head",
    "read_snapshot",
    "save_snapshot",
    "storage_error",
    "sync_folder",
    "write_snapshot",
    "write_temporary",
]

FORMAT_VERSION = 1
TEMPORARY_SUFFIX = ".swarmkv-tmp"
_MAGIC = b"\x89SWARMKV"
_PREAMBLE = struct.Struct("<8sIIQQ")
_DIGEST_BYTES = 32
_MAX_METADATA_BYTES = 1 << 16
_MAX_NAME_LETTERS = 1000


class _Metadata(BaseModel):
    """The JSON of a file. Fields that a later release adds must come with a new version."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    identity: dict[str, str]
    namespace: str = Field(pattern=r"^[0-9a-f]{64}$")
    model_name: str = Field(max_length=_MAX_NAME_LETTERS)
    state_bytes: int = Field(ge=1)
    logits_bytes: int = Field(ge=0, multiple_of=4)
    extra_bytes: int = Field(ge=0)
    compression: Compression | None
    nonce: str | None = Field(pattern=r"^[0-9a-f]{22}$")
    """Of the encryption; None: not encrypted."""


@dataclass(frozen=True, eq=False)
class SnapshotHead:
    """What a file says of its snapshot, checked against the head's digest."""

    identity: ModelIdentity
    tokens: npt.NDArray[np.int32]
    num_bytes: int
    """Of the whole file."""
    metadata: _Metadata

    @property
    def num_tokens(self) -> int:
        """Tokens of the saved sequence."""
        return len(self.tokens)

    @property
    def namespace(self) -> str:
        """Who may use it."""
        return self.metadata.namespace

    @property
    def key(self) -> str:
        """`snapshot_key` of the snapshot."""
        return snapshot_key(self.identity.digest, self.namespace, self.tokens)


# -- writing ---------------------------------------------------------------------------------------


def write_snapshot(
    file: BinaryIO,
    snapshot: KVSnapshot,
    *,
    compression: Compression | None = None,
    cipher: SnapshotCipher | None = None,
) -> int:
    """Write a snapshot to an open file.

    Args:
        file: at its beginning, empty.
        snapshot: what to write.
        compression: of the payload; left out where it would not make it smaller.
        cipher: encrypts token ids and payload. Identity, namespace and sizes stay readable.

    Returns:
        The bytes written.

    Raises:
        OSError: the file system says no.
    """
    payload = snapshot.state + (snapshot.logits or b"") + snapshot.extra
    packed = compress(payload, compression) if compression else None
    body = payload if packed is None else packed
    tokens = np.asarray(snapshot.tokens, dtype="<i4").tobytes()
    nonce = cipher.new_nonce() if cipher else None
    metadata = _Metadata(
        identity=dataclasses.asdict(snapshot.identity),
        namespace=snapshot.namespace,
        model_name=_writable(snapshot.model_name),
        state_bytes=len(snapshot.state),
        logits_bytes=len(snapshot.logits or b""),
        extra_bytes=len(snapshot.extra),
        compression=None if packed is None else compression,
        nonce=nonce.hex() if nonce else None,
    )
    encoded = metadata.model_dump_json().encode()
    if cipher and nonce:
        tokens = cipher.encrypt(nonce, "tokens", encoded, tokens)
        body = cipher.encrypt(nonce, "payload", encoded, body)
    preamble = _PREAMBLE.pack(_MAGIC, FORMAT_VERSION, len(encoded), snapshot.num_tokens, len(body))
    digest = hashlib.sha256()
    num_bytes = 0
    for part in (preamble, encoded, tokens, None, body, None):
        data = digest.digest() if part is None else part
        file.write(data)
        digest.update(data)
        num_bytes += len(data)
    return num_bytes


def _writable(name: str) -> str:
    """A model's name as UTF-8 can hold it: one from a file's name may be of any bytes."""
    return name.encode(errors="replace").decode()[:_MAX_NAME_LETTERS]


def write_temporary(
    folder: Path,
    snapshot: KVSnapshot,
    *,
    compression: Compression | None = None,
    cipher: SnapshotCipher | None = None,
) -> Path:
    """Write a snapshot to a new file that is safely on disk, for the caller to rename.

    Mode 0600, no link followed. While it is written the file is locked (flock), so that others can
    tell it from litter.

    Raises:
        OSError: the file system says no; then there is no file.
    """
    temporary = folder / f".{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            lock_descriptor(descriptor, blocking=False)  # until it is closed
            write_snapshot(file, snapshot, compression=compression, cipher=cipher)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def save_snapshot(path: Path, snapshot: KVSnapshot, cipher: SnapshotCipher | None = None) -> int:
    """Write a snapshot to a file of any name; what was there before stays until it is whole.

    Returns:
        The bytes of the file.

    Raises:
        SnapshotStorageError: it cannot be written, or something else than a file or a link is
            there: a device, a pipe, a folder.
    """
    try:
        _check_replaceable(path)
        temporary = write_temporary(path.parent, snapshot, cipher=cipher)
        try:
            num_bytes = temporary.stat().st_size
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except (OSError, ValueError) as error:
        raise storage_error(path, "written", error) from error
    return num_bytes


def _check_replaceable(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise OSError("there is something that is no regular file")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder safe on disk.

    Raises:
        OSError: the file system says no.
    """
    if os.name == "nt":
        return  # folders cannot be opened there
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def expanded(path: Path | str) -> Path:
    """The path with its `~` resolved.

    Raises:
        SnapshotStorageError: there is no such home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise storage_error(Path(path), "used", error) from error


def storage_error(path: Path, verb: str, error: Exception) -> SnapshotStorageError:
    """What the file system said, as an error of this package."""
    reason = getattr(error, "strerror", None) or str(error).rstrip(".")
    return SnapshotStorageError(f"{path} cannot be {verb}: {reason}.", path=str(path))


def format_error(path: Path, reason: str) -> SnapshotFormatError:
    """What is wrong with the file, as an error of this package."""
    return SnapshotFormatError(
        f"{path} is no snapshot that can be used: {reason}.", path=str(path), reason=reason
    )


# -- reading ---------------------------------------------------------------------------------------


def open_no_follow(path: Path) -> BinaryIO:
    """Open a regular file of ours for reading, following no link at its end.

    Raises:
        SnapshotStorageError: it cannot be opened.
        SnapshotFormatError: it is a symbolic link, or no regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    # A pipe without a writer would block for ever.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ELOOP and path.is_symlink():
            raise format_error(path, "it is a symbolic link") from None
        raise storage_error(path, "opened", error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise format_error(path, "it is no regular file")
    return os.fdopen(descriptor, "rb")


def read_head(path: Path, cipher: SnapshotCipher | None = None) -> SnapshotHead:
    """Read and check a file's head alone.

    Raises:
        SnapshotFormatError: it is no snapshot file, or its head is damaged.
        SnapshotKeyError: it is encrypted, and there is no key or another one.
        SnapshotStorageError: it cannot be read.
    """
    with open_no_follow(path) as file:
        return _Reader(path, file, cipher).head()


def read_snapshot(path: Path, cipher: SnapshotCipher | None = None) -> KVSnapshot:
    """Read a whole file and check every byte of it.

    Raises:
        SnapshotFormatError, SnapshotKeyError, SnapshotStorageError: as for `read_head`.
    """
    with open_no_follow(path) as file:
        return _Reader(path, file, cipher).snapshot()


class _Reader:
    """Reads one file front to back, and digests what it reads."""

    def __init__(self, path: Path, file: BinaryIO, cipher: SnapshotCipher | None) -> None:
        self._path = path
        self._file = file
        self._cipher = cipher
        self._digest = hashlib.sha256()
        self._num_bytes = os.fstat(file.fileno()).st_size
        self._encoded = b""
        self._payload_bytes = 0

    def head(self) -> SnapshotHead:
        """Everything up to the head's digest."""
        metadata, num_tokens = self._sizes()
        token_bytes = self._take(4 * num_tokens + _overhead(metadata))
        self._check_digest("its head is damaged: the digest differs")
        tokens = np.frombuffer(self._decrypted(metadata, "tokens", token_bytes), dtype="<i4")
        if tokens.min() < 0:
            raise format_error(self._path, f"a token id is {tokens.min()}")
        try:
            identity = ModelIdentity(**metadata.identity)
        except TypeError as error:
            raise format_error(self._path, f"its identity is another release's: {error}") from None
        return SnapshotHead(identity, tokens, self._num_bytes, metadata)

    def snapshot(self) -> KVSnapshot:
        """The whole file."""
        head = self.head()
        metadata = head.metadata
        body = self._take(self._payload_bytes)
        self._check_digest("it is damaged: the digest differs")
        payload = self._unpacked(metadata, self._decrypted(metadata, "payload", body))
        end_of_logits = metadata.state_bytes + metadata.logits_bytes
        try:
            return KVSnapshot(
                identity=head.identity,
                namespace=metadata.namespace,
                tokens=tuple(head.tokens.tolist()),
                state=payload[: metadata.state_bytes],
                logits=payload[metadata.state_bytes : end_of_logits] or None,
                extra=payload[end_of_logits:],
                model_name=metadata.model_name,
            )
        except SnapshotError as error:
            raise format_error(self._path, str(error)) from None

    def _sizes(self) -> tuple[_Metadata, int]:
        """Metadata and number of tokens, once all sizes add up to the file's."""
        if self._num_bytes < _PREAMBLE.size:
            raise format_error(self._path, f"{self._num_bytes} bytes are too few")
        magic, version, metadata_bytes, num_tokens, self._payload_bytes = _PREAMBLE.unpack(
            self._take(_PREAMBLE.size)
        )
        if magic != _MAGIC:
            raise format_error(self._path, "it was not made by this package")
        if version != FORMAT_VERSION:
            age = "a newer" if version > FORMAT_VERSION else "an older"
            raise format_error(
                self._path,
                f"it was made by {age} release: format version {version}, expected "
                f"{FORMAT_VERSION}",
            )
        if metadata_bytes > _MAX_METADATA_BYTES or metadata_bytes > self._num_bytes:
            raise format_error(self._path, f"{metadata_bytes} bytes of metadata are too many")
        metadata = self._metadata(metadata_bytes)
        parts = metadata_bytes, 4 * num_tokens, _overhead(metadata), self._payload_bytes
        expected = _PREAMBLE.size + sum(parts) + 2 * _DIGEST_BYTES
        if expected != self._num_bytes or num_tokens == 0:
            raise format_error(
                self._path,
                f"its parts make {expected} bytes with {num_tokens} tokens, but it has "
                f"{self._num_bytes} bytes",
            )
        return metadata, num_tokens

    def _metadata(self, num_bytes: int) -> _Metadata:
        self._encoded = self._take(num_bytes)
        try:
            return _Metadata.model_validate_json(self._encoded)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise format_error(
                self._path, f"its metadata are wrong: {place} {first['msg']}"
            ) from None

    def _decrypted(self, metadata: _Metadata, part: Part, data: bytes) -> bytes:
        if metadata.nonce is None:
            return data
        if self._cipher is None:
            raise SnapshotKeyError(
                f"The snapshot {self._path} is encrypted: give its key.", path=str(self._path)
            )
        nonce = bytes.fromhex(metadata.nonce)
        return self._cipher.decrypt(nonce, part, self._encoded, data, self._path)

    def _unpacked(self, metadata: _Metadata, data: bytes) -> bytes:
        num_bytes = metadata.state_bytes + metadata.logits_bytes + metadata.extra_bytes
        if metadata.compression is None:
            unpacked: bytes | None = data
        else:
            unpacked = decompress(data, metadata.compression, num_bytes)
        if unpacked is None or len(unpacked) != num_bytes:
            raise format_error(self._path, f"its payload is not one of {num_bytes} bytes")
        return unpacked

    def _check_digest(self, complaint: str) -> None:
        expected = self._digest.digest()
        if self._take(_DIGEST_BYTES) != expected:
            raise format_error(self._path, complaint)

    def _take(self, num_bytes: int) -> bytes:
        try:
            data = self._file.read(num_bytes)
        except OSError as error:
            raise storage_error(self._path, "read", error) from error
        if len(data) != num_bytes:
            raise format_error(self._path, "it was cut while it was read")
        self._digest.update(data)
        return data


def _overhead(metadata: _Metadata) -> int:
    return 0 if metadata.nonce is None else SnapshotCipher.OVERHEAD_BYTES
