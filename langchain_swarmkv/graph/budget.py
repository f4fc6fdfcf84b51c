"""Whether a graph fits its context, known before anything is loaded.

    positions  document + task + max_tokens <= n_ctx_train (and n_ctx), for each branch
    cells      documents + sum over branches that can run at once (task + max_tokens) <= n_ctx
    sequences  documents + branches that can run at once <= max_sequences

A document in the pool is counted once, however many branches fork it; the few tokens that open the
turn behind it are counted for each branch. What can only be known when
the graph runs counts as nothing, so a graph that is refused cannot fit whatever that turns out to
be; and it is listed in the report, so that nothing passes silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import ConfigurationError, PromptError
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget_report import (
    AnalystBudget,
    BudgetReport,
    BudgetWarning,
    PoolBudget,
)
from langchain_swarmkv.graph.counting import (
    DocumentSize,
    PoolLimits,
    Prefix,
    PrefixCounter,
    pool_key,
    pool_limits,
    read_tokens,
)
from langchain_swarmkv.graph.cycles import find_cycles, recursion_limit
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.edges import Graph
from langchain_swarmkv.graph.node_run import described
from langchain_swarmkv.graph.structure import check_structure
from langchain_swarmkv.graph.topology import CompiledGraph, Member, Topology, read_topology
from langchain_swarmkv.prompts.document import (
    DEFAULT_INSTRUCTIONS,
    DocumentContent,
    document_text,
)

__all__ = ["BudgetReport", "BudgetWarning", "check_budget"]


def check_budget(
    graph: Graph | CompiledGraph,
    *,
    document: DocumentContent | Mapping[str, DocumentContent] | None = None,
    document_tokens: int | Mapping[str, int] | None = None,
    max_turns: int | None = None,
    allow_waves: bool = False,
) -> BudgetReport:
    """Check a graph's structure and count what its steps need at most.

    Without `document` and `document_tokens` no file is opened; the structure is checked and the
    numbers are reported as unknown.

    Args:
        graph: a `StateGraph` or a compiled one; subgraphs are looked into.
        document: the document's text, a `Document` or a list of them, as in the state; a mapping
            by `input_key` where the graph has several documents.
        document_tokens: instead of the text, how many tokens it has (or is expected to have).
        max_turns: how often cycles with analysts may run. The budget does not depend on it;
            `SwarmStateGraph.compile` makes the run keep to it.
        allow_waves: accept that branches which do not all fit at once wait for each other.

    Raises:
        GraphError: the graph cannot work as it is drawn; see `structure`.
        PromptError: the document is empty.
        ModelError: the model file cannot be read, where tokens are counted.
    """
    size = _document_size(document, document_tokens)
    if max_turns is not None and max_turns < 1:
        raise ConfigurationError(f"max_turns={max_turns} must be at least 1.")
    topology = read_topology(graph)
    check_structure(topology, max_turns=max_turns)
    return _Budget(topology, size, allow_waves).report(_recursion_limit(topology, max_turns))


def _document_size(
    document: DocumentContent | Mapping[str, DocumentContent] | None,
    document_tokens: int | Mapping[str, int] | None,
) -> DocumentSize:
    if document is not None and document_tokens is not None:
        raise ConfigurationError("Give document or document_tokens, not both.")
    texts = (
        {key: _given_text(one) for key, one in document.items()}
        if isinstance(document, Mapping)
        else _given_text(document)
    )
    numbers = (
        document_tokens.values() if isinstance(document_tokens, Mapping) else [document_tokens]
    )
    for number in numbers:
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ConfigurationError(
                f"document_tokens={document_tokens!r} must be a whole number, at least 1."
            )
    return DocumentSize(texts, document_tokens)


def _given_text(document: DocumentContent | None) -> str | None:
    if document is None:
        return None
    text = "" if document == [] else document_text(document)
    if text is None:
        raise ConfigurationError(
            f"document is {described(document)}; give its text, a Document or a list of them."
        )
    if not text.strip():
        raise PromptError("The document is empty; there is nothing to analyse.")
    return text


def _recursion_limit(topology: Topology, max_turns: int | None) -> int | None:
    if max_turns is None or not any(find_cycles(level) for level in topology.root):
        return None
    return recursion_limit(topology.root, max_turns)


class _Pool:
    """One engine, and what our nodes need of it, by path."""

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self.rows: dict[str, AnalystBudget] = {}
        self.prefixes: dict[str, Prefix] = {}
        self.pinned: list[Prefix] = []


class _Budget:
    def __init__(self, topology: Topology, size: DocumentSize, allow_waves: bool) -> None:
        self._topology = topology
        self._size = size
        self._allow_waves = allow_waves
        self._counters: dict[int, PrefixCounter] = {}
        self._pools: dict[object, _Pool] = {}

    def report(self, limit: int | None) -> BudgetReport:
        rows = tuple(map(self._add_analyst, self._topology.analysts))
        for member in self._topology.documents:
            self._add_document(member)
        return BudgetReport(
            rows=rows,
            pools=tuple(map(self._pool_budget, self._pools.values())),
            unknown=tuple(self._unknown(rows)),
            remarks=self._topology.remarks,
            recursion_limit=limit,
        )

    def _pool(self, llm: ChatSwarmKV) -> _Pool:
        key = pool_key(llm)
        if key not in self._pools:
            self._pools[key] = _Pool(pool_limits(llm, read_file=self._size.is_given))
        return self._pools[key]

    def _counter(self, llm: ChatSwarmKV) -> PrefixCounter:
        return self._counters.setdefault(id(llm), PrefixCounter(llm, self._size))

    def _add_document(self, member: Member) -> None:
        node = member.node
        assert isinstance(node, DocumentNode)
        prefix = self._counter(node.llm).prefix(node.input_key, node.instructions, node.llm)
        pool = self._pool(node.llm)
        pool.prefixes[member.path] = prefix
        if node.pin:
            pool.pinned.append(prefix)

    def _add_analyst(self, member: Member) -> AnalystBudget:
        node = member.node
        assert isinstance(node, AnalystNode)
        pool, counter = self._pool(node.llm), self._counter(node.llm)
        prefix = max(self._candidates(member, node, counter), key=lambda p: p.num_tokens or 0)
        pool.prefixes[member.path] = prefix
        pool.rows[member.path] = row = AnalystBudget(
            node=member.path,
            document_tokens=read_tokens(node, prefix),
            overhead_tokens=prefix.overhead_tokens,
            task_tokens=counter.task_tokens(node, prefix),
            max_tokens=node.llm.max_tokens if node.max_tokens is None else node.max_tokens,
            fanout=node.max_fanout or (None if member.is_sent else 1),
            n_ctx=pool.limits.n_ctx,
            n_ctx_train=pool.limits.n_ctx_train,
        )
        return row

    def _candidates(
        self, member: Member, node: AnalystNode, counter: PrefixCounter
    ) -> Iterator[Prefix]:
        """The shared parts that the analyst may be given, one for each document node."""
        for document in self._topology.documents_of(member):
            source = document.node
            assert isinstance(source, DocumentNode)
            yield counter.prefix(
                node.document_key or source.input_key,
                source.instructions if source.output_key == node.ref_key else DEFAULT_INSTRUCTIONS,
                source.llm,
            )

    def _pool_budget(self, pool: _Pool) -> PoolBudget:
        steps = [_Step(pool, paths) for paths in self._topology.steps]
        fullest = max(steps, key=lambda step: step.load)
        return PoolBudget(
            model=pool.limits.model,
            n_ctx=pool.limits.n_ctx,
            max_sequences=pool.limits.max_sequences,
            branches=tuple(fullest.branches.values()),
            document_tokens=fullest.document_tokens,
            num_documents=len(fullest.documents),
            largest_alone_cells=max(step.largest_alone_cells for step in steps),
            waves=max(step.waves for step in steps),
            is_known=all(step.is_known for step in steps),
            allow_waves=self._allow_waves,
        )

    def _unknown(self, rows: Iterable[AnalystBudget]) -> Iterator[str]:
        yield from self._topology.notes
        keys = {
            p.input_key
            for pool in self._pools.values()
            for p in pool.prefixes.values()
            if p.num_tokens is None
        }
        if keys:
            yield (
                f"How long the document under {', '.join(map(repr, sorted(keys)))} is. To have it "
                "checked, give document= or document_tokens=."
            )
        for member in self._topology.documents:
            if member.is_sent:
                yield f"How many copies of {member.path!r} a Send starts, each with a document."
        for row in rows:
            if row.fanout is None:
                yield (
                    f"How many copies of {row.node!r} a Send starts at once. To have it checked, "
                    "declare max_fanout= on the AnalystNode."
                )
            if row.task_tokens is None and self._size.is_given:
                yield (
                    f"How long the task of {row.node!r} is, as it depends on the state. To have "
                    "it checked, declare max_task_tokens= on the AnalystNode."
                )


class _Step:
    """What one superstep needs of one pool."""

    def __init__(self, pool: _Pool, paths: frozenset[str]) -> None:
        self._pool = pool
        self._prefixes = {path: p for path, p in pool.prefixes.items() if path in paths}
        self.branches = {path: row for path, row in pool.rows.items() if path in paths}
        self.documents = {
            prefix.key: prefix.num_tokens or 0
            for prefix in (*pool.pinned, *self._prefixes.values())
        }
        self.document_tokens = sum(self.documents.values())

    @property
    def is_known(self) -> bool:
        return all(p.num_tokens is not None for p in self._prefixes.values()) and not any(
            row.task_tokens is None or row.fanout is None for row in self.branches.values()
        )

    @property
    def load(self) -> float:
        """The larger of the shares of cells and of sequences that are needed."""
        rows = self.branches.values()
        cells = self.document_tokens + sum(row.num_copies * row.branch_tokens for row in rows)
        sequences = len(self.documents) + sum(row.num_copies for row in rows)
        limits = self._pool.limits
        return max(cells / limits.n_ctx, sequences / limits.max_sequences)

    @property
    def largest_alone_cells(self) -> int:
        """The most that a branch needs with what it reads, and with those that are pinned."""
        pinned = {prefix.key: prefix.num_tokens or 0 for prefix in self._pool.pinned}
        alone = [sum(pinned.values())]
        for path, prefix in self._prefixes.items():
            row = self.branches.get(path)
            read = row.document_tokens if row else prefix.num_tokens
            documents = {prefix.key: read or 0, **pinned}
            alone.append(sum(documents.values()) + (row.branch_tokens if row else 0))
        return max(alone)

    @property
    def waves(self) -> int:
        """Turns that the branches take if each turn is filled in order."""
        limits = self._pool.limits
        room = limits.n_ctx - self.document_tokens
        lanes = limits.max_sequences - len(self.documents)
        turns = used = running = 0
        for row in self.branches.values():
            for _ in range(row.num_copies):
                if not turns or used + row.branch_tokens > room or running == lanes:
                    turns, used, running = turns + 1, 0, 0
                used, running = used + row.branch_tokens, running + 1
        return turns
