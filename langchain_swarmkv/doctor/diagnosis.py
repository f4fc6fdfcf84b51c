"""All that `swarmkv doctor` finds out: machine, build, model, rates, and what to make of them."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from langchain_swarmkv.config import EngineConfig, FlashAttention
from langchain_swarmkv.doctor.advice import Advice, TypeRates, advise
from langchain_swarmkv.doctor.capacity import Capacity, branches_that_fit, capacities
from langchain_swarmkv.doctor.rates import (
    NUM_BRANCHES,
    Rates,
    affordable_document,
    cells_needed,
    measure_rates,
)
from langchain_swarmkv.engine.cores import available_cores
from langchain_swarmkv.engine.llama import LlamaEngine
from langchain_swarmkv.errors import ModelLoadError, SwarmKVError
from langchain_swarmkv.native.build_facts import BuildFacts, read_build_facts
from langchain_swarmkv.native.file_facts import FileFacts, read_file_facts
from langchain_swarmkv.native.quantize import quantize
from langchain_swarmkv.native.weight_types import WEIGHT_TYPES, WeightType

__all__ = ["Diagnosis", "Machine", "Pool", "diagnose"]

_DOCUMENT_TOKENS = 1024
_COMPARED_TYPES = ("q8_0", "q4_0")
_MAX_CONVERTED_BYTES = 2 * 10**9
_BUSY_LOAD = 0.5
_FAIR_SHARE = 0.85


@dataclass(frozen=True)
class Machine:
    """Where it was measured."""

    processor: str
    usable_cores: int
    """Those that this process may use."""
    cores: int
    system: str
    load_average: float | None
    """Of the minute before; None: this system has none."""


@dataclass(frozen=True)
class Pool:
    """The KV pool of a context."""

    n_ctx: int
    kv_bytes_per_token: int
    """0: states of this model do not grow with their tokens."""
    pool_bytes: int
    task_tokens: int
    max_tokens: int
    capacities: tuple[Capacity, ...]


@dataclass(frozen=True)
class Diagnosis:
    """See the module's docstring."""

    machine: Machine
    build: BuildFacts
    model: FileFacts
    pool: Pool
    rates: tuple[TypeRates, ...]
    """The file as it is, then converted copies."""
    advice: Advice
    warnings: tuple[str, ...]
    """Why the rates may be wrong, or incomplete."""
    seconds: float


