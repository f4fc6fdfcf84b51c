"""Numbers that are computed from others are right, and None where there is nothing to say."""

from __future__ import annotations

import dataclasses
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from langchain_swarmkv import statistics
from langchain_swarmkv.statistics import EngineStatistics, PrefixSource, RequestStatistics

FINISHED = RequestStatistics(
    name="novelty",
    num_prompt_tokens=120,
    num_cached_tokens=100,
    num_computed_tokens=20,
    num_output_tokens=5,
    prefix_source=PrefixSource.RESIDENT,
    submitted_at=10.0,
    admitted_at=10.5,
    prefilled_at=12.0,
    first_token_at=12.25,
    finished_at=14.25,
)


def test_durations_are_differences_of_moments() -> None:
    """All seconds; time to first token counts the wait in the queue."""
    assert FINISHED.queue_seconds == 0.5
    assert FINISHED.prefill_seconds == 1.5
    assert FINISHED.ttft_seconds == 2.25
    assert FINISHED.tpot_seconds == 0.5
    assert FINISHED.e2e_seconds == 4.25


@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        (
            ["admitted_at", "prefilled_at", "first_token_at", "finished_at"],
            ["queue_seconds", "prefill_seconds", "ttft_seconds", "tpot_seconds", "e2e_seconds"],
        ),
        (
            ["prefilled_at", "first_token_at", "finished_at"],
            ["prefill_seconds", "ttft_seconds", "tpot_seconds", "e2e_seconds"],
        ),
        (["first_token_at", "finished_at"], ["ttft_seconds", "tpot_seconds", "e2e_seconds"]),
        (["finished_at"], ["tpot_seconds", "e2e_seconds"]),
        # Prefill only: there is no first token.
        (["first_token_at"], ["ttft_seconds", "tpot_seconds"]),
    ],
)
def test_what_has_not_happened_has_no_duration(missing: list[str], unknown: list[str]) -> None:
    """None, and the others are still told."""
    changes: dict[str, Any] = dict.fromkeys(missing)
    partial = replace(FINISHED, **changes)
    for name in ("queue_seconds", "prefill_seconds", "ttft_seconds", "tpot_seconds", "e2e_seconds"):
        seen = getattr(partial, name)
        assert (seen is None) if name in unknown else (seen == getattr(FINISHED, name))


@pytest.mark.parametrize("num_output_tokens", [0, 1])
def test_time_per_token_needs_two_tokens(num_output_tokens: int) -> None:
    """The first one is prefill's."""
    assert replace(FINISHED, num_output_tokens=num_output_tokens).tpot_seconds is None


def test_the_prefill_rate_is_measured_or_unknown() -> None:
    """Over steps that only prefilled; before the first of them there is no rate."""
    zeros = {
        field.name: 0.0 if field.type == "float" else 0
        for field in dataclasses.fields(EngineStatistics)
    }
    unused = EngineStatistics(**zeros)  # type: ignore[arg-type]
    assert unused.prefill_tokens_per_second is None
    used = replace(unused, prefill_only_tokens=300, prefill_seconds=2.0)
    assert used.prefill_tokens_per_second == 150.0


def test_prefix_sources_are_words_that_serialise() -> None:
    """They go into response metadata as they are."""
    assert [str(source.value) for source in PrefixSource] == ["none", "resident", "memory", "disk"]
    assert PrefixSource("memory") is PrefixSource.MEMORY


@pytest.mark.parametrize(
    "kind",
    [
        value
        for name in statistics.__all__
        if dataclasses.is_dataclass(value := getattr(statistics, name))
    ],
)
def test_statistics_are_frozen(kind: type) -> None:
    """What was measured does not change in the hands of a reader."""
    fields = dataclasses.fields(kind)
    instance = kind(*[0] * len(fields))
    with pytest.raises(FrozenInstanceError):
        setattr(instance, fields[0].name, 1)
