"""What each possible gain brings, measured on bare llama.cpp: the figures of docs/performance.md.

One question at a time, the choices in turn, medians of several. Run it alone on the machine.

    python benchmarks/gains.py [--model FILE] [--json OUT] [prefill decode waves speculation ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from fanout.machine import machine, smollm2, versions
from fanout.native import Chunk, Context, Model

from langchain_swarmkv import EngineConfig, SamplingParams, SwarmEngine

PATENT = Path(__file__).parent / "fanout" / "data" / "patent-us6336130.txt"
DOCUMENT_TOKENS = 3200
N_CTX = 8192


class Bench:
    """A model, its document, and one context at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = Model(path)
        with SwarmEngine(EngineConfig(model_path=path, n_ctx=512)) as engine:
            self.document = engine.tokenizer.encode(PATENT.read_text("utf-8"))[:DOCUMENT_TOKENS]
        self.threads = len(os.sched_getaffinity(0))

    def context(self, **settings: Any) -> Context:
        """A context of the usual settings but these."""
        defaults = {"n_threads": self.threads, "flash_attention": False, "n_seq_max": 80}
        return Context(self.model, N_CTX, **{**defaults, **settings})

    def prefill_seconds(self, context: Context, repeat: int = 3) -> float:
        """Median of a prefill of the whole document."""
        return _median(lambda: _prefill(context, self.document), repeat)


def _step_seconds(
    context: Context, length: int, branches: int, tokens: int = 1, steps: int = 7
) -> float:
    """Median of a step of so many branches behind the `length` tokens of sequence 0."""
    for branch in range(1, branches + 1):
        context.fork(0, branch, length)
    seconds = []
    for step in range(steps):
        chunks = [
            Chunk(branch, [1000 + branch] * tokens, length + step * tokens)
            for branch in range(1, branches + 1)
        ]
        started = time.perf_counter()
        context.next_tokens(chunks)
        seconds.append(time.perf_counter() - started)
    for branch in range(1, branches + 1):
        context.cut(branch)
    return statistics.median(seconds)


def _merged(path: Path | None) -> dict[str, Any]:
    """What the file holds already, so that questions may be asked one by one."""
    return json.loads(path.read_text("utf-8")) if path and path.exists() else {}


def _prefill(context: Context, document: Sequence[int]) -> float:
    context.clear()
    started = time.perf_counter()
    context.prefill(0, document)
    context.wait()
    return time.perf_counter() - started


def _median(run: Callable[[], float], repeat: int) -> float:
    return statistics.median(run() for _ in range(repeat))


def measure_kernels(bench: Bench) -> dict[str, Any]:
    """Both kernels, in both phases, by the size of the micro-batch."""
    found: dict[str, Any] = {}
    for flash, n_ubatch in ((False, 512), (True, 512), (False, 256), (False, 128), (False, 64)):
        with bench.context(flash_attention=flash, fields={"n_ubatch": n_ubatch}) as context:
            name = f"{'flash' if flash else 'plain'}, n_ubatch {n_ubatch}"
            rate = DOCUMENT_TOKENS / bench.prefill_seconds(context, 2)
            found[name] = {"prefill_tokens_per_second": rate}
            if n_ubatch == 512:
                found[name]["step_ms"] = {
                    str(branches): 1e3 * _step_seconds(context, DOCUMENT_TOKENS, branches)
                    for branches in (1, 4, 16)
                }
    return found


def measure_kv_types(bench: Bench) -> dict[str, Any]:
    """Number formats of the cells; quantised V needs flash attention."""
    found: dict[str, Any] = {}
    kinds = {
        "f16": (1, 1, False),  # enum ggml_type, ggml.h
        "f32": (0, 0, False),
        "bf16": (30, 30, False),
        "K q8_0, V f16": (8, 1, False),
        "q8_0, flash": (8, 8, True),
    }
    for name, (k, v, flash) in kinds.items():
        fields = {"type_k": k, "type_v": v}
        with bench.context(flash_attention=flash, fields=fields) as context:
            found[name] = {
                "prefill_tokens_per_second": DOCUMENT_TOKENS / bench.prefill_seconds(context, 1),
                "step_16_ms": 1e3 * _step_seconds(context, DOCUMENT_TOKENS, 16),
            }
    return found


