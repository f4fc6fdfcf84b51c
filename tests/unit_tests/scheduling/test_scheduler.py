"""The scheduler, stepped by hand: what is computed, who waits, who leaves, and who fails.

Every answer is compared with that of a fresh engine which is given the whole prompt alone; the fake
engine's logits depend on every token before, so a wrong prefix is a wrong answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import (
    ContextBudgetError,
    DecodeAbortedError,
    DecodeError,
    DecodeFatalError,
    GrammarError,
    InvalidRequestError,
    NoRoomError,
    RequestCancelledError,
    RequestTimeoutError,
)
from langchain_swarmkv.scheduling import prefix_cache
from langchain_swarmkv.scheduling.request import PrefillProgress, Request, RequestStatus
from langchain_swarmkv.statistics import PrefixSource
from tests.unit_tests.scheduling.support import (
    NAMESPACE,
    Answer,
    Bench,
    answer_alone,
    answer_of_request,
    assert_equals_alone,
    check_ended,
    error_of,
    piece,
)

DOCUMENT = piece("Document", 2000)

both_kinds = pytest.mark.parametrize("can_cut", [True, False], ids=["can cut", "cannot cut"])


def tasks(num_tasks: int, num_tokens: int = 20) -> list[list[int]]:
    """Different from the first token on."""
    return [piece(chr(ord("a") + i), num_tokens) for i in range(num_tasks)]


# -- work done -------------------------------------------------------------------------------------


@both_kinds
def test_a_document_is_computed_once_for_its_branches(can_cut: bool) -> None:
    """A pinned document and eight one-shot branches: the document, and each task, once."""
    bench = Bench(can_cut=can_cut)
    bench.serve(DOCUMENT, 0, pin="document")
    assert bench.engine.decoded_tokens == 2000
    branches = [bench.add([*DOCUMENT, *task], keep_prefix=False) for task in tasks(8)]
    bench.run()
    assert bench.statistics.num_prefill_tokens == 2000 + 8 * 20
    assert_equals_alone(*branches)
    assert bench.statistics.cells_used == bench.statistics.cells_pinned == 2000
    for branch in branches:
        assert branch.statistics().num_cached_tokens == 2000
        assert branch.statistics().prefix_source is PrefixSource.RESIDENT
    assert bench.statistics.prefix_cache_hits == 8
    assert bench.statistics.num_cached_tokens == 8 * 2000


@both_kinds
@pytest.mark.parametrize("keep_prefix", [True, False])
def test_a_cold_prefix_is_computed_once_for_all_that_come_together(
    can_cut: bool, keep_prefix: bool
) -> None:
    """Eight requests, nothing resident: one computes the 2,000 shared tokens, seven fork them."""
    bench = Bench(can_cut=can_cut)
    requests = [bench.add([*DOCUMENT, *task], keep_prefix=keep_prefix) for task in tasks(8)]
    bench.run()
    assert bench.statistics.num_prefill_tokens == 2000 + 8 * 20
    assert_equals_alone(*requests)
    assert [request.num_cached_tokens for request in requests] == [0] + [2000] * 7


@both_kinds
def test_followers_fork_at_their_own_branch_points(can_cut: bool) -> None:
    """One leader, branch points at 300, 600 and 900: the prefill stops at each of them."""
    bench = Bench(can_cut=can_cut)
    points = (300, 600, 900)
    leader = bench.add(DOCUMENT[:1000])
    followers = [
        bench.add([*DOCUMENT[:point], *task]) for point, task in zip(points, tasks(3), strict=True)
    ]
    bench.run()
    assert bench.statistics.num_prefill_tokens == 1000 + 3 * 20
    assert [follower.num_cached_tokens for follower in followers] == list(points)
    assert_equals_alone(leader, *followers)


@both_kinds
def test_prefixes_nest(can_cut: bool) -> None:
    """A shares 500 with all, B and C share 300 more: 500 and 300 are computed once each."""
    bench = Bench(can_cut=can_cut)
    a, b, c = tasks(3)
    common, more = DOCUMENT[:500], piece("More", 300)
    requests = [
        bench.add(tokens) for tokens in ([*common, *a], [*common, *more, *b], [*common, *more, *c])
    ]
    bench.run()
    assert bench.statistics.num_prefill_tokens == 500 + 300 + 3 * 20
    assert [request.num_cached_tokens for request in requests] == [0, 500, 800]
    assert_equals_alone(*requests)


@both_kinds
def test_interleaved_documents_are_computed_once_each(can_cut: bool) -> None:
    """Four documents, four branches of each, in turn."""
    bench = Bench(can_cut=can_cut, num_cells=8192, max_sequences=32)
    documents = [piece(name, 400) for name in "WXYZ"]
    requests = [
        bench.add([*document, *task], keep_prefix=False)
        for task in tasks(4)
        for document in documents
    ]
    bench.run()
    assert bench.statistics.num_prefill_tokens == 4 * 400 + 16 * 20
    assert_equals_alone(*requests)


@both_kinds
def test_identical_prompts_compute_one_token_each(can_cut: bool) -> None:
    """A3: the last token is decoded again, for its logits; with max_tokens=0 not even that."""
    bench = Bench(can_cut=can_cut)
    requests = [bench.add(DOCUMENT[:300]) for _ in range(8)]
    bench.run()
    assert bench.statistics.num_prefill_tokens == 300 + 7
    assert_equals_alone(*requests)
    bench = Bench(can_cut=can_cut)
    for _ in range(8):
        bench.add(DOCUMENT[:300], 0)
    bench.run()
    assert bench.statistics.num_prefill_tokens == 300
    assert bench.statistics.num_resident_prefixes == 1


@pytest.mark.parametrize(("num_prefilled", "cached"), [(100, 100), (150, 99)])
def test_a_prompt_that_is_wholly_cached_has_fresh_logits(num_prefilled: int, cached: int) -> None:
    """A3: the same answer every time, though another branch was decoded in between.

    A prefill keeps the logits after its last token; where a prompt ends elsewhere its last token is
    computed again.
    """
    bench = Bench()
    bench.serve(DOCUMENT[:num_prefilled], 0, pin="document")
    for task in tasks(3):
        repeated = bench.serve(DOCUMENT[:100])
        assert repeated.num_cached_tokens == cached
        assert_equals_alone(repeated, bench.serve([*DOCUMENT[:100], *task]))


def test_half_of_a_document_that_cannot_be_cut_is_computed_again() -> None:
    """A5: nothing is reused, the answer is right, and the document stays usable."""
    bench = Bench(can_cut=False)
    bench.serve(DOCUMENT[:200], 0, pin="document")
    half = bench.serve([*DOCUMENT[:100], *piece("x", 20)])
    assert half.num_cached_tokens == 0
    whole = bench.serve([*DOCUMENT[:200], *piece("x", 20)])
    assert whole.num_cached_tokens == 200
    assert_equals_alone(half, whole)


@both_kinds
def test_an_answer_can_be_continued(can_cut: bool) -> None:
    """A second turn forks the first turn's prompt and answer, all but the last sampled token."""
    bench = Bench(can_cut=can_cut)
    first = bench.serve(DOCUMENT[:100], 12, ignore_eos=True)
    second = bench.serve([*first.tokens, *first.output_tokens, *piece("x", 20)])
    assert second.num_cached_tokens == 111
    assert_equals_alone(first, second)


