"""`swarmkv optimize`: what it says, writes and refuses, and how it ends."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from langchain_swarmkv.cli import console, optimize_command
from langchain_swarmkv.native.file_facts import FileFacts, read_file_facts
from langchain_swarmkv.native.quantize import quantize
from langchain_swarmkv.native.weight_types import WEIGHT_TYPES, WeightType
from tests.unit_tests.test_cli import assert_refused, swarmkv, swarmkv_process


@pytest.fixture
def model(tmp_path: Path, tiny_llama: Path) -> Path:
    """A model of F32 weights in a folder of its own."""
    path = tmp_path / "tiny model.gguf"
    path.write_bytes(tiny_llama.read_bytes())
    return path


@pytest.fixture(scope="module")
def q8_0(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, quantised."""
    path = tmp_path_factory.mktemp("quantised") / "q8_0.gguf"
    quantize(read_file_facts(tiny_llama), path, WEIGHT_TYPES["q8_0"], n_threads=1)
    return path


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a few bytes and takes no time."""

    def write(
        source: FileFacts, target: Path, wanted: WeightType, *, n_threads: int, **_: object
    ) -> FileFacts:
        target.write_text(f"{source.name} as {wanted.name} by {n_threads} threads")
        return replace(source, path=target, file_type_name=wanted.label)

    monkeypatch.setattr(optimize_command, "quantize", write)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_copy_is_written_beside_the_model(model: Path) -> None:
    """As Q8_0 unless told; it says from what, to what, how large, and what to do next."""
    result = swarmkv("optimize", model, "--threads", 1)
    assert result.exit_code == 0, result.output
    out = model.with_name("tiny model.Q8_0.gguf")
    assert names(model.parent) == {model.name, out.name}
    assert read_file_facts(out).file_type_name == "Q8_0"
    from_line, to_line, written, following = result.stdout.splitlines()
    assert str(model) in from_line
    assert "all F32, 1.5 MB" in from_line
    assert str(out) in to_line
    assert "Q8_0, about 0.4 MB" in to_line
    assert "Q8_0, 0.4 MB. It loads." in written
    assert f"--model '{out}'" in following
    assert result.stderr == "converting\n"


@pytest.mark.usefixtures("fake_conversion")
def test_a_quantised_source_comes_with_a_note(q8_0: Path, tmp_path: Path) -> None:
    """Rounding twice loses more, and turning back to 16 bits brings nothing back."""
    for name, effect in (("Q4_0", "loses some more quality"), ("f16", "brings none back")):
        result = swarmkv("optimize", q8_0, "--type", name, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert "Q8_0 is quantised already" in result.stdout
        assert effect in result.stdout
        assert "F16 or BF16" in result.stdout


@pytest.mark.usefixtures("fake_conversion")
def test_a_type_without_fast_kernels_comes_with_a_note(model: Path) -> None:
    """Who wants it gets it."""
    assert "no fast prefill kernels on x86" in swarmkv("optimize", model, "--type", "q6_k").stdout
    assert "no fast prefill kernels" not in swarmkv("optimize", model, "--type", "q4_0").stdout


@pytest.mark.usefixtures("fake_conversion")
def test_nothing_is_replaced_without_force(model: Path) -> None:
    """What was there is still there; with --force it is the new file."""
    out = model.with_name("out.gguf")
    out.write_text("mine")
    optimize = partial(swarmkv, "optimize", model, "--out", out, "--threads", 3)
    assert_refused(optimize(), "out.gguf", "--force")
    assert out.read_text() == "mine"
    assert optimize("--force").exit_code == 0
    assert out.read_text() == "tiny-llama as q8_0 by 3 threads"


def test_the_model_is_never_written_over(model: Path) -> None:
    """However its path is spelled, and whatever is forced."""
    before = model.read_bytes()
    (model.parent / "folder").mkdir()
    (model.parent / "link.gguf").symlink_to(model)
    for out in (model, model.parent / "folder" / ".." / model.name, model.parent / "link.gguf"):
        assert_refused(swarmkv("optimize", model, "--out", out, "--force"), "same file")
    assert model.read_bytes() == before


def test_a_model_of_that_type_is_left_alone(q8_0: Path, tmp_path: Path) -> None:
    """There is nothing to do."""
    refused = swarmkv("optimize", q8_0, "--out", tmp_path / "out.gguf")
    assert_refused(refused, "is Q8_0 already", "nothing was written")
    assert names(tmp_path) == set()


def test_an_unknown_type_is_refused_with_a_list(model: Path) -> None:
    """Before the model is looked at."""
    assert_refused(swarmkv("optimize", "missing.gguf", "--type", "int8"), "int8", "q8_0", "q4_k_m")


@pytest.mark.parametrize("content", [None, b"", b"not a model at all, just text", b"GGUF\x03"])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Missing, empty, something else, cut short; and a folder."""
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    assert_refused(swarmkv("optimize", path), "model.gguf")
    assert_refused(swarmkv("optimize", tmp_path, "--out", tmp_path / "out.gguf"), "not a file")
    assert names(tmp_path) <= {"model.gguf"}


