"""The peers, as far as they go without their packages: settings, requests, answers, processes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.fanout.case import Case, Document
from benchmarks.fanout.contender import Contender
from benchmarks.fanout.contenders import example_server, llama_server
from benchmarks.fanout.contenders.chat_llama_cpp import ChatLlamaCppMutex
from benchmarks.fanout.contenders.example_server import ExampleServer, server_config
from benchmarks.fanout.contenders.llama_server import LlamaServer, binary_arguments, server_options
from benchmarks.fanout.contenders.transformers_cache import TransformersCache
from benchmarks.fanout.local_server import ServerError, ServerProcess, free_port, get, post
from benchmarks.fanout.vocabulary import END_BIAS, Vocabulary
from langchain_swarmkv import EngineConfig, SamplingParams, SwarmEngine

from . import peer_servers

PEERS: list[type[Contender]] = [ChatLlamaCppMutex, LlamaServer, TransformersCache, ExampleServer]
SERVERS = Path(peer_servers.__file__)


def document(first: int, branches: int = 2) -> Document:
    """Ten tokens of prefix, then two of a branch."""
    prefix = tuple(range(first, first + 10))
    return Document(
        text="text",
        instructions="instructions",
        prefix=prefix,
        tasks=tuple(f"task {number}" for number in range(branches)),
        prompts=tuple((*prefix, 200, number) for number in range(branches)),
    )


def case(*documents: Document, **options: Any) -> Case:
    """Three tokens a branch."""
    return Case(name="T", documents=documents or (document(20),), max_tokens=3, **options)


def found(*names: str) -> Any:
    """A `find_spec` that finds these alone."""
    return lambda name: object() if name in names else None


# ------------------------------------------------------------------ what is tried, what is missing


@pytest.mark.parametrize("peer", [ChatLlamaCppMutex, LlamaServer, ExampleServer])
def test_both_kernels_are_tried_with_everything_else_equal(peer: type[Contender]) -> None:
    """Which is faster depends on the device."""
    tried = peer.candidates(case())
    without = [{**settings, "flash_attention": None} for settings in tried]
    for settings in without:
        assert without.count(settings) == 2
    assert {settings["flash_attention"] for settings in tried} == {False, True}


@pytest.mark.parametrize(("branches", "slots"), [(1, {1}), (3, {1, 3}), (50, {1, 16})])
def test_the_server_is_tried_with_parallel_slots_and_with_one(
    branches: int, slots: set[int]
) -> None:
    """Never more slots than branches, and at most sixteen."""
    tried = LlamaServer.candidates(case(document(20, branches)))
    assert {settings["slots"] for settings in tried} == slots
    assert {s["kv_unified"] for s in tried if s["slots"] == max(slots)} == {False, True}


@pytest.mark.parametrize(("branches", "waves"), [(1, [1]), (5, [5, 1]), (50, [16, 1])])
def test_transformers_is_tried_with_a_batch_of_branches_and_with_one(
    branches: int, waves: list[int]
) -> None:
    """A wave holds a copy of the cache for each branch."""
    tried = TransformersCache.candidates(case(document(20, branches)))
    assert [settings["wave"] for settings in tried] == waves


def test_the_example_server_gets_the_room_that_a_case_takes() -> None:
    """For all copies where it is cold, else for one; twice for several, for it fails with less."""
    cases = case(), case(is_cold=True), case(document(20), document(30))
    rooms = [{s["room"] for s in ExampleServer.candidates(c)} for c in cases]
    assert rooms == [{"shared"}, {"shared", "copies"}, {"double"}]


@pytest.mark.parametrize(
    ("peer", "extra", "package"),
    [
        (ChatLlamaCppMutex, "bench-peers", "langchain-community"),
        (LlamaServer, "bench-peers", "xllamacpp"),
        (TransformersCache, "bench-torch", "torch, transformers"),
        (ExampleServer, "bench-peers", "fastapi"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, peer: type[Contender], extra: str, package: str
) -> None:
    """The reason tells what to do."""
    monkeypatch.setattr(importlib.util, "find_spec", found())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    reason = peer.unavailable()
    assert reason is not None
    assert package in reason
    assert f"langchain-swarmkv[{extra}]" in reason


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_whose_packages_are_there_is_available(
    monkeypatch: pytest.MonkeyPatch, peer: type[Contender]
) -> None:
    """Nothing but their presence counts."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert peer.unavailable() is None


