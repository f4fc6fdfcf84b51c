"""What the engine relies on llama.cpp for, seen without the engine.

If a test here fails after an upgrade, the ground has moved; the engine is not at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from tests.support.oracle import Oracle
from tests.support.raw import Chunk, DecodeRefusedError, RawContext, RawModel
from tests.support.tiny_gguf import ATTENTION_ARCHITECTURES
from tests.support.tolerances import F32_ROUNDING

NUM_SEQUENCES = 8
KV_TYPE = llama_cpp.GGML_TYPE_F32

_rng = np.random.default_rng(5)


def random_text(length: int) -> list[int]:
    return [int(token) for token in _rng.integers(32, 127, length)]


DOCUMENT = random_text(300)
SUFFIXES = [random_text(length) for length in (1, 3, 17, 40, 5, 61, 2)]
ANSWER = random_text(6)


def assert_branches_equal_the_oracle(
    context: RawContext, oracle: Oracle, prefix: Sequence[int], seq_ids: Sequence[int]
) -> None:
    """Branches that share `prefix`, decoded in one batch, each say what they would say alone."""
    branches = [
        Chunk(seq_id, suffix, len(prefix))
        for seq_id, suffix in zip(seq_ids, SUFFIXES, strict=False)
    ]
    steps = [context.decode(branches)]
    for i, token in enumerate(ANSWER):
        steps.append(context.decode([Chunk(b.seq_id, [token], b.end + i) for b in branches]))
    for branch, (_, suffix, _) in enumerate(branches):
        expected = oracle.step_logits([*prefix, *suffix], ANSWER)
        difference = np.stack([step[branch] for step in steps]) - expected
        assert np.abs(difference).max() < F32_ROUNDING


def assert_fork(
    path: Path, prepare: Callable[[RawContext], Sequence[int]], prefix: Sequence[int] = DOCUMENT
) -> None:
    """`prepare` fills a context and returns sequences that all hold `prefix`."""
    with (
        RawModel(path) as model,
        RawContext(model, 2048, n_seq_max=NUM_SEQUENCES, kv_type=KV_TYPE) as context,
        Oracle(path, 1024, False, n_threads=1, kv_type=KV_TYPE) as oracle,
    ):
        assert_branches_equal_the_oracle(context, oracle, prefix, prepare(context))


def fork_to_all_others(context: RawContext, source: int) -> list[int]:
    others = [seq_id for seq_id in range(NUM_SEQUENCES) if seq_id != source]
    for seq_id in others:
        context.fork(source, seq_id)
    return others


def test_whole_forks_continue_like_unshared_runs(tiny_models: Path) -> None:
    """Seven branches of different lengths in one batch, over one prefill."""

    def prepare(context: RawContext) -> Sequence[int]:
        context.prefill(0, DOCUMENT)
        return fork_to_all_others(context, 0)

    assert_fork(tiny_models, prepare)


def test_a_parent_survives_its_forks(tiny_models: Path) -> None:
    """Forks write nothing into what they share: after one has run and gone, the next is right."""

    def prepare(context: RawContext) -> Sequence[int]:
        context.prefill(0, DOCUMENT)
        context.fork(0, 1)
        context.decode([Chunk(1, random_text(50), len(DOCUMENT))])
        context.clear(1)
        return [*fork_to_all_others(context, 0)[1:], 0]

    assert_fork(tiny_models, prepare)


def test_a_fork_survives_its_parent(tiny_models: Path) -> None:
    """Shared cells stay as long as one sequence has them, whatever is written afterwards."""

    def prepare(context: RawContext) -> Sequence[int]:
        context.prefill(0, DOCUMENT)
        context.fork(0, 1)
        context.clear(0)
        context.prefill(2, random_text(500))
        return [1]

    assert_fork(tiny_models, prepare)


def test_a_fork_in_a_crowded_pool_is_right(tiny_models: Path) -> None:
    """A windowed cache overwrites what the parent's window has passed, and nothing else."""

    def prepare(context: RawContext) -> Sequence[int]:
        context.prefill(1, random_text(100))
        context.prefill(0, DOCUMENT)
        context.clear(1)
        context.prefill(2, random_text(150))
        context.fork(0, 3)
        return [3]

    assert_fork(tiny_models, prepare)


def test_a_saved_state_continues_under_another_id(tiny_models: Path) -> None:
    """Save a fork, forget everything, restore, fork again."""

    def prepare(context: RawContext) -> Sequence[int]:
        context.prefill(0, DOCUMENT)
        context.fork(0, 1)
        state = context.save(1)
        context.clear(0)
        context.clear(1)
        context.prefill(6, random_text(300))
        assert context.restore(3, state)
        assert context.positions(3)[1] == len(DOCUMENT) - 1
        context.clear(6)
        return fork_to_all_others(context, 3)

    assert_fork(tiny_models, prepare)


@pytest.mark.parametrize("architecture", ATTENTION_ARCHITECTURES)
@pytest.mark.parametrize("length", [1, 150, 299])
def test_full_attention_can_be_cut_anywhere(
    tiny_gguf: Callable[..., Path], architecture: str, length: int
) -> None:
    """A fork of the first cells of a longer sequence is a fork of that prefix."""

    def prepare(context: RawContext) -> Sequence[int]:
        context.prefill(0, DOCUMENT)
        for seq_id in range(1, NUM_SEQUENCES):
            context.fork(0, seq_id, length)
        return range(1, NUM_SEQUENCES)

    assert_fork(tiny_gguf(architecture), prepare, DOCUMENT[:length])


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "jamba"])
def test_a_batch_without_room_changes_nothing(
    tiny_gguf: Callable[..., Path], architecture: str
) -> None:
    """Refused batches may be retried smaller: parent and branches are as before."""
    path = tiny_gguf(architecture)
    with (
        RawModel(path) as model,
        RawContext(model, 512, n_seq_max=NUM_SEQUENCES, kv_type=KV_TYPE) as context,
        Oracle(path, 1024, False, n_threads=1, kv_type=KV_TYPE) as oracle,
    ):
        context.prefill(0, DOCUMENT)
        for seq_id in (1, 2, 3):
            context.fork(0, seq_id)
        with pytest.raises(DecodeRefusedError, match="returned 1 "):
            context.decode([Chunk(s, random_text(100), len(DOCUMENT)) for s in (1, 2, 3)])
        assert_branches_equal_the_oracle(context, oracle, DOCUMENT, [1, 2, 3, 0])