def test_salts_share_nothing() -> None:
    """H2: the same prompt under another namespace is computed again."""
    bench = Bench()
    bench.serve(DOCUMENT[:100], namespace="a")
    other = bench.serve(DOCUMENT[:100], namespace="b")
    assert other.num_cached_tokens == 0
    assert bench.statistics.num_prefill_tokens == 200


@pytest.mark.parametrize(("num_shared", "waits"), [(15, False), (16, True)])
def test_a_short_common_prefix_is_not_waited_for(num_shared: int, waits: bool) -> None:
    """Fewer than 16 tokens are computed as quickly as they are waited for."""
    bench = Bench()
    bench.add([*DOCUMENT[:num_shared], *piece("x", 20)])
    other = bench.add([*DOCUMENT[:num_shared], *piece("y", 20)])
    bench.step()
    assert (other.status is RequestStatus.WAITING) == waits
    bench.run()
    assert_equals_alone(*bench.requests)


def test_documents_that_are_idle_make_way_and_come_back() -> None:
    """Four documents in turn: each computed once, and alone in the pool while it is used."""
    bench = Bench(num_cells=4000, move_cost_tokens=4)
    documents = [piece(name, 600) for name in ("A", "B", "C", "D")]
    for turn in range(3):
        for document in documents:
            for task in tasks(2):
                bench.add([*document, *task, turn + 40], keep_prefix=False)
            bench.serve(document, 0)
            bench.run()
            assert bench.statistics.cells_used <= 600 + prefix_cache.MIN_IDLE_CELLS
    assert bench.statistics.num_prefill_tokens == 4 * 600 + 3 * 4 * 2 * 21
    assert bench.statistics.num_spills == 4
    assert_equals_alone(*bench.requests)


def test_a_long_answer_moves_down_when_what_lay_below_has_left() -> None:
    """A hole below a running request is closed while it runs, and its answer stays right."""
    bench = Bench(num_cells=4000, move_cost_tokens=4)
    other = bench.add(piece("other", 600), 3, keep_prefix=False)
    long = bench.add(piece("long", 300), 200, keep_prefix=False, ignore_eos=True)
    bench.run()
    assert bench.statistics.num_compactions == 1
    assert_equals_alone(other, long)


@both_kinds
def test_no_more_run_at_once_than_is_worth_it(can_cut: bool) -> None:
    """The rest wait their turn, in order, and nothing is computed twice."""
    bench = Bench(can_cut=can_cut, max_running=3)
    branches = [bench.add([*DOCUMENT, *task], keep_prefix=False) for task in tasks(8)]
    bench.run()
    assert bench.statistics.peak_running == 3
    assert_equals_alone(*branches)
    starts = [branch.admitted_at for branch in branches]
    assert None not in starts
    assert bench.statistics.num_prefill_tokens == 2000 + 8 * 20


# -- a leader that does not get there --------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("end", ["cancelled", "timed out"])
def test_a_leader_that_gives_up_loses_no_work(can_cut: bool, end: str) -> None:
    """In the middle of the shared prefix: the followers go on from where it stopped."""
    bench = Bench(can_cut=can_cut)
    timeout_seconds = 1.5 if end == "timed out" else None
    leader = bench.add([*DOCUMENT, *piece("leader", 50)], timeout_seconds=timeout_seconds)
    followers = [bench.add([*DOCUMENT, *task]) for task in tasks(4)]
    bench.step()
    bench.step()
    assert leader.num_written == 1024
    leader.cancelled = end == "cancelled"
    bench.run()
    expected = RequestCancelledError if end == "cancelled" else RequestTimeoutError
    assert isinstance(error_of(leader), expected)
    assert bench.statistics.num_prefill_tokens == 2000 + 4 * 20
    assert_equals_alone(*followers)


@both_kinds
def test_followers_of_a_failed_leader_start_again(can_cut: bool) -> None:
    """What was in a fatally failed batch is in doubt: it is computed anew, by one of them."""
    failing = iter([None, DecodeFatalError("boom", return_code=-3)])
    bench = Bench(can_cut=can_cut, on_decode=raise_next(failing))
    leader = bench.add([*DOCUMENT, *piece("leader", 50)])
    followers = [bench.add([*DOCUMENT, *task]) for task in tasks(4)]
    bench.run()
    assert isinstance(error_of(leader), DecodeFatalError)
    assert bench.statistics.num_prefill_tokens == 512 + 2000 + 4 * 20
    assert_equals_alone(*followers)


