"""LangChain's wrappers around a model: one engine in memory, whatever is put around it."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import ContextBudgetError
from tests.unit_tests.chat_support import FakeModelFiles, eventually, fake_model_files

TALK = [SystemMessage("Be brief."), HumanMessage("Hello")]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeModelFiles:
    return fake_model_files(tmp_path, monkeypatch)


@pytest.fixture
def llm(files: FakeModelFiles) -> Iterator[ChatSwarmKV]:
    with ChatSwarmKV(model_path=files.path(), max_tokens=20) as llm:
        yield llm


def _failing(_: Any) -> Any:
    raise ValueError("the first always fails")


WRAPPERS: list[Callable[[ChatSwarmKV], Any]] = [
    lambda llm: llm.with_retry(stop_after_attempt=2),
    lambda llm: RunnableLambda(_failing).with_fallbacks([llm]),
    lambda llm: llm.with_fallbacks([llm.bind(max_tokens=5)]),
    lambda llm: llm.configurable_alternatives(
        ConfigurableField(id="model"), short=llm.model_copy(update={"max_tokens": 5})
    ),
    lambda llm: llm.configurable_fields(temperature=ConfigurableField(id="temperature")),
    lambda llm: llm.with_config({"metadata": {"a": 1}}).bind(max_tokens=20).with_retry(),
    lambda llm: (
        ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "Hello")]) | llm
    ),
    lambda llm: pickle.loads(pickle.dumps(llm)),
    lambda llm: pickle.loads(pickle.dumps(llm.bind(max_tokens=20))),
    lambda llm: copy.deepcopy(llm.with_retry()),
    lambda llm: copy.deepcopy(llm.with_fallbacks([llm])),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
async def test_what_is_wrapped_answers_alike_from_one_engine(
    files: FakeModelFiles, llm: ChatSwarmKV, wrap: Callable[[ChatSwarmKV], Any]
) -> None:
    """Sync, async and streamed."""
    expected = llm.invoke(TALK).content
    wrapped = wrap(llm)
    given: Any = {} if hasattr(wrapped, "first") else TALK
    assert wrapped.invoke(given).content == expected
    assert (await wrapped.ainvoke(given)).content == expected
    assert "".join([str(chunk.content) for chunk in wrapped.stream(given)]) == expected
    assert len(files.engines) == 1


def test_alternatives_and_branches_share_the_engine(
    files: FakeModelFiles, llm: ChatSwarmKV
) -> None:
    """A parallel step of four wrapped copies, one of them chosen by the configuration."""
    alternatives = llm.configurable_alternatives(
        ConfigurableField(id="model"), short=llm.model_copy(update={"max_tokens": 5})
    )
    step = RunnableParallel(
        plain=llm | StrOutputParser(),
        bound=llm.bind(max_tokens=7) | StrOutputParser(),
        chosen=alternatives | StrOutputParser(),
        copied=copy.deepcopy(llm) | StrOutputParser(),
    )
    answers = step.invoke(TALK, {"configurable": {"model": "short"}})
    assert [len(text) for text in answers.values()] == [20, 7, 5, 20]
    assert len(files.engines) == 1


def test_an_engine_setting_by_configuration_is_another_engine(
    files: FakeModelFiles, llm: ChatSwarmKV
) -> None:
    """It is not answered from the engine that is there."""
    llm.invoke(TALK)
    configurable = llm.configurable_fields(n_ctx=ConfigurableField(id="n_ctx"))
    with pytest.raises(ContextBudgetError):
        configurable.invoke("x" * 60, {"configurable": {"n_ctx": 60}})
    assert len(files.engines) == 2
    gc.collect()
    eventually(lambda: files.engines[1]._closed)
    assert not files.engines[0]._closed
