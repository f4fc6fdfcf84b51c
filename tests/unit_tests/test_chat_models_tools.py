"""Tools through the chat model: what answers become, however they are asked for, and in agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import MessagesState
from langgraph.graph.state import StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from pydantic import BaseModel

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.engine.fake_tokenizer import CHATML
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.prompts.call_templates import TEMPLATES

Reply = str | Callable[[str], str]
MakeLLM = Callable[..., ChatSwarmKV]


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Models whose every answer is a reply, or made of the prompt by one; closed at the end."""
    engines: list[SwarmEngine] = []

    def make(reply: Reply, *, template: str = CHATML, **options: Any) -> ChatSwarmKV:
        engine = FakeEngine(reply=reply, num_cells=16384, chat_template=template)
        engines.append(SwarmEngine(engine))
        return ChatSwarmKV(engine=engines[-1], **{"max_tokens": 1000, **options})

    yield make
    for engine in engines:
        engine.close()


@tool
def search(query: Literal["seals", "bears"]) -> str:
    """Find pages."""
    return f"a page about {query}"


@tool
def weather(city: Literal["Bern", "Rome"], days: Literal[1, 2] = 1) -> str:
    """The weather."""
    return f"{city}: rain for {days} days"


TOOLS = [search, weather]


def call(name: str, arguments: object) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


REPLIES = {
    "text": "Seals live in the sea.",
    "call": call("search", {"query": "seals"}),
    "text and call": "Let me see.\n" + call("search", {"query": "seals"}),
    "unknown tool": call("nothing", {"query": "seals"}),
    "cut": '<tool_call>\n{"name": "search", "arguments": {"query": "sea',
    "JSON string": call("search", json.dumps(json.dumps({"query": "seals"}))),
    "two": f"{call('search', {'query': 'seals'})}\n{call('weather', {'city': 'Bern', 'days': 2})}",
}
SEALS = ("search", {"query": "seals"})
TWO = [SEALS, ("weather", {"city": "Bern", "days": 2})]
# One of each meaning; `prompts/test_tools` has all the ways to say it.
CHOICES: list[Any] = [None, "none", "any", "search", {"type": "tool", "name": "weather"}]


def calls_of(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(made["name"], made["args"]) for made in message.tool_calls]


def summed(chunks: Any) -> AIMessageChunk:
    whole: AIMessageChunk | None = None
    for chunk in chunks:
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk  # type: ignore[assignment]
    assert whole is not None
    return whole


def facts(message: AIMessage) -> dict[str, Any]:
    """What must be the same, streamed and whole: all but ids, times, and how bad calls are told."""
    return {
        "content": message.content,
        "calls": calls_of(message),
        "bad": [made["name"] for made in message.invalid_tool_calls],
        "thoughts": message.additional_kwargs.get("reasoning_content"),
        "finish_reason": message.response_metadata["finish_reason"],
        "tokens": message.usage_metadata and message.usage_metadata["output_tokens"],
    }


# -- choices and replies -------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("kind", REPLIES)
def test_held_answers_have_only_calls_that_can_be_made(
    make_llm: MakeLLM, kind: str, choice: Any
) -> None:
    """Whatever the model would say: as many as were asked for, of tools and values that exist."""
    bound = make_llm(REPLIES[kind]).bind_tools(TOOLS, tool_choice=choice)
    message = bound.invoke("Hi")
    assert isinstance(message, AIMessage)
    made = calls_of(message)
    assert message.invalid_tool_calls == []
    for made_call in message.tool_calls:
        {"search": search, "weather": weather}[made_call["name"]].invoke(made_call)
    is_named = choice == "search" or isinstance(choice, dict)
    if is_named:
        assert [name for name, _ in made] == ["weather" if "weather" in str(choice) else "search"]
        assert message.content == ""
    elif choice == "none":
        assert (made, message.content) == ([], REPLIES[kind])
    elif choice == "any":
        assert made
        assert message.content == ""
    # Who must call calls once; who need not may call twice.
    expected = {"call": [SEALS], "two": TWO if choice in (None, "auto") else TWO[:1]}.get(kind)
    if expected and not is_named and choice != "none":
        assert made == expected
    if kind == "text" and choice is None:
        assert (made, message.content) == ([], REPLIES[kind])
    assert message.response_metadata["finish_reason"] == ("tool_calls" if made else "stop")
    assert facts(summed(bound.stream("Hi"))) == facts(message)


