"""Prefixes that outlive the engine: what goes to disk, what comes back, and what may go wrong."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from langchain_swarmkv.config import SamplingParams, SnapshotPolicy
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import (
    ConfigurationError,
    ContextBudgetError,
    DecodeFatalError,
    RequestCancelledError,
    RequestTimeoutError,
    SequenceError,
    SnapshotError,
    SnapshotMismatchError,
    SnapshotStorageError,
)
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.snapshots import snapshot_file
from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.store import FoundPrefix, StoredPrefix
from langchain_swarmkv.statistics import PrefixSource
from tests.support.gates import let_restoring_take
from tests.unit_tests.scheduling.support import (
    WAIT_SECONDS,
    answer_alone,
    answer_of,
    open_swarm,
    piece,
)

DOCUMENT = piece("Document", 400)
PREFILL = SamplingParams(max_tokens=0)
SHORT = SamplingParams(max_tokens=12)


@pytest.fixture(autouse=True)
def _restoring_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quicker than computing, whatever else the machine does."""
    let_restoring_take(monkeypatch, 0.0)


def swarm(folder: Path, policy: str = "write_through", **engine: Any) -> SwarmEngine:
    return open_swarm(
        FakeEngine(**{"num_cells": 1000, **engine}), snapshot_dir=folder, snapshot_policy=policy
    )


def assert_answer(engine: SwarmEngine, tokens: list[int]) -> Any:
    """Right, whatever it took; returns the statistics."""
    result = engine.submit(tokens, SHORT, keep_prefix=False).result(WAIT_SECONDS)
    assert answer_of(result) == answer_alone(tokens, SHORT)
    return result.statistics


# -- restart ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_cut", [True, False])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_new_engine_finds_the_document_warm(policy: str, can_cut: bool, tmp_path: Path) -> None:
    """E2: the statistics say so, and the spy on decode agrees: the question alone is computed."""
    with swarm(tmp_path, policy, can_cut=can_cut) as first:
        first.submit(DOCUMENT, PREFILL).result(WAIT_SECONDS)
    fake = FakeEngine(num_cells=1000, can_cut=can_cut)
    with open_swarm(fake, snapshot_dir=tmp_path) as second:
        statistics = assert_answer(second, [*DOCUMENT, 1, 2, 3])
        assert (statistics.num_cached_tokens, statistics.num_computed_tokens) == (400, 3)
        assert statistics.prefix_source is PrefixSource.DISK
        assert fake.decoded_tokens == 3 + statistics.num_output_tokens - 1
        assert second.statistics().num_disk_reads == 1
        again = assert_answer(second, [*DOCUMENT, 4])
        assert again.prefix_source is PrefixSource.RESIDENT
        second.check()


def test_write_through_survives_a_process_that_is_killed(tmp_path: Path) -> None:
    """What was computed is on disk soon after, though the engine is never closed."""
    with swarm(tmp_path) as engine:
        engine.submit(DOCUMENT, PREFILL).result(WAIT_SECONDS)
        engine.flush()
        with DiskSnapshotStore(tmp_path) as store:
            assert len(store) == 1


def test_write_back_writes_when_memory_has_no_room_and_at_the_end(tmp_path: Path) -> None:
    """Nothing before; then what memory had to give up; at the end all the rest."""
    documents = [piece(f"{chr(65 + n)} document", 400) for n in range(4)]
    vocabulary = FakeEngine().facts.n_vocab
    size = 4 * (400 + 400 + vocabulary) + 100  # state, token ids, logits, and some more
    engine = open_swarm(
        FakeEngine(num_cells=500),
        snapshot_memory_bytes=2 * size,
        snapshot_dir=tmp_path,
        snapshot_policy=SnapshotPolicy.WRITE_BACK,
    )
    with engine, DiskSnapshotStore(tmp_path) as store:
        for number, document in enumerate(documents):
            engine.submit(document, PREFILL).result(WAIT_SECONDS)
            engine.flush()
            assert len(store) == max(0, number - 2)
    with DiskSnapshotStore(tmp_path) as store:
        assert len(store) == 4


