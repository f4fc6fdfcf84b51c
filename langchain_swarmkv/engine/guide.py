"""Guides: grammars that llguidance follows, token by token.

llguidance reads what the caller wrote with recursive functions, so that the depth of a guide is
depth of the stack, and a stack that overflows ends the process. A guide is therefore limited in
size, and compiled on a thread whose stack holds the deepest one of that size (`_STACK_BYTES`).
"""

from __future__ import annotations

import functools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.errors import GrammarError, SwarmKVError

__all__ = ["MAX_GUIDE_BYTES", "GuideCompiler", "GuideMatcher", "check_guide"]

T = TypeVar("T")

MAX_GUIDE_BYTES = 256 * 1024
_STACK_BYTES = 512 * 1024 * 1024
"""Address space, of which only what is used takes memory: 2,048 bytes for each byte of a guide.
The deepest guides that the tests know take about 1,000."""
_MAX_COMPILED = 64
_MAX_LEXER_STATES = 50_000
"""Of 1 to 2 kB each; llguidance would make 250,000."""
_MAX_SYMBOLS = 20_000
"""The time to compile grows faster than their number: 2,000 optional properties take a second."""
_MAX_FORCED_CHARACTERS = 1000
_MAX_REASON_CHARACTERS = 500

_QUOTED_LINE = re.compile(r"\n\s+\d+ \|")

_stack_size_lock = threading.Lock()


@functools.lru_cache(maxsize=128)  # agents bind the same tools at each turn
def check_guide(guide: str) -> None:
    """Compile a guide for no vocabulary in particular: what any model refuses is refused here.

    Raises:
        GrammarError: it is too large, or llguidance refuses it.
    """
    _check_size(guide)
    _on_deep_stack(lambda: _compile(guide, _byte_vocabulary()))


@functools.cache
def _byte_vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def _compile(guide: str, vocabulary: LLTokenizer) -> LLMatcher:
    matcher = _told(lambda: LLMatcher(vocabulary, guide, log_level=0, limits=_limits()))
    if matcher.is_error():
        raise _refusal(guide, matcher.get_error())
    # Some faults show only with the first token.
    trial = GuideMatcher(matcher.deep_copy(), vocabulary.vocab_size)
    trial.accept(int(trial.allowed().argmax()))
    return matcher


def _check_size(guide: str) -> None:
    if len(guide) > MAX_GUIDE_BYTES or len(guide.encode(errors="replace")) > MAX_GUIDE_BYTES:
        raise GrammarError(
            f"The guide has {len(guide)} characters; the limit is {MAX_GUIDE_BYTES} bytes.",
            num_characters=len(guide),
        )
    if not guide.strip():
        raise GrammarError("The guide is empty; leave it out to generate freely.")


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_grammar_size=_MAX_SYMBOLS, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )


def _refusal(guide: str, reason: str) -> GrammarError:
    return GrammarError(f"llguidance refuses the guide: {_short(reason)}.", guide=guide)


