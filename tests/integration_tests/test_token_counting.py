"""Counts on a real vocabulary: tiktoken's ids are llama.cpp's, and nothing is loaded or locked."""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.llama_tokenizer import LlamaTokenizer
from langchain_swarmkv.engine.proof_texts import PROOF_TEXTS
from langchain_swarmkv.engine.tiktoken_counter import TiktokenCounter
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Iterator[LlamaTokenizer]:
    tokenizer = LlamaTokenizer(smollm2)
    assert tokenizer.prove_counter()
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def counter(tokenizer: LlamaTokenizer) -> TiktokenCounter:
    assert tokenizer._counter is not None
    return tokenizer._counter


words = st.sampled_from([word for text in PROOF_TEXTS for word in text.split()])
spaces = st.text(" \n\t\r\u3000", min_size=1, max_size=5)
texts = st.lists(words | spaces | st.text(max_size=5), max_size=40).map("".join)


@given(texts)
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_ids_are_equal_wherever_they_are_proved(
    tokenizer: LlamaTokenizer, counter: TiktokenCounter, text: str
) -> None:
    """Words, white space and anything else, put together at random."""
    assert tokenizer.count(text) == len(tokenizer.encode(text))
    if counter.is_proved(text):
        assert counter.agrees(text)


@pytest.mark.parametrize("path", ["README.md", "examples/patent_analysis/disclosure.md"])
def test_whole_files_are_counted_by_tiktoken(
    tokenizer: LlamaTokenizer, counter: TiktokenCounter, path: str
) -> None:
    """English, and what stands in this repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    assert counter.agrees(text)
    assert counter.count(text) == len(tokenizer.encode(text))


def test_source_code_is_counted_by_tiktoken(counter: TiktokenCounter) -> None:
    """Every module of the package."""
    for path in sorted((ROOT / "langchain_swarmkv").rglob("*.py")):
        assert counter.agrees(path.read_text(encoding="utf-8"))


def test_every_character_is_proved_or_left_alone(counter: TiktokenCounter) -> None:
    """What this Python knows as assigned: every fifth of the first plane, fewer of the others."""
    assigned = [
        char
        for char in map(chr, [*range(0, 0x10000, 5), *range(0x10000, sys.maxunicode + 1, 13)])
        if unicodedata.category(char) not in ("Cn", "Co", "Cs")
    ]
    counter.is_proved("".join(assigned))
    proved = [char for char in assigned if char in counter._proved]
    assert len(proved) > 0.99 * len(assigned)
    random.Random(1).shuffle(proved)
    assert counter.agrees("".join(proved))
    assert counter.agrees(" ".join(proved))


def test_counting_loads_nothing_and_locks_nothing(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiktoken and without, of texts and of prompts."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("counting came here")

    monkeypatch.setattr("langchain_swarmkv.scheduling.engine_loop.open_engine", refuse)
    for name in ("acquire", "acquire_nowait", "acquire_async"):
        monkeypatch.setattr(DeviceLockManager, name, refuse)
    text = "".join(PROOF_TEXTS)
    with ChatSwarmKV(model_path=smollm2) as llm:
        counts = [llm.get_num_tokens(text)]
        assert isinstance(llm.tokenizer, LlamaTokenizer)
        assert llm.tokenizer.prove_counter()
        counts.append(llm.get_num_tokens(text))
        assert counts == [len(llm.get_token_ids(text))] * 2
        messages = [SystemMessage(text), HumanMessage("Why?")]
        assert llm.get_num_tokens_from_messages(messages) == len(llm.prompt_token_ids(messages))


def test_messages_trimmed_by_a_real_model_fit(smollm2: Path) -> None:
    """SmolLM2's template takes any part of a history; it adds a system message where none is."""
    history: list[BaseMessage] = [SystemMessage("Be brief.")]
    for number in range(4):
        call = {"name": "search", "args": {"q": f"{number}"}, "id": f"call_{number}"}
        history += [
            HumanMessage(f"Question {number}? " * (number + 1)),
            AIMessage("", tool_calls=[call]),
            ToolMessage(f"Result {number}. " * 5, tool_call_id=f"call_{number}"),
            AIMessage(f"Answer {number}."),
        ]
    history.append(HumanMessage("And now?"))
    with ChatSwarmKV(model_path=smollm2) as llm:
        whole = llm.get_num_tokens_from_messages(history)
        assert whole == len(llm.prompt_token_ids(history))
        sizes = set()
        for max_tokens in range(60, whole + 80, 10):
            kept = trim_messages(
                history,
                max_tokens=max_tokens,
                token_counter=llm,
                strategy="last",
                include_system=True,
                start_on="human",
            )
            assert llm.get_num_tokens_from_messages(kept) <= max_tokens
            assert kept[0] == history[0]
            sizes.add(len(kept))
        assert max(sizes) == len(history)
        assert len(sizes) >= 4
