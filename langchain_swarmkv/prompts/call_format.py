"""How a model writes tool calls: the pieces of text around name, arguments and id of each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

__all__ = ["CallFormat", "Hole", "Part", "ReasoningTags"]


class Hole(Enum):
    """What differs from call to call."""

    NAME = "name"
    ARGUMENTS = "arguments"
    """JSON, most often an object."""
    ID = "id"


Part: TypeAlias = "str | Hole"


@dataclass(frozen=True)
class CallFormat:
    r"""The calls of one answer: `opening call (separator call)* closing`.

    Hermes, for one, has `call = ('<tool_call>\n{"name": "', NAME, '", "arguments": ', ARGUMENTS,
    '}\n</tool_call>')`, a newline as separator, and nothing around it.
    """

    opening: str
    call: tuple[Part, ...]
    """Begins with a text; NAME comes before ARGUMENTS."""
    separator: str | None
    """None: the model makes one call at a time."""
    closing: str

    @property
    def trigger(self) -> str:
        """What, at the beginning of a call, no other text holds: the markup before any JSON.

        Calls without markup are JSON from the start; they are told from other text by all that
        stands before the name, and only at the start of an answer.
        """
        head = self.opening + str(self.call[0])
        return markup_of(head) or head

    @property
    def has_markup(self) -> bool:
        """Whether calls open with markup, so that text may come before them."""
        return bool(markup_of(self.opening + str(self.call[0])))

    def map_text(self, change: Callable[[str], str]) -> CallFormat:
        """The same format with every text changed."""
        return replace(
            self,
            opening=change(self.opening),
            call=tuple(part if isinstance(part, Hole) else change(part) for part in self.call),
            separator=None if self.separator is None else change(self.separator),
            closing=change(self.closing),
        )


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around a model's thoughts, such as `<think>` and `</think>`."""

    opening: str
    closing: str


def markup_of(head: str) -> str:
    """What stands before the first JSON bracket, without white space; `[TOOL_CALLS]` is markup."""
    text = head.lstrip()
    end = text.find("{")
    text = text if end < 0 else text[:end]
    return text.rstrip().removesuffix("[").rstrip()
