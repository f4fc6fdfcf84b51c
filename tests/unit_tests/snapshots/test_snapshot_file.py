"""One file: what is written comes back, and nothing else is ever given out."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import socket
import stat
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_swarmkv.errors import (
    ConfigurationError,
    SnapshotError,
    SnapshotFormatError,
    SnapshotKeyError,
    SnapshotStorageError,
)
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.snapshot_file import (
    read_head,
    read_snapshot,
    save_snapshot,
    write_snapshot,
)
from langchain_swarmkv.snapshots.wrapping import Compression, SnapshotCipher
from tests.support.fuzz import length
from tests.unit_tests.snapshots.store_contract import A

KEY = bytes(range(32))
CIPHER = SnapshotCipher(KEY)
WRAPPINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zstd": {"compression": Compression.ZSTD},
    "encrypted": {"cipher": CIPHER},
    "both": {"compression": Compression.ZSTD, "cipher": CIPHER},
}
REPETITIVE = dataclasses.replace(A, state=b"cell" * 5000 + os.urandom(10_000), logits=b"1234" * 9)


def encoded(snapshot: KVSnapshot, **options: Any) -> bytes:
    file = io.BytesIO()
    assert write_snapshot(file, snapshot, **options) == len(file.getvalue())
    return file.getvalue()


def read(data: bytes, path: Path, cipher: SnapshotCipher | None = None) -> KVSnapshot:
    path.write_bytes(data)
    return read_snapshot(path, cipher)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("snapshot", [A, REPETITIVE])
def test_what_is_written_comes_back(snapshot: KVSnapshot, wrapping: str, tmp_path: Path) -> None:
    """Whole, however it is wrapped; the head alone says the same of it."""
    options = WRAPPINGS[wrapping]
    path = tmp_path / "file"
    cipher = options.get("cipher")
    assert read(encoded(snapshot, **options), path, cipher) == snapshot
    head = read_head(path, cipher)
    assert tuple(head.tokens.tolist()) == snapshot.tokens
    assert (head.identity, head.namespace) == (snapshot.identity, snapshot.namespace)
    assert head.num_bytes == path.stat().st_size
    assert head.key == snapshot.key


def test_compression_is_left_out_where_it_does_not_pay() -> None:
    """Random bytes stay as they are; others get smaller."""
    assert len(encoded(A, compression=Compression.ZSTD)) == len(encoded(A))
    assert len(encoded(REPETITIVE, compression=Compression.ZSTD)) < 0.6 * len(encoded(REPETITIVE))


def test_encryption_hides_document_and_state(tmp_path: Path) -> None:
    """Token ids and state are not readable, and two files of one snapshot have no part alike."""
    tokens = struct.pack("<4i", *A.tokens)
    plain, hidden, again = encoded(A), encoded(A, cipher=CIPHER), encoded(A, cipher=CIPHER)
    assert tokens in plain
    assert A.state in plain
    assert tokens not in hidden
    assert all(A.state[i : i + 16] not in hidden for i in range(0, len(A.state) - 16, 16))
    assert hidden[-1000:] != again[-1000:]
    for cipher in (None, SnapshotCipher(bytes(32))):
        with pytest.raises(SnapshotKeyError, match="key"):
            read(hidden, tmp_path / "file", cipher)
        with pytest.raises(SnapshotKeyError, match="key"):
            read_head(tmp_path / "file", cipher)


def test_the_parts_of_a_file_are_encrypted_apart() -> None:
    """GCM under one nonce twice gives both texts away: equal bytes must not stay equal."""
    token_bytes = struct.pack("<4i", *A.tokens)
    data = encoded(dataclasses.replace(A, state=token_bytes), cipher=CIPHER)
    hidden = data[HEADER.size + HEADER.unpack_from(data)[2] :][: len(token_bytes)]
    assert data.count(hidden) == 1


@pytest.mark.parametrize("key", [b"", b"short", bytes(31), bytes(33), "x" * 32, None])
def test_a_key_of_another_length_is_refused(key: Any) -> None:
    """Not padded, not hashed: a weak key would pass unseen."""
    with pytest.raises(ConfigurationError, match="32 bytes"):
        SnapshotCipher(key)
    assert "\\x" not in repr(CIPHER)


# -- hostile files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_flipped_byte_and_every_cut_is_refused(wrapping: str, tmp_path: Path) -> None:
    """E1: 400 places over a file, and 100 lengths: one typed error each, that names the file."""
    options = WRAPPINGS[wrapping]
    data = encoded(dataclasses.replace(REPETITIVE, state=REPETITIVE.state[-2000:]), **options)
    path, cipher = tmp_path / "file", options.get("cipher")
    for place in {*range(120), *range(0, len(data), len(data) // 280), len(data) - 1}:
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(SnapshotFormatError, match="file"):
            read(bytes(damaged), path, cipher)
    for end in range(0, len(data), max(1, len(data) // 100)):
        with pytest.raises(SnapshotFormatError, match="file"):
            read(data[:end], path, cipher)
    with pytest.raises(SnapshotFormatError):
        read(data + b"\0", path, cipher)


HEADER = struct.Struct("<8sIIQQ")


def with_header(data: bytes, **fields: int) -> bytes:
    """The file with other numbers in its preamble."""
    names = ("magic", "version", "metadata", "tokens", "payload")
    values = dict(zip(names, HEADER.unpack_from(data), strict=True))
    return HEADER.pack(*{**values, **fields}.values()) + data[HEADER.size :]


FOREIGN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "three bytes": lambda data: b"abc",
    "a picture": lambda data: b"\x89PNG\r\n\x1a\n" + bytes(100),
    "a model": lambda data: b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + bytes(200),
    "the preamble alone": lambda data: data[: HEADER.size],
    "most tokens": lambda data: with_header(data, tokens=(1 << 64) - 1),
    "as many tokens as 32 bits": lambda data: with_header(data, tokens=(1 << 32) - 1),
    "no tokens": lambda data: with_header(data, tokens=0),
    "a large payload": lambda data: with_header(data, payload=1 << 62),
    "a payload that wraps around": lambda data: with_header(data, payload=(1 << 64) - 16),
    "much metadata": lambda data: with_header(data, metadata=(1 << 32) - 1),
    "no metadata": lambda data: with_header(data, metadata=0),
    "a pickle": lambda data: pickle.dumps(_Trap()),
    "a zip": lambda data: b"PK\x03\x04" + bytes(300),
}


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("sprung",)


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4, H5: a typed error with path and reason, with no more memory than the file is long."""
    monkeypatch.chdir(tmp_path)
    data = FOREIGN[kind](encoded(A))
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotFormatError, match="file") as caught:
            read(data, tmp_path / "file")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.facts["path"] == str(tmp_path / "file")
    assert caught.value.facts["reason"]
    assert peak < 3 * len(data) + 500_000
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(("version", "age"), [(2, "newer"), (1 << 31, "newer"), (0, "older")])
def test_another_format_version_says_so(version: int, age: str, tmp_path: Path) -> None:
    """Whoever must update learns which side."""
    with pytest.raises(SnapshotFormatError, match=f"{age} release"):
        read(with_header(encoded(A), version=version), tmp_path / "file")


