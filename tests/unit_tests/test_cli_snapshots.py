"""`swarmkv snapshots` and `swarmkv prefill`: what they show, change and refuse."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore, StoredFile
from langchain_swarmkv.snapshots.snapshot_file import read_snapshot
from langchain_swarmkv.snapshots.store import StoredPrefix
from tests.unit_tests.snapshots.store_contract import A, B, C, snapshot_of
from tests.unit_tests.test_cli import assert_refused, swarmkv

TENANT = snapshot_of([7, 8, 9], salt="tenant")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three snapshots of ours, one of a tenant; C was used last, A first."""
    path = tmp_path / "snapshots"
    with DiskSnapshotStore(path) as store:
        for snapshot in (A, TENANT, B, C):
            store.put(snapshot)
    return path


def listed(folder: Path, *options: object) -> list[dict[str, object]]:
    result = swarmkv("snapshots", "list", folder, "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def keys(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.swarmkv")}


def damage(folder: Path, key: str) -> None:
    path = folder / f"{key}.swarmkv"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def test_list_shows_what_the_salt_may_see(folder: Path) -> None:
    """Those used last first; of another salt's not even the count, and the salt is not printed."""
    result = swarmkv("snapshots", "list", folder)
    assert result.exit_code == 0, result.output
    places = [result.stdout.index(snapshot.key[:12]) for snapshot in (C, B, A)]
    assert places == sorted(places)
    assert TENANT.key[:12] not in result.stdout
    assert result.stdout.splitlines()[-1].startswith("3 files, 0.0 MB")
    assert len(result.stdout.splitlines()) == 5
    assert [item["key"] for item in listed(folder)] == [C.key, B.key, A.key]
    (theirs,) = listed(folder, "--cache-salt", "tenant")
    assert theirs["key"] == TENANT.key
    assert "tenant" not in json.dumps(theirs)


def test_a_models_name_is_text(tmp_path: Path) -> None:
    """H5: a file's metadata are no markup and no commands to the terminal."""
    with DiskSnapshotStore(tmp_path) as store:
        store.put(dataclasses.replace(A, model_name="m[/v1][b]\x1b]0;x\x07"))
    result = swarmkv("snapshots", "list", tmp_path)
    assert result.exit_code == 0, result.output
    assert "m[/v1][b]" in result.stdout
    assert "\x1b" not in result.stdout


def test_show_names_the_identity(folder: Path) -> None:
    """All fields, and nothing of the document."""
    result = swarmkv("snapshots", "show", folder, A.key[:10])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["tokens"] == A.num_tokens
    assert facts["identity"]["weights"] == "model"
    for key in ("0", "", "zz", TENANT.key):
        if not A.key.startswith(key) or not key:
            assert_refused(swarmkv("snapshots", "show", folder, key), "list")


def test_verify_finds_damage(folder: Path) -> None:
    """Exit code 0 while all is whole; 1 and the path of what is not."""
    assert swarmkv("snapshots", "verify", folder).exit_code == 0
    damage(folder, B.key)
    result = swarmkv("snapshots", "verify", folder)
    assert result.exit_code == 1
    assert B.key in result.stdout
    assert "3 of 4" in result.stdout
    (folder / f"{B.key}.swarmkv").write_bytes((folder / f"{C.key}.swarmkv").read_bytes())
    result = swarmkv("snapshots", "verify", folder)
    assert result.exit_code == 1
    assert "its name is not its key" in result.stdout


