"""Ten thousand damaged snapshots: none is used, none ends the process, and no answer changes.

In a subprocess, for llama.cpp has asserts on the way of a restore.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.fuzz import length
from tests.support.oracle import Oracle, assert_matches_oracle
from tests.support.tolerances import F16_CELLS_ROUNDING

_FUZZ = """
import json, logging, os, random, resource, struct, sys, tracemalloc
from pathlib import Path
import numpy as np
from langchain_swarmkv import EngineConfig, SamplingParams, SnapshotError, SwarmEngine
from langchain_swarmkv import SequenceError
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.llama import LlamaEngine, _STATE_HEADER, _checksum
from langchain_swarmkv.snapshots.snapshot_file import read_snapshot

logging.disable()  # each file that is passed over is told
model, folder = Path(sys.argv[1]), Path(sys.argv[2])
num_mutations, rounding = int(sys.argv[3]), float(sys.argv[4])
rng = random.Random(1)
config = EngineConfig(model_path=model, n_ctx=512, n_batch=128, max_sequences=4, n_threads=1)
document = [rng.randrange(32, 127) for _ in range(60)]
prompts = [document + [n, n + 1] for n in (40, 50)]
params = SamplingParams(max_tokens=2, ignore_eos=True)


def mutated(data):
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        reach = len(data) if rng.random() < 0.7 else min(600, len(data))  # the head is short
        start = rng.randrange(reach)
        kind = rng.randrange(5)
        if kind == 0:
            data[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[start : start + rng.randint(1, 2000)]
        elif kind == 2:
            data[start:start] = rng.randbytes(rng.randint(1, 50))
        elif kind == 3:
            data[start : start + 8] = struct.pack("<q", rng.choice([-1, 0, 1 << 31, (1 << 63) - 1]))
        else:
            data[start : start + 4] = struct.pack("<I", rng.choice([0, 1, 0xFFFFFFFF, 1 << 31]))
        data = data or bytearray(b"x")
    return bytes(data)


def resealed(state):
    # What an attacker can do who knows the format: right sizes and checksum over wrong bytes.
    if len(state) < _STATE_HEADER.size:
        return state
    head = list(_STATE_HEADER.unpack_from(state))
    payload = memoryview(state)[_STATE_HEADER.size :]
    head[0], head[1], head[2] = b"SWARMKV2", bytes.fromhex(identity), len(document)
    head[3], head[4] = len(payload), _checksum(payload)
    return _STATE_HEADER.pack(*head) + bytes(payload)


def answers(engine):
    handles = [engine.submit(p, params, keep_prefix=False) for p in prompts]
    return [handle.result().token_ids for handle in handles]


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def read_within_its_size(path):
    tracemalloc.start()
    try:
        return read_snapshot(path)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * path.stat().st_size + 500_000, peak


# Where the engine itself would find them: it passes each over, and computes.
with SwarmEngine(config, snapshot_dir=folder, snapshot_policy="never") as engine:
    expected = answers(engine)
    snapshot = engine.snapshot(document)
    engine.submit(document, SamplingParams(max_tokens=0), persist=True).result()
    engine.flush()
    (path,) = folder.glob("*.swarmkv")
    whole = path.read_bytes()
    num_refused = 0
    for number in range(num_mutations):
        data = mutated(whole)
        (folder / "new").write_bytes(data)
        os.replace(folder / "new", path)
        try:
            read = read_within_its_size(path)
            assert data == whole or read == snapshot
        except SnapshotError:
            num_refused += 1
        engine.reset_prefix_cache()
        assert answers(engine) == expected, number
    assert num_refused > 0.99 * num_mutations, num_refused
    assert engine.statistics().num_restores < 0.01 * num_mutations
    engine.check()
    identity = engine.facts.identity.digest

# The engine's own door: states whose checksum is right, but whose bytes are not. Sequence 1 takes
# them, and after each one two branches of the good document in sequence 0 are as they were.
engine = LlamaEngine(config)


def branch_logits():
    batch, rows = Batch(), []
    for seq_id, prompt in zip((2, 3), prompts):
        engine.fork(0, seq_id, len(document))
        rows.append(batch.add(seq_id, prompt[-2:], len(document), want_logits=True))
    engine.decode(batch)
    for seq_id in (2, 3):
        engine.clear(seq_id)
    return np.stack([engine.logits(row) for row in rows])


engine.restore(0, snapshot.state, len(document))
good = branch_logits()
assert [int(row.argmax()) for row in good] == [tokens[0] for tokens in expected]
num_refused = num_taken = 0
for number in range(num_mutations):
    if number == num_mutations // 10:
        warm_megabytes = peak_megabytes()
    state = resealed(mutated(snapshot.state))
    try:
        engine.restore(1, state, len(document))
        num_taken += 1
        assert engine.num_tokens(1) == len(document)
    except SequenceError:
        num_refused += 1
        assert engine.num_tokens(1) == 0
    engine.clear(1)
    # Not to the bit: other cells, another order of sums.
    assert np.allclose(branch_logits(), good, atol=rounding), number
assert num_refused > 0.2 * num_mutations, num_refused
assert num_taken > 0.01 * num_mutations, num_taken
assert peak_megabytes() < warm_megabytes + 20
engine.close()
print(json.dumps({"prompts": prompts, "answers": expected}))
"""


@pytest.mark.long
@pytest.mark.timeout(900)  # at full length 220 s on two idle cores
def test_ten_thousand_mutations(tiny_llama: Path, tmp_path: Path) -> None:
    """E1: a typed error each time, within memory of a file's size.

    After every file two branches, which the engine would read it for, are the oracle's; after every
    state that an engine is given, two branches beside it are as they were.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-c", dedent(_FUZZ), str(tiny_llama), str(tmp_path)),
            *(str(length(500, 10_000)), str(F16_CELLS_ROUNDING)),
        ],
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    with Oracle(tiny_llama, n_ctx=256, flash_attention=False, n_threads=1) as oracle:
        for prompt, answer in zip(told["prompts"], told["answers"], strict=True):
            steps = oracle.greedy(prompt, len(answer))
            assert_matches_oracle(answer, steps, 2 * F16_CELLS_ROUNDING)
