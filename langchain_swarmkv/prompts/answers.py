"""The way back: what the engine answered, as LangChain's messages and their chunks.

LangChain parses the arguments of streamed calls with a parser that completes cut JSON: a call cut
by `max_tokens` would be a valid one with some of its arguments, one of bad JSON might be called
with none. So a call that turns out invalid gets a last piece of arguments that no parser can make
sense of (`JsonScanner.spoiler`), and the merged message has it under `invalid_tool_calls`.
`finished_message` makes the message of a whole answer without that detour: there invalid calls hold
exactly what the model wrote, and why it is none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, cast

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.prompts.answer_parts import (
    ENDED_INSIDE_CALL,
    AnswerPart,
    CallArguments,
    CallEnd,
    CallStart,
    InvalidCall,
    ReasoningPart,
    TextPart,
)
from langchain_swarmkv.prompts.json_scanner import JsonScanner
from langchain_swarmkv.scheduling.request import RequestResult, TokenLogprob
from langchain_swarmkv.statistics import RequestStatistics

__all__ = [
    "PROVIDER",
    "PartChunks",
    "finished_message",
    "last_chunk",
    "result_of_several",
    "timings",
]

PROVIDER = "swarmkv"
"""What answers and traces name as their provider; LangChain's middleware compares the two."""

_DURATIONS = ("queue_seconds", "prefill_seconds", "ttft_seconds", "tpot_seconds", "e2e_seconds")
_MOMENTS = tuple(f.name for f in fields(RequestStatistics) if f.name.endswith("_at"))


class PartChunks:
    """The parts of one answer as message chunks, in order."""

    def __init__(self) -> None:
        self._arguments: JsonScanner | None = None
        """Of the call that has begun and not ended."""

    def chunks(self, parts: Iterable[AnswerPart]) -> list[ChatGenerationChunk]:
        """A chunk for each part; the end of a valid call needs none."""
        return [
            ChatGenerationChunk(message=message)
            for part in parts
            if (message := self._message(part)) is not None
        ]

    def _message(self, part: AnswerPart) -> AIMessageChunk | None:
        if isinstance(part, TextPart):
            return AIMessageChunk(content=part.text)
        if isinstance(part, ReasoningPart):
            return AIMessageChunk(content="", additional_kwargs={"reasoning_content": part.text})
        if isinstance(part, CallStart):
            self._arguments = JsonScanner()
            return _call_chunk(part.index, "", call_id=part.call_id, name=part.name)
        begun = self._arguments
        if isinstance(part, CallArguments) and begun is not None:
            begun.push(part.text)
            return _call_chunk(part.index, part.text)
        self._arguments = None
        if not isinstance(part, InvalidCall):
            return None
        if begun is not None:
            return _call_chunk(part.index, begun.spoiler)
        scanner = JsonScanner()
        scanner.push(part.raw)
        arguments = part.raw + scanner.spoiler
        return _call_chunk(part.index, arguments, call_id=part.call_id, name=part.name)


def _call_chunk(
    index: int, arguments: str, *, call_id: str | None = None, name: str | None = None
) -> AIMessageChunk:
    """A piece of a call. LangChain joins names and ids as it does arguments: they come once."""
    chunk = tool_call_chunk(index=index, args=arguments, id=call_id, name=name)
    return AIMessageChunk(content="", tool_call_chunks=[chunk])


def finished_message(parts: Iterable[AnswerPart], last: AIMessageChunk) -> AIMessage:
    """The message of a whole answer.

    Args:
        parts: all of them.
        last: the message of `last_chunk`, for metadata and usage.
    """
    parts = list(parts)
    thoughts = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    arguments: defaultdict[int, list[str]] = defaultdict(list)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    valid = {part.index for part in parts if isinstance(part, CallEnd)}
    return AIMessage(
        content="".join(part.text for part in parts if isinstance(part, TextPart)),
        additional_kwargs={"reasoning_content": thoughts} if thoughts else {},
        tool_calls=[
            tool_call(
                name=part.name, args=json.loads("".join(arguments[part.index])), id=part.call_id
            )
            for part in parts
            if isinstance(part, CallStart) and part.index in valid
        ],
        invalid_tool_calls=[
            invalid_tool_call(
                name=part.name, args=part.raw, id=part.call_id, error=_why_invalid(part, last)
            )
            for part in parts
            if isinstance(part, InvalidCall)
        ],
        usage_metadata=last.usage_metadata,
        response_metadata=last.response_metadata,
    )


