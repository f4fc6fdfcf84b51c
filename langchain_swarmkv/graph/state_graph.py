"""A `StateGraph` whose `compile` checks the context budget."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.runnables.config import RunnableConfig, merge_configs
from langgraph.graph.state import CompiledStateGraph, StateGraph
from langgraph.types import Checkpointer
from langgraph.typing import ContextT, InputT, OutputT, StateT
from typing_extensions import Self

from langchain_swarmkv.graph.budget import BudgetReport, BudgetWarning, check_budget
from langchain_swarmkv.graph.budget_report import GraphWarning
from langchain_swarmkv.prompts.document import DocumentContent

__all__ = ["CompiledSwarmGraph", "SwarmStateGraph"]


class CompiledSwarmGraph(CompiledStateGraph[StateT, ContextT, InputT, OutputT]):
    """A compiled graph that knows its budget."""

    budget_report: BudgetReport

    def copy(self, update: dict[str, Any] | None = None) -> Self:
        """See `Pregel.copy`; `with_config` calls it."""
        copied = super().copy(update)
        copied.budget_report = self.budget_report
        return copied


class SwarmStateGraph(StateGraph[StateT, ContextT, InputT, OutputT]):
    """A `StateGraph` that is refused at compile time if its context cannot hold it.

    Everything else is `StateGraph`'s. The check itself is `check_budget`, which works on any graph;
    see there for what is refused. A subgraph without a `DocumentNode` of its own is best a plain
    `StateGraph`: the check of its parent looks inside.
    """

    _check: Mapping[str, Any] = {}
    _report: BudgetReport

    def validate(self, interrupt: Sequence[str] | None = None) -> Self:
        """LangGraph's own validation, then the budget.

        Raises:
            GraphError: the graph cannot work as it is drawn.
            ContextBudgetError: it cannot fit.
        """
        super().validate(interrupt)
        self._report = check_budget(self, **self._check)
        self._report.raise_if_over()
        return self

    def compile(
        self,
        checkpointer: Checkpointer = None,
        *,
        document: DocumentContent | Mapping[str, DocumentContent] | None = None,
        document_tokens: int | Mapping[str, int] | None = None,
        max_turns: int | None = None,
        allow_waves: bool = False,
        **options: Any,
    ) -> CompiledSwarmGraph[StateT, ContextT, InputT, OutputT]:
        """Check the graph, then compile it.

        Args:
            checkpointer: as in `StateGraph.compile`.
            document: the document's text, a `Document` or a list of them, to be counted now; a
                mapping by `input_key` where the graph has several documents.
            document_tokens: instead of the text, how many tokens it has.
            max_turns: how often the graph's cycles may run. It becomes the `recursion_limit` of the
                compiled graph, in supersteps: a run that wants another turn ends with LangGraph's
                `GraphRecursionError`. A `recursion_limit` given to `invoke` takes its place.
            allow_waves: accept that branches which do not all fit at once wait for each other.
            **options: all other arguments of `StateGraph.compile`.

        Returns:
            The compiled graph, with the report as `budget_report`.

        Raises:
            GraphError: the graph cannot work as it is drawn.
            ContextBudgetError: it cannot fit; the message says by how much, and what would.

        Warns:
            BudgetWarning: part of the budget is known only at run time.
            GraphWarning: a list of `Send`s may be empty, and what follows them would not run.
        """
        self._check = {
            "document": document,
            "document_tokens": document_tokens,
            "max_turns": max_turns,
            "allow_waves": allow_waves,
        }
        compiled = super().compile(checkpointer, **options)
        # NOTE: what LangGraph made is kept as it is; the subclass adds an attribute and no state
        # that __init__ would set up.
        compiled.__class__ = CompiledSwarmGraph
        assert isinstance(compiled, CompiledSwarmGraph)
        compiled.budget_report = self._report
        if self._report.recursion_limit is not None:
            # In place and not through with_config, whose copy loses LangGraph's output mappers.
            limit = RunnableConfig(recursion_limit=self._report.recursion_limit)
            compiled.config = merge_configs(compiled.config, limit)
        if self._report.unknown:
            warnings.warn(BudgetWarning(_unknown(self._report)), stacklevel=2)
        for remark in self._report.remarks:
            warnings.warn(GraphWarning(remark), stacklevel=2)
        return compiled


def _unknown(report: BudgetReport) -> str:
    return "The budget is checked in part at run time. Not known: " + " ".join(report.unknown)
