"""Documents and conversations that outlive the process, as users of the chat model see them."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import logging
import os
import pickle
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import ValidationError

from langchain_swarmkv import (
    AnalystNode,
    ChatSwarmKV,
    ConfigurationError,
    DiskSnapshotStore,
    DocumentMissingError,
    DocumentNode,
    InvalidRequestError,
    SnapshotError,
    SnapshotFormatError,
    SnapshotKeyError,
    SnapshotMismatchError,
    SnapshotStorageError,
    document_message,
)
from langchain_swarmkv.snapshots.snapshot_file import read_snapshot, save_snapshot
from tests.support.vocabularies import SENTENCE_PIECE
from tests.unit_tests.scheduling.support import open_swarm
from tests.unit_tests.snapshots.store_contract import A
from tests.unit_tests.test_cli import swarmkv

TEXT = "A strip of fabric listens to the floor and tells the nurse who fell. " * 10
QUESTION = HumanMessage("Who is told?")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def open_llm(path: Path, folder: Path | None = None, **options: Any) -> ChatSwarmKV:
    defaults = {"n_ctx": 4096, "max_tokens": 4, "n_threads": 1}
    return ChatSwarmKV(model_path=path, snapshot_dir=folder, **{**defaults, **options})


def num_computed(answer: AIMessage) -> int:
    usage = answer.usage_metadata
    assert usage is not None
    return usage["input_tokens"] - usage["input_token_details"]["cache_read"]


def ask(llm: ChatSwarmKV, *before: Any) -> AIMessage:
    return llm.invoke([*(before or (document_message(TEXT),)), QUESTION])


def test_a_copy_with_another_salt_knows_no_document_of_this_one(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Not by its ref either: no text, no file, no pin to release; a copy with the salt has all."""
    with open_llm(tiny_llama, cache_salt="a") as llm:
        ref = llm.prefill([document_message(TEXT)])
        stranger = llm.model_copy(update={"cache_salt": "b"})
        assert stranger.document_of(ref) is None
        with pytest.raises(DocumentMissingError, match="cache_salt"):
            stranger.save(ref, tmp_path / "stolen")
        assert not (tmp_path / "stolen").exists()
        assert not stranger.release(ref)
        friend = llm.model_copy()
        assert friend.document_of(ref) == TEXT
        assert friend.save(ref, tmp_path / "ours") > 0
        assert friend.release(ref)


