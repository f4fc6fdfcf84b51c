"""`AnalystNode`: its prompt, its answer, and where it finds the document."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from pydantic import BaseModel

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.errors import (
    ConfigurationError,
    ContextBudgetError,
    DocumentMissingError,
    PromptError,
)
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.document_node import DocumentNode
from tests.unit_tests.graph.support import (
    DOCUMENT,
    echo_task,
    fake_llm,
    is_idle,
    listening,
    wait_until,
)

STATE = {"document": DOCUMENT, "topic": "hinges", "empty": ""}


async def run(node: AnalystNode, state: Any, config: Any = None, *, is_async: bool) -> Any:
    return await node.ainvoke(state, config) if is_async else node.invoke(state, config)


both = pytest.mark.parametrize("is_async", [False, True])


# -- the answer ----------------------------------------------------------------------------------


@both
async def test_it_answers_about_the_document(llm: ChatSwarmKV, is_async: bool) -> None:
    """And returns its own finding only; the state is untouched (G1, G5)."""
    state = copy.deepcopy(STATE)
    config = listening(lambda event: None, langgraph_node="novelty")
    result = await run(AnalystNode(llm, "What is new?"), state, config, is_async=is_async)
    assert result == {"findings": {"novelty": "read: What is new?"}}
    assert state == STATE


def test_the_name_of_a_finding_can_be_chosen(llm: ChatSwarmKV) -> None:
    """Else it is the node's, or outside a graph the class's."""
    config = listening(lambda event: None, langgraph_node="node")
    assert list(AnalystNode(llm, "?", name="n").invoke(STATE, config)["findings"]) == ["n"]
    assert list(AnalystNode(llm, "?").invoke(STATE)["findings"]) == ["AnalystNode"]
    assert AnalystNode(llm, "?", name="n").get_name() == "n"


def test_copies_that_send_starts_are_numbered(llm: ChatSwarmKV) -> None:
    """Else they would overwrite each other's findings."""
    config = listening(
        lambda event: None, langgraph_node="section", langgraph_path=("__pregel_push", 3, False)
    )
    assert list(AnalystNode(llm, "?").invoke(STATE, config)["findings"]) == ["section[3]"]


def test_an_output_key_takes_the_answer_as_it_is(llm: ChatSwarmKV) -> None:
    """Instead of `findings`."""
    assert AnalystNode(llm, "Why?", output_key="why").invoke(STATE) == {"why": "read: Why?"}


def test_max_tokens_of_the_node_come_before_the_models(llm: ChatSwarmKV) -> None:
    """Each analyst may be given its own length."""
    assert AnalystNode(llm, "?", max_tokens=4, output_key="x").invoke(STATE) == {"x": "read"}


@pytest.mark.parametrize("value", [0, 1.5, "8"])
@pytest.mark.parametrize("name", ["max_tokens", "max_fanout", "max_task_tokens"])
def test_what_is_no_number_from_one_on_is_refused(llm: ChatSwarmKV, name: str, value: Any) -> None:
    """When the node is made, with the name of the setting."""
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}"):
        AnalystNode(llm, "Why?", **options)


# -- the task ------------------------------------------------------------------------------------


class Topic(BaseModel):
    document: str
    topic: str


@pytest.mark.parametrize("state", [STATE, Topic(document=DOCUMENT, topic="hinges")])
@pytest.mark.parametrize(
    "task",
    [
        "What about {hinges}?".replace("{hinges}", "hinges"),
        PromptTemplate.from_template("What about {topic}?"),
        PromptTemplate.from_template("What about {topic}?", partial_variables={"topic": "hinges"}),
        ChatPromptTemplate.from_messages([("human", "What about {topic}?")]),
        lambda state: f"What about {state['topic'] if isinstance(state, dict) else state.topic}?",
    ],
)
def test_a_task_is_a_text_a_template_or_a_function(llm: ChatSwarmKV, task: Any, state: Any) -> None:
    """Templates and functions see the state, whatever it is made of."""
    answer = AnalystNode(llm, task, output_key="x").invoke(state)["x"]
    assert answer == "read: What about hinges?"


def test_braces_in_a_text_are_text(llm: ChatSwarmKV) -> None:
    """Only a template has variables."""
    assert AnalystNode(llm, "{topic}", output_key="x").invoke(STATE) == {"x": "read: {topic}"}


