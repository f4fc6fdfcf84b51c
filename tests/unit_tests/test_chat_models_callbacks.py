"""Callbacks: every event of a call once, in order, under its run, in the caller's context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import DecodeError, RequestTimeoutError, SwarmKVError
from langchain_swarmkv.prompts.langchain_errors import PromptOverflowError
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

CALLER: ContextVar[str] = ContextVar("CALLER", default="nobody")
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
QUESTIONS = ["Hi", "Hello"]


@dataclass(frozen=True)
class Event:
    kind: str
    run_id: UUID
    parent_run_id: UUID | None
    caller: str
    token: str = ""


class Events:
    """What handlers were told, in order."""

    def __init__(self) -> None:
        self.all: list[Event] = []

    def tell(self, kind: str, run: dict[str, Any], token: str = "") -> None:
        self.all.append(Event(kind, run["run_id"], run["parent_run_id"], CALLER.get(), token))

    @property
    def runs(self) -> list[list[Event]]:
        """The events of each call of a model, in the order in which they began."""
        by_run: dict[UUID, list[Event]] = {}
        for event in self.all:
            if event.kind != "chain":
                by_run.setdefault(event.run_id, []).append(event)
        return list(by_run.values())

    def check_calls(self, texts: list[str]) -> None:
        """A whole call for each text, in any order, each under a chain of the caller's."""
        chains = {event.run_id for event in self.all if event.kind == "chain"}
        assert sorted("".join(e.token for e in events) for events in self.runs) == sorted(texts)
        for events in self.runs:
            kinds = [event.kind for event in events]
            assert kinds == ["start", *["token"] * (len(kinds) - 2), "end"]
            assert len(kinds) > 4
            assert {event.parent_run_id for event in events} <= chains
        assert {event.caller for event in self.all} == {"test"}


class SyncHandler(BaseCallbackHandler):
    def __init__(self, events: Events) -> None:
        self.events = events

    def on_chain_start(self, *_: Any, **run: Any) -> None:
        self.events.tell("chain", run)

    def on_chat_model_start(self, *_: Any, **run: Any) -> None:
        self.events.tell("start", run)

    def on_llm_new_token(self, token: Any, **run: Any) -> None:
        self.events.tell("token", run, token)

    def on_llm_end(self, *_: Any, **run: Any) -> None:
        self.events.tell("end", run)

    def on_llm_error(self, *_: Any, **run: Any) -> None:
        self.events.tell("error", run)


class AsyncHandler(AsyncCallbackHandler):
    def __init__(self, events: Events) -> None:
        self.events = events

    async def on_chain_start(self, *_: Any, **run: Any) -> None:
        self.events.tell("chain", run)

    async def on_chat_model_start(self, *_: Any, **run: Any) -> None:
        self.events.tell("start", run)

    async def on_llm_new_token(self, token: Any, **run: Any) -> None:
        self.events.tell("token", run, token)

    async def on_llm_end(self, *_: Any, **run: Any) -> None:
        self.events.tell("end", run)

    async def on_llm_error(self, *_: Any, **run: Any) -> None:
        self.events.tell("error", run)


@pytest.fixture
def make_llm() -> Iterator[Callable[..., ChatSwarmKV]]:
    engines: list[SwarmEngine] = []

    def make(*, timeout: float | None = None, **options: Any) -> ChatSwarmKV:
        engines.append(SwarmEngine(FakeEngine(**options)))
        return ChatSwarmKV(engine=engines[-1], timeout=timeout)

    yield make
    for engine in engines:
        engine.close()


WAYS = ("invoke", "stream", "batch", "ainvoke", "astream", "abatch")


async def call(way: str, llm: Runnable[Any, Any], config: Any) -> int:
    """Call a model in one of the ways; returns how many calls that were."""
    CALLER.set("test")
    if way == "stream":
        for _ in llm.stream(QUESTIONS[0], config):
            pass
    elif way == "astream":
        async for _ in llm.astream(QUESTIONS[0], config):
            pass
    elif way == "batch":
        return _checked(llm.batch([*QUESTIONS], config, return_exceptions=True))
    elif way == "abatch":
        return _checked(await llm.abatch([*QUESTIONS], config, return_exceptions=True))
    elif way == "invoke":
        llm.invoke(QUESTIONS[0], config)
    else:
        await llm.ainvoke(QUESTIONS[0], config)
    return 1


def _checked(results: list[Any]) -> int:
    """Raise what one of them failed with, once all have ended."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return len(results)


def same(value: Any) -> Any:
    return value


@pytest.mark.parametrize("handler", [SyncHandler, AsyncHandler])
@pytest.mark.parametrize("way", WAYS)
async def test_every_event_is_told_once_in_order_and_in_context(
    make_llm: Callable[..., ChatSwarmKV], way: str, handler: type[Any]
) -> None:
    """Start, each token, end: of the model's run under the caller's chain, however it is called."""
    events = Events()
    chain = RunnableLambda(same) | make_llm(reply="Good day.")
    number = await call(way, chain, {"callbacks": [handler(events)]})
    events.check_calls(["Good day."] * number)


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_of_a_tool_is_told_in_chunks_without_text(
    make_llm: Callable[..., ChatSwarmKV], way: str
) -> None:
    """Its pieces are no tokens of the answer's text."""
    events = Events()
    tool = {"name": "search", "parameters": {"properties": {"query": {"type": "string"}}}}
    chain = RunnableLambda(same) | make_llm(reply="Hm.\n" + CALL).bind_tools([tool])
    number = await call(way, chain, {"callbacks": [SyncHandler(events)]})
    events.check_calls(["Hm."] * number)


class FailsAt:
    """Fails a step of the engine."""

    def __init__(self, step: int) -> None:
        self._left = step

    def __call__(self, batch: Batch) -> None:
        self._left -= 1
        if self._left < 0:
            raise DecodeError("the device is gone", return_code=-3)


@pytest.mark.parametrize("handler", [SyncHandler, AsyncHandler])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("options", "error", "has_tokens"),
    [
        ({"on_decode": FailsAt}, DecodeError, True),
        ({"num_cells": 30}, PromptOverflowError, False),
        ({"step_seconds": 0.02, "timeout": 0.001}, RequestTimeoutError, False),
    ],
)
async def test_a_failure_is_told_once(
    make_llm: Callable[..., ChatSwarmKV],
    way: str,
    handler: type[Any],
    options: dict[str, Any],
    error: type[SwarmKVError],
    has_tokens: bool,
) -> None:
    """And no end, whether it comes before the first token or between two."""
    events = Events()
    options = {k: v(6) if isinstance(v, type) else v for k, v in options.items()}
    chain = RunnableLambda(same) | make_llm(reply="Good day.", **options)
    with pytest.raises(error):
        await call(way, chain, {"callbacks": [handler(events)]})
    assert events.runs
    for run in events.runs:
        kinds = [event.kind for event in run]
        assert kinds == ["start", *["token"] * (len(kinds) - 2), "error"]
        assert (len(kinds) > 2) is has_tokens or len(events.runs) > 1