def test_a_llama_server_on_the_path_is_preferred_to_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its user built it for this machine; the settings say which it was, without the path."""
    monkeypatch.setattr(importlib.util, "find_spec", found("xllamacpp"))
    monkeypatch.setattr(llama_server, "version", lambda name: "1.2")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert {s["server"] for s in LlamaServer.candidates(case())} == {"xllamacpp 1.2"}
    monkeypatch.setattr(shutil, "which", lambda name: f"/somewhere/{name}")
    assert {s["server"] for s in LlamaServer.candidates(case())} == {"llama-server"}
    monkeypatch.setattr(importlib.util, "find_spec", found())
    assert LlamaServer.unavailable() is None


@pytest.mark.parametrize("peer", PEERS)
def test_closing_a_peer_that_was_never_opened_is_harmless(peer: type[Contender]) -> None:
    """As after an `open` that failed at once."""
    contender = peer(Path("none"), case(), {})
    contender.close()
    assert contender.child_pids() == []


# ---------------------------------------------------------------- how they are started and asked


def test_llama_servers_pool_holds_a_whole_prompt_in_each_slot() -> None:
    """With fewer cells it answers with an error."""
    settings = {"slots": 4, "kv_unified": True, "flash_attention": True, "threads": 3}
    options = server_options(Path("m.gguf"), case(), settings, Path("folder"))
    assert options.n_ctx == 4 * 256
    arguments = " ".join(binary_arguments(options))
    for expected in (
        "--model m.gguf",
        "--ctx-size 1024",
        "--parallel 4",
        "--flash-attn on",
        "--threads 3",
        "--threads-batch 3",
        "--slot-save-path folder/",
        "--gpu-layers 0",
    ):
        assert expected in arguments
    assert arguments.endswith(" --kv-unified")
    split = options._replace(kv_unified=False, flash_attention=False, gpu_layers=7)
    arguments = " ".join(binary_arguments(split))
    assert "--flash-attn off" in arguments
    assert "--gpu-layers 7" in arguments
    assert arguments.endswith(" --no-kv-unified")


def test_the_example_server_gets_cells_for_one_copy_or_for_all() -> None:
    """And a sequence for each document and branch."""
    settings = {"room": "shared", "flash_attention": False, "threads": 3}
    many = case(document(20, 50), cached=(document(60),))
    shared = server_config(Path("m.gguf"), many, settings, 1234)
    assert shared["server"] == {"host": "127.0.0.1", "port": 1234}
    model = shared["model"]
    assert many.num_cells <= model["n_ctx"] < many.num_cells + 1024
    assert model["n_seq_max"] >= 2 + 50
    assert (model["threads"], model["flash_attn"]) == (3, False)
    copies = server_config(Path("m.gguf"), many, {**settings, "room": "copies"}, 1)
    assert copies["model"]["n_ctx"] == 50 * 256
    double = server_config(Path("m.gguf"), many, {**settings, "room": "double"}, 1)
    assert double["model"]["n_ctx"] >= 2 * many.num_cells


def test_the_requests_are_greedy_of_a_fixed_length_and_without_an_end() -> None:
    """Both take token ids."""
    native = llama_server.completion_body((5, 6), 7)
    assert (native["prompt"], native["n_predict"], native["temperature"]) == ([5, 6], 7, 0.0)
    assert native["ignore_eos"]
    assert native["cache_prompt"]
    openai = example_server.completion_body((5, 6), 7, {"2": END_BIAS})
    assert (openai["prompt"], openai["max_tokens"], openai["temperature"]) == ([5, 6], 7, 0.0)
    assert openai["logit_bias"] == {"2": END_BIAS}


def test_a_counter_is_read_from_the_metrics() -> None:
    """A line of its own name, neither its comment nor a longer name."""
    text = "# TYPE a:b counter\na:b_more 1\na:b 23\n"
    assert example_server.metric(text, "a:b") == 23
    with pytest.raises(ServerError, match="a:c"):
        example_server.metric(text, "a:c")


# ---------------------------------------------------------------------- whole runs on stand-ins


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `llama-server` on the path that is `peer_servers`."""
    binary = tmp_path / "bin" / "llama-server"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SERVERS}" "$@"\n')
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def closing() -> Iterator[list[Contender]]:
    """Contenders put in are closed."""
    opened: list[Contender] = []
    yield opened
    for contender in opened:
        contender.close()


