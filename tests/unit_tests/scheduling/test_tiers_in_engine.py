"""Which tier serves a prompt, and stores of a caller's own that do what they must not."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import (
    ConfigurationError,
    DecodeFatalError,
    EngineClosedError,
    InvalidRequestError,
    RequestTimeoutError,
    SequenceError,
    SnapshotStorageError,
    SwarmKVError,
)
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.store import FoundPrefix, StoredPrefix
from langchain_swarmkv.statistics import PrefixSource, RequestStatistics
from tests.support.gates import let_restoring_take
from tests.support.processes import WITHOUT_LANGCHAIN
from tests.unit_tests.scheduling.support import (
    WAIT_SECONDS,
    answer_alone,
    answer_of,
    open_swarm,
    piece,
)

ROOT = Path(__file__).parents[3]
DOCUMENT = piece("Document", 400)
PREFILL = SamplingParams(max_tokens=0)
SHORT = SamplingParams(max_tokens=6)


@pytest.fixture(autouse=True)
def _restoring_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quicker than computing, whatever else the machine does."""
    let_restoring_take(monkeypatch, 0.0)


def ask(engine: SwarmEngine, tokens: list[int]) -> RequestStatistics:
    """A right answer, whatever it took."""
    result = engine.submit(tokens, SHORT, keep_prefix=False).result(WAIT_SECONDS)
    assert answer_of(result) == answer_alone(tokens, SHORT)
    return result.statistics


def snapshot_of(tokens: list[int]) -> KVSnapshot:
    with open_swarm(FakeEngine(num_cells=2000)) as engine:
        return engine.snapshot(tokens)


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_disk", "source", "num_cached"),
    [
        (400, PrefixSource.MEMORY, 400),
        (415, PrefixSource.MEMORY, 400),
        (417, PrefixSource.DISK, 417),
    ],
)
def test_the_disk_is_read_only_for_what_is_worth_it(
    on_disk: int, source: PrefixSource, num_cached: int, tmp_path: Path
) -> None:
    """A few tokens more are computed sooner than a file is read; a tie is memory's."""
    more = [*DOCUMENT, *piece("more", 30)]
    with DiskSnapshotStore(tmp_path) as store:
        store.put(snapshot_of(more[:on_disk]))
    with open_swarm(FakeEngine(num_cells=2000), snapshot_dir=tmp_path) as engine:
        engine.insert(snapshot_of(DOCUMENT))
        statistics = ask(engine, more)
        assert statistics.prefix_source is source
        assert statistics.num_cached_tokens == num_cached


@pytest.mark.parametrize("kind", ["too large for the pool", "too slow", "gone"])
def test_what_memory_holds_serves_where_the_disk_does_not(kind: str, tmp_path: Path) -> None:
    """The best match must not hide one that can be used."""

    class Slow(DiskSnapshotStore):
        def get(self, *arguments: Any, **options: Any) -> StoredPrefix | None:
            return None if kind == "gone" else super().get(*arguments, **options)

    more = [*DOCUMENT, *piece("more", 600)]
    store = Slow(tmp_path)
    store.put(snapshot_of(more if kind == "too large for the pool" else more[:440]))
    num_cells = 800 if kind == "too large for the pool" else 2000
    with open_swarm(FakeEngine(num_cells=num_cells), snapshot_store=store) as engine:
        if kind == "too slow":  # by the rates so far
            ask(engine, piece("x", 400))
            counters = engine._loop._tiers.counters
            counters.disk_read_bytes, counters.disk_read_seconds = 1, 1.0
            engine.insert(snapshot_of(piece("y", 100)))
            ask(engine, [*piece("y", 100), 1])
        engine.insert(snapshot_of(DOCUMENT))
        statistics = ask(engine, more[:500])
        assert statistics.num_cached_tokens == 400
        assert statistics.prefix_source is PrefixSource.MEMORY


