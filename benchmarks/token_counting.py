"""How fast tokens are counted: llama.cpp's tokeniser, and tiktoken where its ids are proved equal.

Texts of several kinds and lengths; megabytes of UTF-8 and tokens a second, the best of several
rounds, and the time of the proof. No weights are loaded.

    python benchmarks/token_counting.py [--repeat 5] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from fanout.machine import machine, smollm2, versions

from langchain_swarmkv import ChatSwarmKV

ROOT = Path(__file__).parent.parent
CHINESE = (
    "本发明涉及一种电池管理系统，包括控制器（100）和2024个传感器；电压为3.7伏，温度不超过60度。\n"  # noqa: RUF001
)
SIZES = {"1 kB": 1_000, "100 kB": 100_000, "2 MB": 2_000_000}


def main() -> None:
    """Parse the command line, measure and print."""
    arguments = _arguments()
    with ChatSwarmKV(model_path=arguments.model) as llm:
        counted = _measure(llm.tokenizer, arguments.repeat)
    result = {
        "benchmark": "token_counting",
        "command": " ".join(["python", "benchmarks/token_counting.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": arguments.model.name,
        **counted,
        "machine": machine(),
        "versions": versions(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _report(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file (SmolLM2)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    arguments.model = arguments.model or smollm2()
    return arguments


def _kinds() -> dict[str, str]:
    modules = sorted((ROOT / "langchain_swarmkv").rglob("*.py"))
    return {
        "English": (ROOT / "examples/patent_analysis/disclosure.md").read_text(encoding="utf-8"),
        "code": "".join(path.read_text(encoding="utf-8") for path in modules),
        "Chinese": CHINESE,
        "digits": "".join(f"{number}, " for number in range(2_000, 3_000)),
        "white space": f"a{' ' * 120}b\n{' ' * 40}\n\n",
    }


def _measure(tokenizer: Any, repeat: int) -> dict[str, Any]:
    started = time.perf_counter()
    assert tokenizer.prove_counter(), "tiktoken's ids are not proved for this vocabulary"
    proof_seconds = time.perf_counter() - started
    cases = []
    for kind, sample in _kinds().items():
        for size, num_bytes in SIZES.items():
            data = (sample * (num_bytes // len(sample.encode()) + 1)).encode()[:num_bytes]
            cases.append(_case(tokenizer, kind, size, data.decode(errors="ignore"), repeat))
    return {"proof_seconds": proof_seconds, "cases": cases}


def _case(tokenizer: Any, kind: str, size: str, text: str, repeat: int) -> dict[str, Any]:
    ways = {"llama.cpp": lambda text: len(tokenizer.encode(text)), "tiktoken": tokenizer.count}
    # Each round's text is its own: long ones that were encoded are remembered.
    texts = [f"{number}: {text}" for number in range(repeat + 1)]
    counts = {way: [count(text) for text in texts[:1]] for way, count in ways.items()}
    seconds = {way: [_seconds(count, text) for text in texts[1:]] for way, count in ways.items()}
    num_bytes = len(texts[1].encode())
    num_tokens = counts["tiktoken"][0]
    assert counts["llama.cpp"] == counts["tiktoken"]
    return {
        "kind": kind,
        "size": size,
        "bytes": num_bytes,
        "tokens": num_tokens,
        "seconds": seconds,
        "megabytes_per_second": {way: num_bytes / min(s) / 1e6 for way, s in seconds.items()},
        "tokens_per_second": {way: num_tokens / min(s) for way, s in seconds.items()},
    }


def _seconds(count: Callable[[str], int], text: str) -> float:
    started = time.perf_counter()
    count(text)
    return time.perf_counter() - started


def _report(result: dict[str, Any]) -> None:
    print(f"{result['model']}; the proof takes {result['proof_seconds']:.1f} s")
    for case in result["cases"]:
        speeds = ", ".join(
            f"{way} {speed:.1f} MB/s ({case['tokens_per_second'][way] / 1e6:.2f} M tokens/s)"
            for way, speed in case["megabytes_per_second"].items()
        )
        print(f"{case['kind']:<12} {case['size']:>6}: {speeds}")


if __name__ == "__main__":
    main()
