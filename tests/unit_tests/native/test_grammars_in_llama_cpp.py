"""What llama.cpp makes of odd grammars, on a thread with a small stack, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from tests.unit_tests.native.isolated import outcomes

REFUSED = {
    "30,000 groups": "'root ::= ' + '(' * 30000 + '\"a\"' + ')' * 30000",
    "30,000 groups left open": "'root ::= ' + '(' * 30000",
    "chain of rules": "'root ::= r0\\n' + ''.join(f'r{i} ::= r{i+1}\\n' for i in range(12000))",
    "2**40 paths": "'root ::= r0\\n' + ''.join(f'r{i} ::= r{i+1} | r{i+1}\\n' for i in range(40))",
    "left recursion": '\'root ::= root "a" | "b"\'',
    "hidden left recursion": '\'root ::= b root "y" | "x"\\nb ::= a\\na ::= ""\'',
    "token behind characters": "'root ::= \"p\" <[264]>'",
    "no token behind characters": "'root ::= [^a]{2} | !<[65]> [^a]{2}'",
    "repetition of gigabytes": "'root ::= \"' + 'a' * 200000 + '\"{2000}'",
    "repetition of repetition": "'root ::= ((\"a\"{2000}){2000}){2000}'",
    "repetition beyond 64 bits": "'root ::= \"a\"{99999999999999999999999}'",
    "huge": "'root ::= \"' + 'a' * 1000000 + '\"'",
    "empty": "' '",
    "NUL": "'root ::= \"a\"\\0'",
    "lone surrogate": "'root ::= \"\\ud800\"'",
    "not closed": "'root ::= \"a'",
    "no root": "'x ::= \"a\"'",
    "undefined rule": "'root ::= missing'",
    "no grammar": "'What a nice day.'",
    "no character": "'root ::= [z-a]'",
    "unknown escape": "'root ::= \"\\\\q\"'",
}
WRITTEN = {
    "128 groups": "'root ::= ' + '(' * 128 + '\"a\"' + ')' * 128",
    "empty class": "'root ::= []'",
    "half a surrogate pair": "'root ::= \"\\\\uD800\"'",
    "2,000 alternatives": "'root ::= ' + ' | '.join(f'\"{i}\"' for i in range(2000))",
    "long literal": "'root ::= [a-z] | \"' + 'a' * 200000 + '\"'",
    "repetition of 2,000": '\'root ::= "a"{1,2000} "b"\'',
    "unused rules": "'root ::= \"a\"\\n' + ''.join(f'r{i} ::= \"a\"\\n' for i in range(5000))",
    "any character": "'root ::= .{20}'",
    "none of a class": "'root ::= [^a-z]{1,20}'",
    "beyond Unicode": "'root ::= [^\\\\U00110000-\\\\UFFFFFFFF]{1,9}'",
}
CODE = """
import sys, threading

engine = open_engine(sys.argv[1])
tokens = [65, 66, 67]
row = append(engine, 0, tokens)

def write(grammar, seed):
    # Near-uniform draws: every byte comes, broken UTF-8 too.
    params = SamplingParams(grammar=grammar, temperature=50.0, seed=seed)
    sampler = engine.create_sampler(params, tokens)
    for _ in range(40):
        if engine.tokenizer.is_end(sampler.sample(row)):
            break
    sampler.close()
    return "written"

def write_often(grammar):
    for seed in range(5):
        write(grammar, seed)
    return "written"

def run_all():
    for line in sys.stdin.read().splitlines():
        name, source = line.split(": ", 1)
        attempt(name, lambda: write_often(eval(source)))

threading.stack_size(512 * 1024)
thread = threading.Thread(target=run_all)
thread.start()
thread.join()
"""


def test_odd_grammars_are_errors_or_are_followed(tiny_llama: Path) -> None:
    """Those that llama.cpp cannot parse are told on stderr by it, which is all that is there."""
    cases = "".join(f"{name}: {source}\n" for name, source in {**REFUSED, **WRITTEN}.items())
    seen = outcomes(CODE, tiny_llama, stdin=cases, may_log=True)
    assert seen == dict.fromkeys(REFUSED, "GrammarError") | dict.fromkeys(WRITTEN, "written")
