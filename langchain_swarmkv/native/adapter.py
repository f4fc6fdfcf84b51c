"""LoRA adapters: a GGUF of matrix pairs A, B whose product is added to the model's matrices.

llama.cpp looks at little more than two sides of each matrix, and its asserts find the rest at the
first decode. So what it takes for granted is checked here, on the file's header.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from langchain_swarmkv.errors import ModelFormatError, ModelLoadError, UnsupportedModelError
from langchain_swarmkv.native.library import forget_errors, last_errors, library
from langchain_swarmkv.native.model import ModelHandle
from langchain_swarmkv.native.model_file import check_gguf

__all__ = ["load_adapter"]

# enum gguf_type, gguf.h: bytes of the numbers
_NUMBER_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
# enum ggml_type, ggml.h: bytes of an element. F32, F16, Q8_0 and BF16 are what converters write;
# for some others there are no kernels, and the first decode ends the process.
_ELEMENT_BYTES = {0: 4, 1: 2, 8: 34 / 32, 30: 2}
_MAX_DIMENSIONS = 4


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    """Always four numbers, the fastest first."""
    type: int

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape) * _ELEMENT_BYTES[self.type])


class _Header(NamedTuple):
    values: dict[str, str | float | None]
    """Strings and F32 numbers; None for any other type, whose value does not matter here."""
    tensors: dict[str, _Tensor]


def load_adapter(model: ModelHandle, path: Path, scale: float) -> None:
    """Give an adapter to the model: contexts made from now on compute with it.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: it is damaged, or no LoRA adapter.
        UnsupportedModelError: it is of another architecture, or of a kind that llama.cpp cannot
            apply.
        ModelLoadError: llama.cpp refuses it, for it does not fit this model.
    """
    check_gguf(path)
    try:
        header = _read_header(path)
        _check_values(header, model)
        _check_tensors(header, model)
    except (_DamageError, OSError) as error:
        raise ModelFormatError(f"{path} is no LoRA adapter: {error}.", path=path) from error
    except _MismatchError as error:
        raise UnsupportedModelError(
            f"The adapter {path} cannot be used with {model.path}: {error}.", path=path
        ) from error
    forget_errors()
    pointer = library().llama_adapter_lora_init(model.pointer, os.fsencode(path))
    if not pointer:
        raise ModelLoadError(
            f"llama.cpp could not load the adapter {path} for {model.path}: "
            f"{last_errors() or 'no reason given'}.",
            path=path,
        )
    model.adapters.append((pointer, scale))


class _DamageError(Exception):
    """Why a file is no adapter."""


class _MismatchError(Exception):
    """Why an adapter is none for this model."""


def _check_values(header: _Header, model: ModelHandle) -> None:
    for key, expected in {"general.type": "adapter", "adapter.type": "lora"}.items():
        seen = header.values.get(key)
        if seen != expected:
            raise _DamageError(f"its {key} is {seen!r}, not {expected!r}")
    ours = model.metadata("general.architecture")
    theirs = header.values.get("general.architecture")
    if theirs != ours:
        raise _MismatchError(f"it is for models of architecture {theirs!r}, and this is {ours!r}")
    if not isinstance(header.values.get("adapter.lora.alpha", 0.0), float):
        raise _DamageError("its adapter.lora.alpha is not a number of type F32")
    if "adapter.alora.invocation_tokens" in header.values:
        raise _MismatchError("it is to be active behind certain tokens only (aLoRA)")
    if model.file_type == library().LLAMA_FTYPE_MOSTLY_NVFP4:
        raise _MismatchError("llama.cpp applies no adapters to NVFP4 weights")


def _check_tensors(header: _Header, model: ModelHandle) -> None:
    """Pairs that multiply; that they fit the model's matrices is llama.cpp's to see."""
    pairs: dict[str, dict[str, _Tensor]] = {}
    for name, tensor in header.tensors.items():
        part = name[-len(".lora_x") :]
        if part in (".lora_a", ".lora_b"):
            # As llama.cpp does it, wherever it stands in the name.
            pairs.setdefault(name.replace(part, ""), {})[part] = tensor
        elif not name.endswith("_norm.weight"):
            raise _DamageError(f"its tensor {name!r} is none of a pair lora_a, lora_b")
    if not pairs:
        raise _DamageError("it has no tensors")
    num_experts = model.metadata(f"{model.metadata('general.architecture')}.expert_count")
    for name, pair in pairs.items():
        if len(pair) < 2:
            raise _DamageError(f"the pair of {name!r} lacks lora_a or lora_b")
        a, b = pair[".lora_a"].shape, pair[".lora_b"].shape
        if name.endswith("token_embd.weight"):
            # NOTE: where the output has no matrix of its own, llama.cpp multiplies it with this
            # pair too, whose sides are the other way round there: an assert.
            raise _MismatchError("it changes the token embeddings")
        # Experts are picked by number, unchecked.
        depth = num_experts if "exps" in name else "1"
        if any((str(shape[2]), shape[3]) != (depth, 1) for shape in (a, b)) or a[1] != b[0]:
            raise _DamageError(f"the shapes {a} and {b} of {name!r} make no pair")


def _read_header(path: Path) -> _Header:
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        reader.take(8)  # `check_gguf` has seen them
        num_tensors, num_values = reader.number("<Q"), reader.number("<Q")
        values = {reader.text(): reader.value() for _ in range(num_values)}
        if values.get("general.type") not in ("adapter", None):
            raise _DamageError(f"it is a {values['general.type']}")
        tensors = {reader.text(): reader.tensor() for _ in range(num_tensors)}
        reader.skip(sum(tensor.num_bytes for tensor in tensors.values()))
    return _Header(values, tensors)


class _Reader:
    """Reads a GGUF's parts, never beyond the file's end."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file = file
        self._num_bytes_left = num_bytes

    def skip(self, num_bytes: int) -> None:
        self._count(num_bytes)
        self._file.seek(num_bytes, os.SEEK_CUR)

    def take(self, num_bytes: int) -> bytes:
        self._count(num_bytes)
        return self._file.read(num_bytes)

    def _count(self, num_bytes: int) -> None:
        if num_bytes > self._num_bytes_left:
            raise _DamageError("it is cut off, or its header is damaged")
        self._num_bytes_left -= num_bytes

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return int(value)

    def text(self) -> str:
        text = self.take(self.number("<Q")).decode("utf-8", errors="replace")
        if "\0" in text:
            raise _DamageError("a name or text has a zero byte, where llama.cpp would cut it")
        return text

    def value(self) -> str | float | None:
        kind = self.number("<I")
        if kind == _STRING:
            return self.text()
        if kind == _FLOAT32:
            (value,) = struct.unpack("<f", self.take(4))
            return float(value)
        if kind == _ARRAY:
            self._skip_array(self.number("<I"), self.number("<Q"))
        else:
            self.skip(_number_bytes(kind))
        return None

    def _skip_array(self, kind: int, count: int) -> None:
        if kind != _STRING:
            self.skip(count * _number_bytes(kind))
            return
        for _ in range(count):
            self.skip(self.number("<Q"))

    def tensor(self) -> _Tensor:
        num_dimensions = self.number("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise _DamageError(f"a tensor has {num_dimensions} dimensions")
        shape = [self.number("<Q") for _ in range(num_dimensions)]
        kind = self.number("<I")
        self.skip(8)  # where its data is
        if kind not in _ELEMENT_BYTES or 0 in shape:
            raise _DamageError(f"a tensor has type {kind} and shape {shape}")
        return _Tensor((*shape, *[1] * (_MAX_DIMENSIONS - num_dimensions)), kind)


def _number_bytes(kind: int) -> int:
    if kind not in _NUMBER_BYTES:
        raise _DamageError(f"a value has the unknown type {kind}")
    return _NUMBER_BYTES[kind]
