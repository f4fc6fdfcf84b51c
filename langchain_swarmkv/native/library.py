"""llama.cpp, loaded once, quietly, and never used on the wrong side of a fork."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from langchain_swarmkv.errors import ForkedProcessError

__all__ = ["forget_errors", "last_errors", "library", "library_build", "library_version", "loading"]

_logger = logging.getLogger("langchain_swarmkv.native")
_GGML_LOG_LEVEL_WARN, _GGML_LOG_LEVEL_ERROR = 3, 4  # enum ggml_log_level, ggml.h
_errors: deque[str] = deque(maxlen=20)
_loaded_in: int | None = None
_has_weights = False
"""Whether a model with weights was ever loaded: from then on there are compute threads, which a
forked child does not have."""
_BEGINNING = threading.Lock()
"""Held while the library or a vocabulary is loaded, and while the process forks: no child inherits
one of them half loaded, nor a lock inside that nobody would give back."""


def library() -> ModuleType:
    """The `llama_cpp` module, its backend initialised and its log routed to `logging`.

    A forked child may go on with it if its parent had loaded vocabularies at most, on a CPU.

    Raises:
        ForkedProcessError: the parent of this forked process has loaded weights, or has found a
            GPU; its threads and contexts do not exist here, and the first call that needs them
            would hang.
    """
    if _loaded_in is not None and _loaded_in != os.getpid():
        _take_over()
    return _load()


def _take_over() -> None:
    """Make the library that a forked child inherited its own."""
    global _loaded_in
    if _has_weights or _load().llama_supports_gpu_offload():
        raise ForkedProcessError("llama.cpp was loaded by the parent process.")
    _loaded_in = os.getpid()


@contextmanager
def loading(*, weights: bool) -> Iterator[None]:
    """Load a model within this: with its weights, or its vocabulary alone."""
    global _has_weights
    if weights:  # which may take minutes
        _has_weights = True
        yield
        return
    with _BEGINNING:
        yield


@functools.cache
def _load() -> ModuleType:
    global _loaded_in
    import llama_cpp

    _route_log(llama_cpp)
    llama_cpp.llama_backend_init()
    _loaded_in = os.getpid()
    return llama_cpp


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_BEGINNING.acquire,
        after_in_parent=_BEGINNING.release,
        after_in_child=_BEGINNING.release,
    )


def _route_log(llama_cpp: ModuleType) -> None:
    llama_cpp.llama_log_set(_log_callback(llama_cpp), ctypes.c_void_p(0))


@functools.cache
def _log_callback(llama_cpp: ModuleType) -> Any:
    def log(level: int, text: bytes, user_data: object) -> None:
        message = text.decode("utf-8", errors="replace").strip()
        if not message:
            return
        if level == _GGML_LOG_LEVEL_ERROR:
            _errors.append(message)
        # NOTE: debug only: what matters becomes a typed error, and llama.cpp is talkative.
        _logger.debug("%s", message)

    return llama_cpp.llama_log_callback(log)


def forget_errors() -> None:
    """Have `last_errors` tell what is logged from now on.

    The log has one listener in a process, and others who use llama.cpp may have set theirs.
    """
    _route_log(library())
    _errors.clear()


def last_errors() -> str:
    """What llama.cpp logged as errors since the last call, oldest first."""
    text = "; ".join(_errors)
    _errors.clear()
    return text


def library_version() -> str:
    """Version of llama-cpp-python."""
    return str(library().__version__)


def library_build() -> str:
    """That version, and the version and commit of the llama.cpp that is loaded.

    llama-cpp-python can be built with another llama.cpp, or be told to load one.
    """
    llama_cpp = library()
    from llama_cpp._ggml import libggml

    try:
        commit = ctypes.CFUNCTYPE(ctypes.c_char_p)(("ggml_commit", libggml))()  # ggml.h
    except AttributeError:  # on systems where a library does not pass on the symbols of another
        commit = b"unknown"
    version, commit = llama_cpp.llama_version().decode(), commit.decode()
    return f"{library_version()} (llama.cpp {version}, commit {commit})"
