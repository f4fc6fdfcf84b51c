"""The settings that measured rates speak for."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_swarmkv.config import FlashAttention
from langchain_swarmkv.doctor.rates import Rates
from langchain_swarmkv.native.weight_types import file_type_name, has_fast_kernels

__all__ = ["Advice", "TypeRates", "advise"]

_WORTH_A_SETTING = 1.05
_WORTH_A_CONVERSION = 1.15
_WORTH_A_CONTEXT = 1.1
_SUGGESTED_TYPES = ("q8_0", "q4_0")


@dataclass(frozen=True)
class TypeRates:
    """One weight type, with each attention kernel."""

    weight_type: str | None
    """The name that `optimize --type` takes; None: the file as it is."""
    file_type_name: str
    file_bytes: int
    plain: Rates
    flash: Rates | None
    """None: this model cannot use flash attention."""

    @property
    def best(self) -> Rates:
        """Of the kernel that is faster in all."""
        if self.flash is None or self.plain.fan_out_seconds <= self.flash.fan_out_seconds:
            return self.plain
        return self.flash


@dataclass(frozen=True)
class Advice:
    """Settings for `EngineConfig`, and why."""

    flash_attention: FlashAttention
    prefill_flash_attention: bool
    n_threads: int
    max_running: int
    weight_type: str | None
    """A type to repack the file to; None: keep it."""
    reasons: tuple[str, ...]


def advise(
    rates: tuple[TypeRates, ...],
    *,
    file_type: int,
    n_threads: int,
    num_branches_that_fit: int,
    can_pair_kernels: bool,
) -> Advice:
    """Choose.

    Args:
        rates: The file as it is, then other weight types, if they were measured.
        file_type: Of the file as it is.
        n_threads: With which all was measured.
        num_branches_that_fit: In the context asked about, beside the document that was measured.
        can_pair_kernels: Whether prefill and decode may use one kernel each.
    """
    own = rates[0]
    decodes_plain = own.best is own.plain
    weight_type, type_reasons = _weight_type(rates, file_type)
    max_running = min(_useful_branches(own.best), max(num_branches_that_fit, 1))
    return Advice(
        flash_attention=FlashAttention.OFF if decodes_plain else FlashAttention.ON,
        prefill_flash_attention=can_pair_kernels
        and decodes_plain
        and _prefill_gain(own) >= _WORTH_A_CONTEXT,
        n_threads=n_threads,
        max_running=max_running,
        weight_type=weight_type,
        reasons=(*_kernel_reasons(own), _branches_reason(own.best), *type_reasons),
    )


def _prefill_gain(own: TypeRates) -> float:
    """Of flash attention over plain; 0 where there is none."""
    if own.flash is None:
        return 0.0
    return own.flash.prefill_tokens_per_second / own.plain.prefill_tokens_per_second


def _kernel_reasons(own: TypeRates) -> list[str]:
    if own.flash is None:
        return ["This model cannot use flash attention."]
    plain, flash = own.plain, own.flash
    num_branches = plain.decode[-1].num_branches
    return [
        "Prefill: " + _compared("flash attention", "plain attention", _prefill_gain(own)),
        f"Decode of {num_branches} branches: "
        + _compared(
            "flash attention",
            "plain attention",
            plain.decode[-1].step_seconds / flash.decode[-1].step_seconds,
        ),
    ]


def _compared(first: str, second: str, ratio: float) -> str:
    if ratio < 1:
        first, second, ratio = second, first, 1 / ratio
    if ratio < _WORTH_A_SETTING:
        return f"{first} and {second} are about equally fast here."
    return f"{first} is {ratio:.1f} times as fast as {second} here."


def _useful_branches(rates: Rates) -> int:
    """The most branches that were measured, as long as each larger batch brought more tokens."""
    useful = rates.decode[0]
    for larger in rates.decode[1:]:
        if larger.tokens_per_second < _WORTH_A_SETTING * useful.tokens_per_second:
            break
        useful = larger
    return useful.num_branches


def _branches_reason(rates: Rates) -> str:
    alone, most = rates.decode[0], rates.decode[-1]
    ratio = most.tokens_per_second / alone.tokens_per_second
    return (
        f"{most.num_branches} branches at once write {ratio:.1f} times as many tokens a second as "
        f"{'one' if alone.num_branches == 1 else alone.num_branches} alone."
    )


def _weight_type(rates: tuple[TypeRates, ...], file_type: int) -> tuple[str | None, list[str]]:
    own, others = rates[0], rates[1:]
    if not others:
        return _weight_type_by_table(file_type)
    reasons = [_gain(own, other) for other in others]
    for other in others:  # the most precise first
        ratio = own.best.fan_out_seconds / other.best.fan_out_seconds
        if ratio >= _WORTH_A_CONVERSION:
            reasons.append(
                f"{own.file_type_name} is slow here: a copy as {other.file_type_name} does prefill "
                f"and decode together {ratio:.1f} times as fast. Converting loses a little quality."
            )
            return other.weight_type, reasons
    reasons.append(f"None of them is much faster than {own.file_type_name} here.")
    return None, reasons


def _gain(own: TypeRates, other: TypeRates) -> str:
    prefill = other.best.prefill_tokens_per_second / own.best.prefill_tokens_per_second
    decode = own.best.decode[-1].step_seconds / other.best.decode[-1].step_seconds
    return (
        f"As {other.file_type_name}, measured on a converted copy: prefill {prefill:.1f} and "
        f"decode {decode:.1f} times as fast."
    )


def _weight_type_by_table(file_type: int) -> tuple[str | None, list[str]]:
    name = file_type_name(file_type)
    if has_fast_kernels(file_type):
        return None, [f"{name} has fast kernels on most CPUs (by a table, not measured)."]
    return _SUGGESTED_TYPES[0], [
        f"{name} has no fast prefill kernels on most CPUs; {' and '.join(_SUGGESTED_TYPES)} have "
        "(by a table, not measured)."
    ]
