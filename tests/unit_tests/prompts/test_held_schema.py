"""What decoding is held to: whole answers are valid for the user's schema, or it is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator
from pydantic import BaseModel, Field, create_model

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.held_schema import check_schema, held_schema
from langchain_swarmkv.prompts.schema import output_schema
from tests.unit_tests.engine.test_guided_schemas import (
    FAVOURITES,
    INTEGER,
    KEPT,
    LOOSENED,
    REFUSED,
    STRING,
    closed,
    is_valid,
    ref,
    takes,
    with_defs,
    write,
)

# By the rules of JSON, and of decimal numbers, these are valid.
STILL_TAKEN = ("a decimal fraction", "digits that no float has")


def held_guide(schema: dict[str, Any]) -> str:
    check_schema(schema, "The schema")
    return f"start: %json {json.dumps(held_schema(schema), ensure_ascii=False)}\n"


def refusal(schema: Any) -> str:
    with pytest.raises(ConfigurationError) as told:
        check_schema(schema, "The schema")
    return str(told.value)


def is_finite(text: str) -> bool:
    """Whether no number is too large for a float."""
    return "Infinity" not in json.dumps(json.loads(text))


def texts(guide: str, seeds: range) -> list[str]:
    written = (
        write(guide, np.random.default_rng(seed), FAVOURITES[seed % len(FAVOURITES)])
        for seed in seeds
    )
    return [text for text in written if text is not None]


# -- all that is written is valid ----------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(KEPT.keys() - {"format hostname"}))
def test_what_llguidance_keeps_is_kept(name: str) -> None:
    """What is changed for it does not loosen it, and leaves something to write."""
    written = texts(held_guide(KEPT[name]), range(7))
    assert written
    assert all(is_valid(KEPT[name], text) for text in written), written


@pytest.mark.parametrize("name", [*LOOSENED, *REFUSED])
def test_what_llguidance_does_not_keep_is_refused_or_said_exactly(name: str) -> None:
    """Before anything is decoded."""
    schema, text = {**LOOSENED, **REFUSED}[name]
    try:
        guide = held_guide(schema)
    except ConfigurationError:
        return
    if name in REFUSED:
        # False; one that holds nothing; and two that are said in another way, see below.
        assert name in (
            *("uniqueItems", "an unknown format", "propertyNames", "unevaluatedProperties"),
        )
        return
    assert takes(guide, text) is (name in STILL_TAKEN)


NUMBER_BOUNDS = st.fixed_dictionaries(
    {},
    optional={
        key: st.sampled_from([-10, -3.7, -1, 0, 0.5, 1, 2, 7.25, 100])
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    },
)
LENGTHS = st.fixed_dictionaries(
    {}, optional={"minLength": st.integers(0, 2), "maxLength": st.integers(2, 5)}
)
LEAVES = st.one_of(
    st.sampled_from(
        [{}, True, {"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}]
    ),
    st.builds(
        lambda kind, bounds: {"type": kind, **bounds},
        st.sampled_from(["integer", "number"]),
        NUMBER_BOUNDS,
    ),
    st.builds(lambda lengths: {"type": "string", **lengths}, LENGTHS),
    st.sampled_from(["^[a-z]+$", r"\d{2}", r"^\[[0-9]\]$", "^--?x*$", "^(a|b.)*$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "time", "date-time", "duration", "uuid", "ipv4"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.lists(st.sampled_from(["a", 1, 2.5, None, True, [1], {"a": "é"}]), min_size=1).map(
        lambda values: {"enum": values}
    ),
)
NAMES = st.sampled_from(["a", "b", "format", "enum", "properties", "é\n"])


def larger(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(NAMES, schemas, max_size=3)
    return st.one_of(
        st.builds(
            lambda properties, required, more: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                **more,
            },
            properties,
            st.sets(NAMES),
            st.sampled_from(
                [{}, {"additionalProperties": False}, {"additionalProperties": INTEGER}]
            ),
        ),
        st.builds(
            lambda items, more: {"type": "array", "items": items, **more},
            schemas,
            st.sampled_from([{}, {"minItems": 1}, {"maxItems": 2}]),
        ),
        st.lists(schemas, min_size=1, max_size=3).map(lambda items: {"prefixItems": items}),
        st.lists(schemas, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        st.lists(schemas, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        st.builds(
            lambda properties, parts: {"properties": properties, "allOf": parts},
            properties,
            st.lists(schemas, max_size=1),
        ),
    )


SCHEMAS = st.recursive(LEAVES, larger, max_leaves=6).filter(lambda schema: schema is not True)


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_what_comes_out_of_any_schema_is_valid(schema: dict[str, Any], seed: int) -> None:
    """Unless it is refused; so it is where nothing fits it."""
    try:
        guide = held_guide(schema)
    except ConfigurationError:
        return
    for text in texts(guide, range(seed, seed + 3)):
        assert is_valid(schema, text), text


MONEY = Annotated[Decimal, Field(max_digits=6, decimal_places=2)]
SHARE = Annotated[Decimal, Field(ge=0, le=1)]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    y: int | None = None


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Tree(BaseModel):
    label: Annotated[str, Field(max_length=3)]
    children: list[Tree] = []


PET = Annotated[Cat | Dog, Field(discriminator="kind")]
TYPES: list[Any] = [
    *(int, float, bool, str, Any, None, date, time, datetime, timedelta, UUID, Colour, Point, Tree),
    *(Literal["a", 1], int | str, list[int], dict[str, int], tuple[int, str], PET, list[PET]),
    *(Decimal, MONEY, SHARE, Annotated[Decimal, Field(max_digits=3)]),
    *(Annotated[int, Field(ge=3, lt=9)], Annotated[float, Field(gt=0, le=1.5)], Cat | Dog | None),
    *(Annotated[str, Field(pattern=r"^[A-Z]\d*$", min_length=2)], dict[str, list[Point]]),
]


@settings(max_examples=50, deadline=None)
@given(
    types=st.lists(st.sampled_from(TYPES), min_size=1, max_size=4),
    optional=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_comes_out_of_a_pydantic_class_is_one(
    types: list[Any], optional: bool, seed: int
) -> None:
    """By its JSON schema, and by the class itself."""
    fields: dict[str, Any] = {f"f{i}": (kind, ...) for i, kind in enumerate(types)}
    if optional:
        fields["last"] = (types[0], None)
    model = create_model("Model", **fields)
    schema = output_schema(model).json_schema
    guide = held_guide(schema)
    for text in texts(guide, range(seed, seed + 3)):
        assert is_valid(schema, text), text
        assert is_valid(model.model_json_schema(), text), text
        if is_finite(text):  # no schema tells of it, and what is not is refused as it comes in
            model.model_validate_json(text)


@pytest.mark.parametrize("kind", [Decimal, MONEY, SHARE])
def test_decimals_come_out_and_are_decimals(kind: Any) -> None:
    """With the bounds and digits of the field."""
    model = create_model("Model", value=(kind, ...))
    written = texts(held_guide(output_schema(model).json_schema), range(30))
    assert written
    for text in filter(is_finite, written):
        model.model_validate_json(text)


# -- objects -------------------------------------------------------------------------------------

OPEN_B = {"type": "object", "properties": {"b": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        (OPEN_B, "{}", '{"c": 1}'),
        ({"items": OPEN_B}, '[{"b": 1}]', '[{"c": 1}]'),
        ({**OPEN_B, "additionalProperties": STRING}, '{"c": "x"}', '{"c": 1}'),
        ({"type": "object"}, '{"c": 1}', "[]"),
        ({"allOf": [OPEN_B]}, '{"b": 1}', '{"c": 1}'),
        ({"allOf": [OPEN_B, {"required": ["c"]}]}, '{"c": 1}', '{"b": 1}'),
        (with_defs({**ref("B"), "required": ["c"]}, B=OPEN_B), '{"c": 1}', '{"b": 1}'),
        (
            {"anyOf": [OPEN_B], "oneOf": [{"properties": {"c": INTEGER}, "required": ["c"]}]},
            '{"c": 1}',
            '{"b": 1}',
        ),
        (
            {"properties": {"a": INTEGER, "b": INTEGER}, "anyOf": [{"required": ["a"]}]},
            '{"a": 1}',
            '{"b": 1}',
        ),
        (with_defs({"anyOf": [ref("B"), {"type": "null"}]}, B=OPEN_B), "null", '{"c": 1}'),
    ],
)
def test_objects_are_closed_unless_their_properties_are_told_in_several_places(
    schema: dict[str, Any], taken: str, not_taken: str
) -> None:
    """There, what one part does not know another may require."""
    guide = held_guide(schema)
    assert takes(guide, taken)
    assert not takes(guide, not_taken)


def test_objects_are_written_in_one_way() -> None:
    """No white space to pad with, and no second spelling of a key, for which nothing would hold."""
    properties = {"a": {"type": "integer"}}
    guide = held_guide({"type": "object", "properties": properties, "additionalProperties": True})
    assert takes(guide, '{"a": 1, "b": "x"}')
    for text in ('{"a": 1, "\\u0061": "x"}', '{"a":1}', '{"a": 1 }', '{"a": 1}\n', '{\n"a": 1}'):
        assert not takes(guide, text), text


def test_names_and_values_that_look_like_keywords_are_let_be() -> None:
    """Of properties, definitions, constants, defaults and examples."""
    value = {"properties": {"format": "date", "uniqueItems": False, "$schema": 1}, "pattern": r"\S"}
    names = ("format", "pattern", "enum", "properties", "$ref", "contentEncoding", "$schema")
    schema = {
        **closed(**dict.fromkeys(names, INTEGER), constant={"const": value}, of=ref("properties")),
        "$defs": {"properties": {"enum": [value]}},
        "default": value,
        "examples": [value],
    }
    held = held_schema(schema)
    assert held["properties"] == schema["properties"]
    assert held["default"] == value
    written = {**dict.fromkeys(names, 1), "constant": value, "of": value}
    assert takes(held_guide(schema), json.dumps(written))


@pytest.mark.parametrize(
    "reference",
    [
        "#/$defs/A",
        "#/properties/a",
        "#/properties/c/anyOf/0",
        "#/properties/d/items",
        "https://a.org/s#/$defs/A",
        "#here",
        "item",
    ],
)
def test_references_of_all_kinds_are_followed(reference: str) -> None:
    """And what they lead to is held, too."""
    item = {"$id": "item", "$anchor": "near", "type": "string", "format": "date"}
    schema = {
        "$id": "https://a.org/s",
        "$defs": {"A": item, "B": {"$anchor": "here", "type": "string", "format": "date"}},
        "properties": {
            "a": {"type": "string", "format": "date"},
            "b": {"$ref": reference},
            "c": {"anyOf": [{"format": "date", "type": "string"}]},
            "d": {"items": {"format": "date", "type": "string"}},
        },
        "required": ["b"],
    }
    guide = held_guide(schema)
    assert takes(guide, '{"b": "2024-02-29"}')
    assert not takes(guide, '{"b": "2023-02-29"}')


@pytest.mark.parametrize("kind", ["definitions", "$defs"])
def test_tags_of_unions_are_written_though_they_have_a_default(kind: str) -> None:
    """Without its tag pydantic could not tell what an object is; definitions may be booleans."""
    cat = {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat"}}}
    dog = {"type": "object", "properties": {"kind": {"const": "dog", "default": "dog"}}}
    schema = {
        "discriminator": {"propertyName": "kind"},
        "oneOf": [{"$ref": f"#/{kind}/Cat"}, {"$ref": f"#/{kind}/Dog"}],
        kind: {"Cat": cat, "Dog": dog, "Any": True},
    }
    guide = held_guide(schema)
    assert takes(guide, '{"kind": "dog"}')
    assert not takes(guide, "{}")
    assert "required" not in cat


@pytest.mark.parametrize("draft", ["draft-04/schema#", "draft-06/schema#", "draft-07/schema#"])
def test_the_draft_does_not_matter(draft: str) -> None:
    """What an old one does not know would be passed over; tuples are those of any."""
    old: dict[str, Any] = {"$schema": f"http://json-schema.org/{draft}"}
    assert "dependentRequired" in refusal({**old, "dependentRequired": {"a": ["b"]}})
    assert not takes(held_guide({**old, "const": 5}), "6")
    pair = {"items": [INTEGER, {"format": "date"}], "additionalItems": False, "type": "array"}
    guide = held_guide({**old, **pair})
    assert takes(guide, '[1, "2024-02-29"]')
    assert not takes(guide, '[1, "2023-02-29"]')
    assert not takes(guide, '[1, "2024-02-29", 1]')
    mixed = held_guide({**old, "prefixItems": [INTEGER], "additionalItems": False})
    assert takes(mixed, "[1, 2]")
    assert not takes(mixed, '["a"]')


# -- strings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kept", "not_kept"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0001-01-01"], ["2023-02-29", "1900-02-29"]),
        ("date", ["9999-12-31"], ["0000-01-01", "2024-04-31", "2024-13-01"]),
        ("time", ["23:59:59Z", "00:00:00.5+23:59"], ["23:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2024-02-29", "2024-02-30T12:00:00Z"]),
        ("duration", ["P1Y2M3DT4H5M6S", "P3W", "PT1M", "P1DT1S"], ["P", "PT", "P1Y2D", "P1H"]),
        ("duration", ["PT1H2M3S", "PT1H", "PT2M3S"], ["PT1H2S", "P1DT1H2S"]),
        ("duration", ["P999999Y"], ["P9999999Y", "P1W1D", "1D"]),
    ],
)
def test_formats_know_what_there_is(name: str, kept: list[str], not_kept: list[str]) -> None:
    """So that pydantic takes what is written."""
    guide = held_guide({"type": "string", "format": name})
    assert [text for text in kept + not_kept if takes(guide, json.dumps(text))] == kept


ZOD_DATE = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29"
    r"|\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|(?:02)-(?:0[1-9]|1\d|2[0-8])))$"
)
V4 = "0aec1a28-7a5f-4c0e-9d3c-0d8f1c2b3a4d"


@pytest.mark.parametrize(
    ("schema", "kept", "not_kept"),
    [
        ({"format": "date", "pattern": ZOD_DATE}, ["2024-02-29"], ["2023-02-29", "2024-13-01"]),
        ({"format": "date", "pattern": "^2024"}, ["2024-02-29"], ["2025-01-01", "2024-02-30"]),
        ({"format": "time", "maxLength": 9}, ["12:00:00Z"], ["12:00:00+01:00"]),
        (
            {"format": "date-time", "pattern": "Z$", "allOf": [{"minLength": 3}]},
            ["2024-02-29T12:00:00Z"],
            ["2024-02-29T12:00:00+01:00"],
        ),
        ({"format": "uuid", "pattern": "^0"}, [V4], ["1" + V4[1:]]),
        ({"format": "uuid4"}, [V4], [V4.replace("-4c", "-7c"), V4.replace("-9", "-1")]),
        ({"format": "ipv4", "pattern": r"^10\."}, ["10.0.0.1"], ["11.0.0.1", "10.0.0.256"]),
        ({"format": "ipv6"}, ["::1", "fe80::1"], ["1", "fe80::g"]),
        ({"format": "byte"}, ["", "aGk=", "aGkh"], ["aGk", "aGk!", "=aGk"]),
        ({"format": "base64", "contentEncoding": "base64", "pattern": "^a"}, ["aGk="], ["bGk="]),
        ({"contentEncoding": "base64"}, ["aGk="], ["aGk"]),
        ({"contentEncoding": "base64url"}, ["aG-_", "aGk"], ["a+k="]),
        ({"format": "int64"}, ["-5", "9007199254740993"], ["05", "x", "1.5"]),
        ({"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ["12.50", "-3"], ["", ".", "-", "1e3"]),
        ({"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"}, ["12.50"], ["1.555", "."]),
        (
            {"pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"},
            ["123.45", "-1"],
            ["1234", "1.234"],
        ),
        (
            {"pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d{0,5}\.\d{0,5}0*$)"},
            ["12345"],
            ["123456", "1234.567"],
        ),
    ],
)
def test_strings_told_in_two_ways_or_by_looking_ahead_are_held(
    schema: dict[str, Any], kept: list[str], not_kept: list[str]
) -> None:
    """Zod tells dates by format and pattern, pydantic decimals by a pattern that looks ahead."""
    schema = {"type": "string", **schema}
    guide = held_guide(schema)
    assert [text for text in kept + not_kept if takes(guide, json.dumps(text))] == kept
    assert all(is_valid(schema, json.dumps(text)) for text in kept)
    for text in texts(guide, range(5)):
        assert is_valid(schema, text), text


NUMBER = {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "kept", "not_kept"),
    [
        ({**INTEGER, "format": "int32"}, ["2147483647"], ["2147483648", "-2147483649"]),
        ({**INTEGER, "format": "uint32", "minimum": 5}, ["5", "4294967295"], ["4", "4294967296"]),
        ({**INTEGER, "format": "uint8", "maximum": 300}, ["255"], ["256", "-1"]),
        ({**INTEGER, "format": "int64"}, ["9223372036854775807"], ["1.5"]),
        ({**INTEGER, "format": "uint64", "minimum": None}, ["18446744073709551615"], ["-1"]),
        ({**NUMBER, "format": "double"}, ["1.5", "-3"], ['"1.5"']),
        ({**NUMBER, "format": "float"}, ["1.5"], ["null"]),
        ({**INTEGER, "format": "unix-time"}, ["1"], ['"1"']),
        ({"type": ["integer", "null"], "format": "int32"}, ["1", "null"], ["2147483648"]),
        ({"format": "int32"}, ["1", '"text"'], ["2147483648"]),
        ({**INTEGER, "minimum": 0, "exclusiveMinimum": True}, ["1"], ["0"]),
        ({**INTEGER, "maximum": 5, "exclusiveMaximum": False}, ["5"], ["6"]),
        ({**INTEGER, "nullable": True}, ["1", "null"], ['"x"']),
        ({**INTEGER, "nullable": False}, ["1"], ["null"]),
        ({"x-kubernetes-int-or-string": True}, ["1", '"10%"'], ["null", "[]"]),
        ({"anyOf": [INTEGER, STRING], "x-kubernetes-int-or-string": True}, ["1", '"a"'], ["{}"]),
        (
            {**closed(a=INTEGER), "required": None, "enum": None, "items": None, "format": None},
            ["{}", '{"a": 1}'],
            ['{"b": 1}'],
        ),
        (
            {"properties": {"a": INTEGER}, "type": "object",
             "x-kubernetes-preserve-unknown-fields": True},
            ['{"a": 1, "b": "x"}'],
            ['{"a": "x"}'],
        ),
        ({"properties": {"a": INTEGER}, "required": ["z"]}, ['{"z": 1}'], ["{}", '{"a": 1}']),
        ({**OPEN_B, "unevaluatedProperties": False}, ['{"b": 1}'], ['{"c": 1}']),
        ({"type": "array", "items": {"anyOf": [{"not": {}}, INTEGER]}}, ["[1]"], ['["x"]']),
    ],
)  # fmt: skip
def test_what_openapi_kubernetes_go_and_old_drafts_say_is_held(
    schema: dict[str, Any], kept: list[str], not_kept: list[str]
) -> None:
    """A number's format is a bound where that is exact, and says nothing otherwise."""
    guide = held_guide(schema)
    assert [text for text in kept + not_kept if takes(guide, text)] == kept


