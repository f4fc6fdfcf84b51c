"""Answers as LangChain's chunks and messages: the merged stream is what invoke returns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk

from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.prompts.answer_parts import InvalidCall
from langchain_swarmkv.prompts.answers import PartChunks, finished_message, last_chunk
from langchain_swarmkv.prompts.call_format import CallFormat
from langchain_swarmkv.scheduling.request import FinishReason, RequestResult
from langchain_swarmkv.statistics import PrefixSource, RequestStatistics
from tests.unit_tests.prompts.answer_cases import (
    FORMATS,
    HERMES,
    LLAMA,
    NEMO,
    parse,
    parser,
    written,
)

TWO = [("first", {"a": [1, {"b": "}"}]}), ("second", {"c": 'x"y歪'})]


def last(finish_reason: FinishReason = "stop", **options: Any) -> AIMessageChunk:
    statistics = RequestStatistics(
        name="",
        num_prompt_tokens=20,
        num_cached_tokens=15,
        num_computed_tokens=5,
        num_output_tokens=7,
        prefix_source=PrefixSource.NONE,
        submitted_at=0.0,
        admitted_at=0.0,
        prefilled_at=0.0,
        first_token_at=0.0,
        finished_at=1.0,
    )
    result = RequestResult("", (), finish_reason, (), 1, statistics)
    message = last_chunk(result, "model", FakeEngine().tokenizer, **options).message
    assert isinstance(message, AIMessageChunk)
    return message


def streamed(pieces: list[str] | str, calls: CallFormat | None) -> list[ChatGenerationChunk]:
    """The chunks of an answer, the last one aside."""
    stream, chunks = parser(calls), PartChunks()
    result = [chunk for piece in pieces for chunk in chunks.chunks(stream.push(piece))]
    return [*result, *chunks.chunks(stream.finish())]


def merged(chunks: list[ChatGenerationChunk], end: AIMessageChunk) -> AIMessageChunk:
    messages = [chunk.message for chunk in chunks if isinstance(chunk.message, AIMessageChunk)]
    total = AIMessageChunk(content="")
    for message in [*messages, end]:
        total += message
    return total


def same(stream: AIMessageChunk, whole: AIMessage) -> None:
    """A merged stream and the message of the whole answer, raw text of invalid calls aside."""
    assert stream.content == whole.content
    assert stream.tool_calls == whole.tool_calls
    assert stream.additional_kwargs == whole.additional_kwargs
    assert stream.usage_metadata == whole.usage_metadata
    assert stream.response_metadata == whole.response_metadata
    names = [[(c["name"], c["id"]) for c in m.invalid_tool_calls] for m in (stream, whole)]
    assert names[0] == names[1]


@pytest.mark.parametrize("calls", FORMATS.values(), ids=FORMATS.keys())
def test_a_merged_stream_is_the_finished_message_wherever_it_is_cut(calls: CallFormat) -> None:
    """F2, F3, F6: cut in two at each character, and ended there."""
    made = TWO[:1] if calls is LLAMA else TWO
    text = f"<think>I see.</think>\n{written(calls, made)}"
    whole = finished_message(parse([text], calls), last())
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == made
    for at in range(len(text) + 1):
        same(merged(streamed([text[:at], text[at:]], calls), last()), whole)
        cut = merged(streamed(text[:at], calls), last("length"))
        same(cut, finished_message(parse([text[:at]], calls), last("length")))
        assert cut.tool_calls == whole.tool_calls[: len(cut.tool_calls)]


def test_name_and_id_come_once_and_indexes_differ() -> None:
    """F2: LangChain joins them as it joins arguments."""
    chunks = [c.message.tool_call_chunks for c in streamed(written(HERMES, TWO), HERMES)]
    for index, name in enumerate(["first", "second"]):
        pieces = [call for calls in chunks for call in calls if call["index"] == index]
        assert [call["name"] for call in pieces] == [name, *[None] * (len(pieces) - 1)]
        assert [call["id"] for call in pieces] == [f"new{index}", *[None] * (len(pieces) - 1)]
        assert len(pieces) > 5


BAD = [
    '<tool_call>\n{"name": "f", "arguments": {"a": "cut in a str',
    '<tool_call>\n{"name": "f", "arguments": {"a": "\\',
    '<tool_call>\n{"name": "f", "arguments": {"a": 1,',
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}',
    '<tool_call>\n{"name": "f", "arguments": {',
    '<tool_call>\n{"name": "f", "arguments": ',
    '<tool_call>\n{"name": "f"',
    '<tool_call>\n{"name": ',
    "<tool_call>",
    "<tool_call>{}",
    '<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
]


@pytest.mark.parametrize("text", BAD)
def test_an_invalid_call_never_looks_valid(text: str) -> None:
    """F3, F6: neither to LangChain's lenient parser nor to a strict one."""
    chunks = streamed(text, HERMES)
    end = last("length")
    message = merged(chunks, end)
    assert message.tool_calls == []
    (invalid,) = message.invalid_tool_calls
    assert invalid["id"] == "new0"
    whole = finished_message(parse([text], HERMES), end)
    same(message, whole)
    (exact,) = whole.invalid_tool_calls
    assert exact["args"] == text.strip()
    assert exact["error"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(str(message.tool_call_chunks[0]["args"]))


def test_a_bare_call_that_is_cut_never_looks_valid() -> None:
    """Its raw text is the beginning of a JSON object."""
    for text in ('{"name": "f', '{"name": "f", "parameters": {"a": 1', '{"name": "'):
        message = merged(streamed(text, LLAMA), last("length"))
        assert message.tool_calls == []
        assert len(message.invalid_tool_calls) == 1


def test_an_invalid_call_says_why() -> None:
    text = BAD[2]
    cut = finished_message(parse([text], HERMES), last("length")).invalid_tool_calls[0]
    assert cut["error"] == "The answer reached max_tokens inside the call."
    ended = finished_message(parse([text], HERMES), last("stop")).invalid_tool_calls[0]
    assert ended["error"] == "The answer ended inside the call."
    bad = finished_message(parse([BAD[-3]], HERMES), last()).invalid_tool_calls[0]
    assert "Expecting value" in str(bad["error"])
    assert (bad["name"], bad["args"]) == ("f", BAD[-3])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([*BAD, written(HERMES, TWO), " text ", "\n"]), max_size=4))