def measure_threads(bench: Bench) -> dict[str, Any]:
    """Threads in each phase."""
    found: dict[str, Any] = {}
    for threads in sorted({1, bench.threads}):
        with bench.context(n_threads=threads) as context:
            found[str(threads)] = {
                "prefill_tokens_per_second": DOCUMENT_TOKENS / bench.prefill_seconds(context, 1),
                "step_1_ms": 1e3 * _step_seconds(context, DOCUMENT_TOKENS, 1),
                "step_16_ms": 1e3 * _step_seconds(context, DOCUMENT_TOKENS, 16),
            }
    return found


def measure_waves(bench: Bench) -> dict[str, Any]:
    """50 branches of 20 + 64 tokens: all at once, or so many at a time."""
    found: dict[str, Any] = {}
    branches, rest, outputs = 50, 20, 64
    with bench.context() as context:
        _prefill(context, bench.document)
        for wave in (50, 25, 16, 12, 8):
            started = time.perf_counter()
            for first in range(0, branches, wave):
                ids = range(1, min(wave, branches - first) + 1)
                for branch in ids:
                    context.fork(0, branch, DOCUMENT_TOKENS)
                context.next_tokens([Chunk(b, [1000 + b] * rest, DOCUMENT_TOKENS) for b in ids])
                for step in range(outputs - 1):
                    at = DOCUMENT_TOKENS + rest + step
                    context.next_tokens([Chunk(branch, [1000], at) for branch in ids])
                for branch in ids:
                    context.cut(branch)
            found[f"waves of {wave}"] = {"seconds": time.perf_counter() - started}
    return found


def measure_idle(bench: Bench) -> dict[str, Any]:
    """Eight branches behind 1,000 tokens, with 3,000 idle ones below; and what moving costs."""
    found: dict[str, Any] = {}
    document = bench.document[:1000]
    for idle in (0, 3000):
        with bench.context() as context:
            context.prefill(79, (bench.document * 2)[:idle] or bench.document[:1])
            started = time.perf_counter()
            context.prefill(0, document)
            context.wait()
            prefill = time.perf_counter() - started
            step = _step_seconds(context, len(document), 8)
            started = time.perf_counter()
            state = context.save(0)
            context.cut(0)
            context.restore(0, state)
            found[f"{idle} idle tokens below"] = {
                "prefill_seconds": prefill,
                "step_8_ms": 1e3 * step,
                "move_1000_cells_ms": 1e3 * (time.perf_counter() - started),
            }
    return found


def measure_graph_sampling(bench: Bench) -> dict[str, Any]:
    """A step of 16 branches with its greedy tokens: from logits, or sampled in the graph."""
    found: dict[str, Any] = {}
    for in_graph in (False, True, False, True):
        with bench.context() as context:
            _prefill(context, bench.document[:1024])
            chains = _attach_samplers(context, 16) if in_graph else []
            for branch in range(1, 17):
                context.fork(0, branch, 1024)
            seconds = []
            for step in range(12):
                chunks = [Chunk(branch, [1000 + branch], 1024 + step) for branch in range(1, 17)]
                started = time.perf_counter()
                if in_graph:
                    _decode_in_graph(context, chunks)
                else:
                    context.next_tokens(chunks)
                seconds.append(time.perf_counter() - started)
        for chain in chains:
            llama_cpp.llama_sampler_free(chain)
        name = "in the graph" if in_graph else "from logits"
        found.setdefault(name, []).append(1e3 * statistics.median(seconds))
    return {name: {"step_16_ms": figures} for name, figures in found.items()}