def diagnose(
    config: EngineConfig,
    *,
    task_tokens: int,
    max_tokens: int,
    compare_types: bool,
    on_phase: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Load, measure, convert copies in the folder for temporary files, and measure these.

    Args:
        config: The model, the context to count branches for, threads and layers to offload. Both
            attention kernels are measured, in a context of its own size.
        task_tokens: Tokens of a branch's own prompt.
        max_tokens: Longest answer of a branch.
        compare_types: Whether to measure other weight types, where the model is at most 2 GB.
        on_phase: Told what is done next.

    Raises:
        ModelError: the model cannot be loaded.
    """
    started = time.perf_counter()
    machine = _machine()
    on_phase("loading the model")
    model = read_file_facts(config.model_path)
    examination = _Examination(config, model, on_phase)
    examination.note_load(machine)
    examination.measure_file()
    if compare_types:
        examination.measure_copies()
    rates = tuple(examination.rates)
    pool = _pool(config, model, examination.kv_bytes_per_token, task_tokens, max_tokens)
    num_branches_that_fit = branches_that_fit(
        rates[0].plain.document_tokens,
        task_tokens + max_tokens,
        n_ctx=config.n_ctx,
        n_ctx_train=model.n_ctx_train,
        max_sequences=config.max_sequences,
    )
    return Diagnosis(
        machine=machine,
        build=read_build_facts(),
        model=model,
        pool=pool,
        rates=rates,
        advice=advise(
            rates,
            file_type=model.file_type,
            n_threads=examination.n_threads,
            num_branches_that_fit=num_branches_that_fit,
            can_pair_kernels=model.can_cut and config.n_gpu_layers == 0,
        ),
        warnings=tuple(examination.warnings),
        seconds=time.perf_counter() - started,
    )


def _machine() -> Machine:
    return Machine(
        processor=_processor(),
        usable_cores=available_cores(),
        cores=os.cpu_count() or 1,
        system=platform.platform(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()


def _pool(
    config: EngineConfig,
    model: FileFacts,
    kv_bytes_per_token: int,
    task_tokens: int,
    max_tokens: int,
) -> Pool:
    return Pool(
        n_ctx=config.n_ctx,
        kv_bytes_per_token=kv_bytes_per_token,
        pool_bytes=config.n_ctx * kv_bytes_per_token,
        task_tokens=task_tokens,
        max_tokens=max_tokens,
        capacities=capacities(
            task_tokens + max_tokens,
            n_ctx=config.n_ctx,
            n_ctx_train=model.n_ctx_train,
            max_sequences=config.max_sequences,
        ),
    )


class _Examination:
    """The measurements of one model, as they come in."""

    def __init__(
        self, config: EngineConfig, model: FileFacts, on_phase: Callable[[str], None]
    ) -> None:
        self._config, self._model, self._on_phase = config, model, on_phase
        self._document_tokens: int | None = None
        self.n_threads = config.n_threads or available_cores()
        self.kv_bytes_per_token = 0
        self.rates: list[TypeRates] = []
        self.warnings: list[str] = []
        self._least_share = 1.0

    def note_load(self, machine: Machine) -> None:
        """Warn where someone else computed in the minute before."""
        load = machine.load_average
        if load is not None and load > _BUSY_LOAD * machine.usable_cores:
            self.warnings.append(
                f"The load average was {load:.1f} on {machine.usable_cores} usable cores before "
                "anything was measured. llama.cpp's threads wait for each other by spinning: "
                "beside another busy process all rates are too low, often by ten times."
            )

    def measure_file(self) -> None:
        """The file as it is."""
        self._measure(self._model, None)
        if self._least_share < _FAIR_SHARE and self._config.n_gpu_layers == 0:
            self.warnings.append(
                f"While it was measured this process got only {self._least_share:.0%} of the time "
                f"of {self.n_threads} core{'s' if self.n_threads > 1 else ''}: something else "
                "computes here, and the rates are too low. Run this again when it does not."
            )

    def measure_copies(self) -> None:
        """Copies of other weight types, if there is room, and time."""
        if self._model.file_bytes > _MAX_CONVERTED_BYTES:
            self.warnings.append(
                f"The file is larger than {_MAX_CONVERTED_BYTES / 1e9:.0f} GB, so no other weight "
                "type was measured."
            )
            return
        types = [WEIGHT_TYPES[name] for name in _COMPARED_TYPES]
        with tempfile.TemporaryDirectory(prefix="swarmkv-doctor-") as folder:
            for weight_type in types:
                if weight_type.file_type != self._model.file_type:
                    self._measure_copy(Path(folder), weight_type)

    def _measure_copy(self, folder: Path, weight_type: WeightType) -> None:
        copy = folder / f"copy.{weight_type.label}.gguf"
        self._on_phase(f"converting a copy to {weight_type.label}")
        try:
            facts = quantize(self._model, copy, weight_type, n_threads=self.n_threads)
            self._measure(facts, weight_type.name)
        except SwarmKVError as error:
            self.warnings.append(f"{weight_type.label} was not measured: {error}")
        finally:
            copy.unlink(missing_ok=True)

    def _measure(self, facts: FileFacts, weight_type: str | None) -> None:
        plain = self._measure_kernel(facts, FlashAttention.OFF)
        try:
            flash = self._measure_kernel(facts, FlashAttention.ON)
        except ModelLoadError:
            flash = None
        self.rates.append(
            TypeRates(weight_type, facts.file_type_name, facts.file_bytes, plain, flash)
        )

    def _measure_kernel(self, facts: FileFacts, flash_attention: FlashAttention) -> Rates:
        kernel = "flash" if flash_attention is FlashAttention.ON else "plain"
        title = f"{facts.file_type_name}, {kernel} attention"
        self._on_phase(f"{title}: loading")
        engine = LlamaEngine(
            self._config.model_copy(
                update={
                    "model_path": facts.path,
                    "n_ctx": cells_needed(_DOCUMENT_TOKENS),
                    "max_sequences": NUM_BRANCHES[-1] + 1,
                    "flash_attention": flash_attention,
                    "n_threads": self.n_threads,
                }
            )
        )
        try:
            self.kv_bytes_per_token = engine.facts.kv_bytes_per_token
            if self._document_tokens is None:
                self._document_tokens = affordable_document(engine, _DOCUMENT_TOKENS)
            return self._measure_engine(engine, self._document_tokens, title)
        finally:
            engine.close()

    def _measure_engine(self, engine: LlamaEngine, document_tokens: int, title: str) -> Rates:
        wall, processor = time.perf_counter(), time.process_time()
        rates = measure_rates(
            engine,
            document_tokens=document_tokens,
            on_phase=lambda phase: self._on_phase(f"{title}: {phase}"),
        )
        share = (time.process_time() - processor) / (time.perf_counter() - wall)
        self._least_share = min(self._least_share, share / self.n_threads)
        return rates
