"""Vocabularies for prompt tests: bytes, control tokens, and words that merge over seams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from langchain_swarmkv.engine.contract import SpecialToken
from langchain_swarmkv.engine.fake import END_ID, FakeTokenizer

CONTROL_FROM = 1000

WORDS = (
    "pre", "prefix", "fix", "\n\n", "\n\n\n", ".\n\n", " question", " q", "2024-0", "2024-01",
    "<|", "<|im", "don", "don't", "'t", "Q", "\nQ:", "user", " 中", "中文", "  ", "e ",
)  # fmt: skip


class MergingTokenizer(FakeTokenizer):
    """Greedy longest match over `WORDS`, single bytes elsewhere; ids of words start at 300."""

    def __init__(self, controls: Sequence[str | SpecialToken] = (), **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        if controls:
            self.special_tokens = specials(controls)
        self._words = {word: 300 + i for i, word in enumerate(WORDS)}
        self.n_vocab = CONTROL_FROM + len(controls)
        longest_first = sorted(WORDS, key=len, reverse=True)
        self._pieces = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pieces.findall(text):
            ids += [self._words[piece]] if piece in self._words else super().encode(piece)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if 300 <= token_id < 300 + len(WORDS):
            return WORDS[token_id - 300].encode()
        return b"" if token_id >= 300 else super().token_bytes(min(token_id, END_ID))


def specials(controls: Iterable[str | SpecialToken]) -> dict[str, SpecialToken]:
    """Control tokens with ids from `CONTROL_FROM` on."""
    made = (
        control if isinstance(control, SpecialToken) else SpecialToken(CONTROL_FROM + i, control)
        for i, control in enumerate(controls)
    )
    return {token.text: token for token in made}


def control_ids(tokenizer: FakeTokenizer, ids: Sequence[int]) -> list[str]:
    """The control tokens among the ids, spelled out."""
    spelled = {token.token_id: text for text, token in tokenizer.special_tokens.items()}
    return [spelled[i] for i in ids if i in spelled]


def encode_rendered(tokenizer: FakeTokenizer, rendered: str) -> list[int]:
    """What `llama_tokenize(rendered, parse_special=True)` does, for texts without overlaps."""
    by_length = sorted(tokenizer.special_tokens, key=len, reverse=True)
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, by_length))})", rendered):
        special = tokenizer.special_tokens.get(piece)
        ids += [special.token_id] if special else tokenizer.encode(piece)
    return ids


class MarkedTokenizer(FakeTokenizer):
    """One token a byte, and the given control tokens from 256 on, of which some end an answer."""

    def __init__(self, controls: Sequence[str], ends: Sequence[str], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.special_tokens = {
            text: SpecialToken(256 + place, text) for place, text in enumerate([*controls, *ends])
        }
        self.n_vocab = 256 + len(self.special_tokens)
        self.bos_id = None
        self.eos_id = self.n_vocab - 1
        self._first_end = 256 + len(controls)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def is_end(self, token_id: int) -> bool:
        return token_id >= self._first_end

    def readable(self, token_ids: Sequence[int]) -> str:
        spelled = {token.token_id: text.encode() for text, token in self.special_tokens.items()}
        return b"".join(spelled.get(i) or bytes([i]) for i in token_ids).decode()

    def spelled(self, token_ids: Sequence[int], marks: Mapping[int, str]) -> str:
        """An ASCII answer with a mark for each control token, as the parser gets it."""
        return "".join(marks.get(i) or chr(i) for i in token_ids)

    def ids(self, text: str) -> list[int]:
        """The ids of a text in which control tokens are spelled out."""
        return encode_rendered(self, text)