@pytest.mark.parametrize("choice", [None, "none", "any"])
@pytest.mark.parametrize("kind", REPLIES)
def test_answers_that_are_not_held_are_taken_as_they_come(
    make_llm: MakeLLM, kind: str, choice: Any
) -> None:
    """Unknown names stay visible, and what cannot be called is among the invalid calls."""
    bound = make_llm(REPLIES[kind]).bind_tools(TOOLS, tool_choice=choice, strict=False)
    message = bound.invoke("Hi")
    assert isinstance(message, AIMessage)
    if choice == "none":
        assert (message.content, message.tool_calls) == (REPLIES[kind], [])
        assert message.invalid_tool_calls == []
        return
    expected: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "text": [],
        "call": [SEALS],
        "text and call": [SEALS],
        "unknown tool": [("nothing", {"query": "seals"})],
        "cut": [],
        "JSON string": [SEALS],
        "two": TWO,
    }
    texts = {"text": REPLIES["text"], "text and call": "Let me see."}
    assert calls_of(message) == expected[kind]
    assert message.content == texts.get(kind, "")
    bad = [(made["name"], made["args"], made["error"]) for made in message.invalid_tool_calls]
    ended = "The answer ended inside the call."
    assert bad == ([("search", REPLIES["cut"], ended)] if kind == "cut" else [])
    finish_reason = "tool_calls" if expected[kind] else "stop"
    assert message.response_metadata["finish_reason"] == finish_reason
    assert facts(summed(bound.stream("Hi"))) == facts(message)


@pytest.mark.parametrize(
    "arguments",
    ['{"query": seals}', '["seals"]', '{"query": "seals"', "3", '"seals"', '{"query": NaN}'],
)
async def test_bad_arguments_are_never_called_with(make_llm: MakeLLM, arguments: str) -> None:
    """Not even with some of them, in any way to ask; the next call is read all the same."""
    text = f"{call('search', arguments)}\n{call('weather', {'city': 'Rome'})}"
    bound = make_llm(text).bind_tools(TOOLS, strict=False)
    messages = [bound.invoke("Hi"), summed(bound.stream("Hi")), await bound.ainvoke("Hi")]
    messages.append(summed([chunk async for chunk in bound.astream("Hi")]))
    for message in messages:
        assert calls_of(message) == [("weather", {"city": "Rome"})]
        assert [made["name"] for made in message.invalid_tool_calls] in (["search"], [None])
    assert [made["args"] for made in messages[0].invalid_tool_calls] == [call("search", arguments)]