def test_never_writes_only_what_is_asked_for(tmp_path: Path) -> None:
    """`persist`, and it is there when the request ends."""
    with swarm(tmp_path, "never") as engine, DiskSnapshotStore(tmp_path) as store:
        engine.submit(DOCUMENT, PREFILL).result(WAIT_SECONDS)
        engine.flush()
        assert len(store) == 0
        engine.submit(DOCUMENT, PREFILL, persist=True).result(WAIT_SECONDS)
        assert len(store) == 1
    with swarm(tmp_path, "never") as engine:
        assert assert_answer(engine, [*DOCUMENT, 1]).num_cached_tokens == 400


def test_a_branch_over_a_stored_document_is_not_stored_too(tmp_path: Path) -> None:
    """The document is what costs: fifty questions must not write it fifty times."""
    with swarm(tmp_path, num_cells=4000) as engine:
        engine.submit(DOCUMENT, PREFILL).result(WAIT_SECONDS)
        for number in range(5):
            engine.submit([*DOCUMENT, *piece(f"q{number}", 20)], SHORT).result(WAIT_SECONDS)
        engine.flush()
        assert engine.statistics().num_disk_writes == 1


def test_persist_without_a_place_is_refused() -> None:
    """At once; and a folder beside a store, or an unknown policy."""
    with open_swarm() as engine:
        with pytest.raises(ConfigurationError, match="snapshot_dir"):
            engine.submit(DOCUMENT, PREFILL, persist=True)
        engine.flush()
    for options in (
        {"snapshot_policy": "always"},
        {"snapshot_dir": "x", "snapshot_store": DiskSnapshotStore},
    ):
        with pytest.raises(ConfigurationError):
            SwarmEngine(FakeEngine(), **options)  # type: ignore[arg-type]


# -- partial hits, tenants, sharing ----------------------------------------------------------------


def test_a_part_of_what_is_stored_serves_too(tmp_path: Path) -> None:
    """The longest stored prefix is restored and cut, the rest is computed."""
    with swarm(tmp_path) as engine:
        engine.submit([*DOCUMENT, *piece("old", 50)], PREFILL).result(WAIT_SECONDS)
    with swarm(tmp_path) as engine:
        statistics = assert_answer(engine, [*DOCUMENT[:300], *piece("new", 30)])
        assert statistics.num_cached_tokens == 300
        assert statistics.prefix_source is PrefixSource.DISK


def test_another_salt_finds_nothing(tmp_path: Path) -> None:
    """H2: different, unset and empty salts; equal ones do find it."""
    with swarm(tmp_path) as engine:
        engine.submit(DOCUMENT, PREFILL, cache_salt="tenant a").result(WAIT_SECONDS)
    with swarm(tmp_path) as engine:
        for salt, expected in (("tenant b", 0), ("", 0), ("tenant a", 400)):
            handle = engine.submit([*DOCUMENT, 1], SHORT, cache_salt=salt, keep_prefix=False)
            assert handle.result(WAIT_SECONDS).statistics.num_cached_tokens == expected