def test_a_target_that_cannot_be_written_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such folder, a folder itself, and one that may not be written."""
    folder = model.parent
    assert_refused(swarmkv("optimize", model, "--out", folder), "it is a folder")
    assert_refused(swarmkv("optimize", model, "--out", folder / "no" / "x"), "does not exist")
    monkeypatch.setattr(console.os, "access", lambda path, mode: mode != os.W_OK)
    assert_refused(swarmkv("optimize", model), "permission denied")


def test_a_full_disk_is_told_in_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After what would have been done."""

    class Usage:
        free = 10_000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    result = swarmkv("optimize", model)
    assert result.exit_code == 2
    assert "error: no room in" in result.stderr
    assert names(model.parent) == {model.name}


@pytest.mark.usefixtures("fake_conversion")
def test_without_a_model_the_default_one_is_copied_to_the_current_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own folder belongs to a Python package; so it is, too, when its path is given."""
    package, folder = tmp_path / "site-packages" / "package", tmp_path / "current"
    package.mkdir(parents=True)
    folder.mkdir()
    shipped = model.rename(package / "shipped.gguf")
    monkeypatch.setattr(optimize_command, "default_model", lambda: shipped)
    monkeypatch.chdir(folder)
    assert swarmkv("optimize").exit_code == 0
    assert swarmkv("optimize", shipped, "--type", "f16").exit_code == 0
    assert names(folder) == {"shipped.Q8_0.gguf", "shipped.F16.gguf"}
    assert names(package) == {"shipped.gguf"}


@pytest.mark.parametrize("option", ["model", "--out"])
def test_the_home_of_nobody_is_refused(option: str, model: Path) -> None:
    """In one line, as any path that leads nowhere."""
    nowhere = "~no-such-user/x.gguf"
    arguments = (nowhere,) if option == "model" else (model, "--out", nowhere)
    assert_refused(swarmkv("optimize", *arguments))


def test_a_terminal_gets_a_bar(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, and it is gone at the end."""
    screen = io.StringIO()
    consoles = {True: Console(file=screen, force_terminal=True), False: Console()}
    monkeypatch.setattr(optimize_command, "Console", lambda stderr=False: consoles[stderr])
    assert swarmkv("optimize", model).exit_code == 0
    assert "Converting" in screen.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_nothing_half_written(model: Path, number: signal.Signals) -> None:
    """Ctrl-C, or a signal to end: one line, exit code 130, and no file but the model."""
    process = swarmkv_process("optimize", model)
    assert process.stderr is not None
    assert process.stderr.readline() == "converting\n"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert stderr == "error: interrupted.\n"
    assert process.returncode == 130
    assert names(model.parent) == {model.name}
