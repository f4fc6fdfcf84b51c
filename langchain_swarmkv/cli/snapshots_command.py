"""`swarmkv snapshots`: look at a folder of snapshots, check it, make room, carry files."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from langchain_swarmkv.cli.console import (
    check_writable,
    errors_in_one_line,
    failure,
)
from langchain_swarmkv.errors import ConfigurationError, SnapshotError, SnapshotKeyError
from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore, StoredFile
from langchain_swarmkv.snapshots.snapshot import prefix_namespace
from langchain_swarmkv.snapshots.snapshot_file import expanded, read_snapshot, save_snapshot

__all__ = ["read_key", "snapshots_app"]

snapshots_app = typer.Typer(
    no_args_is_help=True, help="Look at a folder of snapshots, check it, and make room in it."
)

Folder = Annotated[Path, typer.Argument(help="The folder (snapshot_dir).")]
Key = Annotated[str, typer.Argument(help="A snapshot's key, or its first characters.")]
KeyFile = Annotated[
    Path | None, typer.Option(help="File with the 32 bytes, or 64 hexadecimal digits, of the key.")
]
Salt = Annotated[
    str,
    typer.Option(envvar="SWARMKV_CACHE_SALT", help="The cache_salt that it was saved under."),
]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_MAX_NUMBER = 1e15
_DAYS = {"m": 1 / 1440, "h": 1 / 24, "d": 1.0, "w": 7.0}


@snapshots_app.command("list")
def list_snapshots(
    folder: Folder,
    cache_salt: Salt = "",
    key_file: KeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the snapshots of a folder, those used last first."""
    with errors_in_one_line(), _open(folder, key_file) as store:
        files = [file for file in store.files() if _is_under(file, cache_salt)]
        if as_json:
            typer.echo(json.dumps([_facts(file) for file in files], indent=2))
            return
        console = Console()
        _print_table(console, files)
        num_bytes = sum(file.num_bytes for file in files)
        console.print(f"{len(files)} files, {num_bytes / 1e6:,.1f} MB in all.", highlight=False)


@snapshots_app.command()
def show(folder: Folder, key: Key, cache_salt: Salt = "", key_file: KeyFile = None) -> None:
    """Print all that is known of one snapshot, but not what it holds."""
    with errors_in_one_line(), _open(folder, key_file) as store:
        file = _chosen(store, key, cache_salt)
        typer.echo(json.dumps(_facts(file), indent=2))


@snapshots_app.command()
def verify(folder: Folder, key_file: KeyFile = None) -> None:
    """Read every byte of every file. Exit code 1 if one of them cannot be used."""
    with errors_in_one_line(), _open(folder, key_file) as store:
        console, num_bad = Console(stderr=True), 0
        files = store.files()
        for file in track(files, "Reading", console=console, transient=True, disable=not files):
            try:
                if file.error is not None:
                    raise file.error
                read_snapshot(file.path, store.cipher)
            except SnapshotError as error:
                num_bad += 1
                Console().print(f"{error}", markup=False, highlight=False, soft_wrap=True)
        Console().print(f"{len(files) - num_bad} of {len(files)} files are whole.", highlight=False)
        if num_bad:
            raise failure(f"{num_bad} of {len(files)} files cannot be used.", 1)


@snapshots_app.command()
def prune(
    folder: Folder,
    max_bytes: Annotated[
        str | None, typer.Option(help="Keep that much, those used last: 500M, 20G.")
    ] = None,
    unused_for: Annotated[
        str | None, typer.Option(help="Delete what was not used for so long: 12h, 30d, 8w.")
    ] = None,
    damaged: Annotated[
        bool,
        typer.Option("--damaged", help="Delete what is no snapshot; not what has another key."),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete all of them, of every cache_salt.")
    ] = False,
    key_file: KeyFile = None,
) -> None:
    """Delete snapshots; what they hold is computed again when it is asked for."""
    with errors_in_one_line():
        if not (max_bytes or unused_for or damaged or everything):
            raise ConfigurationError("say what: --max-bytes, --unused-for, --damaged or --all.")
        limit = None if max_bytes is None else _bytes(max_bytes)
        days = None if unused_for is None else _days(unused_for)
        with _open(folder, key_file) as store:
            files = store.files()
            doomed = _doomed(files, limit, days, damaged=damaged, everything=everything)
            for file in doomed:
                store.remove(file.path.stem)
            num_bytes = sum(file.num_bytes for file in doomed)
            Console().print(
                f"Deleted {len(doomed)} of {len(files)} files, {num_bytes / 1e6:,.1f} MB.",
                highlight=False,
            )


@snapshots_app.command("export")
def export_snapshot(
    folder: Folder,
    key: Key,
    out: Annotated[Path, typer.Argument(help="The file to write; it is not encrypted.")],
    cache_salt: Salt = "",
    key_file: KeyFile = None,
) -> None:
    """Write one snapshot to a file that another machine can import, or `llm.load` can read."""
    with errors_in_one_line(), _open(folder, key_file) as store:
        check_writable(out)
        file = _chosen(store, key, cache_salt)
        num_bytes = save_snapshot(out, read_snapshot(file.path, store.cipher))
        Console().print(f"Wrote {num_bytes / 1e6:,.1f} MB.", highlight=False)


