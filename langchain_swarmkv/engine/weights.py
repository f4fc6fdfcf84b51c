"""The digest of a model file: computed once, remembered for as long as the file is untouched."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["cache_folder", "weights_digest"]

_REMEMBERED_BYTES = 64 << 20
"""Smaller files are digested as fast as a cache is read."""
_SETTLED_SECONDS = 2.0
"""A file changed that shortly ago may change again under the same time stamp."""
_MAX_REMEMBERED = 1000
_BLOCK_BYTES = 1 << 20


def weights_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal.

    That of a large file is remembered by path, size, time of change and inode, in
    `$XDG_CACHE_HOME/swarmkv/digests.json`; a file that was touched is read again.
    """
    path = path.resolve()
    status = path.stat()
    if status.st_size < _REMEMBERED_BYTES:
        return _digest(path)
    version = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    known = _remembered().get(str(path))
    if known is not None and known[:-1] == version:
        return str(known[-1])
    digest = _digest(path)
    is_settled = time.time() - status.st_mtime > _SETTLED_SECONDS
    if is_settled and path.stat().st_mtime_ns == status.st_mtime_ns:
        _remember(str(path), [*version, digest])
    return digest


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where the package keeps what it can make again, `$XDG_CACHE_HOME/swarmkv`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "swarmkv"


def _cache_path() -> Path:
    return cache_folder() / "digests.json"


def _remembered() -> dict[str, list[object]]:
    """What is remembered; nothing, if the file is missing or is not one of ours."""
    with suppress(OSError, ValueError, RuntimeError):
        known = json.loads(_cache_path().read_text(encoding="utf-8"))
        if isinstance(known, dict):
            return {path: v for path, v in known.items() if isinstance(v, list) and len(v) == 5}
    return {}


def _remember(path: str, entry: list[object]) -> None:
    known = {**_remembered(), path: entry}
    newest = dict(list(known.items())[-_MAX_REMEMBERED:])
    # Without a place to write, the file is read again the next time.
    with suppress(OSError, RuntimeError):
        cache = _cache_path()
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = cache.with_name(f".{secrets.token_hex(8)}.tmp")
        temporary.touch(mode=0o600)
        try:
            temporary.write_text(json.dumps(newest), encoding="utf-8")
            temporary.replace(cache)
        finally:
            temporary.unlink(missing_ok=True)
