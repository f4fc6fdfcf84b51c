"""Templates that write the time: documents keep theirs, over branches, threads and processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START
from langgraph.types import Command, interrupt

from langchain_swarmkv.chat_models import ChatSwarmKV, engine_model
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget import check_budget
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState
from langchain_swarmkv.graph.state_graph import SwarmStateGraph
from langchain_swarmkv.prompts.clock import PromptTimes
from langchain_swarmkv.prompts.document import document_message
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.graph.support import fan_out
from tests.unit_tests.prompts.test_clock import START as EVENING
from tests.unit_tests.prompts.test_clock import Ticking

SECONDS = (
    "Now: {{ strftime_now('%Y-%m-%d %H:%M:%S') }}\n{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The lamp has a hinge of brass. " * 20
DOCUMENT = document_message(TEXT)
MARKUP_TOKENS = 40
"""More than the task of a branch and the markup around it take besides its text."""


@pytest.fixture(autouse=True)
def _another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_all(monkeypatch)


def forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has met, as if it were another."""
    monkeypatch.setattr(engine_model, "prompt_times", PromptTimes())


def open_llm(clock: Any, folder: Path | None = None, **options: Any) -> ChatSwarmKV:
    locks = DeviceLockManager(across_processes=False)
    fake = FakeEngine(num_cells=8192, chat_template=SECONDS, n_ctx_train=8192)
    engine = SwarmEngine(fake, device_locks=locks, snapshot_dir=folder)
    return ChatSwarmKV(engine=engine, max_tokens=4, clock=clock, **options)


@pytest.fixture
def ticking() -> Ticking:
    return Ticking()


@pytest.fixture
def llm(ticking: Ticking) -> Iterator[ChatSwarmKV]:
    llm = open_llm(ticking)
    assert llm.engine is not None
    with llm.engine:
        yield llm


def computed(llm: ChatSwarmKV, *messages: BaseMessage, **options: Any) -> int:
    """Prompt tokens that a call computes."""
    usage = llm.invoke(list(messages), **options).usage_metadata
    assert usage is not None
    return usage["input_tokens"] - usage["input_token_details"]["cache_read"]


def num_computed(llm: ChatSwarmKV) -> int:
    return llm.engine_statistics().num_prefill_tokens


# -- one process ---------------------------------------------------------------------------------


def test_five_branches_share_a_document_though_the_clock_ticks(llm: ChatSwarmKV) -> None:
    """The graph reads the clock once, and every branch computes its task alone."""
    names = tuple("abcde")
    app = fan_out(llm, names).compile()
    result = app.invoke({"document": TEXT})
    assert sorted(result["findings"]) == list(names)
    ref = result["document_ref"]
    assert ref["prompt_time"] == (EVENING + timedelta(seconds=1)).isoformat()
    assert num_computed(llm) < ref["num_tokens"] + 5 * MARKUP_TOKENS * 2


def test_the_budget_counts_the_document_that_will_run(llm: ChatSwarmKV) -> None:
    """At another second the same tokens, one document, and the run computes no other."""
    other = llm.model_copy(update={"temperature": 0.5})
    graph = SwarmStateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("one", AnalystNode(other, "Why?"))
    graph.add_node("two", AnalystNode(llm, "Who?"))
    graph.add_edge(START, "document")
    graph.add_edge("document", "one")
    graph.add_edge("document", "two")
    report = check_budget(graph, document=TEXT)
    assert [pool.num_documents for pool in report.pools] == [1]
    ref = graph.compile(document=TEXT).invoke({"document": TEXT})["document_ref"]
    assert report.pools[0].document_tokens == ref["num_tokens"]
    assert ref["prompt_time"] == llm.prompt_time([DOCUMENT])


@pytest.mark.parametrize(
    "clocks", [(None, EVENING), (EVENING, None), (EVENING, EVENING.replace(year=1999))]
)
def test_the_clock_of_the_document_node_decides(llm: ChatSwarmKV, clocks: tuple[Any, Any]) -> None:
    """In the budget as in the run, whatever the analyst's own model would say."""
    reader, analyst = (llm.model_copy(update={"clock": clock}) for clock in clocks)
    graph = SwarmStateGraph(SwarmState)
    graph.add_node("document", DocumentNode(reader))
    graph.add_node("one", AnalystNode(analyst, "Why?"))
    graph.add_edge(START, "document")
    graph.add_edge("document", "one")
    assert check_budget(graph, document=TEXT).pools[0].num_documents == 1
    graph.compile(document=TEXT).invoke({"document": TEXT})
    assert num_computed(llm) < len(llm.prefix_token_ids([DOCUMENT])) + MARKUP_TOKENS