def test_a_file_whose_tokens_and_state_disagree_is_refused(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The identity fits, and every digest: found by looking at the state, before it is kept."""
    with open_llm(tiny_llama) as llm:
        llm.save(llm.prefill([document_message(TEXT)]), tmp_path / "good")
        good = read_snapshot(tmp_path / "good")
        save_snapshot(tmp_path / "wrong", dataclasses.replace(good, tokens=good.tokens[:-1]))
        before = llm.engine_statistics().store_bytes
        with pytest.raises(SnapshotMismatchError) as caught:
            llm.load(tmp_path / "wrong")
        assert caught.value.facts["field"] == "state"
        assert llm.engine_statistics().store_bytes == before


def test_the_next_run_finds_the_document(tiny_llama: Path, folder: Path) -> None:
    """By plain calls; the answer is that of a run without snapshots."""
    with open_llm(tiny_llama) as plain:
        expected, cold = str(ask(plain).text), num_computed(ask(plain, document_message(TEXT)))
    with open_llm(tiny_llama, folder) as llm:
        llm.prefill([document_message(TEXT)])
    with open_llm(tiny_llama, folder) as llm:
        answer = ask(llm)
        assert str(answer.text) == expected
        assert num_computed(answer) < 60
    assert cold < 60  # the second call of the plain one, for which the document was resident


def test_equal_folders_share_an_engine_and_others_do_not(tiny_llama: Path, folder: Path) -> None:
    """The folder is part of what makes two engines one."""
    with (
        open_llm(tiny_llama, folder) as one,
        open_llm(tiny_llama, Path(str(folder))) as same,
        open_llm(tiny_llama, folder / "other") as other,
    ):
        for llm in (one, same, other):
            ask(llm)
        assert one._engine() is same._engine()
        assert one._engine() is not other._engine()


def test_save_and_load_carry_a_document_to_another_machine(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """State and text in one file: an analyst there needs neither the text nor a prefill."""
    path = tmp_path / "document.kv"
    with open_llm(tiny_llama) as here:
        ref = here.prefill([document_message(TEXT)])
        expected = ask(here)
        assert here.save(ref, path) == path.stat().st_size
    with open_llm(tiny_llama) as there:
        loaded = there.load(path)
        assert loaded == ref
        assert there.document_of(loaded) == TEXT
        answer = ask(there)
        assert answer.text == expected.text
        assert num_computed(answer) < 60
        node = AnalystNode(there, QUESTION.text)
        assert node.invoke({"document_ref": loaded})["findings"]
    json.dumps(loaded)


def test_what_cannot_be_saved_or_loaded_says_why(
    tiny_llama: Path, tiny_gguf: Any, tmp_path: Path
) -> None:
    """Unknown documents, other models, salts and settings, no snapshots, nowhere to write."""
    path = tmp_path / "document.kv"
    with open_llm(tiny_llama) as llm:
        ref = llm.prefill([document_message(TEXT)])
        llm.save(ref, path)
        with pytest.raises(SnapshotStorageError):
            llm.save(ref, tmp_path / "no" / "folder.kv")
        with pytest.raises(DocumentMissingError):
            llm.save({**ref, "digest": "0" * 64}, path)
        with pytest.raises(SnapshotStorageError):
            llm.load(tmp_path / "absent")
        (tmp_path / "foreign").write_text("nothing of ours")
        with pytest.raises(SnapshotFormatError):
            llm.load(tmp_path / "foreign")
    for options, field in (
        ({"cache_salt": "tenant"}, "cache_salt"),
        ({"kv_type_k": "q8_0"}, "kv_type_k"),
        ({"kv_type_v": "f32"}, "kv_type_v"),
        ({"rope_freq_base": 20000.0}, "rope"),
        ({"rope_freq_scale": 0.5}, "rope"),
    ):
        with open_llm(tiny_llama, **options) as other, pytest.raises(SnapshotMismatchError) as e:
            other.load(path)
        assert e.value.facts["field"] == field
    with (
        open_llm(tiny_gguf("llama", seed=2)) as other,
        pytest.raises(SnapshotMismatchError, match="weights"),
    ):
        other.load(path)


async def test_async_hand_over_with_a_key(tiny_llama: Path, tmp_path: Path) -> None:
    """The same beside an event loop; the file is encrypted, and a wrong key says so."""
    path, key = tmp_path / "conversation.kv", secrets.token_bytes(32)
    with open_llm(tiny_llama) as here:
        conversation = [document_message(TEXT), QUESTION, ask(here)]
        ref = await here.ahandoff(conversation)
        await here.asave(ref, path, key=key)
    assert TEXT[:20].encode() not in path.read_bytes()
    with open_llm(tiny_llama) as there:
        for wrong in (None, secrets.token_bytes(32)):
            with pytest.raises(SnapshotKeyError):
                await there.aload(path, key=wrong)
        with pytest.raises(ConfigurationError, match="32 bytes"):
            await there.aload(path, key=b"short")
        assert await there.aload(path, key=key) == ref
        assert num_computed(ask(there, *conversation)) < 60


def test_a_document_that_memory_has_no_room_for_is_loaded_to_disk(
    tiny_llama: Path, folder: Path, tmp_path: Path
) -> None:
    """Or refused, where there is none."""
    path = tmp_path / "document.kv"
    with open_llm(tiny_llama) as here:
        here.save(here.prefill([document_message(TEXT)]), path)
    with (
        open_llm(tiny_llama, snapshot_memory_bytes=1000) as there,
        pytest.raises(SnapshotError, match="snapshot_memory_bytes"),
    ):
        there.load(path)
    with open_llm(tiny_llama, folder, snapshot_memory_bytes=1000) as there:
        there.load(path)
        assert num_computed(ask(there)) < 60


def test_what_was_changed_is_named_and_never_reused(
    tiny_gguf: Any, tmp_path: Path, folder: Path
) -> None:
    """A8: other files under one path, in turn; one that was only touched is the same model."""
    path, saved = tmp_path / "model.gguf", tmp_path / "document.kv"
    shutil.copy(tiny_gguf("llama", seed=1), path)
    with open_llm(path, folder) as llm:
        llm.save(llm.prefill([document_message(TEXT)]), saved)
    for field, changed in (
        ("weights", tiny_gguf("llama", seed=2)),
        ("tokenizer", tiny_gguf("llama", vocabulary=SENTENCE_PIECE)),
        ("architecture", tiny_gguf("qwen2")),
    ):
        shutil.copy(changed, path)
        with open_llm(changed) as fresh:
            expected = ask(fresh).text
        with open_llm(path, folder, snapshot_policy="never") as llm:
            with pytest.raises(SnapshotMismatchError, match=field) as caught:
                llm.load(saved)
            assert caught.value.facts["field"] == field
            assert ask(llm).text == expected
            assert llm.engine_statistics().num_cached_tokens == 0
    shutil.copy(tiny_gguf("llama", seed=1), path)
    os.utime(path, (0, 0))
    with open_llm(path, folder) as llm:
        assert num_computed(ask(llm)) < 60
        llm.load(saved)


def test_handoff_lets_the_next_agent_start_warm(tiny_llama: Path, folder: Path) -> None:
    """A conversation with its answers, in this process and in the next."""
    with open_llm(tiny_llama, folder, snapshot_policy="never") as llm:
        conversation = [document_message(TEXT), QUESTION, ask(llm)]
        ref = llm.handoff(conversation)
        assert num_computed(ask(llm, *conversation)) < 60
    with open_llm(tiny_llama, folder) as llm:
        answer = ask(llm, *conversation)
        assert num_computed(answer) < 60
        assert llm.prefill(conversation, pin=False) == ref


def test_persist_needs_a_folder(tiny_llama: Path, folder: Path) -> None:
    """For a node and for the model; with one, it is on disk when the call returns."""
    with open_llm(tiny_llama) as llm:
        with pytest.raises(ConfigurationError, match="snapshot_dir"):
            llm.prefill([document_message(TEXT)], persist=True)
        with pytest.raises(ConfigurationError, match="snapshot_dir"):
            DocumentNode(llm, persist=True).invoke({"document": TEXT})
    with open_llm(tiny_llama, folder, snapshot_policy="never") as llm:
        ask(llm)
        with DiskSnapshotStore(folder) as store:
            assert len(store) == 0
            DocumentNode(llm, persist=True).invoke({"document": TEXT})
            assert len(store) == 1


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_salts_are_kept_apart_on_disk(salt: str, tiny_llama: Path, folder: Path) -> None:
    """H2: another tenant's call computes everything, and says so."""
    with open_llm(tiny_llama, folder, cache_salt=salt) as llm:
        llm.prefill([document_message(TEXT)])
    with open_llm(tiny_llama, folder, cache_salt="another") as llm:
        usage = ask(llm).usage_metadata
        assert usage is not None
        assert usage["input_token_details"]["cache_read"] == 0
    assert all(b"tenant" not in path.read_bytes() for path in folder.iterdir())


def test_a_salt_is_nowhere_to_be_read(
    tiny_llama: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """H2: in no name, content, log record, message, representation or reference."""
    secret, saved = "tenant-7c1f", tmp_path / "document.kv"
    caplog.set_level(logging.DEBUG)
    with open_llm(tiny_llama, folder, cache_salt=secret) as llm:
        ref = llm.prefill([document_message(TEXT)], persist=True)
        ask(llm)
        llm.save(ref, saved)
        told = [repr(llm), repr(ref), repr(llm.engine_statistics()), repr(read_snapshot(saved))]
        (path,) = folder.glob("*.swarmkv")
        path.write_bytes(path.read_bytes()[:-1])
        llm._engine().reset_prefix_cache()
        ask(llm)  # the damaged file is told in the log
    assert caplog.records
    with open_llm(tiny_llama, cache_salt="other") as llm:
        with pytest.raises(SnapshotMismatchError) as caught:
            llm.load(saved)
        told += [str(caught.value), repr(caught.value.facts)]
    for command in ("list", "verify"):
        told.append(swarmkv("snapshots", command, folder, "--cache-salt", secret).output)
    told += [record.getMessage() for record in caplog.records]
    for path in tmp_path.rglob("*"):
        told.append(str(path))
        told.append(path.read_bytes().decode("latin-1") if path.is_file() else "")
    assert not [text for text in told if secret in text]


def test_an_unset_salt_is_the_empty_one_and_none_is_refused(tiny_llama: Path, folder: Path) -> None:
    """H2: so None cannot stand for "everybody" in one place and for a tenant in another."""
    with open_llm(tiny_llama, folder) as llm:
        ref = llm.prefill([document_message(TEXT)])
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            llm._engine().submit([1, 2, 3], cache_salt=None)  # type: ignore[arg-type]
    with open_llm(tiny_llama, folder, cache_salt="") as llm:
        assert num_computed(ask(llm)) < 60
        assert llm.prefill([document_message(TEXT)]) == ref
    with pytest.raises(ValidationError, match="cache_salt"):
        open_llm(tiny_llama, cache_salt=None)


# -- names and files of others ---------------------------------------------------------------------


def open_fake() -> ChatSwarmKV:
    return ChatSwarmKV(engine=open_swarm(), max_tokens=4)


def test_saving_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H4: neither at the name nor at the temporary one; what they point to stays as it is."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.write_text("mine")
    inside.mkdir()
    (inside / "linked").symlink_to(inside)
    target = inside / "linked" / "document.kv"
    target.symlink_to(outside)
    with open_fake() as llm, llm._engine():
        ref = llm.prefill([document_message(TEXT)])
        llm.save(ref, target)
        assert not target.is_symlink()
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        monkeypatch.setattr("secrets.token_hex", lambda count: "00" * count)
        temporary = inside / f".{os.getpid()}-{'00' * 8}.swarmkv-tmp"
        temporary.symlink_to(outside)
        with pytest.raises(SnapshotStorageError, match="exists"):
            llm.save(ref, target)
        temporary.unlink()
        assert llm.load(target) == ref
        other = inside / "link.kv"
        other.symlink_to(target)
        with pytest.raises(SnapshotFormatError):
            llm.load(other)
    assert outside.read_text() == "mine"
    assert sorted(path.name for path in inside.iterdir()) == ["document.kv", "link.kv", "linked"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "x\0y", "x" * 300, "no/where/x", "~no-such-user/x", "\ud800", "file/x"]
)
def test_a_name_that_cannot_be_is_a_typed_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H4: for saving and loading, with nothing left behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    with open_fake() as llm, llm._engine():
        ref = llm.prefill([document_message(TEXT)])
        for use in (lambda: llm.save(ref, name), lambda: llm.load(name)):
            with pytest.raises((SnapshotStorageError, SnapshotFormatError)):
                use()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "name", ["CON", "a b", "..\\x", "\uff45\uff0e\uff0e\uff0f", "-rf", "x" * 255]
)
def test_an_odd_name_is_a_name(name: str, tmp_path: Path) -> None:
    """H4: it stays in its folder."""
    with open_fake() as llm, llm._engine():
        ref = llm.prefill([document_message(TEXT)])
        llm.save(ref, tmp_path / name)
        assert llm.load(tmp_path / name) == ref
    assert [path.name for path in tmp_path.iterdir()] == [name]


