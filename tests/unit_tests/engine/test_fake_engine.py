"""FakeEngine keeps the contract of engines, and is what a test of a graph needs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.fake import BOS_ID, END_ID, START_ID, FakeEngine
from langchain_swarmkv.errors import DecodeFatalError, GrammarError
from tests.unit_tests.engine.engine_contract import (
    DOCUMENT,
    EngineContract,
    OpenEngine,
    append,
    lengths,
)


class TestFakeEngine(EngineContract):
    """Behaves like a model with full attention."""

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return _open_cutting


class TestFakeEngineThatCannotCut(EngineContract):
    """Behaves like a windowed or recurrent model."""

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return _open_whole


def _open_cutting(
    *, num_cells: int = 512, max_sequences: int = 8, max_batch_tokens: int = 64
) -> FakeEngine:
    return FakeEngine(
        num_cells=num_cells,
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        n_ctx_train=4096,
    )


def _open_whole(
    *, num_cells: int = 512, max_sequences: int = 8, max_batch_tokens: int = 64
) -> FakeEngine:
    return FakeEngine(
        num_cells=num_cells,
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        n_ctx_train=4096,
        can_cut=False,
    )


def answer(engine: FakeEngine, prompt: str, params: SamplingParams, count: int) -> list[int]:
    """Run one request by hand."""
    tokens = engine.tokenizer.encode(prompt)
    engine.clear(0)
    append(engine, 0, tokens)
    sampler = engine.create_sampler(params, tokens)
    row = (len(tokens) - 1) % engine.limits.max_batch_tokens
    output = []
    for _ in range(count):
        output.append(sampler.sample(row))
        append(engine, 0, output[-1:])
        row = 0
    return output


def test_a_fixed_reply_is_said_byte_by_byte_and_then_ended() -> None:
    """Multi-byte characters come in pieces, as they do from byte-level models."""
    engine = FakeEngine(reply="Grüße 歪")
    tokens = answer(engine, "whatever", SamplingParams(), 14)
    assert bytes(tokens[:11]).decode() == "Grüße 歪"
    assert tokens[11:] == [END_ID] * 3


def test_a_reply_can_depend_on_the_prompt_as_the_model_sees_it() -> None:
    """The function gets the text with its control tokens spelled out."""
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return "ok"

    engine = FakeEngine(reply=reply)
    prompt = [BOS_ID, START_ID, *b"user", END_ID]
    append(engine, 0, prompt)
    sampler = engine.create_sampler(SamplingParams(), prompt)
    assert [sampler.sample(len(prompt) - 1) for _ in range(3)] == [*b"ok", END_ID]
    assert seen == ["<|bos|><|im_start|>user<|im_end|>"]


def test_without_a_reply_the_answer_is_printable_and_ends_by_itself_sometimes() -> None:
    """Greedy answers are a function of the prompt, other prompts have other answers."""
    engine = FakeEngine()
    answers = {
        prompt: answer(engine, prompt, SamplingParams(), 60) for prompt in ("a", "b", "c " * 40)
    }
    assert answers["a"] == answer(engine, "a", SamplingParams(), 60)
    assert len({tuple(tokens) for tokens in answers.values()}) == 3
    for tokens in answers.values():
        assert all(32 <= token < 127 or token == END_ID for token in tokens)
    counts = Counter(answer(engine, "end", SamplingParams(temperature=1.0, seed=3), 600))
    assert counts[END_ID] > 0


def test_a_grammar_needs_a_reply() -> None:
    """The fake does not pretend to follow one."""
    params = SamplingParams(grammar='root ::= "yes" | "no"')
    with pytest.raises(GrammarError, match="give it a reply"):
        FakeEngine().create_sampler(params, [65])
    assert FakeEngine(reply="yes").create_sampler(params, [65]).sample(0) == ord("y")


def written(engine: FakeEngine, guide: str) -> str:
    """The answer under a guide, up to its end."""
    append(engine, 0, DOCUMENT[:20])
    sampler = engine.create_sampler(SamplingParams(guide=guide), DOCUMENT[:20])
    tokens = [sampler.sample(19)]
    while tokens[-1] != END_ID:
        tokens.append(sampler.sample(19))
        assert len(tokens) < 100
    return engine.tokenizer.decode(tokens)


def test_a_reply_goes_on_wherever_its_guide_allows_it() -> None:
    """What must stand in between is the guide's; after the reply the end comes when it may."""
    around = 'start: "<" /[a-z]{0,3}/ "|" /[a-z]{0,3}/ ">"'
    assert written(FakeEngine(reply="abc|xyz"), around) == "<abc|xyz>"
    assert written(FakeEngine(reply="ab"), "start: /[a-z]*/") == "ab"
    assert written(FakeEngine(reply=""), 'start: "yes"') == "yes"
    assert written(FakeEngine(reply="\n" * 1000), "start: /[a-z\\n]{5}/") == "\n" * 5
    assert written(FakeEngine(), 'start: "yes" | "no"') in ("yes", "no")


