"""What a run measured, and what follows from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from examples.patent_analysis.results import AnalystResult, DocumentResult
from tests.unit_tests.examples.samples import analysis

EVENT = {
    "type": "analyst",
    "node": "novelty",
    "prompt_tokens": 60,
    "cached_tokens": 50,
    "computed_tokens": 10,
    "output_tokens": 7,
    "finish_reason": "stop",
    "submitted_at": 1.0,
    "admitted_at": 1.5,
    "ttft_seconds": 2.0,
    "tpot_seconds": None,
}


def test_an_analyst_result_is_made_from_its_event() -> None:
    """Counts and timings are taken over; what was not measured stays None."""
    result = AnalystResult.of(EVENT, "The text.")
    assert (result.name, result.prompt_tokens, result.text) == ("novelty", 60, "The text.")
    assert result.timings.admitted_at == 1.5
    assert result.timings.tpot_seconds is None
    assert result.timings.finished_at is None


def test_a_document_result_is_made_from_its_event() -> None:
    """`document_tokens` of the event is the size of the shared prompt."""
    event = {"document_tokens": 9, "cached_tokens": 4, "computed_tokens": 5, "submitted_at": 0.5}
    result = DocumentResult.of(event)
    assert (result.prompt_tokens, result.cached_tokens, result.computed_tokens) == (9, 4, 5)


def test_savings_are_the_tokens_not_computed_at_the_measured_rate() -> None:
    """Six analysts of 1050 tokens would compute 6300; 1300 were, at 100 tokens a second."""
    result = analysis()
    assert result.unshared_tokens == 6300
    assert result.computed_tokens == 1300
    assert result.prefill_tokens_per_second == pytest.approx(100.0)
    assert result.saved_seconds == pytest.approx(50.0)


def test_nothing_is_estimated_without_a_measured_rate() -> None:
    """A document that came from the cache says nothing of the speed of a prefill."""
    result = analysis()
    cached = replace(result.document, cached_tokens=1000, computed_tokens=0)
    result = replace(result, document=cached)
    assert result.prefill_tokens_per_second is None
    assert result.saved_seconds is None


def test_json_holds_every_promised_field() -> None:
    """The names that other programs read."""
    values = json.loads(json.dumps(analysis().to_dict()))
    assert values["document_tokens"] == 1000
    assert values["engine"] == {"num_steps": 30}
    assert values["wall_seconds"] == 20.5
    assert len(values["analysts"]) == 6
    promised = {
        "name",
        "prompt_tokens",
        "cached_tokens",
        "computed_tokens",
        "output_tokens",
        "queue_seconds",
        "ttft_seconds",
        "tpot_seconds",
        "text",
    }
    for analyst in values["analysts"]:
        assert promised <= analyst.keys()
        assert analyst["prompt_tokens"] == analyst["cached_tokens"] + analyst["computed_tokens"]
