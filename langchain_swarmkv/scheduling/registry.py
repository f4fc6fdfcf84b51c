"""The engines and vocabularies of this process: equal settings, one engine.

Module-level state, like the sessions of the chat models that use it. A forked child starts with an
empty registry: what the parent loaded does not work there.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from langchain_swarmkv.config import EngineConfig, SnapshotSettings
from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.engine.factory import open_tokenizer
from langchain_swarmkv.errors import ModelNotFoundError
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

__all__ = ["acquire_engine", "acquire_tokenizer", "release_engine"]

_FileVersion = tuple[Path, int, int, int]
_EngineKey = tuple[EngineConfig, SnapshotSettings, tuple[_FileVersion, ...]]


class _Entry:
    """An engine that is being loaded or is in use; `lock` is held while it loads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: SwarmEngine | None = None
        self.num_users = 0

    @property
    def is_dead(self) -> bool:
        """Whether its engine was closed, by hand or by a failure, while it had users."""
        return self.engine is not None and self.engine.closed


@dataclass
class _Registry:
    lock: threading.Lock
    engines: dict[_EngineKey, _Entry]
    tokenizers: dict[_FileVersion, Tokenizer]


def _empty() -> _Registry:
    return _Registry(threading.Lock(), {}, {})


_registry = _empty()


def _forget_parent() -> None:
    global _registry
    _registry = _empty()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


_DEFAULT_SNAPSHOTS = SnapshotSettings()


def acquire_engine(
    config: EngineConfig, snapshots: SnapshotSettings = _DEFAULT_SNAPSHOTS
) -> SwarmEngine:
    """The engine of these settings, loaded if it is not yet; give it back with `release_engine`.

    A file that was replaced under the same path is another model or adapter. Others who ask for the
    same engine wait for the one that loads it; a failed load is tried again by the next.

    Raises:
        ModelError: the model cannot be used.
    """
    key = config, snapshots, tuple(map(_version, config.files))
    with _registry.lock:
        entry = _registry.engines.get(key)
        if entry is None or entry.is_dead:
            entry = _registry.engines[key] = _Entry()
        entry.num_users += 1
    try:
        with entry.lock:
            if entry.engine is None:
                entry.engine = SwarmEngine(config, **snapshots.model_dump())
            return entry.engine
    except BaseException:
        _drop_user(key, entry)
        raise


def release_engine(engine: SwarmEngine) -> None:
    """Give an engine back; the last user closes it. One that is not registered is left alone."""
    with _registry.lock:
        found = [(key, entry) for key, entry in _registry.engines.items() if entry.engine is engine]
    for key, entry in found:
        if _drop_user(key, entry):
            engine.close()


def _drop_user(key: _EngineKey, entry: _Entry) -> bool:
    """Count one user less; True if it was the last of an entry that is still registered."""
    with _registry.lock:
        entry.num_users -= 1
        if entry.num_users > 0 or _registry.engines.get(key) is not entry:
            return False
        del _registry.engines[key]
        return True


def acquire_tokenizer(model_path: Path) -> Tokenizer:
    """The vocabulary of a model file, loaded once a process.

    Raises:
        ModelError: the file cannot be used.
    """
    version = _version(model_path)
    with _registry.lock:
        tokenizer = _registry.tokenizers.get(version)
    if tokenizer is None:
        # Two threads may both load it; one of them is kept, and loading takes no lock.
        loaded = open_tokenizer(model_path)
        with _registry.lock:
            tokenizer = _registry.tokenizers.setdefault(version, loaded)
        if tokenizer is not loaded:
            loaded.close()
    return tokenizer


def _version(path: Path) -> _FileVersion:
    path = path.expanduser().absolute()
    try:
        found = path.stat()
    except OSError as error:
        raise ModelNotFoundError(f"There is no model file at {path}.", path=path) from error
    return path, found.st_size, found.st_mtime_ns, found.st_ino
