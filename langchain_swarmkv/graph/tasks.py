"""What an analyst is asked: a text, a prompt template, or a function of the state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompts import BasePromptTemplate

from langchain_swarmkv.errors import ConfigurationError, PromptError
from langchain_swarmkv.graph.node_run import NodeRun, read_key

__all__ = ["Task", "atask_messages", "check_task", "static_task_messages", "task_messages"]

Task: TypeAlias = str | BasePromptTemplate[Any] | Callable[..., str | Awaitable[str]]
"""A function takes the state and, if it names them, `config` and `runtime`, as LangGraph's nodes
do; it may be a coroutine function."""


def check_task(task: object) -> None:
    """Refuse what is no task, when the node is made.

    Raises:
        ConfigurationError: it is empty, or of another kind.
    """
    if isinstance(task, str):
        if not task.strip():
            raise ConfigurationError("The task is empty; say what the analyst shall find out.")
    elif not isinstance(task, BasePromptTemplate) and not callable(task):
        raise ConfigurationError(
            f"The task is a {type(task).__name__}; give a text, a prompt template, or a function "
            "from the state to a text."
        )


def static_task_messages(task: Task) -> list[BaseMessage] | None:
    """The messages of a task that does not depend on the state; None if it does."""
    if isinstance(task, str):
        return [HumanMessage(task)]
    if not isinstance(task, BasePromptTemplate) or task.input_variables or task.optional_variables:
        return None
    return task.format_prompt().to_messages()


def task_messages(task: Task, state: object, run: NodeRun) -> list[BaseMessage]:
    """The messages of a task, for one state.

    Raises:
        PromptError: the state lacks a variable of the template, or there is no text.
        ConfigurationError: the function is a coroutine function.
    """
    if isinstance(task, str):
        return [HumanMessage(task)]
    if isinstance(task, BasePromptTemplate):
        return _formatted(task, state, run.node)
    text = _called(task, state, run)
    if inspect.isawaitable(text):
        if inspect.iscoroutine(text):
            text.close()
        raise ConfigurationError(
            f"The task of {run.node!r} is async, which a sync run cannot wait for. Run the graph "
            "with ainvoke or astream, or give a sync function."
        )
    return _spoken(text, run.node)


async def atask_messages(task: Task, state: object, run: NodeRun) -> list[BaseMessage]:
    """Like `task_messages`; the function may be a coroutine function."""
    if isinstance(task, str | BasePromptTemplate):
        return task_messages(task, state, run)
    text = _called(task, state, run)
    return _spoken(await text if inspect.isawaitable(text) else text, run.node)


def _called(task: Callable[..., Any], state: object, run: NodeRun) -> Any:
    offered = {"config": run.config, "runtime": run.runtime}
    try:
        parameters = list(inspect.signature(task).parameters.values())[1:]
    except (TypeError, ValueError):  # builtins need not have one
        parameters = []
    named = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    wanted = {name: value for name, value in offered.items() if name in named}
    return task(_view(state), **wanted)


def _spoken(text: object, node: str) -> list[BaseMessage]:
    if not isinstance(text, str) or not text.strip():
        raise PromptError(
            f"The task function of {node!r} returned {text!r}; it must return the task as text.",
            node=node,
        )
    return [HumanMessage(text)]


def _formatted(template: BasePromptTemplate[Any], state: object, node: str) -> list[BaseMessage]:
    variables = (*template.input_variables, *template.optional_variables)
    values = {key: read_key(state, key) for key in variables}
    missing = [key for key in template.input_variables if values[key] is None]
    if missing:
        raise PromptError(
            f"The task of {node!r} has the variable {missing[0]!r}, which the state does not have. "
            "Put it in the state (or in what Send passes on).",
            node=node,
            key=missing[0],
        )
    given = {key: value for key, value in values.items() if value is not None}
    return template.format_prompt(**given).to_messages()


def _view(state: object) -> object:
    """The state with containers of its own: what a task appends there, no sibling sees.

    Nodes of one step are given the very same lists by LangGraph.
    """
    if not isinstance(state, Mapping):
        return state
    return {
        key: copy.copy(value) if isinstance(value, list | dict | set) else value
        for key, value in state.items()
    }
