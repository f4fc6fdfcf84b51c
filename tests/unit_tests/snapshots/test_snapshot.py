"""Snapshots: validated, immutable, with keys that are the same in every process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_swarmkv.errors import SnapshotError
from langchain_swarmkv.snapshots.snapshot import KVSnapshot, prefix_namespace, snapshot_key
from tests.support.processes import WITHOUT_LANGCHAIN
from tests.unit_tests.snapshots.store_contract import identity_of, namespace_of

SNAPSHOT = KVSnapshot(identity_of("model"), namespace_of("model", "salt"), (1, 2, 3), b"state")


def test_it_counts_its_tokens_and_bytes() -> None:
    """Four bytes for a token, beside the state."""
    assert SNAPSHOT.num_tokens == 3
    assert SNAPSHOT.num_bytes == len(b"state") + 3 * 4


def test_it_cannot_be_changed() -> None:
    """Frozen, and of immutable parts."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        SNAPSHOT.state = b"other"  # type: ignore[misc]
    assert {SNAPSHOT: 1}[dataclasses.replace(SNAPSHOT)] == 1


def test_its_repr_shows_neither_document_nor_state() -> None:
    """A log line must not carry what the cache holds."""
    text = repr(dataclasses.replace(SNAPSHOT, tokens=(777_777,), state=b"secret"))
    assert "777" not in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("identity", "model"),
        ("namespace", ""),
        ("tokens", ()),
        ("state", b""),
        ("identity", None),
        ("tokens", [1, 2]),
        ("tokens", np.array([1, 2])),
        ("state", bytearray(b"state")),
        ("logits", "1234"),
        ("logits", bytearray(4)),
        ("logits", np.zeros(2, np.float32)),
        ("logits", b"123"),
        ("extra", "text"),
        ("extra", bytearray(b"text")),
        ("extra", None),
        ("model_name", b"name"),
        ("model_name", None),
    ],
)
def test_an_empty_or_foreign_field_is_refused(field: str, value: object) -> None:
    """Mutable types too, for they would break the promise; the message names the field."""
    with pytest.raises(SnapshotError, match=field) as caught:
        dataclasses.replace(SNAPSHOT, **{field: value})  # type: ignore[arg-type]
    assert caught.value.facts["field"] == field


@pytest.mark.parametrize("token", [-1, -2, None, 1.5, "1", 2**31, 2**32 + 1])
def test_what_is_no_token_id_is_refused(token: object) -> None:
    """So that -1, -2 and None can never stand for one another."""
    with pytest.raises(SnapshotError, match="token"):
        dataclasses.replace(SNAPSHOT, tokens=(1, token))  # type: ignore[arg-type]


PARTS = st.tuples(st.text(max_size=4), st.text(max_size=4), st.lists(st.integers(0, 300)))


@given(a=PARTS, b=PARTS)
def test_keys_are_equal_only_for_equal_parts(
    a: tuple[str, str, list[int]], b: tuple[str, str, list[int]]
) -> None:
    """Identity, namespace and tokens are told apart wherever one ends and the next begins."""
    assert (snapshot_key(*a) == snapshot_key(*b)) == (a == b)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("m", "n", [1, 23]), ("m", "n", [12, 3])),
        (("m", "n", [1, 0]), ("m", "n", [1])),
        (("m", "n", [256]), ("m", "n", [0, 1])),
        (("mn", "", [1]), ("m", "n", [1])),
        (("", "mn", [1]), ("m", "n", [1])),
    ],
)
def test_parts_do_not_run_together(
    one: tuple[str, str, list[int]], other: tuple[str, str, list[int]]
) -> None:
    """The pairs that a careless encoding joins to the same bytes."""
    assert snapshot_key(*one) != snapshot_key(*other)


def test_a_namespace_parts_identity_and_salt() -> None:
    """Moving a letter from one to the other is another namespace; the salt is not in it."""
    namespaces = {
        prefix_namespace(*pair)
        for pair in [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("a", "\ud800")]
    }
    assert len(namespaces) == 5
    assert "tenant" not in prefix_namespace("model", "tenant")


def test_keys_are_the_same_in_every_process() -> None:
    """Three processes with different hash seeds agree with this one."""
    code = "from tests.unit_tests.snapshots.test_snapshot import SNAPSHOT\nprint(SNAPSHOT.key)"
    keys = {
        subprocess.run(
            [sys.executable, "-c", WITHOUT_LANGCHAIN + code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=100,
        ).stdout.strip()
        for seed in ("0", "1", "12345")
    }
    assert keys == {SNAPSHOT.key}
    assert len(SNAPSHOT.key) == 64
