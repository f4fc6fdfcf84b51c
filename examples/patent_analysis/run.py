"""Run the graph once, follow its stream and collect what it measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Protocol

from langchain_swarmkv import ChatSwarmKV

from .graph import TASKS, Tasks, build_graph
from .results import Analysis, AnalystResult, DocumentResult

PACKAGES = ("langchain-swarmkv", "llama-cpp-python", "langchain-core", "langgraph")


class Observer(Protocol):
    """Is told what happens while it happens; `display` has two of them."""

    def __enter__(self) -> object:
        """The run starts; nothing has been loaded yet."""

    def __exit__(self, *error: object) -> None:
        """The run has ended or failed."""

    def prefill(self, done_tokens: int, total_tokens: int) -> None:
        """The document's first `done_tokens` are in the cache."""

    def document(self, result: DocumentResult) -> None:
        """The document is in the cache."""

    def token(self, analyst: str, text: str) -> None:
        """An analyst's answer grew by `text`."""

    def analyst(self, result: AnalystResult) -> None:
        """An analyst's answer is complete."""


async def analyse(
    llm: ChatSwarmKV,
    document: str,
    observer: Observer,
    tasks: Tasks = TASKS,
    *,
    allow_waves: bool = False,
) -> Analysis:
    """Let an analyst for each of the tasks read `document`.

    Raises:
        ContextBudgetError: document, tasks and answers do not fit; nothing has been loaded.
        SwarmKVError: the model cannot be used, or the run failed.
    """
    app = build_graph(llm, tasks).compile(document=document, allow_waves=allow_waves)
    started = time.perf_counter()
    follower = _Follower(observer, tasks)
    given: Any = {"document": document}
    with observer:
        async for mode, event in app.astream(given, stream_mode=["custom", "messages", "updates"]):
            follower.follow(mode, event)
    return follower.analysis(llm, wall_seconds=time.perf_counter() - started)


class _Follower:
    """Sorts the three streams: measurements, tokens, and what the nodes returned."""

    def __init__(self, observer: Observer, tasks: Tasks) -> None:
        self._observer = observer
        self._document: DocumentResult | None = None
        self._texts = dict.fromkeys(tasks, "")
        self._analysts: dict[str, AnalystResult] = {}
        self._report = ""

    def follow(self, mode: str, event: Any) -> None:
        if mode == "custom":
            self._measurement(event)
        elif mode == "messages":
            chunk, metadata = event
            self._token(metadata["langgraph_node"], chunk.text)
        else:
            self._report = event.get("report", {}).get("report", self._report)

    def _measurement(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "prefill":
            done = event["cached_tokens"] + event["computed_tokens"]
            self._observer.prefill(done, event["total_tokens"])
        elif event["type"] == "document":
            self._document = DocumentResult.of(event)
            self._observer.document(self._document)
        elif event["type"] == "analyst":
            name = event["node"]
            self._analysts[name] = AnalystResult.of(event, self._texts[name])
            self._observer.analyst(self._analysts[name])

    def _token(self, name: str, text: str) -> None:
        if text:
            self._texts[name] += text
            self._observer.token(name, text)

    def analysis(self, llm: ChatSwarmKV, *, wall_seconds: float) -> Analysis:
        assert self._document is not None, "the document node sent no event"
        return Analysis(
            model=llm.model_name,
            document=self._document,
            analysts=tuple(self._analysts[name] for name in self._texts),
            report=self._report,
            engine=_public(asdict(llm.engine_statistics())),
            versions={package: version(package) for package in PACKAGES},
            wall_seconds=wall_seconds,
        )


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith("_")}
