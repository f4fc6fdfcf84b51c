"""Nodes on a model with something bound to it: options reach the call, retries surround it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import RetryPolicy
from pydantic import BaseModel, field_validator

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import (
    AnswerError,
    ConfigurationError,
    EngineError,
    RequestTimeoutError,
    TruncatedAnswerError,
)
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget import check_budget
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState
from tests.unit_tests.graph.support import DOCUMENT, echo_task, fake_llm, fan_out

STATE = {"document": DOCUMENT}


async def run(node: Any, state: Any, *, is_async: bool) -> Any:
    return await node.ainvoke(state) if is_async else node.invoke(state)


both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


# -- options -------------------------------------------------------------------------------------


@both
async def test_bound_options_reach_the_call(llm: ChatSwarmKV, is_async: bool) -> None:
    """Those that the node has too are the node's where it is given them."""
    bound = llm.bind(max_tokens=5).bind(stop=["zzz"])
    found = await run(AnalystNode(bound, "abcdefghij", name="a"), STATE, is_async=is_async)
    assert found == {"findings": {"a": "read:"}}
    node = AnalystNode(bound, "abcdefghij", name="a", max_tokens=8)
    assert (await run(node, STATE, is_async=is_async))["findings"]["a"] == "read: ab"


async def test_the_outermost_binding_decides(llm: ChatSwarmKV) -> None:
    """As in LangChain."""
    node = AnalystNode(llm.bind(max_tokens=5).with_retry().bind(max_tokens=7), "abcdef", name="a")
    assert node.max_tokens == 7
    assert node.invoke(STATE)["findings"]["a"] == "read: a"
    assert node.llm is llm


def test_the_budget_counts_what_is_bound(llm: ChatSwarmKV) -> None:
    """`max_tokens`, and the tools that the prompt tells."""

    @tool
    def look_up(term: str) -> str:
        """Look a term of the document up in a dictionary of many words."""
        return term

    plain, bound = (
        check_budget(fan_out(model, ("a",)), document=DOCUMENT).rows[0]  # type: ignore[arg-type]
        for model in (llm, llm.bind_tools([look_up]).bind(max_tokens=9))
    )
    assert bound.max_tokens == 9
    assert bound.task_tokens is not None
    assert plain.task_tokens is not None
    assert bound.task_tokens > plain.task_tokens + 40
    assert bound.document_tokens == plain.document_tokens


# -- retries -------------------------------------------------------------------------------------


class FailsOnce:
    """An `on_decode` that fails at its first call."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, batch: object) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            from langchain_swarmkv.errors import DecodeAbortedError

            raise DecodeAbortedError("aborted", return_code=2)


@pytest.fixture
def failing() -> Iterator[ChatSwarmKV]:
    with fake_llm(max_tokens=64, reply=echo_task, on_decode=FailsOnce()) as model:
        yield model


@both
@pytest.mark.parametrize("kind", [DocumentNode, AnalystNode])
async def test_bound_retries_are_around_the_work(
    failing: ChatSwarmKV, kind: Any, is_async: bool
) -> None:
    """Of the prefill, too, which is no call of the chat model."""
    options = ("Tell me.",) if kind is AnalystNode else ()
    with pytest.raises(EngineError, match="aborted"):
        await run(kind(failing, *options), STATE, is_async=is_async)
    with fake_llm(max_tokens=64, reply=echo_task, on_decode=FailsOnce()) as fresh:
        retrying = fresh.with_retry(
            retry_if_exception_type=(EngineError,), wait_exponential_jitter=False
        )
        found = await run(kind(retrying, *options), STATE, is_async=is_async)
        assert found["findings"] if kind is AnalystNode else found["document_ref"]
        assert fresh.engine_statistics().num_failed == 1


@both
async def test_retries_are_only_of_the_kinds_that_were_bound(
    failing: ChatSwarmKV, is_async: bool
) -> None:
    """And only as often."""
    other = failing.with_retry(
        retry_if_exception_type=(RequestTimeoutError,), wait_exponential_jitter=False
    )
    with pytest.raises(EngineError, match="aborted"):
        await run(DocumentNode(other), STATE, is_async=is_async)
    assert failing.engine_statistics().num_failed == 1


# -- messages ------------------------------------------------------------------------------------


class Talk(SwarmState):
    messages: Annotated[list[AnyMessage], add_messages]


@both
async def test_the_messages_key_takes_the_whole_message(llm: ChatSwarmKV, is_async: bool) -> None:
    """An AIMessage with usage, named after its analyst, not a text that becomes the user's."""
    graph = StateGraph(Talk)
    graph.add_node("document", DocumentNode(llm))
    graph.add_edge(START, "document")
    for name in ("one", "two"):
        graph.add_node(name, AnalystNode(llm, f"task {name}", output_key="messages"))
        graph.add_edge("document", name)
        graph.add_edge(name, END)
    state = {"document": DOCUMENT, "messages": [HumanMessage("Go.")]}
    final = await run(graph.compile(), state, is_async=is_async)
    first, *answers = final["messages"]
    assert first.content == "Go."
    assert [type(answer) for answer in answers] == [AIMessage, AIMessage]
    assert [answer.name for answer in answers] == ["one", "two"]
    assert [answer.text for answer in answers] == ["read: task one", "read: task two"]
    assert all(answer.usage_metadata["input_token_details"]["cache_read"] for answer in answers)


