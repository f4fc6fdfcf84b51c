"""The oracle passes what is right and catches what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.fanout.case import Case
from benchmarks.fanout.contenders.floor import Floor
from benchmarks.fanout.contenders.fresh_context import FreshContext
from benchmarks.fanout.oracle import judge
from benchmarks.fanout.report import is_right
from tests.support.tolerances import F16_CELLS_ROUNDING

Outputs = list[list[list[int]]]


def judged(model: Path, case: Case, folder: Path, *runs: Outputs, **options: Any) -> dict[str, Any]:
    """The verdict on one contender."""
    case_file = folder / "case.json"
    case_file.write_text(case.model_dump_json())
    answer = {"flash_attention": False, "masks_end": False, "runs": list(runs), **options}
    return judge(
        {
            "case": str(case_file),
            "model": str(model),
            "threads": 1,
            "gpu_layers": 0,
            "answers": [answer],
        }
    )


@pytest.fixture(scope="module")
def right(tiny_long: Path, tiny_case: Case) -> Outputs:
    """What a fresh context answers."""
    contender = FreshContext(tiny_long, tiny_case, {"threads": 1, "flash_attention": False})
    contender.open()
    try:
        return contender.run().outputs
    finally:
        contender.close()


def test_right_answers_agree(
    tiny_long: Path, tiny_case: Case, right: Outputs, tmp_path: Path
) -> None:
    """Token by token, whether forced on the kept document or computed from nothing."""
    verdict = judged(tiny_long, tiny_case, tmp_path, right, right)
    (agreement,) = verdict["agreements"]
    assert agreement["tokens"] == agreement["agreeing"] == agreement["exact"] == 2 * 3 * 4
    assert agreement["worst_gap"] < F16_CELLS_ROUNDING
    assert verdict["margin"] == 0.2
    assert verdict["shortcut_difference"]["plain"] < F16_CELLS_ROUNDING


def test_a_wrong_token_is_caught(
    tiny_long: Path, tiny_case: Case, right: Outputs, tmp_path: Path
) -> None:
    """And those after it are judged as what follows from it."""
    wrong = [[list(tokens) for tokens in right[0]]]
    wrong[0][1][2] ^= 1
    (agreement,) = judged(tiny_long, tiny_case, tmp_path, wrong)["agreements"]
    assert agreement["agreeing"] < agreement["tokens"] == 12
    assert agreement["worst_gap"] > 2 * F16_CELLS_ROUNDING


@pytest.mark.parametrize("tokens", [[65, 66, -1, 67], [65, 66, 1 << 20, 67], [65] * 5])
def test_what_no_answer_can_be_is_wrong(
    tiny_long: Path, tiny_case: Case, right: Outputs, tmp_path: Path, tokens: list[int]
) -> None:
    """Ids outside the vocabulary, and more tokens than asked for, never reach llama.cpp."""
    (agreement,) = judged(tiny_long, tiny_case, tmp_path, [[tokens, *right[0][1:]]])["agreements"]
    assert agreement["agreeing"] == 8


def test_an_answer_that_is_too_short_is_not_the_same_work(
    tiny_long: Path, tiny_case: Case, right: Outputs, tmp_path: Path
) -> None:
    """All tokens that were due count."""
    short = [[right[0][0][:2], *right[0][1:]]]
    (agreement,) = judged(tiny_long, tiny_case, tmp_path, short)["agreements"]
    assert (agreement["tokens"], agreement["agreeing"]) == (12, 10)


def test_text_alone_is_right_only_beside_more_that_is_judged(
    tiny_long: Path, tiny_case: Case, right: Outputs, tmp_path: Path
) -> None:
    """One branch of three may; who does nothing, or leaves branches out, is not right."""
    (first, second, third) = right[0]
    for outputs, expected in (
        ([[first, [], third]], True),
        ([[first, [], []]], False),
        ([[[], [], []]], False),
        ([[first, second]], False),
        ([[]], False),
        (right, True),
    ):
        (agreement,) = judged(tiny_long, tiny_case, tmp_path, outputs)["agreements"]
        contender = {"error": None, "oracle_agreement": agreement}
        assert is_right(contender) is expected, (outputs, agreement)


@pytest.mark.parametrize(
    ("tokens", "exact", "expected"),
    [(4, 2, True), (4, 1, False), (100, 80, True), (100, 79, False), (100, 100, True)],
)
def test_most_tokens_must_be_the_best(tokens: int, exact: int, expected: bool) -> None:
    """However close to it they all are: a wrong document leaves many near-ties."""
    agreement = {"tokens": tokens, "agreeing": tokens, "exact": exact, "branches": 1}
    contender = {"error": None, "oracle_agreement": {**agreement, "unjudged_branches": 0}}
    assert is_right(contender) is expected


def test_the_floor_answers_alike_in_waves(tiny_long: Path, tiny_case: Case, right: Outputs) -> None:
    """Whatever the wave size and however the branches lie in the batches."""
    for wave in (1, 2, 3):
        settings = {"threads": 1, "flash_attention": False, "wave": wave}
        contender = Floor(tiny_long, tiny_case, settings)
        contender.open()
        outcome = contender.run()
        contender.close()
        assert outcome.outputs == right
        assert outcome.computed_tokens == tiny_case.num_shared_tokens
        assert len(outcome.activation_seconds) == 3
