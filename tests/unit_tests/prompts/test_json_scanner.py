"""Where a JSON value ends, and what no parser takes for JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.utils.json import parse_partial_json

from langchain_swarmkv.prompts.json_scanner import MAX_JSON_DEPTH, JsonScanner, parse_object

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=3), st.sampled_from([None, 1]))
def test_a_value_is_closed_at_its_end_and_not_before(value: dict, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    scanner = JsonScanner()
    for char in text:
        assert scanner.closed is (scanner.max_depth == 0)
        scanner.push(char)
    assert scanner.closed


@settings(deadline=None)
@given(st.text('{}[]",:\\ \n1a') | json_values.map(json.dumps), st.integers(0, 40))
def test_spoilt_text_is_no_object_to_any_parser(text: str, length: int) -> None:
    """Also not to LangChain's, which closes what is open and drops what does not fit."""
    text = text[:length]
    scanner = JsonScanner()
    scanner.push(text)
    with pytest.raises(ValueError, match=r"."):
        json.loads(text + scanner.spoiler, strict=False)
    try:
        assert parse_partial_json(text + scanner.spoiler) is None
    except ValueError:
        pass


@pytest.mark.parametrize("text", ["", "1", "null", "[]", '"{}"', '{"a": NaN}', '{"a": Infinity}'])
def test_only_objects_of_standard_json_are_objects(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_object(text)


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> str:
        return '{"a": ' * depth + "1" + "}" * depth

    assert json.dumps(parse_object(nested(MAX_JSON_DEPTH))) == nested(MAX_JSON_DEPTH)
    for depth in (MAX_JSON_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match="deeper than 100"):
            parse_object(nested(depth))
