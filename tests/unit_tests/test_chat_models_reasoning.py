"""Thoughts through the chat model: told apart from the answer, counted, and not fed back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    ToolMessage,
)
from langchain_core.tools import tool

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.contract import Sampler, SpecialToken
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.engine.fake_sampler import ReplySampler
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.prompts.call_templates import TEMPLATES
from tests.unit_tests.prompts.vocabularies import encode_rendered

THOUGHT = "I could write <tool_call> or {}.\n\nOr not: 歪."
OPENED = f"<think>\n{THOUGHT}\n</think>"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
TOOL = {
    "name": "search",
    "parameters": {
        "type": "object",
        "properties": {"query": {"enum": ["a", "b"]}},
        "required": ["query"],
    },
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    },
}
OBJECT = '{"a": 2}'
HI = HumanMessage("Hi")


class ControlTags(FakeEngine):
    """Its thoughts stand between control tokens."""

    def __init__(self, *, reply: str, **options: Any) -> None:
        super().__init__(reply=reply, **options)
        texts = ("<think>", "</think>", "<|im_end|>")
        self._tokenizer.special_tokens = {
            text: SpecialToken(256 + place, text) for place, text in enumerate(texts)
        }
        self._text = reply

    def create_sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        sampler = super().create_sampler(params, prompt)
        assert isinstance(sampler, ReplySampler)
        sampler._rest = encode_rendered(self._tokenizer, self._text)[::-1]
        return sampler


MakeLLM = Callable[..., ChatSwarmKV]
both_tags = pytest.mark.parametrize("engine", [FakeEngine, ControlTags])


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Models of a template that thinks, whose every answer is a reply; closed at the end."""
    engines: list[SwarmEngine] = []

    def make(
        reply: str | Callable[[str], str],
        *,
        engine: Callable[..., FakeEngine] = FakeEngine,
        template: str = "qwen3",
        **options: Any,
    ) -> ChatSwarmKV:
        made = engine(reply=reply, num_cells=8192, chat_template=TEMPLATES[template])
        engines.append(SwarmEngine(made))
        return ChatSwarmKV(engine=engines[-1], **{"max_tokens": 500, **options})

    yield make
    for engine in engines:
        engine.close()


def summed(chunks: Any) -> AIMessageChunk:
    first, *rest = chunks
    whole: AIMessageChunk = sum(rest, first)
    return whole


def facts(message: AIMessage) -> tuple[Any, ...]:
    """Thoughts, text, calls, and how many tokens of the answer were thoughts."""
    assert message.usage_metadata is not None
    return (
        message.additional_kwargs.get("reasoning_content"),
        message.content,
        [(call["name"], call["args"]) for call in message.tool_calls],
        message.usage_metadata.get("output_token_details", {}).get("reasoning"),
    )


async def answers(llm: ChatSwarmKV, **options: Any) -> tuple[Any, ...]:
    """The facts of an answer, which must be the same in all four ways to ask."""
    found = [
        llm.invoke([HI], **options),
        summed(llm.stream([HI], **options)),
        await llm.ainvoke([HI], **options),
        summed([chunk async for chunk in llm.astream([HI], **options)]),
    ]
    assert [facts(answer) for answer in found] == [facts(found[0])] * 4
    return facts(found[0])


def size(engine: type[FakeEngine], text: str) -> int:
    """Tokens of a text with tags."""
    tokens = len(text.encode())
    if engine is ControlTags:
        tokens -= 6 * text.count("<think>") + 7 * text.count("</think>")
    return tokens


