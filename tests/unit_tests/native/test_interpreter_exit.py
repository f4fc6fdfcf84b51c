"""Whatever is open when the interpreter ends, it ends: exit code 0 and not a word on stderr."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit_tests.native.isolated import run_isolated

PRELUDE = """
import itertools, sys, threading
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

path = Path(sys.argv[1])
settings = dict(n_ctx=4096, n_batch=32, max_sequences=4, n_threads=1, device="here")
config = EngineConfig(model_path=path, **settings)
endless = SamplingParams(max_tokens=3000, ignore_eos=True)

def in_daemon_thread(function):
    "Runs it until the interpreter ends; returns once it has begun."
    begun = threading.Event()
    def run():
        try:
            function(begun)
        except SwarmKVError:
            pass  # what it used was closed
    threading.Thread(target=run, daemon=True).start()
    assert begun.wait(60)
"""
ENDINGS = {
    "engine open": """
        engine = open_engine(path)
        sampler = engine.create_sampler(endless, [])
        append(engine, 0, [65])
    """,
    "tokenizer in use": """
        tokenizer = LlamaTokenizer(path)
        def encode(begun):
            for number in itertools.count():
                tokenizer.encode("some text " * 1000 + str(number))
                begun.set()
        in_daemon_thread(encode)
    """,
    "swarm engine idle": """
        engine = SwarmEngine(config)
        engine.submit([65], SamplingParams(max_tokens=2)).result()
    """,
    "stream half read": """
        engine = SwarmEngine(config)
        handle = engine.submit([65], endless)
        stream = iter(handle)
        next(stream)
    """,
    "stream abandoned": """
        engine = SwarmEngine(config)
        next(iter(engine.submit([65], endless)))
    """,
    "stream read by a daemon thread": """
        engine = SwarmEngine(config)
        def read(begun):
            for chunk in engine.submit([65], endless):
                begun.set()
        in_daemon_thread(read)
    """,
    "result awaited by daemon threads": """
        engine = SwarmEngine(config)
        for _ in range(6):
            def wait(begun):
                handle = engine.submit([65], endless)
                begun.set()
                handle.result()
            in_daemon_thread(wait)
    """,
    "prefill running": """
        engine = SwarmEngine(config)
        prompt = [65] * 4000
        handle = engine.submit(prompt, SamplingParams(max_tokens=0))
        started = threading.Event()
        handle.on_progress(lambda progress: started.set())
        assert started.wait(60)
    """,
    "event loop left open": """
        import asyncio
        engine = SwarmEngine(config)
        loop = asyncio.new_event_loop()
        async def first():
            async for chunk in engine.submit([65], endless):
                return chunk
        assert loop.run_until_complete(first()).token_ids
        loop.close()
    """,
    "exit from within": """
        engine = SwarmEngine(config)
        for chunk in engine.submit([65], endless):
            sys.exit(0)
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends(tiny_llama: Path, ending: str) -> None:
    """Nothing hangs, crashes or complains."""
    lines = [line.removeprefix("        ") for line in ENDINGS[ending].splitlines()]
    code = PRELUDE + "\n".join(lines) + "\nprint('the end')"
    expected = "" if ending == "exit from within" else "the end\n"
    assert run_isolated(code, tiny_llama) == expected
