"""Waiting inside a progress callback is refused, also on threads that the callback waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import RunnableParallel

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import InvalidRequestError
from langchain_swarmkv.prompts.document import document_message
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.graph.support import fan_out

Work = Callable[[ChatSwarmKV], Any]

WORKS: dict[str, Work] = {
    "batch": lambda llm: llm.batch(["one", "two"]),
    "parallel": lambda llm: RunnableParallel(a=llm, b=llm).invoke("one"),
    "graph": lambda llm: fan_out(llm, ("a", "b")).compile().invoke({"document": "Another. " * 30}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_what_waits_on_other_threads_is_refused_too(work: Work) -> None:
    """LangChain's pools run it, and the callback waits for them; the engine goes on."""
    raised: list[BaseException] = []
    with SwarmEngine(FakeEngine(reply="Yes.")) as engine:
        llm = ChatSwarmKV(engine=engine, max_tokens=4)

        def callback(progress: object) -> None:
            if not raised:
                with pytest.raises(InvalidRequestError, match="progress callback") as told:
                    work(llm)
                raised.append(told.value)

        llm.prefill([document_message("A document. " * 100)], on_progress=callback)
        assert raised
        assert [answer.text for answer in llm.batch(["one", "two"])] == ["Yes.", "Yes."]
        engine.check()


async def test_what_a_callback_hands_to_an_event_loop_goes_on() -> None:
    """It runs there by itself, in the callback's context, and nobody waits for it here."""
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []
    texts: list[str] = []
    is_asked = threading.Event()
    with SwarmEngine(FakeEngine(reply="Yes.")) as engine:
        llm = ChatSwarmKV(engine=engine, max_tokens=4)

        async def ask() -> None:
            texts.append((await llm.ainvoke("one")).text)
            answered.set()

        def callback(progress: object) -> None:
            if not is_asked.is_set():
                is_asked.set()
                loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(ask())))

        await llm.aprefill([document_message("A document. " * 100)], on_progress=callback)
        await asyncio.wait_for(answered.wait(), 30)
        assert texts == ["Yes."]
