"""A call format as the parser needs it: texts without white space, and what opens a call."""

from __future__ import annotations

from langchain_swarmkv.prompts.call_format import CallFormat, Hole, Part, markup_of

__all__ = ["CallMarks", "is_control", "is_space", "squeezed", "without_control"]

_SPACE = frozenset(" \t\n\v\f\r")


class CallMarks:
    """A call format as the parser needs it: its texts without white space."""

    def __init__(self, calls: CallFormat) -> None:
        first = str(calls.call[0])
        self.head = squeezed(calls.opening + first)
        self.trigger = _sufficient(calls.trigger) if calls.has_markup else ""
        """What opens a call anywhere in the text; "": calls open answers only."""
        self.after_trigger = self.head[len(squeezed(self.trigger)) :]

        separator = squeezed(calls.separator or "")
        self.next_call = separator or _sufficient(squeezed(markup_of(first) or first))
        """What shows that another call follows; "": none does."""
        if calls.separator is None:
            self.next_call = ""
        self.next_raw = "" if separator else self.next_call
        self.after_next_call = squeezed(first)[len(self.next_raw) :]
        self.closing = squeezed(calls.closing)

        parts = [part if isinstance(part, Hole) else squeezed(part) for part in calls.call[1:]]
        parts = [part for part in parts if part]
        first_character = self.trigger[:1]
        self.ends_arguments = "" if _may_be_json(first_character) else first_character
        """Outside strings: what no arguments hold, so that a call with a bracket too few does not
        swallow the next."""
        self.arguments_optional = parts[-1] is not Hole.ARGUMENTS
        self.id_ends_object = _id_ends_object(parts)
        if self.id_ends_object:
            after_object = str(parts[-1]).partition("}")[2]
            parts[parts.index(Hole.ARGUMENTS) + 1 :] = [Hole.ID, after_object]
        self.parts = [
            (part, _stop(next_)) for part, next_ in zip(parts, [*parts[1:], ""], strict=True)
        ]
        """After the first literal: literals, and holes with the first character after them."""


def _may_be_json(char: str) -> bool:
    return char.isalnum() or char in '[{"-'


def _sufficient(trigger: str) -> str:
    """A control token alone opens a call: nothing else can be meant by it."""
    return trigger[:1] if is_control(trigger[:1]) else trigger


def _id_ends_object(parts: list[Part]) -> bool:
    """Whether a call is an object such as `{..., "arguments": {...}, "id": "..."}`."""
    if len(parts) < 4 or parts[-4] is not Hole.ARGUMENTS or parts[-2] is not Hole.ID:
        return False
    return "}" in str(parts[-1]) and "}" not in str(parts[-3])


def _stop(following: Part) -> str:
    return "" if isinstance(following, Hole) else following[:1]


def squeezed(text: str) -> str:
    """The text without its white space."""
    return "".join(char for char in text if not is_space(char))


def is_space(char: str) -> bool:
    """Whether this is white space to guides, whose expressions know that of ASCII alone."""
    return char in _SPACE


def is_control(char: str) -> bool:
    """Whether this stands for a control token; text holds no lone surrogates."""
    return "\ud800" <= char <= "\udfff"


def without_control(text: str) -> str:
    """The text, as far as it can be shown."""
    return "".join(char for char in text if not is_control(char))
