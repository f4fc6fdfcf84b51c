"""`swarmkv prefill` for folders under a key and for engines with settings of their own."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from langchain_swarmkv import (
    ChatSwarmKV,
    DiskSnapshotStore,
    DocumentWarning,
    EngineConfig,
    SwarmEngine,
    UnsupportedModelError,
    document_message,
    read_document,
)
from tests.unit_tests.native.test_model_file import header_only
from tests.unit_tests.test_cli import assert_refused, swarmkv

TEXT = "A strip listens to the floor. " * 20


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(TEXT)
    return path


def cached_tokens(engine: SwarmEngine) -> int:
    llm = ChatSwarmKV(engine=engine, max_tokens=4)
    answer = llm.invoke([document_message(TEXT.strip()), ("human", "What?")])
    assert answer.usage_metadata is not None
    return int(answer.usage_metadata["input_token_details"]["cache_read"])


def test_what_is_warmed_under_a_key_is_found_with_it(
    document: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """And nothing of it can be read without."""
    key, folder = secrets.token_bytes(32), tmp_path / "kv"
    (tmp_path / "key").write_bytes(key)
    asked: tuple[Any, ...] = (document, "--snapshot-dir", folder, "--model", tiny_llama)
    done = swarmkv("prefill", *asked, "--n-ctx", 2048, "--key-file", tmp_path / "key")
    assert done.exit_code == 0, done.stderr
    config = EngineConfig(model_path=tiny_llama, n_ctx=2048)
    for given, is_found in ((key, True), (secrets.token_bytes(32), False), (None, False)):
        store = DiskSnapshotStore(folder, key=given)
        with SwarmEngine(config, snapshot_store=store, snapshot_policy="never") as engine:
            assert (cached_tokens(engine) > 500) == is_found


def test_settings_of_the_engine_can_be_given(
    document: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """Any field of EngineConfig, by name; the model is told."""
    folder = tmp_path / "kv"
    asked: tuple[Any, ...] = (document, "--snapshot-dir", folder, "--model", tiny_llama)
    settings = ("--set", "n_ctx=2048", "--set", "kv_type_k=f32", "--set", "adapters=[]")
    done = swarmkv("prefill", *asked, *settings)
    assert done.exit_code == 0, done.stderr
    assert tiny_llama.name in "".join(done.stdout.split())
    config = EngineConfig(model_path=tiny_llama, n_ctx=2048, kv_type_k="f32")
    with SwarmEngine(config, snapshot_dir=folder) as engine:
        assert cached_tokens(engine) > 500
    for wrong, reason in (
        ("kv_type_k", "NAME=VALUE"),
        ("kv_type_k=f7", "kv_type_k"),
        ("nothing=1", "nothing"),
        ("n_threads=100000", "n_threads"),
    ):
        assert_refused(swarmkv("prefill", *asked, "--set", wrong), reason)


@pytest.mark.parametrize(
    "command",
    [
        ["prefill", "{document}", "--snapshot-dir", "{folder}", "--model"],
        ["demo", "--document", "{document}", "--model"],
    ],
    ids=["prefill", "demo"],
)
def test_an_embedding_model_is_refused_by_its_name(
    document: Path, tmp_path: Path, command: list[str]
) -> None:
    """Before anything is counted or loaded."""
    model = header_only(tmp_path / "embeds.gguf", "bert")
    arguments = [word.format(document=document, folder=tmp_path / "kv") for word in command]
    result = swarmkv(*arguments, model)
    assert result.exit_code == 2
    assert "an embedding model, it cannot write" in result.stderr


@pytest.mark.parametrize("command", ["doctor", "optimize"])
def test_other_commands_refuse_an_embedding_model_too(tmp_path: Path, command: str) -> None:
    """There is nothing to measure or to convert for."""
    model = header_only(tmp_path / "embeds.gguf", "bert")
    assert_refused(swarmkv(command, model), "an embedding model, it cannot write")


def test_a_chat_model_refuses_an_embedding_model(tmp_path: Path) -> None:
    """When it counts, and when it answers."""
    model = header_only(tmp_path / "embeds.gguf", "bert")
    with ChatSwarmKV(model_path=model, lock_dir=tmp_path / "locks") as llm:
        for use in (llm.get_num_tokens, llm.invoke):
            with pytest.raises(UnsupportedModelError, match="an embedding model, it cannot write"):
                use("text")


def test_what_was_guessed_or_lost_is_told_and_an_encoding_decides(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """On stderr; what is warmed is what `read_document` gives."""
    document, folder = tmp_path / "document.txt", tmp_path / "kv"
    document.write_bytes(("Die Kündigungsfrist beträgt drei Monate.\0 " * 20).encode("cp1252"))
    asked: tuple[Any, ...] = (document, "--snapshot-dir", folder, "--model", tiny_llama)
    done = swarmkv("prefill", *asked, "--n-ctx", 4096)
    assert done.exit_code == 0, done.stderr
    assert "notice: It is not UTF-8; its encoding was guessed as cp1252" in done.stderr
    assert "notice: 20 control characters were dropped: U+0000." in done.stderr
    with pytest.warns(DocumentWarning):
        read = read_document(document)
    config = EngineConfig(model_path=tiny_llama, n_ctx=4096)
    with SwarmEngine(config, snapshot_dir=folder) as engine:
        llm = ChatSwarmKV(engine=engine, max_tokens=4)
        answer = llm.invoke([document_message(read), ("human", "What?")])
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 500
    given = swarmkv("prefill", *asked, "--n-ctx", 4096, "--encoding", "latin-1")
    assert given.exit_code == 0, given.stderr
    assert "guessed" not in given.stderr
    assert "were in" in given.stdout  # the same text
    assert_refused(swarmkv("prefill", *asked, "--encoding", "klingon"), "no encoding 'klingon'")


def test_a_document_too_long_is_told_with_the_option_that_helps(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """More cells help up to what the model was trained for, and no further."""
    document = tmp_path / "long.txt"
    document.write_text("word " * 600)
    asked = (document, "--model", tiny_llama, "--snapshot-dir", tmp_path / "kv")
    assert_refused(swarmkv("prefill", *asked, "--n-ctx", 512), "--n-ctx is 512. Raise it")
    document.write_text("word " * 2000)
    for n_ctx in (512, 20_000):
        refused = swarmkv("prefill", *asked, "--n-ctx", n_ctx)
        assert_refused(refused, "trained for", "which --n-ctx cannot raise")
