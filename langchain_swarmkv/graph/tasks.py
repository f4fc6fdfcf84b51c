"""What an analyst is asked: a text, a prompt template, or a function of the state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompts import BasePromptTemplate

from langchain_swarmkv.errors import ConfigurationError, PromptError
from langchain_swarmkv.graph.node_run import read_key

__all__ = ["Task", "check_task", "static_task_messages", "task_messages"]

Task: TypeAlias = str | BasePromptTemplate[Any] | Callable[[Any], str]


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


def task_messages(task: Task, state: object, node: str) -> list[BaseMessage]:
    """The messages of a task, for one state.

    Raises:
        PromptError: the state lacks a variable of the template, or there is no text.
    """
    if isinstance(task, str):
        return [HumanMessage(task)]
    if isinstance(task, BasePromptTemplate):
        return _formatted(task, state, node)
    text = task(_view(state))
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
