"""The prefix index: every answer equals that of a plain scan over all token lists."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from langchain_swarmkv.snapshots.prefix_index import Match, PrefixIndex, TokenIds

# Few ids and many repeats, so that lists meet, part and end inside each other.
TOKENS = st.lists(st.integers(0, 2), max_size=9)
NAMESPACES = st.sampled_from(["tenant a", "tenant b"])
HOLDERS = st.integers(0, 7)


def num_common(a: list[int], b: list[int]) -> int:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


class IndexAgainstScan(RuleBasedStateMachine):
    """The index and a dict of holder -> (namespace, list)."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex[int]()
        self.lists: dict[int, tuple[str, list[int]]] = {}

    @rule(namespace=NAMESPACES, tokens=TOKENS, holder=HOLDERS)
    def insert(self, namespace: str, tokens: list[int], holder: int) -> None:
        self.index.insert(namespace, tokens, holder)
        self.lists[holder] = (namespace, tokens)

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), more=TOKENS, less=st.integers(0, 9))
    def grow_or_shrink(self, data: st.DataObject, more: list[int], less: int) -> None:
        holder = data.draw(st.sampled_from(sorted(self.lists)))
        namespace, tokens = self.lists[holder]
        tokens = tokens[: max(len(tokens) - less, 0)] + more
        self.insert(namespace, tokens, holder)

    @rule(holder=HOLDERS)
    def remove(self, holder: int) -> None:
        self.index.remove(holder)
        self.lists.pop(holder, None)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def longest(self, namespace: str, tokens: list[int]) -> None:
        common = {h: num_common(t, tokens) for h, (n, t) in self.lists.items() if n == namespace}
        assert_match(self.index.longest(namespace, tokens), common)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def longest_whole(self, namespace: str, tokens: list[int]) -> None:
        whole = {
            h: len(t)
            for h, (n, t) in self.lists.items()
            if n == namespace and tokens[: len(t)] == t
        }
        assert_match(self.index.longest_whole(namespace, tokens), whole)

    @invariant()
    def index_holds_the_same_lists(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.lists)
        for holder, (namespace, tokens) in self.lists.items():
            assert holder in self.index
            assert self.index.tokens_of(holder) == tokens
            others = [t for h, (n, t) in self.lists.items() if n == namespace and h != holder]
            assert self.index.covered(holder) == max(
                (num_common(tokens, other) for other in others), default=0
            )


def assert_match(match: Match[int] | None, num_tokens: dict[int, int]) -> None:
    """The match is the largest count and exactly the holders that have it; none for zero."""
    best = max(num_tokens.values(), default=0)
    if best == 0:
        assert match is None
        return
    assert match is not None
    assert match.num_tokens == best
    assert len(match.holders) == len(set(match.holders))
    assert set(match.holders) == {h for h, n in num_tokens.items() if n == best}


TestIndexAgainstScan = IndexAgainstScan.TestCase
TestIndexAgainstScan.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_cut_inside_an_edge_counts() -> None:
    """A prompt that leaves the document in the middle still shares what came before."""
    index = PrefixIndex[str]()
    index.insert("n", range(100), "document")
    assert index.longest("n", [*range(60), 7, 8]) == Match(60, ("document",))
    assert index.longest_whole("n", [*range(60), 7, 8]) is None
    assert index.longest_whole("n", range(101)) == Match(100, ("document",))


def test_holders_that_end_at_the_match_come_first() -> None:
    """The document before the branches that go on from it."""
    index = PrefixIndex[str]()
    for branch in range(5):
        index.insert("n", [1, 2, 3, branch], f"branch {branch}")
    index.insert("n", [1, 2, 3], "document")
    match = index.longest("n", [1, 2, 3, 99])
    assert match is not None
    assert match.holders[0] == "document"
    assert len(match.holders) == 6


def test_tokens_are_compared_not_their_digits() -> None:
    """[1, 23] and [12, 3] read alike when joined, and share nothing."""
    index = PrefixIndex[str]()
    index.insert("n", [1, 23], "a")
    assert index.longest("n", [12, 3]) is None
    assert index.longest("n", [123]) is None
    assert index.longest("n", [1, 2]) == Match(1, ("a",))


