"""Tools whose schemas decoding cannot be held to: calls that fit, and calls that do not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import StructuredTool

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.engine.fake_tokenizer import CHATML
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts import tool_schema as module
from langchain_swarmkv.prompts.plain_schema import plain_schema
from langchain_swarmkv.prompts.tool_schema import tool_schema
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.engine.test_guided_schemas import takes
from tests.unit_tests.prompts.call_templates import TEMPLATES
from tests.unit_tests.prompts.test_tool_schema import TOOLS, guide
from tests.unit_tests.test_chat_models_tools import call, calls_of, summed

MakeLLM = Callable[..., ChatSwarmKV]


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Models whose every answer is a reply, or made of the prompt by one; closed at the end."""
    engines: list[SwarmEngine] = []

    def make(reply: str | Callable[[str], str], template: str = CHATML) -> ChatSwarmKV:
        engine = FakeEngine(reply=reply, num_cells=65536, chat_template=template)
        engines.append(SwarmEngine(engine))
        return ChatSwarmKV(engine=engines[-1], max_tokens=1000)

    yield make
    for engine in engines:
        engine.close()


def tool(name: str) -> StructuredTool:
    """As adapters of MCP servers make them: the schema of the server, as a dict."""
    return StructuredTool.from_function(
        func=lambda **arguments: f"{name} got {json.dumps(arguments)}",
        name=name,
        description=f"Use {name}.",
        args_schema=TOOLS[name]["parameters"],
    )


UNHELD = [
    (name, arguments)
    for name, each in TOOLS.items()
    for arguments in each["misfits"]
    if takes(
        guide(tool_schema({"name": name, "parameters": each["parameters"]})), json.dumps(arguments)
    )
]
"""Arguments that can be written, and do not fit."""


def test_there_are_misfits_that_can_be_written() -> None:
    """Of conditions, items, names, patterns, and overlapping parts."""
    assert len({name for name, _ in UNHELD}) > 6


@pytest.mark.parametrize("name", TOOLS)
def test_a_call_that_fits_is_a_call(make_llm: MakeLLM, name: str) -> None:
    """Whatever is odd about the schema; whole, streamed, and beside the other tools."""
    given = [{"type": "function", "function": each} for each in TOOLS.values()]
    for arguments in TOOLS[name]["fits"]:
        llm = make_llm(call(name, arguments))
        for tools in ([tool(name)], given):
            bound = llm.bind_tools(tools)
            for message in (bound.invoke("Hi"), summed(bound.stream("Hi"))):
                assert calls_of(message) == [(name, arguments)]
                assert message.invalid_tool_calls == []


@pytest.mark.parametrize("template", [CHATML, TEMPLATES["like-llama-3"]], ids=["markup", "bare"])
@pytest.mark.parametrize(("name", "arguments"), UNHELD)
async def test_a_call_that_does_not_fit_is_an_invalid_call(
    make_llm: MakeLLM, name: str, arguments: dict[str, Any], template: str
) -> None:
    """With the reason; in a stream too, where its arguments have come before."""
    bare = json.dumps({"name": name, "parameters": arguments})
    reply = call(name, arguments) if template == CHATML else bare
    bound = make_llm(reply, template).bind_tools([tool(name)], tool_choice="any")
    messages: list[Any] = [bound.invoke("Hi"), summed(bound.stream("Hi"))]
    messages += [await bound.ainvoke("Hi"), summed([chunk async for chunk in bound.astream("Hi")])]
    for message in messages:
        assert message.tool_calls == []
        [bad] = message.invalid_tool_calls
        assert bad["name"] == name
        assert json.dumps(arguments) in bad["args"]
        assert message.response_metadata["finish_reason"] == "stop"
    for whole in (messages[0], messages[2]):
        reason = whole.invalid_tool_calls[0]["error"]
        assert reason.startswith(f"The arguments do not fit the schema of {name!r}")


