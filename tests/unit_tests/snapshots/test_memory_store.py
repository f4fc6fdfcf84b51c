"""The memory store: the contract of all stores, and what is its own."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from tests.unit_tests.snapshots.store_contract import (
    NAMESPACE,
    PLENTY,
    A,
    SnapshotStoreContract,
    snapshot_of,
)


class TestMemorySnapshotStore(SnapshotStoreContract):
    """Runs the conformance suite."""

    def make_store(self, max_bytes: int) -> MemorySnapshotStore:
        return MemorySnapshotStore(max_bytes)


def test_a_negative_limit_is_refused() -> None:
    """The message names the value; 0 is allowed and keeps nothing."""
    with pytest.raises(ConfigurationError, match="-1"):
        MemorySnapshotStore(-1)
    store = MemorySnapshotStore(0)
    assert not store.put(A)
    assert len(store) == 0


def test_the_limit_is_exact_to_the_byte() -> None:
    """What just fits is kept; one byte less of room and it is refused."""
    assert MemorySnapshotStore(A.num_bytes).put(A)
    assert not MemorySnapshotStore(A.num_bytes - 1).put(A)
    store = MemorySnapshotStore(2 * A.num_bytes)
    store.put(A)
    store.put(snapshot_of([2, 10, 11, 12]))
    assert (len(store), store.num_bytes) == (2, store.max_bytes)


def test_evicted_state_is_released() -> None:
    """The store keeps no hidden reference: that memory is the point of its limit."""
    store = MemorySnapshotStore(15_000)
    snapshot = snapshot_of([1])
    gone = weakref.ref(snapshot)
    store.put(snapshot)
    store.put(snapshot_of([2]))
    del snapshot
    gc.collect()
    assert gone() is None


def test_closing_releases_everything() -> None:
    """Length and bytes are zero afterwards."""
    with MemorySnapshotStore(PLENTY) as store:
        store.put(A)
        store.pin(A.key)
    assert (len(store), store.num_bytes) == (0, 0)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "get", "cut", "pin", "unpin", "remove"]), TOKENS),
        max_size=40,
    )
)
def test_any_run_of_calls_equals_a_plain_list(steps: list[tuple[str, list[int]]]) -> None:
    """The store against a list in order of use that is scanned, with room for four or five."""
    max_bytes = 500
    store = MemorySnapshotStore(max_bytes)
    kept: list[tuple[int, ...]] = []
    pins: dict[tuple[int, ...], int] = {}

    def size(tokens: tuple[int, ...]) -> int:
        return 90 + 4 * len(tokens)

    def put(tokens: tuple[int, ...]) -> bool:
        pinned = sum(size(t) for t in kept if pins.get(t) and t != tokens)
        if pinned + size(tokens) > max_bytes:
            return False
        if tokens in kept:
            kept.remove(tokens)
        while sum(map(size, kept)) + size(tokens) > max_bytes:
            kept.remove(next(t for t in kept if not pins.get(t)))
        kept.append(tokens)
        return True

    def common(stored: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        same = [a == b for a, b in zip(stored, tokens, strict=False)]
        return same.index(False) if False in same else len(same)

    for call, ids in steps:
        tokens = tuple(ids)
        snapshot = snapshot_of(tokens, size=90)
        if call == "put":
            assert store.put(snapshot) == put(tokens)
        elif call in ("get", "cut"):
            found = store.get(NAMESPACE, tokens, can_cut=call == "cut")
            lengths = {
                t: common(t, tokens) for t in kept if call == "cut" or common(t, tokens) == len(t)
            }
            best = max(lengths.values(), default=0)
            if best == 0:
                assert found is None
                continue
            assert found is not None
            used = found.snapshot.tokens
            assert found.num_tokens == lengths[used] == best
            assert len(used) == min(len(t) for t, n in lengths.items() if n == best)
            assert found.snapshot == snapshot_of(used, size=90)
            kept.append(kept.pop(kept.index(used)))
        elif call == "pin":
            assert store.pin(snapshot.key) == (tokens in kept)
            pins[tokens] = pins.get(tokens, 0) + (tokens in kept)
        elif call == "unpin":
            assert store.unpin(snapshot.key) == bool(pins.get(tokens))
            pins[tokens] = max(pins.get(tokens, 0) - 1, 0)
        else:
            assert store.remove(snapshot.key) == (tokens in kept)
            kept = [t for t in kept if t != tokens]
            pins.pop(tokens, None)
        assert len(store) == len(kept)
        assert store.num_bytes == sum(map(size, kept)) <= max_bytes
        store._index.check()


@pytest.mark.parametrize("keeps_evicted", [False, True])
def test_what_waits_to_be_written_takes_room(keeps_evicted: bool) -> None:
    """Of the same limit. Where the evicted wait too, evicting frees nothing: none is evicted."""
    one, other = (snapshot_of([token, 2]) for token in (1, 7))
    store = MemorySnapshotStore(one.num_bytes + 50)
    store.keeps_evicted = keeps_evicted
    assert store.put(one)
    assert store.may_take(other.num_bytes)
    store.reserved_bytes = lambda: 51
    assert not store.may_take(other.num_bytes)
    assert not store.put(other)
    store.reserved_bytes = lambda: 50
    assert store.put(other) is not keeps_evicted
    assert [held.tokens for held in store.snapshots()] == [one.tokens if keeps_evicted else (7, 2)]
