"""Times become places."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.patent_analysis.results import Timings
from examples.patent_analysis.timeline import LABEL_WIDTH, WIDTH, layout
from tests.unit_tests.examples.samples import analysis


def test_the_document_comes_first_and_each_analyst_has_a_lane() -> None:
    """Lanes run from top to bottom without overlapping."""
    lanes = layout(analysis()).lanes
    assert [lane.label for lane in lanes][:2] == ["Document", "Novelty"]
    assert len(lanes) == 7
    assert all(above.y < below.y for above, below in pairwise(lanes))


def test_phases_follow_each_other_and_start_with_the_document() -> None:
    """Second 0 is the submission of the document; an analyst waits, reads, then decodes."""
    document, analyst, *_ = layout(analysis()).lanes
    assert [(bar.kind, bar.start, bar.end) for bar in document.bars] == [("prefill", 0.0, 10.0)]
    assert [(bar.kind, bar.start, bar.end) for bar in analyst.bars] == [
        ("queue", 10.0, 10.5),
        ("prompt", 10.5, 11.0),
        ("decode", 11.0, 20.0),
    ]
    assert document.bars[0].x == LABEL_WIDTH
    assert document.fork_x is None
    assert analyst.fork_x == analyst.bars[1].x


@given(st.lists(st.floats(0, 1e5), min_size=5, max_size=5))
def test_everything_stays_inside_the_drawing(durations: list[float]) -> None:
    """Whatever the times, bars and ticks lie between the labels and the right edge."""
    moments = [sum(durations[: i + 1]) for i in range(5)]
    timings = Timings(*moments)
    sample = analysis()
    sample = replace(
        sample,
        document=replace(sample.document, timings=timings),
        analysts=tuple(replace(analyst, timings=timings) for analyst in sample.analysts),
    )
    timeline = layout(sample)
    edges = [x for lane in timeline.lanes for bar in lane.bars for x in (bar.x, bar.x + bar.width)]
    places = [*edges, *(tick.x for tick in timeline.ticks), timeline.document_end_x]
    assert all(LABEL_WIDTH <= x <= WIDTH for x in places)
    assert 1 <= len(timeline.ticks) <= 12


@pytest.mark.parametrize("seconds", [0.004, 0.9, 1.0, 20.0, 31.4, 100.0, 999.0])
def test_the_axis_has_a_handful_of_round_marks(seconds: float) -> None:
    """Neither two marks nor twenty, from milliseconds to minutes."""
    sample = analysis()
    timings = Timings(0.0, 0.0, seconds, None, seconds)
    timeline = layout(
        replace(sample, document=replace(sample.document, timings=timings), analysts=())
    )
    assert 4 <= len(timeline.ticks) <= 11
    assert timeline.ticks[0].label == "0 s"