def test_the_next_call_is_read_after_one_that_does_not_fit(make_llm: MakeLLM) -> None:
    """And has its own number in the stream."""
    bad = call("repo_issue_write", {"method": "create", "assignees": ["a", "a"]})
    good = call("fs_read_file", {"path": "/a"})
    bound = make_llm(f"{bad}\n{good}").bind_tools([tool("repo_issue_write"), tool("fs_read_file")])
    for message in (bound.invoke("Hi"), summed(bound.stream("Hi"))):
        assert calls_of(message) == [("fs_read_file", {"path": "/a"})]
        assert [made["name"] for made in message.invalid_tool_calls] in (
            ["repo_issue_write"],
            [None],
        )


def test_an_agent_runs_on_with_an_odd_tool(make_llm: MakeLLM) -> None:
    """A call that does not fit calls nothing; the talk goes on, and the next one is made."""
    name = "conditional"

    def reply(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return "Done."
        fits = "Again" in prompt
        return call(name, {"mode": "cron", **({"cron": "* *"} if fits else {})})

    agent = create_agent(make_llm(reply), [tool(name), tool("fs_read_file")])
    talk: Any = agent.invoke({"messages": [HumanMessage("Hi")]})["messages"]
    assert [message.type for message in talk] == ["human", "ai"]
    [bad] = talk[1].invalid_tool_calls
    assert "'cron' is a required property" in bad["error"]
    talk = agent.invoke({"messages": [HumanMessage("Again")]})["messages"]
    assert [message.type for message in talk] == ["human", "ai", "tool", "ai"]
    assert talk[2].content == 'conditional got {"mode": "cron", "cron": "* *"}'
    assert talk[3].content == "Done."


def test_the_log_says_it_once_and_where_tools_are_bound(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at each call."""
    module._tool_schema.cache_clear()
    llm = make_llm(call("conditional", {"mode": "once"}))
    with caplog.at_level(logging.WARNING):
        bound = llm.bind_tools([tool("conditional")])
        assert len(caplog.records) == 1
        for _ in range(3):
            bound.invoke("Hi")
        llm.bind_tools([tool("conditional")])
    [record] = caplog.records
    assert "'conditional'" in record.getMessage()
    assert "if; then" in record.getMessage()


@pytest.mark.parametrize("name", [name for name in TOOLS if TOOLS[name]["unheld"]])
def test_strict_refuses_and_not_strict_lets_be(make_llm: MakeLLM, name: str) -> None:
    """As both have always done."""
    misfits = [arguments for other, arguments in UNHELD if other == name]
    llm = make_llm(call(name, misfits[0] if misfits else {}))
    with pytest.raises(ConfigurationError, match=name):
        llm.bind_tools([tool(name)], strict=True)
    message = llm.bind_tools([tool(name)], strict=False).invoke("Hi")
    assert isinstance(message, AIMessage)
    assert calls_of(message) == [(name, misfits[0] if misfits else {})]


def test_objects_are_held_whole_by_way_of_a_call_too(make_llm: MakeLLM) -> None:
    """There is no second chance for them: what cannot be held is refused, as ever."""
    schema = {"title": "odd", **TOOLS["conditional"]["parameters"]}
    for method in ("json_schema", "function_calling"):
        with pytest.raises(ConfigurationError, match="if"):
            make_llm("").with_structured_output(schema, method=method)  # type: ignore[arg-type]


def test_what_a_real_decoder_writes_validates(tiny_llama: Path) -> None:
    """Random weights, held: the arguments of every finished call are valid for jsonschema."""
    names = ["repo_list_issues", "rust_magic_sum", "zod_record", "zod_dates", "petstore_add_pet"]
    names += ["pydantic_decimal", "k8s_apply_route", "orders_by_kind", "conditional"]
    num_calls = 0
    with ChatSwarmKV(model_path=tiny_llama, n_ctx=4096, n_threads=1, temperature=1.0) as llm:
        for name in names:
            bound = llm.bind_tools([tool(name)], tool_choice=name, max_tokens=700)  # type: ignore[call-arg]
            schema = plain_schema(TOOLS[name]["parameters"])
            judge = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            for seed in range(2):
                message = bound.invoke("Hi", seed=seed)
                num_calls += len(message.tool_calls)
                for made in message.tool_calls:
                    judge.validate(made["args"])
                for bad in message.invalid_tool_calls:
                    error = str(bad["error"])
                    assert "max_tokens" in error or "do not fit" in error
    assert num_calls > len(names) // 2
