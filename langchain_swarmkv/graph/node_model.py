"""The chat model that a node was given: bare, or with options, retries or a config bound to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.retry import RunnableRetry

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import ConfigurationError

__all__ = ["NodeLLM", "NodeModel"]

NodeLLM: TypeAlias = ChatSwarmKV | Runnable[LanguageModelInput, AIMessage]
"""What nodes take: a `ChatSwarmKV`, or one behind `bind`, `with_retry` or `with_config`."""

_Result = TypeVar("_Result")


class NodeModel:
    """A `ChatSwarmKV` and all that was bound to it.

    Args:
        given: what the node was made with.

    Raises:
        ConfigurationError: there is no `ChatSwarmKV` in it, or something stands behind it.
    """

    def __init__(self, given: NodeLLM) -> None:
        self.given: Runnable[LanguageModelInput, AIMessage] = given
        """Answers with everything that was bound."""
        self.options: dict[str, Any] = {}
        """The bound options of a call; the outermost `bind` decides."""
        self._retries: list[RunnableRetry[Any, Any]] = []
        inner: object = given
        while isinstance(inner, RunnableBindingBase):
            # None is how other models' options say "as it is".
            given_here = {name: v for name, v in inner.kwargs.items() if v is not None}
            self.options = {**given_here, **self.options}
            if isinstance(inner, RunnableRetry):
                self._retries.append(inner)
            inner = inner.bound
        if not isinstance(inner, ChatSwarmKV):
            raise ConfigurationError(_refusal(inner))
        self.llm: ChatSwarmKV = inner

    def call(self, function: Callable[[], _Result], config: RunnableConfig) -> _Result:
        """Call a function with the retries that were bound."""
        if not self._retries:
            return function()
        result: _Result = self._retrying(RunnableLambda(lambda _: function())).invoke(None, config)
        return result

    async def acall(
        self, function: Callable[[], Awaitable[_Result]], config: RunnableConfig
    ) -> _Result:
        """Like `call`."""
        if not self._retries:
            return await function()

        async def run(_: object) -> _Result:
            return await function()

        result: _Result = await self._retrying(RunnableLambda(run)).ainvoke(None, config)
        return result

    def _retrying(self, runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
        for retry in reversed(self._retries):
            runnable = RunnableRetry(
                bound=runnable,
                retry_exception_types=retry.retry_exception_types,
                wait_exponential_jitter=retry.wait_exponential_jitter,
                exponential_jitter_params=retry.exponential_jitter_params,
                max_attempt_number=retry.max_attempt_number,
            )
        return runnable


def _refusal(inner: object) -> str:
    if isinstance(inner, RunnableSequence):
        return (
            "llm is a chain; the node needs a ChatSwarmKV, bare or behind bind, with_retry or "
            "with_config. For objects give AnalystNode(schema=...) in place of "
            "with_structured_output; put other steps behind the node."
        )
    return (
        f"llm is a {type(inner).__name__}; the node needs a ChatSwarmKV, bare or behind bind, "
        "with_retry or with_config."
    )
