"""A document that an analyst computes again although it was prefilled: told once, and counted."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import InvalidRequestError
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.document_node import DocumentNode
from tests.unit_tests.graph.support import DOCUMENT, fan_out

NAMES = ("novelty", "claims", "ethics")


def forgetful(llm: ChatSwarmKV) -> Any:
    """A graph whose document is forgotten between its prefill and the analysts."""
    graph = fan_out(llm, NAMES)
    reset = graph.nodes["document"].runnable

    def forget(ref: Any) -> Any:
        assert llm.engine is not None
        llm.engine.reset_prefix_cache()
        return ref

    graph.nodes["document"].runnable = reset | forget
    return graph


def warnings_of(events: list[Any]) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == "warning"]


async def events_of(app: Any, *, is_async: bool, **options: Any) -> list[Any]:
    state = {"document": DOCUMENT}
    if is_async:
        return [event async for event in app.astream(state, stream_mode="custom", **options)]
    return list(app.stream(state, stream_mode="custom", **options))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_lost_document_is_told_once_a_run(llm: ChatSwarmKV, is_async: bool) -> None:
    """With the numbers; the first analyst computes it, its siblings fork what that one computes."""
    app = forgetful(llm).compile()
    num_prefix_tokens = len(llm.prefix_token_ids([("system", "x")])) - 1
    for run in (1, 2):
        events = await events_of(app, is_async=is_async)
        (told,) = warnings_of(events)
        assert told["reason"] == "prefix_not_shared"
        assert told["node"] in NAMES
        assert told["computed_tokens"] + told["cached_tokens"] == told["document_tokens"]
        assert told["document_tokens"] > len(DOCUMENT) > num_prefix_tokens
        assert str(told["computed_tokens"]) in told["message"]
        assert llm.engine_statistics().num_recomputed_tokens == run * told["computed_tokens"]


async def test_what_is_shared_is_not_told(llm: ChatSwarmKV) -> None:
    """Nor the second turn of a thread, nor an analyst without a reference."""
    app = fan_out(llm, NAMES).compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    assert not warnings_of(await events_of(app, is_async=True, config=config))
    assert not warnings_of(await events_of(app, is_async=True, config=config))
    AnalystNode(llm, "Alone.").invoke({"document": "Another text. " * 40})
    assert llm.engine_statistics().num_recomputed_tokens == 0


async def test_a_slice_expects_its_slice_only(llm: ChatSwarmKV) -> None:
    """`required_prefix_tokens` of a longer document."""
    ref = DocumentNode(llm).invoke({"document": DOCUMENT})["document_ref"]
    node = AnalystNode(llm, "Alone.", required_prefix_tokens=100)
    node.invoke({"document": DOCUMENT, "document_ref": ref})
    assert llm.engine_statistics().num_recomputed_tokens == 0
    assert llm.engine is not None
    llm.engine.reset_prefix_cache()
    node.invoke({"document": DOCUMENT, "document_ref": ref})
    assert llm.engine_statistics().num_recomputed_tokens == 100


@pytest.mark.parametrize("wrong", ["many", -1, 1.5])
def test_a_wrong_expectation_is_refused_and_the_engine_goes_on(
    llm: ChatSwarmKV, wrong: object
) -> None:
    """It would be compared on the engine's thread, whose end it would be."""
    with pytest.raises(InvalidRequestError, match="expected_cached_tokens"):
        llm.invoke("Hello", expected_cached_tokens=wrong)
    llm.bind(expected_cached_tokens=None).invoke([("human", "Hello")])
    assert not llm.engine.closed  # type: ignore[union-attr]
