"""How much of a decode step of many branches is Python's, and not llama.cpp's.

B branches of one document decode N tokens each while B consumers stream them, from threads or on an
event loop. Native time is that of `llama_decode` with the wait for its logits; the rest of the time
between two steps is Python's: batch building, sampling, detokenising, delivery.

    python benchmarks/python_share.py [--branches 16] [--document-tokens 1024] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
from fanout.machine import machine, smollm2, versions

from langchain_swarmkv import EngineConfig, RequestHandle, SamplingParams, SwarmEngine

DISCLOSURE = Path(__file__).parent.parent / "examples" / "patent_analysis" / "disclosure.md"


class StepClock:
    """Times each `llama_decode` of this process from its call until its logits are there."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, int]] = []
        """(start, end, tokens) of each."""
        self._decode = llama_cpp.llama_decode
        llama_cpp.llama_decode = self._timed

    def _timed(self, context: Any, batch: Any) -> int:
        started = time.perf_counter()
        code: int = self._decode(context, batch)
        llama_cpp.llama_synchronize(context)
        self.steps.append((started, time.perf_counter(), batch.n_tokens))
        return code

    def share(self, num_tokens: int) -> tuple[float, float]:
        """(median seconds from step to step, Python's part of them) of steps of so many tokens."""
        periods, gaps = [], []
        for (_, end, size), (start, next_end, next_size) in zip(
            self.steps, self.steps[1:], strict=False
        ):
            if size == next_size == num_tokens:
                periods.append(next_end - end)
                gaps.append(start - end)
        return statistics.median(periods), statistics.median(gaps)


def _read_in_threads(handles: list[RequestHandle]) -> None:
    threads = [threading.Thread(target=list, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read_on_a_loop(handles: list[RequestHandle]) -> None:
    async def read(handle: RequestHandle) -> None:
        async for _ in handle:
            pass

    async def read_all() -> None:
        await asyncio.gather(*map(read, handles))

    asyncio.run(read_all())


def main() -> None:
    """Run both kinds of consumers and print what Python took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file (SmolLM2)")
    parser.add_argument("--document-tokens", type=int, default=1024)
    parser.add_argument("--branches", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    arguments.model = arguments.model or smollm2()
    clock = StepClock()
    config = EngineConfig(model_path=arguments.model, max_running=arguments.branches)
    consumers: dict[str, Callable[[list[RequestHandle]], None]] = {
        "threads": _read_in_threads,
        "event loop": _read_on_a_loop,
    }
    result: dict[str, Any] = {
        "benchmark": "python_share",
        "model": arguments.model.name,
        "document_tokens": arguments.document_tokens,
        "branches": arguments.branches,
        "max_tokens": arguments.max_tokens,
        "machine": machine(),
        "versions": versions(),
    }
    with SwarmEngine(config) as engine:
        text = engine.tokenizer.encode(DISCLOSURE.read_text(encoding="utf-8"))
        document = (text * (1 + arguments.document_tokens // len(text)))[
            : arguments.document_tokens
        ]
        engine.submit(document, SamplingParams(max_tokens=0), pin="document").result()
        params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
        for name, read in consumers.items():
            clock.steps.clear()
            questions = [
                engine.tokenizer.encode(f"\n\nQuestion {n}: what is part {n}?\nAnswer:")
                for n in range(arguments.branches)
            ]
            read([engine.submit([*document, *q], params, keep_prefix=False) for q in questions])
            period, gap = clock.share(arguments.branches)
            result[name] = {"step_seconds": period, "python_seconds": gap, "share": gap / period}
            print(
                f"{arguments.branches} branches, read by {name}: step {1e3 * period:.1f} ms, of it "
                f"Python {1e3 * gap:.2f} ms: {gap / period:.1%}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