def test_prune_by_size_age_and_damage(folder: Path) -> None:
    """Each option deletes what it names, the least recently used first; none is refused."""
    assert_refused(swarmkv("snapshots", "prune", folder), "--max-bytes")
    for wrong in (("--max-bytes", "much"), ("--unused-for", "30"), ("--max-bytes", "-1")):
        assert swarmkv("snapshots", "prune", folder, *wrong).exit_code == 2
    damage(folder, B.key)
    swarmkv("snapshots", "list", folder)
    assert keys(folder) == {A.key, B.key, C.key, TENANT.key}
    with DiskSnapshotStore(folder) as store:
        assert store.get(B.namespace, B.tokens, can_cut=False) is None
    os.utime(folder / f"{A.key}.swarmkv", (0, 0))
    assert swarmkv("snapshots", "prune", folder, "--unused-for", "52w").exit_code == 0
    assert keys(folder) == {B.key, C.key, TENANT.key}
    (folder / f"{B.key}.swarmkv").write_bytes(b"nothing")
    assert swarmkv("snapshots", "prune", folder, "--damaged").exit_code == 0
    assert keys(folder) == {C.key, TENANT.key}
    os.utime(folder / f"{TENANT.key}.swarmkv", (1, 1))
    assert swarmkv("snapshots", "prune", folder, "--max-bytes", "15K").exit_code == 0
    assert keys(folder) == {C.key}
    assert swarmkv("snapshots", "prune", folder, "--all").exit_code == 0
    assert keys(folder) == set()