def test_plain_calls_share_a_document(llm: ChatSwarmKV) -> None:
    """Prefilled, or begun with by the first of them; on copies as well."""
    first = computed(llm, DOCUMENT, HumanMessage("Why?"))
    assert first > len(TEXT)
    copied = llm.model_copy(update={"temperature": 0.1})
    assert computed(copied, DOCUMENT, HumanMessage("Who?")) < MARKUP_TOKENS
    other = [document_message(TEXT + "More.")]
    llm.prefill(other)
    assert computed(llm, *other, HumanMessage("Who?")) < MARKUP_TOKENS


def test_a_conversation_goes_on_at_its_instant(llm: ChatSwarmKV, ticking: Ticking) -> None:
    """Over midnight too; a new one has its own day."""
    talk: list[BaseMessage] = [HumanMessage("Tell me of lamps. " * 10)]
    answer = llm.invoke(talk)
    ticking.next += timedelta(days=1)
    assert computed(llm, *talk, answer, HumanMessage("Why?")) < MARKUP_TOKENS
    seen = llm.tokenizer.decode(llm.prompt_token_ids([HumanMessage("Hello")]))
    assert seen.startswith("Now: 2026-12-03")
    again = llm.tokenizer.decode(llm.prompt_token_ids(talk))
    assert again.startswith("Now: 2026-12-03")


def test_a_conversation_is_handed_on_with_its_instant(llm: ChatSwarmKV) -> None:
    """`handoff` renders it as it was answered."""
    talk: list[BaseMessage] = [HumanMessage("Tell me of lamps. " * 10)]
    talk.append(llm.invoke(talk))
    before = num_computed(llm)
    ref = llm.handoff(talk)
    assert num_computed(llm) - before < MARKUP_TOKENS
    assert ref["prompt_time"] == (EVENING + timedelta(seconds=1)).isoformat()


def test_a_fixed_clock_stands_still(llm: ChatSwarmKV) -> None:
    """Nothing that was met before changes it; text is a time, too."""
    llm.prefill([DOCUMENT])
    fixed = llm.model_copy(update={"clock": datetime(1999, 12, 31, 12)})
    ids = fixed.prompt_token_ids([DOCUMENT, HumanMessage("Why?")])
    assert fixed.tokenizer.decode(ids).startswith("Now: 1999-12-31 12:00:00")
    assert fixed.prefix_token_ids([DOCUMENT]) == ids[: len(fixed.prefix_token_ids([DOCUMENT]))]
    parsed = ChatSwarmKV(model_path="m.gguf", clock="1999-12-31T12:00:00+01:00")  # type: ignore
    assert isinstance(parsed.clock, datetime)


def test_a_fixed_clock_is_its_own_models_only(llm: ChatSwarmKV) -> None:
    """Others keep the document's time, and share what they have of it."""
    ref = llm.prefill([DOCUMENT])
    fixed = llm.model_copy(update={"clock": datetime(1999, 12, 31, 12)})
    assert str(fixed.prefill([DOCUMENT])["prompt_time"]).startswith("1999-12-31T12:00:00")
    assert llm.prompt_time([DOCUMENT]) == ref["prompt_time"]
    assert computed(llm, DOCUMENT, HumanMessage("Why?")) < MARKUP_TOKENS


def test_a_call_may_say_its_time(llm: ChatSwarmKV) -> None:
    """As a datetime or as the text in a reference; anything else is refused with what to give."""
    when = datetime(1999, 12, 31, 12)
    messages = [HumanMessage("Hello")]
    for given in (when, when.astimezone().isoformat()):
        ids = llm.prompt_token_ids(messages, prompt_time=given)
        assert llm.tokenizer.decode(ids).startswith("Now: 1999-12-31 12:00:00")
    with pytest.raises(ConfigurationError, match="prompt_time='noon'"):
        llm.invoke(messages, prompt_time="noon")
    with pytest.raises(ConfigurationError, match="clock gave a int"):
        llm.model_copy(update={"clock": lambda: 5}).invoke(messages)


def test_without_a_clock_in_the_template_there_is_no_time(ticking: Ticking) -> None:
    """The clock is not asked, and references look as they did."""
    with SwarmEngine(FakeEngine()) as engine:
        llm = ChatSwarmKV(engine=engine, max_tokens=4, clock=ticking)
        assert "prompt_time" not in llm.prefill([DOCUMENT])
        assert llm.prompt_time([DOCUMENT]) is None
        llm.invoke([DOCUMENT, HumanMessage("Why?")])
    assert ticking.reads == 0


def test_response_caches_know_a_fixed_clock_only(llm: ChatSwarmKV) -> None:
    """Another fixed time is another answer; a clock that goes on would never find one again."""
    cached = llm.model_copy(update={"cache": InMemoryCache()})
    first = cached.invoke("Hello")
    before = num_computed(llm)
    assert cached.invoke("Hello").content == first.content
    assert num_computed(llm) == before
    for year in (1999, 2001):
        cached.model_copy(update={"clock": datetime(year, 1, 1)}).invoke("Hello")
        assert num_computed(llm) > before
        before = num_computed(llm)


