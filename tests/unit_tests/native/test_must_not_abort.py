"""Bad input ends in a typed error, never the process. llama.cpp has asserts on all of these paths.

Each test runs many cases in one process of its own and looks at what every case printed: if one
ends the process, the cases after it are missing and the exit code tells.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.support.tiny_gguf import ARCHITECTURES, ATTENTION_ARCHITECTURES
from tests.unit_tests.native.isolated import outcomes

TinyGguf = Callable[..., Path]


def test_sequences_and_batches_that_the_context_does_not_have(tiny_gguf: TinyGguf) -> None:
    """Partial copies, unknown ids, wrong positions, tokens and rows, on every architecture."""
    code = """
    import sys
    for path in sys.argv[1:]:
        engine = open_engine(path)
        name = engine.facts.architecture
        append(engine, 0, list(range(40, 80)))

        def decode(tokens, positions, seq_ids, rows):
            engine.decode(Batch(tokens, positions, seq_ids, rows))

        attempt(f"{name} partial fork", lambda: engine.fork(0, 1, 25))
        attempt(f"{name} whole fork", lambda: engine.fork(0, 2, 40))
        attempt(f"{name} snapshot before decode", lambda: len(engine.save(2)) > 0)
        attempt(f"{name} fifth sequence", lambda: decode([65], [0], [4], [0]))
        attempt(f"{name} sequence 256", lambda: decode([65], [0], [256], [0]))
        attempt(f"{name} sequence -1", lambda: decode([65], [0], [-1], [0]))
        attempt(f"{name} fork from 99", lambda: engine.fork(99, 3, 1))
        attempt(f"{name} fork into 99", lambda: engine.fork(0, 99, 40))
        attempt(f"{name} save 99", lambda: engine.save(99))
        attempt(f"{name} clear -1", lambda: engine.clear(-1))
        attempt(f"{name} position twice", lambda: decode([65], [39], [0], [0]))
        attempt(f"{name} position ahead", lambda: decode([65], [50], [0], [0]))
        attempt(f"{name} token -1", lambda: decode([-1], [40], [0], [0]))
        attempt(f"{name} token too high", lambda: decode([278], [40], [0], [0]))
        attempt(f"{name} row too high", lambda: decode([65], [40], [0], [31]))
        attempt(f"{name} batch too long",
                lambda: decode([65] * 33, list(range(40, 73)), [0] * 33, []))
        attempt(f"{name} logits of no row", lambda: engine.logits(0))
        attempt(f"{name} still works", lambda: append(engine, 0, [65]))
        engine.close()
    """
    seen = outcomes(code, *(tiny_gguf(architecture) for architecture in ARCHITECTURES))
    for architecture in ARCHITECTURES:
        cut = "None" if architecture in ATTENTION_ARCHITECTURES else "SequenceError"
        assert seen[f"{architecture} partial fork"] == cut
        assert seen[f"{architecture} whole fork"] == "None"
        assert seen[f"{architecture} snapshot before decode"] == "True"
        assert seen[f"{architecture} still works"] == "0"
    others = [
        outcome
        for name, outcome in seen.items()
        if not name.endswith((" fork", "before decode", "still works"))
    ]
    assert others == ["InvalidBatchError"] * 14 * len(ARCHITECTURES)


def test_settings_at_and_beyond_the_limits(tiny_llama: Path) -> None:
    """Contexts of one cell, more sequences than llama.cpp has, numbers that C would cut."""
    code = """
    import sys
    from pydantic import ValidationError

    def works(**options):
        try:
            engine = open_engine(sys.argv[1], **options)
        except ValidationError as error:
            return error.errors()[0]["msg"]
        row = append(engine, engine.limits.max_sequences - 1, [65])
        assert np.isfinite(engine.logits(row)).all()
        engine.close()
        return "works"

    for name, options in {
        "one cell": dict(n_ctx=1),
        "one cell, many sequences": dict(n_ctx=1, n_batch=256, max_sequences=256),
        "fewer cells than sequences": dict(n_ctx=32, n_batch=512, max_sequences=64),
        "one token a step": dict(n_batch=2, max_sequences=2, n_ubatch=1),
        "256 sequences": dict(n_batch=256, max_sequences=256),
        "257 sequences": dict(n_batch=512, max_sequences=257),
        "300 sequences": dict(n_batch=512, max_sequences=300),
        "no cells": dict(n_ctx=0),
        "2**32 cells": dict(n_ctx=2**32),
        "2**32 + 8 tokens a step": dict(n_batch=2**32 + 8),
        "513 threads": dict(n_threads=513),
        "all layers on no GPU": dict(n_gpu_layers=-1),
        "rope base of infinity": dict(rope_freq_base=float("inf")),
    }.items():
        attempt(name, lambda: works(**options))
    """
    seen = outcomes(code, tiny_llama)
    refused = {name: text for name, text in seen.items() if text != "works"}
    assert list(refused) == [
        "257 sequences",
        "300 sequences",
        "no cells",
        "2**32 cells",
        "2**32 + 8 tokens a step",
        "513 threads",
        "rope base of infinity",
    ]
    assert "256" in refused["300 sequences"]
    assert "512" in refused["513 threads"]


def test_prompts_longer_than_a_step(tiny_llama: Path) -> None:
    """D2: chunked, and the likeliest first tokens are those of a step that holds everything."""
    code = """
    import sys
    from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

    tokens = np.random.default_rng(3).integers(32, 127, 1000).tolist()
    params = SamplingParams(max_tokens=3, logprobs=8, ignore_eos=True)
    config = dict(model_path=Path(sys.argv[1]), n_ctx=2048, max_sequences=4, n_threads=1,
                  device="here", kv_type_k="f32", kv_type_v="f32")
    answers = []
    for n_batch in (64, 2048):
        with SwarmEngine(EngineConfig(**config, n_batch=n_batch)) as engine:
            answers.append([
                engine.submit(tokens[:length], params, keep_prefix=False).result()
                for length in (63, 64, 65, 128, 1000)
            ])
    for small, large in zip(*answers):
        assert small.token_ids == large.token_ids
        for mine, other in zip(small.logprobs, large.logprobs):
            difference = max(abs(a[1] - b[1]) for a, b in zip(mine.top, other.top))
            assert difference < 0.01, difference
        print(f"{small.statistics.num_computed_tokens}: equal")
    """
    assert list(outcomes(code, tiny_llama).items()) == [
        (length, "equal") for length in ("63", "64", "65", "128", "1000")
    ]


def test_files_that_are_no_whole_model(tiny_llama: Path, tmp_path: Path) -> None:
    """Missing, empty, foreign, cut at any length, changed in the header."""
    whole = tiny_llama.read_bytes()
    metadata_end = gguf.GGUFReader(tiny_llama).data_offset
    contents = {
        "empty": b"",
        "three bytes": whole[:3],
        "magic": whole[:4],
        "png": b"\x89PNG\r\n\x1a\n" + bytes(4000),
        "text": b"GGUF is not enough " * 100,
        "header alone": whole[:24],
        "zeros behind header": whole[:24] + bytes(len(whole) - 24),
        "old version": whole[:4] + b"\x01" + whole[5:],
        "new version": whole[:4] + b"\x04" + whole[5:],
        "big-endian": whole[:4] + whole[7:3:-1] + whole[8:],
        "no metadata": whole[:16] + bytes(8) + whole[24:],
        "no tensors": whole[:8] + bytes(8) + whole[16:],
        **{
            f"cut at {length}": whole[:length]
            for length in (25, 100, 1000, metadata_end // 2, metadata_end - 1, metadata_end)
        },
        **{f"cut at {k}/8 of the data": _cut(whole, metadata_end, k) for k in range(1, 8)},
        "cut by one byte": whole[:-1],
        **{
            f"byte {position} set to {value}": _with_byte(whole, position, value)
            for position in range(8, 24)
            for value in (0xFF, whole[position] ^ 0x80)
        },
    }
    for name, content in contents.items():
        (tmp_path / name.replace("/", " of ")).write_bytes(content)
    (tmp_path / "directory").mkdir()
    code = """
    import sys
    folder = Path(sys.argv[1])
    for path in sorted(folder.iterdir()):
        attempt(path.name, lambda: open_engine(path))
        attempt(f"{path.name} (vocabulary)", lambda: LlamaTokenizer(path))
    attempt("missing", lambda: open_engine(folder / "missing"))
    attempt("missing (vocabulary)", lambda: LlamaTokenizer(folder / "missing"))
    attempt("below a file", lambda: open_engine(folder / "empty" / "model.gguf"))
    """
    seen = outcomes(code, tmp_path)
    assert len(seen) == 2 * len(contents) + 5
    missing = [name for name, outcome in seen.items() if outcome == "ModelNotFoundError"]
    assert missing == ["missing", "missing (vocabulary)", "below a file"]
    no_gguf = ["directory", "empty", "magic", "png", "text", "three bytes"]
    for name in [*no_gguf, "old version", "new version", "big-endian"]:
        assert seen[name] == seen[f"{name} (vocabulary)"] == "ModelFormatError"
    loaded = [name for name, outcome in seen.items() if not outcome.endswith("Error")]
    # The metadata is whole there, and the vocabulary needs nothing else.
    assert loaded == ["no tensors (vocabulary)"]


def _cut(whole: bytes, start: int, eighths: int) -> bytes:
    return whole[: start + (len(whole) - start) * eighths // 8]


def _with_byte(whole: bytes, position: int, value: int) -> bytes:
    return whole[:position] + bytes([value]) + whole[position + 1 :]


def test_states_that_were_damaged_or_made_up(tiny_gguf: TinyGguf) -> None:
    """Refused before llama.cpp sees a byte of them, and the engine goes on."""
    code = """
    import random, sys
    from langchain_swarmkv.errors import SequenceError

    for path in sys.argv[1:]:
        engine = open_engine(path)
        append(engine, 0, list(range(40, 80)))
        row = append(engine, 0, [65])
        state, good = engine.save(0), engine.logits(row)
        random.seed(1)
        refused = 0
        for case in range(400):
            damaged = bytearray(state)
            for _ in range(random.choice([1, 1, 2, 8])):
                # Half of them in the cell table, which llama.cpp believes.
                end = random.choice([600, len(state)])
                damaged[random.randrange(end)] ^= 1 << random.randrange(8)
            damaged = damaged[: random.choice([len(state), random.randrange(len(state))])]
            if damaged == state:
                continue
            try:
                engine.restore(1, bytes(damaged), 41)
            except SequenceError:
                refused += 1
            assert engine.num_tokens(1) == 0
        engine.clear(0)
        append(engine, 0, list(range(40, 80)))
        row = append(engine, 0, [65])
        assert np.array_equal(engine.logits(row), good)
        print(f"{engine.facts.architecture}: {refused > 390}")
        engine.close()
    """
    seen = outcomes(code, *(tiny_gguf(architecture) for architecture in ARCHITECTURES))
    assert seen == dict.fromkeys(ARCHITECTURES, "True")


def test_tokens_outside_a_vocabulary(tiny_llama: Path) -> None:
    """In prompts, biases and texts; llama.cpp throws across C for some of them."""
    code = """
    import sys
    tokenizer = LlamaTokenizer(Path(sys.argv[1]))
    engine = open_engine(sys.argv[1])
    append(engine, 0, [65])
    for token in (-1, -(2**31), 278, 2**31 - 1, 2**31, 2**40):
        attempt(f"bytes of {token}", lambda: tokenizer.token_bytes(token))
        attempt(f"end of {token}", lambda: tokenizer.is_end(token))
        attempt(f"text of {token}", lambda: tokenizer.decode([65, token]))
        attempt(f"batch of {token}", lambda: append(engine, 0, [token]))
        attempt(f"bias of {token}",
                lambda: engine.create_sampler(SamplingParams(logit_bias={token: 1.0}), []))
    """
    seen = outcomes(code, tiny_llama)
    assert len(seen) == 30
    for name, outcome in seen.items():
        expected = "InvalidBatchError" if name.startswith("batch") else "InvalidRequestError"
        assert outcome == expected, name


def test_weights_that_are_not_numbers(tiny_llama: Path, tmp_path: Path) -> None:
    """However tokens are chosen: sorting NaN is undefined in C++."""
    content = bytearray(tiny_llama.read_bytes())
    reader = gguf.GGUFReader(tiny_llama)
    (tensor,) = (t for t in reader.tensors if t.name == "output_norm.weight")
    start = int(tensor.data_offset)
    content[start : start + int(tensor.n_bytes)] = np.full(tensor.n_elements, np.nan, "<f4").data
    path = tmp_path / "nan.gguf"
    path.write_bytes(content)
    code = """
    import sys
    engine = open_engine(sys.argv[1])
    row = append(engine, 0, [65, 66, 67])
    for name, params in {
        "greedy": {},
        "draw": dict(temperature=1.0),
        "top k": dict(temperature=1.0, top_k=5),
        "top p": dict(temperature=1.0, top_p=0.5),
        "min p": dict(temperature=1.0, min_p=0.5),
        "grammar": dict(grammar='root ::= "a"'),
    }.items():
        sampler = engine.create_sampler(SamplingParams(**params), [65])
        attempt(name, lambda: sampler.sample(row))
    """
    assert set(outcomes(code, path).values()) == {"ModelError"}


def test_requests_that_fail_leave_the_engine_to_the_others(tiny_llama: Path) -> None:
    """Grammars and biases that lead nowhere, beside a request that is answered all the while."""
    code = """
    import sys
    from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

    config = EngineConfig(model_path=Path(sys.argv[1]), n_ctx=2048, n_batch=64, max_sequences=8,
                          n_threads=1, device="here", kv_type_k="f32", kv_type_v="f32")
    prompt = list(range(40, 120))
    good = SamplingParams(max_tokens=60, ignore_eos=True)
    forbidden = dict.fromkeys(range(278), float("-inf"))
    with SwarmEngine(config) as engine:
        alone = engine.submit(prompt, good, keep_prefix=False).result().token_ids
        beside = engine.submit(prompt, good, keep_prefix=False)
        for name, params in {
            "does not parse": dict(grammar='root ::= "a'),
            "no root": dict(grammar='x ::= "a"'),
            "30,000 deep": dict(grammar="root ::= " + "(" * 30000),
            "lone surrogate": dict(grammar='root ::= "\\ud800"'),
            "dead end": dict(grammar="root ::= [z-a]"),
            "dead end later": dict(grammar='root ::= "ab" [z-a]'),
            "all forbidden": dict(logit_bias=forbidden),
            "all forbidden, drawn": dict(logit_bias=forbidden, temperature=1.0, top_p=0.5),
            "bias outside": dict(logit_bias={278: 1.0}),
        }.items():
            attempt(name, lambda: engine.submit(prompt, SamplingParams(**params)).result())
        attempt("beside", lambda: beside.result().token_ids == alone)
        attempt("after", lambda: engine.submit(prompt, good).result().token_ids == alone)
        engine.check()
        statistics = engine.statistics()
        print(f"left: {statistics.num_running + statistics.cells_reserved}")
    """
    seen = outcomes(code, tiny_llama, may_log=True)
    assert (seen.pop("beside"), seen.pop("after"), seen.pop("left")) == ("True", "True", "0")
    errors = {name: outcome for name, outcome in seen.items() if outcome != "GrammarError"}
    assert errors == dict.fromkeys(
        ["all forbidden", "all forbidden, drawn", "bias outside"], "InvalidRequestError"
    )
    assert len(seen) == 9


@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_use_after_close(tiny_gguf: TinyGguf, architecture: str) -> None:
    """Closed once, closed again, used by its own sampler and tokenizer, closed while in use."""
    code = """
    import itertools, sys, threading
    engine = open_engine(sys.argv[1])
    row = append(engine, 0, [65, 66])
    state, tokenizer = engine.save(0), engine.tokenizer
    sampler = engine.create_sampler(SamplingParams(grammar='root ::= "ab"'), [])
    text = "A text that keeps a tokenizer busy. " * 500
    started = threading.Barrier(4)

    def encode():
        started.wait()
        try:
            for number in itertools.count():
                tokenizer.encode(f"{text}{number}")
        except SwarmKVError:
            pass

    threads = [threading.Thread(target=encode) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    for name in ("close", "close again"):
        attempt(name, engine.close)
    for thread in threads:
        thread.join()
    attempt("decode", lambda: append(engine, 0, [65]))
    attempt("logits", lambda: engine.logits(row))
    attempt("sample", lambda: sampler.sample(row))
    attempt("close sampler", sampler.close)
    attempt("sampler", lambda: engine.create_sampler(SamplingParams(), []))
    attempt("restore", lambda: engine.restore(0, state, 2))
    attempt("encode", lambda: tokenizer.encode("text"))
    attempt("bytes", lambda: tokenizer.token_bytes(70))
    attempt("special tokens", lambda: tokenizer.special_tokens)
    attempt("close tokenizer", tokenizer.close)
    """
    seen = outcomes(code, tiny_gguf(architecture))
    closing = {name for name, outcome in seen.items() if outcome == "None"}
    assert closing == {"close", "close again", "close sampler", "close tokenizer"}
    assert {outcome for name, outcome in seen.items() if name not in closing} == {
        "EngineClosedError"
    }
    assert len(seen) == 12