@pytest.mark.parametrize("seconds", [3e11, -1e11])
def test_a_time_that_no_calendar_has_is_shown(
    seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file that says it was used in the year 11,476, or before the first."""
    files = DiskSnapshotStore.files

    def strange(store: DiskSnapshotStore) -> list[StoredFile]:
        # Some file systems would not take the time.
        used_ns = int(seconds * 1e9)
        return [dataclasses.replace(file, used_ns=used_ns) for file in files(store)]

    monkeypatch.setattr(DiskSnapshotStore, "files", strange)
    assert swarmkv("snapshots", "list", folder).exit_code == 0
    assert len(listed(folder)) == 3
    result = swarmkv("snapshots", "show", folder, A.key)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["last_used"].startswith("9999-12-31")


def test_prune_takes_numbers_of_any_length(folder: Path) -> None:
    """More than there can be is no bound, with or without a unit."""
    many = "9" * 400
    for options in (
        ("--max-bytes", many),
        ("--max-bytes", f"{many}T"),
        ("--unused-for", f"{many}w"),
    ):
        result = swarmkv("snapshots", "prune", folder, *options)
        assert result.exit_code == 0, result.output
        assert "Deleted 0 of 4" in result.stdout
    assert len(keys(folder)) == 4


def test_export_and_import(folder: Path, tmp_path: Path) -> None:
    """To a plain file, from an encrypted folder into another one, with nothing lost."""
    key_file = tmp_path / "key"
    key_file.write_text("00" * 31 + "ff\n")
    exported, secret = tmp_path / "a.kv", tmp_path / "secret"
    result = swarmkv("snapshots", "export", folder, A.key, exported)
    assert result.exit_code == 0, result.output
    assert read_snapshot(exported) == A
    result = swarmkv("snapshots", "import", secret, exported, "--key-file", key_file)
    assert result.exit_code == 0, result.output
    with DiskSnapshotStore(secret, key=bytes(31) + b"\xff") as store:
        assert store.get(A.namespace, A.tokens, can_cut=False) == StoredPrefix(A, A.num_tokens)
    assert listed(secret)[0]["usable"] is False
    assert listed(secret, "--key-file", key_file)[0]["encrypted"] is True


def test_export_and_import_follow_no_link(folder: Path, tmp_path: Path) -> None:
    """H4: a link at the target is replaced, one at the source is refused, one in the folder too."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "out.kv").symlink_to(outside)
    assert swarmkv("snapshots", "export", folder, A.key, tmp_path / "out.kv").exit_code == 0
    assert read_snapshot(tmp_path / "out.kv") == A
    (tmp_path / "link.kv").symlink_to(tmp_path / "out.kv")
    result = swarmkv("snapshots", "import", folder, tmp_path / "link.kv")
    assert result.exit_code == 1
    assert "symbolic link" in result.stderr
    (folder / f"{'0' * 64}.swarmkv").symlink_to(outside)
    (folder / f"{'1' * 64}.swarmkv").symlink_to(tmp_path / "absent")
    assert swarmkv("snapshots", "verify", folder).exit_code == 1
    assert swarmkv("snapshots", "prune", folder, "--damaged").exit_code == 0
    assert outside.read_text() == "mine"
    assert keys(folder) == {A.key, B.key, C.key, TENANT.key}


@pytest.mark.parametrize("key", ["../x", "/etc/x", "a/../../x", "..\\x", "", ".", "CON", "x" * 300])
def test_a_key_is_no_path(key: str, folder: Path, tmp_path: Path) -> None:
    """H4: whatever it says, no file but the folder's is shown or exported."""
    for command in (("show", folder, key), ("export", folder, key, tmp_path / "out.kv")):
        assert_refused(swarmkv("snapshots", *command), "list")
    assert not (tmp_path / "out.kv").exists()


def test_another_salts_snapshot_is_neither_shown_nor_exported(folder: Path, tmp_path: Path) -> None:
    """H2: by its whole key, with the answer that a key nobody has gets."""
    out = tmp_path / "out.kv"
    for key, salt in ((TENANT.key, ""), (TENANT.key, "other"), (A.key, "tenant")):
        for command in (("show", folder, key), ("export", folder, key, out)):
            result = swarmkv("snapshots", *command, "--cache-salt", salt)
            nobodys = swarmkv(
                "snapshots", command[0], folder, "0" * 64, *command[3:], "--cache-salt", salt
            )
            assert result.stderr.replace(key, "0" * 64) == nobodys.stderr
            assert result.exit_code == nobodys.exit_code == 2
    assert not out.exists()
    result = swarmkv("snapshots", "export", folder, TENANT.key, out, "--cache-salt", "tenant")
    assert result.exit_code == 0
    assert read_snapshot(out) == TENANT


@pytest.mark.parametrize("command", ["list", "verify", "prune --all", "show abc", "export abc out"])
def test_a_folder_that_is_not_there_is_refused(command: str, tmp_path: Path) -> None:
    """And not made."""
    name, *rest = command.split()
    result = swarmkv("snapshots", name, tmp_path / "absent", *rest)
    assert_refused(result, "absent")
    assert not (tmp_path / "absent").exists()


def test_wrong_files_and_keys_are_refused(folder: Path, tmp_path: Path) -> None:
    """One line each, and nothing is written."""
    (tmp_path / "short").write_bytes(b"short")
    (tmp_path / "foreign").write_bytes(b"\x89PNG" * 100)
    for arguments in (
        ("list", folder, "--key-file", tmp_path / "short"),
        ("list", folder, "--key-file", tmp_path / "absent"),
        ("list", folder, "--key-file", "~no-such-user/key"),
        ("list", "~no-such-user/kv"),
        ("import", folder, tmp_path / "foreign"),
        ("import", folder, tmp_path / "absent"),
        ("export", folder, A.key, tmp_path / "no" / "folder"),
        ("export", folder, A.key, tmp_path),
    ):
        result = swarmkv("snapshots", *arguments)
        assert result.exit_code in (1, 2), result.output
        assert result.stderr.startswith("error: ")
        assert len(result.stderr.splitlines()) == 1
    assert len(keys(folder)) == 4


def test_prefill_warms_a_folder(tiny_llama: Path, tmp_path: Path) -> None:
    """Computed the first time, found the second; the chat model of another run finds it too."""
    from langchain_swarmkv import ChatSwarmKV, document_message

    document = tmp_path / "document.txt"
    document.write_text("A strip listens to the floor. " * 20)
    asked = (document, "--snapshot-dir", tmp_path / "warm", "--model", tiny_llama, "--n-ctx", 2048)
    first, second = swarmkv("prefill", *asked), swarmkv("prefill", *asked)
    assert first.exit_code == second.exit_code == 0, first.output + second.output
    assert "computed" in first.stdout
    assert "already" in second.stdout
    with ChatSwarmKV(
        model_path=tiny_llama, n_ctx=2048, max_tokens=4, snapshot_dir=tmp_path / "warm"
    ) as llm:
        answer = llm.invoke([document_message(document.read_text().strip()), ("human", "What?")])
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 500


def test_prefill_refuses_what_it_cannot_read(tiny_llama: Path, tmp_path: Path) -> None:
    """Before a model is loaded."""
    (tmp_path / "file").write_text("")
    for document, folder in (("absent.txt", "warm"), ("file", "warm")):
        result = swarmkv(
            "prefill",
            tmp_path / document,
            "--snapshot-dir",
            tmp_path / folder,
            "--model",
            tiny_llama,
        )
        assert_refused(result)