class _Trap:
    """What a pickle of it does where it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("sprung",)


def _archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, state=np.array([_Trap()], dtype=object))
    return file.getvalue()


FOREIGN: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda model: b"",
    "three bytes": lambda model: b"abc",
    "a picture": lambda model: b"\x89PNG\r\n\x1a\n" + bytes(1000),
    "a model": lambda model: model.read_bytes(),
    "a pickle": lambda model: pickle.dumps(_Trap()),
    "an archive with a pickle": lambda model: _archive(),
    "json": lambda model: b'{"lc": 1, "type": "constructor", "id": ["os", "mkdir"]}',
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("ending", ["", ".swarmkv", ".pkl", ".npz"])
def test_foreign_files_run_nothing(
    kind: str, ending: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4, H5: under any ending, by `load`, by `import` and in the folder: path, reason, no trap."""
    monkeypatch.chdir(tmp_path)
    path, kv = tmp_path / f"{'0' * 64}{ending}", tmp_path / "kv"
    path.write_bytes(FOREIGN[kind](tiny_llama))
    with DiskSnapshotStore(kv) as store:
        store.put(A)
    (kv / path.name).write_bytes(path.read_bytes())
    with open_fake() as llm, llm._engine(), pytest.raises(SnapshotFormatError) as caught:
        llm.load(path)
    assert caught.value.facts["path"] == str(path)
    assert caught.value.facts["reason"]
    result = swarmkv("snapshots", "import", kv, path)
    assert result.exit_code == 1
    assert path.name in result.stderr.replace("\n", "")
    with DiskSnapshotStore(kv) as store:
        assert len(store) == 1
        assert store.get(A.namespace, A.tokens, can_cut=False) is not None
    assert swarmkv("snapshots", "verify", kv).exit_code == (ending == ".swarmkv")
    assert not (tmp_path / "sprung").exists()


