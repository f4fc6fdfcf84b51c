"""The cases: what is in them, and which are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage

from benchmarks.fanout.workloads import WORKLOADS, Sizes, build_cases
from langchain_swarmkv import ChatSwarmKV, ConfigurationError, document_message

SMALL = Sizes(60, 2, 4)


@pytest.fixture
def llm(tiny_long: Path) -> Iterator[ChatSwarmKV]:
    with ChatSwarmKV(model_path=tiny_long) as llm:
        yield llm


def test_the_prompts_are_those_of_the_chat_model(llm: ChatSwarmKV) -> None:
    """Whole prompts, all with the shared prefix, each with another question."""
    (case,) = build_cases(llm, None, Sizes(60, 45, 4))
    (document,) = case.documents
    assert len(set(document.tasks)) == case.num_branches == 45
    for task, prompt in zip(document.tasks, document.prompts, strict=True):
        messages = [document_message(document.text), HumanMessage(task)]
        assert list(prompt) == llm.prompt_token_ids(messages)
        assert prompt[: len(document.prefix)] == document.prefix


@pytest.mark.parametrize("num_tokens", [50, 777, 6000])
def test_a_document_has_the_length_that_is_asked_for(llm: ChatSwarmKV, num_tokens: int) -> None:
    """Also beyond the patent's own; white space at the cut is dropped."""
    (case,) = build_cases(llm, None, Sizes(num_tokens, 1, 4))
    assert num_tokens - 2 <= case.documents[0].num_tokens <= num_tokens


def test_the_workloads_have_their_sizes(tiny_gguf: Callable[..., Path]) -> None:
    """Documents, branches and output tokens as they are described."""
    with ChatSwarmKV(model_path=tiny_gguf("llama", n_ctx_train=1 << 15)) as llm:
        cases = {case.name: case for name in WORKLOADS for case in build_cases(llm, name, Sizes())}
    sizes = {
        name: (len(c.documents), c.num_branches, c.max_tokens, len(c.cached))
        for name, c in cases.items()
        if not name.startswith("W6")
    }
    assert sizes == {
        "W1": (1, 2, 32, 0),
        "W2": (1, 16, 64, 0),
        "W3": (1, 50, 64, 0),
        "W4-cold": (1, 8, 32, 0),
        "W4-warm": (1, 8, 32, 0),
        "W5-empty": (4, 16, 32, 0),
        "W5-cached": (4, 16, 32, 4),
    }
    assert 3499 <= cases["W1"].documents[0].num_tokens <= 3501
    assert "jumps over the lazy dog. The quick" in cases["W1"].documents[0].text
    assert [name for name, case in cases.items() if case.is_cold] == ["W4-cold"]
    grid = [name.removeprefix("W6-") for name in cases if name.startswith("W6")]
    assert len(grid) == 12
    assert {"d512-b8", "d7000-b8", "d2048-b1", "d2048-b64"} <= set(grid)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_given_sizes_replace_a_workload_s_own(llm: ChatSwarmKV, workload: str) -> None:
    """Each one by itself."""
    for case in build_cases(llm, workload, SMALL):
        assert case.max_tokens == 4
        for document in case.documents:
            assert 58 <= document.num_tokens <= 60
            assert len(document.prompts) == 2


def test_documents_of_one_case_share_only_the_instructions(llm: ChatSwarmKV) -> None:
    """Those that are cached are others too."""
    _, case = build_cases(llm, "W5", SMALL)
    begins = {document.text[:20] for document in (*case.documents, *case.cached)}
    assert len(begins) == 8


def test_the_order_of_submission_interleaves_the_documents(llm: ChatSwarmKV) -> None:
    """First branch of each, then second of each."""
    case, _ = build_cases(llm, "W5", SMALL)
    assert case.interleaved == [(d, b) for b in range(2) for d in range(4)]


def test_a_branch_longer_than_the_trained_context_is_refused(llm: ChatSwarmKV) -> None:
    """By the longest branch, its output included, and not by the pool."""
    with pytest.raises(ConfigurationError, match="16384"):
        build_cases(llm, None, Sizes(60, 1, 16384))
    (case,) = build_cases(llm, None, Sizes(8000, 60, 200))
    assert case.num_cells > 16384


def test_an_unknown_workload_is_refused(llm: ChatSwarmKV) -> None:
    """With the names of those there are."""
    with pytest.raises(ConfigurationError, match="W1, W2"):
        build_cases(llm, "W9", Sizes())