@pytest.mark.parametrize(("policy", "num_resident"), [("write_through", 0), ("never", 2)])
def test_idle_documents_leave_the_pool_for_the_disk_too(
    policy: str, num_resident: int, tmp_path: Path
) -> None:
    """On a CPU what is idle slows down what runs; but nothing leaves that would be lost."""
    documents = [piece(name, 400) for name in "ABC"]
    size = snapshot_of(documents[0]).num_bytes
    fake = FakeEngine(num_cells=2000, move_cost_tokens=16)
    options: dict[str, Any] = {"snapshot_dir": tmp_path, "snapshot_policy": policy}
    with open_swarm(fake, snapshot_memory_bytes=size + 1000, **options) as engine:
        for document in documents:
            engine.submit(document, PREFILL).result(WAIT_SECONDS)
        ask(engine, piece("other", 50))
        engine.flush()
        assert engine.statistics().num_resident_prefixes == num_resident
        for document in documents:
            ask(engine, [*document, 1])


# -- policies --------------------------------------------------------------------------------------


def test_write_back_does_not_write_what_it_has_read(tmp_path: Path) -> None:
    """A folder that has everything stays as it is."""
    options: dict[str, Any] = {"snapshot_dir": tmp_path, "snapshot_policy": "write_back"}
    with open_swarm(FakeEngine(num_cells=1000), **options) as engine:
        for name in "AB":
            engine.submit(piece(name, 400), PREFILL).result(WAIT_SECONDS)
    before = {path.name: path.stat().st_ino for path in tmp_path.glob("*.swarmkv")}
    assert len(before) == 2
    with open_swarm(FakeEngine(num_cells=1000), **options) as engine:
        for name in "AB":
            assert ask(engine, [*piece(name, 400), 1]).prefix_source is PrefixSource.DISK
        engine.flush()
    assert {path.name: path.stat().st_ino for path in tmp_path.glob("*.swarmkv")} == before


@pytest.mark.parametrize("ending", ["", "import atexit; atexit.register(engine.close)"])
def test_write_back_saves_at_the_end_of_an_interpreter_that_closes_nothing(
    ending: str, tmp_path: Path
) -> None:
    """An engine that is still open is closed then, and what it holds is saved."""
    code = f"""
    from tests.unit_tests.scheduling.test_tiers_in_engine import *
    engine = open_swarm(
        FakeEngine(num_cells=500), snapshot_dir={str(tmp_path)!r}, snapshot_policy="write_back"
    )
    for name in "AB":  # one of them in memory, one in the pool
        engine.submit(piece(name, 400), PREFILL).result(WAIT_SECONDS)
    {ending}
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_LANGCHAIN + dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with DiskSnapshotStore(tmp_path) as store:
        assert len(store) == 2


def test_a_branch_point_is_written_and_learns_its_logits(tmp_path: Path) -> None:
    """Where sequences cannot be cut it is the document; asked for alone it is computed once."""
    fake = FakeEngine(num_cells=2000, can_cut=False)
    with open_swarm(fake, snapshot_dir=tmp_path) as engine:
        branches = [
            engine.submit([*DOCUMENT, *piece(name, 20)], SHORT, keep_prefix=False)
            for name in "abcd"
        ]
        for branch in branches:
            branch.result(WAIT_SECONDS)
        engine.flush()
        with DiskSnapshotStore(tmp_path) as store:
            assert {file.head.num_tokens for file in store.files() if file.head} == {400}
        engine.snapshot(DOCUMENT)
        before = engine.statistics().num_prefill_tokens
        assert engine.snapshot(DOCUMENT).num_logits == engine.facts.n_vocab
        assert ask(engine, DOCUMENT).num_computed_tokens == 0
        assert engine.statistics().num_prefill_tokens == before
        engine.check()


def test_persist_waits_for_a_writing_that_is_under_way(tmp_path: Path) -> None:
    """A file may have its name some moments before it would survive a crash."""
    is_named, is_going_on = threading.Event(), threading.Event()

    class Late(DiskSnapshotStore):
        def put(self, snapshot: KVSnapshot) -> bool:
            done = super().put(snapshot)
            is_named.set()
            assert is_going_on.wait(WAIT_SECONDS)
            return done

    with open_swarm(FakeEngine(num_cells=1000), snapshot_store=Late(tmp_path)) as engine:
        engine.submit(DOCUMENT, PREFILL).result(WAIT_SECONDS)
        assert is_named.wait(WAIT_SECONDS)
        persisted = engine.submit(DOCUMENT, PREFILL, persist=True)
        ask(engine, [*DOCUMENT, 1])
        assert persisted.statistics.finished_at is None
        is_going_on.set()
        persisted.result(WAIT_SECONDS)
        assert engine.statistics().num_disk_writes == 1


class Held(DiskSnapshotStore):
    """Writes nothing until it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_writing, self.is_going_on = threading.Event(), threading.Event()

    def put(self, snapshot: KVSnapshot) -> bool:
        self.is_writing.set()
        assert self.is_going_on.wait(WAIT_SECONDS)
        return super().put(snapshot)