def is_alive(pid: int) -> bool:
    """Whether a child still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("is_cold", [False, True])
def test_llama_server_answers_all_branches_and_counts_what_was_computed(
    closing: list[Contender], is_cold: bool
) -> None:
    """The second run finds nothing of the first; what is cached before costs nothing."""
    asked = case(document(20), document(40), cached=(document(60),), is_cold=is_cold)
    settings = {**LlamaServer.candidates(asked)[0], "threads": 1}
    contender = LlamaServer(Path("m.gguf"), asked, settings)
    closing.append(contender)
    contender.open()
    for _ in range(2):
        contender.prepare()
        (pid,) = contender.child_pids()
        outcome = contender.run()
        assert outcome.outputs == [
            [list(prompt[-3:]) for prompt in doc.prompts] for doc in asked.documents
        ]
        # A document, two tokens of its first branch and the one in which the second differs.
        assert outcome.computed_tokens == 2 * (10 + 2 + 1)
        assert (outcome.prefill_seconds > 0) is not is_cold
    contender.close()
    assert not is_alive(pid)


@pytest.mark.usefixtures("on_path")
def test_llama_server_that_generates_too_little_is_an_error(closing: list[Contender]) -> None:
    """Less work must not look fast."""
    short = document(20).model_copy(update={"prompts": ((*range(20, 30), peer_servers.SHORT),)})
    contender = LlamaServer(
        Path("m.gguf"), case(short), {**LlamaServer.candidates(case())[0], "threads": 1}
    )
    closing.append(contender)
    contender.open()
    contender.prepare()
    with pytest.raises(ValueError, match="2 tokens were generated instead of 3"):
        contender.run()


def example(model: Path, asked: Case, **settings: Any) -> ExampleServer:
    """On the stand-in."""
    defaults = {**ExampleServer.candidates(asked)[0], "threads": 1, "server_script": str(SERVERS)}
    return ExampleServer(model, asked, {**defaults, **settings})


def test_the_example_server_is_emptied_between_runs(
    closing: list[Contender], tiny_llama: Path
) -> None:
    """One process for all runs; text becomes token ids again."""
    asked = case(document(20), cached=(document(60),))
    contender = example(tiny_llama, asked)
    closing.append(contender)
    contender.open()
    (pid,) = contender.child_pids()
    with Vocabulary(tiny_llama) as vocabulary:
        expected = [
            [vocabulary.encode_exactly(chr(97 + p[-1] % 26) * 3, 3) for p in doc.prompts]
            for doc in asked.documents
        ]
    assert all(len(tokens) == 3 for branches in expected for tokens in branches)
    for _ in range(2):
        contender.prepare()
        outcome = contender.run()
        assert outcome.outputs == expected
        assert outcome.computed_tokens == 10 + 2 + 1
        assert outcome.prefill_seconds > 0
    contender.close()
    assert not is_alive(pid)


def test_the_example_server_that_generates_too_little_is_an_error(
    closing: list[Contender], tiny_llama: Path
) -> None:
    """Less work must not look fast."""
    short = document(20).model_copy(update={"prompts": ((*range(20, 30), peer_servers.SHORT),)})
    contender = example(tiny_llama, case(short))
    closing.append(contender)
    contender.open()
    contender.prepare()
    with pytest.raises(ValueError, match="2 tokens were generated instead of 3"):
        contender.run()


@pytest.mark.parametrize("script", [None, "no/such/server.py"])
def test_the_example_server_without_its_script_says_what_to_give(script: str | None) -> None:
    """It is in no wheel."""
    contender = example(Path("none"), case(), server_script=script)
    with pytest.raises(FileNotFoundError, match=r"examples/server/server\.py"):
        contender.open()
    contender.close()


# --------------------------------------------------------------------------------- local servers


def command(config: Path, model: str, port: int) -> list[str]:
    """A stand-in for the example server, by hand."""
    config.write_text(f'{{"server": {{"port": {port}}}, "model": {{"path": "{model}"}}}}')
    return [sys.executable, str(SERVERS), "-C", str(config)]


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    """The end of what it wrote is in the message."""
    port = free_port()
    with pytest.raises(ServerError, match="ended with 1: cannot load the model"):
        ServerProcess(
            command(tmp_path / "c.json", "broken", port), f"http://127.0.0.1:{port}", "/healthz"
        )


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    """Here it never answers at the path that is asked."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(ServerError, match="not ready"):
        ServerProcess(command(tmp_path / "c.json", "m", port), url, "/no", timeout_seconds=0.5)
    with pytest.raises(ServerError, match="cannot be asked"):
        get(url)


def test_a_server_that_does_not_exist_cannot_be_started() -> None:
    """Nothing is left open."""
    with pytest.raises(ServerError, match="cannot be started"):
        ServerProcess(["no-such-program-here"], "http://127.0.0.1:1", "/")


