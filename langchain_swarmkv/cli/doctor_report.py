"""A diagnosis as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from langchain_swarmkv.doctor.advice import TypeRates
from langchain_swarmkv.doctor.diagnosis import Diagnosis
from langchain_swarmkv.doctor.rates import NUM_BRANCHES, Rates

__all__ = ["print_diagnosis"]


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Print it all, the warnings last, where they are seen."""
    _print_pairs(console, "Machine", _machine(diagnosis))
    _print_pairs(console, "Model", _model(diagnosis))
    _print_pairs(console, "KV pool", _pool(diagnosis))
    _print_capacities(console, diagnosis)
    _print_rates(console, diagnosis)
    _print_pairs(console, "Settings to choose", _settings(diagnosis))
    for reason in diagnosis.advice.reasons:
        _print(console, f"  - {reason}")
    for warning in diagnosis.warnings:
        _print(console, f"Warning: {warning}")
    _print(console, f"Examined in {diagnosis.seconds:.0f} s.")


def _machine(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    machine, build = diagnosis.machine, diagnosis.build
    yield "processor", machine.processor
    yield "cores", f"{machine.usable_cores} usable of {machine.cores}"
    if machine.load_average is not None:
        yield "load before", f"{machine.load_average:.2f}"
    for device in build.devices:
        memory = f", {_megabytes(device.total_bytes)}" if device.total_bytes else ""
        yield f"device {device.name}", f"{device.description}{memory}"
    offload = "possible" if build.supports_gpu_offload else "not in this build of llama.cpp"
    yield "GPU offload", offload
    for backend, features in build.features.items():
        yield f"built with ({backend})", " ".join(features) or "nothing in particular"
    yield "llama-cpp-python", build.llama_cpp_python


def _model(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    model = diagnosis.model
    yield "name", model.name
    yield "file", str(model.path)
    yield "architecture", f"{model.architecture}, {model.num_layers} layers"
    yield "parameters", f"{model.num_parameters / 1e6:,.1f} million"
    yield "weights", f"{model.file_type_name}, {_megabytes(model.file_bytes)}"
    yield "trained context", f"{model.n_ctx_train:,} tokens"
    yield "vocabulary", f"{model.n_vocab:,} tokens"
    yield (
        "forks",
        "at any length" if model.can_cut else "whole sequences only (window or running state)",
    )
    yield "chat template", "present" if model.has_chat_template else "none: a base model"


def _pool(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    pool = diagnosis.pool
    if pool.kv_bytes_per_token == 0:
        yield "KV per token", "none: this model's states do not grow with their tokens"
    else:
        yield "KV per token", f"{pool.kv_bytes_per_token:,} bytes"
        yield f"pool of {pool.n_ctx:,}", _megabytes(pool.pool_bytes)


def _print_capacities(console: Console, diagnosis: Diagnosis) -> None:
    pool = diagnosis.pool
    _print(
        console,
        f"Branches that fit n_ctx={pool.n_ctx:,}, each with {pool.task_tokens:,} tokens of task "
        f"and {pool.max_tokens:,} of answer",
        style="bold",
    )
    table = _table("document", "branches", "cells in use")
    for row in pool.capacities:
        table.add_row(
            f"{row.document_tokens:,}",
            f"{row.num_branches}" if row.num_branches else "none; raise --n-ctx",
            f"{row.needed_cells:,}" if row.num_branches else "",
        )
    console.print(table)


def _print_rates(console: Console, diagnosis: Diagnosis) -> None:
    document_tokens = diagnosis.rates[0].plain.document_tokens
    numbers = [str(number) for number in NUM_BRANCHES]
    _print(
        console,
        f"Measured with both attention kernels: prefill of {document_tokens:,} tokens, and decode "
        f"of {', '.join(numbers[:-1])} and {numbers[-1]} branches of them (tokens a second in all, "
        "and time a step)",
        style="bold",
    )
    table = _table("weights", "kernel", "prefill", *numbers)
    for row in diagnosis.rates:
        for kernel, rates in (("plain", row.plain), ("flash", row.flash)):
            if rates is not None:
                table.add_row(_weights(row), kernel, *_rates_cells(rates))
    console.print(table)


def _weights(row: TypeRates) -> str:
    return f"{row.file_type_name}, {'as it is' if row.weight_type is None else 'converted'}"


def _rates_cells(rates: Rates) -> Iterator[str]:
    yield f"{rates.prefill_tokens_per_second:,.0f}"
    for rate in rates.decode:
        yield f"{rate.tokens_per_second:,.0f} ({_milliseconds(rate.step_seconds)})"


def _settings(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    advice = diagnosis.advice
    yield "flash_attention", advice.flash_attention.value
    yield "prefill_flash_attention", str(advice.prefill_flash_attention)
    yield "n_threads", str(advice.n_threads)
    yield "max_running", f"{advice.max_running} branches at once"
    if advice.weight_type is None:
        yield "weights", "keep them as they are"
    else:
        yield (
            "weights",
            f"swarmkv optimize '{diagnosis.model.path}' --type {advice.weight_type}",
        )


def _print_pairs(console: Console, title: str, pairs: Iterator[tuple[str, str]]) -> None:
    _print(console, title, style="bold")
    rows = list(pairs)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        _print(console, f"  {name:<{width}}  {value}")
    console.print()


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True)
    for heading in headings:
        is_text = heading in ("weights", "kernel")
        table.add_column(heading, justify="left" if is_text else "right")
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{0 if seconds >= 0.01 else 1}f} ms"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _print(console: Console, line: str, **options: Any) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True, **options)
