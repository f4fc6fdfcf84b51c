"""What users give as a schema becomes JSON schema, and JSON becomes what they asked for."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError, v1
from typing_extensions import NotRequired, TypedDict

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.schema import is_recursive, output_schema


class Kind(enum.Enum):
    NEW = "new"


class Finding(BaseModel):
    """A finding."""

    model_config = ConfigDict(strict=True)
    kind: Kind
    on: date
    pair: tuple[int, str]


class OldFinding(v1.BaseModel):
    """An old finding."""

    text: str
    on: date


@dataclasses.dataclass
class Part:
    on: date


@dataclasses.dataclass
class Whole:
    parts: list[Part]


class Claim(TypedDict):
    """A claim."""

    text: Annotated[str, ..., "What is claimed."]
    on: NotRequired[date]


class Tree(TypedDict):
    label: str
    children: list[Tree]


PARSED: list[tuple[Any, Any, Any]] = [
    (
        Finding,
        {"kind": "new", "on": "2024-02-29", "pair": [1, "a"]},
        Finding(kind=Kind.NEW, on=date(2024, 2, 29), pair=(1, "a")),
    ),
    (RootModel[list[int]], [1, 2], RootModel[list[int]]([1, 2])),
    (
        OldFinding,
        {"text": "x", "on": "2024-02-29"},
        OldFinding(text="x", on=date(2024, 2, 29)),
    ),
    (Whole, {"parts": [{"on": "2024-02-29"}]}, Whole([Part(date(2024, 2, 29))])),
    (Claim, {"text": "x", "on": "2024-02-29"}, {"text": "x", "on": "2024-02-29"}),
    (Claim, {"text": "x"}, {"text": "x"}),
    (
        Tree,
        {"label": "a", "children": [{"label": "b", "children": []}]},
        {"label": "a", "children": [{"label": "b", "children": []}]},
    ),
    ({"type": "array", "items": {"type": "integer"}}, [1], [1]),
]


@pytest.mark.parametrize(("schema", "value", "parsed"), PARSED)
def test_json_becomes_what_was_asked_for(schema: Any, value: Any, parsed: Any) -> None:
    """Objects of classes, strict ones too, are made from JSON; of dicts, plain data."""
    found = output_schema(schema)
    Draft202012Validator.check_schema(found.json_schema)
    assert Draft202012Validator(found.json_schema).is_valid(value)
    assert found.validate(json.dumps(value)) == parsed
    assert found.is_dict == isinstance(parsed, (dict, list))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (Finding, {"kind": "old", "on": "2024-02-29", "pair": [1, "a"]}),
        (OldFinding, {}),
        (Whole, {"parts": [{"on": "2023-02-29"}]}),
        (Claim, {"text": 1}),
        (Tree, {"label": "a"}),
    ],
)
def test_json_that_is_not_what_was_asked_for_is_an_error(schema: Any, value: Any) -> None:
    """Where decoding was not held to the schema, TypedDicts are checked like classes."""
    with pytest.raises(ValueError, match=r"(?i)valid|required|date"):
        output_schema(schema).validate(json.dumps(value))


def test_names_and_descriptions_are_taken_over() -> None:
    """Names are made such that tools may have them."""
    assert (output_schema(Finding).name, output_schema(Finding).description) == (
        "Finding",
        "A finding.",
    )
    assert output_schema(RootModel[list[int]]).name == "RootModel_list_int__"
    assert output_schema({"type": "object"}).name == "answer"
    assert output_schema({"title": "My claim", "type": "object"}).name == "My_claim"
    text = output_schema(Claim).json_schema["properties"]["text"]
    assert text["type"] == "string"


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_schema_of_a_function_is_that_of_its_parameters(is_wrapped: bool) -> None:
    """As OpenAI's dicts have it, with the tool around it or not."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "find", "description": "Finds.", "parameters": parameters}
    given = {"type": "function", "function": function} if is_wrapped else function
    found = output_schema(given)
    assert (found.name, found.description, found.json_schema) == ("find", "Finds.", parameters)


class Callback(BaseModel):
    call: Callable[[], None]


@pytest.mark.parametrize("schema", [int, "text", None, [1], Kind, Callback, {"enum": {1}}])
def test_what_makes_no_schema_is_refused(schema: Any) -> None:
    """With its name."""
    with pytest.raises(ConfigurationError, match="makes no JSON schema"):
        output_schema(schema)


@pytest.mark.parametrize("method", ["function_calling", "json_mode"])
def test_only_objects_can_be_called_for(method: str) -> None:
    """A tool's arguments are an object, and so is what JSON mode makes."""
    found = output_schema(RootModel[list[int]])
    assert found.call_options("json_schema")
    with pytest.raises(ConfigurationError, match="'array'"):
        found.call_options(method)
    assert output_schema(Finding).call_options(method)


def test_recursion_is_seen_by_whatever_way_it_goes() -> None:
    """By way of others, or of the whole; not where a definition is only used twice."""
    by_two = {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"items": [{"$ref": "#/$defs/A"}]}}}
    assert is_recursive(by_two)
    assert is_recursive({"properties": {"a": {"$ref": "#"}}, "$defs": {}})
    assert not is_recursive({"$defs": {"A": {}}, "allOf": [{"$ref": "#/$defs/A"}] * 2})


def test_errors_of_validation_stay_their_own() -> None:
    """Pydantic's say which field is wrong."""
    with pytest.raises(ValidationError, match="kind"):
        output_schema(Finding).validate("{}")


BODY = {"type": "object", "properties": {"ok": {"type": "boolean"}}}


@pytest.mark.parametrize(
    "given",
    [
        {"name": "verdict", "parameters": BODY},
        {"type": "function", "function": {"name": "verdict", "parameters": BODY}},
        {"name": "verdict", "schema": BODY, "strict": True},
        {"type": "json_schema", "json_schema": {"name": "verdict", "schema": BODY}},
        {"name": "verdict", "input_schema": BODY},
    ],
)
def test_a_schema_is_found_where_others_put_it(given: dict[str, Any]) -> None:
    """OpenAI's functions, tools and response formats, Anthropic's tools."""
    found = output_schema(given)
    assert (found.name, found.json_schema) == ("verdict", BODY)


def test_a_dict_that_says_nothing_is_no_schema() -> None:
    """Decoding would be held to nothing."""
    with pytest.raises(ConfigurationError, match="no keyword of JSON schema"):
        output_schema({"propertys": {"ok": {"type": "boolean"}}})
