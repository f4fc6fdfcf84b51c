"""The generated models are what the tests that use them take them for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from tests.support.oracle import Oracle
from tests.support.raw import RawModel
from tests.support.tiny_gguf import ARCHITECTURES, write_tiny_gguf
from tests.support.tolerances import F32_ROUNDING
from tests.support.vocabularies import (
    BYTE_LEVEL,
    CONTROL_TOKENS,
    SENTENCE_PIECE,
    Vocabulary,
)

TinyGguf = Callable[..., Path]

TEXT = "A prefix, the 2024-01 <|im_end|>\n\ndon't ask: 歪 👩‍🚀 é\t"
SEAMS = (
    ("pre", "fix"),
    ("a\n\n", "Q:"),
    ("a ", "question"),
    ("2024-0", "1"),
    ("<", "|im"),
    ("do", "n"),
)


def random_text(length: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(32, 127, length)]


def exact_oracle(path: Path) -> Oracle:
    """Without F16 cells, whose rounding differs from CPU to CPU by what one token may move."""
    return Oracle(path, 1024, False, n_threads=1, kv_type=llama_cpp.GGML_TYPE_F32)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equal_arguments_write_equal_files(architecture: str, tmp_path: Path) -> None:
    """A model is a function of its arguments, so a failure can be repeated."""
    first = write_tiny_gguf(tmp_path / "first.gguf", architecture)
    again = write_tiny_gguf(tmp_path / "again.gguf", architecture)
    assert first.read_bytes() == again.read_bytes()


def test_seeds_change_the_weights_and_nothing_else(tiny_gguf: TinyGguf) -> None:
    """Two seeds give two models of one shape and other answers."""
    first, second = tiny_gguf("llama", seed=1), tiny_gguf("llama", seed=2)
    assert first.stat().st_size == second.stat().st_size
    prompt = random_text(20)
    with (
        Oracle(first, 256, False, n_threads=1) as one,
        Oracle(second, 256, False, n_threads=1) as other,
    ):
        assert np.abs(one.first_logits(prompt) - other.first_logits(prompt)).max() > 1


def test_best_tokens_lead_by_more_than_rounding(tiny_models: Path) -> None:
    """Most greedy steps are decided by a margin far above the noise of batching."""
    with Oracle(tiny_models, 1024, False, n_threads=1) as oracle:
        margins = [step.margin for step in oracle.greedy(random_text(300), 48)]
    assert np.median(margins) > 0.5
    assert np.mean(np.array(margins) > 0.1) > 0.75


def test_greedy_answers_are_printable_and_vary(tiny_models: Path) -> None:
    """No control token, broken character or constant answer: text says as much as ids."""
    with Oracle(tiny_models, 1024, False, n_threads=1) as oracle:
        tokens = [step.token for step in oracle.greedy(random_text(300), 48)]
    texts = [BYTE_LEVEL.texts[token].decode("ascii") for token in tokens]
    assert all(text.isprintable() for text in texts)
    assert len(set(tokens)) > 8


@pytest.mark.parametrize("position", [0, 150, 400, 590])
def test_every_token_of_the_context_moves_the_logits(tiny_models: Path, position: int) -> None:
    """One other token anywhere in 600 shows, clearly above what batching may move logits."""
    prompt = random_text(600)
    other = list(prompt)
    other[position] = 32 + (prompt[position] - 32 + 40) % 95
    with exact_oracle(tiny_models) as oracle:
        change = oracle.first_logits(prompt) - oracle.first_logits(other)
    assert np.abs(change).max() > 2 * F32_ROUNDING


def test_a_lost_token_moves_the_logits(tiny_models: Path) -> None:
    """A prompt with one token left out in the middle has clearly other logits."""
    prompt = random_text(600)
    with exact_oracle(tiny_models) as oracle:
        change = oracle.first_logits(prompt) - oracle.first_logits(prompt[:300] + prompt[301:])
    assert np.abs(change).max() > 2 * F32_ROUNDING


def test_gemma_has_a_window_and_sees_past_it(tiny_gguf: TinyGguf) -> None:
    """Another window changes the answer, and a token far outside of it still counts."""
    prompt = random_text(200)
    other = [prompt[0] ^ 1, *prompt[1:]]
    with (
        exact_oracle(tiny_gguf("gemma3", window=32)) as narrow,
        exact_oracle(tiny_gguf("gemma3", window=64)) as wide,
    ):
        logits = narrow.first_logits(prompt)
        for changed in (wide.first_logits(prompt), narrow.first_logits(other)):
            assert np.abs(logits - changed).max() > 2 * F32_ROUNDING


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, SENTENCE_PIECE], ids=["bpe", "spm"])
def test_any_text_survives_tokenising(tiny_gguf: TinyGguf, vocabulary: Vocabulary) -> None:
    """Bytes are tokens, so every text comes back, markup in it as text."""
    with RawModel(tiny_gguf("llama", vocabulary=vocabulary)) as model:
        tokens = model.tokenize(TEXT)
        text = b"".join(map(model.token_bytes, tokens)).decode()
    # SentencePiece puts a space before every text.
    assert text == (TEXT if vocabulary is BYTE_LEVEL else " " + TEXT)
    assert not {vocabulary.tokens.index(name) for name in CONTROL_TOKENS} & set(tokens)


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, SENTENCE_PIECE], ids=["bpe", "spm"])
def test_token_texts_are_those_of_llama_cpp(tiny_gguf: TinyGguf, vocabulary: Vocabulary) -> None:
    """`Vocabulary.texts` can be used to read tokens without a model."""
    with RawModel(tiny_gguf("llama", vocabulary=vocabulary)) as model:
        assert model.n_vocab == len(vocabulary)
        texts = [model.token_bytes(token) for token in range(model.n_vocab)]
    unknown = [i for i, name in enumerate(vocabulary.tokens) if name == "<unk>"]
    assert [text for i, text in enumerate(texts) if i not in unknown] == [
        text for i, text in enumerate(vocabulary.texts) if i not in unknown
    ]


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, SENTENCE_PIECE], ids=["bpe", "spm"])
def test_control_tokens_are_single_where_asked_for(
    tiny_gguf: TinyGguf, vocabulary: Vocabulary
) -> None:
    """With special parsing on, each control token is one id."""
    with RawModel(tiny_gguf("llama", vocabulary=vocabulary)) as model:
        tokens = model.tokenize("".join(CONTROL_TOKENS), special=True)
    assert tokens == [vocabulary.tokens.index(name) for name in CONTROL_TOKENS]


@pytest.mark.parametrize(("left", "right"), SEAMS)
def test_tokens_merge_across_seams(tiny_llama: Path, left: str, right: str) -> None:
    """The vocabulary can show the fault of tokenising two halves apart."""
    with RawModel(tiny_llama) as model:
        assert model.tokenize(left) + model.tokenize(right) != model.tokenize(left + right)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_start_and_end_tokens_are_added_as_the_file_says(
    tiny_gguf: TinyGguf, add_bos: bool, add_eos: bool
) -> None:
    """The four kinds of vocabulary that prompts must cope with can be written."""
    bos, _, im_end, _ = range(256, 260)
    with RawModel(tiny_gguf("llama", add_bos=add_bos, add_eos=add_eos)) as model:
        tokens = model.tokenize("a", affixes=True)
    assert tokens == [bos] * add_bos + [ord("a")] + [im_end] * add_eos