@pytest.mark.parametrize(
    ("names", "kept", "not_kept"),
    [
        ({"type": "string"}, ['{"x": 1}', "{}"], ['{"x": "y"}']),
        (True, ['{"x": 1}'], ['{"x": "y"}']),
        ({"type": "string", "enum": ["a", "b"]}, ['{"a": 1}', "{}"], ['{"c": 1}', '{"a": "x"}']),
        ({"const": "a"}, ['{"a": 1}'], ['{"b": 1}']),
        ({"pattern": "^x-"}, ['{"x-a": 1}'], ['{"a": 1}', '{"x-a": "y"}']),
    ],
)
def test_names_of_properties_are_held_where_they_are_told(
    names: Any, kept: list[str], not_kept: list[str]
) -> None:
    """As zod's records tell them."""
    schema = {"type": "object", "propertyNames": names, "additionalProperties": INTEGER}
    guide = held_guide(schema)
    assert [text for text in kept + not_kept if takes(guide, text)] == kept
    assert [text for text in kept + not_kept if is_valid(schema, text)] == kept
    assert "propertyNames" in refusal({**schema, "propertyNames": {"minLength": 2}})


def test_an_id_beside_a_reference_does_not_lead_it_elsewhere() -> None:
    """Up to draft 7 it does not count, later it does: held where that is clear, else refused."""
    schema: dict[str, Any] = {
        "$id": "http://a.org/base/",
        "definitions": {
            "inner": {"$id": "http://a.org/foo.json", "type": "string"},
            "base": {"$id": "foo.json", "type": "number"},
        },
        "allOf": [{"$id": "http://a.org/", "$ref": "foo.json"}],
    }
    assert "`$id` beside a `$ref`" in refusal(schema)
    old = {**schema, "$schema": "http://json-schema.org/draft-07/schema#"}
    guide = held_guide(old)
    for value in ("a", 1):
        assert takes(guide, json.dumps(value)) is Draft7Validator(old).is_valid(value)
    at_the_top = with_defs({"$id": "http://a.org/s", **ref("A")}, A=INTEGER)
    assert takes(held_guide(at_the_top), "1")
    assert not takes(held_guide(at_the_top), '"a"')


