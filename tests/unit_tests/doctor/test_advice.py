"""Advice follows from rates alone."""

from __future__ import annotations

import pytest

from langchain_swarmkv.config import FlashAttention
from langchain_swarmkv.doctor.advice import Advice, TypeRates, advise
from langchain_swarmkv.doctor.rates import DecodeRate, Rates

Q4_1, Q8_0, F16 = 3, 7, 1


def rates(prefill: float, *steps: float) -> Rates:
    """From tokens a second, and seconds a step of 1, 4 and 16 branches."""
    return Rates(
        document_tokens=1000,
        prefill_tokens_per_second=prefill,
        decode=tuple(
            DecodeRate(number, seconds, number / seconds)
            for number, seconds in zip((1, 4, 16), steps, strict=True)
        ),
    )


PLAIN = rates(150, 0.026, 0.044, 0.121)
FLASH = rates(220, 0.074, 0.224, 0.983)


def given(plain: Rates, flash: Rates | None, weight_type: str | None = None) -> TypeRates:
    name = weight_type.upper() if weight_type else "Q4_1"
    return TypeRates(weight_type, name, 10**8, plain, flash)


def advice(*rows: TypeRates, file_type: int = Q4_1, fit: int = 20, can_pair: bool = True) -> Advice:
    return advise(
        rows,
        file_type=file_type,
        n_threads=2,
        num_branches_that_fit=fit,
        can_pair_kernels=can_pair,
    )


def test_the_kernel_that_is_faster_in_all_is_chosen() -> None:
    """A CPU's fan-out decode is slow with flash attention; a GPU's is not."""
    on_cpu = advice(given(PLAIN, FLASH))
    assert on_cpu.flash_attention is FlashAttention.OFF
    assert any("flash attention is 1.5 times as fast as plain" in text for text in on_cpu.reasons)
    assert any("plain attention is 8.1 times as fast as flash" in text for text in on_cpu.reasons)
    assert advice(given(FLASH, PLAIN)).flash_attention is FlashAttention.ON
    alone = advice(given(PLAIN, None))
    assert alone.flash_attention is FlashAttention.OFF
    assert any("cannot use flash attention" in text for text in alone.reasons)


def test_each_phase_has_its_kernel_where_flash_attention_prefills_faster() -> None:
    """And decodes slower, and the model and the device allow it."""
    assert advice(given(PLAIN, FLASH)).prefill_flash_attention
    assert not advice(given(PLAIN, FLASH), can_pair=False).prefill_flash_attention
    assert not advice(given(FLASH, PLAIN)).prefill_flash_attention
    assert not advice(given(PLAIN, PLAIN)).prefill_flash_attention
    assert not advice(given(PLAIN, None)).prefill_flash_attention
    slower = rates(140, 0.074, 0.224, 0.983)
    assert not advice(given(PLAIN, slower)).prefill_flash_attention


def test_kernels_that_are_alike_are_called_so() -> None:
    """No ratio of 1.0."""
    texts = advice(given(PLAIN, PLAIN)).reasons
    assert sum("about equally fast" in text for text in texts) == 2


@pytest.mark.parametrize(
    ("steps", "fit", "expected"),
    [
        ((0.02, 0.03, 0.06), 20, 16),
        ((0.02, 0.03, 0.06), 5, 5),
        ((0.02, 0.03, 0.06), 0, 1),
        ((0.02, 0.03, 0.119), 20, 4),
        ((0.02, 0.08, 0.12), 20, 1),
    ],
)
def test_more_branches_at_once_only_while_they_bring_more_tokens(
    steps: tuple[float, ...], fit: int, expected: int
) -> None:
    """And only as many as fit."""
    assert advice(given(rates(150, *steps), None), fit=fit).max_running == expected


def test_the_most_precise_type_that_gains_enough_is_chosen() -> None:
    """Both gains are told."""
    q8_0 = given(rates(300, 0.02, 0.04, 0.11), None, "q8_0")
    q4_0 = given(rates(450, 0.02, 0.03, 0.07), None, "q4_0")
    both = advice(given(PLAIN, FLASH), q8_0, q4_0)
    assert both.weight_type == "q8_0"
    assert any("Q8_0, measured" in text and "prefill 2.0" in text for text in both.reasons)
    assert any("Q4_0, measured" in text and "prefill 3.0" in text for text in both.reasons)
    assert any("Q4_1 is slow here" in text for text in both.reasons)
    hardly = given(rates(160, 0.026, 0.044, 0.12), None, "q8_0")
    assert advice(given(PLAIN, FLASH), hardly, q4_0).weight_type == "q4_0"
    neither = advice(given(PLAIN, FLASH), hardly)
    assert neither.weight_type is None
    assert any("much faster than Q4_1" in text for text in neither.reasons)


def test_what_was_not_measured_comes_from_a_table_and_says_so() -> None:
    """Q4_1 has no fast kernel; F16 and Q8_0 have."""
    by_table = advice(given(PLAIN, FLASH))
    assert by_table.weight_type == "q8_0"
    assert "not measured" in by_table.reasons[-1]
    for file_type in (F16, Q8_0):
        assert advice(given(PLAIN, FLASH), file_type=file_type).weight_type is None