@both_kinds
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_leader_that_ends_at_the_branch_point_leaves_the_prefix(
    can_cut: bool, max_tokens: int
) -> None:
    """A one-shot request, done in the very step that others wait for, does not take it away."""
    bench = Bench(can_cut=can_cut)
    leader = bench.add(DOCUMENT, max_tokens, keep_prefix=False)
    followers = [bench.add([*DOCUMENT, *task]) for task in tasks(3)]
    bench.run()
    assert bench.statistics.num_prefill_tokens == 2000 + 3 * 20
    assert_equals_alone(leader, *followers)


def test_a_follower_does_not_wait_for_a_stranger_with_the_same_sequence_id() -> None:
    """The leader leaves before its first chunk; another takes its id; the follower goes on."""
    bench = Bench(max_batch_tokens=64, max_sequences=4)
    busy = bench.add(DOCUMENT[:200])
    leader = bench.add(piece("leader", 120))
    stranger = bench.add([*DOCUMENT[:64], *piece("stranger", 20)])
    follower = bench.add([*leader.tokens[:100], *piece("x", 20)])
    bench.step()  # the whole budget goes to `busy`
    assert leader.status is RequestStatus.PREFILL
    assert (stranger.status, follower.status) == (RequestStatus.WAITING,) * 2
    left_id = leader.seq_id
    leader.cancelled = True
    bench.step()
    assert stranger.seq_id == left_id
    assert follower.status is RequestStatus.PREFILL
    bench.run()
    assert_equals_alone(busy, stranger, follower)


def test_a_cancelled_leader_leaves_exactly_what_it_wrote() -> None:
    """It has gone on to decode while its follower waited for room: the answer is kept too."""
    bench = Bench(num_cells=300, max_sequences=8)
    leader = bench.add(DOCUMENT[:100], 50, ignore_eos=True)
    blocked = bench.add([*DOCUMENT[:50], *piece("blocked", 100)], 100)
    follower = bench.add([*DOCUMENT[:80], *piece("x", 20)])
    while len(leader.output_tokens) < 5:
        bench.step()
    leader.cancelled = True
    bench.run()  # checks that each resident holds as many cells as it has tokens
    assert isinstance(error_of(leader), RequestCancelledError)
    assert bench.statistics.num_prefill_tokens == 100 + 100 + 20
    assert_equals_alone(blocked, follower)


# -- admission -------------------------------------------------------------------------------------


def test_a_large_request_gets_its_turn() -> None:
    """First come, first served: small ones that came later do not pass it, however many."""
    bench = Bench(num_cells=1000)
    early = [bench.add(piece(f"{i}early", 100), 20) for i in range(4)]
    large = bench.add(piece("large", 880), 20)
    late = [bench.add(piece(f"{i}late", 20), 20) for i in range(8)]
    bench.run()
    assert max(one.statistics().finished_at or 0 for one in early) <= (large.admitted_at or 0)
    assert all((large.admitted_at or 0) <= (one.admitted_at or 0) for one in late)
    assert_equals_alone(*early, large, *late)


def test_one_that_waits_for_a_prefix_lets_others_pass() -> None:
    """An unrelated request does not stand behind another's long prefill."""
    bench = Bench(max_batch_tokens=64)
    bench.add(DOCUMENT[:1000])
    follower = bench.add([*DOCUMENT[:1000], *piece("x", 20)])
    other = bench.add(piece("other", 20))
    bench.step()
    assert (follower.status, other.status) == (RequestStatus.WAITING, RequestStatus.PREFILL)
    bench.run()
    assert_equals_alone(*bench.requests)


@pytest.mark.parametrize(("extra", "together"), [(0, True), (1, False)])
def test_cells_are_granted_to_the_last_one(extra: int, together: bool) -> None:
    """Two that need exactly the pool run together; with one token more they take turns."""
    bench = Bench(num_cells=200)
    first = bench.add(piece("a", 60), 40, ignore_eos=True)
    second = bench.add(piece("b", 60), 40 + extra, ignore_eos=True)
    bench.step()
    assert (second.status is RequestStatus.WAITING) != together
    bench.run()
    assert bench.statistics.peak_running == (2 if together else 1)
    assert_equals_alone(first, second)


def test_a_shared_document_is_reserved_once() -> None:
    """D6: pool 512, document 300, branches of 20, 20 and 150: the long one waits, none is cut."""
    bench = Bench(num_cells=512)
    document = piece("document", 300)
    bench.serve(document, 0, pin="document")
    branches = [
        bench.add([*document, *task], max_tokens, keep_prefix=False, ignore_eos=True)
        for task, max_tokens in zip(tasks(4, 10), (20, 20, 150, 20), strict=True)
    ]
    bench.step()
    assert [branch.status is RequestStatus.WAITING for branch in branches] == [
        False,
        False,
        True,
        True,
    ]
    bench.run()
    assert_equals_alone(*branches)
    assert [len(branch.output_tokens) for branch in branches] == [20, 20, 150, 20]


@both_kinds
def test_sequence_ids_are_waited_for(can_cut: bool) -> None:
    """D4: more branches than ids run in waves, and each id comes back."""
    bench = Bench(max_sequences=3, can_cut=can_cut)
    requests = [bench.add(piece(f"{i}-", 20), keep_prefix=False) for i in range(10)]
    bench.run()
    assert bench.statistics.peak_running == 3
    assert bench.statistics.sequences_used == 0
    assert_equals_alone(*requests)


