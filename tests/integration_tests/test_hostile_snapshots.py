"""Ten thousand damaged snapshots: none is used, none ends the process, and no answer changes.

In a subprocess, for llama.cpp has asserts on the way of a restore.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

_FUZZ = """
import hashlib, random, resource, struct, sys
from pathlib import Path
from langchain_swarmkv import EngineConfig, SamplingParams, SnapshotError, SwarmEngine
from langchain_swarmkv import SequenceError
from langchain_swarmkv.engine.llama import LlamaEngine, _STATE_HEADER, _checksum
from langchain_swarmkv.snapshots.snapshot_file import read_snapshot, save_snapshot

model, folder, num_mutations = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
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


with SwarmEngine(config) as engine:
    expected = answers(engine)
    identity = engine.facts.identity.digest
    snapshot = engine.snapshot(document)
    path = folder / "snapshot"
    save_snapshot(path, snapshot)
    whole = path.read_bytes()
    num_refused = 0
    for number in range(num_mutations):
        data = mutated(whole)
        path.write_bytes(data)
        try:
            read = read_snapshot(path)
            assert data == whole or read == snapshot
        except SnapshotError:
            num_refused += 1
        if number % 10 == 0:
            assert answers(engine) == expected, number
    assert num_refused > 0.99 * num_mutations, num_refused
    engine.check()

# The engine's own door: states whose checksum is right, but whose bytes are not.
engine = LlamaEngine(config)
num_refused = num_taken = 0
for number in range(num_mutations):
    state = resealed(mutated(snapshot.state))
    try:
        engine.restore(1, state, len(document))
        num_taken += 1
        assert engine.num_tokens(1) == len(document)
    except SequenceError:
        num_refused += 1
    assert engine.num_tokens(0) == engine.num_tokens(2) == 0
    engine.clear(1)
assert num_refused > 0.2 * num_mutations, num_refused
assert num_taken > 0.01 * num_mutations, num_taken
engine.restore(0, snapshot.state, len(document))
engine.close()
with SwarmEngine(config) as engine:
    assert answers(engine) == expected
print("survived", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_ten_thousand_mutations(tiny_llama: Path, tmp_path: Path) -> None:
    """Typed errors each time; good branches between them are as they were; memory stays flat."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(_FUZZ), str(tiny_llama), str(tmp_path), "10000"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    word, peak_megabytes = done.stdout.split()
    assert word == "survived"
    assert int(peak_megabytes) < 600
