"""`swarmkv bench fanout` as a user runs it: a process of its own, with workers below it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import langchain_swarmkv

ROOT = Path(langchain_swarmkv.__file__).parents[1]
CONTENDERS = ("fresh-context", "mutex", "copy-per-branch", "engine", "chat-model", "graph", "floor")
BRANCHES, MAX_TOKENS = 3, 4
SMALL = ("--branches", BRANCHES, "--max-tokens", MAX_TOKENS, "--document-tokens", 100)
QUICK = ("--threads", 1, "--repeat", 1, "--no-tune")


def fanout(folder: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """The command in an empty folder."""
    command = [sys.executable, "-c", "from langchain_swarmkv.cli import main; main()"]
    return subprocess.Popen(
        [*command, "bench", "fanout", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
    )


def test_all_contenders_do_the_same_work_and_agree_with_the_oracle(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Every branch is answered in full, and who shares computes the document once in each run."""
    out = tmp_path / "out.json"
    asked = ("--model", tiny_llama, "--contenders", ",".join(CONTENDERS), "--json", out)
    process = fanout(tmp_path, *asked, *SMALL, *QUICK, "--repeat", 2)
    stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stdout + stderr
    assert "Traceback" not in stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    workload = result["workload"]
    assert tuple(contender["name"] for contender in result["contenders"]) == CONTENDERS
    for contender in result["contenders"]:
        assert contender["name"] in stdout
        assert contender["output_tokens"] == BRANCHES * MAX_TOKENS
        agreement = contender["oracle_agreement"]
        num_judged = BRANCHES * MAX_TOKENS * len(contender["seconds"])
        assert agreement["tokens"] == agreement["agreeing"] == num_judged
        if contender["name"] == "fresh-context":
            again = (BRANCHES - 1) * workload["prefix_tokens"]
            assert contender["computed_tokens"] == workload["shared_prompt_tokens"] + again
        else:  # some also share the first tokens of questions that begin alike
            spared = workload["shared_prompt_tokens"] - contender["computed_tokens"]
            assert 0 <= spared < 10 * BRANCHES


def test_it_runs_from_an_installed_wheel(tiny_llama: Path, tmp_path: Path) -> None:
    """The package carries it, document included; nothing of the checkout is on the path."""
    package = tmp_path / "site" / "langchain_swarmkv"
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "langchain_swarmkv", package, ignore=no_caches)
    inside = package / "benchmarks" / "fanout"
    shutil.copytree(ROOT / "benchmarks" / "fanout", inside, ignore=no_caches)
    asked = ("--model", tiny_llama, "--contenders", "engine,floor")
    process = fanout(tmp_path, *asked, *SMALL, *QUICK, PYTHONPATH=str(package.parent))
    stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stdout + stderr


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_with_130(
    tiny_gguf: Callable[..., Path], tmp_path: Path, signal_number: signal.Signals
) -> None:
    """In the middle of a run: one line, no traceback, soon."""
    model = tiny_gguf("llama", n_ctx_train=1 << 20)
    sizes = ("--branches", 200, "--max-tokens", 100_000, "--document-tokens", 100)
    process = fanout(tmp_path, "--model", model, "--contenders", "fresh-context", *sizes, *QUICK)
    assert process.stderr is not None
    assert "round 1" in process.stderr.readline()
    process.send_signal(signal_number)
    _, stderr = process.communicate(timeout=60)
    assert stderr == "error: interrupted.\n"
    assert process.returncode == 130
