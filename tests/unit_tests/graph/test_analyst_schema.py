"""`AnalystNode(schema=...)`: findings are objects, counted, checked and kept in checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.exceptions import OutputParserException
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START
from langgraph.graph.state import StateGraph
from langgraph.types import Send
from pydantic import BaseModel
from typing_extensions import TypedDict

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import (
    AnswerError,
    ConfigurationError,
    ContextBudgetError,
    TruncatedAnswerError,
)
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget import check_budget
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState, merge_findings
from tests.unit_tests.graph.support import DOCUMENT, fake_llm, fan_out, idle_llm


class Finding(BaseModel):
    """What an analyst finds."""

    summary: str
    pages: list[int] = []


class Noted(TypedDict):
    summary: str


class State(TypedDict):
    document: str
    document_ref: Any
    findings: Annotated[dict[str, Finding], merge_findings]


VALUE = {"summary": "A hinge.", "pages": [1, 2]}
JSON_SCHEMA = Finding.model_json_schema()
INPUT: Any = {"document": DOCUMENT}
THREAD: Any = {"configurable": {"thread_id": "1"}}


@pytest.fixture
def llm() -> Iterator[ChatSwarmKV]:
    with fake_llm(max_tokens=200, reply=json.dumps(VALUE), num_cells=8192) as model:
        yield model


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("schema", "expected"),
    [(Finding, Finding(**VALUE)), (JSON_SCHEMA, VALUE), (Noted, {"summary": "A hinge."})],
)
async def test_findings_are_objects(schema: Any, expected: Any, is_async: bool) -> None:
    """Of the class, or dicts; under a key of their own, too."""
    reply = json.dumps(VALUE if schema is not Noted else expected)
    with fake_llm(max_tokens=200, reply=reply) as model:
        app = fan_out(model, ("a", "b"), schema=schema).compile()
        found = await app.ainvoke(INPUT) if is_async else app.invoke(INPUT)
        assert found["findings"] == {"a": expected, "b": expected}
        node = AnalystNode(model, "?", output_key="why", schema=schema)
        assert node.invoke(INPUT) == {"why": expected}


def test_decoding_is_held_to_the_schema() -> None:
    """Whatever the model would like to say; the schema's text follows the document."""
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "No, thanks." + '"' * 20

    with fake_llm(max_tokens=200, reply=reply) as model:
        app = fan_out(model, ("a", "b"), schema=Finding).compile()
        told: list[Any] = [*app.stream(INPUT, stream_mode=["custom", "values"])]
    found = told[-1][1]["findings"]
    assert all(isinstance(finding, Finding) for finding in found.values())
    cached = [event["cached_tokens"] for _, event in told if event.get("type") == "analyst"]
    assert len(cached) == 2
    assert min(cached) > len(DOCUMENT)
    schema = json.dumps(JSON_SCHEMA)
    asked = [prompt for prompt in prompts if schema in prompt]
    assert len(asked) == 2
    assert all(prompt.index(DOCUMENT) < prompt.index(schema) for prompt in asked)


def test_copies_that_send_starts_have_their_own_objects(llm: ChatSwarmKV) -> None:
    """As texts are."""
    graph = StateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("section", AnalystNode(llm, "?", schema=Finding, max_fanout=3))
    graph.add_edge(START, "document")

    def start(state: SwarmState) -> list[Send]:
        return [Send("section", {"document_ref": state["document_ref"]}) for _ in range(3)]

    graph.add_conditional_edges("document", start, ["section"])
    assert graph.compile().invoke(INPUT)["findings"] == {
        f"section[{i}]": Finding(**VALUE) for i in range(3)
    }


def test_the_budget_counts_the_schema(llm: ChatSwarmKV) -> None:
    """Its numbers are those of the prompts that are sent."""
    graph = fan_out(llm, ("plain",))
    for name, schema in (("class", Finding), ("dict", JSON_SCHEMA)):
        graph.add_node(name, AnalystNode(llm, "Tell me about plain.", schema=schema))
        graph.add_edge("document", name)
    rows = check_budget(graph, document=DOCUMENT).rows
    sent = {
        event["node"]: event["prompt_tokens"]
        for event in graph.compile().stream(INPUT, stream_mode="custom")
        if event["type"] == "analyst"
    }
    counted = {row.node: (row.document_tokens or 0) + (row.task_tokens or 0) for row in rows}
    assert counted == sent
    assert sent["class"] == sent["dict"] > sent["plain"] + len(json.dumps(JSON_SCHEMA))


