"""What one run found and measured, as plain values: the source of the summary, JSON and page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Timings:
    """One request: moments on the engine's clock (`*_at`) and durations, all in seconds."""

    submitted_at: float
    admitted_at: float | None = None
    prefilled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Timings:
        """The timings that a node's event carries."""
        values: dict[str, Any] = {field.name: event.get(field.name) for field in fields(cls)}
        return cls(**values)


@dataclass(frozen=True)
class DocumentResult:
    """The shared prefix: instructions and document."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    timings: Timings

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> DocumentResult:
        """From the event that a `DocumentNode` sends when its prefill is done."""
        return cls(
            prompt_tokens=event["document_tokens"],
            cached_tokens=event["cached_tokens"],
            computed_tokens=event["computed_tokens"],
            timings=Timings.of(event),
        )


@dataclass(frozen=True)
class AnalystResult:
    """One analyst. `prompt_tokens == cached_tokens + computed_tokens`."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    finish_reason: str | None
    timings: Timings
    text: str

    @property
    def end(self) -> str:
        """How the answer ended: "done", or "cut" by max_tokens."""
        return "cut" if self.finish_reason == "length" else "done"

    @classmethod
    def of(cls, event: Mapping[str, Any], text: str) -> AnalystResult:
        """From the event that an `AnalystNode` sends when its answer is complete."""
        return cls(
            name=event["node"],
            prompt_tokens=event["prompt_tokens"],
            cached_tokens=event["cached_tokens"],
            computed_tokens=event["computed_tokens"],
            output_tokens=event["output_tokens"],
            finish_reason=event["finish_reason"],
            timings=Timings.of(event),
            text=text,
        )


@dataclass(frozen=True)
class Analysis:
    """One run of the graph."""

    model: str
    document: DocumentResult
    analysts: tuple[AnalystResult, ...]
    report: str
    engine: Mapping[str, Any]
    """The engine's statistics at the end."""
    versions: Mapping[str, str]
    wall_seconds: float

    @property
    def unshared_tokens(self) -> int:
        """Prompt tokens of the same run if every analyst prefilled its whole prompt."""
        return sum(analyst.prompt_tokens for analyst in self.analysts)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that this run did compute."""
        return self.document.computed_tokens + sum(a.computed_tokens for a in self.analysts)

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Measured on the document; None if it came from the cache."""
        seconds = self.document.timings.prefill_seconds
        tokens = self.document.computed_tokens
        return tokens / seconds if seconds and tokens else None

    @property
    def saved_seconds(self) -> float | None:
        """Estimate: the tokens that sharing spared, at the measured prefill rate."""
        rate = self.prefill_tokens_per_second
        return None if rate is None else (self.unshared_tokens - self.computed_tokens) / rate

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it; the timings of a request stand beside its counts."""
        return {
            "model": self.model,
            "document_tokens": self.document.prompt_tokens,
            "document": _flat(self.document),
            "analysts": [_flat(analyst) for analyst in self.analysts],
            "report": self.report,
            "savings": {
                "unshared_tokens": self.unshared_tokens,
                "computed_tokens": self.computed_tokens,
                "prefill_tokens_per_second": self.prefill_tokens_per_second,
                "estimated_saved_seconds": self.saved_seconds,
            },
            "engine": dict(self.engine),
            "versions": dict(self.versions),
            "wall_seconds": self.wall_seconds,
        }


def _flat(result: DocumentResult | AnalystResult) -> dict[str, Any]:
    values = asdict(result)
    timings: dict[str, Any] = values.pop("timings")
    return {**values, **timings}