class GuideMatcher:
    """Where one answer stands in its guide. Use it on one thread at a time."""

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab

    def allowed(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next, shape (n_vocab,); at least one.

        Raises:
            GrammarError: none may, or finding them exceeds llguidance's limits.
        """
        bits = _told(self._matcher.compute_bitmask)
        self._check()
        mask = np.unpackbits(
            np.frombuffer(bits, dtype=np.uint8), count=self._n_vocab, bitorder="little"
        )
        return mask.view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Go on to what may follow an allowed token.

        Raises:
            GrammarError: the token is not allowed, or as `allowed`.
        """
        _told(lambda: self._matcher.consume_token(token_id))
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _short(self._matcher.get_error())
            raise GrammarError(f"The guide cannot be followed further: {reason}.")


class GuideCompiler:
    """Compiles guides for one vocabulary, and keeps the last ones. Thread safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._in_use: WeakValueDictionary[str, Future[LLMatcher]] = WeakValueDictionary()

    def check(self, guide: str) -> object:
        """Compile a guide.

        Returns:
            What to keep for as long as `matcher` must find it ready.

        Raises:
            GrammarError: it is too large, or llguidance refuses it.
        """
        _check_size(guide)
        return self._ready(guide)

    def matcher(self, guide: str) -> GuideMatcher:
        """A matcher at the beginning of a guide; raises as `check`."""
        _check_size(guide)
        return GuideMatcher(self._ready(guide).result().deep_copy(), self._tokenizer.n_vocab)

    def _ready(self, guide: str) -> Future[LLMatcher]:
        """The compiled guide; of callers that come together, one compiles it and all wait."""
        with self._lock:
            known = self._compiled.pop(guide, None) or self._in_use.get(guide)
            compiled = known or Future()
            self._compiled[guide] = self._in_use[guide] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        if known is None:
            try:
                compiled.set_result(_on_deep_stack(lambda: _compile(guide, self._vocabulary)))
            except BaseException as error:
                with self._lock:
                    self._compiled.pop(guide, None)
                    self._in_use.pop(guide, None)
                # An interrupt is this caller's alone.
                interrupted = GrammarError("Who compiled this guide was interrupted; try again.")
                compiled.set_exception(error if isinstance(error, SwarmKVError) else interrupted)
                raise
        compiled.result()
        return compiled

    @property
    def _vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            return self._built_vocabulary

    @functools.cached_property
    def _built_vocabulary(self) -> LLTokenizer:
        vocabulary = _Vocabulary(self._tokenizer)
        return LLTokenizer(
            vocabulary, n_vocab=self._tokenizer.n_vocab, eos_token=vocabulary.end_ids
        )


class _Vocabulary(TokenizerWrapper):
    """A `Tokenizer` as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.n_vocab)
        self.end_ids = [token_id for token_id in ids if tokenizer.is_end(token_id)]
        if not self.end_ids:
            raise GrammarError("A guide ends an answer; this model has no token that does.")
        special = {token.token_id: token.text for token in tokenizer.special_tokens.values()}
        self.is_tokenizer_wrapper = True
        self.eos_token_id = self.end_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [
            special[token_id].encode() if token_id in special else tokenizer.token_bytes(token_id)
            for token_id in ids
        ]
        self.special_token_ids = sorted({*special, *self.end_ids})
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Tokens of the text's beginning: llguidance asks how the model would write what must come.

        It asks again at each step, and takes the first.
        """
        text = text[:_MAX_FORCED_CHARACTERS]
        tokens = self._tokenizer.encode(text)
        data = text.encode()
        if b"".join(self.tokens[token_id] for token_id in tokens) == data:
            return tokens
        return self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        """For tokenizers that put a space before every text."""
        tokens = []
        while data:
            length = next(n for n in range(self._longest, 0, -1) if data[:n] in self._ids)
            tokens.append(self._ids[data[:length]])
            data = data[length:]
        return tokens

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {data: i for i, data in enumerate(self.tokens) if data and i not in special}

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))


def _on_deep_stack(function: Callable[[], T]) -> T:
    """What `function` returns or raises on a thread of its own."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="swarmkv-guide", daemon=True)
    with _stack_size_lock:  # the size is the process's: of all threads that start from now on
        previous = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise GrammarError(
                f"No guide can be compiled: a thread with {_STACK_BYTES} bytes of address space "
                f"for its stack cannot be started ({error})."
            ) from error
        finally:
            threading.stack_size(previous)
    return result.result()


def _told(call: Callable[[], T]) -> T:
    """What a call to llguidance returns; a panic of its code, which is no Exception, is told."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, SwarmKVError):
        raise
    except BaseException as error:
        raise GrammarError(f"llguidance failed on the guide: {_short(str(error))}.") from error


def _short(reason: str) -> str:
    """A reason without what llguidance adds for its own developers, and the lines it quotes."""
    for mark in ("<state>", "<non-verbose/>", "<backtrace>"):
        reason = reason.partition(mark)[0]
    reason = _QUOTED_LINE.split(reason)[0]
    return reason.strip()[:_MAX_REASON_CHARACTERS].rstrip(".")