@both_kinds
@pytest.mark.parametrize("pin", ["document", None])
def test_hundreds_of_branches_run_in_waves(can_cut: bool, pin: str | None) -> None:
    """D4: 300 branches, 16 ids, one of them the document's, which is computed once.

    Also when it is not pinned: a branch that needs an id waits for one rather than take it from the
    document that it wants to fork.
    """
    bench = Bench(can_cut=can_cut)
    document = DOCUMENT[:500]
    bench.serve(document, 0, pin=pin)
    branches = [
        bench.add([*document, 65 + i % 26, i // 26], 4, keep_prefix=False) for i in range(300)
    ]
    bench.run()
    assert bench.statistics.num_prefill_tokens == 500 + 2 * 300
    assert bench.statistics.peak_running == 15
    assert bench.statistics.num_evictions == 0
    assert_equals_alone(*branches)


def test_ids_come_back_on_every_path() -> None:
    """D4: 4 ids, 1000 requests one after another, a third of them failing or cancelled."""
    bench = Bench(max_sequences=4, num_cells=256)
    for i in range(1000):
        request = bench.add(piece(f"{i}-", 10), 3)
        if i % 6 == 1:
            bench.step()
            request.cancelled = True
        elif i % 6 == 4:
            bench.engine.on_decode = raise_next(iter([DecodeFatalError("boom", return_code=-3)]))
        bench.finish()
    bench.check_quiet()
    statistics = bench.statistics
    assert statistics.num_cancelled + statistics.num_failed + statistics.num_finished == 1000
    assert statistics.num_failed == 166


def test_pinned_prefixes_that_fill_the_pool_are_named() -> None:
    """Nothing is left to wait for: an error with the numbers, not a hang; then room is made."""
    bench = Bench(num_cells=512)
    bench.serve(piece("a", 200), 0, pin="a")
    bench.serve(piece("b", 100), 0, pin="b")
    assert error_of(bench.serve(piece("x", 192), 20)) is None
    refused = bench.serve(piece("y", 193), 20)
    error = error_of(refused)
    assert isinstance(error, ContextBudgetError)
    assert error.facts == {"needed_tokens": 213, "limit_tokens": 212, "limit_name": "n_ctx"}
    assert "213" in str(error)
    assert "300 of n_ctx=512" in str(error)
    assert bench.scheduler.cache.release(NAMESPACE, "b")
    again = bench.serve(piece("y", 193), 20)
    assert_equals_alone(again)


def test_pinned_prefixes_that_take_every_id_are_named() -> None:
    """The same for sequence ids."""
    bench = Bench(max_sequences=2)
    for name in "ab":
        bench.serve(piece(name, 20), 0, pin=name)
    error = error_of(bench.serve([*piece("a", 20), 7]))
    assert isinstance(error, ContextBudgetError)
    assert error.facts["limit_name"] == "max_sequences"
    assert "2 of max_sequences=2" in str(error)
    assert bench.scheduler.cache.release(NAMESPACE, "a")
    assert_equals_alone(bench.serve([*piece("a", 20), 7]))


def test_a_refusal_waits_for_what_may_still_leave() -> None:
    """While another runs there is something to wait for; only then is the request refused."""
    bench = Bench(num_cells=512)
    bench.serve(piece("a", 300), 0, pin="a")
    running = bench.add(piece("running", 100), 20, ignore_eos=True)
    refused = bench.add(piece("x", 200), 20)
    fits = bench.add(piece("y", 200), 12)
    bench.step()
    assert refused.status is RequestStatus.WAITING
    bench.run()
    assert isinstance(error_of(refused), ContextBudgetError)
    assert_equals_alone(running, fits)


# -- eviction --------------------------------------------------------------------------------------


@both_kinds
def test_a_document_that_had_to_leave_is_restored(can_cut: bool) -> None:
    """Two documents in turn, room for one: each is computed once and comes back from the store."""
    bench = Bench(can_cut=can_cut, num_cells=1000)
    documents = [piece(name, 700) for name in "XY"]
    for round_number, task in enumerate(tasks(3)):
        for document in documents:
            bench.serve(document, 0)
            branch = bench.serve([*document, *task], keep_prefix=False)
            assert_equals_alone(branch)
            assert branch.num_cached_tokens == 700
            assert branch.num_cached_tokens + 20 == len(branch.tokens)
            if round_number:
                restored = bench.requests[-2]
                assert restored.prefix_source is PrefixSource.MEMORY
    statistics = bench.statistics
    assert statistics.num_prefill_tokens == 2 * 700 + 6 * 20
    assert statistics.num_restores == 4
    assert statistics.num_spills >= 2
    assert statistics.store_bytes > 0


def test_a_store_of_no_bytes_means_computing_again() -> None:
    """The same turns without a store: right answers, and every visit costs a prefill."""
    bench = Bench(num_cells=1000, store_bytes=0)
    for _ in range(2):
        for name in "XY":
            assert_equals_alone(bench.serve(piece(name, 700)))
    statistics = bench.statistics
    assert statistics.num_prefill_tokens == 4 * 700
    assert statistics.num_spills == statistics.num_restores == statistics.store_bytes == 0


def test_the_least_recently_used_document_leaves() -> None:
    """Coming back to a document keeps it; the one that nobody came back to is gone."""
    bench = Bench(num_cells=1000, store_bytes=0)
    for name in "ABCA":
        bench.serve(piece(name, 300), 0)
    bench.serve(piece("D", 300), 0)
    cached = {name: bench.serve([*piece(name, 300), 7], 0).num_cached_tokens for name in "AC"}
    assert cached == {"A": 300, "C": 300}
    assert bench.serve([*piece("B", 300), 7], 0).num_cached_tokens == 0


def test_what_running_branches_use_is_not_lost() -> None:
    """An unpinned document under branches survives a rush for room, and serves again."""
    bench = Bench(num_cells=1000, store_bytes=0)
    document = piece("document", 300)
    bench.serve(document, 0)
    branches = [bench.add([*document, *task], 100, ignore_eos=True) for task in tasks(2)]
    bench.step()
    bench.step()
    rush = [bench.add(piece(f"{i}rush", 200), 100) for i in range(6)]
    bench.run()
    assert_equals_alone(*branches, *rush)
    assert bench.statistics.num_prefill_tokens == 300 + 2 * 20 + 6 * 200


def test_pinned_prefixes_stay_through_a_rush() -> None:
    """A hundred other prompts later the pinned document is still forked, not restored."""
    bench = Bench(num_cells=600)
    document = piece("document", 300)
    bench.serve(document, 0, pin="document")
    for i in range(100):
        bench.serve(piece(f"{i}-", 100), 4)
    branch = bench.serve([*document, 7])
    assert branch.num_cached_tokens == 300
    assert branch.prefix_source is PrefixSource.RESIDENT
    assert bench.statistics.num_restores == 0
    assert bench.statistics.num_evictions > 90


def test_restoring_leaves_running_requests_their_cells() -> None:
    """A document comes back while another request decodes: that one gets all it was promised."""
    bench = Bench(num_cells=1000)
    document = piece("document", 500)
    bench.serve(document, 0)
    bench.serve(piece("other", 900), 0)  # the document leaves
    running = bench.add(piece("running", 100), 450, ignore_eos=True)
    bench.step()
    waits = bench.add([*document, *piece("x", 20)])
    bench.step()
    assert waits.status is RequestStatus.WAITING
    bench.run()
    assert_equals_alone(running, waits)
    assert waits.num_cached_tokens == 500
    assert bench.statistics.num_prefill_tokens == 500 + 900 + 100 + 20


def test_a_snapshot_that_does_not_load_costs_a_prefill() -> None:
    """E1: the request is served from what is right, which is nothing, or a resident prefix."""
    bench = Bench(num_cells=600, max_sequences=2)
    document = piece("document", 500)
    bench.serve(document, 0)
    bench.serve(piece("other", 500), 0)
    (entry,) = bench.store._entries.values()
    object.__setattr__(entry.snapshot, "state", entry.snapshot.state[:-4])
    bench.serve(document[:100], 0)
    branch = bench.serve([*document, *piece("x", 20)])
    assert_equals_alone(branch)
    assert bench.statistics.num_restores == 0
    assert branch.prefix_source is not PrefixSource.MEMORY


# -- the batch -------------------------------------------------------------------------------------


def test_branches_stream_while_a_document_is_read() -> None:
    """A decoding request has a token in every step, beside at most `mixed_prefill_tokens`."""
    bench = Bench(mixed_prefill_tokens=100)
    branch = bench.add(piece("branch", 20), 30, ignore_eos=True)
    bench.step()
    document = bench.add(DOCUMENT, 4, ignore_eos=True)
    del bench.batches[:]
    while document.status is not RequestStatus.DECODE:
        before = len(branch.output_tokens)
        bench.step()
        assert len(branch.output_tokens) == before + 1
    for batch in bench.batches:
        assert batch.seq_ids[0] == branch.seq_id
        assert batch.seq_ids.count(branch.seq_id) == 1
        assert len(batch) == 101
    assert len(bench.batches) == 20
    bench.run()
    assert_equals_alone(branch, document)


def test_prefill_alone_uses_the_whole_batch() -> None:
    """And shares it between prompts, in order of arrival."""
    bench = Bench()
    first, second = bench.add(DOCUMENT[:700], 2), bench.add(piece("x", 400), 2)
    bench.step()
    assert (first.num_written, second.num_written) == (512, 0)
    bench.step()
    assert (first.num_written, second.num_written) == (700, 324)
    bench.run()
    assert_equals_alone(first, second)


def test_only_rows_that_are_sampled_have_logits() -> None:
    """D2: a long prompt in chunks asks for logits at its end alone."""
    bench = Bench(max_batch_tokens=64)
    bench.serve(DOCUMENT[:1000], 2, ignore_eos=True)
    rows = [batch.output_rows for batch in bench.batches]
    assert rows == [[]] * 15 + [[39], [0]]


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 128, 129])
@pytest.mark.parametrize("num_more", [1, 63, 64, 65])
def test_prompts_around_the_batch_size(num_tokens: int, num_more: int) -> None:
    """D2: documents and suffixes of all sizes around max_batch_tokens."""
    bench = Bench(max_batch_tokens=64)
    bench.serve(DOCUMENT[:num_tokens], 0, pin="document")
    branch = bench.serve([*DOCUMENT[:num_tokens], *piece("x", num_more)])
    assert_equals_alone(branch)


