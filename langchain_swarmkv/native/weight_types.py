"""How a GGUF file stores its weights, and which of these types have fast kernels on CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.native.library import library

__all__ = [
    "WEIGHT_TYPES",
    "WeightType",
    "file_type_name",
    "find_weight_type",
    "has_fast_kernels",
    "is_quantised",
]


@dataclass(frozen=True)
class WeightType:
    """A type that a model can be repacked to."""

    name: str
    file_type: int
    """Of `enum llama_ftype`, llama.h."""
    bytes_per_parameter: float
    """Of a model all of whose matrices have this type; mixtures come out a little larger."""
    note: str
    """What to expect of it on a CPU, in a few words."""

    @property
    def label(self) -> str:
        """The name as files carry it, `Q8_0`."""
        return self.name.upper()


_TYPES = (
    WeightType("f16", 1, 2.0, "nothing lost; large, so decode is slow"),
    WeightType("bf16", 32, 2.0, "nothing lost; fast only where the CPU computes in BF16"),
    WeightType("q8_0", 7, 34 / 32, "hardly anything lost; fast prefill"),
    WeightType("q6_k", 18, 210 / 256, "little lost; fast kernels on Arm only"),
    WeightType("q5_k_m", 17, 0.72, "some quality lost; fast kernels on Arm only"),
    WeightType("q4_k_m", 15, 0.62, "some quality lost; small and fast"),
    WeightType("q4_0", 2, 0.60, "more quality lost; small, the fastest prefill"),
)
WEIGHT_TYPES = {weight_type.name: weight_type for weight_type in _TYPES}
"""By name, the most precise first."""

# Types for which llama.cpp multiplies matrices in blocks on x86 and Arm alike: repacked when loaded
# (ggml-cpu/repack.cpp) or in llamafile/sgemm.cpp. The others take one dot product after the other.
_FAST_FILE_TYPES = frozenset({0, 1, 2, 7, 14, 15, 25, 32})
_UNQUANTISED_FILE_TYPES = frozenset({0, 1, 32})


def find_weight_type(name: str) -> WeightType:
    """The type of that name, in upper or lower case.

    Raises:
        ConfigurationError: there is none; the message lists them.
    """
    weight_type = WEIGHT_TYPES.get(name.strip().lower())
    if weight_type is None:
        listed = "; ".join(f"{known.name} ({known.note})" for known in _TYPES)
        raise ConfigurationError(f"there is no weight type {name!r}. There are: {listed}.")
    return weight_type


def file_type_name(file_type: int) -> str:
    """The name of a value of `enum llama_ftype`, as llama.cpp spells it."""
    name = library().llama_ftype_name(file_type)
    return name.decode() if name else f"type {file_type}"


def has_fast_kernels(file_type: int) -> bool:
    """Whether llama.cpp has fast prefill kernels for it on common CPUs."""
    return file_type in _FAST_FILE_TYPES


def is_quantised(file_type: int) -> bool:
    """Whether the weights were rounded to fewer than 16 bits."""
    return file_type not in _UNQUANTISED_FILE_TYPES