@snapshots_app.command("import")
def import_snapshots(
    folder: Folder,
    files: Annotated[
        list[Path],
        typer.Argument(help="Files from `export` or `llm.save`: plain, or with the key."),
    ],
    key_file: KeyFile = None,
) -> None:
    """Put exported snapshots into a folder."""
    with errors_in_one_line(), _open(folder, key_file, make=True) as store:
        for path in files:
            if not store.put(read_snapshot(path, store.cipher)):
                raise failure(f"{path} is larger than the folder may be.", 1)
        Console().print(f"Imported {len(files)} of {len(files)} files.", highlight=False)


def read_key(path: Path | None) -> bytes | None:
    """A key from a file: raw, or as hexadecimal digits.

    Raises:
        ConfigurationError: it cannot be read, or is no key.
        SnapshotStorageError: it is in a home that there is not.
    """
    if path is None:
        return None
    try:
        data = expanded(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error.strerror}.") from error
    text = data.strip()
    if re.fullmatch(rb"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text.decode())
    return data


@contextmanager
def _open(
    folder: Path, key_file: Path | None, *, make: bool = False
) -> Iterator[DiskSnapshotStore]:
    if not make and not expanded(folder).is_dir():
        raise ConfigurationError(f"there is no folder {str(folder)!r}.")
    log = logging.getLogger("langchain_swarmkv.snapshots")
    level = log.level
    log.setLevel(logging.ERROR)  # what cannot be used is told by the command itself
    try:
        with DiskSnapshotStore(folder, key=read_key(key_file)) as store:
            yield store
    finally:
        log.setLevel(level)


def _is_under(file: StoredFile, cache_salt: str) -> bool:
    """Whether a file belongs to a salt; what cannot be read is everybody's."""
    if file.head is None:
        return True
    return file.head.namespace == prefix_namespace(file.head.identity.digest, cache_salt)


def _chosen(store: DiskSnapshotStore, key: str, cache_salt: str) -> StoredFile:
    mine = [file for file in store.files() if _is_under(file, cache_salt)]
    found = [file for file in mine if key and file.path.stem.startswith(key)]
    if len(found) != 1:
        raise ConfigurationError(
            f"{len(found)} of {len(mine)} snapshots have a key that begins with {key!r}; "
            "`swarmkv snapshots list` shows them."
        )
    if found[0].head is None:
        raise ConfigurationError(f"{found[0].path} cannot be used; `verify` says why.")
    return found[0]


def _doomed(
    files: list[StoredFile],
    limit: int | None,
    days: float | None,
    *,
    damaged: bool,
    everything: bool,
) -> list[StoredFile]:
    kept_bytes, oldest_ns = 0, time.time_ns() - int((days or 0) * 86400e9)
    doomed = []
    for file in files:
        is_over = limit is not None and kept_bytes + file.num_bytes > limit
        is_old = days is not None and file.used_ns < oldest_ns
        if everything or is_over or is_old or (damaged and file.is_damaged):
            doomed.append(file)
        else:
            kept_bytes += file.num_bytes
    return doomed


def _facts(file: StoredFile) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "key": file.path.stem,
        "path": str(file.path),
        "bytes": file.num_bytes,
        "last_used": _used(file).isoformat(timespec="seconds"),
        "usable": file.head is not None,
    }
    if file.error is not None:
        facts["reason"] = str(file.error)
    if file.head is not None:
        metadata = file.head.metadata
        facts |= {
            "model": metadata.model_name,
            "tokens": file.head.num_tokens,
            "identity": dataclasses.asdict(file.head.identity),
            "compression": metadata.compression.value if metadata.compression else None,
            "encrypted": metadata.nonce is not None,
        }
    return facts


def _print_table(console: Console, files: list[StoredFile]) -> None:
    table = Table("key", "model", box=None, pad_edge=False)
    for name in ("tokens", "MB"):
        table.add_column(name, justify="right")
    table.add_column("last used")
    for file in files:
        head = file.head
        table.add_row(
            file.path.stem[:12],
            Text(_printable(head.metadata.model_name) if head else _shortly(file)),
            f"{head.num_tokens:,}" if head else "",
            f"{file.num_bytes / 1e6:,.1f}",
            f"{_used(file):%Y-%m-%d %H:%M}",
        )
    console.print(table)


def _shortly(file: StoredFile) -> str:
    if isinstance(file.error, SnapshotKeyError):
        return "(under another key)"
    return "(damaged)" if file.is_damaged else "(cannot be read)"


def _printable(text: str) -> str:
    """Without what would command a terminal: whoever wrote the file chose the text."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _used(file: StoredFile) -> datetime:
    try:
        return datetime.fromtimestamp(file.used_ns / 1e9).astimezone()
    except (ValueError, OverflowError, OSError):  # of a file that says it is of the year 30,000
        return datetime.max


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if match is None:
        raise ConfigurationError(f"{text!r} is no size; write 500M or 20G.")
    return int(min(float(match[1]), _MAX_NUMBER) * _UNITS[match[2]])


def _days(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhdw])", text.strip().lower())
    if match is None:
        raise ConfigurationError(f"{text!r} is no time; write 12h, 30d or 8w.")
    return min(float(match[1]), _MAX_NUMBER) * _DAYS[match[2]]
