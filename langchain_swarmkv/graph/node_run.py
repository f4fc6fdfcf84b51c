"""One run of a node: which node it is, what its state holds, and where its events go.

Everything is taken from the `RunnableConfig` that LangGraph hands over, never from context
variables: those do not reach async nodes on Python 3.10.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, set_config_context
from langgraph.runtime import Runtime

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import RequestCancelledError
from langchain_swarmkv.prompts.answers import timings
from langchain_swarmkv.prompts.document import DocumentRef
from langchain_swarmkv.scheduling.request import PrefillProgress
from langchain_swarmkv.statistics import RequestStatistics

__all__ = ["NodeRun", "described", "read_key"]

_PROGRESS_SECONDS = 0.1
"""Prefill progress is told at most this often, and once more at the end."""

_MIN_LOST_TOKENS = 64
_MIN_LOST_SHARE = 0.1
"""Fewer tokens than these are what a branch point in another place costs."""


def read_key(state: object, key: str) -> Any:
    """A value of a graph's state, be it a mapping, a dataclass or a pydantic model; or None."""
    if isinstance(state, Mapping):
        return state.get(key)
    return getattr(state, key, None)


def described(value: object) -> str:
    """A value's type, and of a list the first type in it that is no `Document`."""
    if isinstance(value, list | tuple):
        for item in value:
            if not isinstance(item, Document):
                return f"a {type(value).__name__} with a {type(item).__name__}"
    return f"a {type(value).__name__}"


class NodeRun:
    """What a node knows of the run it is in; outside a graph it works too, and nobody listens.

    Args:
        fallback_name: the node's name where no graph has given it one.
        config: what the node was invoked with.
    """

    def __init__(self, fallback_name: str, config: RunnableConfig | None) -> None:
        self.config = ensure_config(config)
        self.metadata = self.config.get("metadata") or {}
        self.node: str = self.metadata.get("langgraph_node") or fallback_name
        self.runtime: Runtime[Any] = _runtime(self.config)

    @property
    def copy_number(self) -> int | None:
        """Which of the copies that `Send` started in this step; None: an edge started the node."""
        path = self.metadata.get("langgraph_path")
        match path:
            case ("__pregel_push", int(number), *_):
                return number
        return None

    def tell(self, kind: str, **facts: object) -> None:
        """Put an event on LangGraph's `custom` stream."""
        # LangGraph's writer asks a context variable which node writes; where it is not set (async
        # nodes on Python 3.10, callbacks of the engine's thread) it raises.
        with set_config_context(self.config) as context:
            context.run(self.runtime.stream_writer, {"type": kind, "node": self.node, **facts})

    def tell_shortfall(self, digest: str, *, expected_tokens: int, cached_tokens: int) -> None:
        """Warn, once a run and document, that much of what was prefilled was computed again.

        The budget counts a document once, and so did the user who compiled the graph.

        Args:
            digest: the document's.
            expected_tokens: the prefix that should have been in the cache.
            cached_tokens: what was.
        """
        lost_tokens = expected_tokens - cached_tokens
        if lost_tokens < max(_MIN_LOST_TOKENS, _MIN_LOST_SHARE * expected_tokens):
            return
        with _told_lock:
            told = _told.setdefault(self.runtime.stream_writer, set())
            if digest in told:
                return
            told.add(digest)
        self.tell(
            "warning",
            reason="prefix_not_shared",
            message=(
                f"{self.node!r} found {cached_tokens} of {expected_tokens} tokens of its document "
                f"in the cache and computed {lost_tokens} again. The document left the pool "
                "(raise n_ctx or snapshot_memory_bytes, or pin it), or the prompts of document "
                "and analyst begin differently (other cache_salt, chat_template or tools)."
            ),
            document_tokens=expected_tokens,
            cached_tokens=cached_tokens,
            computed_tokens=lost_tokens,
        )

    def prefill(
        self,
        llm: ChatSwarmKV,
        shared: Sequence[BaseMessage],
        *,
        pin: bool = False,
        persist: bool = False,
        prompt_time: str | None = None,
        earlier: DocumentRef | None = None,
    ) -> DocumentRef:
        """`llm.prefill`, with its progress and its end told from the calling thread.

        The engine's thread must not be kept from its work by whoever reads the stream, and the
        stream may expect the node's thread; so another thread waits for the prefill.
        """
        events: queue.SimpleQueue[PrefillProgress | None] = queue.SimpleQueue()
        is_abandoned = threading.Event()
        tell = _Throttle(events.put)
        outcome: Future[DocumentRef] = Future()
        finished: list[RequestStatistics] = []

        def note(progress: PrefillProgress) -> None:
            if is_abandoned.is_set():
                raise RequestCancelledError(f"{self.node!r} no longer waits for its prefill.")
            tell(progress)

        def wait() -> None:
            try:
                ref = llm.prefill(
                    list(shared),
                    pin=pin,
                    persist=persist,
                    prompt_time=prompt_time,
                    earlier=earlier,
                    config=self.config,
                    on_progress=note,
                    on_finish=finished.append,
                )
                outcome.set_result(ref)
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                events.put(None)

        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(wait,), name=f"prefill-{self.node}", daemon=True
        ).start()
        try:
            for progress in iter(events.get, None):
                self._tell_progress(progress)
        except BaseException:  # an interrupt, or whoever reads the stream has failed
            is_abandoned.set()
            raise
        ref = outcome.result()
        self._tell_document(*finished)
        return ref

    async def aprefill(
        self,
        llm: ChatSwarmKV,
        shared: Sequence[BaseMessage],
        *,
        pin: bool = False,
        persist: bool = False,
        prompt_time: str | None = None,
        earlier: DocumentRef | None = None,
    ) -> DocumentRef:
        """`llm.aprefill`, with its progress and its end told from the event loop."""
        relay = _LoopRelay(self._tell_progress)
        try:
            return await llm.aprefill(
                list(shared),
                pin=pin,
                persist=persist,
                prompt_time=prompt_time,
                earlier=earlier,
                config=self.config,
                on_progress=_Throttle(relay),
                on_finish=self._tell_document,
            )
        finally:
            relay.close()

    def _tell_progress(self, progress: PrefillProgress) -> None:
        self.tell(
            "prefill",
            computed_tokens=progress.num_computed_tokens,
            cached_tokens=progress.num_cached_tokens,
            total_tokens=progress.num_prompt_tokens,
        )

    def _tell_document(self, statistics: RequestStatistics) -> None:
        self.tell(
            "document",
            document_tokens=statistics.num_prompt_tokens,
            cached_tokens=statistics.num_cached_tokens,
            computed_tokens=statistics.num_computed_tokens,
            **timings(statistics),
        )


