"""LangChain's response caches: equal calls hit, all that changes an answer misses."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core._api import LangChainBetaWarning
from langchain_core.caches import RETURN_VAL_TYPE, BaseCache, InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.config import EngineConfig, SamplingParams
from langchain_swarmkv.prompts.document import document_message
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.chat_support import chat

QUESTION = HumanMessage("Why?")
TALK: list[BaseMessage] = [document_message("A document. " * 5, "Read."), QUESTION]


def _tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    body = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": body}


def _json_schema(kind: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": kind}}}


CALLS: list[dict[str, Any]] = [
    {"guide": "start: /[a-z]+/"},
    {"tools": [_tool("f")]},
    {"tools": [_tool("f", a="integer")]},
    {"tools": [_tool("f"), _tool("g")]},
    {"tools": [_tool("f"), _tool("g")], "tool_choice": "none"},
    {"tools": [_tool("f"), _tool("g")], "tool_choice": "any"},
    {"tools": [_tool("f"), _tool("g")], "tool_choice": "g"},
    {"tools": [_tool("f"), _tool("g")], "parallel_tool_calls": False},
    {"response_format": {"type": "json_object"}},
    {"response_format": _json_schema("object")},
    {"response_format": _json_schema("integer")},
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2},
    {"max_tokens": 9},
    {"stop": ["x"]},
    {"stop": ["x", "y"]},
    {"stop": []},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"repeat_penalty": 1.2},
    {"logit_bias": {65: 1.0}},
    {"logprobs": 2},
    {"grammar": "root ::= [a-z]+"},
    {"ignore_eos": True},
    {"required_prefix_tokens": 5},
]
"""Options of a call, no two of which may share an answer."""

OBJECTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"max_tokens": 7},
    {"seed": 1},
    {"stop": ("z",)},
    {"grammar": "root ::= [0-9]+"},
    {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"keep_reasoning": True},
    {"guide": "start: /[0-9]+/"},
    {"top_k": 2},
    {"top_p": 0.4},
    {"min_p": 0.2},
    {"repeat_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"penalty_window_tokens": 5},
    {"logit_bias": {66: 1.0}},
    {"logprobs": 1},
    {"ignore_eos": True},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
]
"""Fields of an object, likewise."""


class SqliteCache(BaseCache):
    """Answers as LangChain's databases keep them: as JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as database:
            database.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, value TEXT)")

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, isolation_level=None)

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        database = self._open()
        row = database.execute(
            "SELECT value FROM answers WHERE key = ?", (prompt + llm_string,)
        ).fetchone()
        database.close()
        if row is None:
            return None
        with warnings.catch_warnings(category=LangChainBetaWarning, action="ignore"):
            allowed = [AIMessage, ChatGeneration]
            return [loads(text, allowed_objects=allowed) for text in json.loads(row[0])]

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        value = json.dumps([dumps(generation) for generation in return_val])
        database = self._open()
        database.execute("INSERT INTO answers VALUES (?, ?)", (prompt + llm_string, value))
        database.close()

    def clear(self, **_: Any) -> None:
        database = self._open()
        database.execute("DELETE FROM answers")
        database.close()


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[SwarmEngine]:
    with SwarmEngine(EngineConfig(model_path=tiny_llama, n_ctx=2048, n_threads=1)) as engine:
        yield engine


