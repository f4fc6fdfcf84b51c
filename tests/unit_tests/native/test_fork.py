"""A forked child is told that llama.cpp is its parent's; the parent goes on."""

from __future__ import annotations

from pathlib import Path

from tests.unit_tests.native.isolated import outcomes


def test_a_forked_child_gets_a_typed_error_and_the_parent_goes_on(tiny_llama: Path) -> None:
    """Instead of hanging on threads that it does not have. Leaving and closing are harmless."""
    code = """
    import os, sys, threading
    from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
    from langchain_swarmkv.scheduling.registry import acquire_tokenizer

    path = Path(sys.argv[1])
    engine = open_engine(path)
    row = append(engine, 0, [65, 66])
    before, state = engine.logits(row), engine.save(0)
    tokenizer, shared = LlamaTokenizer(path), acquire_tokenizer(path)
    swarm = SwarmEngine(EngineConfig(
        model_path=path, n_ctx=256, n_batch=32, max_sequences=4, n_threads=1, device="here"))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    answer = swarm.submit([65, 66], params).result().token_ids
    sampler = engine.create_sampler(params, [])

    child = os.fork()
    if child == 0:
        attempt("decode", lambda: append(engine, 0, [65]))
        attempt("save", lambda: engine.save(0))
        attempt("restore", lambda: engine.restore(1, state, 2))
        attempt("sample", lambda: sampler.sample(row))
        attempt("sampler", lambda: engine.create_sampler(params, []))
        attempt("encode", lambda: tokenizer.encode("text"))
        attempt("shared tokenizer", lambda: shared.encode("text"))
        attempt("new tokenizer", lambda: LlamaTokenizer(path))
        attempt("new engine", lambda: open_engine(path))
        attempt("submit", lambda: swarm.submit([65], params))
        attempt("statistics", swarm.statistics)
        attempt("close engine", engine.close)
        attempt("close swarm engine", swarm.close)
        attempt("close tokenizer", tokenizer.close)
        sys.exit(0)  # through every atexit handler
    _, status = os.waitpid(child, 0)
    attempt("child", lambda: os.waitstatus_to_exitcode(status))
    assert np.array_equal(engine.logits(row), before)
    attempt("parent's row", lambda: append(engine, 0, [67]))
    attempt("parent's answer", lambda: swarm.submit([65, 66], params).result().token_ids == answer)
    swarm.close()
    engine.close()
    """
    seen = outcomes(code, tiny_llama)
    harmless = {"close swarm engine": "None", "close tokenizer": "None"}
    parents = {"child": "0", "parent's row": "0", "parent's answer": "True"}
    for name, expected in {**harmless, **parents}.items():
        assert seen.pop(name) == expected, name
    assert seen == dict.fromkeys(seen, "ForkedProcessError")
    assert len(seen) == 12


def test_a_process_may_fork_before_it_loads(tiny_llama: Path) -> None:
    """Importing starts nothing; each process loads its own."""
    code = """
    import os, sys
    child = os.fork()
    engine = open_engine(sys.argv[1])
    if child:
        _, status = os.waitpid(child, 0)
        assert status == 0
    attempt("child" if child == 0 else "parent", lambda: append(engine, 0, [65]))
    engine.close()
    """
    assert outcomes(code, tiny_llama) == {"child": "0", "parent": "0"}
