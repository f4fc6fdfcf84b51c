"""What llguidance makes of odd guides, on a thread with a small stack, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from tests.unit_tests.native.isolated import outcomes

REFUSED = {
    "30,000 groups": "'start: ' + '(' * 30000 + '\"a\"' + ')' * 30000",
    "30,000 groups of a regex": "'start: /' + '(' * 30000 + 'a' + ')' * 30000 + '/'",
    "too many alternatives at once": "'start: ' + ' | '.join(f'\"v{i}\"' for i in range(5000))",
    "2**40 rules": "'start: r0\\n' + chain(40, 'r{0}: r{1} r{1}') + 'r40: \"a\"'",
    "2**40 terminals": "'start: T0\\n' + chain(40, 'T{0}: T{1} T{1}') + 'T40: \"a\"'",
    "never ends": "'start: start'",
    "huge": "'start: \"' + 'a' * 1000000 + '\"'",
    "a regex of 1,000,000": "'start: /a{1000000}/'",
    "a regex of 10**9": "'start: /((a{1000}){1000}){1000}/'",
    "a repetition of 1,000,000": "'start: \"a\"{1000000}'",
    "a repetition beyond 64 bits": "'start: \"a\"{99999999999999999999999}'",
    "a panic": "'start: r0\\n' + chain(4400, 'r{0}:' + '[' * 20 + '\"x\"r{1}' + ']' * 20)"
    " + 'r4400: \"a\"'",
    "12,000 rules of more": "'start: r0\\n' + chain(12000, 'r{0}:\"x\" r{1}') + 'r12000: \"a\"'",
    "empty": "' '",
    "NUL": "'start: \"a\\0\"'",
    "lone surrogate": "'start: \"\\ud800\"'",
    "not closed": "'start: \"a'",
    "undefined rule": "'start: missing'",
    "no guide": "'What a nice day.'",
    "look-ahead": "'start: /a(?=b)/'",
    "JSON of 30,000 levels": '\'{"grammars":[{"json_schema":\' + \'{"items":\' * 30000',
    "schema of 20,000 levels": "'start: %json ' + '{\"items\":' * 20000 + '{}' + '}' * 20000",
    "schema of 100,000 values": "schema({'enum': list(range(100000))})",
    "a reference to itself": "schema({'$ref': '#'})",
    "a loop of references": "schema({'$ref': '#/$defs/a', '$defs': {'a': {'$ref': '#/$defs/b'},"
    " 'b': {'$ref': '#/$defs/a'}}})",
    "4**20 unions": "schema({'allOf': [{'anyOf': [{'properties': {f'p{i}': {'const': j}}}"
    " for j in range(4)]} for i in range(20)]})",
    "a multiple of a large number": "schema({'type': 'integer', 'multipleOf': 1000000007})",
    "a multiple of 0": "schema({'type': 'integer', 'multipleOf': 0})",
    "a pattern of 30,000 groups": "schema({'pattern': '(' * 30000 + 'a' + ')' * 30000})",
    "a file": "schema({'$ref': 'file:///etc/passwd'})",
    "a page": "schema({'$ref': 'https://example.com/schema.json'})",
}
WRITTEN = {
    "a long literal": "'start: \"' + 'a' * 250000 + '\"'",
    "schema of 1,000 properties": "schema({'properties': {f'p{i}': {} for i in range(1000)}})",
    "12,000 rules": "'start: r0\\n' + chain(12000, 'r{0}: r{1}') + 'r12000: \"a\"'",
    "12,000 terminals": "'start: T0\\n' + chain(12000, 'T{0}:\"x\" T{1}') + 'T12000: \"a\"'",
    "20 groups in 4,800 rules": "'start: r0\\n' + chain(4800, 'r{0}:' + '(' * 20 + 'r{1}'"
    " + ')' * 20) + 'r4800: \"a\"'",
    "2**40 paths": "'start: r0\\n' + chain(40, 'r{0}: r{1} | r{1}') + 'r40: \"a\"'",
    "left recursion": '\'start: start "a" | "b"\'',
    "ambiguity": "'start: start start | \"a\" | '",
    "a long memory": "'start: /(.*a.{1000}){3}/'",
    "a negation": "'start: T\\nT: ~(/.*a.{20}/) & /(.|\\\\n)*b.{20}/'",
    "schema of 120 levels": "'start: %json ' + '{\"items\":' * 120 + '{}' + '}' * 120",
    "schema of 10,000 values": "schema({'enum': [f'value {i}' for i in range(10000)]})",
    "4,000 references": "schema({'$ref': '#/$defs/a0', '$defs': {f'a{i}': {'allOf':"
    " [{'$ref': f'#/$defs/a{i+1}'}, {}]} for i in range(4000)} | {'a4000': {}}})",
    "25 unions in 600 references": "schema({'$ref': '#/$defs/a0', '$defs': {f'a{i}':"
    " json.loads('{\"anyOf\":[' * 25 + '{\"$ref\":\"#/$defs/a%d\"}' % (i + 1) + ']}' * 25)"
    " for i in range(600)} | {'a600': {}}})",
    "a text without end": "schema({'$ref': '#/$defs/a', '$defs': {'a': {'type': 'object',"
    " 'properties': {'a': {'$ref': '#/$defs/a'}}, 'required': ['a']}}})",
    "10**9 characters": "schema({'type': 'string', 'minLength': 1000000000})",
    "10**9 items": "schema({'type': 'array', 'minItems': 1000000000})",
    "a pattern of 1,000,000": "schema({'type': 'string', 'pattern': 'a{1000000}'})",
    "a pattern of many states": "schema({'type': 'string', 'pattern': '(.*a.{30}){3}'})",
}
CODE = """
import json, sys, threading

engine = open_engine(sys.argv[1])
tokens = [65, 66, 67]
row = append(engine, 0, tokens)

def chain(length, rule):
    return "".join(rule.format(i, i + 1) + "\\n" for i in range(length))

def schema(value):
    return json.dumps({"grammars": [{"json_schema": value}]})

def write(guide):
    for seed in range(3):
        params = SamplingParams(guide=guide, temperature=50.0, seed=seed)
        sampler = engine.create_sampler(params, tokens)
        for _ in range(40):
            if engine.tokenizer.is_end(sampler.sample(row)):
                break
        sampler.close()
    return "written"

def run_all():
    for line in sys.stdin.read().splitlines():
        name, source = line.split(": ", 1)
        attempt(name, lambda: write(eval(source)))

threading.stack_size(512 * 1024)
thread = threading.Thread(target=run_all)
thread.start()
thread.join()
"""


def test_odd_guides_are_errors_or_are_followed(tiny_llama: Path) -> None:
    """And llguidance says so to the caller alone, not on stderr."""
    cases = "".join(f"{name}: {source}\n" for name, source in {**REFUSED, **WRITTEN}.items())
    seen = outcomes(CODE, tiny_llama, stdin=cases)
    assert seen == dict.fromkeys(REFUSED, "GrammarError") | dict.fromkeys(WRITTEN, "written")
