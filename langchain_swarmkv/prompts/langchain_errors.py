"""Errors of this package that LangChain's own handlers know as theirs."""

from __future__ import annotations

from langchain_core.exceptions import ContextOverflowError, OutputParserException

from langchain_swarmkv.errors import AnswerError, ContextBudgetError, TruncatedAnswerError

__all__ = ["CutAnswerError", "PromptOverflowError", "UnfitAnswerError"]


class PromptOverflowError(ContextBudgetError, ContextOverflowError):
    """A prompt and its answer need more tokens than there are."""


class UnfitAnswerError(AnswerError, OutputParserException):
    """An answer that is not the object that was asked for."""

    retryable = False

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message, **facts)
        # LangChain adds a link to the message, and another with each copy by pickle.
        self.args = (message,)
        self.llm_output = str(facts.get("text", ""))


class CutAnswerError(UnfitAnswerError, TruncatedAnswerError):
    """An answer that the token limit cut."""
