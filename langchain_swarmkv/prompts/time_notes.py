"""Notes beside snapshots: at which instant a document on disk was rendered.

A process that has neither the document nor a reference to it would render it at another instant,
and not find its snapshot, since the first tokens differ. A note holds for as long as the snapshot
is there. Its name is a digest of the messages and the salt, and it holds no text.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.clock import as_instant
from langchain_swarmkv.snapshots.snapshot_file import TEMPORARY_SUFFIX

__all__ = ["read_note", "write_note"]

_SUFFIX = ".time"
_MAX_NOTE_BYTES = 1024
_ORPHAN_SECONDS = 7 * 86400
"""A note without its snapshot, which may be written later, is deleted after so long."""

_log = logging.getLogger(__name__)


def read_note(folder: Path, digests: Sequence[bytes]) -> datetime | None:
    """The instant of the longest run of messages whose snapshot is in the folder.

    Args:
        folder: where snapshots are.
        digests: one for each run, the longest last.
    """
    for digest in reversed(digests):
        found = _read(folder, folder / f"{digest.hex()}{_SUFFIX}")
        if found is not None:
            return found
    return None


def _read(folder: Path, path: Path) -> datetime | None:
    try:
        with path.open("rb") as file:
            note = json.loads(file.read(_MAX_NOTE_BYTES))
        instant, key = as_instant(note["prompt_time"]), note["snapshot"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, ConfigurationError):
        return None
    is_key = isinstance(key, str) and key.isalnum()
    return instant if is_key and (folder / f"{key}.swarmkv").is_file() else None


def write_note(folder: Path, digest: bytes, prompt_time: str, snapshot_key: str) -> None:
    """Say when the document of a snapshot was rendered; without it, the snapshot is not found."""
    temporary = folder / f".{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    note = json.dumps({"prompt_time": prompt_time, "snapshot": snapshot_key})
    try:
        temporary.write_text(note)
        os.replace(temporary, folder / f"{digest.hex()}{_SUFFIX}")
        _remove_orphans(folder)
    except OSError as error:
        _log.warning(
            "No note of the document's time in %s (%s): another process without its reference "
            "computes the document again.",
            folder,
            error.strerror,
        )
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _remove_orphans(folder: Path) -> None:
    oldest = time.time() - _ORPHAN_SECONDS
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            if path.stat().st_mtime < oldest and _read(folder, path) is None:
                path.unlink()
