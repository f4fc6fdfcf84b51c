"""The edges of one `StateGraph`, sorted by how much is known of them before the graph runs.

    plain     always taken
    joins     taken when all their sources have run (a list edge, a barrier)
    choices   a conditional edge with a path map, or a `Command` with declared destinations: any
              of its targets, or several of them at once
    guesses   a conditional edge without a path map, or an undeclared `Command`: it may lead
              anywhere, and is taken to lead to the nodes that no other edge leads to

Whether an edge can `Send` (any number of copies of one node) is not declared anywhere in LangGraph.
It is read from the function behind the edge: its return annotation, and the names in its code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

from langgraph.graph import END, START
from langgraph.graph.state import StateGraph
from langgraph.types import Command, Send

__all__ = ["Edges", "Graph", "SendList", "reachable", "read_edges"]

Graph = StateGraph[Any, Any, Any, Any]

Targets = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class SendList:
    """A function that may return any number of `Send`s, none included."""

    source: str
    function: str
    ends: tuple[str, ...]
    """Nodes that it may lead to, as far as declared."""
    can_end: bool
    """Whether it may end the graph instead."""


@dataclass(frozen=True)
class Edges:
    """See the module's docstring. Targets stand in the order in which nodes were added."""

    plain: Targets
    joins: tuple[tuple[tuple[str, ...], str], ...]
    choices: Targets
    guesses: Targets
    handlers: Targets
    """From a node to the one that handles its errors."""
    sent: frozenset[str]
    """Nodes that a `Send` can reach, in any number of copies."""
    deferred: frozenset[str]
    """Nodes that run when nothing else is left to do."""
    notes: tuple[str, ...]
    """What cannot be known before the graph runs, and how to make it known."""
    send_lists: tuple[SendList, ...] = ()
    """Where a function returns `Send`s, perhaps none."""

    def only_after(self, send_list: SendList) -> list[str]:
        """Nodes that do not run if the list is empty; none if the function can lead elsewhere.

        Nothing runs then that only its copies lead to, a join among others, and nobody is told.
        """
        if send_list.can_end:
            return []
        ends = set(send_list.ends)
        behind = [
            node
            for node in dict.fromkeys(n for end in ends for n in reachable(end, self.possible))
            if node != END
        ]
        if ends.intersection(behind):
            return []
        without = set(reachable(START, lambda node: self._possible_without(node, ends)))
        return [node for node in behind if node not in without]

    def _possible_without(self, node: str, missing: set[str]) -> Iterator[str]:
        targets = (self.plain, self.choices, self.guesses, self.handlers)
        for target in (t for kind in targets for t in kind.get(node, ())):
            if target not in missing:
                yield target
        for sources, target in self.joins:
            if node in sources and not missing.intersection(sources):
                yield target

    def known(self, node: str) -> Iterator[str]:
        """Where a node leads, guesses left out."""
        yield from self.plain.get(node, ())
        yield from self.choices.get(node, ())
        for sources, target in self.joins:
            if node in sources:
                yield target

    def possible(self, node: str) -> Iterator[str]:
        """Where a node can lead, guesses and error handlers included."""
        yield from self.known(node)
        yield from self.guesses.get(node, ())
        yield from self.handlers.get(node, ())


def reachable(source: str, edges: Callable[[str], Iterable[str]]) -> list[str]:
    """Nodes that come after `source`, itself included only where a cycle leads back to it."""
    found: dict[str, None] = {}
    todo = [source]
    while todo:
        fresh = [node for node in dict.fromkeys(edges(todo.pop())) if node not in found]
        found.update(dict.fromkeys(fresh))
        todo.extend(fresh)
    return list(found)


def read_edges(builder: Graph) -> Edges:
    """Sort the edges of a builder. Edges from or to unknown nodes are left to LangGraph."""
    return _Reader(builder).read()


