"""Tasks that are functions: sync or async, of the state and of what LangGraph offers beside it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import ConfigurationError, PromptError
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.state import SwarmState
from tests.unit_tests.graph.support import DOCUMENT

STATE = {"document": DOCUMENT}
CONFIG: RunnableConfig = {"configurable": {"who": "Ada"}}


@dataclass
class Context:
    tenant: str


def of_config(state: SwarmState, config: RunnableConfig) -> str:
    return f"For {config['configurable']['who']}."


def of_runtime(state: SwarmState, *, runtime: Runtime[Context]) -> str:
    return f"For {runtime.context.tenant}."


async def of_both(state: SwarmState, runtime: Runtime[Context], config: RunnableConfig) -> str:
    return f"For {runtime.context.tenant} and {config['configurable']['who']}."


class Asker:
    async def __call__(self, state: SwarmState, config: RunnableConfig) -> str:
        return f"For {config['configurable']['who']}, once more."

    def ask(self, state: SwarmState, config: RunnableConfig) -> str:
        return f"For {config['configurable']['who']}, by a method."


def one_analyst(llm: ChatSwarmKV, task: Any) -> Any:
    graph = StateGraph(SwarmState, context_schema=Context)
    graph.add_node("a", AnalystNode(llm, task))
    graph.add_edge(START, "a")
    graph.add_edge("a", END)
    return graph.compile()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (of_config, "For Ada."),
        (of_runtime, "For ACME."),
        (of_both, "For ACME and Ada."),
        (Asker(), "For Ada, once more."),
        (Asker().ask, "For Ada, by a method."),
        (functools.partial(of_config), "For Ada."),
        (lambda state, config: config["configurable"]["who"], "Ada"),
        (lambda config: f"{len(config['document'])} characters", f"{len(DOCUMENT)} characters"),
    ],
)
async def test_a_task_function_gets_what_it_names(llm: ChatSwarmKV, task: Any, said: str) -> None:
    """As LangGraph's own nodes do; the first argument is the state whatever its name."""
    found = await one_analyst(llm, task).ainvoke(STATE, CONFIG, context=Context("ACME"))
    assert found["findings"] == {"a": f"read: {said}"}


@pytest.mark.parametrize("task", [of_config, of_runtime], ids=["config", "runtime"])
def test_sync_runs_offer_the_same(llm: ChatSwarmKV, task: Any) -> None:
    """The same task works in both."""
    found = one_analyst(llm, task).invoke(STATE, CONFIG, context=Context("ACME"))
    assert found["findings"]["a"].startswith("read: For A")


@pytest.mark.parametrize("task", [of_both, Asker()])
def test_an_async_task_in_a_sync_run_says_what_to_do(llm: ChatSwarmKV, task: Any) -> None:
    """No coroutine is left that nobody awaits (warnings are errors here)."""
    with pytest.raises(ConfigurationError, match=r"'a' is async.*ainvoke"):
        one_analyst(llm, task).invoke(STATE, CONFIG, context=Context("ACME"))
    assert llm.engine_statistics().num_prefill_tokens == 0


async def test_an_async_task_without_a_text_is_refused(llm: ChatSwarmKV) -> None:
    """As a sync one is."""

    async def nothing(state: SwarmState) -> Any:
        return None

    with pytest.raises(PromptError, match="'a' returned None"):
        await one_analyst(llm, nothing).ainvoke(STATE)


async def test_outside_a_graph_a_task_may_name_them_too(llm: ChatSwarmKV) -> None:
    """The runtime is then an empty one."""

    def task(state: SwarmState, config: RunnableConfig, runtime: Runtime[Any]) -> str:
        return f"{config['configurable']['who']}, {runtime.context}"

    node = AnalystNode(llm, task, name="a")
    assert node.invoke(STATE, CONFIG)["findings"]["a"] == "read: Ada, None"
    assert (await node.ainvoke(STATE, CONFIG))["findings"]["a"] == "read: Ada, None"