def resealed(data: bytes, metadata: bytes) -> bytes:
    """The plain file with other metadata and right digests: what an attacker can write."""
    import hashlib

    magic, version, old, tokens, payload = HEADER.unpack_from(data)
    head = HEADER.pack(magic, version, len(metadata), tokens, payload) + metadata
    rest = data[HEADER.size + old :]
    head += rest[: 4 * tokens]
    head += hashlib.sha256(head).digest()
    head += rest[4 * tokens + 32 : -32]
    return head + hashlib.sha256(head).digest()


def test_metadata_are_checked_whoever_sealed_them(tmp_path: Path) -> None:
    """H5: nested lists, constructors, other types, unknown and missing fields, sizes that lie."""
    data = encoded(A)
    length = HEADER.unpack_from(data)[2]
    good = json.loads(data[HEADER.size : HEADER.size + length])
    assert read(resealed(data, json.dumps(good).encode()), tmp_path / "file") == A
    bad: list[Any] = [
        {},
        [],
        None,
        {**good, "extra": 1},
        {**good, "identity": {"lc": "1", "type": "constructor", "id": "os.system"}},
        {**good, "identity": {**good["identity"], "weights": ["list"]}},
        {**good, "identity": {}},
        {**good, "namespace": "../../etc/passwd"},
        {**good, "namespace": None},
        {**good, "state_bytes": good["state_bytes"] - 1},
        {**good, "state_bytes": -1},
        {**good, "state_bytes": "10000"},
        {**good, "state_bytes": 0, "logits_bytes": good["state_bytes"]},
        {**good, "logits_bytes": 4},
        {**good, "compression": "zstd"},
        {**good, "compression": "pickle"},
        {**good, "nonce": "00" * 11},
        {**good, "nonce": "zz"},
    ]
    texts = [json.dumps(item).encode() for item in bad]
    texts += [
        b"[" * 10**6,
        b"[" * 10**6 + b"]" * 10**6,
        b"[" * 60_000,
        b"[" * 30_000 + b"]" * 30_000,
        b'{"a":' * 10_000,
        b"\xff\xfe",
        b"NaN",
        b"",
    ]
    for text in texts:
        with pytest.raises(SnapshotError):
            read(resealed(data, text), tmp_path / "file", CIPHER if b"00" * 11 in text else None)


