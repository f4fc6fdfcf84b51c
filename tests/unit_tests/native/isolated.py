"""Runs code in a process of its own, for faults that would end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests.support.processes import ROOT, WITHOUT_LANGCHAIN

_TIMEOUT_SECONDS = 110

_PRELUDE = (
    WITHOUT_LANGCHAIN
    + """
from pathlib import Path
import numpy as np
from langchain_swarmkv.config import EngineConfig, SamplingParams
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.llama import LlamaEngine
from langchain_swarmkv.engine.llama_tokenizer import LlamaTokenizer
from langchain_swarmkv.errors import SwarmKVError

def attempt(name, function):
    "Prints `name: outcome`, the outcome being the class of a typed error, or the result."
    try:
        outcome = function()
    except SwarmKVError as error:
        outcome = type(error).__name__
    print(f"{name}: {outcome}", flush=True)

def open_engine(path, **options):
    defaults = dict(n_ctx=256, n_batch=32, max_sequences=4, n_threads=1)
    return LlamaEngine(EngineConfig(model_path=path, **{**defaults, **options}))

def append(engine, seq_id, tokens):
    for start in range(0, len(tokens), engine.limits.max_batch_tokens):
        batch = Batch()
        chunk = tokens[start : start + engine.limits.max_batch_tokens]
        row = batch.add(seq_id, chunk, engine.num_tokens(seq_id), want_logits=True)
        engine.decode(batch)
    return row
"""
)


def run_isolated(code: str, *arguments: str | Path, stdin: str = "", may_log: bool = False) -> str:
    """Run code that ends normally; what it printed.

    Args:
        code: Python, after a prelude with `attempt`, `open_engine` and `append`.
        arguments: `sys.argv[1:]` of the process.
        stdin: What it may read.
        may_log: Whether it may write to stderr.

    Raises:
        AssertionError: it was ended by a signal, raised, or wrote to stderr.
    """
    process = subprocess.run(
        [sys.executable, "-c", _PRELUDE + dedent(code), *map(str, arguments)],
        cwd=ROOT,
        # llama.cpp would start a debugger to print a backtrace before it aborts.
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    told = f"exit code {process.returncode}\n{process.stdout}\n{process.stderr[-3000:]}"
    assert process.returncode == 0, told
    assert may_log or process.stderr == "", told
    return process.stdout


def outcomes(
    code: str, *arguments: str | Path, stdin: str = "", may_log: bool = False
) -> dict[str, str]:
    """What `attempt` printed, by name."""
    lines = run_isolated(code, *arguments, stdin=stdin, may_log=may_log).splitlines()
    return dict(line.split(": ", 1) for line in lines)
