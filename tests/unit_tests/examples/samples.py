"""An analysis with round numbers, for the tests of what is drawn from it."""

from __future__ import annotations

from collections.abc import Mapping

from examples.patent_analysis.graph import TASKS
from examples.patent_analysis.results import Analysis, AnalystResult, DocumentResult, Timings


def timings(
    submitted_at: float, admitted_at: float, prefilled_at: float, finished_at: float
) -> Timings:
    return Timings(
        submitted_at=submitted_at,
        admitted_at=admitted_at,
        prefilled_at=prefilled_at,
        first_token_at=prefilled_at,
        finished_at=finished_at,
        queue_seconds=admitted_at - submitted_at,
        prefill_seconds=prefilled_at - admitted_at,
        ttft_seconds=prefilled_at - submitted_at,
        tpot_seconds=(finished_at - prefilled_at) / 9,
    )


def analysis(texts: Mapping[str, str] | None = None, *, model: str = "tiny") -> Analysis:
    """1000 document tokens in 10 s, then analysts of 50 own tokens each from 11 s to 21 s.

    The first answer was cut.
    """
    texts = texts or {name: f"Answer of {name}." for name in TASKS}
    return Analysis(
        model=model,
        document=DocumentResult(1000, 0, 1000, timings(1.0, 1.0, 11.0, 11.0)),
        analysts=tuple(
            AnalystResult(name, 1050, 1000, 50, 10, reason, timings(11, 11.5, 12, 21), text)
            for (name, text), reason in zip(
                texts.items(), ["length", *["stop"] * (len(texts) - 1)], strict=True
            )
        ),
        report="\n\n".join(f"## {name}\n\n{text}" for name, text in texts.items()),
        engine={"num_steps": 30},
        versions={"langchain-swarmkv": "1.2.3"},
        wall_seconds=20.5,
    )