@pytest.mark.parametrize("name", ["hostname", "unknown", "uuid9", "regex", "iri", "decimal"])
def test_other_formats_are_refused(name: str) -> None:
    """By name, and wherever they are."""
    assert repr(name) in refusal(closed(a={"anyOf": [{"type": "string", "format": name}]}))


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"^\[[0-9]+\]$", r"^--[a-z-]+$", r"^\\D$", r"^[+*?(]$", r"^\(?x\)?$", r"^a{2,3}?b$"),
        *(r"^[\w.-]+@[\w-]+\.[a-z]{2,}$", r"^(?:a|b)+$", r"^\x41\u0042$", r"^[^,;]*$", r"^~~&&$"),
    ],
)
def test_patterns_that_all_dialects_read_alike_are_held(pattern: str) -> None:
    """What they let out matches in Python."""
    written = texts(held_guide({"type": "string", "pattern": pattern}), range(10))
    assert written
    assert all(re.search(pattern, json.loads(text)) for text in written)


@pytest.mark.parametrize(
    "part",
    [
        *(r"\W", r"\S", r"\D", r"\b", r"\B", r"\A", r"\Z", r"\pL", r"\a", r"\v", r"\1", r"\<"),
        *(r"\x{41}", r"[^\w]", r"[a\D]", "[[:alpha:]]", "[a&&b]", "[a--b]", "[a~~b]", "[]a]"),
        *("(?=a)", "(?i)", "(?P<n>a)", "(?#c)", "x++", "x**", "x{2}+", r"[\d-z]", "{,3}"),
    ],
)
def test_patterns_that_dialects_read_differently_are_refused(part: str) -> None:
    """From where they do, also as patterns of keys."""
    assert (
        repr(f"{part}$") in refusal({"type": "string", "pattern": f"^a{part}$"}) or part[0] == "x"
    )
    assert "pattern" in refusal({"patternProperties": {f"^a{part}$": INTEGER}})