def test_a_call_that_max_tokens_cuts_is_no_call(make_llm: MakeLLM) -> None:
    """Held or not, streamed or whole; the reason is the limit."""
    for strict in (None, False):
        bound = make_llm(REPLIES["call"], max_tokens=50).bind_tools(TOOLS, strict=strict)
        for message in (bound.invoke("Hi"), summed(bound.stream("Hi"))):
            assert message.tool_calls == []
            assert [made["name"] for made in message.invalid_tool_calls] == ["search"]
            assert message.response_metadata["finish_reason"] == "length"
        [bad] = bound.invoke("Hi").invalid_tool_calls
        assert bad["args"] == REPLIES["call"][:50].strip()
        assert bad["error"] == "The answer reached max_tokens inside the call."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tool_choice": "missing"}, "names 'missing'"),
        ({"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "'missing'"),
        ({"tool_choice": 1}, "tool_choice=1"),
        ({"unknown": 1}, "does not take the option"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_wrong_options_are_refused_where_tools_are_bound(
    make_llm: MakeLLM, options: dict[str, Any], said: str
) -> None:
    """Not in the middle of a run; and in a call alike."""
    llm = make_llm("Hi")
    with pytest.raises(ConfigurationError, match=said):
        llm.bind_tools(TOOLS, **options)
    with pytest.raises(ConfigurationError, match=said):
        llm.invoke("Hi", **{**llm.bind_tools(TOOLS).kwargs, **options})  # type: ignore[attr-defined]


def test_a_grammar_of_ones_own_contradicts_tools_that_are_held(make_llm: MakeLLM) -> None:
    """One of the two would be passed over."""
    llm = make_llm(REPLIES["text"])
    with pytest.raises(ConfigurationError, match="strict=False"):
        llm.bind_tools(TOOLS, guide='start: "a"').invoke("Hi")
    assert llm.bind_tools(TOOLS, strict=False, guide='start: "a"').invoke("Hi").content == "a"


def test_one_call_at_a_time(make_llm: MakeLLM) -> None:
    """Where the caller wants that, the answer ends after the first."""
    bound = make_llm(REPLIES["two"]).bind_tools(TOOLS, parallel_tool_calls=False)
    assert calls_of(bound.invoke("Hi")) == [SEALS]


def test_bare_json_is_told_apart_by_its_keys(make_llm: MakeLLM) -> None:
    """A call, or the object that was asked for, though both begin with a name."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a"]}, "n": {"enum": [1]}},
        "required": ["name", "n"],
    }
    options: dict[str, Any] = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema},
    }
    found = '{"name": "a", "n": 1}'
    made = '{"name": "search", "parameters": {"query": "seals"}}'
    for reply, text, calls in ((found, found, []), (made, "", [SEALS])):
        llm = make_llm(reply, template=TEMPLATES["like-llama-3"])
        bound = llm.bind_tools(TOOLS, response_format=options)
        for message in (bound.invoke("Hi"), summed(bound.stream("Hi"))):
            assert message.content == text
            assert calls_of(message) == calls
            assert message.invalid_tool_calls == []


# -- streams -------------------------------------------------------------------------------------


def test_name_and_id_come_once_and_arguments_in_pieces(make_llm: MakeLLM) -> None:
    """So LangChain's sum is one call for each, with one id; nothing of a call is in the text."""
    chunks = list(make_llm("Let me see.\n" + REPLIES["two"]).bind_tools(TOOLS).stream("Hi"))
    pieces = [p for c in chunks if isinstance(c, AIMessageChunk) for p in c.tool_call_chunks]
    for index, name in enumerate(("search", "weather")):
        first, *rest = [piece for piece in pieces if piece["index"] == index]
        assert first["name"] == name
        assert first["id"]
        assert len(rest) > 5
        assert all(piece["name"] is piece["id"] is None for piece in rest)
    assert {piece["index"] for piece in pieces} == {0, 1}
    whole = summed(chunks)
    assert calls_of(whole) == TWO
    assert whole.content == "Let me see."
    assert len({made["id"] for made in whole.tool_calls}) == 2


@pytest.mark.parametrize("stop", ["seals", "</tool_call>", "days"])
def test_a_stop_string_inside_a_call_makes_it_invalid(make_llm: MakeLLM, stop: str) -> None:
    """Streamed and whole: it is no call with the arguments that had come so far."""
    bound = make_llm(REPLIES["two"], stop=[stop]).bind_tools(TOOLS)
    for message in (bound.invoke("Hi"), summed(bound.stream("Hi"))):
        assert calls_of(message) == ([SEALS] if stop == "days" else [])
        assert len(message.invalid_tool_calls) == 1
        assert stop not in str(message.invalid_tool_calls)


def _reply_to(prompt: str) -> str:
    """A call whose arguments, or an answer whose text, depend on the last user turn."""
    question = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    city = "Bern" if "Bern" in question else "Rome"
    return call("weather", {"city": city}) if "weather" in question else question


QUESTIONS = ["The weather in Bern?", "The weather in Rome?", "Hello?"]
EXPECTED = [[("weather", {"city": "Bern"})], [("weather", {"city": "Rome"})], []]
HELLO = [HumanMessage("Hi"), AIMessage("Yes?")]


async def test_interleaved_branches_keep_their_calls(make_llm: MakeLLM) -> None:
    """Streams that are read in turn, batches, and tasks of an event loop."""
    bound = make_llm(_reply_to).bind_tools(TOOLS)
    talks = [[*HELLO, HumanMessage(question)] for question in QUESTIONS]
    in_turn = zip_longest(*(bound.stream(talk) for talk in talks))
    streamed = [summed(filter(None, chunks)) for chunks in zip(*in_turn, strict=True)]
    async_read = await asyncio.gather(*(bound.ainvoke(talk) for talk in talks))
    for answers in (streamed, bound.batch(talks), await bound.abatch(talks), async_read):  # type: ignore[arg-type]
        assert [calls_of(answer) for answer in answers] == EXPECTED
        assert [str(answer.content) for answer in answers] == ["", "", "Hello?"]
        ids = [made["id"] for answer in answers for made in answer.tool_calls]
        assert len({*ids}) == 2


def test_structured_events_tell_thoughts_text_and_calls_apart(make_llm: MakeLLM) -> None:
    """LangChain's content blocks, each opened and finished in turn; a bad call is no call."""
    for name, expected in (("Hm.\n" + REPLIES["two"], TWO), (REPLIES["cut"], [])):
        bound: Any = make_llm(name).bind_tools(TOOLS, strict=False)
        stream = bound.bound.stream_events("Hi", version="v3", **bound.kwargs)
        events = list(stream)
        assert events[0]["event"] == "message-start"
        assert events[-1]["event"] == "message-finish"
        opened = [e["index"] for e in events if e["event"] == "content-block-start"]
        closed = [e["index"] for e in events if e["event"] == "content-block-finish"]
        assert opened == closed == list(range(len(opened)))
        assert calls_of(stream.output_message) == expected
        assert bool(stream.output_message.invalid_tool_calls) is not bool(expected)


async def test_event_streams_sum_to_the_answer(make_llm: MakeLLM) -> None:
    """Start, chunks and end of one run."""
    bound = make_llm("Hm.\n" + REPLIES["two"]).bind_tools(TOOLS)
    events = [event async for event in bound.astream_events("Hi", version="v2")]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "on_chat_model_start"
    assert kinds[-1] == "on_chat_model_end"
    assert {*kinds[1:-1]} == {"on_chat_model_stream"}
    assert len({event["run_id"] for event in events}) == 1
    whole = summed([e["data"]["chunk"] for e in events if e["event"] == "on_chat_model_stream"])
    assert calls_of(whole) == calls_of(events[-1]["data"]["output"]) == TWO  # type: ignore[typeddict-item]


# -- agents --------------------------------------------------------------------------------------


class Report(BaseModel):
    """What was found."""

    text: Literal["seals", "bears"]
    number: Literal[1, 2]


REPORT = Report(text="seals", number=2)


def _agent_reply(prompt: str) -> str:
    """Two calls first; with their results an answer, which is a call where there is such a tool."""
    results = prompt.count("<tool_response>\n")
    if not results:
        return REPLIES["two"]
    if '"name": "Report"' in prompt:
        return call("Report", REPORT.model_dump())
    if "Answer with JSON alone" in prompt:
        return json.dumps(REPORT.model_dump())
    return f"I read {results} results."


RESULTS = ["a page about seals", "Bern: rain for 2 days"]


def check_talk(messages: list[Any], *, answer: str | None) -> None:
    """Question, calls, results in order, and the answer."""
    assert [message.type for message in messages[:4]] == ["human", "ai", "tool", "tool"]
    assert calls_of(messages[1]) == TWO
    assert [message.content for message in messages[2:4]] == RESULTS
    ids = [made["id"] for made in messages[1].tool_calls]
    assert [message.tool_call_id for message in messages[2:4]] == ids
    if answer is not None:
        assert [message.content for message in messages[4:]] == [answer]


async def test_a_graph_with_a_tool_node_runs_to_the_answer(make_llm: MakeLLM) -> None:
    """The model calls, the node runs, the model reads; sync, async and streamed."""
    bound = make_llm(_agent_reply).bind_tools(TOOLS)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(TOOLS))
    graph.set_entry_point("model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    app = graph.compile()
    given: Any = {"messages": [HumanMessage("Hi")]}
    answer = "I read 2 results."
    check_talk(app.invoke(given)["messages"], answer=answer)
    check_talk((await app.ainvoke(given))["messages"], answer=answer)
    streamed = [chunk for chunk, _ in app.stream(given, stream_mode="messages")]
    texts = [str(c.content) for c in streamed if isinstance(c, AIMessageChunk) and c.content]
    assert "".join(texts) == answer
    assert len(texts) > 5


async def test_an_agent_calls_tools_and_answers(make_llm: MakeLLM) -> None:
    """LangChain's own loop."""
    agent = create_agent(make_llm(_agent_reply), TOOLS, system_prompt="Be brief.")
    given: Any = {"messages": [HumanMessage("Hi")]}
    check_talk(agent.invoke(given)["messages"], answer="I read 2 results.")
    check_talk((await agent.ainvoke(given))["messages"], answer="I read 2 results.")


@pytest.mark.filterwarnings("ignore:create_react_agent:DeprecationWarning")
async def test_langgraphs_own_agent_calls_tools_and_answers(make_llm: MakeLLM) -> None:
    """The prebuilt ReAct agent, which many still use."""
    agent = create_react_agent(make_llm(_agent_reply), TOOLS, prompt="Be brief.")
    given: Any = {"messages": [HumanMessage("Hi")]}
    check_talk(agent.invoke(given)["messages"], answer="I read 2 results.")
    check_talk((await agent.ainvoke(given))["messages"], answer="I read 2 results.")


@pytest.mark.parametrize("strategy", [ToolStrategy(Report), ProviderStrategy(Report), Report])
async def test_an_agent_ends_with_an_object(make_llm: MakeLLM, strategy: Any) -> None:
    """By a tool of that name, by the format of the answer, or as LangChain likes."""
    agent = create_agent(make_llm(_agent_reply), TOOLS, response_format=strategy)
    given: Any = {"messages": [HumanMessage("Hi")]}
    for result in (agent.invoke(given), await agent.ainvoke(given)):
        if isinstance(strategy, ToolStrategy):  # it requires a call each time, so there is one
            assert calls_of(result["messages"][1]) == TWO[:1]
        else:
            check_talk(result["messages"], answer=None)
        assert result["structured_response"] == REPORT
