"""Snapshots of real models: damaged, used by others, and switched for a long time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from langchain_swarmkv.config import EngineConfig, SamplingParams
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.llama import LlamaEngine
from langchain_swarmkv.errors import SnapshotFormatError
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.snapshots.snapshot_file import read_snapshot, save_snapshot
from langchain_swarmkv.statistics import PrefixSource
from tests.support.oracle import Oracle, assert_matches_oracle
from tests.support.processes import ROOT, WITHOUT_LANGCHAIN
from tests.support.tolerances import F16_CELLS_ROUNDING

PREFILL = SamplingParams(max_tokens=0)
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def tokens_of(seed: int, count: int) -> list[int]:
    """Printable bytes: the tiny vocabularies keep them as single tokens."""
    return np.random.default_rng(seed).integers(32, 127, count).tolist()


DOCUMENT = tokens_of(1, 200)
BRANCHES = [[*DOCUMENT, *tokens_of(seed, 5)] for seed in (2, 3)]


def config_of(path: Path, **options: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model_path": path,
            "n_ctx": 1024,
            "n_batch": 256,
            "max_sequences": 8,
            "n_threads": 1,
            "kv_type_k": "f32",
            "kv_type_v": "f32",
            **options,
        }
    )


def answers(engine: SwarmEngine) -> list[tuple[int, ...]]:
    handles = [engine.submit(prompt, GREEDY, keep_prefix=False) for prompt in BRANCHES]
    return [handle.result().token_ids for handle in handles]


# -- E1: damage ------------------------------------------------------------------------------------


def damaged_files(whole: bytes, num_cells: int) -> Iterator[tuple[str, bytes]]:
    """A byte flipped at twelve places that mean something, and cuts at twelve lengths."""
    metadata = 32 + int.from_bytes(whole[12:16], "little")
    payload = metadata + 4 * num_cells + 32
    cells = payload + 88 + 16
    keys = cells + 12 * num_cells
    values = (keys + len(whole)) // 2
    places = {
        "magic": 0,
        "version": 8,
        "bytes of metadata": 12,
        "tokens": 16,
        "bytes of payload": 24,
        "metadata": 80,
        "token list": metadata + 40,
        "digest of the head": payload - 5,
        "cell table": cells + 50,
        "K": keys + 1000,
        "V": values + 1000,
        "digest": len(whole) - 1,
    }
    for name, place in places.items():
        yield f"{name} flipped", whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
    for length in (0, 3, 16, 31, 32, 80, metadata, payload - 32, payload, cells, values, -1):
        yield f"cut at {length}", whole[:length]


def test_a_damaged_file_leaves_no_trace(tiny_llama: Path, tmp_path: Path) -> None:
    """E1: each is refused, no sequence is filled, and the branches equal the oracle."""
    with SwarmEngine(
        config_of(tiny_llama), snapshot_dir=tmp_path, snapshot_policy="never"
    ) as engine:
        engine.submit(DOCUMENT, PREFILL, persist=True).result()
        engine.flush()
        (path,) = tmp_path.glob("*.swarmkv")
        whole, expected = path.read_bytes(), answers(engine)
        for damage, data in damaged_files(whole, len(DOCUMENT)):
            (tmp_path / "new").write_bytes(data)
            os.replace(tmp_path / "new", path)
            with pytest.raises(SnapshotFormatError):
                read_snapshot(path)
            engine.reset_prefix_cache()
            assert answers(engine) == expected, damage
            engine.check()
            assert engine.statistics().num_restores == 0, damage
        (tmp_path / "new").write_bytes(whole)
        os.replace(tmp_path / "new", path)
        engine.reset_prefix_cache()
        assert answers(engine) == expected
        assert engine.statistics().num_restores > 0
    with Oracle(tiny_llama, n_ctx=512, flash_attention=False, n_threads=1) as oracle:
        for prompt, answer in zip(BRANCHES, expected, strict=True):
            assert_matches_oracle(
                answer, oracle.greedy(prompt, len(answer)), 2 * F16_CELLS_ROUNDING
            )


# -- E2: reuse -------------------------------------------------------------------------------------


def decoded_for_a_branch(model: str, source: str) -> tuple[int, int, str]:
    """Tokens decoded, and said to be cached, for one branch over what `source` holds."""
    num_decoded, decode = 0, LlamaEngine.decode

    def spy(self: LlamaEngine, batch: Batch) -> None:
        nonlocal num_decoded
        num_decoded += len(batch)
        decode(self, batch)

    is_folder = Path(source).is_dir()
    with (
        pytest.MonkeyPatch.context() as patch,
        SwarmEngine(config_of(Path(model)), snapshot_dir=source if is_folder else None) as engine,
    ):
        patch.setattr(LlamaEngine, "decode", spy)
        if not is_folder:
            engine.insert(read_snapshot(Path(source)))
        one = SamplingParams(max_tokens=1)
        statistics = engine.submit(BRANCHES[0], one, keep_prefix=False).result().statistics
    return num_decoded, statistics.num_cached_tokens, statistics.prefix_source.value


@pytest.mark.parametrize("kind", [PrefixSource.DISK, PrefixSource.MEMORY])
def test_a_new_engine_and_a_new_process_decode_the_suffix_alone(
    kind: PrefixSource, tiny_models: Path, tmp_path: Path
) -> None:
    """E2: by a spy on decode, of all families, from the folder and from a file by hand."""
    with SwarmEngine(config_of(tiny_models), snapshot_dir=tmp_path) as engine:
        engine.submit(DOCUMENT, PREFILL).result()
        save_snapshot(tmp_path / "file", engine.snapshot(DOCUMENT))
    source = str(tmp_path if kind is PrefixSource.DISK else tmp_path / "file")
    expected = (5, len(DOCUMENT), kind.value)
    assert decoded_for_a_branch(str(tiny_models), source) == expected
    code = f"""
        from {__name__} import decoded_for_a_branch
        print(decoded_for_a_branch({str(tiny_models)!r}, {source!r}))
    """
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LANGCHAIN + dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0"])
def test_a_snapshot_is_as_large_as_its_cells_say(tiny_models: Path, kv_type: str) -> None:
    """D7: within a tenth, by which the engine decides whether the store has room; or it says 0.

    Beyond its window a layer does not grow: there the estimate is too high, never too low.
    """
    config = config_of(tiny_models, kv_type_k=kv_type, kv_type_v=kv_type)
    with SwarmEngine(config) as engine:
        per_token = engine.facts.kv_bytes_per_token
        sizes = {count: engine.snapshot(DOCUMENT[:count]).num_bytes for count in (100, 200)}
    if per_token:
        grown = sizes[200] - sizes[100]
        assert grown < 1.1 * 100 * per_token
        assert grown > 0.9 * 100 * per_token or "gemma3" in tiny_models.name
    else:
        assert sizes[200] - sizes[100] == 4 * 100  # token ids alone


# -- memory ----------------------------------------------------------------------------------------

_SWITCHES = """
import json, random, sys
from pathlib import Path
from langchain_swarmkv import DiskSnapshotStore, SamplingParams, SwarmEngine
from tests.integration_tests.test_snapshot_cases import PREFILL, config_of, tokens_of

