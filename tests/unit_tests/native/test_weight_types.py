"""Names of weight types, and what the table says of them."""

from __future__ import annotations

import llama_cpp
import pytest

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.native.weight_types import (
    WEIGHT_TYPES,
    file_type_name,
    find_weight_type,
    has_fast_kernels,
    is_quantised,
)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_numbers_are_llama_cpp_s(name: str) -> None:
    """The table's number is the one of the constant with that name."""
    assert WEIGHT_TYPES[name].file_type == getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
    assert file_type_name(WEIGHT_TYPES[name].file_type).startswith(name.upper()[:4])


def test_types_are_found_in_any_case() -> None:
    """As files and as people spell them."""
    assert find_weight_type(" Q4_K_M ") is WEIGHT_TYPES["q4_k_m"]


@pytest.mark.parametrize("name", ["", "q4_1", "int8", "q8"])
def test_an_unknown_type_is_refused_with_those_there_are(name: str) -> None:
    """All of them, with what to expect."""
    with pytest.raises(ConfigurationError, match=repr(name)) as refused:
        find_weight_type(name)
    for known in WEIGHT_TYPES.values():
        assert f"{known.name} ({known.note})" in str(refused.value)


def test_a_number_that_llama_cpp_does_not_know_has_a_name_too() -> None:
    """A file of a later version may carry one."""
    assert file_type_name(3) == "Q4_1"
    assert "9999" in file_type_name(9999) or "unknown" in file_type_name(9999)


def test_the_table_of_kernels() -> None:
    """Q4_1 is the slow one that started this; 16 bits and more are not quantised."""
    assert not has_fast_kernels(llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1)
    assert has_fast_kernels(llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0)
    assert is_quantised(llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0)
    assert not is_quantised(llama_cpp.LLAMA_FTYPE_MOSTLY_BF16)
