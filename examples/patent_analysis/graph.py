"""The whole application: one document node, six analysts, one report.

    START -> document -> novelty ------------> report -> END
                      -> claim_mapping ------>
                      -> ...

The document is prefilled once. Each analyst forks its KV cache and asks its own question; all of
them decode together, in one batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langgraph.graph import END, START

from langchain_swarmkv import AnalystNode, ChatSwarmKV, DocumentNode, SwarmState, SwarmStateGraph

TASKS = {
    "novelty": (
        "Name the three features of this invention that are most likely new. For each, quote the "
        "words of the disclosure that describe it and say what earlier devices do instead."
    ),
    "claim_mapping": (
        "Go through the claims in order. For each claim, name the paragraph of the detailed "
        "description that supports it, and say so plainly where support is missing."
    ),
    "prior_art_queries": (
        "Write five search queries for a patent database that would find the closest prior art. "
        "Use synonyms and truncation, one query on each line, the most promising first."
    ),
    "freedom_to_operate": (
        "List the components that a product made from this disclosure would contain and that "
        "others may have patented. Rank them by risk and suggest one way around each."
    ),
    "ethics": (
        "Which ethical questions does this invention raise for the people it watches? Consider "
        "consent, privacy, false alarms and misuse, and what the design already does about each."
    ),
    "european_summary": (
        "Summarise this invention for an examiner at the European Patent Office: technical field, "
        "problem, solution, technical effect. Say whether Article 53(c) EPC could exclude a claim."
    ),
}
"""What each analyst is asked; the key is the name of its node. For models of a billion parameters
and more."""


@dataclass(frozen=True)
class HeldTask:
    """A task whose answer begins with given words and is held to a form while it is written."""

    task: str
    opening: str
    num_sentences: int = 1
    num_bullets: int = 0
    """Instead of sentences, a list."""

    @property
    def guide(self) -> str:
        """The form as a grammar of llguidance."""
        if self.num_bullets:
            first = json.dumps(f"- {self.opening}")
            parts = [first, "bullet", *['"\\n- " bullet'] * (self.num_bullets - 1)]
        else:
            parts = [json.dumps(self.opening), "rest", *['" " sentence'] * (self.num_sentences - 1)]
        return "\n".join(
            [
                "start: " + " ".join(parts),
                r"rest: /[^\n.;]{30,260}\./",
                r"sentence: /[A-Z][^\n.;]{30,220}\./",
                r"bullet: /[A-Z][A-Za-z' -]{12,90}\./",
            ]
        )


SMALL_MODEL_TASKS = {
    "summary": HeldTask("Summarise the invention.", "The invention relates to ", 2),
    "novelty": HeldTask("What is new about this invention?", "What is new is that "),
    "problem": HeldTask("Which problem does the invention solve?", "Earlier devices "),
    "claimed_system": HeldTask("What does the system comprise?", "The system comprises "),
    "advantages": HeldTask("List two advantages over earlier devices.", "", num_bullets=2),
    "users": HeldTask("Who would use this invention?", "It is used by "),
}
"""What a model of 135 million parameters can do: go on from words that patents use, and no more."""

SMALL_MODEL_SAMPLING = {"repeat_penalty": 1.05, "penalty_window_tokens": 128}
"""Keeps it from running in a loop."""

Tasks = Mapping[str, str | HeldTask]


class PatentState(SwarmState):
    """The document, the findings of the analysts, and the report made from them."""

    report: str


def build_graph(llm: ChatSwarmKV, tasks: Tasks = TASKS) -> SwarmStateGraph[PatentState]:
    """Draw the graph; `compile(document=text)` checks that text and answers fit the context."""

    def write_report(state: PatentState) -> dict[str, str]:
        """Join the findings, in the order of the tasks, into one Markdown text."""
        findings = state["findings"]
        sections = [f"## {title(name)}\n\n{findings[name].strip()}" for name in tasks]
        return {"report": "\n\n".join(["# Patent analysis", *sections]) + "\n"}

    graph = SwarmStateGraph(PatentState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_edge(START, "document")
    for name, task in tasks.items():
        graph.add_node(name, _analyst(llm, task))
        graph.add_edge("document", name)
    graph.add_node("report", write_report)
    graph.add_edge(list(tasks), "report")
    graph.add_edge("report", END)
    return graph


def _analyst(llm: ChatSwarmKV, task: str | HeldTask) -> AnalystNode:
    if isinstance(task, str):
        return AnalystNode(llm, task)
    options: dict[str, Any] = {**SMALL_MODEL_SAMPLING, "guide": task.guide}
    return AnalystNode(llm.bind(**options), task.task)


def title(name: str) -> str:
    """An analyst's name as a heading: `prior_art_queries` becomes `Prior art queries`."""
    return name.replace("_", " ").capitalize()
