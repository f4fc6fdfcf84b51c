"""Servers that import an application, compile its graph, and fork their workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]

APPLICATION = """
import multiprocessing, os, sys
from langgraph.graph import START
from langchain_swarmkv import (
    AnalystNode, ChatSwarmKV, DocumentNode, SwarmState, SwarmStateGraph)

TEXT = "A strip listens to the floor. " * 20
llm = ChatSwarmKV(
    model_path=sys.argv[1], lock_dir=sys.argv[2], n_ctx=2048, n_threads=1, max_tokens=8)
graph = SwarmStateGraph(SwarmState)
graph.add_node("document", DocumentNode(llm))
graph.add_node("novelty", AnalystNode(llm, task="What is new?"))
graph.add_edge(START, "document")
graph.add_edge("document", "novelty")
app = graph.compile(document=TEXT)
num_tokens = llm.get_num_tokens(TEXT)

def work(_=None):
    assert llm.get_num_tokens(TEXT) == num_tokens
    return app.invoke({"document": TEXT})["findings"]["novelty"]
"""
PREFORK = """
workers = []
for _ in range(2):
    worker = os.fork()
    if worker == 0:
        print(repr(work()), flush=True)
        llm.close()
        sys.exit(0)  # through every atexit handler
    workers.append(worker)
for worker in workers:
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
print(repr(work()), flush=True)
llm.close()
"""
POOL = """
with multiprocessing.get_context("fork").Pool(2) as pool:
    for answer in pool.map(work, range(3), chunksize=1):
        print(repr(answer), flush=True)
"""


def answers(code: str, model: Path, lock_dir: Path) -> list[str]:
    process = subprocess.run(
        [sys.executable, "-c", dedent(APPLICATION) + code, str(model), str(lock_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.splitlines()


def test_workers_of_a_preloading_server_answer(tiny_llama: Path, tmp_path: Path) -> None:
    """The parent counted the document; each worker loads its own model, and so can the parent."""
    found = answers(PREFORK, tiny_llama, tmp_path / "locks")
    assert len(found) == 3
    assert len(set(found)) == 1


def test_a_pool_of_forked_processes_answers(tiny_llama: Path, tmp_path: Path) -> None:
    """As gunicorn and multiprocessing make them."""
    found = answers(POOL, tiny_llama, tmp_path / "locks")
    assert len(found) == 3
    assert len(set(found)) == 1
