"""`swarmkv demo` as a new user runs it: the shipped disclosure, SmolLM2, a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.patent_analysis.graph import SMALL_MODEL_TASKS, title

MAX_TOKENS = 48


@pytest.mark.timeout(600)
def test_the_demo_prefills_the_disclosure_once_for_six_analysts(tmp_path: Path) -> None:
    """One prefill of about 3,000 tokens, six answers, a report, a page and no noise."""
    json_out, html_out = tmp_path / "out.json", tmp_path / "out.html"
    finished = subprocess.run(
        [
            *(sys.executable, "-c", "from langchain_swarmkv.cli import main; main()", "demo"),
            *("--max-tokens", str(MAX_TOKENS), "--json", str(json_out), "--html", str(html_out)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert "warning" not in finished.stderr.lower()
    assert "Estimate: sharing saved about" in finished.stdout

    run = json.loads(json_out.read_text(encoding="utf-8"))
    document_tokens = run["document_tokens"]
    assert 2700 < document_tokens < 3400
    assert run["document"]["computed_tokens"] == document_tokens
    assert "Q8_0 copy of its file" in finished.stdout
    assert run["model"].endswith(".Q8_0")
    assert [analyst["name"] for analyst in run["analysts"]] == list(SMALL_MODEL_TASKS)
    for analyst in run["analysts"]:
        assert analyst["cached_tokens"] >= document_tokens - 8
        assert analyst["computed_tokens"] < 100
        assert 0 < analyst["output_tokens"] <= MAX_TOKENS
        assert analyst["text"].strip()
        opening = SMALL_MODEL_TASKS[analyst["name"]].opening
        assert analyst["text"].startswith(opening or "- ")
        assert analyst["ttft_seconds"] > 0
        assert analyst["text"].strip() in run["report"]
    assert run["engine"]["num_prefill_tokens"] == run["savings"]["computed_tokens"]
    assert run["engine"]["peak_running"] == len(SMALL_MODEL_TASKS)
    assert run["savings"]["estimated_saved_seconds"] > 0

    page = html_out.read_text(encoding="utf-8")
    for name in SMALL_MODEL_TASKS:
        assert title(name) in finished.stdout
        assert title(name) in page
