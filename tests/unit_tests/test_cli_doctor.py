"""`swarmkv doctor`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from langchain_swarmkv.cli import console, doctor_command
from langchain_swarmkv.cli.doctor_report import print_diagnosis
from langchain_swarmkv.config import EngineConfig
from langchain_swarmkv.doctor import diagnosis as diagnosis_module
from langchain_swarmkv.doctor.diagnosis import Diagnosis, diagnose
from tests.unit_tests.test_cli import assert_refused, swarmkv, swarmkv_process


@pytest.fixture(autouse=True)
def short_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tokens are enough to see what is printed."""
    monkeypatch.setattr(diagnosis_module, "_DOCUMENT_TOKENS", 64)


@pytest.fixture(scope="module")
def diagnosis(tiny_llama: Path) -> Diagnosis:
    """Of the plainest model."""
    return diagnose(
        EngineConfig(model_path=tiny_llama, n_threads=1),
        task_tokens=64,
        max_tokens=256,
        compare_types=False,
    )


def test_the_doctor_prints_facts_rates_and_settings(tiny_llama: Path, tmp_path: Path) -> None:
    """The report goes to stdout, progress to stderr, both without escape sequences."""
    out = tmp_path / "out.json"
    result = swarmkv("doctor", tiny_llama, "--threads", 1, "--n-ctx", 4096, "--json", out)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    for words in (
        "tiny-llama",
        "all F32, 1.5 MB",
        "llama, 2 layers",
        "4,096 tokens",
        "built with (CPU)",
        "KV per token",
        "all F32, as it is",
        "Q8_0, converted",
        "Q4_0, converted",
        "  flash_attention",
        "prefill_flash_attention",
        "max_running",
    ):
        assert words in result.stdout
    assert "all F32, plain attention: decode of 16 branches" in result.stderr
    assert "converting a copy to Q4_0" in result.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["model"]["path"] == str(tiny_llama)
    assert found["pool"]["n_ctx"] == 4096
    assert found["pool"]["capacities"] == [
        {"document_tokens": 1000, "num_branches": 9, "needed_cells": 3880}
    ]
    assert [row["weight_type"] for row in found["rates"]] == [None, "q8_0", "q4_0"]
    for row in found["rates"]:
        for kernel in ("plain", "flash"):
            assert [rate["num_branches"] for rate in row[kernel]["decode"]] == [1, 4, 16]
            assert row[kernel]["prefill_tokens_per_second"] > 0
    assert found["advice"]["flash_attention"] in ("on", "off")
    assert found["machine"]["usable_cores"] >= 1
    assert found["build"]["features"]["CPU"]


def test_quick_measures_the_file_alone(tiny_llama: Path) -> None:
    """Other types are judged by the table, which is said."""
    result = swarmkv("doctor", tiny_llama, "--threads", 1, "--quick")
    assert result.exit_code == 0, result.output
    assert "converted" not in result.stdout
    assert "by a table, not measured" in result.stdout


def test_tables_fit_what_they_are_printed_to(diagnosis: Diagnosis) -> None:
    """A narrow terminal wraps cells and cuts none."""
    screen = io.StringIO()
    print_diagnosis(Console(file=screen, width=60, force_terminal=True), diagnosis)
    assert "…" not in screen.getvalue()
    assert "\x1b[1m" in screen.getvalue()


def test_a_terminal_sees_what_is_done(
    diagnosis: Diagnosis, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a spinner, on stderr."""

    def examine(*_: object, on_phase: Callable[[str], None], **__: object) -> Diagnosis:
        on_phase("prefill of 64 tokens")
        return diagnosis

    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True)
    monkeypatch.setattr(console, "Console", lambda stderr: terminal)
    monkeypatch.setattr(doctor_command, "diagnose", examine)
    assert swarmkv("doctor", tiny_llama).exit_code == 0
    assert "prefill of 64 tokens" in screen.getvalue()


def test_the_file_is_written_though_the_report_cannot_be_printed(
    diagnosis: Diagnosis, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`swarmkv doctor --json out.json | head` still has its measurements."""

    def fail(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(doctor_command, "diagnose", lambda *_, **__: diagnosis)
    monkeypatch.setattr(doctor_command, "print_diagnosis", fail)
    out = tmp_path / "out.json"
    assert swarmkv("doctor", tiny_llama, "--json", out).exit_code == 1
    assert json.loads(out.read_text(encoding="utf-8"))["rates"]


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """Missing, and something else."""
    path = tmp_path / "model.gguf"
    assert_refused(swarmkv("doctor", path), "model.gguf")
    path.write_bytes(b"not a model at all, just text")
    assert_refused(swarmkv("doctor", path), "not a GGUF file")


def test_a_path_that_cannot_be_written_is_refused_first(tiny_llama: Path, tmp_path: Path) -> None:
    """Before minutes go into what it should hold; nor is the model written over."""
    assert_refused(swarmkv("doctor", tiny_llama, "--json", tmp_path), "it is a folder")
    assert_refused(swarmkv("doctor", tiny_llama, "--json", tiny_llama), "same file")


def test_an_interrupt_ends_it_with_130(tiny_llama: Path, tmp_path: Path) -> None:
    """Ctrl-C while a copy is converted: one line, and no file left."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = swarmkv_process("doctor", tiny_llama, "--threads", 1, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if "converting a copy" in line:
            break
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert stderr == "error: interrupted.\n"
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
