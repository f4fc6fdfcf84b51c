"""Models that many tests share: each is written once a session, on first use.

pytest-xdist's workers run side by side. Each has folders of its own, for what the package caches
and for its device locks, so that no worker waits for another's engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.decode_spy import DecodeSpy
from tests.support.models import smollm2_f16_path, smollm2_path, smollm2_q8_0_path
from tests.support.tiny_gguf import ARCHITECTURES, write_tiny_gguf


@pytest.fixture(scope="session", autouse=True)
def _folders_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the package remembers of files, and its device locks, are in folders of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.delenv("SWARMKV_LOCK_DIR", raising=False)
        yield


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's models are written."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def shared_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all workers: for what takes seconds to write."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    (folder / "shared-models").mkdir(exist_ok=True)
    return folder / "shared-models"


@pytest.fixture(scope="session")
def tiny_gguf(model_directory: Path) -> Callable[..., Path]:
    """`tiny_gguf(architecture, **options)`: `write_tiny_gguf`, each variant written once."""
    numbers = count()

    @cache
    def write(architecture: str, **options: Any) -> Path:
        path = model_directory / f"tiny-{architecture}-{next(numbers)}.gguf"
        return write_tiny_gguf(path, architecture, **options)

    return write


@pytest.fixture(scope="session")
def tiny_llama(tiny_gguf: Callable[..., Path]) -> Path:
    """The plainest tiny model."""
    return tiny_gguf("llama")


@pytest.fixture(scope="session", params=ARCHITECTURES)
def tiny_models(request: pytest.FixtureRequest, tiny_gguf: Callable[..., Path]) -> Path:
    """Each architecture in turn."""
    return tiny_gguf(request.param)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as shipped, Q4_1."""
    return smollm2_path()


@pytest.fixture(scope="session")
def smollm2_f16(shared_model_directory: Path) -> Path:
    """SmolLM2-135M-Instruct with F16 weights."""
    return smollm2_f16_path(shared_model_directory)


@pytest.fixture(scope="session")
def smollm2_q8_0(shared_model_directory: Path) -> Path:
    """SmolLM2-135M-Instruct with Q8_0 weights."""
    return smollm2_q8_0_path(shared_model_directory)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> DecodeSpy:
    """Counts what llama.cpp decodes."""
    spy = DecodeSpy()
    spy.install(monkeypatch)
    return spy