def _why_invalid(call: InvalidCall, last: AIMessageChunk) -> str:
    if call.error == ENDED_INSIDE_CALL and last.response_metadata["finish_reason"] == "length":
        return "The answer reached max_tokens inside the call."
    return call.error


def last_chunk(
    result: RequestResult,
    model_name: str,
    tokenizer: Tokenizer,
    *,
    has_calls: bool = False,
    num_reasoning_tokens: int | None = None,
) -> ChatGenerationChunk:
    """What ends every answer: no text, but all that is known at the end, and only here.

    Args:
        result: what the engine returned.
        model_name: for the metadata.
        tokenizer: spells log probabilities.
        has_calls: the answer holds a valid call; the finish reason of one that was not cut is then
            "tool_calls", as OpenAI's and llama.cpp's servers report it.
        num_reasoning_tokens: how many of the output tokens were thoughts; None: not known.
    """
    was_cut = result.finish_reason == "length"
    metadata: dict[str, Any] = {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": "tool_calls" if has_calls and not was_cut else result.finish_reason,
        "seed": result.seed,
        "timings": timings(result.statistics),
    }
    if result.logprobs:
        metadata["logprobs"] = {"content": [_logprob(item, tokenizer) for item in result.logprobs]}
    message = AIMessageChunk(
        content="",
        usage_metadata=_usage(result.statistics, num_reasoning_tokens),
        response_metadata=metadata,
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message)


def _usage(statistics: RequestStatistics, num_reasoning_tokens: int | None) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "input_tokens": statistics.num_prompt_tokens,
        "output_tokens": statistics.num_output_tokens,
        "total_tokens": statistics.num_prompt_tokens + statistics.num_output_tokens,
        "input_token_details": {"cache_read": statistics.num_cached_tokens},
    }
    if num_reasoning_tokens is not None:
        usage["output_token_details"] = {"reasoning": num_reasoning_tokens}
    return usage


def result_of_several(messages: Sequence[AIMessage]) -> ChatResult:
    """Several answers to one prompt. The first has the usage of all, in which the prompt is once.

    LangChain's tracer adds up what all messages have, and its usage callback reads the first one
    alone: so both are right.
    """
    usages = [cast("dict[str, Any]", message.usage_metadata) for message in messages]
    for other in messages[1:]:
        other.usage_metadata = None
    messages[0].usage_metadata = cast("UsageMetadata", _joint_usage(usages))
    return ChatResult(generations=[ChatGeneration(message=message) for message in messages])


def _joint_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    input_tokens = usages[0]["input_tokens"]
    output_tokens = sum(usage["output_tokens"] for usage in usages)
    # All but the one that computed the prompt found it in the cache.
    cached = min(usage["input_token_details"]["cache_read"] for usage in usages)
    joint: dict[str, Any] = {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "input_token_details": {"cache_read": cached},
    }
    thoughts = [
        usage["output_token_details"] for usage in usages if "output_token_details" in usage
    ]
    if thoughts:
        joint["output_token_details"] = {"reasoning": sum(each["reasoning"] for each in thoughts)}
    return joint


def timings(statistics: RequestStatistics) -> dict[str, Any]:
    """Durations in seconds, moments on the engine's clock, and where the reused part came from."""
    numbers = {name: getattr(statistics, name) for name in (*_DURATIONS, *_MOMENTS)}
    return {**numbers, "prefix_source": statistics.prefix_source.value}


def _logprob(item: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_token(token_id, logprob, tokenizer) for token_id, logprob in item.top]
    return {**_token(item.token_id, item.logprob, tokenizer), "top_logprobs": top}


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.decode([token_id]),
        "token_id": token_id,
        "bytes": list(tokenizer.token_bytes(token_id)),
        "logprob": logprob,
    }