# -- the rest ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "feature"),
    [
        ({"enum": [{"a": [2**53 + 1]}]}, "enum with a number"),
        ({"const": [-(2**54)]}, "const with a number"),
        ({"maximum": 1e300}, "maximum with a number"),
        ({"exclusiveMinimum": 0, "maximum": 0.8}, "exclusive bound"),
        ({"minProperties": 2}, "minProperties"),
        ({"contentEncoding": "quoted-printable"}, "contentEncoding"),
        ({"contentEncoding": "base64", "format": "uuid"}, "contentEncoding"),
        ({"contentMediaType": "text/plain"}, "contentMediaType"),
        ({"contentSchema": {}}, "contentSchema"),
        ({"type": "integer", "required": True}, "required"),
        ({"$ref": "#/x-own/a", "x-own": {"a": {"format": "date"}}}, "#/x-own/a"),
        ({"$ref": "#/0", "0": {"format": "date"}}, "#/0"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        ({"items": {"x-guidance": {"lenient": True}, "not": {"const": 1}}}, "not"),
    ],
)
def test_what_cannot_be_held_to_is_named(schema: dict[str, Any], feature: str) -> None:
    """At the top, and within another schema."""
    assert feature in refusal(schema)
    if not schema.keys() & {"x-guidance", "$ref"}:
        for outer in (closed(a=schema), {"items": [schema]}, {"$defs": {"A": schema}, **ref("A")}):
            assert feature in refusal(outer)


