"""How bytes are compressed and encrypted on disk; both need an optional package.

Compression is Zstandard (`zstandard`), encryption AES-256-GCM (`cryptography`) under a key of the
caller's. GCM's nonce is random for each file, with one bit of its own for each part of a file, and
the file's metadata is authenticated with both parts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from langchain_swarmkv.errors import ConfigurationError, SnapshotKeyError

__all__ = ["Compression", "Part", "SnapshotCipher", "compress", "decompress"]

Part = Literal["tokens", "payload"]

_MAX_RATIO = 32
"""Cells of 16 bit shrink by a tenth or so, empty ones by more; what claims more is refused, so
that reading a file takes at most this many times its size."""
_ZSTD_LEVEL = 1
_NONCE_BYTES = 12
_KEY_BYTES = 32
_STRIDE = 1 << 26
_PARTS: tuple[Part, ...] = ("tokens", "payload")


class Compression(str, Enum):
    """How a payload is compressed."""

    ZSTD = "zstd"


def compress(data: bytes, compression: Compression) -> bytes | None:
    """The packed bytes; None: they would not be smaller, or by too much to be read again.

    Raises:
        ConfigurationError: the package is missing.
    """
    packed: bytes = _zstandard().ZstdCompressor(level=_ZSTD_LEVEL).compress(data)
    return packed if len(packed) < len(data) <= _MAX_RATIO * len(packed) else None


def decompress(packed: bytes, compression: Compression, num_bytes: int) -> bytes | None:
    """The `num_bytes` bytes that were packed; None: it is something else.

    Raises:
        ConfigurationError: the package is missing.
    """
    zstandard = _zstandard()
    try:
        # The frame says its size and is believed by the library, so it is asked first.
        if not zstandard.frame_content_size(packed) == num_bytes <= _MAX_RATIO * len(packed):
            return None
        data: bytes = zstandard.ZstdDecompressor().decompress(packed, max_output_size=num_bytes)
    except zstandard.ZstdError:
        return None
    return data


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigurationError(
            "Compressed snapshots need the package zstandard: "
            "pip install 'langchain-swarmkv[zstd]'."
        ) from error
    return zstandard


class SnapshotCipher:
    """AES-256-GCM with one key.

    Args:
        key: 32 random bytes, for instance `secrets.token_bytes(32)`. Whoever loses it loses the
            snapshots; whoever has it can read the documents in them.

    Raises:
        ConfigurationError: the key has another length, or the package is missing.
    """

    OVERHEAD_BYTES = 16
    """What encryption adds to a part: GCM's tag."""

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
            seen = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise ConfigurationError(
                f"the key for snapshots must be {_KEY_BYTES} bytes, is {seen}; "
                "make one with secrets.token_bytes(32) and keep it."
            )
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise ConfigurationError(
                "Encrypted snapshots need the package cryptography: "
                "pip install 'langchain-swarmkv[encryption]'."
            ) from error
        self._cipher_of: Callable[..., Any] = lambda *gcm: Cipher(
            algorithms.AES(key), modes.GCM(*gcm)
        )

    def __repr__(self) -> str:
        return "<SnapshotCipher AES-256-GCM>"

    @staticmethod
    def new_nonce() -> bytes:
        """Random bytes for one file, without the byte that tells its parts apart."""
        return secrets.token_bytes(_NONCE_BYTES - 1)

    def encrypt(self, nonce: bytes, part: Part, metadata: bytes, data: bytes) -> bytes:
        """The encrypted bytes, and the tag after them."""
        encryptor = self._cipher_of(_full_nonce(nonce, part)).encryptor()
        encryptor.authenticate_additional_data(metadata)
        pieces = [encryptor.update(piece) for piece in _strides(data)]
        return b"".join([*pieces, encryptor.finalize(), encryptor.tag])

    def decrypt(self, nonce: bytes, part: Part, metadata: bytes, data: bytes, path: Path) -> bytes:
        """The bytes that `encrypt` was given.

        Raises:
            SnapshotKeyError: they were encrypted with another key.
        """
        from cryptography.exceptions import InvalidTag

        view = memoryview(data)
        body, tag = view[: -self.OVERHEAD_BYTES], bytes(view[-self.OVERHEAD_BYTES :])
        decryptor = self._cipher_of(_full_nonce(nonce, part), tag).decryptor()
        decryptor.authenticate_additional_data(metadata)
        pieces = [decryptor.update(piece) for piece in _strides(body)]
        try:
            return b"".join([*pieces, decryptor.finalize()])
        except InvalidTag:
            # The file's digest was right, so the bytes are as they were written.
            raise SnapshotKeyError(
                f"The snapshot {path} was encrypted with another key.", path=str(path)
            ) from None


def _full_nonce(nonce: bytes, part: Part) -> bytes:
    return nonce + bytes([_PARTS.index(part)])


def _strides(data: bytes | memoryview) -> list[memoryview]:
    """Pieces that the library takes at once: below 2 GiB."""
    view = memoryview(data)
    return [view[start : start + _STRIDE] for start in range(0, len(view), _STRIDE)]
