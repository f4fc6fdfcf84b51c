"""Where our nodes stand in a graph, which documents reach them and which can run at once.

LangGraph runs in supersteps: all nodes whose edges were taken run together, and the next step
starts when they are done. `supersteps` replays that from the edges alone, with every conditional
edge leading to all its targets at once, until a step comes round again. A subgraph runs as a whole
inside one step of its parent, so any of its own steps may coincide with the parent's other nodes.

Only nodes that LangGraph still shows as ours are seen: `DocumentNode` and `AnalystNode` objects,
their bound methods, bindings (`with_retry`, `with_config`) and sequences of them. One that is
called from inside a lambda, a partial or a function of the user's is invisible here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langgraph.graph import START
from langgraph.graph.state import CompiledStateGraph, StateGraph

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.edges import Edges, Graph, reachable, read_edges

__all__ = ["Level", "Member", "Topology", "read_topology", "supersteps"]

_MAX_COMBINATIONS = 4096
"""More ways for parallel subgraphs to coincide than this are not told apart; see `_steps`."""

CompiledGraph = CompiledStateGraph[Any, Any, Any, Any]


@dataclass(frozen=True)
class Member:
    """One node of ours, at its place in the graph."""

    path: str
    """The node's name, with the names of the subgraphs around it: "review:novelty"."""
    node: DocumentNode | AnalystNode
    is_bare: bool
    """Whether the graph's node returns what ours returns (nothing was piped behind it)."""
    is_sent: bool
    """Whether a `Send` can start any number of copies, of it or of a subgraph around it."""


@dataclass(frozen=True)
class Level:
    """One `StateGraph`: the whole graph, or a subgraph."""

    path: str
    """Empty, or the subgraph's path and a colon."""
    builder: Graph
    edges: Edges
    members: Mapping[str, tuple[Member, ...]]
    """Our nodes by the name of the graph's node; only names that have some."""
    subgraphs: Mapping[str, Level]

    def __iter__(self) -> Iterator[Level]:
        """This level and all below."""
        yield self
        for subgraph in self.subgraphs.values():
            yield from subgraph

    def inside(self, name: str) -> Iterator[Member]:
        """Our nodes at or inside the graph's node `name`."""
        yield from self.members.get(name, ())
        if name in self.subgraphs:
            for level in self.subgraphs[name]:
                yield from itertools.chain.from_iterable(level.members.values())


@dataclass(frozen=True)
class Topology:
    """What can be known of a graph before it runs."""

    root: Level
    documents: tuple[Member, ...]
    analysts: tuple[Member, ...]
    reached_by: Mapping[str, tuple[Member, ...]]
    """Document nodes that can run before an analyst, by the analyst's path."""
    steps: tuple[frozenset[str], ...]
    """Sets of paths of our nodes that can run at once; none of them contains another."""
    notes: tuple[str, ...]
    """What cannot be known, and how to make it known."""
    remarks: tuple[str, ...]
    """What may surprise when the graph runs, and what to do."""

    def documents_of(self, analyst: Member) -> tuple[Member, ...]:
        """Document nodes that prefill what an analyst reads.

        They run before it; or beside it, if it waits for a part of the document only.
        """
        assert isinstance(analyst.node, AnalystNode)
        found = list(self.reached_by[analyst.path])
        if analyst.node.required_prefix_tokens is not None:
            beside = {path for step in self.steps if analyst.path in step for path in step}
            found += [d for d in self.documents if d.path in beside and d not in found]
        return tuple(d for d in found if _serves(d.node, analyst.node))


def _serves(document: DocumentNode | AnalystNode, analyst: AnalystNode) -> bool:
    assert isinstance(document, DocumentNode)
    return analyst.ref_key == document.output_key or analyst.document_key == document.input_key


def read_topology(graph: Graph | CompiledGraph) -> Topology:
    """Read a `StateGraph` or a compiled one, subgraphs included.

    Raises:
        ConfigurationError: it is neither.
    """
    builder = graph.builder if isinstance(graph, CompiledStateGraph) else graph
    if not isinstance(builder, StateGraph):
        raise ConfigurationError(
            f"{graph!r} is no StateGraph and no compiled one, so its nodes cannot be seen."
        )
    root = _read_level(builder, path="", is_sent=False)
    members = [m for level in root for group in level.members.values() for m in group]
    return Topology(
        root=root,
        documents=tuple(m for m in members if isinstance(m.node, DocumentNode)),
        analysts=tuple(m for m in members if isinstance(m.node, AnalystNode)),
        reached_by=dict(_reached_by(root, frozenset())),
        steps=tuple(frozenset(member.path for member in step) for step in _maximal(_steps(root))),
        notes=tuple(
            f"{note} (In subgraph {level.path[:-1]!r}.)" if level.path else note
            for level in root
            for note in level.edges.notes
        ),
        remarks=tuple(remark for level in root for remark in _empty_sends(level)),
    )


def _empty_sends(level: Level) -> Iterator[str]:
    for send_list in level.edges.send_lists:
        missed = level.edges.only_after(send_list)
        if missed:
            yield (
                f"If {send_list.function!r}, after {level.path + send_list.source!r}, returns an "
                f"empty list of Sends, nothing of {_listed(level, send_list.ends)} runs, and "
                f"neither does {_listed(level, missed)}: the graph ends there without a word. "
                f"Have it return {missed[0]!r} (or END) for that case, and add that to the path "
                "map of add_conditional_edges, or to the destinations of the Command."
            )


