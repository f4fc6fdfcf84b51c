"""Control tokens in answers: characters that stand for them, and that no text can contain.

Control tokens add nothing to the text of an answer, yet some open a tool call or close a thought.
Each of these is given one lone surrogate. Bytes that a model writes never decode to one, so a text
that merely spells `[TOOL_CALLS]` is not taken for the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from langchain_swarmkv.engine.contract import SpecialToken
from langchain_swarmkv.prompts.segments import Segmenter

__all__ = ["ControlMarks"]

_FIRST_SURROGATE = 0xD800


class ControlMarks:
    """The marks of one model, given out as texts ask for them."""

    def __init__(self, segmenter: Segmenter) -> None:
        self._segmenter = segmenter
        self._by_token: dict[int, str] = {}

    def mark(self, text: str) -> str:
        """The text with a mark in place of each control token."""
        return "".join(self._marked(text))

    def _marked(self, text: str) -> Iterator[str]:
        for piece in self._segmenter.pieces(text):
            if not isinstance(piece, SpecialToken):
                yield piece
            elif not self._segmenter.is_control(piece):
                yield piece.text  # user-defined tokens are text in answers
            else:
                free = chr(_FIRST_SURROGATE + len(self._by_token))
                yield self._by_token.setdefault(piece.token_id, free)

    @property
    def by_token(self) -> Mapping[int, str]:
        """The mark of each token id that has one."""
        return self._by_token

    def token_id(self, mark: str) -> int | None:
        """The token that a character stands for; None: it is text."""
        return next((i for i, known in self._by_token.items() if known == mark), None)
