"""The reducers of `SwarmState`."""

from __future__ import annotations

import pytest

from langchain_swarmkv.graph.state import keep_last, merge_findings


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        ({"a": "1"}, {"b": "2"}, {"a": "1", "b": "2"}),
        ({"a": "1"}, {"a": "2"}, {"a": "2"}),
        (None, {"a": "1"}, {"a": "1"}),
        ({"a": "1"}, None, {"a": "1"}),
        (None, None, {}),
        ({}, {}, {}),
    ],
)
def test_findings_are_united_and_an_analyst_replaces_its_own(
    old: dict[str, str] | None, new: dict[str, str] | None, merged: dict[str, str]
) -> None:
    """Absent sides count as empty."""
    assert merge_findings(old, new) == merged


def test_merging_changes_neither_side() -> None:
    """A reducer must not alias or alter what the checkpointer holds."""
    old, new = {"a": "1"}, {"b": "2"}
    merged = merge_findings(old, new)
    merged["c"] = "3"
    assert (old, new) == ({"a": "1"}, {"b": "2"})


def test_the_last_writer_of_a_document_stays() -> None:
    """Equal copies come back from parallel subgraphs; any will do."""
    assert keep_last("old", "new") == "new"
