"""What is refused of a GBNF grammar before llama.cpp sees it.

llama.cpp checks syntax itself, but some grammars end the process or keep it busy for ever:

- its parser recurses into nested groups, and its search for left recursion follows rules that begin
  with one another on every path there is: too deep or too many, and the stack or the time ends;
- left recursion behind rules that are empty only by way of others is not found, and fills memory;
- repeated literals are written out;
- a token element (`<think>`, `<[42]>`) behind characters lets tokens pass that it cannot take then.

This module reads just enough of a grammar to see these. What else is wrong, llama.cpp says.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from langchain_swarmkv.errors import GrammarError

__all__ = ["MAX_GRAMMAR_BYTES", "MAX_GRAMMAR_DEPTH", "check_grammar"]

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_GRAMMAR_DEPTH = 128
"""Of groups in one another, and of rules that begin with one another."""
MAX_GRAMMAR_PATHS = 1_000_000
"""Ways to go down from any rule through the rules that it can begin with."""
MAX_REPEATED_CHARACTERS = 100_000
"""Length of a literal times its repetition."""

_TOKENS = re.compile(
    r"""
      (?P<blank> \s+ | \#[^\r\n]* )
    | (?P<head> (?P<name> [a-zA-Z0-9-]+ ) [ \t]* ::= )
    | (?P<reference> [a-zA-Z0-9-]+ )
    | (?P<literal> " (?: [^"\\] | \\. )* "? | \[ (?: [^\]\\] | \\. )* \]? | \. )
    | (?P<repetition> [*+?] | \{ [^}]* \}? )
    | (?P<open> \( ) | (?P<close> \) ) | (?P<alternative> \| )
    | (?P<token> !?< )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_EMPTY_LITERALS = ('""', "[]", "[^]")


def check_grammar(grammar: str) -> None:
    """Refuse a grammar that llama.cpp must not be given.

    Raises:
        GrammarError: with the limit and what was seen.
    """
    try:
        size = len(grammar.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"The grammar is not valid Unicode: {error}.") from error
    if not grammar.strip():
        raise GrammarError("The grammar is empty; leave it out to generate freely.")
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(
            f"The grammar has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}.", num_bytes=size
        )
    if "\0" in grammar:
        raise GrammarError("The grammar contains a NUL character.")
    rules = _read_rules(grammar)
    _check_beginnings(_beginnings(rules, _empty_rules(rules)))


@dataclass(frozen=True)
class _Item:
    """One element of an alternative: a rule, or characters where `rule` is None."""

    rule: str | None
    num_characters: int = 1
    can_be_empty: bool = False


_Rules = dict[str, list[list[_Item]]]
"""The alternatives of each rule. A group is a rule of its own, as it is in llama.cpp."""


def _read_rules(grammar: str) -> _Rules:
    rules: _Rules = {}
    open_rules: list[list[list[_Item]]] = []  # the rule that is read, and the groups open in it
    for match in _TOKENS.finditer(grammar):
        kind, text = match.lastgroup, match.group()
        if kind == "head":
            open_rules = [rules.setdefault(match["name"], [])]
            open_rules[-1].append([])
        elif not open_rules:
            continue
        elif kind == "alternative":
            open_rules[-1].append([])
        elif kind == "open":
            group = f"group {len(rules)}"
            open_rules[-1][-1].append(_Item(group))
            open_rules.append(rules.setdefault(group, [[]]))
            _check_depth(len(open_rules) - 1, "groups in one another")
        elif kind == "close" and len(open_rules) > 1:
            open_rules.pop()
        else:
            _read_item(open_rules[-1][-1], kind, text)
    return rules


def _read_item(items: list[_Item], kind: str | None, text: str) -> None:
    if kind == "reference":
        items.append(_Item(text))
    elif kind == "literal" and text not in _EMPTY_LITERALS:
        items.append(_Item(None, num_characters=len(text)))
    elif kind == "repetition" and items:
        items[-1] = _repeated(items[-1], text)
    elif kind == "token":
        raise GrammarError(
            "The grammar has a token element (<...>), which llama.cpp cannot follow safely; write "
            "the token's text as a literal."
        )


def _repeated(item: _Item, repetition: str) -> _Item:
    times = re.match(r"\{\s*(\d{1,9})", repetition)
    num_characters = item.num_characters * int(times[1]) if times else 0
    if num_characters > MAX_REPEATED_CHARACTERS:
        raise GrammarError(
            f"A repetition stands for {num_characters} characters; the limit is "
            f"{MAX_REPEATED_CHARACTERS}. Make the repeated text a rule.",
            num_characters=num_characters,
        )
    optional = re.match(r"[*?]|\{\s*0*\s*[,}]", repetition) is not None
    return replace(item, can_be_empty=item.can_be_empty or optional)


def _empty_rules(rules: _Rules) -> set[str]:
    """The rules that may match nothing, directly or by way of others."""
    mentioned_in: defaultdict[str, set[str]] = defaultdict(set)
    for name, alternatives in rules.items():
        for items in alternatives:
            for item in items:
                if item.rule is not None:
                    mentioned_in[item.rule].add(name)
    empty: set[str] = set()
    to_check = set(rules)
    while to_check:
        name = to_check.pop()
        if name in empty or not any(
            all(item.can_be_empty or item.rule in empty for item in items) for items in rules[name]
        ):
            continue
        empty.add(name)
        to_check |= mentioned_in[name]
    return empty


def _beginnings(rules: _Rules, empty: set[str]) -> dict[str, list[str]]:
    """The rules that each rule can begin with, once for each place where it can."""
    return {
        name: [
            rule for items in alternatives for rule in _first_rules(items, empty) if rule in rules
        ]
        for name, alternatives in rules.items()
    }


def _first_rules(items: list[_Item], empty: set[str]) -> Iterator[str]:
    for item in items:
        if item.rule is not None:
            yield item.rule
        if not item.can_be_empty and item.rule not in empty:
            return


def _check_beginnings(beginnings: dict[str, list[str]]) -> None:
    """Refuse left recursion, and chains of first rules that are too long or too many."""
    try:
        order = list(TopologicalSorter(beginnings).static_order())
    except CycleError as error:
        raise GrammarError(
            f"The rule {error.args[1][0]!r} is left-recursive: it can begin with itself. Let "
            "something that is not empty come first, or write repetition as x*.",
            rule=error.args[1][0],
        ) from error
    depths: dict[str, int] = {}
    paths: dict[str, int] = {}
    for name in order:
        first = beginnings[name]
        depths[name] = max((1 + depths[rule] for rule in first), default=0)
        paths[name] = 1 + sum(paths[rule] for rule in first)
        _check_depth(depths[name], "rules that begin with one another")
    if sum(paths.values()) > MAX_GRAMMAR_PATHS:
        raise GrammarError(
            f"The grammar's rules begin with one another in more than {MAX_GRAMMAR_PATHS} ways; "
            "give alternatives that begin alike a common rule."
        )


def _check_depth(depth: int, of_what: str) -> None:
    if depth > MAX_GRAMMAR_DEPTH:
        raise GrammarError(
            f"The grammar has {depth} {of_what}; the limit is {MAX_GRAMMAR_DEPTH}.", depth=depth
        )