def _attach_samplers(context: Context, branches: int) -> list[Any]:
    chains = []
    for branch in range(1, branches + 1):
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        if not llama_cpp.llama_set_sampler(context.handle, branch, chain):
            raise SystemExit("llama.cpp does not take a sampler into the graph here")
        chains.append(chain)
    return chains


def _decode_in_graph(context: Context, chunks: Sequence[Chunk]) -> list[int]:
    context.append(chunks)
    get_token = llama_cpp.llama_get_sampled_token_ith
    return [int(get_token(context.handle, row)) for row in range(len(chunks))]


def measure_speculation(bench: Bench) -> dict[str, Any]:
    """Prompt look-up: what a drafted token costs in a step, and how many of them would be right."""
    found: dict[str, Any] = {}
    with bench.context() as context:
        _prefill(context, bench.document)
        for branches in (1, 16):
            found[f"step_ms of {branches} branches"] = {
                f"{tokens} tokens each": 1e3
                * _step_seconds(context, DOCUMENT_TOKENS, branches, tokens)
                for tokens in (1, 3, 5)
            }
    config = EngineConfig(model_path=bench.path, n_ctx=N_CTX)
    with SwarmEngine(config) as engine:
        questions = [
            engine.tokenizer.encode(
                f"\n\nQuestion: quote what the patent says about {what}.\nAnswer:"
            )
            for what in ("the first node", "availability", "claim 1", "the failure of a node")
        ]
        handles = [
            engine.submit([*bench.document, *q], SamplingParams(max_tokens=96, ignore_eos=True))
            for q in questions
        ]
        drafted = accepted = steps = 0
        for question, handle in zip(questions, handles, strict=True):
            counts = _look_up([*bench.document, *question], list(handle.result().token_ids))
            drafted, accepted = drafted + counts[0], accepted + counts[1]
            steps += counts[2]
    found["look-up of up to 4 tokens"] = {
        "drafted": drafted,
        "accepted": accepted,
        "steps": steps,
        "output_tokens": 96 * len(questions),
    }
    return found


def _look_up(prompt: list[int], output: list[int], gram: int = 2, most: int = 4) -> tuple[int, ...]:
    """Replay a greedy answer with drafts from the last place where its last `gram` tokens stood.

    Returns:
        (tokens drafted, of them accepted, steps).
    """
    drafted = accepted = steps = done = 0
    while done < len(output):
        text = prompt + output[:done]
        key = text[-gram:]
        draft: list[int] = []
        for at in range(len(text) - gram - 1, -1, -1):
            if text[at : at + gram] == key:
                draft = text[at + gram : at + gram + most]
                break
        right = 0
        while right < min(len(draft), len(output) - done) and draft[right] == output[done + right]:
            right += 1
        drafted, accepted, steps = drafted + len(draft), accepted + right, steps + 1
        done += right + 1
    return drafted, accepted, steps


MEASUREMENTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "kernels": measure_kernels,
    "kv-types": measure_kv_types,
    "threads": measure_threads,
    "waves": measure_waves,
    "idle": measure_idle,
    "graph-sampling": measure_graph_sampling,
    "speculation": measure_speculation,
}


def main() -> None:
    """Measure what was asked for, print it, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=[], help=f"of {', '.join(MEASUREMENTS)}; all")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file (SmolLM2)")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    bench = Bench(arguments.model or smollm2())
    result = _merged(arguments.json) | {
        "benchmark": "gains",
        "model": bench.path.name,
        "document_tokens": DOCUMENT_TOKENS,
        "machine": machine(),
        "versions": versions(),
    }
    for name in arguments.what or MEASUREMENTS:
        print(f"== {name}", flush=True)
        result[name] = MEASUREMENTS[name](bench)
        for choice, figures in result[name].items():
            print(f"  {choice:<28} {json.dumps(figures, default=str)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