def test_namespaces_never_meet() -> None:
    """Equal lists under two namespaces are strangers, in every answer."""
    index = PrefixIndex[str]()
    index.insert("a", [1, 2, 3], "of a")
    index.insert("b", [1, 2, 3, 4], "of b")
    assert index.longest("a", [1, 2, 3, 4]) == Match(3, ("of a",))
    assert index.longest("b", [1, 2, 3]) == Match(3, ("of b",))
    assert index.longest("", [1, 2, 3]) is None
    assert index.covered("of a") == index.covered("of b") == 0
    index.insert("b", [1, 2], "of a")
    assert index.longest("a", [1, 2, 3]) is None
    index.check()


def test_empty_lists_are_held_but_never_match() -> None:
    """No tokens in common is no match, and an emptied index keeps no roots."""
    index = PrefixIndex[str]()
    index.insert("n", [], "empty")
    assert index.longest("n", [1]) is index.longest_whole("n", [1]) is None
    assert index.longest("n", []) is index.longest_whole("n", []) is None
    assert (len(index), index.tokens_of("empty"), index.covered("empty")) == (1, [], 0)
    index.remove("empty")
    index.remove("empty")
    assert len(index) == 0
    assert not index._roots


def test_removal_joins_the_edges_that_it_leaves() -> None:
    """After branches came and went, the document is one edge again."""
    index = PrefixIndex[str]()
    index.insert("n", range(1000), "document")
    for cut in range(1, 1000, 7):
        index.insert("n", [*range(cut), 5000 + cut], f"branch {cut}")
    for cut in range(1, 1000, 7):
        index.remove(f"branch {cut}")
        index.check()
    (edge,) = (child.edge for child in index._roots["n"].children.values())
    assert edge.tolist() == list(range(1000))


@pytest.mark.parametrize(
    "form",
    [
        tuple,
        lambda t: array("i", t),
        lambda t: np.array(t, dtype=np.int32),
        lambda t: np.array(t, dtype=np.int64),
        lambda t: np.array(t, dtype=">i4"),
        lambda t: np.repeat(np.array(t, dtype=np.int32), 2)[::2],
    ],
)
def test_any_form_of_token_ids_is_the_same_list(form: Callable[[list[int]], TokenIds]) -> None:
    """Tuples, arrays of any integer type and byte order, views with strides."""
    tokens = [3, 1, 4, 1, 5, 92653]
    index = PrefixIndex[str]()
    index.insert("n", form(tokens), "a")
    assert index.tokens_of("a") == tokens
    assert index.longest("n", tokens) == index.longest_whole("n", form(tokens)) == Match(6, ("a",))


def test_a_caller_may_reuse_its_array() -> None:
    """The index keeps copies: what the caller writes later does not reach it."""
    index = PrefixIndex[str]()
    tokens = np.arange(10, dtype=np.int32)
    index.insert("n", tokens, "a")
    tokens[:] = 0
    assert index.tokens_of("a") == list(range(10))


def test_an_id_too_large_is_refused_and_changes_nothing() -> None:
    """2**32 + 5 must not wrap around to 5."""
    index = PrefixIndex[str]()
    index.insert("n", [5, 6], "a")
    for tokens in ([2**32 + 5], np.array([2**32 + 5])):
        with pytest.raises(OverflowError):
            index.insert("n", tokens, "a")
        with pytest.raises(OverflowError):
            index.longest("n", tokens)
    assert index.tokens_of("a") == [5, 6]


def test_long_lists_agree_with_a_scan() -> None:
    """Documents of up to 5,000 tokens that share long beginnings."""
    rng = random.Random(7)
    base = [rng.randrange(50_000) for _ in range(5_000)]
    lists = {
        holder: base[: rng.randrange(5_000)] + [rng.randrange(50_000) for _ in range(300)]
        for holder in range(60)
    }
    index = PrefixIndex[int]()
    for holder, tokens in lists.items():
        index.insert("n", tokens, holder)
    index.check()
    for _ in range(60):
        prompt = base[: rng.randrange(1, 5_000)] + [rng.randrange(50_000) for _ in range(5)]
        assert_match(
            index.longest("n", prompt), {h: num_common(t, prompt) for h, t in lists.items()}
        )