def test_a_file_that_may_not_be_read_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4: as is a folder; root may read everything, so the refusal is made here."""
    path, open_file = tmp_path / "document.kv", os.open

    def refuse(name: Any, flags: int, *args: Any, **options: Any) -> int:
        if name == path and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(name, flags, *args, **options)

    with open_fake() as llm, llm._engine():
        llm.save(llm.prefill([document_message(TEXT)]), path)
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(SnapshotStorageError, match="Permission denied") as caught:
            llm.load(path)
        assert caught.value.facts["path"] == str(path)
        with pytest.raises(SnapshotFormatError, match="no regular file"):
            llm.load(tmp_path)


@pytest.mark.parametrize(
    "extra",
    [
        b"[" * 10**6,
        b'{"text":' * 10**6,
        b'{"text": ' + b"[" * 10**6 + b"]" * 10**6 + b"}",
        b'{"text": {"lc": 1, "type": "constructor", "id": ["os", "mkdir"]}}',
        b'{"text": 1}',
        b"[1]",
        b"1" * 5000,
        b"\xff",
    ],
    ids=["lists", "objects", "whole lists", "constructor", "number", "list", "digits", "no text"],
)
def test_a_text_that_is_none_is_refused(extra: bytes, tmp_path: Path) -> None:
    """H5: a million nested lists beside an intact state too; the constructor stays plain data."""
    path = tmp_path / "document.kv"
    with open_fake() as llm, llm._engine():
        llm.save(llm.prefill([document_message(TEXT)]), path)
        save_snapshot(path, dataclasses.replace(read_snapshot(path), extra=extra))
        with pytest.raises(SnapshotFormatError, match="no document") as caught:
            llm.load(path)
    assert caught.value.facts["path"] == str(path)
    assert caught.value.facts["reason"]


@pytest.mark.parametrize("room", [0, 10, 2000, 50_000])
def test_a_disk_that_is_full_leaves_the_saved_document(
    room: int, tmp_path: Path, tiny_llama: Path
) -> None:
    """E5: the operating system itself takes no more bytes, at the start, in the middle, late."""
    path = tmp_path / "document.kv"
    code = """
        import resource, sys
        from langchain_swarmkv import ChatSwarmKV, SnapshotStorageError, document_message
        model, path, room = sys.argv[1:]
        with ChatSwarmKV(model_path=model, n_ctx=1024, n_threads=1) as llm:
            ref = llm.prefill([document_message("Full disks are common. " * 20)])
            size = llm.save(ref, path)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(room), -1))
            try:
                llm.save(ref, path)
            except SnapshotStorageError as error:
                print(size, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code), str(tiny_llama), str(path), str(room)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "File too large" in done.stdout, done.stderr
    assert int(done.stdout.split()[0]) == path.stat().st_size > room
    assert read_snapshot(path).num_tokens > 400
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_the_response_cache_keeps_snapshots_apart(tiny_llama: Path, tmp_path: Path) -> None:
    """F7: one question on two loaded documents, under two salts; an equal call asks no engine."""
    texts = [TEXT, "The lamp measures the light of the page. " * 15]
    paths = [tmp_path / f"{number}.kv" for number in range(2)]
    with open_llm(tiny_llama) as llm:
        for path, text in zip(paths, texts, strict=True):
            llm.save(llm.prefill([document_message(text)]), path)
    cache, question = InMemoryCache(), "Who is told?"
    with open_llm(tiny_llama, cache=cache) as llm, open_llm(tiny_llama) as plain:
        nodes = AnalystNode(llm, question, name="n"), AnalystNode(plain, question, name="n")
        for path, text in zip(paths, texts, strict=True):
            ref = llm.load(path)
            expected = nodes[1].invoke({"document": text})
            assert nodes[0].invoke({"document_ref": ref}) == expected
            num_steps = llm.engine_statistics().num_steps
            assert nodes[0].invoke({"document_ref": ref}) == expected
            assert llm.engine_statistics().num_steps == num_steps
    assert len(cache._cache) == 2
    with open_llm(tiny_llama, cache=cache, cache_salt="tenant") as llm:
        AnalystNode(llm, question, name="n").invoke({"document": TEXT})
    assert len(cache._cache) == 3