def test_a_refusal_carries_status_and_reason(tmp_path: Path) -> None:
    """As a server says what is wrong with a request."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = ServerProcess(command(tmp_path / "c.json", "m", port), url, "/healthz")
    try:
        with pytest.raises(ServerError, match=r"answered 400: .*no embeddings"):
            post(f"{url}/v1/embeddings", {})
    finally:
        server.close()
    server.close()
    assert not is_alive(server.pid)


# ------------------------------------------------------------------------------------- vocabulary


def test_end_biases_are_those_of_the_tokens_that_end_a_text(tiny_llama: Path) -> None:
    """A peer that stops there must never choose one."""
    config = EngineConfig(model_path=tiny_llama, n_ctx=256, n_threads=1)
    with SwarmEngine(config) as engine, Vocabulary(tiny_llama) as vocabulary:
        tokenizer = engine.tokenizer
        ends = {token for token in range(tokenizer.n_vocab) if tokenizer.is_end(token)}
        assert set(vocabulary.end_bias()) == ends
        assert ends
        assert set(vocabulary.end_bias().values()) == {END_BIAS}


def test_text_becomes_its_token_ids_only_if_their_number_fits(tiny_llama: Path) -> None:
    """Otherwise the model wrote it with other tokens."""
    config = EngineConfig(model_path=tiny_llama, n_ctx=256, n_threads=1)
    text = "a plain text, and ünicode"
    with SwarmEngine(config) as engine:
        tokens = list(engine.tokenizer.encode(text))
    with Vocabulary(tiny_llama) as vocabulary:
        assert vocabulary.encode_exactly(text, len(tokens)) == tokens
        assert vocabulary.encode_exactly(text, len(tokens) + 1) == []
        assert vocabulary.encode_exactly("", 0) == []


# --------------------------------------------------------------------------------- ChatLlamaCpp


@pytest.fixture
def community(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`langchain_community` with a chat model on a real `Llama`; the calls that it got."""
    import llama_cpp

    calls: list[dict[str, Any]] = []

    class ChatLlamaCpp:
        def __init__(self, *, model_path: str, n_ctx: int, n_threads: int, **options: Any) -> None:
            calls.append(options)
            self.client = llama_cpp.Llama(
                model_path, n_ctx=n_ctx, n_threads=n_threads, verbose=False
            )

        def invoke(self, messages: list[Any], **options: Any) -> None:
            roles = {"system": "system", "human": "user"}
            self.client.create_chat_completion(
                [{"role": roles[m.type], "content": m.content} for m in messages],
                temperature=0.0,
                **options,
            )

    module = ModuleType("langchain_community.chat_models")
    module.ChatLlamaCpp = ChatLlamaCpp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "langchain_community", ModuleType("langchain_community"))
    monkeypatch.setitem(sys.modules, "langchain_community.chat_models", module)
    return calls


def chat(model: Path, asked: Case) -> ChatLlamaCppMutex:
    """Without flash attention."""
    return ChatLlamaCppMutex(model, asked, {"threads": 1, "flash_attention": False})


def test_chat_llama_cpp_does_the_work_of_the_case(
    closing: list[Contender],
    community: list[dict[str, Any]],
    tiny_long: Path,
    tiny_case: Case,
) -> None:
    """The same prompts, exactly as many tokens, the document computed once, greedy."""
    contender = chat(tiny_long, tiny_case)
    closing.append(contender)
    contender.open()
    config = EngineConfig(model_path=tiny_long, n_ctx=1024, n_threads=1)
    with Vocabulary(tiny_long) as vocabulary, SwarmEngine(config) as engine:
        params = SamplingParams(max_tokens=tiny_case.max_tokens, logit_bias=vocabulary.end_bias())
        expected = [
            list(engine.submit(prompt, params).result().token_ids)
            for prompt in tiny_case.documents[0].prompts
        ]
    for _ in range(2):
        contender.prepare()
        outcome = contender.run()
        assert outcome.outputs == [expected]
        assert outcome.computed_tokens <= tiny_case.num_shared_tokens
        assert len(outcome.activation_seconds) == tiny_case.num_branches
    assert community[0]["rope_freq_base"] == community[0]["rope_freq_scale"] == 0.0
    assert community[0]["temperature"] == 0.0
    assert community[0]["repeat_penalty"] == 1.0


@pytest.mark.usefixtures("community")
def test_chat_llama_cpp_with_another_prompt_is_an_error(
    closing: list[Contender], tiny_long: Path, tiny_case: Case
) -> None:
    """Other work is no comparison."""
    tasks = ("something else",) * tiny_case.num_branches
    other = tiny_case.documents[0].model_copy(update={"tasks": tasks})
    contender = chat(tiny_long, tiny_case.model_copy(update={"documents": (other,)}))
    closing.append(contender)
    contender.open()
    contender.prepare()
    with pytest.raises(ValueError, match="the work is not the same"):
        contender.run()