class _Reader:
    def __init__(self, builder: Graph) -> None:
        self.builder = builder
        self.order = {name: number for number, name in enumerate(builder.nodes)}
        self.choices: dict[str, set[str]] = {}
        self.open_ended: list[str] = []
        self.sent: set[str] = set()
        self.notes: list[str] = []
        self.send_lists: list[SendList] = []

    def read(self) -> Edges:
        plain = self._by_source(self.builder.edges)
        joins = tuple(
            (sources, target)
            for sources, target in sorted(self.builder.waiting_edges)
            if target in self.order
        )
        self._read_branches()
        self._read_commands()
        handlers = self._by_source(
            (name, spec.error_handler_node)
            for name, spec in self.builder.nodes.items()
            if spec.error_handler_node is not None
        )
        guesses = self._guesses(plain, joins, handlers)
        return Edges(
            plain=plain,
            joins=joins,
            choices={source: self._sorted(ends) for source, ends in self.choices.items()},
            guesses=guesses,
            handlers=handlers,
            sent=frozenset(self.sent),
            deferred=frozenset(n for n, spec in self.builder.nodes.items() if spec.defer),
            notes=tuple(self.notes),
            send_lists=tuple(
                send_list if send_list.ends else replace(send_list, ends=guesses[send_list.source])
                for send_list in self.send_lists
            ),
        )

    def _sorted(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({n for n in names if n in self.order}, key=self.order.__getitem__))

    def _by_source(self, pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
        targets: dict[str, set[str]] = {}
        for source, target in pairs:
            targets.setdefault(source, set()).add(target)
        return {source: self._sorted(ends) for source, ends in targets.items()}

    def _read_branches(self) -> None:
        for source, branches in self.builder.branches.items():
            for name, branch in branches.items():
                function = _function_of(branch.path)
                if function is not None and _mentions(function, Send):
                    self._add_send_list(source, function, set((branch.ends or {}).values()))
                if branch.ends is None:
                    self._open_end(
                        source,
                        f"its conditional edge {name!r} has no path map",
                        "give add_conditional_edges a path map, or its function a Literal return "
                        "type",
                    )
                    continue
                targets = {end for end in branch.ends.values() if end != END}
                self.choices.setdefault(source, set()).update(targets)
                if function is None or _mentions(function, Send):
                    self.sent.update(targets)

    def _read_commands(self) -> None:
        for name, spec in self.builder.nodes.items():
            function = _function_of(spec.runnable)
            ends = set(spec.ends or ()) - {END}
            if ends:
                self.choices.setdefault(name, set()).update(ends)
                if function is not None and _mentions(function, Send):
                    self.sent.update(ends)
                    self._add_send_list(name, function, set(spec.ends or ()))
            elif function is not None and _mentions(function, Command, "goto"):
                self._open_end(
                    name,
                    "it returns a Command with undeclared destinations",
                    "annotate it with Command[Literal[...]], or give add_node destinations=",
                )

    def _add_send_list(self, source: str, function: FunctionType, ends: set[str]) -> None:
        if not ends:  # nothing is declared; what the code spells is as good a guess as any
            ends = set(_texts(function.__code__))
            if "END" in _names(function.__code__):
                ends.add(END)
        self.send_lists.append(
            SendList(source, function.__name__, self._sorted(ends), can_end=END in ends)
        )

    def _open_end(self, source: str, reason: str, fix: str) -> None:
        self.open_ended.append(source)
        where = "the start" if source == START else f"node {source!r}"
        self.notes.append(
            f"Where {where} leads is known only when the graph runs: {reason}. To have it checked, "
            f"{fix}."
        )

    def _guesses(
        self,
        plain: Targets,
        joins: Iterable[tuple[tuple[str, ...], str]],
        handlers: Targets,
    ) -> dict[str, tuple[str, ...]]:
        reached = {target for _, target in joins}
        for targets in (*plain.values(), *self.choices.values(), *handlers.values()):
            reached.update(targets)
        orphans = [name for name in self.builder.nodes if name not in reached]
        guesses = {s: tuple(o for o in orphans if o != s) for s in self.open_ended}
        for targets in guesses.values():
            self.sent.update(targets)
        return guesses


def _function_of(runnable: object) -> FunctionType | None:
    """The Python function behind a runnable, if there is one to look into."""
    function: object = getattr(runnable, "func", None) or getattr(runnable, "afunc", None)
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else None
    if inspect.ismethod(function):
        function = function.__func__
    elif callable(function) and not isinstance(function, FunctionType):
        function = type(function).__call__
    return function if isinstance(function, FunctionType) else None


def _mentions(function: FunctionType, kind: type, *words: str) -> bool:
    """Whether a function's return annotation or its code names `kind`, and all of `words`."""
    names = set(_names(function.__code__))
    if not all(word in names for word in words):
        return False
    if kind.__name__ in str(function.__annotations__.get("return", "")):
        return True
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return kind.__name__ in names or any(known.get(name) is kind for name in names)


def _texts(code: CodeType) -> Iterator[str]:
    """Texts that stand in a function and the functions inside it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts(constant)
        elif isinstance(constant, str):
            yield constant


def _names(code: CodeType) -> Iterator[str]:
    """Names, and keywords of calls, in a function and the functions inside it."""
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, tuple):
            yield from (item for item in constant if isinstance(item, str))
