"""`make demo` and `make test` on machines where something is missing, and the second time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make in the checkout, apart from the make that may be running this test."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        [shutil.which("make") or "make", *arguments],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with a shell and nothing else: neither Python nor a compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sh", "bash", "nproc"):
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return folder


@pytest.mark.parametrize("target", ["demo", "test", "install"])
def test_an_old_python_is_refused_with_its_version(tmp_path: Path, target: str) -> None:
    """Before anything is made."""
    old = script(tmp_path / "python", '[ "$1" = -V ] && echo "Python 3.9.18"', '[ "$1" = -V ]')
    result = make(target, f"VENV={tmp_path / 'venv'}", f"PYTHON={old}")
    assert result.returncode != 0
    assert "Python 3.9.18; Python 3.10 or newer is needed" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    """The line says how to name another."""
    result = make("demo", f"VENV={tmp_path / 'venv'}", "PYTHON=python-of-nowhere")
    assert result.returncode != 0
    assert "no python-of-nowhere found" in result.stderr


def test_a_missing_compiler_is_noticed_before_the_download(tmp_path: Path, bare_path: Path) -> None:
    """Not minutes later, in the middle of a build log."""
    result = make(
        "demo", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", PATH=str(bare_path)
    )
    assert result.returncode != 0
    assert "error: no C++ compiler found" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_a_second_run_installs_nothing_until_the_project_file_changes(tmp_path: Path) -> None:
    """The stamp is older or newer than pyproject.toml, and that alone decides."""
    stamps = [tmp_path / name for name in (".created", ".installed-dev", ".installed-demo")]
    project_time = (ROOT / "pyproject.toml").stat().st_mtime
    for stamp in stamps:
        stamp.touch()
        os.utime(stamp, (project_time + 10, project_time + 10))
    is_current = ("--question", f"VENV={tmp_path}", f"{tmp_path}/.installed-dev")
    assert make(*is_current).returncode == 0
    os.utime(stamps[1], (project_time - 10, project_time - 10))
    assert make(*is_current).returncode == 1


def test_what_is_run_is_said_once(tmp_path: Path) -> None:
    """`make test` what TEST says, short; the others in full, of which one what is marked alone."""

    def command_of(target: str) -> str:
        arguments = (f"VENV={tmp_path}", "JOBS=3", "TEST=tests/x.py")
        (line,) = [
            line
            for line in make("--dry-run", target, *arguments).stdout.splitlines()
            if "-m pytest" in line
        ]
        assert "--numprocesses 3" in line
        assert "tests/x.py" in line
        return line

    assert "TEST_LENGTH" not in command_of("test")
    assert "-m long" not in command_of("test")
    assert command_of("test-long") == f"TEST_LENGTH=full {command_of('test')} -m long"
    assert command_of("test-all") == f"TEST_LENGTH=full {command_of('test')}"


def test_help_names_every_target() -> None:
    """What `make` alone prints."""
    for target in ("demo", "test", "test-long", "test-all", "test-unit", "lint", "bench-floor"):
        assert f"make {target} " in make().stdout