def test_what_llguidance_would_pass_over_is_refused_without_a_check() -> None:
    """A call's schema may come by options that nobody checked before."""
    with pytest.raises(ConfigurationError, match="hostname"):
        held_schema({"items": {"format": "hostname"}})


@pytest.mark.parametrize(
    "schema",
    [
        *({"enum": {1}}, {"const": b"a"}, {"description": {1}}, {"const": float("nan")}),
        *({"default": float("inf")}, {"enum": ["\ud800"]}, {"format": ["date"]}, {"format": {}}),
        *({"minimum": [], "maximum": 3}, {"minimum": "5"}, {"pattern": 5}, {"type": "text"}),
        *({"properties": ["a"]}, {"anyOf": {}}, {"enum": "abc"}, {"allOf": 5}, {"required": "a"}),
    ],
)
def test_what_is_no_json_schema_is_refused(schema: Any) -> None:
    """With an error of this package."""
    refusal(schema)


ODD = """
import sys, threading
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.held_schema import check_schema
from langchain_swarmkv.prompts.schema import output_schema

def nested(key, value, depth=30_000):
    for _ in range(depth):
        value = {key: value}
    return value

cyclic = {"type": "object", "properties": {}}
cyclic["properties"]["again"] = cyclic
cyclic_values = {"enum": []}
cyclic_values["enum"].append(cyclic_values)
listed = []
for _ in range(30_000):
    listed = [listed]

def check():
    for schema in (
        nested("items", {}), nested("const", 1), nested("x-own", {}), {"const": listed},
        cyclic, cyclic_values, {"enum": list(range(100_000))},
        {"properties": {f"p{i}": {} for i in range(20_000)}},
        {"anyOf": [{"allOf": [{"const": i}]} for i in range(20_000)]},
    ):
        for read in (output_schema, lambda schema: check_schema(schema, "It")):
            try:
                read(schema)
            except ConfigurationError as error:
                assert len(str(error)) < 1000, len(str(error))
            else:
                assert read is output_schema, "taken"
    print("refused")

threading.stack_size(512 * 1024)
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""


def test_deep_huge_and_cyclic_schemas_are_refused_and_end_no_process() -> None:
    """On a thread with a small stack."""
    seen = subprocess.run(
        [sys.executable, "-c", ODD], capture_output=True, text=True, timeout=100, check=False
    )
    assert (seen.stdout, seen.stderr[-500:]) == ("refused\n", "")