# -- sampling and answers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 40},
        {"max_tokens": 1},
        {"max_tokens": 40, "ignore_eos": True},
        {"max_tokens": 40, "temperature": 1.5, "seed": 7},
        {"max_tokens": 40, "temperature": 0.8, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"max_tokens": 40, "logit_bias": {65: 100.0}},
        {"max_tokens": 400, "logit_bias": {258: 3.0}},
        {"max_tokens": 400, "stop": ("a", "bc", "xyz")},
    ],
)
def test_answers_equal_the_engine_alone(params: dict[str, Any]) -> None:
    """Every setting, in a batch with others and forked: as if the request were alone."""
    bench = Bench()
    bench.serve(DOCUMENT[:100], 0, pin="document")
    requests = [bench.add([*DOCUMENT[:100], *task], **params) for task in tasks(5)]
    bench.run()
    assert_equals_alone(*requests)


def test_finish_reasons() -> None:
    """An end token or a stop string: "stop"; the limit: "length". No end token in the ids."""
    bench = Bench(reply="abc STOP def")
    answers = [
        answer_of_request(bench.serve(DOCUMENT[:50], max_tokens, stop=stop))
        for max_tokens, stop in (
            (20, ()),
            (12, ()),
            (20, ("STOP",)),
            (8, ("STOP",)),
            (7, ("STOP",)),
        )
    ]
    assert answers == [
        Answer("abc STOP def", tuple(b"abc STOP def"), "stop"),
        Answer("abc STOP def", tuple(b"abc STOP def"), "length"),
        Answer("abc ", tuple(b"abc STOP"), "stop"),
        Answer("abc ", tuple(b"abc STOP"), "stop"),
        Answer("abc STO", tuple(b"abc STO"), "length"),
    ]


