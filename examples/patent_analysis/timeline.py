"""The run as lanes over time, laid out for drawing: who prefilled, forked and decoded when."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .graph import title
from .results import Analysis, Timings

WIDTH = 1000.0
LABEL_WIDTH = 150.0
LANE_HEIGHT = 34.0
BAR_HEIGHT = 18.0
AXIS_HEIGHT = 30.0


@dataclass(frozen=True)
class Bar:
    """One phase of one request; `x`, `width` in drawing units, `start`, `end` in seconds."""

    kind: str
    x: float
    width: float
    start: float
    end: float


@dataclass(frozen=True)
class Lane:
    """One request: its bars, and for an analyst the moment `fork_x` when it forked."""

    label: str
    y: float
    """Middle of the lane."""
    bars: tuple[Bar, ...]
    fork_x: float | None


@dataclass(frozen=True)
class Tick:
    """One mark of the time axis."""

    x: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """Lanes from top to bottom, the document first; time starts with its submission."""

    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    width: float
    height: float
    document_end_x: float


def layout(analysis: Analysis) -> Timeline:
    """Place the phases of every request on one axis of time."""
    requests = [analysis.document.timings, *(analyst.timings for analyst in analysis.analysts)]
    scale = _Scale(
        start=requests[0].submitted_at,
        end=max(moment for timings in requests for moment in _moments(timings)),
    )
    document = requests[0]
    lanes = [Lane("Document", _middle(0), _bars(_document_phases(document), scale), None)]
    for row, analyst in enumerate(analysis.analysts, start=1):
        admitted_at = analyst.timings.admitted_at
        fork_x = None if admitted_at is None else scale.x(admitted_at)
        bars = _bars(_analyst_phases(analyst.timings), scale)
        lanes.append(Lane(title(analyst.name), _middle(row), bars, fork_x))
    return Timeline(
        lanes=tuple(lanes),
        ticks=tuple(Tick(scale.x(scale.start + at), f"{at:g} s") for at in scale.ticks()),
        width=WIDTH,
        height=LANE_HEIGHT * len(lanes) + AXIS_HEIGHT,
        document_end_x=scale.x(max(_moments(document))),
    )


@dataclass(frozen=True)
class _Scale:
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return max(self.end - self.start, 1e-6)

    def x(self, moment: float) -> float:
        share = (moment - self.start) / self.seconds
        return round(LABEL_WIDTH + share * (WIDTH - LABEL_WIDTH - 12), 2)

    def ticks(self) -> list[float]:
        """Four to ten round numbers of seconds from 0 to the end."""
        magnitude = 10.0 ** math.floor(math.log10(self.seconds))
        step = next(
            s * magnitude for s in (0.1, 0.2, 0.5, 1.0) if self.seconds <= 10 * s * magnitude
        )
        return [round(i * step, 9) for i in range(int(self.seconds / step + 1e-9) + 1)]


def _middle(row: int) -> float:
    return LANE_HEIGHT * (row + 0.5)


def _moments(timings: Timings) -> list[float]:
    moments = (
        timings.submitted_at,
        timings.admitted_at,
        timings.prefilled_at,
        timings.first_token_at,
        timings.finished_at,
    )
    return [moment for moment in moments if moment is not None]


Phase = tuple[str, float | None, float | None]
"""What a request did, from when, until when."""


def _document_phases(timings: Timings) -> list[Phase]:
    return [
        ("queue", timings.submitted_at, timings.admitted_at),
        ("prefill", timings.admitted_at, timings.prefilled_at),
    ]


def _analyst_phases(timings: Timings) -> list[Phase]:
    return [
        ("queue", timings.submitted_at, timings.admitted_at),
        ("prompt", timings.admitted_at, timings.prefilled_at),
        ("decode", timings.prefilled_at, timings.finished_at),
    ]


def _bars(phases: list[Phase], scale: _Scale) -> tuple[Bar, ...]:
    return tuple(
        Bar(
            kind=kind,
            x=scale.x(start),
            width=round(scale.x(end) - scale.x(start), 2),
            start=round(start - scale.start, 3),
            end=round(end - scale.start, 3),
        )
        for kind, start, end in phases
        if start is not None and end is not None and end > start
    )
