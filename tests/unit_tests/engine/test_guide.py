"""Guides are compiled once, followed token by token, and refused with llguidance's own words.

What would end the process is in `native/test_guides_in_llguidance`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLMatcher

from langchain_swarmkv.engine import guide as guide_module
from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.engine.fake_tokenizer import BOS_ID, END_ID, START_ID, FakeTokenizer
from langchain_swarmkv.engine.guide import (
    MAX_GUIDE_BYTES,
    GuideCompiler,
    GuideMatcher,
    check_guide,
)
from langchain_swarmkv.errors import GrammarError


def matcher(guide: str, tokenizer: Tokenizer | None = None) -> GuideMatcher:
    return GuideCompiler(tokenizer or FakeTokenizer()).matcher(guide)


def allowed(at: GuideMatcher) -> set[int]:
    return set(at.allowed().nonzero()[0].tolist())


def test_tokens_are_allowed_as_the_guide_goes() -> None:
    """Alternatives, a control token by its name, and the end where the text is complete."""
    at = matcher('start: "ab" | "ac" <|im_start|> "z"')
    assert at.allowed().shape == (FakeTokenizer().n_vocab,)
    assert allowed(at) == {ord("a")}
    at.accept(ord("a"))
    assert allowed(at) == {ord("b"), ord("c")}
    at.accept(ord("c"))
    assert allowed(at) == {START_ID}
    at.accept(START_ID)
    at.accept(ord("z"))
    assert allowed(at) == {END_ID}
    at.accept(END_ID)


def test_markup_in_a_guide_is_text() -> None:
    """Only `<name>` is a control token; a string that spells one is written letter by letter."""
    at = matcher('start: "<|im_end|>"')
    assert allowed(at) == {ord("<")}


def test_every_end_token_may_end_the_text() -> None:
    """A vocabulary may have several; all may come where the text is complete, and none before."""

    class TwoEnds(FakeTokenizer):
        def is_end(self, token_id: int) -> bool:
            return token_id in (END_ID, BOS_ID)

    at = matcher('start: "a"+', TwoEnds())
    assert allowed(at) == {ord("a")}
    at.accept(ord("a"))
    assert allowed(at) == {ord("a"), BOS_ID, END_ID}


def test_a_model_without_an_end_cannot_be_guided() -> None:
    """Its answers would go on after the text."""

    class Endless(FakeTokenizer):
        def is_end(self, token_id: int) -> bool:
            return False

    with pytest.raises(GrammarError, match="no token that"):
        matcher('start: "a"', Endless())


def test_a_tokenizer_that_changes_texts_is_not_followed_in_it() -> None:
    """Some put a space before every text; what must come is written without it."""

    class Spaced(FakeTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(" " + text)

    at = matcher('start: "abc" "é"', Spaced())
    for byte in "abcé".encode():
        assert allowed(at) == {byte}
        at.accept(byte)
    assert allowed(at) == {END_ID}


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("nonsense {", "Expected token"),
        ("start: missing", "unknown name"),
        ("start: <|none|>", "unknown special token"),
        ("start: start", "NoExtension"),
        ('{"grammars": [{"json_schema": {"uniqueItems": true}}]}', "uniqueItems"),
        ('start: "\ud800"', "JSON serializable"),
        ('start: "' + "é" * (MAX_GUIDE_BYTES // 2) + '"', "limit"),
    ],
)
def test_a_guide_that_cannot_be_followed_is_refused(guide: str, reason: str) -> None:
    """At once, with the reason; again, when it is given again."""
    compiler = GuideCompiler(FakeTokenizer())
    for _ in range(2):
        with pytest.raises(GrammarError, match=reason):
            compiler.check(guide)


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    """And so is everything after it."""
    at = matcher("start: /[a-z]+/")
    with pytest.raises(GrammarError, match="doesn't satisfy") as told:
        at.accept(ord("A"))
    assert "<state>" not in str(told.value)
    with pytest.raises(GrammarError):
        at.allowed()


def test_a_panic_of_the_library_is_an_error() -> None:
    """It is no `Exception`; an interrupt stays one."""

    class PanicException(BaseException):
        pass

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(GrammarError, match="index out of bounds"):
        guide_module._told(lambda: fail(PanicException("index out of bounds")))
    with pytest.raises(KeyboardInterrupt):
        guide_module._told(lambda: fail(KeyboardInterrupt()))


def test_branches_with_one_guide_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come at the same time; and each has its own place in it."""
    compiled: list[str] = []
    start = threading.Barrier(8)

    def compiling(tokenizer: object, guide: str, **options: object) -> LLMatcher:
        compiled.append(guide)
        return LLMatcher(tokenizer, guide, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(guide_module, "LLMatcher", compiling)
    compiler = GuideCompiler(FakeTokenizer())

    def branch(letter: int) -> set[int]:
        start.wait(timeout=60)
        at = compiler.matcher('start: "a" "x" | "b" "y"')
        at.accept(letter)
        return allowed(at)

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(branch, [ord("a"), ord("b")] * 4))
    assert seen == [{ord("x")}, {ord("y")}] * 4
    assert len(compiled) == 1


def test_the_oldest_guides_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is bounded, and what is used stays."""
    monkeypatch.setattr(guide_module, "_MAX_COMPILED", 2)
    compiler = GuideCompiler(FakeTokenizer())
    for letter in "abac":
        compiler.check(f'start: "{letter}"')
    assert list(compiler._compiled) == ['start: "a"', 'start: "c"']


def test_without_room_for_the_stack_the_guide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the address space is limited."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = threading.stack_size()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(GrammarError, match="can't start new thread"):
            matcher('start: "a"')
    assert threading.stack_size() == before


def test_threads_started_later_have_the_stack_they_had() -> None:
    """The deep stack is for the thread that compiles."""
    before = threading.stack_size()
    matcher('start: "a"')
    assert threading.stack_size() == before


def test_a_guide_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents bind the same tools at each turn; a refusal is told each time."""
    checked: list[str] = []

    def compile_guide(guide: str, _: object) -> None:
        checked.append(guide)
        if "wrong" in guide:
            raise GrammarError("no")

    monkeypatch.setattr(guide_module, "_compile", compile_guide)
    for _ in range(2):
        check_guide('start: "checked once"')
        with pytest.raises(GrammarError):
            check_guide('start: "wrong"')
    assert checked == ['start: "checked once"', *['start: "wrong"'] * 2]