def test_ignore_eos_goes_on_to_the_limit() -> None:
    """The end token is then a token like others, without text."""
    bench = Bench(reply="ab")
    request = bench.serve(DOCUMENT[:50], 5, ignore_eos=True)
    assert answer_of_request(request) == Answer("ab", (97, 98, 258, 258, 258), "length")


def test_only_prefill() -> None:
    """max_tokens=0 computes the prompt, says nothing, and leaves the prefix."""
    bench = Bench()
    request = bench.serve(DOCUMENT[:100], 0)
    assert answer_of_request(request) == Answer("", (), "length")
    assert request.first_token_at is None
    assert bench.statistics.cells_used == 100
    assert bench.scheduler.cache.is_resident(NAMESPACE, DOCUMENT[:100])


def test_a_one_shot_branch_leaves_nothing() -> None:
    """keep_prefix=False frees cells and id; a pin is stronger."""
    bench = Bench()
    bench.serve(DOCUMENT[:100], keep_prefix=False)
    assert bench.statistics.cells_used == bench.statistics.sequences_used == 0
    bench.serve(DOCUMENT[:100], 0, keep_prefix=False, pin="document")
    assert bench.statistics.cells_used == bench.statistics.cells_pinned == 100


def test_a_reported_seed_reproduces_the_answer() -> None:
    """A request without a seed draws one; asked for again with it, the answer is the same."""
    bench = Bench()
    params = {"temperature": 1.0, "max_tokens": 30}
    drawn = [bench.serve(DOCUMENT[:50], **params) for _ in range(4)]
    assert len({answer_of_request(request) for request in drawn}) == 4
    for request in drawn:
        again = bench.serve(DOCUMENT[:50], seed=request.seed, **params)
        assert answer_of_request(again) == answer_of_request(request)
        assert again.seed == request.seed


def test_logprobs_are_those_of_the_model() -> None:
    """Log softmax of the raw logits, whatever the sampling settings; alternatives best first."""
    bench = Bench()
    tokens = DOCUMENT[:50]
    request = bench.serve(
        tokens, 6, logprobs=3, temperature=0.5, top_k=5, seed=1, logit_bias={65: 5.0}
    )
    logprobs = [item for chunk in request.channel.read() for item in chunk.logprobs]
    assert tuple(item.token_id for item in logprobs) == tuple(request.output_tokens)
    for position, item in enumerate(logprobs):
        expected = log_softmax_after([*tokens, *request.output_tokens[:position]])
        assert item.logprob == pytest.approx(expected[item.token_id])
        best = sorted(range(len(expected)), key=lambda i: -expected[i])[:3]
        assert [token_id for token_id, _ in item.top] == best
        assert [value for _, value in item.top] == pytest.approx([expected[i] for i in best])


def test_no_logprobs_unless_asked_for() -> None:
    """None: no entry. 0: an entry for each token, without alternatives."""
    bench = Bench()
    without = bench.serve(DOCUMENT[:50], 5, ignore_eos=True)
    assert [chunk.logprobs for chunk in without.channel.read()] == [()] * 6
    bare = bench.serve(DOCUMENT[:50], 5, ignore_eos=True, logprobs=0)
    items = [item for chunk in bare.channel.read() for item in chunk.logprobs]
    assert [(item.token_id, item.top) for item in items] == [(i, ()) for i in bare.output_tokens]


def test_a_grammar_or_bias_that_is_refused_fails_its_request_alone() -> None:
    """And gives back what the request was granted."""
    bench = Bench()
    other = bench.add(piece("other", 50))
    refused = bench.add(DOCUMENT[:50], grammar='root ::= "a"')
    biased = bench.add(DOCUMENT[50:100], logit_bias={100_000: 1.0})
    bench.run()
    assert isinstance(error_of(refused), GrammarError)
    assert isinstance(error_of(biased), InvalidRequestError)
    assert_equals_alone(other)


# -- progress --------------------------------------------------------------------------------------


def test_progress_is_told_after_every_chunk() -> None:
    """Cached part first, then a chunk at a time up to the whole prompt."""
    bench = Bench(max_batch_tokens=100)
    bench.serve(DOCUMENT[:150], 0)
    request = bench.add(DOCUMENT[:400])
    seen: list[PrefillProgress] = []
    request.progress_callbacks.append(seen.append)
    bench.run()
    assert seen == [PrefillProgress(400, 150, computed) for computed in (100, 200, 250)]
    assert bench.engine.decoded_tokens > 0


@pytest.mark.parametrize("mistake", [KeyError("listener"), asyncio.CancelledError()])
def test_a_failing_listener_fails_its_request_alone(mistake: BaseException) -> None:
    """The listener's own error is the request's; the engine and the others go on."""
    bench = Bench()
    request, other = bench.add(DOCUMENT[:50]), bench.add(piece("other", 50))

    def fail(progress: PrefillProgress) -> None:
        raise mistake

    request.progress_callbacks.append(fail)
    bench.run()
    assert error_of(request) is mistake
    assert_equals_alone(other)


def test_listeners_are_called_without_the_lock() -> None:
    """One that needs a lock whose holder asks for statistics must not stop the engine."""
    bench = Bench()
    request = bench.add(DOCUMENT[:50])
    free: list[bool] = []

    def look(progress: PrefillProgress) -> None:
        free.append(not bench.scheduler.lock._is_owned())  # type: ignore[attr-defined]

    request.progress_callbacks.append(look)
    bench.run()
    assert free == [True]


# -- cancelling and deadlines ----------------------------------------------------------------------


