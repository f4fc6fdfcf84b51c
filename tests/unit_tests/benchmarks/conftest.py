"""A model whose context is long enough for small workloads, and a case on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fanout.case import Case
from benchmarks.fanout.workloads import Sizes, build_cases
from langchain_swarmkv import ChatSwarmKV


@pytest.fixture(scope="session")
def tiny_long(tiny_gguf: Callable[..., Path]) -> Path:
    """Trained, it says, for 16,384 positions."""
    return tiny_gguf("llama", n_ctx_train=1 << 14)


@pytest.fixture(scope="session")
def tiny_case(tiny_long: Path) -> Case:
    """Three branches of four tokens."""
    with ChatSwarmKV(model_path=tiny_long) as llm:
        (case,) = build_cases(llm, None, Sizes(100, 3, 4))
    return case
