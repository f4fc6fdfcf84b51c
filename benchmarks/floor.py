"""How far the engine is from the least that the work costs.

The work: prefill one document, then B branches with a question each, N greedy tokens a branch. The
floor does it with a bare loop of llama.cpp calls in this process; the engine does it from B plain
`submit` calls, with nothing declared. Both run in turn, on one model file with the same settings;
the last line ends with the ratio of the medians.

    python benchmarks/floor.py [--document-tokens 1024] [--branches 8] [--max-tokens 32]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from fanout.contenders.floor import FloorLoop
from fanout.machine import machine, smollm2, versions
from fanout.native import Model

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
        model = Model(arguments.model)
        floor = FloorLoop(
            model,
            n_ctx=config.n_ctx,
            wave=arguments.branches,
            n_threads=arguments.threads,
            flash_attention=arguments.flash_attention,
        )
        runs: dict[str, Callable[[], list[list[int]]]] = {
            "floor": lambda: floor.run(document, tasks, arguments.max_tokens).outputs,
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
        model.close()
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
    arguments.model = arguments.model or smollm2()
    return arguments


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
        "machine": machine(),
        "versions": versions(),
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


if __name__ == "__main__":
    main()