def _runtime(config: RunnableConfig) -> Runtime[Any]:
    for value in (config.get("configurable") or {}).values():
        if isinstance(value, Runtime):
            return value
    return Runtime()  # outside a graph: no context, no store, and a writer that nobody reads


_told: weakref.WeakKeyDictionary[Callable[[Any], None], set[str]] = weakref.WeakKeyDictionary()
"""Documents whose shortfall was told, by the writer of a run's `custom` stream."""
_told_lock = threading.Lock()


class _Throttle:
    """Passes on the first progress, the last, and now and then one in between."""

    def __init__(self, deliver: Callable[[PrefillProgress], None]) -> None:
        self._deliver = deliver
        self._told_at = float("-inf")

    def __call__(self, progress: PrefillProgress) -> None:
        now = time.monotonic()
        done = progress.num_cached_tokens + progress.num_computed_tokens
        if done >= progress.num_prompt_tokens or now - self._told_at >= _PROGRESS_SECONDS:
            self._told_at = now
            self._deliver(progress)


class _LoopRelay:
    """Calls a function on the running event loop, from any thread, until it is closed."""

    def __init__(self, deliver: Callable[[PrefillProgress], None]) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._is_open = True

    def __call__(self, progress: PrefillProgress) -> None:
        if threading.get_ident() == self._thread:
            self._deliver_if_open(progress)
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver_if_open, progress)
        except RuntimeError:
            self._is_open = False  # the loop was closed, and nobody listens any more

    def _deliver_if_open(self, progress: PrefillProgress) -> None:
        if self._is_open:
            self._deliver(progress)

    def close(self) -> None:
        self._is_open = False
