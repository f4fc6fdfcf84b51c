"""The demo's model: a faster copy is made once, kept, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from langchain_swarmkv.cli import demo_model as module
from langchain_swarmkv.cli.demo_model import demo_model
from langchain_swarmkv.native.file_facts import read_file_facts
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in a slow number format, and a cache of its own."""
    path = write_tiny_gguf(tmp_path / "Small.Q4_1.gguf", "llama")
    monkeypatch.setattr(module, "default_model", lambda: path)
    monkeypatch.setattr(module, "has_fast_kernels", lambda file_type: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def test_the_copy_is_made_once_and_told_each_time(
    shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another file under the same path gets another copy."""
    first = demo_model()
    assert first.path.name == "Small.Q8_0.gguf"
    assert "making a faster copy" in capsys.readouterr().err
    assert read_file_facts(first.path).file_type_name == "Q8_0"
    made = first.path.stat()
    again = demo_model()
    assert again == first
    assert again.path.stat().st_mtime_ns == made.st_mtime_ns
    assert capsys.readouterr().err == ""
    assert str(first.path) in first.note
    write_tiny_gguf(shipped, "llama", seed=8)
    assert demo_model().path != first.path


def test_a_fast_file_is_used_as_it_is(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, and nothing need be said."""
    monkeypatch.setattr(module, "has_fast_kernels", lambda file_type: True)
    assert demo_model() == (shipped, "")


def test_without_a_place_for_the_copy_the_file_itself_is_used(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the reason is told."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    path, note = demo_model()
    assert path == shipped
    assert note.startswith("No faster copy of its file could be made (")
