"""Fake engines under a chat model, and in place of model files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.config import EngineConfig
from langchain_swarmkv.engine.fake import FakeEngine, FakeTokenizer
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.support.gates import PATIENCE_SECONDS


class FakeModelFiles:
    """Fake engines for model files, and how often each was loaded."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.engines: list[FakeEngine] = []
        self.num_tokenizers = 0
        self.options: dict[str, Any] = {}

    def path(self, name: str = "model.gguf") -> Path:
        path = self._directory / name
        path.write_bytes(b"GGUF" + name.encode())
        return path

    def open_engine(self, config: EngineConfig) -> FakeEngine:
        self.engines.append(FakeEngine(num_cells=config.n_ctx, **self.options))
        return self.engines[-1]

    def open_tokenizer(self, path: Path) -> FakeTokenizer:
        self.num_tokenizers += 1
        return FakeTokenizer(name=path.stem)


def fake_model_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> FakeModelFiles:
    """Model files whose engines are fakes; `files.engines` are those that were loaded."""
    files = FakeModelFiles(directory)
    monkeypatch.setattr("langchain_swarmkv.scheduling.engine_loop.open_engine", files.open_engine)
    monkeypatch.setattr(
        "langchain_swarmkv.scheduling.registry.open_tokenizer", files.open_tokenizer
    )
    return files


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds; fail if it does not come to hold."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.002)


async def eventually_async(holds: Callable[[], bool]) -> None:
    """Like `eventually`, from an event loop."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        await asyncio.sleep(0.002)


def is_idle(engine: SwarmEngine) -> bool:
    """Whether no request runs or waits, and none of their cells is left but in idle prefixes."""
    seen = engine.statistics()
    return (
        seen.num_running == 0
        and seen.num_waiting == 0
        and seen.cells_reserved == 0
        and seen.cells_used == seen.cells_idle + seen.cells_pinned
    )


def chat(engine: SwarmEngine, **options: Any) -> ChatSwarmKV:
    return ChatSwarmKV(engine=engine, **options)