@pytest.mark.parametrize("policy", ["write_through", "never"])
def test_a_guess_at_another_tenants_prompt_takes_the_work_of_a_prompt_nobody_stored(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: no time can tell them apart: as many tokens, steps, files opened and snapshots made."""
    opened: list[str] = []
    open_no_follow = snapshot_file.open_no_follow
    monkeypatch.setattr(
        snapshot_file, "open_no_follow", lambda path: opened.append(path) or open_no_follow(path)
    )
    with swarm(tmp_path, policy) as engine:
        engine.submit(DOCUMENT, PREFILL, cache_salt="tenant a", persist=True).result(WAIT_SECONDS)
        engine.flush()

    def work_of(tokens: list[int], salt: str) -> tuple[Any, ...]:
        copy = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        copy.mkdir()
        for path in tmp_path.glob("*.swarmkv"):
            (copy / path.name).write_bytes(path.read_bytes())
        with swarm(copy, policy) as engine:
            opened.clear()
            result = engine.submit([*tokens, 1], PREFILL, cache_salt=salt).result(WAIT_SECONDS)
            engine.flush()
            seen, request = engine.statistics(), result.statistics
            return (
                (request.num_cached_tokens, request.num_computed_tokens, request.prefix_source),
                (seen.num_steps, seen.num_forks, seen.num_restores, seen.prefix_cache_hits),
                (seen.num_disk_reads, seen.num_disk_writes, seen.num_disk_failures),
                len(opened),
            )

    nobodys = piece("Never stored", 400)
    for salt in ("tenant b", ""):
        assert work_of(DOCUMENT, salt) == work_of(nobodys, salt)
    assert work_of(DOCUMENT, "tenant a") != work_of(nobodys, "tenant a")


class SlowStore(DiskSnapshotStore):
    """Reading waits until it is let."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.entered, self.gate = threading.Event(), threading.Event()
        self.num_gets = 0

    def get(self, *args: Any, **options: Any) -> StoredPrefix | None:
        self.num_gets += 1
        self.entered.set()
        assert self.gate.wait(WAIT_SECONDS)
        return super().get(*args, **options)


def stored_document(folder: Path) -> None:
    with swarm(folder) as engine:
        engine.submit(DOCUMENT, PREFILL).result(WAIT_SECONDS)


def test_others_decode_while_a_snapshot_is_read(tmp_path: Path) -> None:
    """The engine's thread does not wait for the disk, and those who want the same read it once."""
    stored_document(tmp_path)
    store = SlowStore(tmp_path)
    with open_swarm(FakeEngine(num_cells=4000), snapshot_store=store) as engine:
        waiting = [engine.submit([*DOCUMENT, n], SHORT, keep_prefix=False) for n in range(4)]
        assert store.entered.wait(WAIT_SECONDS)
        assert_answer(engine, piece("something else", 60))
        assert not any(handle.statistics.finished_at for handle in waiting)
        store.gate.set()
        for number, handle in enumerate(waiting):
            result = handle.result(WAIT_SECONDS)
            assert answer_of(result) == answer_alone([*DOCUMENT, number], SHORT)
            assert result.statistics.num_cached_tokens == 400
        assert store.num_gets == 1


def test_branches_that_wait_for_one_file_restore_it_once(tmp_path: Path) -> None:
    """Those after the first fork what it brought back: one copy of the document in the pool."""
    stored_document(tmp_path)
    store = SlowStore(tmp_path)
    with open_swarm(FakeEngine(num_cells=4000), snapshot_store=store) as engine:
        waiting = [engine.submit([*DOCUMENT, n], SHORT, keep_prefix=False) for n in range(4)]
        store.gate.set()
        for handle in waiting:
            assert handle.result(WAIT_SECONDS).statistics.num_cached_tokens == 400
        statistics = engine.statistics()
        assert statistics.num_restores == 1
        assert statistics.cells_used == 400


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_a_snapshot_that_the_pool_can_never_hold_is_not_read(
    memory_bytes: int, tmp_path: Path
) -> None:
    """Written by an engine with a larger pool: each request would read it, and compute."""
    with swarm(tmp_path) as engine:
        engine.submit([*DOCUMENT, *piece("more", 500)], PREFILL).result(WAIT_SECONDS)
    with open_swarm(
        FakeEngine(num_cells=600),
        snapshot_dir=tmp_path,
        snapshot_memory_bytes=memory_bytes,
        snapshot_policy="never",
    ) as engine:
        for number in range(3):
            assert_answer(engine, [*DOCUMENT, number])
        assert engine.statistics().num_disk_reads == 0


def leave_by_cancelling(engine: SwarmEngine) -> None:
    handle = engine.submit([*DOCUMENT, 1], SHORT)
    handle.cancel()
    with pytest.raises(RequestCancelledError):
        handle.result(WAIT_SECONDS)


def leave_by_deadline(engine: SwarmEngine) -> None:
    with pytest.raises(RequestTimeoutError):
        engine.submit([*DOCUMENT, 1], SHORT, timeout_seconds=0.05).result(WAIT_SECONDS)


@pytest.mark.parametrize("leave", [leave_by_cancelling, leave_by_deadline])
def test_a_request_may_leave_while_its_snapshot_is_read(
    leave: Callable[[SwarmEngine], None], tmp_path: Path
) -> None:
    """At once, not when the disk has answered; and the engine goes on."""
    stored_document(tmp_path)
    store = SlowStore(tmp_path)
    with open_swarm(FakeEngine(num_cells=4000), snapshot_store=store) as engine:
        leave(engine)
        assert_answer(engine, piece("something else", 60))
        store.gate.set()
        assert assert_answer(engine, [*DOCUMENT, 2]).num_cached_tokens == 400
        engine.check()


def test_closing_does_not_wait_for_a_reader_that_hangs_for_ever(tmp_path: Path) -> None:
    """Those who wait get their error first."""
    stored_document(tmp_path)
    store = SlowStore(tmp_path)
    engine = open_swarm(FakeEngine(num_cells=4000), snapshot_store=store)
    handle = engine.submit([*DOCUMENT, 1], SHORT)
    assert store.entered.wait(WAIT_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(engine.close)
        with pytest.raises(Exception, match="closed"):
            handle.result(WAIT_SECONDS)
        store.gate.set()
        closing.result(WAIT_SECONDS)


# -- what goes wrong -------------------------------------------------------------------------------


class BrokenStore(DiskSnapshotStore):
    """Finds, and then fails."""

    def get(self, *args: Any, **options: Any) -> StoredPrefix | None:
        raise SnapshotStorageError("the disk is on fire")

    def put(self, snapshot: KVSnapshot) -> bool:
        raise SnapshotStorageError("the disk is on fire")


def test_a_disk_that_fails_costs_a_prefill_and_nothing_else(tmp_path: Path) -> None:
    """Reading and writing: right answers, counted failures, no loop of attempts."""
    stored_document(tmp_path)
    with open_swarm(FakeEngine(num_cells=4000), snapshot_store=BrokenStore(tmp_path)) as engine:
        assert assert_answer(engine, [*DOCUMENT, 1]).num_cached_tokens == 0
        engine.submit(piece("new", 60), PREFILL).result(WAIT_SECONDS)
        engine.flush()
        assert engine.statistics().num_disk_failures >= 2
        engine.check()


class SilentStore(DiskSnapshotStore):
    """Finds what it then does not have."""

    def find(self, namespace: str, tokens: Any, **options: Any) -> FoundPrefix | None:
        return FoundPrefix("00", min(len(tokens), 300), 300, 1000)

    def get(self, *args: Any, **options: Any) -> StoredPrefix | None:
        return None


def test_what_is_gone_when_it_is_read_is_computed(tmp_path: Path) -> None:
    """Another process may evict it in between."""
    with open_swarm(FakeEngine(num_cells=4000), snapshot_store=SilentStore(tmp_path)) as engine:
        assert assert_answer(engine, [*DOCUMENT, 1]).num_cached_tokens == 0
        assert_answer(engine, [*DOCUMENT, 2])


def test_a_state_that_does_not_load_is_removed_and_computed(tmp_path: Path) -> None:
    """E1: an intact file with a state that the engine refuses; two good branches after it."""
    good = FakeEngine(num_cells=1000)
    with open_swarm(good) as engine:
        snapshot = engine.snapshot(DOCUMENT)
    bad = KVSnapshot(snapshot.identity, snapshot.namespace, snapshot.tokens, b"nonsense" * 100)
    with DiskSnapshotStore(tmp_path) as store:
        store.put(bad)
    with swarm(tmp_path, "never") as engine:
        for number in range(3):
            assert_answer(engine, [*DOCUMENT, number])
        engine.check()
        assert engine.statistics().num_restores == 0
    with DiskSnapshotStore(tmp_path) as store:
        assert len(store) == 0


# -- a prompt that is a snapshot, whole ------------------------------------------------------------


@pytest.mark.parametrize("can_cut", [True, False])
@pytest.mark.parametrize(
    "params", [SHORT, SamplingParams(max_tokens=8, temperature=1.0, seed=3, logprobs=2)]
)
def test_a_prompt_that_was_prefilled_whole_is_answered_without_prefill(
    params: SamplingParams, can_cut: bool, tmp_path: Path
) -> None:
    """The logits after its last token come back with it, from the pool and from the disk."""
    with swarm(tmp_path, can_cut=can_cut) as first:
        first.submit(DOCUMENT, PREFILL).result(WAIT_SECONDS)
        resident = first.submit(DOCUMENT, params, keep_prefix=False).result(WAIT_SECONDS)
        assert first.statistics().num_prefill_tokens == 400
    with swarm(tmp_path, can_cut=can_cut) as second:
        from_disk = second.submit(DOCUMENT, params).result(WAIT_SECONDS)
        assert second.statistics().num_prefill_tokens == 0
        second.check()
    with swarm(tmp_path / "empty", can_cut=can_cut) as third:
        computed = third.submit(DOCUMENT, params).result(WAIT_SECONDS)
    assert from_disk.statistics.num_computed_tokens == 0
    assert from_disk.statistics.first_token_at is not None
    assert answer_of(resident) == answer_of(from_disk) == answer_of(computed)
    assert resident.logprobs == from_disk.logprobs == computed.logprobs


@pytest.mark.parametrize("can_cut", [True, False])
@pytest.mark.parametrize(
    "kind", ["none", "of another vocabulary", "not numbers", "of a longer one"]
)
def test_logits_that_cannot_be_used_are_computed_again(
    kind: str, can_cut: bool, tmp_path: Path
) -> None:
    """Whoever can write a file can write any logits, and those of other tokens do not serve."""
    with swarm(tmp_path / "first") as engine:
        tokens = [*DOCUMENT, 7] if kind == "of a longer one" else DOCUMENT
        snapshot = engine.snapshot(tokens)
    assert snapshot.logits is not None
    logits = {
        "none": None,
        "of another vocabulary": snapshot.logits[4:],
        "not numbers": b"\xff" * len(snapshot.logits),
        "of a longer one": snapshot.logits,
    }[kind]
    with DiskSnapshotStore(tmp_path / "second") as store:
        store.put(dataclasses.replace(snapshot, logits=logits))
    with swarm(tmp_path / "second", can_cut=can_cut) as engine:
        statistics = assert_answer(engine, DOCUMENT)
        assert statistics.num_computed_tokens == (1 if can_cut else 400)
        engine.check()


# -- what asked to be written ----------------------------------------------------------------------


class _Broken(MemorySnapshotStore):
    """A store of the user's own that fails as the disk does, or as only programs do."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1 << 20)
        self.error = error

    def put(self, snapshot: KVSnapshot) -> bool:
        raise self.error

    def find(self, *arguments: Any, **options: Any) -> FoundPrefix | None:
        raise self.error

    def close(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [SnapshotStorageError("full"), OSError("full"), KeyError("bug")])
def test_persist_fails_its_request_alone(error: Exception) -> None:
    """The answer is not said to be on disk; others go on, and the store's error is the cause."""
    with open_swarm(FakeEngine(num_cells=1000), snapshot_store=_Broken(error)) as engine:
        lost = engine.submit(DOCUMENT, PREFILL, persist=True)
        with pytest.raises(SnapshotStorageError) as caught:
            lost.result(WAIT_SECONDS)
        assert error in (caught.value, caught.value.__cause__)
        assert_answer(engine, [*DOCUMENT, 1])
        statistics = engine.statistics()
        assert (statistics.num_failed, statistics.num_disk_writes) == (1, 0)
        assert statistics.num_disk_failures > 0
        engine.check()


def test_persist_in_a_store_that_is_too_small_is_an_error() -> None:
    """A put that is refused is no success either."""
    with (
        open_swarm(FakeEngine(num_cells=1000), snapshot_store=MemorySnapshotStore(100)) as engine,
        pytest.raises(SnapshotStorageError, match="max_bytes"),
    ):
        engine.submit(DOCUMENT, PREFILL, persist=True).result(WAIT_SECONDS)


def test_a_request_that_waits_for_the_disk_can_be_cancelled_and_times_out(tmp_path: Path) -> None:
    """A disk that hangs keeps nobody, neither those who asked nor the others."""
    is_going_on = threading.Event()

    class Hanging(DiskSnapshotStore):
        def put(self, snapshot: KVSnapshot) -> bool:
            assert is_going_on.wait(WAIT_SECONDS)
            return super().put(snapshot)

    with open_swarm(FakeEngine(num_cells=1000), snapshot_store=Hanging(tmp_path)) as engine:
        try:
            late = engine.submit(DOCUMENT, PREFILL, persist=True, timeout_seconds=0.1)
            with pytest.raises(RequestTimeoutError):
                late.result(WAIT_SECONDS)
            given_up = engine.submit(DOCUMENT, PREFILL, persist=True)
            assert_answer(engine, [*DOCUMENT, 1])
            given_up.cancel()
            with pytest.raises(RequestCancelledError):
                given_up.result(WAIT_SECONDS)
        finally:
            is_going_on.set()
        engine.submit(DOCUMENT, PREFILL, persist=True).result(WAIT_SECONDS)
        assert engine.statistics().num_disk_writes >= 1


def test_a_snapshot_that_no_store_has_room_for_costs_nothing_but_its_computing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No memory at all, and a disk smaller than one file: right answers, told and counted."""
    store = DiskSnapshotStore(tmp_path, 1000)
    with open_swarm(
        FakeEngine(num_cells=500), snapshot_memory_bytes=0, snapshot_store=store
    ) as engine:
        for _ in range(2):
            for name in "AB":
                document = piece(f"{name} document", 400)
                assert_answer(engine, [*document, 1])
                engine.submit(document, PREFILL).result(WAIT_SECONDS)
                engine.flush()
        statistics = engine.statistics()
        engine.check()
    assert list(tmp_path.glob("*.swarmkv")) == []
    assert statistics.num_disk_writes == statistics.num_restores == statistics.store_bytes == 0
    assert statistics.num_disk_failures >= 4
    assert "no room in" in caplog.text


def test_without_memory_the_disk_alone_serves(tmp_path: Path) -> None:
    """`snapshot_memory_bytes=0`: what leaves the pool comes back from its file."""
    documents = [piece(f"{name} document", 400) for name in "ABC"]
    fake = FakeEngine(num_cells=500)
    with open_swarm(fake, snapshot_memory_bytes=0, snapshot_dir=tmp_path) as engine:
        for _ in range(2):
            for document in documents:
                assert_answer(engine, [*document, 1])
                engine.submit(document, PREFILL).result(WAIT_SECONDS)
                engine.flush()
        assert engine.statistics().num_disk_reads == 3
        assert engine.statistics().store_bytes == 0
        engine.check()


def test_pins_and_streams_hold_what_they_use_and_let_go_on_every_path(tmp_path: Path) -> None:
    """C6: room for two documents; A and B stream and are pinned, C waits, then is refused.

    Then a restore fails half-way, a branch runs out of time, and pins are released twice.
    """
    a, b, c = (piece(f"{name} document", 400) for name in "ABC")
    stored_documents = [piece("Stored", 400), piece("Torn", 400)]
    with swarm(tmp_path) as engine:
        for document in stored_documents:
            engine.submit(document, PREFILL).result(WAIT_SECONDS)
    fake = FakeEngine(num_cells=1000, step_seconds=0.001)
    with open_swarm(fake, snapshot_dir=tmp_path, snapshot_policy="never") as engine:
        for document, pin in ((a, "A"), (b, "B"), (b, "B")):
            engine.submit(document, PREFILL, pin=pin).result(WAIT_SECONDS)
        long = SamplingParams(max_tokens=90, ignore_eos=True)
        streams = [engine.submit([*d, 1], long, keep_prefix=False) for d in (a, b)]
        for stream in streams:
            next(iter(stream))
        waiting = engine.submit([*c, 1], SHORT, keep_prefix=False)
        with pytest.raises(ContextBudgetError, match="pinned"):
            waiting.result(WAIT_SECONDS)  # when both streams have ended, and not before
        for stream, document in zip(streams, (a, b), strict=True):
            assert answer_of(stream.result(WAIT_SECONDS)) == answer_alone([*document, 1], long)
        assert engine.statistics().num_pinned_prefixes == 2
        assert engine.release("A")
        assert not engine.release("A")
        assert_answer(engine, [*c, 1])
        # B stays where it is, whatever fails beside it.
        restore = fake.restore

        def torn(*_: Any, **__: Any) -> None:
            raise SequenceError("torn")

        fake.restore = torn  # type: ignore[method-assign]
        assert assert_answer(engine, [*stored_documents[1], 1]).num_cached_tokens == 0
        fake.restore = restore  # type: ignore[method-assign]
        slow = SamplingParams(max_tokens=100, ignore_eos=True)
        with pytest.raises(RequestTimeoutError):
            engine.submit([*b, 2], slow, timeout_seconds=0.03).result(WAIT_SECONDS)
        assert assert_answer(engine, [*stored_documents[0], 1]).num_cached_tokens == 400
        assert engine.is_resident(b)
        assert engine.release("B")
        assert not engine.release("B")
        statistics = engine.statistics()
        assert (statistics.num_pinned_prefixes, statistics.cells_pinned) == (0, 0)
        assert_answer(engine, [*c, 2])
        engine.check()


def test_ids_come_back_while_documents_come_and_go(tmp_path: Path) -> None:
    """D4: 4 ids, 400 branches over 8 stored documents, a third of them cancelled or failing."""
    documents = [piece(f"{name} document", 100) for name in "ABCDEFGH"]
    with swarm(tmp_path) as engine:
        for document in documents:
            engine.submit(document, PREFILL).result(WAIT_SECONDS)

    def fail_some(batch: Batch) -> None:
        if batch.tokens[-1] == 7:
            raise DecodeFatalError("torn", return_code=-3)

    fake = FakeEngine(num_cells=450, max_sequences=4, on_decode=fail_some)
    with open_swarm(fake, snapshot_dir=tmp_path, snapshot_memory_bytes=2000) as engine:
        for number in range(400):
            prompt = [*documents[number * 5 % 8], 7 if number % 6 == 5 else 40]
            handle = engine.submit(prompt, SHORT, keep_prefix=number % 2 == 0)
            if number % 6 == 2:
                handle.cancel()
            try:
                assert answer_of(handle.result(WAIT_SECONDS)) == answer_alone(prompt, SHORT)
            except (DecodeFatalError, RequestCancelledError):
                assert number % 3 == 2
        statistics = engine.statistics()
        assert statistics.num_disk_reads > 0
        assert statistics.sequences_used == statistics.num_resident_prefixes <= 4
        engine.check()


def test_the_pool_keeps_its_promises_when_a_document_comes_back(tmp_path: Path) -> None:
    """D6: pool 512, 300 tokens from disk, branches of 20, 20 and 150: none is cut, none is lost."""
    document = DOCUMENT[:300]
    with swarm(tmp_path) as engine:
        engine.submit(document, PREFILL).result(WAIT_SECONDS)
    with swarm(tmp_path, num_cells=512) as engine:
        handles = []
        for number, max_tokens in enumerate((20, 20, 150)):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            prompt = [*document, number]
            handles.append((engine.submit(prompt, params, keep_prefix=False), prompt, params))
        for handle, prompt, params in handles:
            assert answer_of(handle.result(WAIT_SECONDS)) == answer_alone(prompt, params)
        engine.check()


# -- by hand ---------------------------------------------------------------------------------------


def test_a_snapshot_moves_from_engine_to_engine() -> None:
    """Taken of exactly the tokens, whatever is in the cache; inserted, it serves as if computed."""
    with open_swarm(FakeEngine(num_cells=1000)) as first, open_swarm(FakeEngine()) as second:
        first.submit([*DOCUMENT, *piece("more", 50)], PREFILL).result(WAIT_SECONDS)
        snapshot = first.snapshot(DOCUMENT)
        assert snapshot.tokens == tuple(DOCUMENT)
        assert snapshot.num_logits == first.facts.n_vocab
        assert first.statistics().num_prefill_tokens == 450 + 1  # again the last, for its logits
        second.insert(snapshot)
        statistics = assert_answer(second, [*DOCUMENT, 1])
        assert statistics.num_cached_tokens == 400
        assert statistics.prefix_source is PrefixSource.MEMORY


def test_a_snapshot_of_something_else_is_refused_by_name() -> None:
    """A8: model and salt; and one that memory has no room for."""
    with open_swarm(FakeEngine(num_cells=1000)) as engine:
        snapshot = engine.snapshot(DOCUMENT)
        identity = engine.facts.identity
        for field in dataclasses.fields(identity):
            other = dataclasses.replace(identity, **{field.name: "another"})
            with pytest.raises(SnapshotMismatchError, match=field.name) as caught:
                engine.insert(dataclasses.replace(snapshot, identity=other))
            assert caught.value.facts["field"] == field.name
            assert caught.value.facts["seen"] == "another"
        with pytest.raises(SnapshotMismatchError, match="cache_salt"):
            engine.insert(snapshot, cache_salt="other")
    with (
        open_swarm(FakeEngine(num_cells=1000), snapshot_memory_bytes=0) as small,
        pytest.raises(SnapshotError, match="snapshot_memory_bytes"),
    ):
        small.insert(snapshot)


def test_a_snapshot_whose_parts_disagree_is_refused_at_insert() -> None:
    """Nothing is stored, and the error names the part; what fits goes in."""
    with open_swarm(FakeEngine(num_cells=1000)) as engine:
        good, other = engine.snapshot(DOCUMENT), engine.snapshot(DOCUMENT[:399])
        logits = bytearray(good.logits or b"")
        logits[:4] = b"\x00\x00\xc0\x7f"  # no number
        wrong: dict[str, list[dict[str, Any]]] = {
            "state": [
                {"tokens": good.tokens[:-1]},
                {"tokens": (*good.tokens, 65)},
                {"state": other.state},
                {"state": good.state[:-4]},
                {"state": b"nothing of ours"},
            ],
            "tokens": [{"tokens": (*good.tokens[:-1], engine.facts.n_vocab)}],
            "logits": [{"logits": good.logits[:-4]}, {"logits": bytes(logits)}],  # type: ignore[index]
        }
        before = engine.statistics().store_bytes
        for field, changes in wrong.items():
            for change in changes:
                with pytest.raises(SnapshotMismatchError) as caught:
                    engine.insert(dataclasses.replace(good, **change))
                assert caught.value.facts["field"] == field, change
        assert engine.statistics().store_bytes == before
        engine.insert(good)
        assert engine.statistics().store_bytes == before + good.num_bytes


def test_pins_belong_to_a_salt() -> None:
    """Two tenants pin under one name: both are held, and each releases its own alone."""
    with open_swarm(FakeEngine(num_cells=1000)) as engine:
        for salt in ("a", "b"):
            engine.submit(DOCUMENT, PREFILL, cache_salt=salt, pin="name").result(WAIT_SECONDS)
        assert engine.statistics().num_pinned_prefixes == 2
        assert not engine.release("name")
        assert engine.release("name", cache_salt="b")
        assert not engine.release("name", cache_salt="b")
        engine.submit(piece("other", 500), PREFILL).result(WAIT_SECONDS)
        assert engine.is_resident(DOCUMENT, "a")
        assert not engine.is_resident(DOCUMENT, "b")
        assert engine.release("name", cache_salt="a")


def test_a_pin_used_again_for_other_tokens_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It stays with what it held; repeating it for the same says nothing."""
    with open_swarm(FakeEngine(num_cells=2000)) as engine:
        for _ in range(2):
            engine.submit(DOCUMENT, PREFILL, pin="name").result(WAIT_SECONDS)
        assert not caplog.records
        engine.submit(piece("other", 500), PREFILL, pin="name").result(WAIT_SECONDS)
        assert engine.statistics().num_pinned_prefixes == 1
    (told,) = caplog.records
    assert "The pin 'name' holds other tokens; 500 more were not pinned" in told.getMessage()


def test_restoring_is_left_when_computing_is_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rates that were measured: a disk that takes longer than the prefill is not asked."""
    let_restoring_take(monkeypatch, 1000.0)
    documents = [piece(f"{chr(65 + n)} document", 400) for n in range(3)]
    with swarm(tmp_path) as engine:
        for document in documents:
            engine.submit(document, PREFILL).result(WAIT_SECONDS)
    with swarm(tmp_path, "never", num_cells=4000) as engine:
        assert assert_answer(engine, [*documents[0], 1]).prefix_source is PrefixSource.DISK
        engine.submit(piece("computed", 600), PREFILL).result(WAIT_SECONDS)
        assert assert_answer(engine, [*documents[1], 1]).prefix_source is PrefixSource.NONE


def test_many_documents_rotate_through_a_small_pool(tmp_path: Path) -> None:
    """Twelve through room for two, with memory for three: each is computed once in three rounds."""
    documents = [piece(f"{chr(65 + n)} document", 400) for n in range(12)]
    fake = FakeEngine(num_cells=1000)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    with open_swarm(fake, snapshot_dir=tmp_path, snapshot_memory_bytes=3 * 3400) as engine:
        for _ in range(3):
            for document in documents:
                engine.submit(document, PREFILL).result(WAIT_SECONDS)
                answer = engine.submit([*document, 1], one, keep_prefix=False).result(WAIT_SECONDS)
                assert answer_of(answer) == answer_alone([*document, 1], one)
                engine.flush()
        statistics = engine.statistics()
        assert statistics.num_disk_reads >= 12
        assert statistics.num_disk_writes == 12
        assert statistics.num_prefill_tokens == 12 * 400 + 3 * 12
        engine.check()
