"""How many tokens llama.cpp is given: each document once, whoever asks and however.

The spy sits on the one place where batches go to `llama_decode`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import BaseMessage, HumanMessage
from langgraph.graph import START

from langchain_swarmkv import (
    AnalystNode,
    ChatSwarmKV,
    DocumentNode,
    SwarmState,
    SwarmStateGraph,
    document_message,
)
from tests.support.decode_spy import DecodeSpy

OUTPUT_TOKENS = 4


@pytest.fixture
def open_llm(tiny_llama: Path) -> Iterator[Callable[..., ChatSwarmKV]]:
    """Chat models on the tiny llama, closed at the end."""
    opened: list[ChatSwarmKV] = []

    def open_llm(**options: Any) -> ChatSwarmKV:
        llm = ChatSwarmKV(
            model_path=tiny_llama,
            n_threads=1,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            **options,
        )
        opened.append(llm)
        return llm

    yield open_llm
    for llm in opened:
        llm.close()


def _document(seed: int, num_characters: int) -> str:
    letters = np.random.default_rng(seed).integers(97, 123, num_characters)
    return bytes(letters.tolist()).decode()


def _conversation(document: str, task: str) -> list[BaseMessage]:
    return [document_message(document), HumanMessage(task)]


def _distinct(prompts: list[list[int]]) -> int:
    """Nodes of the tree of all prompts: the least that must be computed."""
    ordered = sorted(prompts)
    shared = sum(_num_shared(a, b) for a, b in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def _num_shared(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _fed_back(num_answers: int) -> int:
    """The last token of an answer is never decoded."""
    return num_answers * (OUTPUT_TOKENS - 1)


def test_a_document_node_and_eight_analysts_compute_the_document_once(
    open_llm: Callable[..., ChatSwarmKV], spy: DecodeSpy
) -> None:
    """The prefix is decoded by the document node; an analyst decodes its task and its answer."""
    llm = open_llm()
    document = _document(1, 2000)
    tasks = {f"analyst{n}": f"{n} is the question of this analyst." for n in range(8)}
    graph = SwarmStateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_edge(START, "document")
    for name, task in tasks.items():
        graph.add_node(name, AnalystNode(llm, task))
        graph.add_edge("document", name)
    app = graph.compile(document=document)
    llm.engine_statistics()  # loads the model, whose own two warm-up tokens do not count
    spy.reset()
    state = app.invoke({"document": document})

    assert set(state["findings"]) == set(tasks)
    prefix = len(llm.prefix_token_ids([document_message(document)]))
    prompts = [llm.prompt_token_ids(_conversation(document, task)) for task in tasks.values()]
    computed = spy.num_tokens - _fed_back(len(tasks))
    assert computed == llm.engine_statistics().num_prefill_tokens
    # The firm prefix ends a token before the tasks differ; who starts late may share that one too.
    assert _distinct(prompts) <= computed <= prefix + sum(len(p) - prefix for p in prompts)


def test_eight_cold_threads_compute_a_shared_prefix_once(
    open_llm: Callable[..., ChatSwarmKV], spy: DecodeSpy
) -> None:
    """Plain chat models, no node, nothing resident, all at the same moment."""
    document = _document(2, 2000)
    tasks = [f"{n} is what this thread asks." for n in range(8)]
    llms = [open_llm() for _ in tasks]
    llms[0].engine_statistics()
    spy.reset()
    barrier = threading.Barrier(len(tasks))

    def ask(llm: ChatSwarmKV, task: str) -> int:
        barrier.wait()
        answer = llm.invoke(_conversation(document, task))
        usage = answer.usage_metadata
        assert usage is not None
        return usage["input_token_details"]["cache_read"]

    with ThreadPoolExecutor(len(tasks)) as pool:
        reused = list(pool.map(ask, llms, tasks))

    prompts = [llms[0].prompt_token_ids(_conversation(document, task)) for task in tasks]
    assert spy.num_tokens == _distinct(prompts) + _fed_back(len(tasks))
    shared = _num_shared(min(prompts), max(prompts))
    assert shared > 2000
    assert sorted(reused) == [0] + [shared] * 7


def test_four_interleaved_documents_are_computed_once_each(
    open_llm: Callable[..., ChatSwarmKV], spy: DecodeSpy
) -> None:
    """Sixteen threads, four documents in turn, one engine."""
    llm = open_llm()
    documents = [_document(seed, 600) for seed in range(10, 14)]
    calls = [(document, f"{n} is the task.") for n in range(4) for document in documents]
    llm.engine_statistics()
    spy.reset()
    barrier = threading.Barrier(len(calls))

    def ask(call: tuple[str, str]) -> str:
        barrier.wait()
        return str(llm.invoke(_conversation(*call)).content)

    with ThreadPoolExecutor(len(calls)) as pool:
        answers = list(pool.map(ask, calls))

    assert all(answers)
    computed = spy.num_tokens - _fed_back(len(calls))
    prompts = [llm.prompt_token_ids(_conversation(*call)) for call in calls]
    least = _distinct(prompts)
    # Documents that begin alike by chance for a few characters may both compute those.
    assert least <= computed < least + 50


def test_a_conversation_prefills_only_what_is_new(
    open_llm: Callable[..., ChatSwarmKV], spy: DecodeSpy
) -> None:
    """Turn after turn, the history is forked and not decoded again."""
    llm = open_llm()
    messages: list[BaseMessage] = [document_message(_document(3, 500))]
    llm.engine_statistics()
    previous_input = 0
    for turn in range(5):
        messages.append(HumanMessage(f"{turn} is my next question."))
        spy.reset()
        answer = llm.invoke(messages)
        usage = answer.usage_metadata
        assert usage is not None
        if turn:
            # The answer as text may split into other tokens than were sampled, a few at most.
            assert usage["input_token_details"]["cache_read"] >= previous_input
            assert spy.num_tokens <= usage["input_tokens"] - previous_input + _fed_back(1)
        previous_input = usage["input_tokens"]
        messages.append(answer)
