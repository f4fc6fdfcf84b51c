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


def test_a_child_of_a_process_with_a_vocabulary_alone_loads_its_own(tiny_llama: Path) -> None:
    """Two children of a preloading server encode, load and decode; so can the parent."""
    code = """
    import os, sys
    path = Path(sys.argv[1])
    tokenizer = LlamaTokenizer(path)
    expected = tokenizer.encode("some text")
    inherited = tokenizer._handle.pointer

    def use(name):
        attempt(f"{name} encodes", lambda: tokenizer.encode("some text") == expected)
        attempt(f"{name} has its own", lambda: tokenizer._handle.pointer is not inherited)
        attempt(f"{name} loads", lambda: LlamaTokenizer(path).encode("some text") == expected)
        engine = open_engine(path)
        attempt(f"{name} decodes", lambda: append(engine, 0, expected))
        engine.close()

    for name in ("first", "second"):
        if os.fork() == 0:
            use(name)
            sys.exit(0)  # through every atexit handler
        assert os.wait()[1] == 0
    use("parent")
    if os.fork() == 0:
        attempt("late child", lambda: LlamaTokenizer(path))
        sys.exit(0)
    assert os.wait()[1] == 0
    """
    seen = outcomes(code, tiny_llama)
    assert seen.pop("late child") == "ForkedProcessError"
    assert seen.pop("parent has its own") == "False"
    last_rows = {seen.pop(f"{name} decodes") for name in ("first", "second", "parent")}
    assert len(last_rows) == 1
    assert seen == dict.fromkeys(seen, "True")
    assert len(seen) == 8


def test_a_child_of_a_process_with_a_gpu_is_told(tiny_llama: Path) -> None:
    """There the vocabulary alone has started the driver, which does not survive a fork."""
    code = """
    import os, sys
    import llama_cpp
    tokenizer = LlamaTokenizer(Path(sys.argv[1]))
    llama_cpp.llama_supports_gpu_offload = lambda: True
    if os.fork() == 0:
        attempt("child", lambda: tokenizer.encode("text"))
        sys.exit(0)
    assert os.wait()[1] == 0
    """
    assert outcomes(code, tiny_llama) == {"child": "ForkedProcessError"}


def test_a_fork_waits_for_a_vocabulary_that_is_being_loaded(tiny_llama: Path) -> None:
    """Or the child would inherit it half loaded."""
    code = """
    import os, sys, threading
    from langchain_swarmkv.native.library import loading
    begun, go_on = threading.Event(), threading.Event()

    def load():
        with loading(weights=False):
            begun.set()
            go_on.wait()
            print("loaded: True", flush=True)

    thread = threading.Thread(target=load)
    thread.start()
    begun.wait()
    threading.Timer(0.2, go_on.set).start()
    if os.fork() == 0:
        with loading(weights=False):
            print("child: True", flush=True)
        sys.exit(0)
    assert os.wait()[1] == 0
    thread.join()
    """
    assert list(outcomes(code)) == ["loaded", "child"]


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
