"""TypedDicts as schemas: those without a docstring, and those of the standard library."""

from __future__ import annotations

import sys
import typing

import pytest
import typing_extensions

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.schema import is_recursive, output_schema

PARTY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class Party(typing_extensions.TypedDict):
    name: str


class Lease(typing_extensions.TypedDict):
    party: Party


class PlainParty(typing.TypedDict):
    name: str


class PlainTree(typing.TypedDict):
    children: list[PlainTree]


def test_a_typed_dict_is_not_described_as_the_built_in_dict() -> None:
    """Neither it nor one inside it, where it has no docstring."""
    found = output_schema(Lease)
    assert found.description == ""
    assert found.json_schema == {
        "title": "Lease",
        "type": "object",
        "properties": {"party": PARTY},
        "required": ["party"],
    }


def test_a_typed_dict_of_the_standard_library_will_do() -> None:
    """Which pydantic refuses before Python 3.12, but LangChain's other models take."""
    found = output_schema(PlainParty)
    schema = {key: found.json_schema[key] for key in PARTY}
    assert schema["required"] == ["name"]
    assert schema["properties"]["name"]["type"] == "string"


def test_recursion_that_cannot_be_read_is_refused_with_what_to_do() -> None:
    """In a TypedDict of the standard library, before Python 3.12."""
    if sys.version_info >= (3, 12):
        assert is_recursive(output_schema(PlainTree).json_schema)
    else:
        with pytest.raises(ConfigurationError, match=r"typing_extensions\.TypedDict"):
            output_schema(PlainTree)
