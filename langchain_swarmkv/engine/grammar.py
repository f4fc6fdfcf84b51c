"""Limits on GBNF text, checked before llama.cpp parses it.

llama.cpp's parser recurses once for each nested group, so deep nesting overflows its stack and ends
the process; and a grammar of megabytes takes minutes at each token.
"""

from __future__ import annotations

from langchain_swarmkv.errors import GrammarError

__all__ = ["MAX_GRAMMAR_BYTES", "MAX_GRAMMAR_DEPTH", "check_grammar"]

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_GRAMMAR_DEPTH = 128


def check_grammar(grammar: str) -> None:
    """Refuse a grammar that is empty, too large, or nested too deeply.

    Raises:
        GrammarError: with the limit and what was seen.
    """
    size = len(grammar.encode("utf-8", errors="replace"))
    if not grammar.strip():
        raise GrammarError("The grammar is empty; leave it out to generate freely.")
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(
            f"The grammar has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}.", num_bytes=size
        )
    if "\0" in grammar:
        raise GrammarError("The grammar contains a NUL character.")
    depth = _depth(grammar)
    if depth > MAX_GRAMMAR_DEPTH:
        raise GrammarError(
            f"The grammar nests {depth} groups; the limit is {MAX_GRAMMAR_DEPTH}. Name the inner "
            "groups as rules.",
            depth=depth,
        )


def _depth(grammar: str) -> int:
    """Deepest nesting of parentheses outside of literals, character classes and comments."""
    depth = deepest = 0
    closing = ""
    escaped = False
    for character in grammar:
        if escaped:
            escaped = False
        elif closing:
            escaped = character == "\\" and closing != "\n"
            if character == closing:
                closing = ""
        elif character in '"[#':
            closing = {'"': '"', "[": "]", "#": "\n"}[character]
        elif character == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif character == ")":
            depth -= 1
    return deepest
