"""Cycles of a graph: which edge closes them, and how many supersteps a bounded run may take.

Only edges that are known before the graph runs count: a guessed edge must not make a cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from langgraph.graph import START

from langchain_swarmkv.graph.edges import Edges, reachable
from langchain_swarmkv.graph.topology import Level

__all__ = ["Cycle", "find_cycles", "recursion_limit"]


@dataclass(frozen=True)
class Cycle:
    """Nodes that can all come before each other, and an edge without which they could not."""

    nodes: frozenset[str]
    closing_edge: tuple[str, str]


@dataclass(frozen=True)
class _Walk:
    """A graph walked depth first from its start, nodes in the order in which they were added."""

    forward: Mapping[str, tuple[str, ...]]
    """Edges that close no cycle, by source; every node stands after those it leads to."""
    closing: tuple[tuple[str, str], ...]
    """Edges back into the walk that found them."""


def find_cycles(level: Level) -> list[Cycle]:
    """The cycles of one level, without its subgraphs; cycles that share a node count as one."""
    after = {name: set(reachable(name, level.edges.known)) for name in level.builder.nodes}
    cycles: dict[frozenset[str], Cycle] = {}
    for source, target in _walk(level).closing:
        nodes = frozenset(name for name in after[target] if target in after[name])
        cycles.setdefault(nodes, Cycle(nodes, (source, target)))
    return list(cycles.values())


def recursion_limit(level: Level, max_turns: int) -> int:
    """The LangGraph `recursion_limit` that lets every cycle run `max_turns` times.

    LangGraph counts supersteps, and hands the limit down to subgraphs, each of which counts its
    own: so this is the largest number that any level needs. The longest way through the graph is
    walked once, and the longest way through each cycle `max_turns - 1` times more.
    """
    return max(_num_supersteps(each, max_turns) for each in level) + 1


def _num_supersteps(level: Level, max_turns: int) -> int:
    forward = _walk(level).forward
    turns = sum(_longest(forward, cycle.nodes) for cycle in find_cycles(level))
    return _longest(forward, frozenset(level.builder.nodes)) + (max_turns - 1) * turns


def _longest(forward: Mapping[str, tuple[str, ...]], within: frozenset[str]) -> int:
    """Nodes on the longest walk that stays `within` a set."""
    lengths: dict[str, int] = {}
    for node, targets in forward.items():
        if node in within:
            lengths[node] = 1 + max((lengths[t] for t in targets if t in within), default=0)
    return max(lengths.values(), default=0)


def _walk(level: Level) -> _Walk:
    edges: Edges = level.edges
    forward: dict[str, tuple[str, ...]] = {}
    closing: list[tuple[str, str]] = []
    for root in (START, *level.builder.nodes):
        path: dict[str, Iterator[str]] = {}
        if root not in forward:
            path[root] = edges.known(root)
        while path:
            node = next(reversed(path))
            for target in path[node]:
                if target in path:
                    closing.append((node, target))
                elif target not in forward:
                    path[target] = edges.known(target)
                    break
            else:
                del path[node]
                back = {t for source, t in closing if source == node}
                forward[node] = tuple(t for t in edges.known(node) if t not in back)
    return _Walk(forward, tuple(dict.fromkeys(closing)))