def _listed(level: Level, names: Iterable[str]) -> str:
    return ", ".join(repr(level.path + name) for name in names)


# -- reading -------------------------------------------------------------------------------------


def _read_level(builder: Graph, path: str, is_sent: bool) -> Level:
    edges = read_edges(builder)
    members: dict[str, tuple[Member, ...]] = {}
    subgraphs: dict[str, Level] = {}
    for name, spec in builder.nodes.items():
        parts = list(_parts(spec.runnable))
        sent = is_sent or name in edges.sent
        ours = [part for part in parts if isinstance(part, DocumentNode | AnalystNode)]
        if ours:
            bare = len(parts) == 1
            members[name] = tuple(Member(path + name, node, bare, sent) for node in ours)
        for part in parts:
            if isinstance(part, CompiledStateGraph):
                subgraphs[name] = _read_level(part.builder, f"{path}{name}:", sent)
    return Level(path, builder, edges, members, subgraphs)


def _parts(runnable: object) -> Iterator[object]:
    """What a node runs, one after the other, unwrapped as far as LangChain lets us see."""
    if isinstance(runnable, RunnableBindingBase):
        yield from _parts(runnable.bound)
    elif isinstance(runnable, RunnableSequence):
        for step in runnable.steps:
            yield from _parts(step)
    else:
        function = getattr(runnable, "func", None) or getattr(runnable, "afunc", None)
        owner = getattr(function, "__self__", None)
        yield owner if isinstance(owner, DocumentNode | AnalystNode) else runnable


# -- who comes before whom -----------------------------------------------------------------------


def _reached_by(
    level: Level, from_outside: frozenset[Member]
) -> Iterator[tuple[str, tuple[Member, ...]]]:
    before: dict[str, set[str]] = {name: set() for name in level.builder.nodes}
    for source in level.builder.nodes:
        for target in reachable(source, level.edges.possible):
            before[target].add(source)
    for name in level.builder.nodes:
        documents = from_outside.union(
            member
            for source in before[name]
            for member in level.inside(source)
            if isinstance(member.node, DocumentNode)
        )
        if name in level.subgraphs:
            yield from _reached_by(level.subgraphs[name], documents)
        own = {m for m in level.members.get(name, ()) if isinstance(m.node, DocumentNode)}
        for member in level.members.get(name, ()):
            if isinstance(member.node, AnalystNode):
                yield member.path, tuple(sorted(documents | own, key=lambda m: m.path))


# -- who runs at once ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    running: frozenset[str]
    arrived: frozenset[tuple[int, str]] = field(default=frozenset())
    """(join, source): sources of a join that have run since it was last taken."""
    held: frozenset[str] = field(default=frozenset())
    """Deferred nodes whose turn has come."""


def supersteps(
    edges: Edges, first: Iterable[str], *, certain_only: bool = False
) -> list[frozenset[str]]:
    """The sets of nodes that run in each superstep, from `first` until one comes round again.

    Args:
        edges: the graph's edges.
        first: what runs in the first step; `[START]` for the whole graph.
        certain_only: take only edges that are always taken.
    """
    steps: dict[_State, frozenset[str]] = {}
    state = _State(frozenset(first))
    while state.running and state not in steps:
        steps[state] = state.running
        state = _advance(edges, state, certain_only)
    return list(steps.values())


def _advance(edges: Edges, state: _State, certain_only: bool) -> _State:
    triggered = set(state.held)
    for node in state.running:
        triggered.update(edges.plain.get(node, ()))
        if not certain_only:
            triggered.update(edges.choices.get(node, ()))
            triggered.update(edges.guesses.get(node, ()))
            triggered.update(edges.handlers.get(node, ()))
    arrived = set(state.arrived)
    for number, (sources, target) in enumerate(edges.joins):
        arrived.update((number, source) for source in sources if source in state.running)
        if all((number, source) in arrived for source in sources):
            triggered.add(target)
            arrived.difference_update((number, source) for source in sources)
    now = frozenset(triggered - edges.deferred)
    held = frozenset(triggered & edges.deferred)
    if not now:
        now, held = held, frozenset()
    return _State(now, frozenset(arrived), held)


def _steps(level: Level) -> list[frozenset[Member]]:
    found: list[frozenset[Member]] = []
    for running in dict.fromkeys(supersteps(level.edges, [START])):
        plain = frozenset(m for name in running for m in level.members.get(name, ()))
        nested = [
            _maximal(_steps(level.subgraphs[name])) for name in running if name in level.subgraphs
        ]
        # Too many ways to coincide: count all members of each subgraph, which is never too few.
        if math.prod(map(len, nested)) > _MAX_COMBINATIONS:
            nested = [[frozenset().union(*steps)] for steps in nested]
        found.extend(plain.union(*steps) for steps in itertools.product(*nested))
    return found


def _maximal(steps: Iterable[frozenset[Member]]) -> list[frozenset[Member]]:
    """The steps that no other step contains."""
    distinct = list(dict.fromkeys(steps))
    return [step for step in distinct if not any(step < other for other in distinct)]
