"""The whole application: one document node, six analysts, one report.

    START -> document -> novelty ------------> report -> END
                      -> claim_mapping ------>
                      -> ...

The document is prefilled once. Each analyst forks its KV cache and asks its own question; all of
them decode together, in one batch.
"""

from __future__ import annotations

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
"""What each analyst is asked; the key is the name of its node."""


class PatentState(SwarmState):
    """The document, the findings of the analysts, and the report made from them."""

    report: str


def build_graph(llm: ChatSwarmKV) -> SwarmStateGraph[PatentState]:
    """Draw the graph; `compile(document=text)` checks that text and answers fit the context."""
    graph = SwarmStateGraph(PatentState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_edge(START, "document")
    for name, task in TASKS.items():
        graph.add_node(name, AnalystNode(llm, task))
        graph.add_edge("document", name)
    graph.add_node("report", write_report)
    graph.add_edge(list(TASKS), "report")
    graph.add_edge("report", END)
    return graph


def write_report(state: PatentState) -> dict[str, str]:
    """Join the findings, in the order of the tasks, into one Markdown text."""
    findings = state["findings"]
    sections = [f"## {title(name)}\n\n{findings[name].strip()}" for name in TASKS]
    return {"report": "\n\n".join(["# Patent analysis", *sections]) + "\n"}


def title(name: str) -> str:
    """An analyst's name as a heading: `prior_art_queries` becomes `Prior art queries`."""
    return name.replace("_", " ").capitalize()