# -- other processes -----------------------------------------------------------------------------


def ask(state: dict[str, Any]) -> dict[str, Any]:
    interrupt("Go on?")
    return {}


@pytest.mark.parametrize("has_time", [True, False])
def test_a_thread_goes_on_at_the_time_of_its_reference(
    tmp_path: Path, ticking: Ticking, monkeypatch: pytest.MonkeyPatch, has_time: bool
) -> None:
    """Another process finds the document on disk; a reference of before has no time and works."""
    saver = InMemorySaver()
    config: Any = {"configurable": {"thread_id": "1"}}

    def compiled(llm: ChatSwarmKV) -> Any:
        graph = SwarmStateGraph(SwarmState)
        graph.add_node("document", DocumentNode(llm, persist=True))
        graph.add_node("ask", ask)
        graph.add_node("one", AnalystNode(llm, "Why?"))
        graph.add_edge(START, "document")
        graph.add_edge("document", "ask")
        graph.add_edge("ask", "one")
        return graph.compile(checkpointer=saver, document=TEXT)

    first = open_llm(ticking, tmp_path)
    app = compiled(first)
    app.invoke({"document": TEXT}, config)
    assert first.engine is not None
    first.engine.close()
    for note in tmp_path.glob("*.time"):
        note.unlink()
    if not has_time:
        ref = dict(app.get_state(config).values["document_ref"])
        del ref["prompt_time"]
        app.update_state(config, {"document_ref": ref})

    forget_all(monkeypatch)
    ticking.next += timedelta(days=1)
    second = open_llm(ticking, tmp_path)
    assert second.engine is not None
    with second.engine:
        result = compiled(second).invoke(Command(resume=True), config)
        assert "one" in result["findings"]
        assert (num_computed(second) < MARKUP_TOKENS) == has_time


def test_a_document_node_that_runs_again_keeps_the_time(
    tmp_path: Path, ticking: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the reference in its state, if it is of this document; another one is of today."""
    first = open_llm(ticking)
    assert first.engine is not None
    with first.engine:
        state: dict[str, Any] = {"document": TEXT}
        state |= DocumentNode(first).invoke(state)
    forget_all(monkeypatch)
    ticking.next += timedelta(days=1)
    second = open_llm(ticking)
    assert second.engine is not None
    with second.engine:
        again = DocumentNode(second).invoke(state)["document_ref"]
        assert again == state["document_ref"]
        state["document"] = TEXT + "Changed."
        other = asyncio.run(DocumentNode(second).ainvoke(state))["document_ref"]
        assert other["prompt_time"].startswith("2026-12-03")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_document_on_disk_is_found_on_another_day(
    tmp_path: Path, ticking: Ticking, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Without a reference, by the note beside its snapshot; once that is gone it is of today."""
    first = open_llm(ticking, tmp_path)
    assert first.engine is not None
    with first.engine:
        if is_async:
            ref = asyncio.run(first.aprefill([DOCUMENT], persist=True))
        else:
            ref = first.prefill([DOCUMENT], persist=True)

    forget_all(monkeypatch)
    ticking.next += timedelta(days=1)
    second = open_llm(ticking, tmp_path)
    assert second.engine is not None
    with second.engine:
        assert computed(second, DOCUMENT, HumanMessage("Why?")) < MARKUP_TOKENS
        assert second.prefill([DOCUMENT])["prompt_time"] == ref["prompt_time"]

    forget_all(monkeypatch)
    for path in tmp_path.glob("*.swarmkv"):
        path.unlink()
    third = open_llm(ticking, tmp_path)
    assert third.engine is not None
    with third.engine:
        assert third.prompt_time([DOCUMENT]) is not None
        assert third.prefill([DOCUMENT])["prompt_time"].startswith("2026-12-03")


def test_a_saved_document_has_its_time(
    tmp_path: Path, ticking: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the reference that `load` gives, and for calls without one."""
    first = open_llm(ticking)
    assert first.engine is not None
    with first.engine:
        ref = first.prefill([DOCUMENT])
        first.save(ref, tmp_path / "saved")
    forget_all(monkeypatch)
    second = open_llm(ticking)
    assert second.engine is not None
    with second.engine:
        assert second.load(tmp_path / "saved") == ref
        assert computed(second, DOCUMENT, HumanMessage("Why?")) < MARKUP_TOKENS
        assert (
            computed(second, DOCUMENT, AIMessage("So."), HumanMessage("Who?")) < 2 * MARKUP_TOKENS
        )