PAGE_BYTES, rng = 4096, random.Random(3)
documents = [tokens_of(seed, 300) for seed in range(12)]
one = SamplingParams(max_tokens=1)
with SwarmEngine(config_of(Path(sys.argv[1]))) as engine:
    size = engine.snapshot(documents[0]).num_bytes
with SwarmEngine(
    config_of(Path(sys.argv[1])),
    snapshot_memory_bytes=4 * size + 1000,
    snapshot_store=DiskSnapshotStore(sys.argv[2], 8 * size + 20_000),
) as engine:
    resident = []
    for number in range(360):
        document = rng.choice(documents)
        engine.submit(document, PREFILL).result()
        engine.submit([*document, 40 + number % 50], one, keep_prefix=False).result()
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES)
    engine.check()
    statistics = engine.statistics()
    counts = statistics.num_restores, statistics.num_disk_reads, statistics.num_disk_writes
print(json.dumps([size, resident, counts]))
"""


def test_three_hundred_switches_of_documents_keep_memory_flat(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """12 documents, a pool for 3, memory for 4, disk for 8: after 60 switches nothing grows.

    The bound is that of 30 states, so one that stays behind at every tenth switch is too much.
    """
    model = tiny_gguf("llama", n_layer=6)
    done = subprocess.run(
        [sys.executable, "-c", _SWITCHES, str(model), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    size, resident, (num_restores, num_reads, num_writes) = json.loads(done.stdout)
    assert max(resident[-60:]) - max(resident[:60]) < 30 * size
    assert min(num_restores, num_reads, num_writes) > 20
