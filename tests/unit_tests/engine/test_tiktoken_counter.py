"""tiktoken counts only where its ids are llama.cpp's: pieces, merges, characters, and all else."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf import TokenType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_swarmkv.engine import tiktoken_counter
from langchain_swarmkv.engine.llama_tokenizer import LlamaTokenizer
from langchain_swarmkv.engine.proof_texts import PROOF_TEXTS
from langchain_swarmkv.engine.tiktoken_counter import TiktokenCounter
from langchain_swarmkv.errors import EngineClosedError
from tests.support.vocabularies import (
    ALL_PAIRS,
    BYTE_LEVEL,
    IM_END,
    IM_START,
    SENTENCE_PIECE,
    TELLING,
    Vocabulary,
)

TinyGguf = Callable[..., Path]
PRE_TOKENIZERS = sorted(tiktoken_counter._PATTERNS)
KINDS = ("gpt-2", "smollm", "qwen2", "qwen35", "llama-bpe")
"""One name for each pattern."""

telling_texts = st.text(st.sampled_from(TELLING) | st.characters(), max_size=60)


@pytest.fixture(scope="module", params=KINDS)
def telling(request: pytest.FixtureRequest, tiny_gguf: TinyGguf) -> Iterator[LlamaTokenizer]:
    """A proved vocabulary in which every cut between two characters shows, for each pattern."""
    vocabulary = dataclasses.replace(ALL_PAIRS, pre_tokenizer=request.param)
    tokenizer = LlamaTokenizer(tiny_gguf("llama", vocabulary=vocabulary))
    assert tokenizer.prove_counter()
    yield tokenizer
    tokenizer.close()


def counter_of(tokenizer: LlamaTokenizer) -> TiktokenCounter:
    assert tokenizer._counter is not None
    return tokenizer._counter


# -- equal ids -----------------------------------------------------------------------------------


@given(telling_texts)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_ids_are_llama_cpps_wherever_they_are_proved(telling: LlamaTokenizer, text: str) -> None:
    """Any text over the characters that pre-tokenizers tell apart, and any others."""
    counter = counter_of(telling)
    assert telling.count(text) == len(telling.encode(text))
    if counter.is_proved(text):
        assert counter.agrees(text)


@pytest.mark.parametrize("text", [*PROOF_TEXTS, "", "a", IM_START, f"a{IM_END}\n", "x" * 5000])
def test_texts_of_all_kinds_are_counted_by_tiktoken(telling: LlamaTokenizer, text: str) -> None:
    """English, Chinese, code, emoji, digits, white space, and markup, which stays text."""
    assert counter_of(telling).count(text) == len(telling.encode(text))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_named_pattern_is_llama_cpps(tiny_gguf: TinyGguf, name: str) -> None:
    """Each name that llama.cpp knows for one of the patterns."""
    vocabulary = dataclasses.replace(ALL_PAIRS, pre_tokenizer=name)
    tokenizer = LlamaTokenizer(tiny_gguf("llama", vocabulary=vocabulary))
    assert tokenizer.prove_counter()
    tokenizer.close()


def test_the_digits_of_smollm_are_cut_out_first(tiny_gguf: TinyGguf) -> None:
    """All spaces before one stay together, where GPT-2's pattern leaves the last to the digit."""
    counts = [
        len(LlamaTokenizer(_written(tiny_gguf, pre_tokenizer=name)).encode("a   1"))
        for name in ("gpt-2", "smollm")
    ]
    assert counts == [3, 4]


def _written(tiny_gguf: TinyGguf, **changes: object) -> Path:
    return tiny_gguf("llama", vocabulary=dataclasses.replace(ALL_PAIRS, **changes))  # type: ignore[arg-type]


# -- no proof ------------------------------------------------------------------------------------


def _merged_in_another_order() -> Vocabulary:
    return dataclasses.replace(ALL_PAIRS, merges=ALL_PAIRS.merges[::-1])


def _with_a_token_that_nothing_merges_to() -> Vocabulary:
    return dataclasses.replace(
        ALL_PAIRS,
        tokens=(*ALL_PAIRS.tokens, "lasl"),
        types=(*ALL_PAIRS.types, TokenType.NORMAL),
        texts=(*ALL_PAIRS.texts, b"lasl"),
    )


