"""From an answer to the object that was asked for, or an error that says why there is none."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import AddableDict, Runnable, RunnableGenerator
from langchain_core.utils.json import parse_partial_json
from pydantic import ConfigDict
from typing_extensions import override

from langchain_swarmkv.errors import AnswerError
from langchain_swarmkv.prompts.langchain_errors import CutAnswerError, UnfitAnswerError
from langchain_swarmkv.prompts.schema import OutputSchema

__all__ = ["AnswerObjectParser", "answer_object", "structured"]


class AnswerObjectParser(BaseCumulativeTransformOutputParser[Any]):
    """Makes the object of an answer, and never one of an answer that was cut.

    In a stream, dicts grow as their text comes in; other objects are made once, at the end.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    answer_schema: OutputSchema
    tool_name: str | None = None
    """Take the arguments of this tool's call; None: the answer's text."""

    @override
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        generation = result[0]
        if not isinstance(generation, ChatGeneration) or not isinstance(
            generation.message, AIMessage
        ):
            raise UnfitAnswerError("An object is made of a chat model's answer only.", text="")
        message: AIMessage = generation.message
        reason = message.response_metadata.get("finish_reason")
        # In a stream, only the last piece says why the answer ended.
        if partial and reason is None:
            return self._so_far(message) if self.answer_schema.is_dict else None
        text = self._text(message)
        try:
            value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            raise (
                self._cut(text, message) if reason == "length" else self._unfit(text, error)
            ) from error
        if reason == "length" and isinstance(value, (int, float)) and not isinstance(value, bool):
            raise self._cut(text, message)  # of all of JSON, only a number may go on
        try:
            return self.answer_schema.validate(text)
        except Exception as error:  # validators of users may raise anything
            raise self._unfit(text, error) from error

    def _cut(self, text: str, message: AIMessage) -> AnswerError:
        num_tokens = message.usage_metadata["output_tokens"] if message.usage_metadata else None
        return CutAnswerError(
            f"The token limit cut the answer after {num_tokens} tokens, before the object "
            f"{self.answer_schema.name!r} was whole. Raise max_tokens, or ask for less.",
            text=text,
            num_output_tokens=num_tokens,
        )

    def _unfit(self, text: str, error: Exception) -> AnswerError:
        return UnfitAnswerError(f"The answer is no {self.answer_schema.name!r}: {error}", text=text)

    @override
    def parse(self, text: str) -> Any:
        return self.parse_result([Generation(text=text)])

    def _text(self, message: AIMessage) -> str:
        if self.tool_name is None:
            return str(message.text)
        for call in message.tool_calls:
            if call["name"] == self.tool_name:
                return json.dumps(call["args"])
        invalid = "\n".join(str(call["args"]) for call in message.invalid_tool_calls)
        return invalid or str(message.text)

    def _so_far(self, message: AIMessage) -> Any:
        try:
            found = parse_partial_json(self._text(message))
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


def _finite(text: str) -> float:
    """What a number of JSON is; Python would make an infinity of one that is too large."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the numbers that a float holds")
    return number


def answer_object(message: AIMessage, schema: OutputSchema) -> Any:
    """The object of a whole answer.

    Raises:
        TruncatedAnswerError: the token limit cut it.
        AnswerError: it does not validate.
    """
    parser = AnswerObjectParser(answer_schema=schema)
    return parser.parse_result([ChatGeneration(message=message)])


def structured(
    llm: Runnable[LanguageModelInput, AIMessage], parser: AnswerObjectParser, *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """The model with the parser behind it; with `include_raw` as LangChain's dict of three."""
    return llm | (_with_raw(parser) if include_raw else parser)


def _with_raw(parser: AnswerObjectParser) -> Runnable[AIMessage, dict[str, Any]]:
    """The parser beside its input, with its error as a value.

    Fallbacks would catch the error too, but in a stream only one of the first piece.
    """

    def beside(chunks: Iterator[AIMessage]) -> Iterator[dict[str, Any]]:
        seen: list[AIMessage] = []
        for chunk in chunks:
            seen.append(chunk)
            yield AddableDict(raw=chunk)
        yield _outcome(parser, seen)

    async def abeside(chunks: AsyncIterator[AIMessage]) -> AsyncIterator[dict[str, Any]]:
        seen: list[AIMessage] = []
        async for chunk in chunks:
            seen.append(chunk)
            yield AddableDict(raw=chunk)
        yield _outcome(parser, seen)

    return RunnableGenerator(beside, abeside)


def _outcome(parser: AnswerObjectParser, chunks: list[AIMessage]) -> dict[str, Any]:
    whole: Any = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    try:
        parsed = parser.invoke(whole)
    except Exception as error:
        return AddableDict(parsed=None, parsing_error=error)
    return AddableDict(parsed=parsed, parsing_error=None)
