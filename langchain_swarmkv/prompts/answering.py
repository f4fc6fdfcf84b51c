"""Answers on their way: the requests that make them, and what their texts turn into."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from types import TracebackType

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from typing_extensions import Self

from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.prompts.answer_parser import AnswerParser
from langchain_swarmkv.prompts.answer_parts import AnswerPart, CallEnd, ReasoningPart
from langchain_swarmkv.prompts.answers import (
    PartChunks,
    finished_message,
    last_chunk,
    result_of_several,
)
from langchain_swarmkv.scheduling.request import RequestHandle, RequestResult, TokenChunk

__all__ = ["Answering", "Answers"]


class Answers:
    """All answers to one prompt. Leaving its block cancels the requests that still run.

    Args:
        answers: one or several; in the order in which they are given back.
    """

    def __init__(self, answers: Sequence[Answering]) -> None:
        self._answers = answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop all of them within one step."""
        for answer in self._answers:
            answer.handle.cancel()

    def chunks(self) -> Iterator[ChatGenerationChunk]:
        """The chunks of the first as they come; see `Answering.chunks`."""
        return self._answers[0].chunks()

    def achunks(self) -> AsyncGenerator[ChatGenerationChunk]:
        """Like `chunks`, on any event loop."""
        return self._answers[0].achunks()

    def result(self) -> ChatResult:
        """All of them whole, once the chunks of the first were read."""
        for other in self._answers[1:]:
            for _ in other.chunks():
                pass
        return self._result()

    async def aresult(self) -> ChatResult:
        """Like `result`, on any event loop."""
        for other in self._answers[1:]:
            async for _ in other.achunks():
                pass
        return self._result()

    def _result(self) -> ChatResult:
        messages = [answer.message() for answer in self._answers]
        if len(messages) == 1:
            return ChatResult(generations=[ChatGeneration(message=messages[0])])
        return result_of_several(messages)


class Answering:
    """One answer. Read its chunks once.

    Args:
        handle: the request.
        parser: of the model's way to write.
        model_name: for the answer's metadata.
        tokenizer: spells out tokens, where log probabilities are asked for.
    """

    def __init__(
        self, handle: RequestHandle, parser: AnswerParser, model_name: str, tokenizer: Tokenizer
    ) -> None:
        self.handle = handle
        self._parser = parser
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._part_chunks = PartChunks()
        self._parts: list[AnswerPart] = []
        self._num_thought_tokens = 0

    def chunks(self) -> Iterator[ChatGenerationChunk]:
        """The chunks as they come; the last has no text, but usage and metadata."""
        for piece in self.handle:
            yield from self._read(piece)
        yield from self._take(self._parser.finish())
        yield self._last(self.handle.result())

    async def achunks(self) -> AsyncGenerator[ChatGenerationChunk]:
        """Like `chunks`, on any event loop."""
        async for piece in self.handle:
            for chunk in self._read(piece):
                yield chunk
        for chunk in self._take(self._parser.finish()):
            yield chunk
        yield self._last(await self.handle.aresult())

    def _read(self, piece: TokenChunk) -> list[ChatGenerationChunk]:
        if self._parser.may_think:
            self._num_thought_tokens += len(piece.token_ids)
        return self._take(self._parser.push(piece.text))

    def _take(self, parts: list[AnswerPart]) -> list[ChatGenerationChunk]:
        self._parts += parts
        return self._part_chunks.chunks(parts)

    def _last(self, result: RequestResult) -> ChatGenerationChunk:
        has_thoughts = bool(self._parts) and isinstance(self._parts[0], ReasoningPart)
        return last_chunk(
            result,
            self._model_name,
            self._tokenizer,
            has_calls=any(isinstance(part, CallEnd) for part in self._parts),
            num_reasoning_tokens=self._num_thought_tokens if has_thoughts else None,
        )

    def message(self) -> AIMessage:
        """The whole answer, once its last chunk was read."""
        last = self._last(self.handle.result()).message
        assert isinstance(last, AIMessageChunk)
        return finished_message(self._parts, last)
