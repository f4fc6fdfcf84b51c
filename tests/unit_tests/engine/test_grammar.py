"""Grammars are refused before they can end the process, and good ones pass.

What llama.cpp itself then says of them is tested with engines: in `test_llama_engine`, and in
`native/test_grammars_in_llama_cpp` where a fault would end the process.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_swarmkv.engine.grammar import (
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_DEPTH,
    check_grammar,
)
from langchain_swarmkv.errors import GrammarError

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}   # at most one line of white space
"""


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "yes" | "no"',
        JSON,
        'root ::= sum\nsum ::= term ([-+*/] term)*\nterm ::= "(" sum ")" | [0-9]+',
        'root ::= item*\nitem ::= "a"? "b"?',
        'root ::= (ws)* "x"\nws ::= [ \\t]*',
        'root ::= "(" | ")" | "[(((" | [()] # ((((',
        'root ::= "\\"(" [\\]"(] "end"',
        "root ::= " + "(" * MAX_GRAMMAR_DEPTH + '"a"' + ")" * MAX_GRAMMAR_DEPTH,
        'root ::= "a" root | "b"',
        'root ::= "<|im_end|>" [<>!]',
        'root ::= "a"{3} [b]{0,2} c{1,}\nc ::= .',
        'root ::= "' + "a" * 200_000 + '"',
        "root ::= " + " | ".join(f'"{i}"' for i in range(5000)),
        'root ::=\n  "over" # comment ::= (\n  | "lines"',
    ],
)
def test_grammars_that_llama_cpp_can_take_pass(grammar: str) -> None:
    """Recursion behind characters, repetition of what may be empty, text that looks like syntax."""
    check_grammar(grammar)


@pytest.mark.parametrize("grammar", ["", "   ", "\n\t\n"])
def test_an_empty_grammar_is_refused(grammar: str) -> None:
    """It says to leave it out."""
    with pytest.raises(GrammarError, match="leave it out"):
        check_grammar(grammar)


def test_size_is_counted_in_bytes() -> None:
    """At the limit it passes, one byte more is refused and counted."""
    frame = 'root ::= ""'
    check_grammar(f'root ::= "{"a" * (MAX_GRAMMAR_BYTES - len(frame))}"')
    with pytest.raises(GrammarError) as refused:
        check_grammar(f'root ::= "{"é" * (MAX_GRAMMAR_BYTES // 2)}"')
    assert refused.value.facts["num_bytes"] == MAX_GRAMMAR_BYTES + len(frame)


@pytest.mark.parametrize("text", ["\0", "\ud800", "a\udfff"])
def test_what_c_cannot_be_given_is_refused(text: str) -> None:
    """NUL ends a C string, and lone surrogates have no bytes."""
    with pytest.raises(GrammarError):
        check_grammar(f'root ::= "{text}"')


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000,
        "root ::= " + "(" * (MAX_GRAMMAR_DEPTH + 1),
        'root ::= "x" ' + '("a" ' * 200 + ")" * 200,
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(10_000)),
    ],
)
def test_depth_is_limited(grammar: str) -> None:
    """Of groups, and of rules that only pass on to the next."""
    with pytest.raises(GrammarError, match=str(MAX_GRAMMAR_DEPTH)) as refused:
        check_grammar(grammar)
    assert refused.value.facts["depth"] == MAX_GRAMMAR_DEPTH + 1


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= root "a" | "b"',
        'root ::= a "x"\na ::= root | "y"',
        'root ::= "" root "a" | "b"',
        'root ::= "a"? root "b" | "c"',
        'root ::= [x]{0,3} root "b" | "c"',
        'root ::= b root "y" | "x"\nb ::= a\na ::= ""',
        'root ::= b root "y" | "x"\nb ::= a a\na ::= c | "z"\nc ::= "z"*',
        'root ::= (("a" | ) root "b") | "c"',
        'root ::= "ok"\nunused ::= unused "a" | "b"',
    ],
)
def test_left_recursion_is_refused_however_hidden(grammar: str) -> None:
    """Also behind rules that are empty only by way of others, which llama.cpp does not see."""
    with pytest.raises(GrammarError, match="left-recursive"):
        check_grammar(grammar)


def test_too_many_paths_are_refused() -> None:
    """Forty rules that each begin with the next one twice have 2**40 ways down."""
    rules = "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(40))
    with pytest.raises(GrammarError, match="ways"):
        check_grammar(f'root ::= r0\n{rules}r40 ::= "a"')


@pytest.mark.parametrize("repetition", ["{2000}", "{2000,}", "{ 2000 , 3000 }"])
def test_repetition_must_not_grow_beyond_all_bounds(repetition: str) -> None:
    """llama.cpp writes it out; a group is written once and may be repeated."""
    literal = "a" * 1000
    check_grammar(f'root ::= ("{literal}"){repetition}')
    check_grammar(f'root ::= "{literal}"{{20}}')
    with pytest.raises(GrammarError, match="repetition"):
        check_grammar(f'root ::= "{literal}"{repetition}')


@pytest.mark.parametrize("element", ["<think>", "<[42]>", "!<[42]>", "!<|im_end|>"])
def test_token_elements_are_refused(element: str) -> None:
    """llama.cpp lets tokens pass that it then cannot take, and ends the process."""
    with pytest.raises(GrammarError, match="token element"):
        check_grammar(f'root ::= "a" {element}')


@given(st.text(alphabet='ab:="()[]{}<>|*+?.,0\\\n# ', max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_text_is_too_odd_to_be_judged(text: str) -> None:
    """It passes or is refused with a GrammarError; nothing else comes out."""
    with suppress(GrammarError):
        check_grammar(f"root ::= {text}")
