"""How the installed llama.cpp was built, and the devices it sees."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_swarmkv.native.library import library, library_version

__all__ = ["BuildFacts", "Device", "parse_system_info", "read_build_facts"]


@dataclass(frozen=True)
class Device:
    """A processor that llama.cpp can compute on."""

    name: str
    description: str
    total_bytes: int
    """Its memory; 0: not told."""


@dataclass(frozen=True)
class BuildFacts:
    """The llama.cpp library in use."""

    llama_cpp_python: str
    supports_gpu_offload: bool
    features: Mapping[str, tuple[str, ...]]
    """What is compiled in, by backend: `{"CPU": ("AVX2", "FMA", ...)}`."""
    devices: tuple[Device, ...]


def read_build_facts() -> BuildFacts:
    """Ask the library."""
    llama_cpp = library()
    return BuildFacts(
        llama_cpp_python=library_version(),
        supports_gpu_offload=bool(llama_cpp.llama_supports_gpu_offload()),
        features=parse_system_info(llama_cpp.llama_print_system_info().decode(errors="replace")),
        devices=tuple(_devices()),
    )


def parse_system_info(text: str) -> dict[str, tuple[str, ...]]:
    """Read `CPU : AVX2 = 1 | FMA = 0 | CUDA : ARCHS = 900 | `.

    A feature with another value than 0 or 1 keeps it: `ARCHS=900`.
    """
    features: dict[str, list[str]] = {}
    backend = ""
    for part in text.split("|"):
        label, separator, value = part.partition("=")
        if ":" in label:
            backend, _, label = label.partition(":")
            features.setdefault(backend.strip(), [])
        name, value = label.strip(), value.strip()
        if separator and value != "0":
            features.setdefault(backend.strip(), []).append(
                name if value == "1" else f"{name}={value}"
            )
    return {backend: tuple(names) for backend, names in features.items()}


def _devices() -> Iterator[Device]:
    ggml = _ggml()
    for index in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        yield Device(
            name=_text(ggml.ggml_backend_dev_name(device)),
            description=_text(ggml.ggml_backend_dev_description(device)),
            total_bytes=total.value,
        )


def _ggml() -> Any:
    """The shared library under llama.cpp; llama_cpp declares none of these (ggml-backend.h)."""
    from llama_cpp._ggml import libggml

    library()  # devices are registered there
    size_pointer = ctypes.POINTER(ctypes.c_size_t)
    for name, arguments, result in (
        ("count", [], ctypes.c_size_t),
        ("get", [ctypes.c_size_t], ctypes.c_void_p),
        ("name", [ctypes.c_void_p], ctypes.c_char_p),
        ("description", [ctypes.c_void_p], ctypes.c_char_p),
        ("memory", [ctypes.c_void_p, size_pointer, size_pointer], None),
    ):
        function = getattr(libggml, f"ggml_backend_dev_{name}")
        function.argtypes, function.restype = arguments, result
    return libggml


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", errors="replace").strip()