def test_a_variable_that_the_state_lacks_is_named(llm: ChatSwarmKV) -> None:
    """With the node, before anything is computed."""
    task = PromptTemplate.from_template("{topic} and {law}")
    with pytest.raises(PromptError, match=r"'law'"):
        AnalystNode(llm, task).invoke(STATE)
    assert llm.engine_statistics().num_prefill_tokens == 0


@pytest.mark.parametrize("returned", ["", " ", None, 7, ["a"]])
def test_a_task_function_must_return_text(llm: ChatSwarmKV, returned: Any) -> None:
    """Anything else would reach the model as its Python spelling."""
    with pytest.raises(PromptError, match="must return the task as text"):
        AnalystNode(llm, lambda state: returned).invoke(STATE)


@pytest.mark.parametrize("task", ["", " \n", None, 7, ["a"]])
def test_what_is_no_task_is_refused_when_the_node_is_made(llm: ChatSwarmKV, task: Any) -> None:
    """Not when the graph runs."""
    with pytest.raises(ConfigurationError, match="task is"):
        AnalystNode(llm, task)


def test_what_a_task_function_appends_to_its_state_no_sibling_sees(llm: ChatSwarmKV) -> None:
    """LangGraph gives all nodes of a step the very same lists (G5)."""

    def careless(state: dict[str, Any]) -> str:
        state["notes"].append("mine")
        return f"Heed {len(state['notes'])} notes."

    state = {**STATE, "notes": ["theirs"]}
    answer = AnalystNode(llm, careless, output_key="x").invoke(state)
    assert answer == {"x": "read: Heed 2 notes."}
    assert state["notes"] == ["theirs"]


@both
async def test_a_task_longer_than_declared_is_refused(llm: ChatSwarmKV, is_async: bool) -> None:
    """The budget was checked with what was declared."""
    task = PromptTemplate.from_template("{topic}")
    exact = len("user\nhinges") + len("<|>\n<|>assistant\n") - 4
    assert await run(AnalystNode(llm, task, max_task_tokens=exact), STATE, is_async=is_async)
    node = AnalystNode(llm, task, max_task_tokens=exact - 1)
    with pytest.raises(ContextBudgetError, match=f"max_task_tokens={exact - 1}") as caught:
        await run(node, STATE, is_async=is_async)
    assert caught.value.needed_tokens == exact


# -- the document --------------------------------------------------------------------------------


def reference(llm: ChatSwarmKV, text: str = DOCUMENT, **options: Any) -> dict[str, Any]:
    key = options.get("input_key", "document")
    return dict(DocumentNode(llm, **options).invoke({key: text})["document_ref"])


@both
async def test_it_computes_only_its_task(llm: ChatSwarmKV, is_async: bool) -> None:
    """And leaves nothing of its own in the cache."""
    state = {"document": DOCUMENT, "document_ref": reference(llm)}
    before = llm.engine_statistics()
    events: list[dict[str, Any]] = []
    await run(AnalystNode(llm, "Why?"), state, listening(events.append), is_async=is_async)
    (event,) = events
    after = llm.engine_statistics()
    assert event["type"] == "analyst"
    assert event["cached_tokens"] == state["document_ref"]["num_tokens"]
    assert event["computed_tokens"] == after.num_prefill_tokens - before.num_prefill_tokens
    assert event["prompt_tokens"] == event["cached_tokens"] + event["computed_tokens"]
    assert event["output_tokens"] == len("read: Why?")
    assert event["finish_reason"] == "stop"
    assert event["prefix_source"] == "resident"
    assert event["ttft_seconds"] >= event["queue_seconds"] >= 0
    assert after.cells_used == before.cells_used


def test_the_reference_alone_is_enough_in_the_process_that_made_it(llm: ChatSwarmKV) -> None:
    """`Send` often passes on no more than that."""
    state = {"document_ref": reference(llm)}
    assert AnalystNode(llm, "Why?", output_key="x").invoke(state) == {"x": "read: Why?"}


def test_the_text_is_found_under_the_key_that_the_reference_names(llm: ChatSwarmKV) -> None:
    """A document node with another input key needs no second setting at the analysts."""
    state = {
        "patent": DOCUMENT,
        "document": "something else",
        "document_ref": reference(llm, input_key="patent"),
    }
    assert AnalystNode(llm, "Why?", output_key="x").invoke(state) == {"x": "read: Why?"}
    other = AnalystNode(llm, "Why?", output_key="x", document_key="document")
    assert other.invoke(state) == {"x": "UNREAD: Why?"}


