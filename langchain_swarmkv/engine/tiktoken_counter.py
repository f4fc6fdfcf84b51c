"""Counting with tiktoken, where it is proved to give llama.cpp's own ids.

tiktoken is several times faster than llama.cpp's tokeniser, but reads no GGUF. It gets the file's
token bytes, with their ids for the order of merges, and the pre-tokenizer's pattern in its own
syntax. The ids are llama.cpp's if three things hold, and each is tested, not believed:

    merges       ids come in merge order: every token's text gives the same ids in both, alone and
                 next to others (for then the last merge inside any token is the same in both)
    pieces       the pattern cuts alike: texts of many kinds give the same ids in both
    characters   both know a character as the same kind (Unicode versions differ): each is tried in
                 many surroundings when it is first met

A text with a character, or anything else, that is not proved is left to llama.cpp.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping

import tiktoken

from langchain_swarmkv.engine.proof_texts import PROOF_TEXTS, SURROUNDINGS

__all__ = ["TiktokenCounter", "proved_counter"]

Encode = Callable[[str], list[int]]

# As llama.cpp has them (`llm_tokenizer_bpe`), but for what tiktoken's regular expressions call
# otherwise. Letters in both cases are listed: `(?i)` would let `s` match the long s.
_CONTRACTION = r"'(?:[sS]|[tT]|[mM]|[dD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACES = r"\s+(?!\S)|\s+"
_WORDS = rf"'(?:s|t|m|d|re|ve|ll)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
# llama.cpp cuts out the digits first, so that spaces before one are the end of a text.
_DIGITS_FIRST = rf"\p{{N}}|\s+(?=\p{{N}})|{_WORDS}"
_LINES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_LINES_AND_DIGITS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_LINES}"
_LINES_AND_MARKS = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_LINES_AND_THOUSANDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_LINES}"

_NAMES = {
    _WORDS: "gpt-2 phi-2 mpt olmo jais exaone4 modern-bert mellum",
    _DIGITS_FIRST: "smollm starcoder refact command-r codeshell exaone minerva-7b",
    _LINES_AND_MARKS: "qwen35",
    _LINES_AND_DIGITS: "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez",
    _LINES_AND_THOUSANDS: (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0 dbrx smaug-bpe "
        "chatglm-bpe glm4"
    ),
}
_PATTERNS = {name: pattern for pattern, names in _NAMES.items() for name in names.split()}
"""By `tokenizer.ggml.pre` of the file."""

_WHITE_SPACE_CHUNK = 1 << 16
"""tiktoken's stack overflows on about a million white-space characters in a row."""


class TiktokenCounter:
    """Counts the tokens of a text, or says that it cannot; thread safe.

    Args:
        pattern: the pre-tokenizer's.
        tokens: ids of all ordinary tokens by their bytes.
        cut_out: texts that llama.cpp turns into tokens before anything else.
        encode: llama.cpp's tokeniser.
    """

    def __init__(
        self, pattern: str, tokens: Mapping[bytes, int], cut_out: Iterable[str], encode: Encode
    ) -> None:
        self._tokens = dict(tokens)
        self._encoding = tiktoken.Encoding(
            "gguf", pat_str=pattern, mergeable_ranks=self._tokens, special_tokens={}
        )
        self._cut_out = tuple(cut_out)
        # There may be hundreds, most of which begin alike.
        self._openings = {special[:3] for special in self._cut_out}
        self._encode = encode
        # Replaced and never changed, since they are read without the lock; they only grow.
        self._proved: frozenset[str] = frozenset()
        self._refused: frozenset[str] = frozenset()
        self._growth = threading.Lock()

    def count(self, text: str) -> int | None:
        """Tokens of the text; None: not proved to be what llama.cpp would say."""
        return len(self._encoding.encode_ordinary(text)) if self.is_proved(text) else None

    def is_proved(self, text: str) -> bool:
        """Whether both are known to give the same ids, of what the text is made of."""
        characters = set(text)
        new = characters - self._proved - self._refused
        if new:
            agreeing = frozenset(filter(self._agrees_on, new))
            with self._growth:
                self._proved |= agreeing
                self._refused |= new - agreeing
        return (
            characters.isdisjoint(self._refused)
            and not self.is_cut(text)
            and not any(
                text[start : start + _WHITE_SPACE_CHUNK].isspace()
                for start in range(_WHITE_SPACE_CHUNK, len(text), _WHITE_SPACE_CHUNK)
            )
        )

    def is_cut(self, text: str) -> bool:
        """Whether llama.cpp would cut something out of the text."""
        return any(opening in text for opening in self._openings) and any(
            special in text for special in self._cut_out
        )

    def _agrees_on(self, character: str) -> bool:
        return self.has_tokens(character) and self.agrees(SURROUNDINGS.replace("X", character))

    def has_tokens(self, character: str) -> bool:
        """Whether each byte of the character is a token: tiktoken panics where one is not."""
        data = character.encode("utf-8", "ignore")  # half of a surrogate pair has none
        return data != b"" and all(data[i : i + 1] in self._tokens for i in range(len(data)))

    def agrees(self, text: str) -> bool:
        """Whether both give the same ids for a text all of whose bytes are tokens."""
        return self._encoding.encode_ordinary(text) == self._encode(text)


def proved_counter(
    pre_tokenizer: str | None, tokens: Mapping[bytes, int], cut_out: Iterable[str], encode: Encode
) -> TiktokenCounter | None:
    """A counter for a vocabulary, if there is a proof.

    Args:
        pre_tokenizer: the file's name for its pattern.
        tokens: ids of all ordinary tokens by their bytes.
        cut_out: texts of the user-defined tokens.
        encode: llama.cpp's tokeniser.
    """
    pattern = _PATTERNS.get(pre_tokenizer or "")
    if pattern is None or not tokens:
        return None
    counter = TiktokenCounter(pattern, tokens, cut_out, encode)
    return counter if _is_right(counter, tokens) else None


def _is_right(counter: TiktokenCounter, tokens: Iterable[bytes]) -> bool:
    if not all(counter.agrees("".join(filter(counter.has_tokens, text))) for text in PROOF_TEXTS):
        return False
    texts = list(map(_decoded, tokens))
    missing = {char for char in set("".join(texts)) if not counter.has_tokens(char)}
    texts = [text for text in texts if missing.isdisjoint(text) and not counter.is_cut(text)]
    one_by_one = "\n".join(texts)
    random.Random(0).shuffle(texts)
    return counter.agrees(one_by_one) and counter.agrees("".join(texts))


def _decoded(token: bytes) -> str:
    """The token's text; "" for one that is a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""
