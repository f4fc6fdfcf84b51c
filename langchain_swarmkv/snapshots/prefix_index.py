"""Which holders of token lists share the longest prefix with a prompt: a radix tree.

A holder is whatever owns the KV of one token list: a sequence of the pool, a stored snapshot. Its
list is the path from the root of its namespace to the node where it ends:

    root ── "the document" ──┬── " Task: novelty"   <- holder 1
                             └── " Task: claims"    <- holder 2

Every node but a root ends a list or branches: one that does neither is joined to its child. Tokens
are compared, never only hashed, and namespaces never meet.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Match", "PrefixIndex", "TokenIds"]

Holder = TypeVar("Holder", bound=Hashable)

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
"""Token ids in any form; numpy int32 is the cheapest, other forms are converted."""


@dataclass(frozen=True)
class Match(Generic[Holder]):
    """The first `num_tokens` tokens, at least one, are those of each of `holders`."""

    num_tokens: int
    holders: tuple[Holder, ...]


@dataclass(eq=False, slots=True)
class _Node(Generic[Holder]):
    """The tokens `[start, end)` of every list that passes through or ends here."""

    edge: npt.NDArray[np.int32]
    parent: _Node[Holder] | None
    end: int
    children: dict[int, _Node[Holder]] = field(default_factory=dict)
    """By the first token of their edge."""
    holders: dict[Holder, None] = field(default_factory=dict)
    """Those whose list ends here, oldest first."""

    def add_child(self, edge: npt.NDArray[np.int32]) -> _Node[Holder]:
        """A new node below; copies `edge`, which may be a caller's array."""
        child = _Node(edge.copy(), self, self.end + len(edge))
        self.children[int(edge[0])] = child
        return child

    def split(self, end: int) -> _Node[Holder]:
        """Cut the edge; the new node above ends at `end`, and this one keeps its holders."""
        assert self.parent is not None
        cut = end - self.parent.end
        above = self.parent.add_child(self.edge[:cut])
        above.children[int(self.edge[cut])] = self
        self.edge = self.edge[cut:].copy()
        self.parent = above
        return above

    def join_child(self) -> None:
        """Give this node's edge to its only child, which takes its place."""
        assert self.parent is not None
        (child,) = self.children.values()
        child.edge = np.concatenate([self.edge, child.edge])
        child.parent = self.parent
        self.parent.children[int(self.edge[0])] = child

    def path(self) -> list[_Node[Holder]]:
        """The nodes from this one up to its root."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path

    def subtree(self) -> Iterator[_Node[Holder]]:
        """This node, then all below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))


