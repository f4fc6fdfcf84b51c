"""The way back: what the engine answered, as LangChain's message chunks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk

from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.scheduling.request import RequestResult, TokenLogprob
from langchain_swarmkv.statistics import RequestStatistics

__all__ = ["last_chunk", "text_chunk", "timings"]

_DURATIONS = ("queue_seconds", "prefill_seconds", "ttft_seconds", "tpot_seconds", "e2e_seconds")
_MOMENTS = tuple(f.name for f in fields(RequestStatistics) if f.name.endswith("_at"))


def text_chunk(text: str) -> ChatGenerationChunk:
    """A piece of the answer."""
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def last_chunk(result: RequestResult, model_name: str, tokenizer: Tokenizer) -> ChatGenerationChunk:
    """What ends every answer: no text, but all that is known at the end, and only here."""
    metadata: dict[str, Any] = {
        "model_name": model_name,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "timings": timings(result.statistics),
    }
    if result.logprobs:
        metadata["logprobs"] = {"content": [_logprob(item, tokenizer) for item in result.logprobs]}
    message = AIMessageChunk(
        content="",
        usage_metadata=_usage(result.statistics),
        response_metadata=metadata,
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message)


def _usage(statistics: RequestStatistics) -> dict[str, Any]:
    return {
        "input_tokens": statistics.num_prompt_tokens,
        "output_tokens": statistics.num_output_tokens,
        "total_tokens": statistics.num_prompt_tokens + statistics.num_output_tokens,
        "input_token_details": {"cache_read": statistics.num_cached_tokens},
    }


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
