"""The oracle is deterministic, does not depend on how it is asked, and judges as it says."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from tests.support.oracle import Oracle, OracleStep, assert_matches_oracle
from tests.support.raw import DecodeRefusedError
from tests.support.tolerances import F32_ROUNDING

PROMPT = np.random.default_rng(3).integers(32, 127, 700).tolist()


@pytest.mark.parametrize("flash_attention", [False, True])
def test_equal_questions_have_bit_equal_answers(tiny_models: Path, flash_attention: bool) -> None:
    """Nothing of one question is left for the next."""
    with Oracle(tiny_models, 1024, flash_attention, n_threads=1) as oracle:
        first = oracle.first_logits(PROMPT)
        oracle.greedy(PROMPT[:50], 3)
        assert np.array_equal(first, oracle.first_logits(PROMPT))


def test_prefill_equals_feeding_token_by_token(tiny_models: Path) -> None:
    """The answer to a prompt does not depend on where the prompt ends and the answer starts."""
    prompt, forced = PROMPT[:40], PROMPT[40:60]
    f32 = llama_cpp.GGML_TYPE_F32
    with Oracle(tiny_models, 256, False, n_threads=1, kv_type=f32) as oracle:
        rows = oracle.step_logits(prompt, forced)
        assert rows.shape[0] == len(forced) + 1
        assert np.abs(rows[-1] - oracle.first_logits(prompt + forced)).max() < F32_ROUNDING


def test_greedy_takes_the_best_token_of_every_step(tiny_models: Path) -> None:
    """Steps agree with the logits of the same answer, in tokens and in margins."""
    with Oracle(tiny_models, 1024, False, n_threads=1) as oracle:
        steps = oracle.greedy(PROMPT, 8)
        rows = oracle.step_logits(PROMPT, [step.token for step in steps[:-1]])
    top_two = np.sort(rows, axis=1)[:, -2:]
    assert [step.token for step in steps] == rows.argmax(axis=1).tolist()
    assert [step.margin for step in steps] == pytest.approx(top_two[:, 1] - top_two[:, 0])


def test_a_prompt_longer_than_the_context_is_an_error(tiny_llama: Path) -> None:
    """The oracle never answers from part of a prompt."""
    with Oracle(tiny_llama, 256, False, n_threads=1) as oracle, pytest.raises(DecodeRefusedError):
        oracle.first_logits(PROMPT)


STEPS = [OracleStep(1, 2.0), OracleStep(2, 0.05), OracleStep(3, 2.0)]


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2], [1, 9, 9], [1, 9, 3]])
def test_equal_tokens_and_near_ties_match(tokens: list[int]) -> None:
    """After a difference at a near tie nothing more is compared."""
    assert_matches_oracle(tokens, STEPS, margin=0.1)


@pytest.mark.parametrize("tokens", [[9, 2, 3], [1, 2, 9], [], [1, 2, 3, 4]])
def test_clear_differences_and_odd_lengths_do_not_match(tokens: list[int]) -> None:
    """A difference where the oracle is sure fails, and so does an answer it cannot judge."""
    with pytest.raises(AssertionError):
        assert_matches_oracle(tokens, STEPS, margin=0.1)
