"""What answers consist of, in the order in which it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "ENDED_INSIDE_CALL",
    "AnswerPart",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "InvalidCall",
    "ReasoningPart",
    "TextPart",
]

ENDED_INSIDE_CALL = "The answer ended inside the call."
"""The error of a call that the end of the answer cut, most often at `max_tokens`."""


@dataclass(frozen=True)
class TextPart:
    """A piece of what the model says."""

    text: str


@dataclass(frozen=True)
class ReasoningPart:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call whose arguments are about to come."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is whole and its arguments are a JSON object."""

    index: int


@dataclass(frozen=True)
class InvalidCall:
    """What began as a call and is none; its `CallStart` may have been seen, and arguments too."""

    index: int
    call_id: str
    name: str | None
    """None: it did not come that far."""
    raw: str
    """All that the model wrote, control tokens aside."""
    error: str


AnswerPart: TypeAlias = (
    "TextPart | ReasoningPart | CallStart | CallArguments | CallEnd | InvalidCall"
)
