"""What every `SnapshotStore` must do. A store's test class inherits the suite and makes stores.

    class TestMyStore(SnapshotStoreContract):
        def make_store(self, max_bytes: int) -> SnapshotStore:
            return MyStore(max_bytes)

Sizes leave room for headers: a snapshot has 10,000 bytes of state, and a store for two has 25,000.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from langchain_swarmkv.engine.identity import ModelIdentity
from langchain_swarmkv.errors import SnapshotError
from langchain_swarmkv.snapshots import snapshot as snapshot_module
from langchain_swarmkv.snapshots import snapshot_file
from langchain_swarmkv.snapshots.snapshot import KVSnapshot, prefix_namespace
from langchain_swarmkv.snapshots.store import SnapshotStore, StoredPrefix

STATE_BYTES = 10_000
ROOM_FOR_TWO = 25_000
PLENTY = 10_000_000


def identity_of(weights: str) -> ModelIdentity:
    """A model that differs from others by its weights."""
    return ModelIdentity(
        architecture="llama",
        tokenizer="words",
        weights=weights,
        kv_type_k="f16",
        kv_type_v="f16",
        rope="of the model",
        llama_cpp="1.0",
    )


def namespace_of(weights: str, salt: str) -> str:
    """What requests with that salt to that model may use."""
    return prefix_namespace(identity_of(weights).digest, salt)


def snapshot_of(
    tokens: Sequence[int], *, salt: str = "", identity: str = "model", size: int = STATE_BYTES
) -> KVSnapshot:
    """A snapshot whose state follows from everything that it is of, so that a mix-up shows."""
    seed = repr((identity, salt, tuple(tokens)))
    state = random.Random(seed).randbytes(size)
    return KVSnapshot(
        identity_of(identity), namespace_of(identity, salt), tuple(tokens), state, model_name="m"
    )


def _set_key_function(monkeypatch: pytest.MonkeyPatch, function: Callable[..., str]) -> None:
    """Where keys are computed: for a snapshot, and for the head of a file."""
    for module in (snapshot_module, snapshot_file):
        monkeypatch.setattr(module, "snapshot_key", function)


def stored(store: SnapshotStore, snapshot: KVSnapshot) -> bool:
    """Whether the store holds it, asked without counting as a use."""
    if not store.pin(snapshot.key):
        return False
    store.unpin(snapshot.key)
    return True


A, B, C = (snapshot_of([first, 10, 11, 12]) for first in (1, 2, 3))
NAMESPACE = A.namespace


class SnapshotStoreContract(ABC):
    """The suite."""

    @abstractmethod
    def make_store(self, max_bytes: int) -> SnapshotStore:
        """An empty store."""

    @pytest.fixture
    def store(self) -> Iterator[SnapshotStore]:
        with self.make_store(PLENTY) as store:
            yield store

    @pytest.fixture
    def small(self) -> Iterator[SnapshotStore]:
        with self.make_store(ROOM_FOR_TWO) as store:
            yield store

    # What is found.

    def test_what_was_put_comes_back_whole(self, store: SnapshotStore) -> None:
        """Every field equal, however the engine cuts."""
        assert store.put(A)
        for can_cut in (True, False):
            found = store.get(NAMESPACE, A.tokens, can_cut=can_cut)
            assert found == StoredPrefix(A, A.num_tokens)
            assert found.is_whole

    def test_an_empty_store_has_nothing(self, store: SnapshotStore) -> None:
        """A miss is None, not an error."""
        assert (len(store), store.num_bytes) == (0, 0)
        assert store.get(NAMESPACE, [1, 2], can_cut=True) is None
        assert store.get(NAMESPACE, [1, 2], can_cut=False) is None
        assert store.get(NAMESPACE, [], can_cut=True) is None

    def test_a_prompt_that_goes_on_finds_the_longest_stored_beginning(
        self, store: SnapshotStore
    ) -> None:
        """Of document, document + turn, and more: the longest that the prompt starts with."""
        sizes = (5, 10, 20)
        for size in sizes:
            store.put(snapshot_of(range(size)))
        for prompt, expected in ((5, 5), (9, 5), (10, 10), (19, 10), (20, 20), (50, 20)):
            found = store.get(NAMESPACE, range(prompt), can_cut=False)
            assert found is not None
            assert (found.num_tokens, found.snapshot.num_tokens) == (expected, expected)
            assert found.snapshot == snapshot_of(range(expected))

    def test_a_model_that_can_cut_gets_the_longest_common_prefix(
        self, store: SnapshotStore
    ) -> None:
        """The longer snapshot wins where it shares more, though only a part of it is used."""
        short, long = snapshot_of(range(5)), snapshot_of(range(20))
        store.put(short)
        store.put(long)
        prompt = [*range(12), 99]
        assert store.get(NAMESPACE, prompt, can_cut=True) == StoredPrefix(long, 12)
        assert store.get(NAMESPACE, prompt, can_cut=False) == StoredPrefix(short, 5)
        assert not StoredPrefix(long, 12).is_whole

    def test_of_equal_prefixes_the_smallest_snapshot_is_given(self, store: SnapshotStore) -> None:
        """The least bytes to restore, and the least cells."""
        large = snapshot_of([*range(5), 7, 7], size=2 * STATE_BYTES)
        small = snapshot_of([*range(5), 8])
        for snapshot in (large, small):
            store.put(snapshot)
        assert store.get(NAMESPACE, range(6), can_cut=True) == StoredPrefix(small, 5)

    def test_a_match_below_the_minimum_is_none_and_no_use(self, small: SnapshotStore) -> None:
        """A start token in common must not keep a snapshot young."""
        small.put(A)
        small.put(B)
        assert small.get(NAMESPACE, A.tokens[:2], can_cut=True, min_tokens=3) is None
        assert small.get(NAMESPACE, A.tokens, can_cut=False, min_tokens=5) is None
        small.put(C)
        assert not stored(small, A)

    def test_any_form_of_token_ids_finds_the_same(self, store: SnapshotStore) -> None:
        """A list, a range or a numpy array."""
        snapshot = snapshot_of(range(8))
        store.put(snapshot)
        for tokens in (list(range(8)), range(8), np.arange(8), np.arange(8, dtype=np.int32)):
            assert store.get(NAMESPACE, tokens, can_cut=False) == StoredPrefix(snapshot, 8)

    def test_find_tells_what_get_would_give(self, store: SnapshotStore) -> None:
        """Key, shared tokens, size of the whole; the same misses."""
        long = snapshot_of(range(20))
        store.put(long)
        prompt = [*range(12), 99]
        found = store.find(NAMESPACE, prompt, can_cut=True)
        assert found is not None
        assert (found.key, found.num_tokens, found.snapshot_tokens) == (long.key, 12, 20)
        assert found.num_bytes >= STATE_BYTES
        assert store.find(NAMESPACE, prompt, can_cut=False) is None
        assert store.find(NAMESPACE, prompt, can_cut=True, min_tokens=13) is None
        assert store.find(namespace_of("model", "other"), prompt, can_cut=True) is None

    def test_logits_and_the_name_come_back_too(self, store: SnapshotStore) -> None:
        """Whatever a snapshot holds."""
        whole = dataclasses.replace(A, logits=b"\0\0\x80\x3f" * 7, model_name="größer")
        store.put(whole)
        assert store.get(NAMESPACE, A.tokens, can_cut=True) == StoredPrefix(whole, A.num_tokens)

    # Whose it is.

    def test_namespaces_are_strangers(self, store: SnapshotStore) -> None:
        """Another salt or another model finds nothing, not even a part; an equal salt does."""
        tokens = [5, 6, 7]
        store.put(snapshot_of(tokens, salt="tenant a"))
        strangers = [("model", ""), ("model", "tenant b"), ("other", "tenant a")]
        for identity, salt in strangers:
            for can_cut in (True, False):
                namespace = namespace_of(identity, salt)
                assert store.get(namespace, tokens, can_cut=can_cut) is None
        found = store.get(namespace_of("model", "tenant a"), tokens, can_cut=True)
        assert found is not None
        assert found.snapshot == snapshot_of(tokens, salt="tenant a")

    def test_equal_tokens_under_two_salts_are_two_snapshots(self, store: SnapshotStore) -> None:
        """Each caller gets its own bytes, and one's removal leaves the other's."""
        mine, yours = (snapshot_of([1, 2, 3], salt=salt) for salt in ("mine", "yours"))
        store.put(mine)
        store.put(yours)
        assert len(store) == 2
        assert store.get(mine.namespace, [1, 2, 3], can_cut=True) == StoredPrefix(mine, 3)
        assert store.remove(mine.key)
        assert store.get(mine.namespace, [1, 2, 3], can_cut=True) is None
        assert store.get(yours.namespace, [1, 2, 3], can_cut=True) == StoredPrefix(yours, 3)

    def test_colliding_keys_give_a_miss_never_another_ones_state(
        self, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A key function of 8 bits and 300 documents in 3 namespaces."""
        full_key = snapshot_module.snapshot_key
        _set_key_function(monkeypatch, lambda *args: full_key(*args)[:2])
        documents = [snapshot_of([i % 7, i, 300 - i], salt=f"{i % 3}") for i in range(300)]
        assert len({document.key for document in documents}) < 300
        for document in documents:
            assert store.put(document)
        num_hits = 0
        for document in documents:
            found = store.get(document.namespace, document.tokens, can_cut=False)
            assert found is None or found == StoredPrefix(document, 3)
            num_hits += found is not None
            part = store.get(document.namespace, document.tokens, can_cut=True)
            if part is not None:
                assert part.snapshot in documents
                assert part.snapshot.namespace == document.namespace
                shared = part.snapshot.tokens[: part.num_tokens]
                assert shared == document.tokens[: part.num_tokens]
        assert num_hits == len(store) == len({document.key for document in documents})

    def test_a_colliding_key_cannot_replace_a_pinned_snapshot(
        self, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is refused while the pin lasts, also where only the namespace differs."""
        _set_key_function(monkeypatch, lambda *args: "00")
        pinned, others = snapshot_of([1, 2]), [snapshot_of([1, 3]), snapshot_of([1, 2], salt="b")]
        store.put(pinned)
        store.pin(pinned.key)
        for other in others:
            assert not store.put(other)
        assert store.get(NAMESPACE, [1, 2], can_cut=False) == StoredPrefix(pinned, 2)
        store.unpin(pinned.key)
        assert store.put(others[0])
        assert store.get(NAMESPACE, [1, 2], can_cut=False) is None

    # What is kept.

    def test_the_least_recently_used_goes_first(self, small: SnapshotStore) -> None:
        """A find is a use, and so is a put."""
        small.put(A)
        small.put(B)
        small.get(NAMESPACE, A.tokens, can_cut=False)
        small.put(C)
        assert [stored(small, s) for s in (A, B, C)] == [True, False, True]
        small.put(A)
        small.put(B)
        assert [stored(small, s) for s in (A, B, C)] == [True, True, False]

    def test_the_bytes_never_exceed_the_limit(self) -> None:
        """Snapshots of many sizes through a small store, with the count of bytes always right."""
        with self.make_store(60_000) as store:
            rng = random.Random(3)
            for first in range(200):
                size = rng.randrange(1, 30_000)
                assert store.put(snapshot_of([first], size=size))
                assert size <= store.num_bytes <= 60_000
                assert len(store) > 0
            store.clear()
            assert (len(store), store.num_bytes) == (0, 0)

    def test_a_snapshot_larger_than_the_store_is_refused(self, small: SnapshotStore) -> None:
        """And nothing was evicted for it."""
        small.put(A)
        assert not small.put(snapshot_of([9], size=ROOM_FOR_TWO + 1))
        assert stored(small, A)
        assert len(small) == 1

    def test_pins_are_respected(self, small: SnapshotStore) -> None:
        """With both pinned one may be replaced, none evicted; unpinned, it makes room."""
        small.put(A)
        small.put(B)
        assert small.pin(A.key)
        assert small.pin(B.key)
        num_bytes = small.num_bytes
        assert small.put(A)
        assert not small.put(C)
        assert (len(small), small.num_bytes) == (2, num_bytes)
        assert small.unpin(A.key)
        assert small.put(C)
        assert [stored(small, s) for s in (A, B, C)] == [False, True, True]

    def test_a_pin_lasts_until_as_many_unpins(self, small: SnapshotStore) -> None:
        """Two readers of one snapshot: the first to leave does not free it."""
        small.put(A)
        small.put(B)
        small.pin(A.key)
        small.pin(A.key)
        small.unpin(A.key)
        small.put(C)
        assert stored(small, A)
        small.unpin(A.key)
        small.put(B)
        assert not stored(small, A)

    def test_one_unpin_too_many_is_harmless(self, small: SnapshotStore) -> None:
        """The count does not go below zero, so the next pin protects."""
        small.put(A)
        small.put(B)
        assert not small.unpin(A.key)
        assert small.pin(A.key)
        assert small.unpin(A.key)
        assert not small.unpin(A.key)
        assert small.pin(A.key)
        small.put(C)
        assert stored(small, A)
        assert not small.unpin("absent")
        assert not small.pin("absent")

    def test_a_replaced_snapshot_keeps_its_pins_and_counts_once(self, small: SnapshotStore) -> None:
        """Saving a document again changes its bytes, not its protection."""
        again = KVSnapshot(A.identity, A.namespace, A.tokens, b"other" * 1000)
        small.put(A)
        small.pin(A.key)
        assert small.put(again)
        assert len(small) == 1
        assert small.num_bytes < A.num_bytes
        assert small.get(NAMESPACE, A.tokens, can_cut=False) == StoredPrefix(again, 4)
        small.put(B)
        small.put(C)
        assert stored(small, A)

    def test_a_removed_snapshot_is_gone_with_its_pins(self, small: SnapshotStore) -> None:
        """Removing overrides pins; put again, it starts without."""
        small.put(A)
        small.pin(A.key)
        assert small.remove(A.key)
        assert not small.remove(A.key)
        assert small.get(NAMESPACE, A.tokens, can_cut=True) is None
        assert (len(small), small.num_bytes) == (0, 0)
        assert not small.unpin(A.key)
        for snapshot in (A, B, C):
            assert small.put(snapshot)
        assert not stored(small, A)

    def test_what_was_got_outlives_its_removal(self, store: SnapshotStore) -> None:
        """A restore that is under way is never hurt by the store."""
        store.put(A)
        found = store.get(NAMESPACE, A.tokens, can_cut=False)
        store.clear()
        assert found == StoredPrefix(snapshot_of(A.tokens), 4)

    # How it ends.

    def test_a_closed_store_says_so(self, store: SnapshotStore) -> None:
        """Closing twice is harmless, letting go is harmless, the rest is a typed error."""
        store.put(A)
        store.close()
        store.close()
        for use in (
            lambda: store.put(A),
            lambda: store.get(NAMESPACE, A.tokens, can_cut=True),
            lambda: store.pin(A.key),
        ):
            with pytest.raises(SnapshotError, match="closed"):
                use()
        assert not store.unpin(A.key)
        assert not store.remove(A.key)
        store.clear()

    def test_threads_may_share_a_store(self) -> None:
        """8 threads put, find, pin, replace and remove: found bytes are always the right ones."""
        documents = [snapshot_of([i % 3, i, i + 1]) for i in range(12)]
        start = threading.Barrier(8)

        def work(store: SnapshotStore, seed: int) -> None:
            rng = random.Random(seed)
            start.wait(timeout=60)
            for _ in range(150):
                document = rng.choice(documents)
                store.put(document)
                found = store.get(NAMESPACE, document.tokens, can_cut=False)
                assert found is None or found.snapshot == document
                if store.pin(document.key):
                    store.unpin(document.key)
                if rng.random() < 0.1:
                    store.remove(document.key)
                assert store.num_bytes <= 65_000

        with self.make_store(65_000) as store, ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, store, seed) for seed in range(8)]:
                done.result(timeout=100)
            for document in documents:
                assert not store.unpin(document.key)
                store.remove(document.key)
            assert (len(store), store.num_bytes) == (0, 0)
