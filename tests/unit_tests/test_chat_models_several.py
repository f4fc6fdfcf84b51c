"""Several answers to one prompt: `n`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.outputs import ChatGeneration, LLMResult
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel, Field, ValidationError

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import ConfigurationError, SwarmKVError
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.support.decode_spy import DecodeSpy
from tests.support.gates import Steps
from tests.unit_tests.chat_support import chat, eventually, eventually_async, is_idle
from tests.unit_tests.prompts.call_templates import TEMPLATES

TALK: list[BaseMessage] = [SystemMessage("Be brief."), HumanMessage("Hello")]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
MakeEngine = Callable[..., SwarmEngine]


def search(query: str) -> str:
    """Look something up."""
    return query


class Answer(BaseModel):
    """An answer."""

    number: int = Field(ge=0, le=9)


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Engines over a `FakeEngine` with the given options, closed at the end."""
    engines: list[SwarmEngine] = []

    def make(**options: Any) -> SwarmEngine:
        engines.append(SwarmEngine(FakeEngine(**options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def messages_of(result: LLMResult) -> list[AIMessage]:
    """The answers to the first prompt."""
    messages = []
    for generation in result.generations[0]:
        assert isinstance(generation, ChatGeneration)
        assert isinstance(generation.message, AIMessage)
        messages.append(generation.message)
    return messages


def seed_of(message: AIMessage) -> int:
    seed: int = message.response_metadata["seed"]
    return seed


# -- one prefill, a fork and a seed each ---------------------------------------------------------


@pytest.mark.parametrize("can_cut", [True, False])
@pytest.mark.parametrize("text", ["Hello" * 100, "a"], ids=["long", "shorter than worth a wait"])
def test_the_prompt_is_computed_once(make_engine: MakeEngine, text: str, can_cut: bool) -> None:
    """All but the first compute its last token alone, for its logits."""
    engine = make_engine(can_cut=can_cut, chat_template="{{ messages[0].content }}?!")
    llm = chat(engine, temperature=1.0, max_tokens=8)
    answers = messages_of(llm.generate([[HumanMessage(text)]], n=5))
    assert len(answers) == 5
    seen = engine.statistics()
    assert seen.num_prefill_tokens == len(llm.prompt_token_ids(text)) + 4
    assert seen.peak_running == 5
    assert seen.num_finished == 5


def test_all_are_queued_at_once(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in between would let a model that cannot be cut pass the point to fork at."""
    engine = make_engine()
    queued: list[int] = []
    submit = engine._loop.submit

    def counting(*requests: Any) -> None:
        queued.append(len(requests))
        submit(*requests)

    monkeypatch.setattr(engine._loop, "submit", counting)
    chat(engine, max_tokens=2).generate([TALK], n=4)
    assert queued == [4]


def test_each_answer_has_a_seed_of_its_own(make_engine: MakeEngine) -> None:
    """It is the answer that a call with this seed gives, and is told in the metadata."""
    llm = chat(make_engine(), temperature=2.0, max_tokens=12)
    answers = messages_of(llm.generate([TALK], n=4))
    assert len({seed_of(answer) for answer in answers}) == 4
    assert len({str(answer.content) for answer in answers}) == 4
    for answer in answers:
        assert llm.invoke(TALK, seed=seed_of(answer)).content == answer.content


def test_a_seed_is_the_first_ones(make_engine: MakeEngine) -> None:
    """The others have those that follow, from the start again after the last; twice the same."""
    last = (1 << 32) - 2
    llm = chat(make_engine(), temperature=2.0, max_tokens=12, seed=last)
    once, again = (messages_of(llm.generate([TALK], n=3)) for _ in range(2))
    assert [seed_of(answer) for answer in once] == [last, 0, 1]
    assert [answer.content for answer in once] == [answer.content for answer in again]


@pytest.mark.parametrize("n", [7, 20])
def test_more_answers_than_fit_at_once_take_turns(make_engine: MakeEngine, n: int) -> None:
    """Neither ids nor cells limit how many there can be."""
    engine = make_engine(max_sequences=4, num_cells=150)
    llm = chat(engine, temperature=2.0, max_tokens=20, ignore_eos=True)
    answers = messages_of(llm.generate([TALK], n=n))
    assert len({str(answer.content) for answer in answers}) == n


def test_greedy_answers_are_the_same_and_it_is_said_once(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody who asks for several wants that, but it is what was asked for."""
    from langchain_swarmkv.chat_models.chat import _say_that_greedy_answers_are_equal

    _say_that_greedy_answers_are_equal.cache_clear()
    llm = chat(make_engine(), max_tokens=12)
    for _ in range(2):
        answers = messages_of(llm.generate([TALK], n=3))
        assert len({str(answer.content) for answer in answers}) == 1
    assert caplog.text.count("temperature 0") == 1


def test_on_every_architecture_the_prompt_is_computed_once(
    tiny_models: Path, spy: DecodeSpy
) -> None:
    """As llama.cpp sees it; and each greedy answer is that of a call for one."""
    with ChatSwarmKV(
        model_path=tiny_models, n_threads=1, max_tokens=4, ignore_eos=True, n_ctx=512
    ) as llm:
        num_tokens = len(llm.prompt_token_ids("hello there"))
        llm.engine_statistics()  # it is loaded now, with what llama.cpp decodes to warm up
        spy.reset()
        answers = messages_of(llm.generate([[HumanMessage("hello there")]], n=3))
        assert spy.num_tokens == num_tokens + 2 + 3 * 3
        alone = llm.invoke("hello there")
        assert [answer.content for answer in answers] == [alone.content] * 3


# -- how many ------------------------------------------------------------------------------------


def test_the_field_is_the_default_of_calls(make_engine: MakeEngine) -> None:
    """An option of a call comes first; None says nothing; `invoke` gives the first answer."""
    llm = chat(make_engine(), temperature=2.0, max_tokens=8, n=2, seed=5)
    assert len(messages_of(llm.generate([TALK]))) == 2
    assert len(messages_of(llm.generate([TALK], n=None))) == 2
    assert len(messages_of(llm.generate([TALK], n=1))) == 1
    first = messages_of(llm.generate([TALK], n=3))[0]
    assert llm.invoke(TALK).content == llm.bind(n=3).invoke(TALK).content == first.content
    with pytest.raises(ConfigurationError, match="n=0"):
        llm.n = 0
    assert llm.n == 2


@pytest.mark.parametrize("n", [0, -1, 257, True, 1.5, "2"])
def test_a_wrong_number_is_refused(make_engine: MakeEngine, n: Any) -> None:
    """By calls, and when tools or a schema are bound; the constructor's error is pydantic's."""
    llm = chat(make_engine())
    for call in (
        lambda: llm.generate([TALK], n=n),
        lambda: llm.invoke(TALK, n=n),
        lambda: llm.bind_tools([search], n=n),
        lambda: llm.with_structured_output(Answer, n=n),
    ):
        with pytest.raises(ConfigurationError, match="ask for 1 to 256 answers"):
            call()
    if n in (0, -1, 257):
        with pytest.raises(ValidationError, match="n"):
            chat(make_engine(), n=n)


# -- usage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_usage_counts_the_prompt_once(make_engine: MakeEngine, is_async: bool) -> None:
    """For those who read the first answer, and for those who add all of them up."""
    llm = chat(make_engine(), temperature=1.0, max_tokens=6, ignore_eos=True)
    callback = UsageMetadataCallbackHandler()
    if is_async:
        result = await llm.agenerate([TALK], callbacks=[callback], n=3)
    else:
        result = llm.generate([TALK], callbacks=[callback], n=3)
    usages = [answer.usage_metadata for answer in messages_of(result)]
    num_prompt_tokens = len(llm.prompt_token_ids(TALK))
    expected: UsageMetadata = {
        "input_tokens": num_prompt_tokens,
        "output_tokens": 18,
        "total_tokens": num_prompt_tokens + 18,
        "input_token_details": {"cache_read": 0},
    }
    assert usages == [expected, None, None]
    assert callback.usage_metadata == {"fake": expected}
    total: UsageMetadata | None = None
    for usage in usages:
        total = add_usage(total, usage)
    assert total == expected


def test_what_was_in_the_cache_before_is_told(make_engine: MakeEngine) -> None:
    """Not what the answers share among themselves."""
    llm = chat(make_engine(), temperature=1.0, max_tokens=2)
    ref = llm.prefill(TALK[:1])
    usage = messages_of(llm.generate([TALK], n=3))[0].usage_metadata
    assert usage is not None
    assert usage["input_token_details"]["cache_read"] == ref["num_tokens"]


def test_thoughts_of_all_are_counted(make_engine: MakeEngine) -> None:
    """Like the rest of the output."""
    engine = make_engine(reply="<think>\nab\n</think>\n\nc", chat_template=TEMPLATES["qwen3"])
    single = chat(engine).invoke(TALK).usage_metadata
    joint = messages_of(chat(engine).generate([TALK], n=3))[0].usage_metadata
    assert single is not None
    assert joint is not None
    assert single["output_token_details"]["reasoning"] > 0
    for_each = single["output_token_details"]["reasoning"]
    assert joint["output_token_details"] == {"reasoning": 3 * for_each}


# -- tools and objects ---------------------------------------------------------------------------


def test_each_answer_may_call(make_engine: MakeEngine) -> None:
    """Every one is read by itself; the ids of calls differ."""
    llm = chat(make_engine(reply=CALL))
    answers = messages_of(llm.generate([TALK], tools=[search], tool_choice="any", n=3))
    assert [answer.tool_calls[0]["args"] for answer in answers] == [{"query": "a"}] * 3
    assert len({answer.tool_calls[0]["id"] for answer in answers}) == 3
    assert {answer.response_metadata["finish_reason"] for answer in answers} == {"tool_calls"}
    assert llm.bind_tools([search], tool_choice="any", n=2).invoke(TALK).tool_calls


def test_each_answer_is_held_to_the_schema(make_engine: MakeEngine) -> None:
    """All objects of one prefill; what `with_structured_output` gives is the first one's."""
    llm = chat(make_engine(), temperature=2.0)
    schema = {"name": "Answer", "schema": Answer.model_json_schema()}
    response_format = {"type": "json_schema", "json_schema": schema}
    answers = messages_of(llm.generate([TALK], response_format=response_format, n=6))
    found = [Answer.model_validate_json(str(answer.content)) for answer in answers]
    assert len({answer.number for answer in found}) > 1
    assert isinstance(llm.with_structured_output(Answer, n=2).invoke(TALK), Answer)


# -- streams and callbacks -----------------------------------------------------------------------


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.text = ""

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.text += token


async def test_a_stream_is_one_answer(make_engine: MakeEngine) -> None:
    """OpenAI's would mix the pieces of several; here it is refused, and n=1 streams."""
    engine = make_engine()
    llm = chat(engine, temperature=1.0, n=2)
    with pytest.raises(ConfigurationError, match="n=2: a stream is one answer"):
        next(llm.stream(TALK))
    with pytest.raises(ConfigurationError, match="n=3: a stream is one answer"):
        await anext(llm.astream(TALK, n=3))
    assert engine.statistics().num_finished == 0
    assert len(list(llm.stream(TALK, n=1))) > 1


@pytest.mark.parametrize("streaming", [True, False])
def test_callbacks_see_the_tokens_of_the_first(make_engine: MakeEngine, streaming: bool) -> None:
    """Whether or not the model likes to stream, `generate` gives all answers."""
    llm = chat(make_engine(), temperature=2.0, max_tokens=9, streaming=streaming)
    tokens = Tokens()
    answers = messages_of(llm.generate([TALK], callbacks=[tokens], n=3))
    assert len(answers) == 3
    assert tokens.text == answers[0].content


def test_a_graph_that_streams_messages_runs(make_engine: MakeEngine) -> None:
    """LangGraph's handler would have `invoke` stream; it gets the first answer's tokens."""
    llm = chat(make_engine(), temperature=2.0, max_tokens=9, n=2, seed=1)
    graph = StateGraph(MessagesState)
    graph.add_node("ask", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph.add_edge(START, "ask")
    pieces = list(graph.compile().stream({"messages": TALK}, stream_mode="messages"))
    assert len(pieces) > 1
    assert "".join(str(message.content) for message, _ in pieces) == llm.invoke(TALK).content


def test_an_analyst_asks_for_the_one_answer_that_it_uses(make_engine: MakeEngine) -> None:
    """Its budget counts one, and nobody would read the others."""
    engine = make_engine()
    node = AnalystNode(chat(engine, max_tokens=8, n=3), "Any risks?", name="risks")
    node.invoke({"document": "A contract."})
    prefill, answer = 1, 1
    assert engine.statistics().num_finished == prefill + answer


# -- cancelling and failing ----------------------------------------------------------------------


@pytest.fixture
def steps() -> Steps:
    """The gate in front of the engine's steps."""
    return Steps()


@pytest.fixture
def gated(steps: Steps) -> Iterator[SwarmEngine]:
    """An engine that takes only the steps that a test allows."""
    engine = SwarmEngine(FakeEngine(num_cells=20_000, on_decode=steps))
    yield engine
    steps.set_free()
    engine.close()


async def test_all_are_cancelled_together(gated: SwarmEngine, steps: Steps) -> None:
    """One step after the task was cancelled, none of them runs."""
    llm = chat(gated, temperature=1.0, max_tokens=2000, ignore_eos=True)
    task = asyncio.ensure_future(llm.agenerate([TALK], n=4))
    steps.allow(4)
    await eventually_async(lambda: steps.count == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps.allow()
    await eventually_async(lambda: is_idle(gated))
    assert steps.count <= 5
    assert gated.statistics().num_cancelled == 4


class Refusal(Exception):
    """What a callback raises."""


class Refuses(BaseCallbackHandler):
    raise_error = True

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        raise Refusal


def test_when_one_fails_the_others_end(
    gated: SwarmEngine, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the first one has left: nobody would read the rest. No collector is needed."""
    kept: list[Any] = []
    submit_all = gated.submit_all

    def keeping(*args: Any, **options: Any) -> Any:
        kept.append(submit_all(*args, **options))
        return kept[-1]

    monkeypatch.setattr(gated, "submit_all", keeping)
    llm = chat(gated, temperature=1.0, max_tokens=2000, ignore_eos=True)
    steps.allow(4)
    with pytest.raises(Refusal):
        llm.generate([TALK], callbacks=[Refuses()], n=3)
    steps.set_free()
    eventually(lambda: is_idle(gated))
    assert gated.statistics().num_cancelled == 3
    assert len(kept[0]) == 3


def test_an_error_of_another_answer_is_the_calls(
    gated: SwarmEngine, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No half result: the error of any of them is raised."""
    llm = chat(gated, temperature=1.0, max_tokens=5, ignore_eos=True)
    submit_all = gated.submit_all

    def with_a_failure(*args: Any, **options: Any) -> Any:
        handles = submit_all(*args, **options)
        handles[1].cancel()
        steps.set_free()
        return handles

    monkeypatch.setattr(gated, "submit_all", with_a_failure)
    with pytest.raises(SwarmKVError, match="cancelled"):
        llm.generate([TALK], n=3)


# -- LangChain's cache ---------------------------------------------------------------------------


def test_cached_answers_are_kept_apart_by_how_many_they_are(make_engine: MakeEngine) -> None:
    """By the field and by the option; equal calls hit, and give all."""
    engine = make_engine()
    llm = chat(engine, temperature=2.0, max_tokens=8, cache=InMemoryCache())
    two = messages_of(llm.generate([TALK], n=2))
    three = messages_of(llm.generate([TALK], n=3))
    assert (len(two), len(three)) == (2, 3)
    num_steps = engine.statistics().num_steps
    again = messages_of(llm.generate([TALK], n=2))
    assert [answer.content for answer in again] == [answer.content for answer in two]
    assert engine.statistics().num_steps == num_steps
    keys = {llm.model_copy(update={"n": n})._get_llm_string() for n in (1, 2, 3)}
    assert len(keys) == 3
