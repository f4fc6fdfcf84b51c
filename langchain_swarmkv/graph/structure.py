"""What is refused in a graph as it is drawn, before any number is looked at.

    UnreachableAnalystError   no document node can run before an analyst
    UnboundedCycleError       analysts in a cycle, and no `max_turns`
    MissingReducerError       nodes of one step write a key that has no reducer
    GraphError                a key that the state's schema lacks; findings that would be lost

Whatever could also go well at run time (branches of a conditional edge, of which perhaps only one
is taken) is not refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from langgraph.channels import LastValue

from langchain_swarmkv.errors import (
    GraphError,
    MissingReducerError,
    UnboundedCycleError,
    UnreachableAnalystError,
)
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.cycles import find_cycles
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import FINDINGS_KEY
from langchain_swarmkv.graph.topology import Level, Member, Topology, supersteps

__all__ = ["check_structure"]


def check_structure(topology: Topology, *, max_turns: int | None = None) -> None:
    """Refuse a graph that cannot work as it is drawn.

    Args:
        topology: the graph.
        max_turns: how often a cycle may run, where that is bounded from outside.

    Raises:
        GraphError: see the module's docstring.
    """
    for level in topology.root:
        _check_keys(level)
    _check_documents(topology)
    if max_turns is None:
        for level in topology.root:
            _check_cycles(level)
    for level in topology.root:
        _check_writers(level)


def _check_keys(level: Level) -> None:
    for member in _members(level):
        keys = [key for key in _keys(member) if key not in level.builder.channels]
        if keys and "__root__" not in level.builder.channels:
            schema = getattr(level.builder.state_schema, "__name__", "the state schema")
            raise GraphError(
                f"Node {member.path!r} uses the state key {keys[0]!r}, which {schema} does not "
                f"have, so LangGraph would drop it. Add the key to {schema}, or name another "
                "one when making the node.",
                node=member.path,
                key=keys[0],
            )


def _keys(member: Member) -> Iterator[str]:
    if isinstance(member.node, DocumentNode):
        yield member.node.input_key
    if member.is_bare:
        yield _output_key(member)


def _output_key(member: Member) -> str:
    return member.node.output_key or FINDINGS_KEY


def _members(level: Level) -> Iterator[Member]:
    for group in level.members.values():
        yield from group


def _check_documents(topology: Topology) -> None:
    for analyst in topology.analysts:
        if topology.documents_of(analyst):
            continue
        raise UnreachableAnalystError(
            f"No document node comes before analyst {analyst.path!r}, so each of its calls would "
            "prefill the document anew. Add a DocumentNode on the way to it that writes the "
            f"analyst's ref_key. {_elsewhere(topology)}",
            node=analyst.path,
        )


def _elsewhere(topology: Topology) -> str:
    if topology.documents:
        found = ", ".join(f"{d.path!r} (writes {d.node.output_key!r})" for d in topology.documents)
        return (
            f"The graph has {found}. If a Command or a conditional edge leads from there, declare "
            "its destinations."
        )
    return (
        "If this is a subgraph whose parent has the DocumentNode, compile it as a plain "
        "StateGraph; the parent's check looks inside."
    )


def _check_cycles(level: Level) -> None:
    for cycle in find_cycles(level):
        analysts = [
            member.path
            for name in sorted(cycle.nodes)
            for member in level.inside(name)
            if isinstance(member.node, AnalystNode)
        ]
        if analysts:
            source, target = (level.path + end for end in cycle.closing_edge)
            raise UnboundedCycleError(
                f"The edge {source!r} -> {target!r} closes a cycle with analyst {analysts[0]!r} in "
                "it, and nothing bounds how often it runs. Give compile(max_turns=...), or remove "
                "the edge.",
                edge=(source, target),
                nodes=tuple(analysts),
            )


# -- who writes what -----------------------------------------------------------------------------


def _check_writers(level: Level) -> None:
    """From each node on, follow the edges that are always taken: what runs together there, does."""
    for name in level.builder.nodes:
        if name in level.edges.sent:
            _check_copies(level, name)
    for first in level.builder.nodes:
        for running in supersteps(level.edges, [first], certain_only=True):
            _check_step(level, [name for name in level.builder.nodes if name in running])


def _check_copies(level: Level, name: str) -> None:
    analysts = [m.node for m in level.inside(name) if isinstance(m.node, AnalystNode)]
    if all(analyst.max_fanout == 1 for analyst in analysts):
        return
    copies = f"A Send can start several copies of {level.path + name!r}, which all write"
    for key in _written(level, name):
        if _has_no_reducer(level, key):
            raise MissingReducerError(
                f"{copies} the state key {key!r}, and it has no reducer. {_fix(key)} Or declare "
                "max_fanout=1.",
                key=key,
                nodes=(level.path + name,),
            )
    # Copies of an analyst number their findings; analysts inside copies of a subgraph cannot.
    for finding, path in _findings(level, name) if name in level.subgraphs else ():
        raise GraphError(
            f"{copies} the finding {finding!r}, so only one of them would be left. Give the "
            "AnalystNode an output_key, and the key a reducer that collects.",
            key=finding,
            nodes=(path,),
        )


def _check_step(level: Level, names: list[str]) -> None:
    writers: dict[str, list[str]] = {}
    findings: dict[str, list[str]] = {}
    for name in names:
        for key in _written(level, name):
            writers.setdefault(key, []).append(level.path + name)
        for finding, path in _findings(level, name):
            findings.setdefault(finding, []).append(path)
    for key, paths in writers.items():
        if len(paths) > 1 and _has_no_reducer(level, key):
            raise MissingReducerError(
                f"{_listed(paths)} run in one step and write the state key {key!r}, which has no "
                f"reducer. {_fix(key)}",
                key=key,
                nodes=tuple(paths),
            )
    for finding, paths in findings.items():
        if len(paths) > 1:
            raise GraphError(
                f"{_listed(paths)} run in one step and write the same finding {finding!r}, so only "
                "one of them would be left. Give the AnalystNodes different name=.",
                key=finding,
                nodes=tuple(paths),
            )


def _written(level: Level, name: str) -> Iterator[str]:
    """State keys that a node of this level is known to write."""
    if name in level.subgraphs:
        subgraph = level.subgraphs[name].builder
        yield from (key for key in subgraph.schemas[subgraph.output_schema])
    else:
        yield from dict.fromkeys(_output_key(m) for m in level.members.get(name, ()) if m.is_bare)


def _findings(level: Level, name: str) -> Iterator[tuple[str, str]]:
    """Names under which a node's analysts leave findings in this level's state, and their paths."""
    if name in level.subgraphs and FINDINGS_KEY in _written(level, name):
        subgraph = level.subgraphs[name]
        for inner in subgraph.builder.nodes:
            yield from _findings(subgraph, inner)
    for member in level.members.get(name, ()):
        if isinstance(member.node, AnalystNode) and _output_key(member) == FINDINGS_KEY:
            yield member.node.name or name, member.path


def _has_no_reducer(level: Level, key: str) -> bool:
    return isinstance(level.builder.channels.get(key), LastValue)


def _fix(key: str) -> str:
    if key == FINDINGS_KEY:
        return "Annotate it: findings: Annotated[dict[str, str], merge_findings]."
    return (
        f"Give it one, as in {key}: Annotated[list, lambda old, new: [*old, new]], or write "
        "different keys."
    )


def _listed(paths: list[str]) -> str:
    return ", ".join(map(repr, paths[:-1])) + f" and {paths[-1]!r}"