def test_metadata_are_bounded(tmp_path: Path) -> None:
    """However right they are, what nobody writes is not parsed."""
    data = encoded(A)
    good = data[HEADER.size : HEADER.size + HEADER.unpack_from(data)[2]]
    assert read(resealed(data, good.ljust(1 << 16)), tmp_path / "file") == A
    with pytest.raises(SnapshotFormatError, match="65537 bytes of metadata are too many"):
        read(resealed(data, good.ljust((1 << 16) + 1)), tmp_path / "file")


def test_a_small_file_cannot_unpack_to_a_large_one(tmp_path: Path) -> None:
    """A compressed payload that claims more than 32 times its size, rightly or not."""
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    stored = encoded(dataclasses.replace(A, state=bomb))
    length = HEADER.unpack_from(stored)[2]
    metadata = json.loads(stored[HEADER.size : HEADER.size + length])
    metadata |= {"compression": "zstd", "state_bytes": 50_000_000}
    data = resealed(stored, json.dumps(metadata).encode())
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotFormatError):
            read(data, tmp_path / "file")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A folder, a link, a pipe, nothing, a name that cannot be: no waiting, and a typed error."""
    (tmp_path / "good").write_bytes(encoded(A))
    (tmp_path / "link").symlink_to(tmp_path / "good")
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "link", "pipe", "absent", "a\0b", "x" * 300):
        for reader in (read_head, read_snapshot):
            with pytest.raises((SnapshotStorageError, SnapshotFormatError)):
                reader(tmp_path / name)


def test_a_link_is_named_as_one(tmp_path: Path) -> None:
    """Also one that leads nowhere; a loop in the folders above is the file system's matter."""
    (tmp_path / "good").write_bytes(encoded(A))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, target in (("link", "good"), ("lost", "absent")):
        (tmp_path / name).symlink_to(tmp_path / target)
        for reader in (read_head, read_snapshot):
            with pytest.raises(SnapshotFormatError, match="it is a symbolic link"):
                reader(tmp_path / name)
    with pytest.raises(SnapshotStorageError):
        read_head(tmp_path / "loop" / "good")


def test_only_files_and_links_are_replaced(tmp_path: Path) -> None:
    """A pipe, a socket or a folder stays what it is, and nothing is left beside it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
    before = {path.name: path.lstat().st_mode for path in tmp_path.iterdir()}
    for name in ("pipe", "socket", "folder"):
        with pytest.raises(SnapshotStorageError, match=f"{name} cannot be written: .*no regular"):
            save_snapshot(tmp_path / name, A)
    assert {path.name: path.lstat().st_mode for path in tmp_path.iterdir()} == before
    for _ in range(2):
        save_snapshot(tmp_path / "link", A)
        assert read_snapshot(tmp_path / "link") == A
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize(
    ("name", "written"),
    [("m\udcff.gguf", "m?.gguf"), ("é" * 1001, "é" * 1000), ("\x01" * 5000, "\x01" * 1000)],
)
def test_any_models_name_can_be_written(name: str, written: str, tmp_path: Path) -> None:
    """It is for people: bytes that are no UTF-8 are replaced, and what is long is cut."""
    assert read(encoded(dataclasses.replace(A, model_name=name)), tmp_path / "file") == (
        dataclasses.replace(A, model_name=written)
    )


@pytest.mark.long
@settings(max_examples=length(200, 2000), deadline=None)
@given(data=st.data())
def test_mutations_never_get_through(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Bytes replaced, cut out, doubled or put in: a typed error, or the file as it was."""
    original = encoded(dataclasses.replace(A, state=A.state[:300]))
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(mutated)))
        end = data.draw(st.integers(start, min(len(mutated), start + 40)))
        mutated[start:end] = data.draw(st.binary(max_size=40))
    path = tmp_path_factory.getbasetemp() / "mutated"
    if bytes(mutated) == original:
        return
    with pytest.raises(SnapshotFormatError):
        read(bytes(mutated), path)