def test_instructions_come_from_the_reference(llm: ChatSwarmKV) -> None:
    """So the prompt is the prefix that was prefilled."""
    ref = reference(llm, instructions="Be brief.")
    events: list[dict[str, Any]] = []
    state = {"document": DOCUMENT, "document_ref": ref}
    AnalystNode(llm, "Why?").invoke(state, listening(events.append))
    assert events[0]["cached_tokens"] == ref["num_tokens"]


@both
async def test_a_text_that_was_changed_since_is_the_one_that_counts(
    llm: ChatSwarmKV, is_async: bool
) -> None:
    """Never the old document, and no failure."""
    state = {"document": f"{DOCUMENT} And a switch.", "document_ref": reference(llm)}
    events: list[dict[str, Any]] = []
    node = AnalystNode(llm, "Why?", output_key="x")
    assert await run(node, state, listening(events.append), is_async=is_async) == {
        "x": "read: Why?"
    }
    new = next(event for event in events if event["type"] == "document")
    assert new["cached_tokens"] > 0
    assert new["computed_tokens"] > 0
    prompt = next(event for event in events if event["type"] == "analyst")["prompt_tokens"]
    assert prompt > new["document_tokens"] > state["document_ref"]["num_tokens"]


@both
async def test_after_a_restart_the_first_analyst_rebuilds_the_document_for_all(
    is_async: bool,
) -> None:
    """From the text in the state; it stays in the cache for those after it."""
    with fake_llm(reply=echo_task) as first_life:
        state = {"document": DOCUMENT, "document_ref": reference(first_life)}
    with fake_llm(reply=echo_task, max_tokens=64) as model:
        events: list[dict[str, Any]] = []
        for task in ("Why?", "How?"):
            node = AnalystNode(model, task, output_key="x")
            config = listening(events.append)
            result = await run(node, state, config, is_async=is_async)
            assert result == {"x": f"read: {task}"}
        total = state["document_ref"]["num_tokens"]
        rebuilt = [event for event in events if event["type"] == "document"]
        assert [event["computed_tokens"] for event in rebuilt] == [total]
        answers = [event for event in events if event["type"] == "analyst"]
        assert [event["cached_tokens"] for event in answers] == [total, total]


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        ({}, "no DocumentRef under 'document_ref'"),
        ({"document": "", "document_ref": {}}, "no DocumentRef"),
        ({"document_ref": "stale"}, "has not prefilled"),
    ],
)
def test_without_a_document_it_says_what_to_do(llm: ChatSwarmKV, state: Any, seen: str) -> None:
    """It never answers without one."""
    if state.get("document_ref") == "stale":
        with fake_llm() as other:
            state = {"document_ref": reference(other)}
    config = listening(lambda event: None, langgraph_node="novelty")
    with pytest.raises(DocumentMissingError, match=rf"'novelty'.*{seen}.*Put the text"):
        AnalystNode(llm, "Why?").invoke(state, config)
    assert llm.engine_statistics().num_finished == 0


def test_a_document_that_is_no_text_is_refused(llm: ChatSwarmKV) -> None:
    """It would otherwise be read as its Python spelling."""
    with pytest.raises(PromptError, match=r"state\['document'\] is a list"):
        AnalystNode(llm, "Why?").invoke({"document": ["a"]})


def test_a_slice_of_the_document_is_enough_if_so_declared(llm: ChatSwarmKV) -> None:
    """`required_prefix_tokens` is passed on, and cut to what there is."""
    ref = reference(llm)
    state = {"document": DOCUMENT, "document_ref": ref}
    events: list[dict[str, Any]] = []
    for tokens in (300, 10_000):
        node = AnalystNode(llm, "Why?", required_prefix_tokens=tokens)
        node.invoke(state, listening(events.append))
    assert [event["cached_tokens"] for event in events] == [300, ref["num_tokens"]]


# -- cancelling ----------------------------------------------------------------------------------


async def test_cancelling_it_ends_its_branch_within_a_step() -> None:
    """The engine has nothing left to do, and its cells are free again."""
    reached, opened = threading.Event(), threading.Event()
    steps: list[int] = []

    def gate(batch: Batch) -> None:
        steps.append(len(batch))
        if len(steps) == 5:
            reached.set()
            assert opened.wait(60)

    with fake_llm(max_tokens=500, on_decode=gate, reply="x" * 500) as model:
        state = {"document": DOCUMENT}
        task = asyncio.ensure_future(AnalystNode(model, "Why?").ainvoke(state))
        await asyncio.to_thread(reached.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        opened.set()
        await asyncio.to_thread(wait_until, lambda: is_idle(model))
        assert len(steps) == 5
        assert model.engine is not None
        model.engine.check()