@pytest.mark.parametrize(
    "vocabulary",
    [
        SENTENCE_PIECE,
        _merged_in_another_order(),
        _with_a_token_that_nothing_merges_to(),
        dataclasses.replace(ALL_PAIRS, pre_tokenizer="falcon"),
        dataclasses.replace(ALL_PAIRS, pre_tokenizer="default"),
    ],
    ids=["no merges", "merge order", "unreachable token", "unknown pattern", "no pattern"],
)
def test_without_a_proof_llama_cpp_counts(tiny_gguf: TinyGguf, vocabulary: Vocabulary) -> None:
    """Whatever speaks against equal ids; the counts stay right."""
    tokenizer = LlamaTokenizer(tiny_gguf("llama", vocabulary=vocabulary))
    assert not tokenizer.prove_counter()
    for text in PROOF_TEXTS:
        assert tokenizer.count(text) == len(tokenizer.encode(text))
    tokenizer.close()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_a_wrong_pattern_is_found_out(
    tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch, name: str, other: str
) -> None:
    """The proof tells every two patterns apart."""
    patterns = tiktoken_counter._PATTERNS
    monkeypatch.setitem(patterns, name, patterns[other])
    tokenizer = LlamaTokenizer(_written(tiny_gguf, pre_tokenizer=name))
    assert tokenizer.prove_counter() == (name == other)
    tokenizer.close()


def test_a_character_of_another_kind_is_left_to_llama_cpp() -> None:
    """Each is tried when it is first met; texts without it are still counted."""
    tokens = {bytes([byte]): byte for byte in range(256)}

    def encode(text: str) -> list[int]:
        return list(text.replace("\u1c89", "??").encode())

    counter = TiktokenCounter(tiktoken_counter._PATTERNS["gpt-2"], tokens, (), encode)
    assert counter.count("a\u1c89b") is None
    assert counter.count("ab") == 2


def test_a_byte_without_a_token_is_left_to_llama_cpp() -> None:
    """On it, tiktoken would panic."""
    tokens = {bytes([byte]): byte for byte in range(128)}
    counter = TiktokenCounter(
        tiktoken_counter._PATTERNS["gpt-2"], tokens, (), lambda text: list(text.encode())
    )
    assert counter.count("é") is None
    assert counter.count("e") == 1


def test_what_is_no_character_counts_as_before(telling: LlamaTokenizer) -> None:
    """A lone surrogate is one question mark."""
    assert telling.count("a\ud800b") == telling.count("a?b")


def test_user_defined_tokens_are_llama_cpps(tiny_gguf: TinyGguf) -> None:
    """It cuts them out of a text before anything else."""
    vocabulary = dataclasses.replace(
        BYTE_LEVEL,
        tokens=(*BYTE_LEVEL.tokens, "<tool_call>"),
        types=(*BYTE_LEVEL.types, TokenType.USER_DEFINED),
        texts=(*BYTE_LEVEL.texts, b"<tool_call>"),
    )
    tokenizer = LlamaTokenizer(tiny_gguf("llama", vocabulary=vocabulary))
    assert tokenizer.prove_counter()
    assert tokenizer.count("a<tool_call>b") == len(tokenizer.encode("a<tool_call>b")) == 3
    assert counter_of(tokenizer).count("a<tool_call") == 11
    tokenizer.close()


@pytest.mark.parametrize("text", [" " * 1_200_000, "a" + "\t" * 1_200_000 + "1"], ids=["", "in"])
def test_endless_white_space_is_counted(telling: LlamaTokenizer, text: str) -> None:
    """More than tiktoken's stack can hold."""
    assert counter_of(telling).count(text) is None
    assert telling.count(text) == len(telling.encode(text))


# -- when it is proved ---------------------------------------------------------------------------


def test_the_proof_waits_until_it_pays(tiny_gguf: TinyGguf) -> None:
    """Short texts never need it; one long text, or many, do."""
    tokenizer = LlamaTokenizer(_written(tiny_gguf))
    for _ in range(20):
        assert tokenizer.count("a few words") == len(tokenizer.encode("a few words"))
    assert tokenizer._counter is None
    long = "some more words " * 1000
    assert tokenizer.count(long) == len(tokenizer.encode(long))
    assert counter_of(tokenizer).count(long) == len(tokenizer.encode(long))
    tokenizer.close()


def test_many_threads_count_alike_while_one_proves(tiny_gguf: TinyGguf) -> None:
    """None waits for the proof, and none gets another number."""
    tokenizer = LlamaTokenizer(_written(tiny_gguf))
    texts = [text * 20 for text in PROOF_TEXTS]
    expected = [len(tokenizer.encode(text)) for text in texts]
    start = threading.Barrier(8)

    def count(_: int) -> list[int]:
        start.wait()
        return [tokenizer.count(text) for text in texts]

    with ThreadPoolExecutor(8) as pool:
        assert all(counts == expected for counts in pool.map(count, range(8)))
    assert tokenizer.prove_counter()
    tokenizer.close()


def test_a_closed_tokenizer_counts_nothing(tiny_gguf: TinyGguf) -> None:
    """Proved or not."""
    tokenizer = LlamaTokenizer(_written(tiny_gguf))
    assert tokenizer.prove_counter()
    tokenizer.close()
    with pytest.raises(EngineClosedError):
        tokenizer.count("a")
