"""What a guide made from a JSON schema lets through.

Every text that comes out whole is valid for the schema, or the schema is refused with what is not
supported; the exceptions are listed, each with a text that should not have come out.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from langchain_swarmkv.engine.fake_tokenizer import END_ID, NUM_TOKENS, FakeTokenizer
from langchain_swarmkv.engine.guide import GuideCompiler
from langchain_swarmkv.errors import GrammarError

COMPILER = GuideCompiler(FakeTokenizer())
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_HEX_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
FAVOURITES = [b"", b"0", b"0123456789eE+-.", b"a", b"\\nu", bytes(range(128, 256)), b'ab",']

INTEGER: dict[str, Any] = {"type": "integer"}
STRING: dict[str, Any] = {"type": "string"}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def with_defs(schema: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    return {**schema, "$defs": definitions}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


NODE = closed(value=INTEGER, next={"anyOf": [ref("Node"), {"type": "null"}]})
PETS = {
    "Cat": closed(kind={"const": "cat", "type": "string"}, lives=INTEGER),
    "Dog": closed(kind={"const": "dog", "type": "string"}, name=STRING),
}
PET = {
    "discriminator": {"mapping": {n.lower(): ref(n)["$ref"] for n in PETS}, "propertyName": "kind"},
    "oneOf": [ref("Cat"), ref("Dog")],
}
KEPT: dict[str, Any] = {
    "anything": {},
    "nested": closed(a=closed(b=INTEGER), c=STRING),
    "references": with_defs(closed(a=ref("P"), b=ref("P")), P=closed(x={"type": "number"})),
    "reference and more": with_defs({**ref("A"), "maximum": 5}, A={**INTEGER, "minimum": 3}),
    "optional": {"type": "object", "properties": {"a": INTEGER, "b": STRING}},
    "optional, closed": {**closed(a=INTEGER, b=STRING), "required": []},
    "union": {"anyOf": [INTEGER, STRING, {"type": "null"}]},
    "list of types": {"type": ["integer", "string", "null"], "minimum": 3, "minLength": 2},
    "no type": {"minimum": 5, "minLength": 2, "items": INTEGER, "properties": {"a": INTEGER}},
    "enum": {"enum": ["a", 1, None, True, 1.5, {"x": [1]}, [1, "é\n"]]},
    "enum of another type": {"type": "integer", "enum": ["a", 1, 2.5]},
    "constant": {"const": {"a": [1, 2.0, "x"]}},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "no items": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 2, "maxItems": 2},
    "prefix": {"type": "array", "prefixItems": [INTEGER, STRING]},
    "prefix and rest": {"prefixItems": [INTEGER, STRING], "items": {"type": "null"}},
    "prefix, no rest": {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
    "recursive": with_defs(ref("Node"), Node=NODE),
    "recursive list": with_defs(ref("N"), N=closed(of={"type": "array", "items": ref("N")})),
    "dictionary": {"type": "object", "additionalProperties": INTEGER},
    "dictionary and property": {**closed(**{'a"\\': STRING}), "additionalProperties": INTEGER},
    "at most two keys": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
    "some property": {**closed(a=INTEGER, b=INTEGER), "required": [], "minProperties": 1},
    "one property": {**closed(a=INTEGER, b=INTEGER), "required": [], "maxProperties": 1},
    "patterns of keys": {"patternProperties": {"^x": INTEGER}, "additionalProperties": False},
    "a key by two rules": {
        "properties": {"xa": {**INTEGER, "minimum": 5}},
        "patternProperties": {"^x": {"maximum": 9}},
        "additionalProperties": STRING,
    },
    "required, not described": {**closed(a=INTEGER), "required": ["z"], "additionalProperties": {}},
    "bounds": {"type": "integer", "minimum": -5, "maximum": 1000},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": -1.5, "exclusiveMaximum": 17},
    "bounds of a number": {"type": "number", "minimum": -3.7, "maximum": 100},
    "exclusive bounds of a number": {
        "type": "number",
        "exclusiveMinimum": 0,
        "exclusiveMaximum": 1.5,
    },
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 12},
    "multiples of a half": {"type": "number", "multipleOf": 0.5, "maximum": 50},
    "multiples of two": {"allOf": [{**INTEGER, "multipleOf": 4}, {"multipleOf": 6}]},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": r"^[A-Z]{2}-\d+\w?$"},
    "pattern within": {"type": "string", "pattern": r"a|\d"},
    "alternatives of a pattern": {"type": "string", "pattern": "^a$|^b$"},
    "pattern and length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4},
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in ("time", "uuid", "email", "ipv4", "ipv6", "uri", "duration", "hostname")
    },
    "format and pattern": {"type": "string", "format": "email", "pattern": r"@x\.org$"},
    "discriminated union": with_defs(closed(pet=PET), **PETS),
    "oneOf of types": {"oneOf": [INTEGER, STRING]},
    "oneOf of constants": {"oneOf": [{"const": "a"}, {"const": "b"}]},
    "anyOf beside others": {"type": "string", "anyOf": [{"minLength": 3}, {"pattern": "^a"}]},
    "allOf": {"allOf": [{**closed(a=INTEGER)}, {"properties": {"a": {"minimum": 3}}}]},
    "allOf of a reference": with_defs(closed(a={"allOf": [ref("A")]}), A={"enum": ["x", "y"]}),
    "allOf of patterns": {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]},
    "allOf of arrays": {
        "allOf": [
            {"type": "array", "items": INTEGER, "minItems": 1},
            {"items": {"minimum": 3}, "maxItems": 2},
        ]
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        key: ({key: value}, rf'Unimplemented keys: \["{key}"\]')
        for key, value in {
            "uniqueItems": False,
            "contains": INTEGER,
            "minContains": 1,
            "propertyNames": {"pattern": "^a"},
            "not": INTEGER,
            "if": INTEGER,
            "then": INTEGER,
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {"a": {}},
            "dependencies": {"a": ["b"]},
            "unevaluatedProperties": False,
            "unevaluatedItems": False,
        }.items()
    },
    "an overlapping oneOf": ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf constraints"),
    "two of three properties": (
        {**closed(a=INTEGER, b=INTEGER, c=INTEGER), "required": [], "minProperties": 2},
        "min/maxProperties only supported",
    ),
    "patterns of keys that overlap": ({"patternProperties": {"^x": {}, "y$": {}}}, "not disjoint"),
    "an unknown format": ({"format": "binary"}, "Unknown format: binary"),
    "a look-ahead": ({"pattern": "a(?=b)"}, "look-around"),
    "a word boundary": ({"pattern": r"\bfoo"}, "lookarounds not supported"),
    "a back reference": ({"pattern": r"(a)\1"}, "backreferences"),
    "nothing that fits": ({"enum": []}, "Unsatisfiable"),
    "a reference to nothing": (ref("none"), "does not exist"),
}
LOOSENED: dict[str, tuple[dict[str, Any], str]] = {
    "a key twice": ({"additionalProperties": INTEGER, "minProperties": 2}, '{"a": 1, "a": 2}'),
    "a day that is none": ({"format": "date"}, '"2023-02-29"'),
    "a year that is none": ({"format": "date"}, '"0000-01-01"'),
    "a constant beyond 2**53": ({"const": 2**53 + 1}, str(2**53)),
    "a bound beyond 2**53": ({**INTEGER, "maximum": 2**53 + 3}, str(2**53 + 4)),
    "digits that no float has": ({"type": "number", "exclusiveMinimum": 1}, "1." + "0" * 20 + "1"),
    "an exclusive bound, less than 1 from the other": (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.8},
        "0",
    ),
    "a decimal fraction": ({"type": "number", "multipleOf": 0.01}, "9.77"),
    "other classes of characters": ({"type": "string", "pattern": r"^\W$"}, '"é"'),
}


def guide(schema: dict[str, Any], **options: Any) -> str:
    return LLMatcher.grammar_from_json_schema(
        {**schema, "x-guidance": {**SPACING, **NO_HEX_ESCAPES, **options}}
    )


def write(guide: str, rng: np.random.Generator, favourite: bytes) -> str | None:
    """A random text that likes some bytes and, as it grows, its end; None: it did not end."""
    weights = np.zeros(NUM_TOKENS)
    weights[list(favourite)] = 3
    ending = np.zeros(NUM_TOKENS)
    ending[list(b'"}]')] = 3
    ending[END_ID] = 4
    matcher = COMPILER.matcher(guide)
    written = bytearray()
    while len(written) < 300:
        noise: npt.NDArray[np.float64] = rng.gumbel(size=NUM_TOKENS)
        liked = noise + weights + ending * (len(written) / 40 if rng.random() < 0.9 else 0)
        token = int(np.where(matcher.allowed(), liked, -np.inf).argmax())
        matcher.accept(token)
        if token == END_ID:
            return written.decode()
        written.append(token)
    return None


def takes(guide: str, text: str) -> bool:
    """Whether the whole text may come out."""
    matcher = COMPILER.matcher(guide)
    for token in [*text.encode(), END_ID]:
        if not matcher.allowed()[token]:
            return False
        matcher.accept(token)
    return True


def is_valid(schema: dict[str, Any], text: str) -> bool:
    checker = Draft202012Validator.FORMAT_CHECKER
    return Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))


@pytest.mark.parametrize("name", KEPT)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), favourite=st.sampled_from(FAVOURITES))
def test_what_comes_out_is_valid(name: str, seed: int, favourite: bytes) -> None:
    """Whatever the model likes to write."""
    text = write(guide(KEPT[name]), np.random.default_rng(seed), favourite)
    assert text is None or is_valid(KEPT[name], text), text


@pytest.mark.parametrize("name", KEPT)
def test_something_comes_out(name: str) -> None:
    """Or the test above would show nothing."""
    rng = np.random.default_rng(0)
    assert any(write(guide(KEPT[name]), rng, b"0x.org@aBC-1") is not None for _ in range(20))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_named(name: str) -> None:
    """Nothing is left out silently."""
    schema, reason = REFUSED[name]
    with pytest.raises(GrammarError, match=reason):
        COMPILER.check(guide(schema))


@pytest.mark.parametrize("name", LOOSENED)
def test_what_is_known_to_be_let_through(name: str) -> None:
    """If this fails, llguidance has learnt it, and who refuses such schemas may stop."""
    schema, text = LOOSENED[name]
    assert takes(guide(schema), text)
    assert not is_valid(schema, text)


def test_a_key_cannot_be_spelled_in_another_way() -> None:
    """With hexadecimal escapes it can, and then its schema does not hold for it."""
    schema = {"type": "object", "properties": {"a": INTEGER}}
    text = '{"a": 1, "\\u0061": "x"}'
    assert not is_valid(schema, text)
    assert takes(guide(schema, json_allowed_escapes='nrbtf\\"u'), text)
    assert not takes(guide(schema), text)