def test_cancelling_stops_the_work_within_a_step() -> None:
    """C4: one of four branches; no further token of it is decoded, the others are whole."""
    bench = Bench()
    branches = [bench.add(piece(name, 20), 50, ignore_eos=True) for name in "abcd"]
    for _ in range(5):
        bench.step()
    cancelled, *others = branches
    seq_id = cancelled.seq_id
    cancelled.cancelled = True
    cancelled.cancelled = True
    del bench.batches[:]
    bench.step()
    assert all(seq_id not in batch.seq_ids for batch in bench.batches)
    assert isinstance(error_of(cancelled), RequestCancelledError)
    assert bench.engine.num_tokens(seq_id) == 0
    bench.run()
    assert_equals_alone(*others)
    assert bench.statistics.num_cancelled == 1
    assert bench.statistics.num_failed == 0


def test_cancelling_a_prefill_stops_it() -> None:
    """C4: a document of 50 chunks is not read on, and its cells are free."""
    bench = Bench(max_batch_tokens=40)
    request = bench.add(DOCUMENT)
    for _ in range(3):
        bench.step()
    request.cancelled = True
    bench.run()
    assert bench.engine.decoded_tokens == 3 * 40
    assert bench.statistics.cells_used == 0


def test_cancelling_what_waits() -> None:
    """It leaves the queue, and the one behind it moves up."""
    bench = Bench(num_cells=200)
    running = bench.add(piece("running", 60), 40, ignore_eos=True)
    waiting, behind = bench.add(piece("waiting", 160), 20), bench.add(piece("behind", 60), 20)
    bench.step()
    assert behind.status is RequestStatus.WAITING
    waiting.cancelled = True
    bench.step()
    assert isinstance(error_of(waiting), RequestCancelledError)
    assert behind.status is not RequestStatus.WAITING
    bench.run()
    assert_equals_alone(running, behind)


def test_a_finished_request_cannot_be_cancelled() -> None:
    """The flag comes too late: the answer stands."""
    bench = Bench()
    request = bench.serve(DOCUMENT[:50])
    request.cancelled = True
    bench.run()
    assert_equals_alone(request)
    assert bench.statistics.num_cancelled == 0


@pytest.mark.parametrize(
    "where", [RequestStatus.WAITING, RequestStatus.PREFILL, RequestStatus.DECODE]
)
def test_deadlines_pass_anywhere(where: RequestStatus) -> None:
    """While it waits, while it prefills, while it decodes; cells and id come back."""
    bench = Bench(num_cells=1000, max_batch_tokens=100)
    blocker = bench.add(piece("blocker", 50), 400, ignore_eos=True)
    size = {RequestStatus.WAITING: 560, RequestStatus.PREFILL: 460, RequestStatus.DECODE: 50}[where]
    request = bench.add(DOCUMENT[:size], 50, timeout_seconds=4.5, ignore_eos=True)
    while request.status is not RequestStatus.FINISHED:
        if bench.now == 4.0:
            assert request.status is where
        bench.step()
    error = error_of(request)
    assert isinstance(error, RequestTimeoutError)
    assert where.value in str(error)
    assert error.facts["num_output_tokens"] == len(request.output_tokens)
    bench.run()
    assert bench.now < 1000
    assert bench.statistics.num_failed == 1
    assert_equals_alone(blocker)


# -- native failures -------------------------------------------------------------------------------


def raise_next(errors: Iterator[BaseException | None]) -> Callable[[Batch], None]:
    """Raise the next of these at each decode; None and the end of the list: nothing."""

    def on_decode(batch: Batch) -> None:
        error = next(errors, None)
        if error is not None:
            raise error

    return on_decode


@pytest.mark.parametrize(
    "error",
    [
        DecodeFatalError("fatal", return_code=-3),
        DecodeAbortedError("aborted", return_code=2),
        DecodeError("unknown", return_code=-9),
    ],
)
def test_a_failed_step_fails_its_requests_alone(error: DecodeError) -> None:
    """Those in the batch get the typed error, each its own; the engine goes on with the rest."""
    bench = Bench(max_sequences=2, on_decode=raise_next(iter([None, None, error])))
    failed = [bench.add(piece(name, 20), 20, ignore_eos=True) for name in "ab"]
    waiting = bench.add(piece("c", 20))
    bench.run()
    errors = [error_of(request) for request in failed]
    for got in errors:
        assert type(got) is type(error)
        assert got.facts == error.facts
        assert str(got) == str(error)
    assert errors[0] is not errors[1]
    assert bench.statistics.num_failed == 2
    assert_equals_alone(waiting)
    assert_equals_alone(*(bench.serve(request.tokens) for request in failed))


def test_without_room_the_idle_make_way_first() -> None:
    """Code 1 once: what is idle is let go, the batch is tried again, and nobody fails."""
    bench = Bench(on_decode=raise_next(iter([None, None, NoRoomError("full", return_code=1)])))
    bench.serve(piece("idle", 50), 0)
    requests = [bench.add(piece(name, 20)) for name in "ab"]
    bench.run()
    assert_equals_alone(*requests)
    assert not bench.scheduler.cache.is_resident(NAMESPACE, piece("idle", 50))


def test_without_room_for_long_the_last_one_fails() -> None:
    """Code 1 twice: one request gives up its place, the others go on."""
    full = NoRoomError("full", return_code=1)
    bench = Bench(on_decode=raise_next(iter([full, full])))
    requests = [bench.add(piece(name, 20)) for name in "abc"]
    bench.run()
    assert isinstance(error_of(requests[2]), NoRoomError)
    assert_equals_alone(*requests[:2])


def test_without_room_for_ever_everyone_is_told() -> None:
    """No endless loop: one request a step gets its error."""

    def always(batch: Batch) -> None:
        raise NoRoomError("full", return_code=1)

    bench = Bench(on_decode=always)
    requests = [bench.add(piece(name, 20)) for name in "abc"]
    bench.run()
    assert all(isinstance(error_of(request), NoRoomError) for request in requests)
    assert bench.statistics.cells_used == 0


