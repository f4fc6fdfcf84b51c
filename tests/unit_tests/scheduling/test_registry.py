"""The registry: equal settings, one engine; counted users; nothing shared with a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from langchain_swarmkv.config import EngineConfig, SnapshotSettings
from langchain_swarmkv.engine.contract import Engine
from langchain_swarmkv.engine.fake import FakeEngine, FakeTokenizer
from langchain_swarmkv.errors import ModelFormatError, ModelNotFoundError
from langchain_swarmkv.scheduling import engine_loop, registry
from langchain_swarmkv.scheduling.registry import (
    acquire_engine,
    acquire_tokenizer,
    release_engine,
)
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.scheduling.support import WAIT_SECONDS


class Loader:
    """Stands for `open_engine`: counts, and may wait or fail."""

    def __init__(self) -> None:
        self.configs: list[EngineConfig] = []
        self.before: Callable[[], None] = lambda: None

    def __call__(self, config: EngineConfig) -> Engine:
        self.configs.append(config)
        self.before()
        return FakeEngine()


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    """Engines are fake, and the registry is empty before and after."""
    made = Loader()
    monkeypatch.setattr(engine_loop, "open_engine", made)
    monkeypatch.setattr(registry, "_registry", registry._empty())
    yield made
    assert registry._registry.engines == {}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def replace_file(path: Path, data: bytes) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(data)
    os.replace(other, path)


def test_equal_settings_share_an_engine_and_the_last_user_closes_it(
    loader: Loader, model: Path
) -> None:
    """Three users, one load; open until the third has given it back."""
    engines = [acquire_engine(EngineConfig(model_path=model)) for _ in range(3)]
    assert len(loader.configs) == 1
    assert engines[0] is engines[1] is engines[2]
    for engine, is_last in zip(engines, (False, False, True), strict=True):
        assert not engine.closed
        release_engine(engine)
        assert engine.closed == is_last
    release_engine(engines[0])  # once too often, harmless


def test_other_settings_are_another_engine(loader: Loader, model: Path, tmp_path: Path) -> None:
    """Any field, the snapshot memory, or another file."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"weights")
    engines = [
        acquire_engine(EngineConfig(model_path=model)),
        acquire_engine(EngineConfig(model_path=model, n_ctx=1024)),
        acquire_engine(EngineConfig(model_path=model), SnapshotSettings(snapshot_memory_bytes=0)),
        acquire_engine(EngineConfig(model_path=other)),
    ]
    assert len(set(map(id, engines))) == len(loader.configs) == 4
    for engine in engines:
        release_engine(engine)
        assert engine.closed