def test_decoded_tokens_are_counted_once_each() -> None:
    """What a test of sharing looks at: forks and restores decode nothing."""
    engine = FakeEngine()
    append(engine, 0, DOCUMENT)
    engine.fork(0, 1, 150)
    engine.restore(2, engine.save(0), 150)
    append(engine, 1, DOCUMENT[:7])
    assert engine.decoded_tokens == 157


def test_a_failure_in_the_hook_leaves_the_batch_undone() -> None:
    """`on_decode` sees each batch first and may fail in llama.cpp's stead."""
    batches: list[Batch] = []

    def fail_at_second(batch: Batch) -> None:
        batches.append(batch)
        if len(batches) == 2:
            raise DecodeFatalError("llama_decode returned -3.", return_code=-3)

    engine = FakeEngine(on_decode=fail_at_second)
    append(engine, 0, DOCUMENT[:5])
    with pytest.raises(DecodeFatalError):
        append(engine, 0, DOCUMENT[5:9])
    assert (lengths(engine)[0], engine.decoded_tokens) == (5, 5)
    append(engine, 0, DOCUMENT[5:9])
    assert [len(batch) for batch in batches] == [5, 4, 4]


def test_the_model_that_it_plays_can_be_chosen() -> None:
    """Template, start token and trained context are the caller's."""
    engine = FakeEngine(n_ctx_train=99, chat_template="{{ messages }}", adds_bos=True)
    tokenizer = engine.tokenizer
    assert (engine.facts.n_ctx_train, tokenizer.n_ctx_train) == (99, 99)
    assert (tokenizer.chat_template, tokenizer.adds_bos) == ("{{ messages }}", True)
    assert FakeEngine(num_cells=77).facts.n_ctx_train == 77
    assert FakeEngine(chat_template=None).tokenizer.chat_template is None


def test_any_text_survives_tokenising() -> None:
    """Lone surrogates, which are no text, become question marks."""
    tokenizer = FakeEngine().tokenizer
    for text in ("", "plain", "歪 👩‍🚀 é\0\t", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("\ud800")) == "?"


def test_min_p_and_top_p_cut_the_tail() -> None:
    """The tokens that come are those that the definition keeps."""
    engine = FakeEngine()
    logits = append(engine, 0, DOCUMENT[:30]).astype(np.float64)
    weights = np.exp(logits - logits.max())
    order = np.argsort(-logits)
    held = np.cumsum(weights[order]) / weights.sum()
    nucleus = set(order[: int(np.searchsorted(held, 0.3)) + 1].tolist())
    drawn = TestFakeEngine().draws
    assert set(drawn(engine, 29, 400, temperature=1.0, top_p=0.3, seed=0)) == nucleus
    likely = set(np.flatnonzero(weights >= 0.5).tolist())
    assert set(drawn(engine, 29, 400, temperature=1.0, min_p=0.5, seed=0)) == likely