class PrefixIndex(Generic[Holder]):
    """Token lists by namespace, each with the holders that own it.

    A namespace says whose KV may be shared: model identity and cache salt, digested by the caller.
    A holder owns one list at a time. Lists may be empty, and several holders may own equal ones.
    Cost of a call: a few vectorised comparisons over the list, plus the holders in the answer.
    Not thread safe.
    """

    def __init__(self) -> None:
        self._roots: dict[str, _Node[Holder]] = {}
        self._ends: dict[Holder, tuple[str, _Node[Holder]]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._ends

    def insert(self, namespace: str, tokens: TokenIds, holder: Holder) -> None:
        """Make `holder` own `tokens`, in place of the list that it owned before."""
        ids = _token_array(tokens)
        self.remove(holder)
        root = self._roots.setdefault(namespace, _Node(np.empty(0, np.int32), None, 0))
        node, num_common = _walk(root, ids)
        if num_common < node.end:
            node = node.split(num_common)
        if num_common < len(ids):
            node = node.add_child(ids[num_common:])
        node.holders[holder] = None
        self._ends[holder] = (namespace, node)

    def remove(self, holder: Holder) -> None:
        """Forget a holder and its list; harmless if it has none."""
        if holder not in self._ends:
            return
        namespace, node = self._ends.pop(holder)
        del node.holders[holder]
        parent = node.parent
        if parent is not None and not node.holders and not node.children:
            del parent.children[int(node.edge[0])]
            node, parent = parent, parent.parent
        if parent is not None and not node.holders and len(node.children) == 1:
            node.join_child()
        if parent is None and not node.holders and not node.children:
            del self._roots[namespace]

    def tokens_of(self, holder: Holder) -> list[int]:
        """The list that `holder` owns; KeyError if it has none."""
        _, node = self._ends[holder]
        tokens: list[int] = np.concatenate([n.edge for n in reversed(node.path())]).tolist()
        return tokens

    def best(self, namespace: str, tokens: TokenIds, *, can_cut: bool) -> Match[Holder] | None:
        """`longest` for sequences that can be cut, else `longest_whole`."""
        search = self.longest if can_cut else self.longest_whole
        return search(namespace, tokens)

    def longest(self, namespace: str, tokens: TokenIds) -> Match[Holder] | None:
        """The longest prefix of `tokens` that any list starts with, and all holders of it.

        Holders whose list ends there come before those whose list goes on.

        Returns:
            None when no list shares the first token.
        """
        root = self._roots.get(namespace)
        if root is None:
            return None
        node, num_common = _walk(root, _token_array(tokens))
        if num_common == 0:
            return None
        return Match(num_common, tuple(h for below in node.subtree() for h in below.holders))

    def longest_whole(self, namespace: str, tokens: TokenIds) -> Match[Holder] | None:
        """The longest list that is, entire, a prefix of `tokens`, and all holders of it.

        For models that cannot cut a sequence.

        Returns:
            None when there is no such list, or only the empty one.
        """
        root = self._roots.get(namespace)
        if root is None:
            return None
        deepest, num_common = _walk(root, _token_array(tokens))
        for node in deepest.path():
            if node.holders and 0 < node.end <= num_common:
                return Match(node.end, tuple(node.holders))
        return None

    def covered(self, holder: Holder) -> int:
        """Tokens of the longest prefix of the holder's list that another holder's list has too.

        KeyError if the holder has no list.
        """
        _, node = self._ends[holder]
        if node.parent is None or node.children or len(node.holders) > 1:
            return node.end
        return node.parent.end

    def check(self) -> None:
        """Verify the whole tree; AssertionError where an invariant is broken."""
        num_holders = 0
        for namespace, root in self._roots.items():
            assert root.parent is None
            assert root.end == len(root.edge) == 0
            assert root.holders or root.children
            for node in root.subtree():
                num_holders += len(node.holders)
                assert all(self._ends[holder] == (namespace, node) for holder in node.holders)
                if node.parent is not None:
                    assert len(node.edge) == node.end - node.parent.end > 0
                    assert node.parent.children[int(node.edge[0])] is node
                    assert node.holders or len(node.children) > 1
        assert num_holders == len(self._ends)


def _walk(root: _Node[Holder], tokens: npt.NDArray[np.int32]) -> tuple[_Node[Holder], int]:
    """How far `tokens` leads into the tree: the deepest node reached, and the tokens in common.

    The node's own edge may be matched in part: then its `end` is greater than the tokens in common.
    """
    node, num_common = root, 0
    while num_common == node.end and num_common < len(tokens):
        child = node.children.get(int(tokens[num_common]))
        if child is None:
            break
        node = child
        num_common += _num_common(child.edge, tokens[num_common:])
    return node, num_common


def _num_common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax())
    return first if differs[first] else shorter


def _token_array(tokens: TokenIds) -> npt.NDArray[np.int32]:
    """The ids as int32; OverflowError for one that does not fit, for it must not wrap around."""
    if isinstance(tokens, np.ndarray):
        if tokens.dtype == np.int32:
            return tokens.astype(np.int32, copy=False)
        tokens = tokens.tolist()
    return np.frombuffer(array("i", tokens), dtype=np.int32)