def test_tool_calls_of_a_bound_analyst_are_in_its_message() -> None:
    """So a ToolNode may come next."""

    @tool
    def look_up(term: str) -> str:
        """Look a term up."""
        return term

    reply = '<tool_call>\n{"name": "look_up", "arguments": {"term": "hinge"}}\n</tool_call>'
    with fake_llm(max_tokens=200, reply=reply) as model:
        node = AnalystNode(model.bind_tools([look_up]), "Look.", output_key="messages")
        (message,) = node.invoke(STATE)["messages"]
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [
        ("look_up", {"term": "hinge"})
    ]


# -- answers that may be right the next time -----------------------------------------------------


class Hinges(BaseModel):
    count: int

    @field_validator("count")
    @classmethod
    def _at_least_two(cls, count: int) -> int:
        if count < 2:
            raise ValueError("there are two hinges at least")
        return count


class Counts:
    """A reply that is refused the first time."""

    def __init__(self) -> None:
        self.num_prompts = 0

    def __call__(self, prompt: str) -> str:
        self.num_prompts += 1
        return json.dumps({"count": self.num_prompts})


def hinge_graph(llm: Any, **options: Any) -> Any:
    graph = StateGraph(SwarmState)
    node = AnalystNode(llm, "How many hinges?", schema=Hinges, name="a", **options)
    policy = RetryPolicy(initial_interval=0.001, max_interval=0.001, jitter=False)
    graph.add_node("a", node, retry_policy=policy)
    graph.add_edge(START, "a")
    graph.add_edge("a", END)
    return graph.compile()


@both
@pytest.mark.parametrize("is_bound", [False, True], ids=["field", "bound"])
async def test_a_sampled_answer_that_does_not_validate_is_tried_again(
    is_async: bool, is_bound: bool
) -> None:
    """By LangGraph's default policy."""
    with fake_llm(max_tokens=64, reply=Counts()) as model:
        llm: Any = model.bind(temperature=0.8) if is_bound else model
        if not is_bound:
            model.temperature = 0.8
        found = await run(hinge_graph(llm), STATE, is_async=is_async)
        assert found["findings"] == {"a": Hinges(count=2)}


@both
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "top_k": 1}]
)
async def test_an_answer_that_would_come_out_the_same_is_not(
    is_async: bool, options: dict[str, Any]
) -> None:
    """Greedy, or with a seed."""
    counts = Counts()
    with fake_llm(max_tokens=64, reply=counts) as model:
        with pytest.raises(AnswerError, match=r"(?s)Analyst 'a': .*two hinges") as told:
            await run(hinge_graph(model.bind(**options)), STATE, is_async=is_async)
        assert isinstance(told.value, ValueError)
        assert not told.value.retryable
    assert counts.num_prompts == 1


def test_a_cut_answer_keeps_its_kind_when_it_was_sampled() -> None:
    """And what it knew."""
    with fake_llm(max_tokens=3, reply='{"count": 2}') as model:
        node = AnalystNode(model.bind(temperature=0.8), "How many?", schema=Hinges, name="a")
        with pytest.raises(TruncatedAnswerError, match="3 tokens") as told:
            node.invoke(STATE)
    assert told.value.retryable
    assert not isinstance(told.value, ValueError)
    assert told.value.facts["num_output_tokens"] == 3


# -- what is no model ----------------------------------------------------------------------------


def test_a_fallback_is_refused(llm: ChatSwarmKV) -> None:
    """It may be answered by a model that has not read the document."""
    with pytest.raises(ConfigurationError, match=r"RunnableWithFallbacks.*bind, with_retry"):
        AnalystNode(llm.with_fallbacks([llm]), "Tell me.")


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"required_prefix_tokens": "many"}])
def test_wrong_bound_options_are_refused_when_the_node_is_made(
    llm: ChatSwarmKV, options: dict[str, Any]
) -> None:
    """As those of the node itself."""
    with pytest.raises(ConfigurationError, match="must be a whole number, at least 1"):
        AnalystNode(llm.bind(**options), "Tell me.")


@both
async def test_a_bound_none_leaves_the_setting_as_it_is(is_async: bool) -> None:
    """The answer is then sampled as the model says, and may be tried again."""
    with fake_llm(max_tokens=64, reply=Counts()) as model:
        model.temperature = 0.8
        bound = model.bind(temperature=None, max_tokens=None)
        found = await run(hinge_graph(bound), STATE, is_async=is_async)
        assert found["findings"] == {"a": Hinges(count=2)}
