"""Users' code passes type checkers that know nothing of pydantic's conversions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import users_code
from tests.support.pages import PAGES, ROOT, examples, name_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What users write: a file of ours, and for each page a file with its code at its lines."""
    folder = tmp_path_factory.mktemp("code")
    code = Path(users_code.__file__).read_text(encoding="utf-8")
    (folder / "users_code.py").write_text(code, encoding="utf-8")
    num_pages = 0
    for page in PAGES:
        lines: list[str] = []
        for example in examples(page):
            lines += [""] * (example.line - len(lines)) + example.code.splitlines()
        name = name_of(page).removesuffix(".md").replace("/", "_").replace("-", "_")
        if lines:
            (folder / f"{name}.py").write_text("\n".join([*lines, ""]), encoding="utf-8")
            num_pages += 1
    assert num_pages >= 4
    return folder


def run(*command: str | Path, folder: Path) -> str:
    """What a type checker prints; it looks for the package as for any installed one."""
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode in (0, 1), result.stderr
    return result.stdout


@pytest.mark.parametrize("strictness", [[], ["--strict"]], ids=["default", "strict"])
def test_mypy_without_the_plugin_accepts_users_code(folder: Path, strictness: list[str]) -> None:
    """And refuses the slips among it: an ignore that is not needed is an error."""
    printed = run(
        "mypy",
        "--config-file=",
        f"--cache-dir={folder / '.mypy_cache'}",
        "--follow-imports=silent",
        "--warn-unused-ignores",
        *strictness,
        *sorted(folder.glob("*.py")),
        folder=folder,
    )
    assert printed.startswith("Success: no issues found in "), printed


def test_pyright_accepts_users_code(folder: Path) -> None:
    """In its default strictness."""
    settings = {
        "include": [str(path) for path in sorted(folder.glob("*.py"))],
        "extraPaths": [str(ROOT)],
        "enableTypeIgnoreComments": True,
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    printed = run(
        "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", folder, folder=folder
    )
    found = json.loads(printed)
    assert found["summary"]["filesAnalyzed"] == len(settings["include"])
    faults = [
        f"{Path(fault['file']).name}:{fault['range']['start']['line'] + 1}: {fault['message']}"
        for fault in found["generalDiagnostics"]
        if fault["severity"] in ("error", "warning")
    ]
    assert faults == []