OPTIONS: list[tuple[dict[str, Any], str, tuple[str, list[Any]]]] = [
    ({}, "\n\nDone.", ("Done.", [])),
    ({"tools": [TOOL]}, "\n\nDone.", ("Done.", [])),
    ({"tools": [TOOL]}, f"\n\n{CALL}", ("", [("search", {"query": "a"})])),
    ({"tools": [TOOL], "tool_choice": "any"}, f"\n{CALL}", ("", [("search", {"query": "a"})])),
    ({"response_format": FORMAT}, f"\n\n{OBJECT}", (OBJECT, [])),
    ({"response_format": {"type": "json_object"}}, OBJECT, (OBJECT, [])),
    ({"tools": [TOOL], "response_format": FORMAT}, f"\n\n{OBJECT}", (OBJECT, [])),
    ({"tools": [TOOL], "response_format": FORMAT}, CALL, ("", [("search", {"query": "a"})])),
]


@both_tags
@pytest.mark.parametrize(("options", "rest", "expected"), OPTIONS)
async def test_thoughts_are_split_from_what_follows(
    make_llm: MakeLLM,
    engine: type[FakeEngine],
    options: dict[str, Any],
    rest: str,
    expected: tuple[str, list[Any]],
) -> None:
    """Text, a call or an object; and counted, with their tags and nothing else."""
    llm = make_llm(OPENED + rest, engine=engine)
    assert await answers(llm, **options) == (THOUGHT, *expected, size(engine, OPENED))


@both_tags
@pytest.mark.parametrize("rest", ["\n\nDone.", f"\n\n{CALL}"])
async def test_a_prompt_may_open_the_thoughts_itself(
    make_llm: MakeLLM, engine: type[FakeEngine], rest: str
) -> None:
    """The answer then begins in the middle of them."""
    begun = OPENED.removeprefix("<think>\n")
    options = {"chat_template_kwargs": {"enable_thinking": True}}
    llm = make_llm(begun + rest, engine=engine, template="qwq", **options)
    thoughts, *_, num_tokens = await answers(llm, tools=[TOOL])
    assert (thoughts, num_tokens) == (THOUGHT, size(engine, begun))