_PROCESS = """
import json, sys
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START
from langchain_swarmkv import AnalystNode, ChatSwarmKV, DocumentNode, SwarmState, SwarmStateGraph
model, folder, database, text = sys.argv[1:]
llm = ChatSwarmKV(model_path=model, n_ctx=4096, max_tokens=4, n_threads=1, snapshot_dir=folder)
graph = SwarmStateGraph(SwarmState)
graph.add_node("document", DocumentNode(llm))
graph.add_edge(START, "document")
for name in ("novelty", "claims"):
    graph.add_node(name, AnalystNode(llm, f"What about {name}?"))
    graph.add_edge("document", name)
thread = {"configurable": {"thread_id": "1"}}
with SqliteSaver.from_conn_string(database) as saver:
    app = graph.compile(saver, document=text, interrupt_before=["novelty", "claims"])
    given = None if app.get_state(thread).values else {"document": text}
    state = app.invoke(given, thread)
statistics = llm.engine_statistics()
findings = sorted(state.get("findings", ()))
print(json.dumps([statistics.num_prefill_tokens, statistics.num_disk_reads, findings]))
llm.close()
"""


def test_a_checkpoint_resumes_in_a_new_process_without_a_prefill(
    tiny_llama: Path, folder: Path, tmp_path: Path
) -> None:
    """The reference is found on disk by its tokens: only the questions are computed."""

    def run() -> list[Any]:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                dedent(_PROCESS),
                str(tiny_llama),
                str(folder),
                str(tmp_path / "checkpoints"),
                TEXT,
            ],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    computed, reads, findings = run()
    assert computed > 500
    assert (reads, findings) == (0, [])
    computed, reads, findings = run()
    assert computed < 200
    assert (reads, findings) == (1, ["claims", "novelty"])