def test_what_waits_to_be_written_is_not_queued_again(tmp_path: Path) -> None:
    """Computed anew meanwhile, it is still one file and one writing."""
    store = Held(tmp_path)
    with open_swarm(FakeEngine(num_cells=1000), snapshot_store=store) as engine:
        for _ in range(3):
            engine.submit(DOCUMENT, PREFILL).result(WAIT_SECONDS)
            engine.reset_prefix_cache()
        store.is_going_on.set()
        engine.flush()
        assert engine.statistics().num_prefill_tokens == 3 * 400
        assert engine.statistics().num_disk_writes == 1


def test_a_slow_disk_takes_no_memory_without_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits belongs to memory's limit.

    What goes there by itself is left out when that is full, told and counted; what was asked for is
    not.
    """
    store = Held(tmp_path)
    size = snapshot_of(DOCUMENT).num_bytes
    with (
        caplog.at_level(logging.WARNING),
        open_swarm(
            FakeEngine(num_cells=2000), snapshot_store=store, snapshot_memory_bytes=size + 100
        ) as engine,
    ):
        engine.submit(piece("A", 400), PREFILL).result(WAIT_SECONDS)
        assert store.is_writing.wait(WAIT_SECONDS)  # on top of what waits
        for name in "BC":
            engine.submit(piece(name, 400), PREFILL).result(WAIT_SECONDS)
        assert engine.statistics().num_snapshots_dropped_disk_slow == 1
        assert engine._loop._tiers._queued_bytes <= size + 100
        assert not engine._loop._tiers.memory.may_take(size)
        assert "slower than the engine" in caplog.text
        asked = engine.submit(piece("D", 400), PREFILL, persist=True)
        store.is_going_on.set()
        asked.result(WAIT_SECONDS)
        engine.flush()
        assert engine.statistics().num_disk_writes == 3


def test_what_was_read_is_kept_in_memory(tmp_path: Path) -> None:
    """It is not read again when it has left the pool."""
    with DiskSnapshotStore(tmp_path) as store:
        store.put(snapshot_of(DOCUMENT))
    with open_swarm(FakeEngine(num_cells=500), snapshot_dir=tmp_path) as engine:
        ask(engine, [*DOCUMENT, 1])
        ask(engine, piece("other", 450))
        assert ask(engine, [*DOCUMENT, 2]).prefix_source is PrefixSource.MEMORY
        assert engine.statistics().num_disk_reads == 1


def test_a_persisted_answer_can_be_gone_on_with_at_once(tmp_path: Path) -> None:
    """Its snapshot has the logits after what was written."""
    with open_swarm(FakeEngine(num_cells=1000), snapshot_dir=tmp_path) as engine:
        done = engine.submit(DOCUMENT, SHORT, persist=True).result(WAIT_SECONDS)
    written = [*DOCUMENT, *done.token_ids][: 400 + len(done.token_ids) - 1]
    with open_swarm(FakeEngine(num_cells=1000), snapshot_dir=tmp_path) as engine:
        assert ask(engine, written).num_computed_tokens == 0


# -- the engine's thread ---------------------------------------------------------------------------

FILE_CALLS = (
    *("stat", "lstat", "scandir", "listdir", "open", "replace", "rename", "unlink", "remove"),
    *("utime", "fsync", "mkdir", "link", "access", "readlink"),
)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_the_engines_thread_touches_no_file(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look-ups, readings, writings, evictions and removals are for other threads."""
    seen: list[tuple[str, str]] = []
    for name in FILE_CALLS:
        real = getattr(os, name)

        def spy(*arguments: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            seen.append((threading.current_thread().name, _name))
            return _real(*arguments, **options)

        monkeypatch.setattr(os, name, spy)
    size = snapshot_of(DOCUMENT).num_bytes
    documents = [piece(name, 400) for name in "ABCD"]
    store = DiskSnapshotStore(tmp_path, max_bytes=3 * size + 6000)
    fake = FakeEngine(num_cells=500)
    options: dict[str, Any] = {"snapshot_policy": policy, "snapshot_memory_bytes": size + 2000}
    with open_swarm(fake, snapshot_store=store, **options) as engine:
        for _ in range(2):
            for document in documents:
                ask(engine, [*document, *piece("question", 20)])
                engine.submit(document, PREFILL, persist=True).result(WAIT_SECONDS)
                engine.flush()

        def torn(*_: Any, **__: Any) -> None:
            raise SequenceError("torn")

        monkeypatch.setattr(fake, "restore", torn)
        ask(engine, [*documents[0], 1, *piece("question", 20)])
        ask(engine, [*documents[2], 2, *piece("question", 20)])
        engine.flush()
        statistics = engine.statistics()
    assert statistics.num_disk_reads > 0
    assert statistics.num_disk_writes > len(documents) - 1
    assert statistics.num_snapshots_refused > 0
    threads = {thread for thread, _ in seen}
    assert threads >= {"swarmkv-snapshot-finder", "swarmkv-snapshot-writer"}
    assert [call for call in seen if call[0] == "swarmkv-engine"] == []


def test_a_look_up_that_hangs_holds_up_nobody_who_runs(tmp_path: Path) -> None:
    """A store of one's own may take long to find: those who run go on, and deadlines hold."""
    is_asked, is_going_on = threading.Event(), threading.Event()

    class Hanging(DiskSnapshotStore):
        def find(self, *arguments: Any, **options: Any) -> FoundPrefix | None:
            is_asked.set()
            assert is_going_on.wait(WAIT_SECONDS)
            return super().find(*arguments, **options)

    options: dict[str, Any] = {"snapshot_store": Hanging(tmp_path), "snapshot_policy": "never"}
    with open_swarm(FakeEngine(num_cells=2000), **options) as engine:
        with pytest.raises(RequestTimeoutError):
            engine.submit(DOCUMENT, SHORT, timeout_seconds=0.05).result(WAIT_SECONDS)
        assert is_asked.is_set()
        is_going_on.set()
        ask(engine, DOCUMENT)


# -- what is lost is told --------------------------------------------------------------------------


def test_closing_loses_nothing_that_memory_or_the_pool_holds(tmp_path: Path) -> None:
    """Under `write_back`, however little may wait: closing takes turns with the disk."""
    documents = [piece(name, 400) for name in "ABCDEF"]
    size = snapshot_of(DOCUMENT).num_bytes
    store = Held(tmp_path)
    engine = open_swarm(
        FakeEngine(num_cells=1300),  # three in the pool, three in memory
        snapshot_store=store,
        snapshot_policy="write_back",
        snapshot_memory_bytes=3 * size + 100,
    )
    for document in documents:
        engine.submit(document, PREFILL).result(WAIT_SECONDS)
    assert engine.statistics().num_spills == 3
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert store.is_writing.wait(WAIT_SECONDS)
    store.is_going_on.set()
    closing.join(WAIT_SECONDS)
    statistics = engine.statistics()
    assert statistics.num_disk_writes == 6
    assert statistics.num_snapshots_dropped_disk_slow == 0
    with DiskSnapshotStore(tmp_path) as after:
        assert len(after) == 6


def test_what_closing_could_not_write_is_counted(tmp_path: Path) -> None:
    """The last picture of the engine has it, and the log."""

    class Full(DiskSnapshotStore):
        def put(self, snapshot: KVSnapshot) -> bool:
            raise SnapshotStorageError("the disk is full")

    with open_swarm(
        FakeEngine(num_cells=1000), snapshot_store=Full(tmp_path), snapshot_policy="write_back"
    ) as engine:
        engine.submit(DOCUMENT, PREFILL).result(WAIT_SECONDS)
    assert engine.statistics().num_disk_failures == 1
    assert engine.statistics().num_disk_writes == 0


@pytest.mark.parametrize("room", ["none", "less than one"])
def test_what_nobody_can_keep_is_not_copied(room: str, caplog: pytest.LogCaptureFixture) -> None:
    """I18: the store is asked before the bytes exist; each loss is counted, and told once."""
    size = snapshot_of(DOCUMENT).num_bytes
    fake = FakeEngine(num_cells=500)
    saved: list[int] = []
    save = fake.save
    fake.save = lambda seq_id: saved.append(seq_id) or save(seq_id)  # type: ignore[method-assign, func-returns-value]
    memory_bytes = 0 if room == "none" else size - 1
    with (
        caplog.at_level(logging.WARNING),
        open_swarm(fake, snapshot_memory_bytes=memory_bytes) as engine,
    ):
        for name in "ABCD":
            engine.submit(piece(name, 400), PREFILL).result(WAIT_SECONDS)
        statistics = engine.statistics()
    assert saved == []
    assert (statistics.num_evictions, statistics.num_spills) == (3, 0)
    assert statistics.num_snapshots_dropped_no_room == 3
    told = [record for record in caplog.records if "snapshot_memory_bytes" in record.getMessage()]
    assert len(told) == (0 if room == "none" else 1)  # who keeps nothing wants nothing kept


def test_what_the_folder_can_never_hold_is_not_copied_for_it(tmp_path: Path) -> None:
    """Its bound is below one file."""
    fake = FakeEngine(num_cells=500)
    saved: list[int] = []
    save = fake.save
    fake.save = lambda seq_id: saved.append(seq_id) or save(seq_id)  # type: ignore[method-assign, func-returns-value]
    store = DiskSnapshotStore(tmp_path, max_bytes=500)
    with open_swarm(fake, snapshot_store=store, snapshot_memory_bytes=0) as engine:
        for name in "ABC":
            engine.submit(piece(name, 400), PREFILL).result(WAIT_SECONDS)
        assert engine.statistics().num_disk_failures == 3
        assert engine.statistics().num_snapshots_dropped_no_room == 2
    assert saved == []


def test_what_others_drove_out_of_memory_is_counted() -> None:
    """Nothing is silent, not even what the limit is for."""
    size = snapshot_of(DOCUMENT).num_bytes
    with open_swarm(FakeEngine(num_cells=500), snapshot_memory_bytes=size + 2000) as engine:
        for name in "ABCD":
            engine.submit(piece(name, 400), PREFILL).result(WAIT_SECONDS)
        assert engine.statistics().num_spills == 3
        assert engine.statistics().num_snapshots_evicted == 2


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_snapshot_that_does_not_load_is_counted_and_told(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found at restore: the request is answered all the same, and the snapshot is gone."""
    short = snapshot_of(DOCUMENT[:399])
    wrong = dataclasses.replace(snapshot_of(DOCUMENT), state=short.state)
    store = DiskSnapshotStore(tmp_path)
    with (
        caplog.at_level(logging.WARNING),
        open_swarm(FakeEngine(num_cells=1000), snapshot_store=store) as engine,
    ):
        if where == "memory":
            engine._loop._tiers.memory.put(wrong)
        else:
            store.put(wrong)
        assert ask(engine, [*DOCUMENT, 1]).num_cached_tokens == 0
        assert engine.statistics().num_snapshots_refused == 1
        assert "did not load" in caplog.text
        engine.flush()
        assert wrong.key not in {file.head.key for file in store.files() if file.head} or (
            store.get(wrong.namespace, DOCUMENT, can_cut=True).snapshot.state != short.state  # type: ignore[union-attr]
        )


# -- stores of one's own ---------------------------------------------------------------------------


class Odd(MemorySnapshotStore):
    """Does `act` where it should look."""

    def __init__(self, where: str, act: Callable[[Any], Any]) -> None:
        super().__init__(1 << 20)
        self.where, self.act = where, act

    def find(self, *arguments: Any, **options: Any) -> Any:
        found = super().find(*arguments, **options)
        return self.act(found) if self.where == "find" and found else found

    def get(self, *arguments: Any, **options: Any) -> Any:
        stored = super().get(*arguments, **options)
        return self.act(stored) if self.where == "get" and stored else stored


def leave(_: Any) -> None:
    raise SystemExit(3)


def other(stored: StoredPrefix, **changes: Any) -> StoredPrefix:
    return dataclasses.replace(stored, snapshot=dataclasses.replace(stored.snapshot, **changes))


ODDITIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "finds a number": ("find", lambda found: 5),
    "finds no number of tokens": (
        "find",
        lambda found: dataclasses.replace(found, num_tokens=None),
    ),
    "finds more tokens than asked for": (
        "find",
        lambda found: FoundPrefix("key", 10_000, 10_000, 1),
    ),
    "finds half a token": ("find", lambda found: dataclasses.replace(found, num_tokens=300.5)),
    "finds no key": ("find", lambda found: dataclasses.replace(found, key=["no", "key"])),
    "leaves while it looks": ("find", leave),
    "gives a number": ("get", lambda stored: 5),
    "gives no number of tokens": ("get", lambda stored: StoredPrefix(stored.snapshot, None)),
    "gives another namespace": ("get", lambda stored: other(stored, namespace="other")),
    "gives other tokens": ("get", lambda stored: other(stored, tokens=tuple(piece("x", 400)))),
    "gives other state": ("get", lambda stored: other(stored, state=b"nothing of ours")),
    "gives more than it found": (
        "get",
        lambda stored: StoredPrefix(stored.snapshot, stored.num_tokens + 1),
    ),
    "leaves while it reads": ("get", leave),
}


@pytest.mark.parametrize("oddity", ODDITIES)
def test_a_store_that_is_wrong_costs_a_prefill_and_no_more(oddity: str) -> None:
    """No wrong answer, no engine that closes, nobody who waits."""
    store = Odd(*ODDITIES[oddity])
    store.put(snapshot_of(DOCUMENT))
    with open_swarm(FakeEngine(num_cells=1000), snapshot_store=store) as engine:
        assert ask(engine, [*DOCUMENT, 1]).num_computed_tokens == 401
        assert ask(engine, [*DOCUMENT, 2]).num_computed_tokens <= 401
        engine.check()


def test_a_store_that_is_gone_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not at every step of every request; the counter has them all."""

    class Gone(MemorySnapshotStore):
        def find(self, *arguments: Any, **options: Any) -> Any:
            raise OSError("no such folder")

    store = Gone(1 << 20)
    with (
        caplog.at_level(logging.WARNING),
        open_swarm(FakeEngine(num_cells=1000), snapshot_store=store) as engine,
    ):
        for number in range(5):
            ask(engine, piece(f"{number}", 100))
        assert engine.statistics().num_disk_failures >= 5
    told = [record for record in caplog.records if "no such folder" in record.getMessage()]
    assert len(told) == 1


def test_a_cache_that_cannot_be_emptied_closes_the_engine(tmp_path: Path) -> None:
    """A state that bricks a sequence ends this engine, with the cause, and is not read again."""

    class Bricked(FakeEngine):
        def restore(self, *_: Any, **__: Any) -> None:
            raise DecodeFatalError("the sequence cannot be emptied", return_code=-1)

    with DiskSnapshotStore(tmp_path) as store:
        store.put(snapshot_of(DOCUMENT))
    with open_swarm(Bricked(num_cells=1000), snapshot_dir=tmp_path) as engine:
        with pytest.raises(EngineClosedError, match="cannot be emptied"):
            engine.submit([*DOCUMENT, 1], SHORT).result(WAIT_SECONDS)
        assert engine.closed
    with open_swarm(FakeEngine(num_cells=1000), snapshot_dir=tmp_path) as engine:
        assert ask(engine, [*DOCUMENT, 1]).num_cached_tokens == 0


# -- callers ---------------------------------------------------------------------------------------


def test_a_snapshot_is_not_asked_for_on_the_engines_own_thread() -> None:
    """A progress callback would wait for itself."""
    errors: list[SwarmKVError] = []
    with open_swarm(FakeEngine(num_cells=1000)) as engine:

        def take(_: Any) -> None:
            try:
                engine.snapshot(DOCUMENT)
            except SwarmKVError as error:
                errors.append(error)

        handle = engine.submit(piece("long", 900), SHORT)
        handle.on_progress(take)
        handle.result(WAIT_SECONDS)
        assert errors
        assert all(isinstance(error, InvalidRequestError) for error in errors)


def test_arguments_of_another_kind_are_refused() -> None:
    """With typed errors."""
    with pytest.raises(ConfigurationError, match="snapshot_store"):
        open_swarm(snapshot_store="kv")
    with open_swarm() as engine:
        with pytest.raises(InvalidRequestError, match="snapshot is a NoneType"):
            engine.insert(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="params is a int"):
            engine.submit([1], 5)  # type: ignore[arg-type]
