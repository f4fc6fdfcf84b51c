"""What every `Engine` must do. An engine's test class inherits the suite and opens engines.

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def open_engine(self) -> OpenEngine:
            return MyEngine

The oracle of a sequence is a fresh engine that decodes the same tokens from an empty pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.contract import Batch, Engine
from langchain_swarmkv.errors import (
    EngineClosedError,
    GrammarError,
    InvalidBatchError,
    InvalidRequestError,
    NoRoomError,
    SequenceError,
)

Logits = npt.NDArray[np.float32]

_rng = np.random.default_rng(7)


def random_text(length: int) -> list[int]:
    """Printable ASCII, whose codes are the token ids of every engine here."""
    tokens: list[int] = _rng.integers(32, 127, length).tolist()
    return tokens


DOCUMENT = random_text(150)
SUFFIXES = [random_text(length) for length in (3, 1, 17, 5)]


class OpenEngine(Protocol):
    """Opens an engine of these limits, on a model of at least 4096 positions."""

    def __call__(
        self, *, num_cells: int = 512, max_sequences: int = 8, max_batch_tokens: int = 64
    ) -> Engine: ...


def append(engine: Engine, seq_id: int, tokens: Sequence[int]) -> Logits:
    """Decode tokens at the end of a sequence, in full batches; logits after the last."""
    assert tokens
    size = engine.limits.max_batch_tokens
    for start in range(0, len(tokens), size):
        batch = Batch()
        chunk = tokens[start : start + size]
        row = batch.add(seq_id, chunk, engine.num_tokens(seq_id), want_logits=True)
        engine.decode(batch)
    return engine.logits(row)


def lengths(engine: Engine) -> list[int]:
    """Tokens in each sequence."""
    return [engine.num_tokens(seq_id) for seq_id in range(engine.limits.max_sequences)]


def damaged_states(state: bytes) -> dict[str, bytes]:
    """What a state may have become on its way: nothing, something else, cut, longer, changed."""

    def flip(*positions: int) -> bytes:
        changed = bytearray(state)
        for position in positions:
            changed[position] ^= 0x10
        return bytes(changed)

    last = len(state) - 1
    return {
        "empty": b"",
        "three bytes": state[:3],
        "png": b"\x89PNG\r\n\x1a\n" + bytes(last - 7),
        "zeros": bytes(len(state)),
        "one byte short": state[:-1],
        "half": state[: len(state) // 2],
        "one byte too many": state + b"\0",
        "twice": state + state,
        **{f"byte {k}/24 changed": flip(k * last // 24) for k in range(25)},
        "two bytes changed": flip(last // 2, last // 2 + 8),
    }


def is_refused(engine: Engine, state: bytes) -> bool:
    """Whether sequence 1 cannot be restored from the state."""
    try:
        engine.restore(1, state, len(DOCUMENT))
    except SequenceError:
        return True
    return False


class EngineContract:
    """The suite."""

    tolerance = 0.0
    """How far the logits of equal sequences may be apart when they were decoded otherwise."""

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        """Overridden by each engine's class."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self, open_engine: OpenEngine) -> Iterator[Engine]:
        engine = open_engine()
        yield engine
        engine.close()

    @pytest.fixture
    def oracle(self, open_engine: OpenEngine) -> Iterator[Callable[[Sequence[int]], Logits]]:
        fresh = open_engine()

        def first_logits(tokens: Sequence[int]) -> Logits:
            fresh.clear(0)
            return append(fresh, 0, tokens)

        yield first_logits
        fresh.close()

    def assert_equal(self, seen: Logits, expected: Logits) -> None:
        assert np.abs(seen - expected).max() <= self.tolerance

    def assert_different(self, seen: Logits, expected: Logits) -> None:
        assert np.abs(seen - expected).max() > 2 * self.tolerance

    # What it says of itself.

    def test_a_new_engine_is_empty_and_says_what_it_is(self, engine: Engine) -> None:
        """Limits are those asked for, and facts and tokenizer agree."""
        limits, facts = engine.limits, engine.facts
        assert (limits.num_cells, limits.max_sequences, limits.max_batch_tokens) == (512, 8, 64)
        assert lengths(engine) == [0] * 8
        assert facts.n_vocab == engine.tokenizer.n_vocab > 0
        assert facts.n_ctx_train == engine.tokenizer.n_ctx_train >= 4096
        assert facts.name
        assert facts.architecture
        assert engine.device
        assert len(bytes.fromhex(facts.identity.digest)) == 32

    def test_equal_engines_have_one_identity(self, engine: Engine, open_engine: OpenEngine) -> None:
        """Sizes do not change the KV of a token sequence."""
        other = open_engine(num_cells=256, max_sequences=4, max_batch_tokens=32)
        assert other.facts.identity == engine.facts.identity
        other.close()

    # Decoding.

    def test_decode_appends_to_its_sequence_alone(self, engine: Engine) -> None:
        """Lengths grow by what was decoded."""
        append(engine, 2, DOCUMENT[:70])
        append(engine, 5, DOCUMENT[:1])
        append(engine, 2, DOCUMENT[70:75])
        assert lengths(engine) == [0, 0, 75, 0, 0, 1, 0, 0]

    def test_chunks_do_not_change_the_result(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """A prompt in one batch, in uneven ones, and one token at a time."""
        prompt = DOCUMENT[:40]
        expected = oracle(prompt)
        append(engine, 0, prompt[:17])
        append(engine, 0, prompt[17:39])
        self.assert_equal(append(engine, 0, prompt[39:]), expected)
        for token in prompt:
            logits = append(engine, 1, [token])
        self.assert_equal(logits, expected)

    def test_every_token_counts(self, oracle: Callable[[Sequence[int]], Logits]) -> None:
        """The comparison that the suite relies on tells prompts apart that differ early."""
        prompt = DOCUMENT[:100]
        other = [prompt[0] ^ 1, *prompt[1:]]
        self.assert_different(oracle(prompt), oracle(other))
        self.assert_different(oracle(prompt), oracle(prompt[1:]))

    def test_sequences_of_one_batch_do_not_see_each_other(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """Four prompts of different lengths in one batch."""
        batch = Batch()
        rows = [batch.add(s, tokens, 0, want_logits=True) for s, tokens in enumerate(SUFFIXES)]
        engine.decode(batch)
        for row, tokens in zip(rows, SUFFIXES, strict=True):
            self.assert_equal(engine.logits(row), oracle(tokens))

    def test_logits_are_of_the_rows_that_were_asked_for(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """Two rows inside a prompt, each with the logits after its own token."""
        batch = Batch()
        batch.add(0, DOCUMENT[:20], 0, want_logits=True)
        batch.output_rows.append(6)
        engine.decode(batch)
        self.assert_equal(engine.logits(19), oracle(DOCUMENT[:20]))
        self.assert_equal(engine.logits(6), oracle(DOCUMENT[:7]))
        for row in (0, 5, 18, 20, -1, 1000):
            with pytest.raises(InvalidBatchError):
                engine.logits(row)

    def test_logits_belong_to_the_caller(self, engine: Engine) -> None:
        """One float a token of the vocabulary, not changed by what comes later."""
        logits = append(engine, 0, DOCUMENT[:10])
        assert logits.shape == (engine.facts.n_vocab,)
        assert logits.dtype == np.float32
        kept = logits.copy()
        append(engine, 1, DOCUMENT[20:40])
        assert np.array_equal(logits, kept)

    def test_a_batch_ends_the_logits_of_the_one_before(self, engine: Engine) -> None:
        """Stale rows are refused, not answered from the buffer."""
        append(engine, 0, DOCUMENT[:10])
        batch = Batch()
        batch.add(0, DOCUMENT[10:20], 10, want_logits=False)
        engine.decode(batch)
        with pytest.raises(InvalidBatchError):
            engine.logits(9)

    @pytest.mark.parametrize(
        ("tokens", "positions", "seq_ids", "rows"),
        [
            pytest.param([], [], [], [], id="empty"),
            pytest.param([65], [9], [0], [0], id="position-repeated"),
            pytest.param([65], [11], [0], [0], id="position-left-out"),
            pytest.param([65], [-1], [0], [0], id="position-negative"),
            pytest.param([65, 66], [10, 10], [0, 0], [1], id="position-twice"),
            pytest.param([65, 66], [10, 12], [0, 0], [1], id="gap-inside"),
            pytest.param([65, 66], [10, 1], [0, 1], [1], id="second-sequence-off-by-one"),
            pytest.param([65, 66], [10, 0], [0, 8], [1], id="sequence-too-high"),
            pytest.param([65, 66], [10, 0], [0, -1], [1], id="sequence-negative"),
            pytest.param([65, 1 << 20], [10, 11], [0, 0], [1], id="token-too-high"),
            pytest.param([65, -1], [10, 11], [0, 0], [1], id="token-negative"),
            pytest.param([65], [10], [0], [1], id="row-too-high"),
            pytest.param([65], [10], [0], [-1], id="row-negative"),
            pytest.param([65] * 65, list(range(10, 75)), [0] * 65, [64], id="too-long"),
        ],
    )
    def test_an_invalid_batch_changes_nothing(
        self,
        engine: Engine,
        oracle: Callable[[Sequence[int]], Logits],
        tokens: list[int],
        positions: list[int],
        seq_ids: list[int],
        rows: list[int],
    ) -> None:
        """It is refused whole, and the sequence goes on as if it had not been sent."""
        append(engine, 0, DOCUMENT[:10])
        with pytest.raises(InvalidBatchError) as refused:
            engine.decode(Batch(tokens, positions, seq_ids, rows))
        assert refused.value.facts["return_code"] == -1
        assert lengths(engine) == [10] + [0] * 7
        self.assert_equal(append(engine, 0, DOCUMENT[10:20]), oracle(DOCUMENT[:20]))

    def test_a_batch_without_room_changes_nothing(self, open_engine: OpenEngine) -> None:
        """A smaller one may follow. Caches that do not grow with tokens have room always."""
        engine = open_engine(num_cells=256)
        append(engine, 0, DOCUMENT)
        append(engine, 1, DOCUMENT[:100])
        batch = Batch()
        batch.add(1, DOCUMENT[100:107], 100, want_logits=True)
        if engine.facts.kv_bytes_per_token:
            with pytest.raises(NoRoomError) as refused:
                engine.decode(batch)
            assert refused.value.facts["return_code"] == 1
            assert refused.value.retryable
            assert lengths(engine)[:2] == [150, 100]
            engine.clear(0)
        engine.decode(batch)
        assert engine.num_tokens(1) == 107
        engine.close()

    # Forks.

    def test_whole_forks_continue_like_unshared_runs(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """Four branches in one batch, and their parent afterwards."""
        append(engine, 0, DOCUMENT)
        for branch in range(1, 5):
            engine.fork(0, branch, len(DOCUMENT))
        assert lengths(engine) == [150] * 5 + [0] * 3
        batch = Batch()
        rows = [
            batch.add(branch, tokens, len(DOCUMENT), want_logits=True)
            for branch, tokens in enumerate(SUFFIXES, 1)
        ]
        engine.decode(batch)
        for row, tokens in zip(rows, SUFFIXES, strict=True):
            self.assert_equal(engine.logits(row), oracle(DOCUMENT + tokens))
        self.assert_equal(append(engine, 0, SUFFIXES[2]), oracle(DOCUMENT + SUFFIXES[2]))

    def test_a_fork_shares_cells(self, open_engine: OpenEngine) -> None:
        """Eight sequences of 150 tokens and a few of their own fit into 256 cells."""
        engine = open_engine(num_cells=256)
        append(engine, 0, DOCUMENT)
        for branch in range(1, 8):
            engine.fork(0, branch, len(DOCUMENT))
        for branch in range(8):
            append(engine, branch, DOCUMENT[:10])
        assert lengths(engine) == [160] * 8
        engine.close()

    def test_moved_cells_continue_like_unshared_runs(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """A shared document and a branch's own tail move into the hole that another one leaves."""
        if not engine.limits.can_cut:
            return  # such engines are not asked to
        append(engine, 0, DOCUMENT[::-1])
        append(engine, 1, DOCUMENT)
        for branch in (2, 3):
            engine.fork(1, branch, 150)
            append(engine, branch, SUFFIXES[branch])
        engine.clear(0)
        engine.move_down([1, 2, 3], 0, 150, scratch=0)
        engine.move_down([2], 150, 150 + len(SUFFIXES[2]), scratch=5)
        assert lengths(engine) == [
            0,
            150,
            150 + len(SUFFIXES[2]),
            150 + len(SUFFIXES[3]),
            0,
            0,
            0,
            0,
        ]
        append(engine, 4, DOCUMENT[::-1])
        for branch in (2, 3):
            expected = oracle([*DOCUMENT, *SUFFIXES[branch], *SUFFIXES[0]])
            self.assert_equal(append(engine, branch, SUFFIXES[0]), expected)
        self.assert_equal(append(engine, 1, SUFFIXES[0]), oracle(DOCUMENT + SUFFIXES[0]))
        engine.clear(1)
        engine.clear(2)
        assert engine.num_tokens(3) == 150 + len(SUFFIXES[3]) + len(SUFFIXES[0])

    def test_what_cannot_be_moved_stays(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """A scratch sequence in use, or positions that a holder does not have."""
        if not engine.limits.can_cut:
            return
        append(engine, 0, DOCUMENT[:20])
        append(engine, 1, DOCUMENT[:5])
        for holders, first, end, scratch in (
            ([0], 0, 20, 1),
            ([0], 0, 21, 2),
            ([0], 5, 5, 2),
            ([0], -1, 5, 2),
            ([0, 1], 0, 20, 2),
        ):
            with pytest.raises(SequenceError):
                engine.move_down(holders, first, end, scratch)
        assert lengths(engine) == [20, 5] + [0] * 6
        self.assert_equal(append(engine, 0, DOCUMENT[20:30]), oracle(DOCUMENT[:30]))

    def test_a_fork_of_a_fork_outlives_both(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """Cells stay as long as one sequence has them, whatever is written meanwhile."""
        append(engine, 0, DOCUMENT[:60])
        engine.fork(0, 1, 60)
        append(engine, 1, DOCUMENT[60:80])
        engine.fork(1, 2, 80)
        engine.clear(0)
        engine.clear(1)
        append(engine, 3, DOCUMENT[::-1])
        self.assert_equal(append(engine, 2, DOCUMENT[80:90]), oracle(DOCUMENT[:90]))

    @pytest.mark.parametrize("length", [1, 37, 149])
    def test_a_sequence_is_cut_or_the_cut_refused(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits], length: int
    ) -> None:
        """As `limits.can_cut` says; a refusal leaves the parent whole and the target empty."""
        append(engine, 0, DOCUMENT)
        if not engine.limits.can_cut:
            with pytest.raises(SequenceError):
                engine.fork(0, 1, length)
            assert lengths(engine)[:2] == [150, 0]
            engine.fork(0, 1, len(DOCUMENT))
            length = len(DOCUMENT)
        else:
            engine.fork(0, 1, length)
        assert engine.num_tokens(1) == length
        tokens = SUFFIXES[3]
        self.assert_equal(append(engine, 1, tokens), oracle(DOCUMENT[:length] + tokens))

    @pytest.mark.parametrize(
        ("source", "target", "num_tokens", "error"),
        [
            pytest.param(0, 1, 11, SequenceError, id="longer-than-source"),
            pytest.param(0, 1, 0, SequenceError, id="nothing"),
            pytest.param(0, 1, -1, SequenceError, id="negative"),
            pytest.param(3, 1, 1, SequenceError, id="empty-source"),
            pytest.param(0, 2, 10, SequenceError, id="target-in-use"),
            pytest.param(0, 0, 10, SequenceError, id="onto-itself"),
            pytest.param(8, 1, 1, InvalidBatchError, id="unknown-source"),
            pytest.param(-1, 1, 1, InvalidBatchError, id="negative-source"),
            pytest.param(0, 8, 10, InvalidBatchError, id="unknown-target"),
            pytest.param(0, -1, 10, InvalidBatchError, id="negative-target"),
        ],
    )
    def test_an_impossible_fork_changes_nothing(
        self, engine: Engine, source: int, target: int, num_tokens: int, error: type[Exception]
    ) -> None:
        """Each with its own error, before anything is copied."""
        append(engine, 0, DOCUMENT[:10])
        append(engine, 2, DOCUMENT[:4])
        with pytest.raises(error):
            engine.fork(source, target, num_tokens)
        assert lengths(engine) == [10, 0, 4, 0, 0, 0, 0, 0]

    # Clearing.

    def test_cleared_sequences_are_empty_and_can_be_filled_again(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """Nothing of the old tokens is left, and clearing an empty sequence is harmless."""
        for tokens in (DOCUMENT[:50], SUFFIXES[2]):
            engine.clear(4)
            engine.clear(4)
            assert engine.num_tokens(4) == 0
            self.assert_equal(append(engine, 4, tokens), oracle(tokens))

    def test_a_pool_can_be_filled_many_times(self, open_engine: OpenEngine) -> None:
        """Clearing frees the cells: twenty documents through a pool for one."""
        engine = open_engine(num_cells=256)
        for turn in range(20):
            seq_id = turn % 8
            append(engine, seq_id, DOCUMENT)
            engine.fork(seq_id, (seq_id + 1) % 8, len(DOCUMENT))
            engine.clear(seq_id)
            engine.clear((seq_id + 1) % 8)
        assert lengths(engine) == [0] * 8
        engine.close()

    @pytest.mark.parametrize("seq_id", [-1, 8, 1 << 40])
    def test_unknown_sequences_are_refused(self, engine: Engine, seq_id: int) -> None:
        """-1 means "all" in llama.cpp: it never gets there."""
        append(engine, 0, DOCUMENT[:10])
        state = engine.save(0)
        calls: list[Callable[[], Any]] = [
            lambda: engine.num_tokens(seq_id),
            lambda: engine.clear(seq_id),
            lambda: engine.save(seq_id),
            lambda: engine.restore(seq_id, state, 10),
        ]
        for call in calls:
            with pytest.raises(InvalidBatchError):
                call()
        assert lengths(engine) == [10] + [0] * 7

    # Saving and restoring.

    def test_a_state_continues_under_other_ids(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """Saved from 3, restored into 0 and 5 while others are in the pool."""
        append(engine, 3, DOCUMENT)
        state = engine.save(3)
        append(engine, 1, SUFFIXES[2])
        engine.restore(0, state, len(DOCUMENT))
        engine.clear(3)
        engine.restore(5, state, len(DOCUMENT))
        assert lengths(engine) == [150, 17, 0, 0, 0, 150, 0, 0]
        for seq_id, tokens in ((0, SUFFIXES[0]), (5, SUFFIXES[3])):
            self.assert_equal(append(engine, seq_id, tokens), oracle(DOCUMENT + tokens))

    def test_a_state_continues_in_another_engine(
        self,
        engine: Engine,
        open_engine: OpenEngine,
        oracle: Callable[[Sequence[int]], Logits],
    ) -> None:
        """The sizes of the two contexts differ; a restored sequence can be forked."""
        append(engine, 3, DOCUMENT)
        other = open_engine(num_cells=256, max_sequences=4, max_batch_tokens=32)
        other.restore(2, engine.save(3), len(DOCUMENT))
        other.fork(2, 1, len(DOCUMENT))
        self.assert_equal(append(other, 1, SUFFIXES[0]), oracle(DOCUMENT + SUFFIXES[0]))
        other.close()

    def test_a_fork_can_be_saved_at_once(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """Before any decode: no copy is waiting to be done. Parent and fork stay as they are."""
        append(engine, 0, DOCUMENT)
        engine.fork(0, 1, len(DOCUMENT))
        state = engine.save(1)
        engine.restore(2, state, len(DOCUMENT))
        for seq_id in (0, 1, 2):
            tokens = SUFFIXES[seq_id]
            self.assert_equal(append(engine, seq_id, tokens), oracle(DOCUMENT + tokens))

    def test_a_state_is_bytes_that_depend_on_the_tokens(self, engine: Engine) -> None:
        """Saving twice gives the same; one more token gives another."""
        append(engine, 0, DOCUMENT[:20])
        first = engine.save(0)
        assert isinstance(first, bytes)
        assert engine.save(0) == first
        append(engine, 0, DOCUMENT[20:21])
        assert engine.save(0) != first

    def test_damaged_states_are_refused_and_leave_no_trace(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """The target is empty, its neighbour whole, and the good state still goes in."""
        append(engine, 0, DOCUMENT)
        state = engine.save(0)
        for damage, damaged in damaged_states(state).items():
            assert is_refused(engine, damaged), damage
            assert lengths(engine) == [150] + [0] * 7, damage
        engine.restore(1, state, len(DOCUMENT))
        for seq_id in (0, 1):
            tokens = SUFFIXES[seq_id]
            self.assert_equal(append(engine, seq_id, tokens), oracle(DOCUMENT + tokens))

    @pytest.mark.parametrize("num_tokens", [149, 151, 0, -1, 1 << 32])
    def test_a_state_of_another_length_is_refused(self, engine: Engine, num_tokens: int) -> None:
        """What the caller believes to restore is what the state must hold."""
        append(engine, 0, DOCUMENT)
        state = engine.save(0)
        with pytest.raises(SequenceError):
            engine.restore(1, state, num_tokens)
        assert lengths(engine) == [150] + [0] * 7

    def test_a_state_of_another_engine_is_refused(self, engine: Engine) -> None:
        """Bytes of another kind of engine, well formed as they are."""
        foreign = type(self).foreign_state()
        with pytest.raises(SequenceError):
            engine.restore(1, foreign, 10)
        assert lengths(engine) == [0] * 8

    @staticmethod
    def foreign_state() -> bytes:
        """A state of ten tokens of another kind of engine; overridden where there is one."""
        return b"another kind of state"

    def test_a_sequence_in_use_is_not_overwritten(
        self, engine: Engine, oracle: Callable[[Sequence[int]], Logits]
    ) -> None:
        """Restoring over tokens is refused and keeps them."""
        append(engine, 0, DOCUMENT)
        append(engine, 1, SUFFIXES[0])
        with pytest.raises(SequenceError):
            engine.restore(1, engine.save(0), len(DOCUMENT))
        expected = oracle(SUFFIXES[0] + SUFFIXES[1])
        self.assert_equal(append(engine, 1, SUFFIXES[1]), expected)

    def test_a_state_that_has_no_room_is_refused(self, open_engine: OpenEngine) -> None:
        """The pool is too full for it; with room it goes in."""
        engine = open_engine(num_cells=256)
        append(engine, 0, DOCUMENT)
        state = engine.save(0)
        if engine.facts.kv_bytes_per_token:
            with pytest.raises(SequenceError):
                engine.restore(1, state, len(DOCUMENT))
            assert lengths(engine) == [150] + [0] * 7
            engine.clear(0)
        engine.restore(1, state, len(DOCUMENT))
        assert engine.num_tokens(1) == 150
        engine.close()

    # Sampling; what needs real logits is tested on the llama engine alone.

    def test_temperature_zero_takes_the_best(self, engine: Engine) -> None:
        """Greedy, and sampling leaves the logits as they were."""
        logits = append(engine, 0, DOCUMENT[:30])
        sampler = engine.create_sampler(SamplingParams(), DOCUMENT[:30])
        assert sampler.sample(29) == int(logits.argmax())
        assert np.array_equal(engine.logits(29), logits)
        sampler.close()

    @pytest.mark.parametrize(
        "params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-300}]
    )
    def test_settings_that_leave_one_token_are_greedy(
        self, engine: Engine, params: dict[str, Any]
    ) -> None:
        """Whatever the seed."""
        logits = append(engine, 0, DOCUMENT[:30])
        for seed in range(5):
            settings = SamplingParams(**{"temperature": 5.0, "seed": seed, **params})
            sampler = engine.create_sampler(settings, [])
            assert sampler.sample(29) == int(logits.argmax())
            sampler.close()

    def draws(self, engine: Engine, row: int, count: int = 40, **params: Any) -> list[int]:
        """What one sampler picks from the same logits again and again."""
        sampler = engine.create_sampler(SamplingParams(**{"temperature": 3.0, **params}), [])
        tokens = [sampler.sample(row) for _ in range(count)]
        sampler.close()
        return tokens

    def test_seeds_reproduce_and_differ(self, engine: Engine) -> None:
        """One seed, one run of tokens; and samplers do not share their state."""
        append(engine, 0, DOCUMENT[:30])
        first, second = self.draws(engine, 29, seed=1), self.draws(engine, 29, seed=2)
        assert first == self.draws(engine, 29, seed=1)
        assert first != second
        assert len(set(first)) > 1

    def test_a_sampler_without_a_seed_draws_one_and_tells_it(self, engine: Engine) -> None:
        """Two samplers differ, and the told seed repeats the run."""
        append(engine, 0, DOCUMENT[:30])
        params = SamplingParams(temperature=3.0)
        samplers = [engine.create_sampler(params, []) for _ in range(2)]
        assert samplers[0].seed != samplers[1].seed
        tokens = [samplers[0].sample(29) for _ in range(40)]
        assert tokens == self.draws(engine, 29, seed=samplers[0].seed)
        for sampler in samplers:
            sampler.close()

    def test_top_k_bounds_the_choice(self, engine: Engine) -> None:
        """Only the three likeliest ever come, and all of them do."""
        logits = append(engine, 0, DOCUMENT[:30])
        best = set(np.argsort(-logits, kind="stable")[:3].tolist())
        assert set(self.draws(engine, 29, 200, temperature=50.0, top_k=3, seed=0)) == best

    def test_a_bias_lifts_and_forbids(self, engine: Engine) -> None:
        """A large one decides; -inf keeps the best token out."""
        logits = append(engine, 0, DOCUMENT[:30])
        second, best = np.argsort(logits)[-2:].tolist()
        for bias, expected in (({second: 1000.0}, second), ({best: float("-inf")}, second)):
            sampler = engine.create_sampler(SamplingParams(logit_bias=bias), [])
            assert sampler.sample(29) == expected
            sampler.close()

    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_k": 5},
            {"temperature": 1.0, "top_p": 0.5},
            {"temperature": 1.0, "min_p": 0.5},
            {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
        ],
    )
    def test_forbidding_everything_is_an_error(
        self, engine: Engine, params: dict[str, Any]
    ) -> None:
        """The request fails; the engine goes on."""
        append(engine, 0, DOCUMENT[:30])
        bias = dict.fromkeys(range(engine.facts.n_vocab), float("-inf"))
        sampler = engine.create_sampler(SamplingParams(logit_bias=bias, **params), [])
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="forbids every token"):
                sampler.sample(29)
        sampler.close()
        assert self.draws(engine, 29, seed=1)

    @pytest.mark.parametrize("temperature", [0.0, 5.0])
    def test_a_guide_leaves_what_it_allows(self, engine: Engine, temperature: float) -> None:
        """From rows and from kept logits, which stay as they are; then only the end may come."""
        logits = append(engine, 0, DOCUMENT[:30])
        kept = logits.copy()
        params = SamplingParams(
            guide="start: /[b-d]{40}/", temperature=temperature, logit_bias={ord("c"): -1e6}, seed=1
        )
        best = max(b"bd", key=lambda token: float(logits[token]))
        for seen in (kept, None):
            sampler = engine.create_sampler(params, DOCUMENT[:30])
            tokens = [
                sampler.sample(29) if seen is None else sampler.sample_from(seen) for _ in range(41)
            ]
            sampler.close()
            assert set(tokens[:40]) == ({best} if temperature == 0 else {*b"bd"})
            assert engine.tokenizer.is_end(tokens[40])
        assert np.array_equal(engine.logits(29), logits)
        assert np.array_equal(kept, logits)

    def test_a_greedy_guide_takes_the_best_that_is_allowed(self, engine: Engine) -> None:
        """Whether or not that is the best of all."""
        logits = append(engine, 0, DOCUMENT[:30])
        ranking = [int(i) for i in np.argsort(-logits) if chr(i).isalnum() and i < 128]
        for best in ranking[:5]:
            others = "".join(chr(i) for i in ranking[ranking.index(best) :])
            sampler = engine.create_sampler(SamplingParams(guide=f"start: /[{others}]/"), [])
            assert sampler.sample(29) == best
            sampler.close()

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_guide_that_a_bias_contradicts_is_an_error(
        self, engine: Engine, temperature: float
    ) -> None:
        """The request fails; the engine goes on."""
        append(engine, 0, DOCUMENT[:30])
        params = SamplingParams(
            guide='start: "ab"', logit_bias={98: float("-inf")}, temperature=temperature
        )
        sampler = engine.create_sampler(params, [])
        assert sampler.sample(29) == ord("a")
        with pytest.raises(GrammarError, match="logit_bias"):
            sampler.sample(29)
        sampler.close()
        assert self.draws(engine, 29, seed=1)

    @pytest.mark.parametrize("token_id", [-1, 1 << 20, 1 << 31])
    def test_a_bias_outside_the_vocabulary_is_an_error(self, engine: Engine, token_id: int) -> None:
        """Before anything is sampled."""
        with pytest.raises(InvalidRequestError, match=str(token_id)):
            engine.create_sampler(SamplingParams(logit_bias={token_id: 1.0}), [])

    @pytest.mark.parametrize("row", [0, 28, 30, -1])
    def test_sampling_without_logits_is_an_error(self, engine: Engine, row: int) -> None:
        """Rows that were not asked for are refused here too."""
        append(engine, 0, DOCUMENT[:30])
        sampler = engine.create_sampler(SamplingParams(), [])
        with pytest.raises(InvalidBatchError):
            sampler.sample(row)
        sampler.close()

    # The tokenizer.

    @pytest.mark.parametrize("token_id", [-1, 1 << 20, 1 << 31])
    def test_unknown_tokens_are_an_error(self, engine: Engine, token_id: int) -> None:
        """Text of a token that does not exist is not asked of native code."""
        with pytest.raises(InvalidRequestError, match=str(token_id)):
            engine.tokenizer.token_bytes(token_id)
        with pytest.raises(InvalidRequestError, match=str(token_id)):
            engine.tokenizer.decode([65, token_id])

    def test_control_tokens_are_no_text(self, engine: Engine) -> None:
        """Their text is not read as them, and they add nothing to a text."""
        tokenizer = engine.tokenizer
        assert tokenizer.special_tokens
        for text, special in tokenizer.special_tokens.items():
            assert special.text == text
            ids = tokenizer.encode(f"a{text}b")
            assert special.token_id not in ids
            assert tokenizer.decode(ids) == f"a{text}b"
            assert tokenizer.token_bytes(special.token_id) == b""
        assert any(tokenizer.is_end(s.token_id) for s in tokenizer.special_tokens.values())

    # The end.

    def test_close_twice_and_nothing_works_afterwards(self, open_engine: OpenEngine) -> None:
        """Every call says that the engine is closed."""
        engine = open_engine()
        append(engine, 0, DOCUMENT[:10])
        state = engine.save(0)
        sampler = engine.create_sampler(SamplingParams(), [])
        engine.close()
        engine.close()
        batch = Batch()
        batch.add(0, [65], 10, want_logits=True)
        calls: list[Callable[[], Any]] = [
            lambda: engine.decode(batch),
            lambda: engine.logits(9),
            lambda: engine.num_tokens(0),
            lambda: engine.clear(0),
            lambda: engine.fork(0, 1, 10),
            lambda: engine.save(0),
            lambda: engine.restore(1, state, 10),
            lambda: engine.create_sampler(SamplingParams(), []),
            lambda: sampler.sample(9),
        ]
        for call in calls:
            with pytest.raises(EngineClosedError):
                call()
        sampler.close()
        sampler.close()
