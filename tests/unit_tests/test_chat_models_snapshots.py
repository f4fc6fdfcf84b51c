"""Documents and conversations that outlive the process, as users of the chat model see them."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from langchain_swarmkv import (
    AnalystNode,
    ChatSwarmKV,
    ConfigurationError,
    DiskSnapshotStore,
    DocumentMissingError,
    DocumentNode,
    SnapshotError,
    SnapshotFormatError,
    SnapshotKeyError,
    SnapshotMismatchError,
    SnapshotStorageError,
    document_message,
)

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
        ({"rope_freq_base": 20000.0}, "rope"),
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