def test_max_task_tokens_counts_the_schema(llm: ChatSwarmKV) -> None:
    """Declared without it, the task is too long."""
    row = check_budget(fan_out(llm, ("a",), schema=Finding), document=DOCUMENT).rows[0]
    assert row.task_tokens is not None
    fits = AnalystNode(llm, "Tell me about a.", schema=Finding, max_task_tokens=row.task_tokens)
    assert list(fits.invoke(INPUT)["findings"].values()) == [Finding(**VALUE)]
    short = row.task_tokens - 1
    with pytest.raises(ContextBudgetError, match=f"max_task_tokens={short}"):
        AnalystNode(llm, "Tell me about a.", schema=Finding, max_task_tokens=short).invoke(INPUT)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_cut_object_names_its_analyst(llm: ChatSwarmKV, is_async: bool) -> None:
    """And the limit; nothing of it gets into the findings."""
    app = fan_out(llm, ("claims",), schema=Finding, max_tokens=20).compile(InMemorySaver())
    with pytest.raises(TruncatedAnswerError, match=r"Analyst 'claims'.* 20 tokens") as told:
        await app.ainvoke(INPUT, THREAD) if is_async else app.invoke(INPUT, THREAD)
    error = told.value
    assert isinstance(error, OutputParserException)
    assert error.facts == {
        "text": '{"summary": "A hinge',
        "num_output_tokens": 20,
        "node": "claims",
    }
    assert not app.get_state(THREAD).values.get("findings")


def test_an_object_that_its_class_refuses_names_its_analyst(llm: ChatSwarmKV) -> None:
    """Validators may know more than a schema says."""

    class Strict(Finding):
        def model_post_init(self, context: Any) -> None:
            raise ValueError("no hinges")

    with pytest.raises(AnswerError, match=r"(?s)Analyst 'claims': .*no hinges"):
        AnalystNode(llm, "?", name="claims", schema=Strict).invoke(
            INPUT, {"metadata": {"langgraph_node": "claims"}}
        )


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (int, "int makes no JSON schema"),
        ("text", "no JSON schema"),
        ({"type": "object", "not": {}}, "not"),
        ({"type": "string", "format": "hostname"}, "hostname"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_when_the_node_is_made(
    schema: Any, reason: str
) -> None:
    """No model is loaded for that."""
    with pytest.raises(ConfigurationError, match=reason):
        AnalystNode(idle_llm(), "?", schema=schema)


@contextmanager
def savers(kind: str, directory: Path, serializer: JsonPlusSerializer) -> Iterator[Any]:
    if kind == "memory":
        yield InMemorySaver(serde=serializer)
    else:
        with SqliteSaver.from_conn_string(str(directory / "checkpoints.sqlite")) as saver:
            saver.serde = serializer
            yield saver


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize(
    ("schema", "modules", "expected"),
    [(Finding, [Finding], Finding(**VALUE)), (JSON_SCHEMA, [], VALUE)],
)
def test_objects_come_back_from_checkpoints(
    kind: str,
    schema: Any,
    modules: Any,
    expected: Any,
    llm: ChatSwarmKV,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of classes that the saver was told of, without a warning; dicts in any case (G2)."""
    serializer = JsonPlusSerializer(allowed_msgpack_modules=modules)
    with savers(kind, tmp_path, serializer) as saver, caplog.at_level(logging.WARNING):
        graph = fan_out(llm, ("a",), graph=StateGraph(State), schema=schema)
        graph.compile(saver).invoke(INPUT, THREAD)
        again = fan_out(llm, ("a",), graph=StateGraph(State), schema=schema).compile(saver)
        assert again.get_state(THREAD).values["findings"] == {"a": expected}
    assert not caplog.records
