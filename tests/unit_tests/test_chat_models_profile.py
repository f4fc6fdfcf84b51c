"""What LangChain is told of a model: its profile, and the parameters of a trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import ConfigurableField

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import ContextBudgetError
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.chat_support import chat


@pytest.fixture
def engine() -> Iterator[SwarmEngine]:
    with SwarmEngine(FakeEngine(num_cells=600, n_ctx_train=500, reply="A short text.")) as engine:
        yield engine


def profile_of(llm: ChatSwarmKV) -> dict[str, Any]:
    assert llm.profile is not None
    return dict(llm.profile)


# -- the profile ---------------------------------------------------------------------------------


def test_the_largest_prompt_is_told_without_a_file() -> None:
    """From the settings alone: what leaves room for the answer."""
    profile = profile_of(ChatSwarmKV(model_path=Path("no/such.gguf"), n_ctx=4096, max_tokens=96))
    assert (profile["max_input_tokens"], profile["max_output_tokens"]) == (4000, 96)
    assert profile["name"] == "such"
    assert profile["text_inputs"]
    assert not profile["image_inputs"]
    # Agents ask these how to get an object.
    assert profile["tool_calling"]
    assert profile["tool_choice"]
    assert profile["structured_output"]


def test_the_largest_prompt_of_an_engine_is_admitted(engine: SwarmEngine) -> None:
    """One token more is not."""
    llm = chat(engine, max_tokens=50)
    most = profile_of(llm)["max_input_tokens"]
    assert most == 450
    room = most - llm.get_num_tokens_from_messages([HumanMessage("")])
    assert llm.invoke("x" * room).content
    with pytest.raises(ContextBudgetError):
        llm.invoke("x" * (room + 1))


def test_a_profile_follows_the_settings_of_a_copy() -> None:
    """Of every kind of copy, and of the object itself."""
    llm = ChatSwarmKV(model_path="m.gguf", n_ctx=1000, max_tokens=100)
    assert profile_of(copy.deepcopy(llm)) == profile_of(llm)
    assert profile_of(llm.model_copy(update={"n_ctx": 2000}))["max_input_tokens"] == 1900
    field = ConfigurableField(id="most")
    configured = llm.configurable_fields(max_tokens=field)
    prepared, _ = configured.prepare({"configurable": {"most": 10}})  # type: ignore[attr-defined]
    assert isinstance(prepared, ChatSwarmKV)
    assert profile_of(prepared)["max_input_tokens"] == 990
    llm.max_tokens = 200
    assert profile_of(llm)["max_input_tokens"] == 800


def test_a_given_profile_stays() -> None:
    """In copies too, whatever their settings."""
    llm = ChatSwarmKV(model_path="m.gguf", profile={"max_input_tokens": 5})
    assert llm.profile == {"max_input_tokens": 5}
    assert llm.model_copy(update={"n_ctx": 2000}).profile == {"max_input_tokens": 5}
    given = llm.model_copy(update={"profile": {"max_input_tokens": 6}})
    assert given.profile == {"max_input_tokens": 6}


def test_middleware_summarizes_before_the_context_is_full(engine: SwarmEngine) -> None:
    """LangChain's own reads `max_input_tokens`, and counts with the model."""
    llm = chat(engine, max_tokens=50)
    middleware = SummarizationMiddleware(
        model=llm,
        trigger=("fraction", 0.8),
        keep=("messages", 1),
        token_counter=llm.get_num_tokens_from_messages,
        summary_prompt="Sum up: {messages}",
        trim_tokens_to_summarize=200,
    )
    agent = create_agent(llm, tools=[], middleware=[middleware])
    talk: list[Any] = []
    sizes = []
    for number in range(12):
        talk = agent.invoke({"messages": [*talk, HumanMessage(f"Question {number}? " * 3)]})[
            "messages"
        ]
        assert isinstance(talk[-1], AIMessage)
        sizes.append(len(talk))
    assert max(sizes) < 14  # without it, 24 messages
    assert any(after < before for before, after in pairwise(sizes))


# -- traces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"ls_temperature": 0.5, "ls_max_tokens": 20, "ls_stop": ["x"]}),
        ({"temperature": 1.0}, {"ls_temperature": 1.0}),
        ({"temperature": 0}, {"ls_temperature": 0}),
        ({"max_tokens": 7}, {"ls_max_tokens": 7}),
        ({"stop": ["y"]}, {"ls_stop": ["y"]}),
        ({"stop": []}, {}),
    ],
)
def test_a_trace_shows_what_a_call_used(options: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fields, and the options of the call over them."""
    llm = ChatSwarmKV(model_path="d/name.gguf", temperature=0.5, max_tokens=20, stop=("x",))
    params = llm._get_ls_params(**options)
    assert params["ls_provider"] == "swarmkv"
    assert params["ls_model_name"] == "name"
    assert params["ls_model_type"] == "chat"
    assert {key: params.get(key) for key in expected} == expected
    assert ("ls_stop" in params) == (options.get("stop") != [])
