"""A new process on a known document, and more documents than fit: what snapshots on disk are worth.

Restart: a process prefills a document of 3,500 tokens and ends; new ones ask a question about it,
in turn with and without the folder. What counts is the time to the first answer token, from
submission, in an engine that is loaded and warm.

Rotation: questions about 12 documents, some asked for more than others, through a pool that holds
3, with memory for 3 more and the disk for the rest; time to first token by where the document came
from.

    python benchmarks/restart.py [--document-tokens 3500] [--repeat 5] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

from fanout.machine import machine, smollm2, versions

from langchain_swarmkv import EngineConfig, PrefixSource, SamplingParams, SwarmEngine

DISCLOSURE = Path(__file__).parent.parent / "examples" / "patent_analysis" / "disclosure.md"
QUESTION = "\n\nQuestion: what does the device do?\nAnswer:"
NUM_DOCUMENTS = 12


def main() -> None:
    """Parse the command line, run both parts and print the medians."""
    arguments = _arguments()
    if arguments.role:
        print(json.dumps(_ROLES[arguments.role](arguments)))
        return
    result = {
        "benchmark": "restart",
        "command": " ".join(["python", "benchmarks/restart.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": arguments.model.name,
        "document_tokens": arguments.document_tokens,
        "restart": _restart(arguments),
        "rotation": _rotation(arguments),
        "machine": machine(),
        "versions": versions(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _report(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file (SmolLM2)")
    parser.add_argument("--document-tokens", type=int, default=3500)
    parser.add_argument("--rotation-tokens", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    parser.add_argument("--role", choices=list(_ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.model = arguments.model or smollm2()
    return arguments


def _open(arguments: argparse.Namespace, n_ctx: int, **options: Any) -> SwarmEngine:
    engine = SwarmEngine(EngineConfig(model_path=arguments.model, n_ctx=n_ctx), **options)
    warm = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.submit(engine.tokenizer.encode("Warm up."), warm, keep_prefix=False).result()
    engine.reset_prefix_cache()
    return engine


def _document(engine: SwarmEngine, num_tokens: int, number: int = 0) -> list[int]:
    ids = engine.tokenizer.encode(
        f"{chr(ord('A') + number)}. {DISCLOSURE.read_text(encoding='utf-8')}"
    )
    return (ids * -(-num_tokens // len(ids)))[:num_tokens]


def _ask(engine: SwarmEngine, document: list[int], question: str = QUESTION) -> dict[str, Any]:
    prompt = document + engine.tokenizer.encode(question)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    asked = engine.submit(prompt, params).result()
    return {
        "ttft_seconds": asked.statistics.ttft_seconds,
        "prefix_source": asked.statistics.prefix_source.value,
        "computed_tokens": asked.statistics.num_computed_tokens,
        "tokens": list(asked.token_ids),
    }


def _save(arguments: argparse.Namespace) -> dict[str, Any]:
    with _open(arguments, 2 * arguments.document_tokens, snapshot_dir=arguments.folder) as engine:
        document = _document(engine, arguments.document_tokens)
        prefill = engine.submit(document, SamplingParams(max_tokens=0)).result()
        return {"prefill_seconds": prefill.statistics.prefill_seconds}


def _read(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {"snapshot_dir": arguments.folder} if arguments.folder else {}
    with _open(
        arguments, 2 * arguments.document_tokens, snapshot_policy="never", **options
    ) as engine:
        return _ask(engine, _document(engine, arguments.document_tokens))


_ROLES = {"save": _save, "read": _read}


def _in_a_process(arguments: argparse.Namespace, role: str, folder: str | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--role", role, "--model", str(arguments.model)]
    command += ["--document-tokens", str(arguments.document_tokens)]
    command += ["--folder", folder] if folder else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _restart(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        saved = _in_a_process(arguments, "save", folder)
        num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.swarmkv"))
        runs: dict[str, list[dict[str, Any]]] = {"disk": [], "prefill": []}
        for number in range(1, arguments.repeat + 1):
            runs["disk"].append(_in_a_process(arguments, "read", folder))
            runs["prefill"].append(_in_a_process(arguments, "read", None))
            print(f"round {number} of {arguments.repeat}", file=sys.stderr, flush=True)
    assert all(run["prefix_source"] == PrefixSource.DISK.value for run in runs["disk"])
    ttft = {name: [run["ttft_seconds"] for run in made] for name, made in runs.items()}
    medians = {name: statistics.median(seconds) for name, seconds in ttft.items()}
    return {
        **saved,
        "file_bytes": num_bytes,
        "ttft_seconds": ttft,
        "median_ttft_seconds": medians,
        "ratio": medians["prefill"] / medians["disk"],
        "equal_answers": len({tuple(run["tokens"]) for made in runs.values() for run in made}) == 1,
    }


def _rotation(arguments: argparse.Namespace) -> dict[str, Any]:
    size = arguments.rotation_tokens
    ttft: dict[str, list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as folder,
        _open(
            arguments,
            n_ctx=3 * size + 256,
            snapshot_dir=folder,
            snapshot_memory_bytes=int(3.5 * size * _bytes_per_token(arguments)),
        ) as engine,
    ):
        documents = [_document(engine, size, number) for number in range(NUM_DOCUMENTS)]
        for turn, number in enumerate(_order()):
            asked = _ask(engine, documents[number], f"\n\nQuestion {turn}: who is told?\nAnswer:")
            ttft[asked["prefix_source"]].append(asked["ttft_seconds"])
    return {
        "documents": NUM_DOCUMENTS,
        "document_tokens": size,
        "asked": sum(map(len, ttft.values())),
        "from": {source: len(seconds) for source, seconds in ttft.items()},
        "median_ttft_seconds": {s: statistics.median(seconds) for s, seconds in ttft.items()},
    }


def _bytes_per_token(arguments: argparse.Namespace) -> int:
    with _open(arguments, 512) as engine:
        return engine.facts.kv_bytes_per_token


def _order() -> list[int]:
    """Every document once, then 72 questions: some documents are asked for more than others."""
    weights = [1 / (1 + number) for number in range(NUM_DOCUMENTS)]  # Zipf's law
    later = random.Random(0).choices(range(NUM_DOCUMENTS), weights, k=6 * NUM_DOCUMENTS)
    return [*range(NUM_DOCUMENTS), *later]


def _report(result: dict[str, Any]) -> None:
    restart, rotation = result["restart"], result["rotation"]
    print(
        f"Restart, {result['document_tokens']} tokens on {result['model']}: first token after "
        f"{restart['median_ttft_seconds']['disk']:.3f} s from disk, "
        f"{restart['median_ttft_seconds']['prefill']:.3f} s by prefill: "
        f"{restart['ratio']:.1f} times sooner ({restart['file_bytes'] / 1e6:.1f} MB)"
    )
    for source, seconds in rotation["median_ttft_seconds"].items():
        print(
            f"Rotation: {rotation['from'][source]:>3} of {rotation['asked']} from {source:<9} "
            f"first token after {seconds:.3f} s"
        )


if __name__ == "__main__":
    main()
