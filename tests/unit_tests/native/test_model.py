"""Model handles: what is checked before llama.cpp opens a file, and when it is given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest

from langchain_swarmkv.errors import ModelError, ModelFormatError, ModelNotFoundError
from langchain_swarmkv.native.model import ModelHandle
from langchain_swarmkv.native.model_file import check_gguf
from tests.support.tiny_gguf import ARCHITECTURES, ATTENTION_ARCHITECTURES

HEADER = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


def test_a_header_of_a_known_version_passes(tiny_llama: Path, tmp_path: Path) -> None:
    """Only the first bytes are read; the rest is llama.cpp's to judge."""
    check_gguf(tiny_llama)
    path = tmp_path / "header.gguf"
    for version in (2, 3):
        path.write_bytes(HEADER[:4] + version.to_bytes(4, "little") + HEADER[8:])
        check_gguf(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "b''"),
        (b"GGU", "b'GGU'"),
        (HEADER[:-1], "not a GGUF"),
        (b"\x89PNG" + bytes(40), "PNG"),
        (b"FUGG" + HEADER[4:], "b'FUGG'"),
        (HEADER[:4] + (1).to_bytes(4, "little") + HEADER[8:], "version 1"),
        (HEADER[:4] + (4).to_bytes(4, "little") + HEADER[8:], "version 4"),
        (HEADER[:4] + (3).to_bytes(4, "big") + HEADER[8:], "version 50331648"),
    ],
)
def test_foreign_files_are_refused_with_what_was_seen(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    """The message names the file and what it begins with."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"model\.gguf") as refused:
        check_gguf(path)
    assert reason in str(refused.value)
    assert refused.value.facts["path"] == path


def test_missing_files_and_directories_are_told_apart(tmp_path: Path) -> None:
    """Both are model errors; a broken link is a missing file."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("missing", "link"):
        with pytest.raises(ModelNotFoundError, match=name):
            check_gguf(tmp_path / name)
    with pytest.raises(ModelFormatError, match="not a file"):
        check_gguf(tmp_path)
    assert issubclass(ModelNotFoundError, ModelError)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("vocab_only", [False, True])
def test_metadata_is_read(
    tiny_gguf: Callable[..., Path], architecture: str, vocab_only: bool
) -> None:
    """By key, as text; a key that is not there is None."""
    model = ModelHandle(tiny_gguf(architecture), vocab_only=vocab_only)
    assert model.metadata("general.architecture") == architecture
    assert model.metadata(f"{architecture}.context_length") == str(model.n_ctx_train) == "4096"
    assert model.metadata("no.such.key") is None
    assert model.is_decoder
    model.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_full_attention_can_be_cut(tiny_gguf: Callable[..., Path], architecture: str) -> None:
    """Windows and running states cannot."""
    model = ModelHandle(tiny_gguf(architecture), vocab_only=False)
    assert model.can_cut == (architecture in ATTENTION_ARCHITECTURES)
    model.close()


def test_a_model_is_freed_once_by_close_or_with_its_last_reference(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never while a call holds it, and not again."""
    freed: list[object] = []
    free = llama_cpp.llama_model_free

    def note_and_free(pointer: object) -> None:
        freed.append(pointer)
        free(pointer)

    monkeypatch.setattr(llama_cpp, "llama_model_free", note_and_free)
    model = ModelHandle(tiny_llama, vocab_only=True)
    model.close()
    model.close()
    assert len(freed) == 1
    model = ModelHandle(tiny_llama, vocab_only=True)
    in_use = model.tokenize
    del model
    gc.collect()
    assert in_use("a") == [97]
    assert len(freed) == 1
    del in_use
    gc.collect()
    assert len(freed) == 2