def test_the_same_file_by_another_name_of_its_folder_is_shared(
    loader: Loader, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is the absolute one."""
    monkeypatch.chdir(model.parent)
    engines = [acquire_engine(EngineConfig(model_path=path)) for path in (model, Path(model.name))]
    assert engines[0] is engines[1]
    for engine in engines:
        release_engine(engine)


def test_a_replaced_file_is_another_model(loader: Loader, model: Path) -> None:
    """A8: other weights under the same path, of the same size: not the old engine."""
    config = EngineConfig(model_path=model)
    old = acquire_engine(config)
    replace_file(model, b"WEIGHTS")
    new = acquire_engine(config)
    assert new is not old
    release_engine(old)
    assert old.closed
    assert not new.closed
    release_engine(new)
    assert new.closed


def test_adapters_are_part_of_what_makes_two_engines_one(loader: Loader, model: Path) -> None:
    """Equal ones share; another scale does not, nor another file under the same path."""
    path = model.with_name("adapter.gguf")
    path.write_bytes(b"adapter")
    config, other = (
        EngineConfig(model_path=model, adapters=({"path": path, "scale": scale},))
        for scale in (1.0, 0.5)
    )
    engines = [acquire_engine(one) for one in (config, config, other)]
    assert engines[0] is engines[1] is not engines[2]
    replace_file(path, b"ADAPTER")
    engines.append(acquire_engine(config))
    assert engines[3] not in engines[:3]
    path.unlink()
    with pytest.raises(ModelNotFoundError, match=r"adapter\.gguf"):
        acquire_engine(config)
    for engine in engines:
        release_engine(engine)
    assert all(engine.closed for engine in engines)


def test_a_released_engine_is_loaded_again(loader: Loader, model: Path) -> None:
    """After the last user a new one gets a new engine."""
    config = EngineConfig(model_path=model)
    first = acquire_engine(config)
    release_engine(first)
    second = acquire_engine(config)
    assert second is not first
    assert not second.closed
    release_engine(second)
    assert second.closed


def test_an_engine_that_died_is_replaced(loader: Loader, model: Path) -> None:
    """Those who still have the dead one do not count among the users of its successor."""
    config = EngineConfig(model_path=model)
    dead = [acquire_engine(config) for _ in range(2)]
    dead[0].close()
    alive = acquire_engine(config)
    assert alive is not dead[0]
    assert not alive.closed
    release_engine(dead[0])
    assert not alive.closed
    release_engine(alive)
    assert alive.closed
    release_engine(dead[1])


def test_a_late_goodbye_to_a_dead_engine_spares_its_successor(loader: Loader, model: Path) -> None:
    """Replaced between the look-up and the count of a release: the new entry stays registered."""
    config = EngineConfig(model_path=model)
    dead = acquire_engine(config)
    ((key, entry),) = registry._registry.engines.items()
    dead.close()
    alive = acquire_engine(config)
    assert not registry._drop_user(key, entry)
    release_engine(alive)
    assert alive.closed


def test_two_threads_load_once(loader: Loader, model: Path) -> None:
    """The second waits for the first's load and gets the same engine."""
    config = EngineConfig(model_path=model)
    loading, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        loading.set()
        assert go_on.wait(WAIT_SECONDS)

    loader.before = wait
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(acquire_engine, config)
        assert loading.wait(WAIT_SECONDS)
        others = [pool.submit(acquire_engine, config) for _ in range(3)]
        (entry,) = registry._registry.engines.values()
        while entry.num_users < 4:
            assert not any(one.done() for one in others)
        go_on.set()
        engines = [one.result(WAIT_SECONDS) for one in (first, *others)]
    assert len(loader.configs) == 1
    assert len(set(map(id, engines))) == 1
    for engine in engines:
        release_engine(engine)


def test_loading_one_model_does_not_hold_up_another(loader: Loader, model: Path) -> None:
    """An engine that is there already is given out while a slow one loads."""
    quick = acquire_engine(EngineConfig(model_path=model))
    loading, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        loading.set()
        assert go_on.wait(WAIT_SECONDS)

    loader.before = wait
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(acquire_engine, EngineConfig(model_path=model, n_ctx=1024))
        assert loading.wait(WAIT_SECONDS)
        assert acquire_engine(EngineConfig(model_path=model)) is quick
        go_on.set()
        release_engine(slow.result(WAIT_SECONDS))
    release_engine(quick)
    release_engine(quick)


def test_a_failed_load_can_be_tried_again(loader: Loader, model: Path) -> None:
    """Nothing is left of it: those who waited try by themselves, and a later call succeeds."""

    def fail() -> None:
        raise ModelFormatError("no GGUF")

    loader.before = fail
    config = EngineConfig(model_path=model)
    with ThreadPoolExecutor(4) as pool:
        for failed in [pool.submit(acquire_engine, config) for _ in range(4)]:
            with pytest.raises(ModelFormatError):
                failed.result(WAIT_SECONDS)
    assert registry._registry.engines == {}
    loader.before = lambda: None
    release_engine(acquire_engine(config))


def test_a_missing_file_is_named(loader: Loader, tmp_path: Path) -> None:
    """Before anything is loaded."""
    with pytest.raises(ModelNotFoundError, match=r"missing\.gguf"):
        acquire_engine(EngineConfig(model_path=tmp_path / "missing.gguf"))
    with pytest.raises(ModelNotFoundError, match=r"missing\.gguf"):
        acquire_tokenizer(tmp_path / "missing.gguf")
    assert loader.configs == []


def test_an_engine_from_elsewhere_is_left_alone(loader: Loader) -> None:
    """Releasing what was never acquired does not close it."""
    with SwarmEngine(FakeEngine()) as engine:
        release_engine(engine)
        assert not engine.closed


def test_a_vocabulary_is_loaded_once(
    loader: Loader, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By file, also for threads that come together; a replaced file is read anew."""
    loaded: list[FakeTokenizer] = []
    together = threading.Barrier(4)

    def open_tokenizer(path: Path) -> FakeTokenizer:
        together.wait(WAIT_SECONDS)
        loaded.append(ClosableTokenizer())
        return loaded[-1]

    monkeypatch.setattr(registry, "open_tokenizer", open_tokenizer)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(acquire_tokenizer, [model] * 4))
    assert len(set(map(id, got))) == 1
    assert acquire_tokenizer(model) is got[0]
    # All four loaded it, since loading takes no lock; the three that are of no use are closed.
    assert [one.is_closed for one in loaded if one is got[0]] == [False]
    assert [one.is_closed for one in loaded if one is not got[0]] == [True] * 3
    together.abort()
    replace_file(model, b"another")
    with pytest.raises(threading.BrokenBarrierError):
        acquire_tokenizer(model)


class ClosableTokenizer(FakeTokenizer):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_forked_child_starts_empty(loader: Loader, model: Path) -> None:
    """The child has none of the parent's engines, even if another thread was acquiring one."""
    engine = acquire_engine(EngineConfig(model_path=model))
    parents: Any = registry._registry
    with parents.lock:  # held by "another thread" at the moment of the fork
        registry._forget_parent()
        try:
            assert registry._registry.engines == {}
            other = acquire_engine(EngineConfig(model_path=model))
            assert other is not engine
            release_engine(other)
            release_engine(engine)  # the parent's: not ours to close
            assert not engine.closed
        finally:
            registry._registry = parents
    release_engine(engine)
    assert engine.closed