# -- everything at once ----------------------------------------------------------------------------

PIECES = [piece(name, size) for name, size in zip("ABCDE", (7, 16, 24, 33, 40), strict=True)]


class Scenario(RuleBasedStateMachine):
    """Prompts of shared pieces, small pools, cancels, deadlines, pins, failures: in any order."""

    @initialize(
        num_cells=st.integers(80, 400),
        max_sequences=st.integers(2, 6),
        max_batch_tokens=st.integers(8, 64),
        can_cut=st.booleans(),
        store_bytes=st.sampled_from([0, 600, 1 << 20]),
        mixed_prefill_tokens=st.sampled_from([1, 16, 128]),
        max_running=st.sampled_from([None, 1, 3]),
        move_cost_tokens=st.sampled_from([None, 1]),
    )
    def begin(self, **options: Any) -> None:
        self.few_cells = mock.patch.object(prefix_cache, "MIN_IDLE_CELLS", 0)
        self.few_cells.start()
        self.failures: list[BaseException] = []
        self.bench = Bench(on_decode=self._fail, **options)
        self.pins: set[str] = set()
        self.pinned_ever = self.failed_ever = False

    def _fail(self, batch: Batch) -> None:
        if self.failures:
            self.failed_ever = True
            raise self.failures.pop()

    @rule(
        parts=st.lists(st.sampled_from(range(len(PIECES))), min_size=1, max_size=4),
        cut=st.integers(0, 3),
        max_tokens=st.sampled_from([0, 1, 2, 5, 12, 30]),
        params=st.sampled_from(
            [{}, {"ignore_eos": True}, {"temperature": 1.0, "seed": 5}, {"stop": ("a", "e")}]
        ),
        keep_prefix=st.booleans(),
        pin=st.sampled_from([None, None, None, "p", "q"]),
        timeout_seconds=st.sampled_from([None, None, None, 0.5, 3.5, 9.5]),
        namespace=st.sampled_from(["plain", "plain", "plain", "salted"]),
    )
    def submit(
        self,
        parts: list[int],
        cut: int,
        max_tokens: int,
        params: dict[str, Any],
        keep_prefix: bool,
        pin: str | None,
        timeout_seconds: float | None,
        namespace: str,
    ) -> None:
        tokens = [token for part in parts for token in PIECES[part]]
        tokens = tokens[: max(1, len(tokens) - cut)]
        if len(tokens) + max_tokens > self.bench.engine.limits.num_cells:
            return  # refused at once by SwarmEngine
        self.pinned_ever |= pin is not None
        self.bench.add(
            tokens,
            max_tokens,
            keep_prefix=keep_prefix,
            pin=pin,
            timeout_seconds=timeout_seconds,
            namespace=namespace,
            **params,
        )

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.step()

    @precondition(lambda self: self.bench.requests)
    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        requests = self.bench.requests
        requests[which % len(requests)].cancelled = True

    @rule(pin=st.sampled_from(["p", "q"]), namespace=st.sampled_from(["plain", "salted"]))
    def release(self, pin: str, namespace: str) -> None:
        self.bench.scheduler.cache.release(namespace, pin)

    @rule(error=st.sampled_from([DecodeFatalError, DecodeAbortedError, NoRoomError]))
    def fail(self, error: type[DecodeError]) -> None:
        self.failures.append(error("injected"))

    @invariant()
    def ended_requests_are_right(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.check()
        for request in self.bench.requests:
            if request.status is RequestStatus.FINISHED:
                self.check_outcome(request)

    def check_outcome(self, request: Request) -> None:
        check_ended(request)
        error = error_of(request)
        if error is None:
            assert_equals_alone(request)
        elif isinstance(error, RequestCancelledError):
            assert request.cancelled
        elif isinstance(error, RequestTimeoutError):
            assert request.timeout_seconds is not None
        elif isinstance(error, ContextBudgetError):
            assert self.pinned_ever
        else:
            assert isinstance(error, DecodeError)
            assert self.failed_ever

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self._end()
            self.few_cells.stop()

    def _end(self) -> None:
        self.bench.run()
        for request in self.bench.requests:
            self.check_outcome(request)
        for pin in ("p", "q"):
            for namespace in ("plain", "salted"):
                self.bench.scheduler.cache.release(namespace, pin)
        self.failures.clear()
        # No cell and no sequence id is lost: one request gets the whole pool, then all ids are
        # used at once.
        limits = self.bench.engine.limits
        whole = self.bench.serve(piece("Z", limits.num_cells - 2), 2, keep_prefix=False)
        assert_equals_alone(whole)
        many = [
            self.bench.add(piece(chr(ord("a") + i), 4), 3, ignore_eos=True)
            for i in range(limits.max_sequences)
        ]
        self.bench.step()
        assert self.bench.statistics.num_running == min(limits.max_sequences, limits.max_running)
        self.bench.run()
        assert_equals_alone(*many)


TestScenario = Scenario.TestCase
TestScenario.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def log_softmax_after(tokens: list[int]) -> list[float]:
    engine = FakeEngine()
    batch = Batch()
    row = batch.add(0, tokens, 0, want_logits=True)
    engine.decode(batch)
    logits = engine.logits(row).astype(np.float64)
    logprobs: list[float] = (logits - np.logaddexp.reduce(logits)).tolist()
    return logprobs


def test_the_oracle_itself_depends_on_every_token() -> None:
    """Otherwise the comparisons above would prove nothing."""
    params = SamplingParams(max_tokens=8)
    answers = {answer_alone(DOCUMENT[:50], params)}
    for position in (0, 20, 49):
        tokens = DOCUMENT[:50]
        tokens[position] ^= 1
        answers.add(answer_alone(tokens, params))
    assert len(answers) == 4
