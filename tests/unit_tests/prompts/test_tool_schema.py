"""What calls are held to of odd tools' schemas, and what is checked of their arguments."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts import tool_schema as module
from langchain_swarmkv.prompts.call import Call
from langchain_swarmkv.prompts.plain_schema import plain_schema
from langchain_swarmkv.prompts.tool_schema import ToolSchema, check_strict, tool_schema
from tests.unit_tests.engine.test_guided_schemas import (
    COMPILER,
    FAVOURITES,
    INTEGER,
    STRING,
    closed,
    is_valid,
    takes,
    write,
)

DATA = Path(__file__).parents[2] / "data" / "tool_schemas.json"
TOOLS: dict[str, dict[str, Any]] = {
    each["name"]: each for each in json.loads(DATA.read_text(encoding="utf-8"))
}
"""In the manner of MCP servers, zod, pydantic, OpenAPI and Kubernetes. Each with arguments that
fit, with some that do not, and with what decoding cannot be held to."""


def read(parameters: dict[str, Any], name: str = "it") -> ToolSchema:
    return tool_schema({"name": name, "parameters": parameters})


def guide(schema: ToolSchema) -> str:
    return f"start: %json {json.dumps(schema.held, ensure_ascii=False)}\n"


def comes_out(schema: ToolSchema, arguments: Any) -> bool:
    """Whether a call may have these arguments: they can be written, and pass the check."""
    can_be_written = takes(guide(schema), json.dumps(arguments, ensure_ascii=False))
    return can_be_written and (schema.check is None or schema.check(arguments) is None)


@pytest.fixture(autouse=True)
def forget() -> None:
    module._tool_schema.cache_clear()


@pytest.mark.parametrize("name", TOOLS)
def test_arguments_that_fit_come_out_and_no_others(name: str) -> None:
    """Held while they are written, or refused when they are whole."""
    tool = TOOLS[name]
    schema = read(tool["parameters"])
    for arguments in tool["fits"]:
        assert comes_out(schema, arguments), arguments
    for arguments in tool["misfits"]:
        assert not comes_out(schema, arguments), arguments
    for feature in tool["unheld"]:
        assert any(feature in told for told in schema.unheld), schema.unheld
    assert bool(schema.unheld) is bool(tool["unheld"]), schema.unheld
    assert (schema.check is None) is not bool(tool["unheld"])


@pytest.mark.parametrize("name", TOOLS)
def test_what_is_held_is_written(name: str) -> None:
    """Something can be written; what passes the check then is valid for jsonschema."""
    tool = TOOLS[name]
    schema = read(tool["parameters"])
    written = [
        write(guide(schema), np.random.default_rng(seed), FAVOURITES[seed % len(FAVOURITES)])
        for seed in range(12)
    ]
    whole = [text for text in written if text is not None]
    assert whole
    # Unlike these, the judge takes only schemas that are right.
    if name not in ("php_no_arguments", "old_java_tool", "elsewhere", "not_a_pattern"):
        for text in whole:
            if comes_out(schema, json.loads(text)):
                assert is_valid(plain_schema(tool["parameters"]), text), text


def test_all_of_them_are_held_at_once() -> None:
    """As one agent may have them."""
    options = {"tools": [{"type": "function", "function": tool} for tool in TOOLS.values()]}
    call = Call.read(options)
    call.check()
    assert call.tools is not None
    assert len(call.tools.callable) == len(TOOLS)


@pytest.mark.parametrize("name", [name for name in TOOLS if TOOLS[name]["unheld"]])
def test_strict_tools_are_refused(name: str) -> None:
    """Naming the tool."""
    function = {"name": name, "parameters": TOOLS[name]["parameters"], "strict": True}
    with pytest.raises(ConfigurationError, match=name):
        check_strict(function)


def test_a_log_says_once_what_is_not_held(caplog: pytest.LogCaptureFixture) -> None:
    """Not at each turn of an agent."""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            read(TOOLS["repo_issue_write"]["parameters"], "issue_write")
            read(TOOLS["fs_read_file"]["parameters"], "read_file")
    [record] = caplog.records
    assert "'issue_write'" in record.getMessage()
    assert "uniqueItems" in record.getMessage()


@pytest.mark.parametrize(
    ("parameters", "arguments", "reason"),
    [
        (closed(a={"type": "array", "uniqueItems": True}), {"a": [1, 1]}, "at a: [1, 1] has non-"),
        (closed(a={"not": {"const": 5}}), {"a": 5}, "at a:"),
        ({"type": "object", "minProperties": 2}, {"a": 1}, "not have enough properties"),
        (closed(a={"pattern": "^(?!x)"}), {"a": "xy"}, "does not match"),
        ({"type": "object", "propertyNames": {"minLength": 2}}, {"a": 1}, "too short"),
        (closed(a={"type": "array", "contains": INTEGER}), {"a": ["x"]}, "at a:"),
        (
            {"patternProperties": {"^(?!y)x": INTEGER, "^z": {}}, "additionalProperties": False},
            {"b": 1},
            "'b' is not allowed",
        ),
        ({"patternProperties": {"^(?=x)": INTEGER}}, {"xa": "s"}, "at xa:"),
        ({"additionalProperties": STRING, "minProperties": 2}, {"a": 1, "b": "x"}, "at a:"),
    ],
)
def test_the_reason_says_what_does_not_fit_and_where(
    parameters: dict[str, Any], arguments: dict[str, Any], reason: str
) -> None:
    """In a sentence, which an agent may give back to its model."""
    check = read(parameters).check
    assert check is not None
    told = check(arguments)
    assert told is not None
    assert told.startswith("The arguments do not fit the schema of 'it'")
    assert reason in told


def test_a_pattern_that_takes_for_ever_is_given_up() -> None:
    """Of a value, and of a key; the call does not fit then."""
    endless, text = "^(a|aa)*(?!x)$", "a" * 200 + "b"
    for parameters, arguments in (
        (closed(a={"pattern": endless}), {"a": text}),
        ({"patternProperties": {endless: INTEGER}}, {text: 1}),
        ({"patternProperties": {endless: True}, "additionalProperties": False}, {text: 1}),
    ):
        check = read(parameters).check
        assert check is not None
        assert "could not be checked" in str(check(arguments))


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a reference leads."""
    attempts: list[object] = []

    def refuse(*args: object, **_options: object) -> Any:
        attempts.append(args)
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    for reference in ("https://example.com/a.json", "a.json", "file:///etc/passwd", "#/none"):
        for more in ({}, {"$id": "https://example.com/b.json"}):
            schema = read({**closed(a={"$ref": reference}, b=INTEGER), **more})
            assert comes_out(schema, {"a": 1, "b": 1})
            assert not comes_out(schema, {"a": 1, "b": "x"})
            assert any(reference in told for told in schema.unheld) or "$id" in more
    assert attempts == []


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#"},
        {"type": "text"},
        {"type": "object", "properties": "a"},
        {"type": "object", "properties": {"a": "string"}},
        {"type": "object", "required": "a"},
        {"type": "object", "minProperties": "two"},
        {"enum": []},
        {"not": {}},
        {"allOf": [{"type": "object"}, {"type": "string"}]},
        {"type": "object", "properties": {f"p{i}": {} for i in range(30_000)}},
        {"type": "object", "properties": {"a": {"pattern": "("}, "b": {"multipleOf": 0}}},
        {"type": "object", "properties": {"a": {"type": "number", "minimum": "0"}}},
        {"type": "object", "$id": 5, "$defs": []},
        {"type": "object", "properties": {f"p{i}": {"required": True} for i in range(100)}},
        {"type": "object", "propertyNames": {"enum": "a"}, "dependencies": [], "nullable": 5},
        {"type": "object", "properties": [], "propertyNames": {"enum": ["a"]}},
    ],
)
def test_a_wrong_schema_is_said_and_calls_go_on(
    parameters: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is raised, at binding or in a call, and objects can be written."""
    with caplog.at_level(logging.WARNING):
        schema = read(parameters)
    assert "'it'" in caplog.text
    assert schema.unheld
    COMPILER.check(guide(schema))
    if schema.check is not None:
        schema.check({"a": 1})


def test_wrong_keywords_do_not_loosen_what_is_right() -> None:
    """However many there are."""
    odd = {f"p{i}": {"type": "integer", "required": True} for i in range(100)}
    bound = {"type": "integer", "format": "int32", "minimum": "0"}
    schema = read({"type": "object", "properties": {**odd, "b": bound}})
    assert comes_out(schema, {"p7": 1, "b": 2})
    assert not comes_out(schema, {"p7": "x"})
    assert not comes_out(schema, {"b": 2**31})


def test_one_part_that_is_refused_does_not_loosen_the_others() -> None:
    """Nor a definition those that refer to it."""
    definitions = {
        "Odd": {"patternProperties": {"^x": INTEGER, "y$": INTEGER}},
        "User": closed(odd={"$ref": "#/$defs/Odd"}, n=INTEGER),
    }
    schema = read({**closed(user={"$ref": "#/$defs/User"}, m=INTEGER), "$defs": definitions})
    assert takes(guide(schema), '{"user": {"odd": {"a": 1}, "n": 1}, "m": 1}')
    assert not takes(guide(schema), '{"user": {"odd": {"a": 1}, "n": "x"}, "m": 1}')
    assert not takes(guide(schema), '{"user": {"odd": {"a": 1}, "n": 1}, "m": "x"}')
    assert not takes(guide(schema), '{"user": {"odd": [], "n": 1}, "m": 1, "z": 1}')


def test_what_is_left_out_never_narrows_what_may_be_written() -> None:
    """An object whose patterns of keys are left out takes more keys, not fewer."""
    patterns = {"^(?!y)x": STRING}
    schema = read({"properties": {"a": INTEGER}, "patternProperties": patterns,
                   "additionalProperties": False})  # fmt: skip
    assert comes_out(schema, {"a": 1, "xb": "s"})
    assert not comes_out(schema, {"a": 1, "b": "s"})
    then = {"properties": {"b": STRING}, "required": ["b"]}
    schema = read({"properties": {"a": INTEGER}, "if": {"required": ["a"]}, "then": then})
    assert comes_out(schema, {"a": 1, "b": "s"})
    assert not comes_out(schema, {"a": 1})
