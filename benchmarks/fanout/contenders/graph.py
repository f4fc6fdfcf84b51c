"""The whole graph: a document node, an analyst for each branch, one graph run for each document."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from langgraph.graph import END, START, StateGraph

from langchain_swarmkv import AnalystNode, ChatSwarmKV, DocumentNode, SwarmState, SwarmStateGraph

from ..case import Document
from ..swarm import SwarmContender

__all__ = ["Graph"]


class Graph(SwarmContender):
    """`ainvoke` of a compiled graph; the graphs of several documents run together.

    A cold case has no document node: its analysts come at once, each with the whole text.
    """

    name = "graph"

    def prepare(self) -> None:
        """An empty cache, and graphs that have not run."""
        super().prepare()
        self._llm = ChatSwarmKV(
            engine=self.engine, max_tokens=self.case.max_tokens, ignore_eos=True
        )
        self._graphs = [self._graph(document) for document in self.case.documents]

    def _graph(self, document: Document) -> Any:
        if self.case.is_cold:
            cold = StateGraph(SwarmState)
            self._add_analysts(cold, document, after=START)
            return cold.compile()
        graph = SwarmStateGraph(SwarmState)
        graph.add_node("document", DocumentNode(self._llm, instructions=document.instructions))
        graph.add_edge(START, "document")
        self._add_analysts(graph, document, after="document")
        return graph.compile(document=document.text, allow_waves=True)

    def _add_analysts(self, graph: StateGraph[Any], document: Document, after: str) -> None:
        for number, task in enumerate(document.tasks, start=1):
            name = f"analyst_{number}"
            graph.add_node(name, AnalystNode(self._llm, task, max_tokens=self.case.max_tokens))
            graph.add_edge(after, name)
            graph.add_edge(name, END)

    def _ask(self) -> float:
        return asyncio.run(self._answer())

    async def _answer(self) -> float:
        started = time.perf_counter()
        await asyncio.gather(
            *(
                graph.ainvoke({"document": document.text})
                for graph, document in zip(self._graphs, self.case.documents, strict=True)
            )
        )
        return time.perf_counter() - started
