"""Sessions: an engine is loaded for seats that are taken, and given back with the last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from langchain_swarmkv.config import EngineConfig, SnapshotSettings
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import EngineClosedError
from langchain_swarmkv.prompts.session import Seat
from langchain_swarmkv.scheduling import engine_loop, registry

WAIT_SECONDS = 60.0


class Loads:
    """Stands for `open_engine`; each load waits until it may go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.engines: list[FakeEngine] = []

    def __call__(self, config: EngineConfig) -> FakeEngine:
        self.begun.set()
        assert self.go_on.wait(WAIT_SECONDS)
        self.engines.append(FakeEngine())
        return self.engines[-1]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    made = Loads()
    monkeypatch.setattr(engine_loop, "open_engine", made)
    monkeypatch.setattr(registry, "_registry", registry._empty())
    yield made
    made.go_on.set()


@pytest.fixture
def seat(tmp_path: Path) -> Seat:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return Seat((EngineConfig(model_path=path, lock_dir=tmp_path / "locks"), SnapshotSettings()))


def test_a_call_that_waited_behind_the_load_does_not_load_again(seat: Seat, loads: Loads) -> None:
    """It had found the seat taken; when its turn comes the last one has been left."""
    loads.go_on.set()
    session = seat._session
    engine = seat.engine()
    seat.leave()
    assert engine.closed
    with pytest.raises(EngineClosedError, match="chat model is closed"):
        session.engine()
    assert len(loads.engines) == 1
    assert session.loaded_engine is None
    assert registry._registry.engines == {}


def test_closing_while_calls_wait_for_the_load_leaves_nothing_loaded(
    seat: Seat, loads: Loads
) -> None:
    """Whoever gets the lock first: in the end no engine is open, and none is registered."""

    def call() -> str:
        try:
            return "open" if seat.engine() else "none"
        except EngineClosedError:
            return "closed"

    with ThreadPoolExecutor(5) as pool:
        calls = [pool.submit(call)]
        assert loads.begun.wait(WAIT_SECONDS)
        calls += [pool.submit(call) for _ in range(3)]
        closing = pool.submit(seat.leave)
        loads.go_on.set()
        closing.result(WAIT_SECONDS)
        assert {one.result(WAIT_SECONDS) for one in calls} <= {"open", "closed"}
    assert seat._session.loaded_engine is None
    assert registry._registry.engines == {}
    assert len(loads.engines) == 1