def test_mixed_answers_are_the_same_streamed_and_whole(texts: list[str]) -> None:
    text = "".join(texts)
    same(merged(streamed(text, HERMES), last()), finished_message(parse([text], HERMES), last()))


def test_interleaved_streams_keep_their_calls() -> None:
    """F2: three branches, a character each in turn."""
    texts = [written(HERMES, TWO), written(NEMO, TWO), BAD[0]]
    formats = [HERMES, NEMO, HERMES]
    streams = [parser(calls) for calls in formats]
    writers = [PartChunks() for _ in texts]
    received: list[list[ChatGenerationChunk]] = [[] for _ in texts]
    for at in range(max(map(len, texts))):
        for text, stream, writer, chunks in zip(texts, streams, writers, received, strict=True):
            chunks += writer.chunks(stream.push(text[at : at + 1]))
    for calls, text, stream, writer, chunks in zip(
        formats, texts, streams, writers, received, strict=True
    ):
        chunks += writer.chunks(stream.finish())
        same(merged(chunks, last()), finished_message(parse([text], calls), last()))


def test_thoughts_are_reasoning_content() -> None:
    """As ChatOllama and ChatDeepSeek give them; LangChain makes reasoning blocks of them."""
    chunks = streamed("<think>\nHm, 歪. \n</think>\n\nYes.", None)
    assert chunks[0].message.content_blocks == [{"type": "reasoning", "reasoning": "H"}]
    message = merged(chunks, last())
    assert message.additional_kwargs == {"reasoning_content": "Hm, 歪."}
    expected = [{"type": "reasoning", "reasoning": "Hm, 歪."}, {"type": "text", "text": "Yes."}]
    assert message.content_blocks == expected
    whole = finished_message(parse(["<think>\nHm, 歪. \n</think>\n\nYes."], None), last())
    assert whole.content_blocks == expected
    same(message, whole)


def test_without_thoughts_there_is_no_reasoning_content() -> None:
    assert merged(streamed("<think></think>Yes.", None), last()).additional_kwargs == {}


def test_an_invalid_call_of_a_list_has_its_own_raw_text() -> None:
    parts = parse([written(NEMO, TWO)[:-20]], NEMO)
    message = finished_message(parts, last())
    assert len(message.tool_calls) == 1
    (invalid,) = [part for part in parts if isinstance(part, InvalidCall)]
    assert message.invalid_tool_calls[0]["args"] == invalid.raw
    assert invalid.raw.startswith('{"name": "second"')


@pytest.mark.parametrize(
    ("finish_reason", "has_calls", "expected"),
    [
        ("stop", False, "stop"),
        ("stop", True, "tool_calls"),
        ("length", False, "length"),
        ("length", True, "length"),
    ],
)
def test_the_finish_reason_names_calls_but_first_of_all_the_limit(
    finish_reason: FinishReason, has_calls: bool, expected: str
) -> None:
    """F6: what was cut says so, whatever it holds."""
    message = last(finish_reason, has_calls=has_calls)
    assert message.response_metadata["finish_reason"] == expected


def test_usage_counts_thoughts_where_they_are_known() -> None:
    usage = last(num_reasoning_tokens=4).usage_metadata
    assert usage is not None
    assert usage["output_token_details"] == {"reasoning": 4}
    assert usage["input_token_details"] == {"cache_read": 15}
    assert usage["total_tokens"] == 27
    assert "output_token_details" not in (last().usage_metadata or {})
