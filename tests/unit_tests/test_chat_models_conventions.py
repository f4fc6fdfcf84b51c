"""What LangChain looks for in answers and traces, and hints for other models' options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.runnables import Runnable
from pydantic import BaseModel, Field, ValidationError

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.chat_models.engine_model import _OTHERS_NAMES
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.chat_support import chat

TALK: list[BaseMessage] = [HumanMessage("Hello")]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'


def search(query: str) -> str:
    """Look something up."""
    return query


class Answer(BaseModel):
    """An answer."""

    number: int = Field(ge=0, le=9)


@pytest.fixture
def llm() -> Iterator[ChatSwarmKV]:
    with SwarmEngine(FakeEngine(reply=CALL)) as engine:
        yield chat(engine, max_tokens=80)


# -- answers -------------------------------------------------------------------------------------


def _streamed(chunks: Iterator[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    for chunk in rest:
        first = first + chunk
    return first


async def _astreamed(llm: Runnable[Any, Any]) -> AIMessageChunk:
    chunks = [chunk async for chunk in llm.astream(TALK)]
    return _streamed(iter(chunks))


async def test_every_answer_names_provider_model_and_end(llm: ChatSwarmKV) -> None:
    """Whole and streamed, with tools and objects; the provider is the one of the traces."""
    tools = llm.bind_tools([search], tool_choice="any")
    objects = llm.with_structured_output(Answer, include_raw=True)
    provider = llm._get_ls_params()["ls_provider"]
    answers: dict[str, AIMessage] = {
        "invoke": llm.invoke(TALK),
        "ainvoke": await llm.ainvoke(TALK),
        "stream": _streamed(llm.stream(TALK)),  # type: ignore[arg-type]
        "astream": await _astreamed(llm),
        "streaming": llm.model_copy(update={"streaming": True}).invoke(TALK, stream=True),
        "tools": tools.invoke(TALK),
        "streamed tools": _streamed(tools.stream(TALK)),  # type: ignore[arg-type]
        "object": objects.invoke(TALK)["raw"],
        "batch": llm.batch([TALK])[0],
    }
    for way, answer in answers.items():
        metadata = answer.response_metadata
        assert metadata["model_provider"] == provider == "swarmkv", way
        assert metadata["model_name"] == "fake", way
        assert metadata["finish_reason"] == ("tool_calls" if "tools" in way else "stop"), way
        assert answer.usage_metadata is not None, way
        assert answer.id is not None, way
        assert answer.id.startswith("lc_run--"), way


def test_the_provider_makes_no_other_contents(llm: ChatSwarmKV) -> None:
    """LangChain translates the contents of providers that it knows; ours are plain already."""
    call = llm.bind_tools([search], tool_choice="any").invoke(TALK)
    assert [block["type"] for block in call.content_blocks] == ["tool_call"]
    text = llm.invoke(TALK)
    assert [block["type"] for block in text.content_blocks] == ["text"]


def test_the_chunks_of_a_stream_have_one_id_and_one_usage(llm: ChatSwarmKV) -> None:
    """So that they can be added; the last has usage and metadata."""
    chunks = list(llm.stream(TALK))
    assert len({chunk.id for chunk in chunks}) == 1
    with_usage = [chunk for chunk in chunks if getattr(chunk, "usage_metadata", None)]
    assert with_usage == chunks[-1:]
    assert [chunk for chunk in chunks if chunk.response_metadata] == chunks[-1:]


# -- traces --------------------------------------------------------------------------------------


class Started(BaseCallbackHandler):
    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}

    def on_chat_model_start(self, *_: Any, **run: Any) -> None:
        self.metadata = run["metadata"]


def test_traces_name_the_package_and_its_version(llm: ChatSwarmKV) -> None:
    """Beside those of LangChain, and beside the metadata that the model was given."""
    started = Started()
    given = {"team": "patents"}
    for model in (llm, llm.model_copy(), ChatSwarmKV(engine=llm.engine, metadata=given)):
        model.invoke(TALK, {"callbacks": [started]})
        versions = started.metadata["lc_versions"]
        assert versions["langchain-swarmkv"] == version("langchain-swarmkv")
        assert versions["langchain-core"] == version("langchain-core")
    assert started.metadata["team"] == "patents"
    assert given == {"team": "patents"}


# -- options of other models ---------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(_OTHERS_NAMES))
def test_other_models_options_are_told_by_their_names_here(llm: ChatSwarmKV, name: str) -> None:
    """By the constructor, by every kind of call, and where they are bound."""
    option = {name: 5}
    ours = _OTHERS_NAMES[name].split(":")[0].split("=")[0]
    assert ours in ChatSwarmKV.model_fields or hasattr(ChatSwarmKV, ours)
    calls: list[Callable[[], object]] = [
        lambda: llm.invoke(TALK, **option),
        lambda: llm.generate([TALK], **option),
        lambda: next(llm.stream(TALK, **option)),
        lambda: llm.bind(**option),
        lambda: llm.bind(seed=1).bind(**option).invoke(TALK),
        lambda: llm.bind_tools([search], **option),
        lambda: llm.with_structured_output(Answer, **option),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=f"{name}: it is {ours}"):
            call()
    with pytest.raises(ValidationError, match=f"{name}: it is {ours}"):
        ChatSwarmKV(model_path="m.gguf", **option)


def test_several_are_told_at_once(llm: ChatSwarmKV) -> None:
    """Whoever comes from another model has several."""
    with pytest.raises(ConfigurationError, match=r"max_tokens here\. num_ctx: it is n_ctx here"):
        llm.invoke(TALK, num_predict=5, num_ctx=4096)