@pytest.fixture(params=["memory", "sqlite", "global"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BaseCache | None]:
    """Given to the model, or to all models: then the model's own is None."""
    if request.param == "global":
        set_llm_cache(InMemoryCache())
        yield None
        set_llm_cache(None)
    elif request.param == "sqlite":
        yield SqliteCache(tmp_path / "answers.sqlite")
    else:
        yield InMemoryCache()


def answers(engine: SwarmEngine, calls: Sequence[Any]) -> list[int]:
    """Make each call, and say how many requests the engine finished for each."""
    counts = []
    for call in calls:
        before = engine.statistics().num_finished
        call()
        counts.append(engine.statistics().num_finished - before)
    return counts


def test_the_options_of_a_call_have_answers_of_their_own(
    engine: SwarmEngine, cache: BaseCache | None
) -> None:
    """The first time each is computed; the second time none is."""
    llm = chat(engine, cache=cache, max_tokens=8)
    calls = [lambda options=options: llm.invoke(TALK, **options) for options in CALLS]
    assert answers(engine, calls) == [1] * len(CALLS)
    assert answers(engine, calls) == [0] * len(CALLS)


def test_the_fields_of_an_object_have_answers_of_their_own(
    engine: SwarmEngine, cache: BaseCache | None
) -> None:
    """Two objects with equal fields share them."""
    calls = [
        lambda fields=fields: chat(engine, cache=cache, **{"max_tokens": 8, **fields}).invoke(TALK)
        for fields in OBJECTS
    ]
    assert answers(engine, calls) == [1] * len(OBJECTS)
    assert answers(engine, calls) == [0] * len(OBJECTS)


def test_every_sampling_field_is_among_them() -> None:
    """So that a new one is not forgotten."""
    assert {name for fields in OBJECTS for name in fields} >= {*SamplingParams.model_fields}


def test_documents_and_models_are_kept_apart(
    engine: SwarmEngine, tiny_gguf: Callable[..., Path]
) -> None:
    """One question, asked of two documents, and of two models."""
    cache = InMemoryCache()
    other_talk = [document_message("Another. " * 5, "Read."), QUESTION]
    config = EngineConfig(model_path=tiny_gguf("llama", seed=1), n_ctx=2048, n_threads=1)
    with SwarmEngine(config) as other:
        for used in (engine, other):
            llm = chat(used, cache=cache, max_tokens=8)
            calls = [lambda llm=llm, talk=talk: llm.invoke(talk) for talk in (TALK, other_talk)]
            assert answers(used, calls) == [1, 1]
            assert answers(used, calls) == [0, 0]


def test_an_answer_from_the_cache_is_the_same(engine: SwarmEngine, cache: BaseCache | None) -> None:
    """With its metadata; LangChain adds that it cost nothing."""
    llm = chat(engine, cache=cache, max_tokens=8)
    first, again = llm.invoke(TALK), llm.invoke(TALK)
    assert again.content == first.content
    assert again.response_metadata == first.response_metadata
    assert again.usage_metadata is not None
    assert first.usage_metadata is not None
    assert again.usage_metadata["total_tokens"] == first.usage_metadata["total_tokens"]
    assert again.usage_metadata["total_cost"] == 0  # type: ignore[typeddict-item]


async def test_async_calls_share_the_answers(engine: SwarmEngine, cache: BaseCache | None) -> None:
    """Whichever came first."""
    llm = chat(engine, cache=cache, max_tokens=8)
    first = await llm.ainvoke(TALK)
    before = engine.statistics().num_finished
    assert (await asyncio.to_thread(llm.invoke, TALK)).content == first.content
    assert [a.content for a in await llm.abatch([TALK, TALK])] == [first.content] * 2
    assert engine.statistics().num_finished == before


def test_streams_are_computed_and_events_are_not(
    engine: SwarmEngine, cache: BaseCache | None
) -> None:
    """LangChain's `stream` asks no cache; a stream of any other kind leaves it right."""
    llm = chat(engine, cache=cache, max_tokens=8)
    first = llm.invoke(TALK)
    before = engine.statistics().num_finished
    assert "".join(str(chunk.content) for chunk in llm.stream(TALK)) == first.content
    assert engine.statistics().num_finished == before + 1
    assert llm.invoke(TALK).content == first.content
    assert engine.statistics().num_finished == before + 1


def test_a_random_answer_is_remembered_like_any_other(engine: SwarmEngine) -> None:
    """LangChain's meaning of a cache; a seed of its own for each call keeps them apart."""
    llm = chat(engine, cache=InMemoryCache(), max_tokens=20, temperature=1.5)
    assert llm.invoke(TALK).content == llm.invoke(TALK).content
    assert llm.invoke(TALK, seed=1).content != llm.invoke(TALK, seed=2).content


def test_no_cache_is_asked_where_it_is_switched_off(engine: SwarmEngine) -> None:
    """`cache=False` wins over the global one."""
    set_llm_cache(InMemoryCache())
    try:
        llm = chat(engine, cache=False, max_tokens=8)
        assert answers(engine, [lambda: llm.invoke(TALK)] * 2) == [1, 1]
    finally:
        set_llm_cache(None)


def test_bound_options_are_options_of_the_call(engine: SwarmEngine) -> None:
    """`bind` and keywords have one key."""
    llm = chat(engine, cache=InMemoryCache(), max_tokens=8)
    assert isinstance(llm, ChatSwarmKV)
    calls = [
        lambda: llm.bind(seed=3, stop=["x"]).invoke(TALK),
        lambda: llm.invoke(TALK, seed=3, stop=["x"]),
        lambda: llm.invoke(TALK, stop=["x"]),
    ]
    assert answers(engine, calls) == [1, 0, 1]
