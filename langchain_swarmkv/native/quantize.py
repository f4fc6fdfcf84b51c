"""Repacks a GGUF file to another weight type, whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from langchain_swarmkv.errors import ConfigurationError, ModelFormatError
from langchain_swarmkv.native.file_facts import FileFacts, read_file_facts
from langchain_swarmkv.native.weight_types import WeightType
from langchain_swarmkv.native.worker_process import run_worker

__all__ = ["estimated_bytes", "quantize"]


def quantize(
    source: FileFacts,
    target: Path,
    weight_type: WeightType,
    *,
    n_threads: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> FileFacts:
    """Convert a file that was loaded before; replaces `target`.

    Args:
        source: The model. Quantised ones are converted too, and lose a little more.
        target: The file to write. What is written first is a hidden file beside it.
        weight_type: The type of most matrices; llama.cpp keeps some at a higher precision.
        n_threads: Threads that convert.
        on_progress: Called with the tensors begun and the tensors there are.

    Returns:
        The facts of the new file, which was loaded after it was written.

    Raises:
        ConfigurationError: the target cannot be written, or its disk has no room.
        ModelFormatError: llama.cpp cannot convert the file.
    """
    _check_room(target.parent, estimated_bytes(source, weight_type))
    partial = target.with_name(f".swarmkv-{uuid.uuid4().hex}.partial")
    try:
        _convert(source.path, partial, weight_type, n_threads, on_progress)
        written = _verify(source, partial, weight_type)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return replace(written, path=target, name=source.name)


def estimated_bytes(source: FileFacts, weight_type: WeightType) -> int:
    """About how large the converted file will be."""
    vocabulary_bytes = source.file_bytes - source.weights_bytes
    return vocabulary_bytes + int(source.num_parameters * weight_type.bytes_per_parameter)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigurationError(
            f"no room in {str(folder)!r}: the file will have about {num_bytes / 1e6:,.0f} MB, and "
            f"{free / 1e6:,.0f} MB are free."
        )


def _convert(
    source: Path,
    target: Path,
    weight_type: WeightType,
    n_threads: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    arguments = (str(weight_type.file_type), str(n_threads))
    reason = run_worker("quantize", source, target, *arguments, on_tensor=on_progress)
    if reason is None:
        return
    if "iostream error" in reason:  # what C++ says of a stream that takes no more
        raise ConfigurationError(
            f"could not write a file of type {weight_type.label} in {str(target.parent)!r}: the "
            "folder may not be written, or its disk is full."
        )
    raise ModelFormatError(
        f"llama.cpp could not convert {source} to {weight_type.label}: {reason}.", path=source
    )


def _verify(source: FileFacts, written: Path, weight_type: WeightType) -> FileFacts:
    facts = read_file_facts(written)
    expected = (source.num_parameters, source.num_layers, source.n_vocab, weight_type.file_type)
    if (facts.num_parameters, facts.num_layers, facts.n_vocab, facts.file_type) != expected:
        raise ModelFormatError(
            f"llama.cpp converted {source.path} to another model: {facts.num_parameters} "
            f"parameters of type {facts.file_type_name}, from {source.num_parameters}.",
            path=source.path,
        )
    return facts