@pytest.mark.parametrize("template", ["qwen3", "qwq"])
@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}])
async def test_nothing_is_a_thought_where_thinking_is_off(
    make_llm: MakeLLM, template: str, options: dict[str, Any]
) -> None:
    """The prompt has closed them: tags are what the model says."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    llm = make_llm("Do not <think>.", template=template, **off)
    assert await answers(llm, **options) == (None, "Do not <think>.", [], None)


async def test_an_answer_may_do_without_thoughts(make_llm: MakeLLM) -> None:
    """Then none are counted; empty ones are none."""
    for reply in ("Done.", "<think>\n\n</think>\n\nDone."):
        assert await answers(make_llm(reply)) == (None, "Done.", [], None)


async def test_thoughts_that_max_tokens_cuts_are_thoughts(make_llm: MakeLLM) -> None:
    """There is no answer, and all that was written is counted."""
    assert await answers(make_llm(OPENED, max_tokens=20)) == ("I could writ", "", [], 20)


def test_thoughts_come_in_pieces_before_the_text(make_llm: MakeLLM) -> None:
    """No chunk holds both, and no tag is in either."""
    chunks = list(make_llm(OPENED + "\n\nDone.").stream([HI]))
    thoughts = [str(c.additional_kwargs.get("reasoning_content", "")) for c in chunks]
    texts = [str(c.content) for c in chunks]
    assert "".join(thoughts) == THOUGHT
    assert "".join(texts) == "Done."
    assert sum(map(bool, thoughts)) > 20
    first_text = next(i for i, text in enumerate(texts) if text)
    assert not any(texts[:first_text])
    assert not any(thoughts[first_text:])
    blocks = [block["type"] for c in chunks for block in c.content_blocks]
    assert [*dict.fromkeys(blocks)] == ["reasoning", "text"]


def _talk(answer: AIMessage) -> list[BaseMessage]:
    """A conversation that is still at work on its last question, so the template shows thoughts."""
    return [HI, answer, ToolMessage("a page", tool_call_id=answer.tool_calls[0]["id"])]


def test_thoughts_are_fed_back_only_where_that_is_asked_for(make_llm: MakeLLM) -> None:
    """Whole answers and sums of chunks alike; the words are those that the model wrote."""
    llm = make_llm(f"{OPENED}\n\n{CALL}")
    for answer in (llm.invoke([HI], tools=[TOOL]), summed(llm.stream([HI], tools=[TOOL]))):
        for keep in (False, True):
            copied = llm.model_copy(update={"keep_reasoning": keep})
            ids = copied.prompt_token_ids(_talk(answer), tools=[TOOL])
            prompt = llm.tokenizer.decode(ids)
            assert (THOUGHT in prompt) is keep
            assert (f"{OPENED}\n\n{CALL}" in prompt) is keep
            assert CALL in prompt


def test_what_was_thought_and_kept_is_a_prefix_of_the_next_turn(make_llm: MakeLLM) -> None:
    """The next turn computes nothing of it again, but what follows the answer."""
    llm = make_llm(f"{OPENED}\n\n{CALL}", keep_reasoning=True)
    answer = llm.invoke([HI], tools=[TOOL])
    second = llm.invoke(_talk(answer), tools=[TOOL])
    assert answer.usage_metadata is not None
    assert second.usage_metadata is not None
    cached = second.usage_metadata["input_token_details"]["cache_read"]
    assert cached >= answer.usage_metadata["total_tokens"] - 1


def test_an_object_is_parsed_without_the_thoughts_before_it(make_llm: MakeLLM) -> None:
    """However it is asked for."""
    for method in ("json_schema", "function_calling", "json_mode"):
        body = OBJECT
        if method == "function_calling":
            body = CALL.replace("search", "answer").replace('{"query": "a"}', OBJECT)
        schema = {"title": "answer", **FORMAT["json_schema"]["schema"]}  # type: ignore[index]
        llm = make_llm(f"{OPENED}\n\n{body}").with_structured_output(schema, method=method)  # type: ignore[arg-type]
        assert llm.invoke([HI]) == json.loads(OBJECT)


def test_structured_events_have_a_block_of_thoughts(make_llm: MakeLLM) -> None:
    """First the thoughts, then the text, then the call."""
    llm = make_llm(f"{OPENED}\n\nDone.\n{CALL}")
    stream = llm.stream_events([HI], version="v3", tools=[TOOL])
    blocks = [e["content"] for e in stream if e["event"] == "content-block-finish"]
    assert [block["type"] for block in blocks] == ["reasoning", "text", "tool_call"]
    assert blocks[0]["reasoning"] == THOUGHT
    assert blocks[1]["text"] == "Done."
    assert blocks[2]["args"] == {"query": "a"}


@tool
def search(query: Literal["a", "b"]) -> str:
    """Find pages."""
    return f"a page about {query}"


@pytest.mark.parametrize("keep", [False, True])
async def test_an_agent_thinks_before_each_step(make_llm: MakeLLM, keep: bool) -> None:
    """Its messages hold thoughts apart, and its stream tells them before call and answer."""

    def reply(prompt: str) -> str:
        return f"{OPENED}\n\n{'Done.' if '<tool_response>' in prompt else CALL}"

    agent = create_agent(make_llm(reply, keep_reasoning=keep), [search])
    given: Any = {"messages": [HI]}
    messages = (await agent.ainvoke(given))["messages"]
    assert [message.content for message in messages] == ["Hi", "", "a page about a", "Done."]
    thoughts = [message.additional_kwargs.get("reasoning_content") for message in messages]
    assert thoughts == [None, THOUGHT, None, THOUGHT]
    kinds = [
        block["type"]
        async for chunk, _ in agent.astream(given, stream_mode="messages")
        for block in chunk.content_blocks
    ]
    told = [kind for kind, _ in groupby(kinds)]
    assert told == ["reasoning", "tool_call_chunk", "text", "reasoning", "text"]
