"""Vocabularies of the generated models: every byte is a token, with a few merges on top.

In the byte-level vocabulary the bytes are ids 0-255, then come the control tokens, then one token
per merge, then the user-defined tokens. The merges straddle seams on purpose: "pre" + "fix",
"2024-0" + "1" or "<" + "|" tokenise together to other ids than apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from gguf import GGUFWriter, TokenType

BOS, IM_START, IM_END, END_OF_TEXT = "<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CONTROL_TOKENS = (BOS, IM_START, IM_END, END_OF_TEXT)

MERGES = (
    ("p", "r"),
    ("pr", "e"),
    ("f", "i"),
    ("fi", "x"),
    ("pre", "fix"),
    ("\n", "\n"),
    (" ", "q"),
    (" ", "t"),
    ("h", "e"),
    (" t", "he"),
    ("i", "n"),
    ("2", "0"),
    ("20", "2"),
    ("0", "1"),
    ("'", "t"),
    ("<", "|"),
    ("d", "o"),
    ("do", "n"),
)
MERGED = tuple(left + right for left, right in MERGES)


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer part of a GGUF."""

    algorithm: str
    """llama.cpp's name of it: "gpt2" (byte-level BPE) or "llama" (SentencePiece)."""
    tokens: tuple[str, ...]
    """As the file spells them."""
    types: tuple[TokenType, ...]
    texts: tuple[bytes, ...]
    """What each token adds to the text; empty for control tokens."""
    merges: tuple[str, ...] = ()
    pre_tokenizer: str = "gpt-2"
    """llama.cpp's name for how a byte-level vocabulary cuts text before merging."""

    def __len__(self) -> int:
        return len(self.tokens)

    def write(self, writer: GGUFWriter, *, add_bos: bool, add_eos: bool) -> None:
        """Add the keys of this vocabulary to a GGUF."""
        writer.add_tokenizer_model(self.algorithm)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types([int(kind) for kind in self.types])
        if self.merges:
            writer.add_tokenizer_pre(self.pre_tokenizer)
            writer.add_token_merges(list(self.merges))
        else:
            writer.add_token_scores([-float(rank) for rank in range(len(self))])
        writer.add_bos_token_id(self.tokens.index(BOS))
        writer.add_eos_token_id(self.tokens.index(IM_END))
        writer.add_add_bos_token(add_bos)
        writer.add_add_eos_token(add_eos)


def _spell_bytes() -> dict[int, int]:
    """GPT-2's stand-in for each byte: no token holds white space or a control character."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: byte for byte in visible} | {byte: 256 + i for i, byte in enumerate(hidden)}


def byte_level(
    *,
    control: Sequence[str] = CONTROL_TOKENS,
    user_defined: Sequence[str] = (),
    merges: Sequence[tuple[bytes, bytes]] = tuple((a.encode(), b.encode()) for a, b in MERGES),
) -> Vocabulary:
    """Byte-level BPE, as of GPT-2."""
    spelling = _spell_bytes()
    merged = [left + right for left, right in merges]

    def spell(text: bytes) -> str:
        return "".join(chr(spelling[byte]) for byte in text)

    return Vocabulary(
        algorithm="gpt2",
        tokens=(
            *(chr(spelling[byte]) for byte in range(256)),
            *control,
            *map(spell, merged),
            *user_defined,
        ),
        types=(
            *[TokenType.NORMAL] * 256,
            *[TokenType.CONTROL] * len(control),
            *[TokenType.NORMAL] * len(merged),
            *[TokenType.USER_DEFINED] * len(user_defined),
        ),
        texts=(
            *(bytes([byte]) for byte in range(256)),
            *[b""] * len(control),
            *merged,
            *(text.encode() for text in user_defined),
        ),
        merges=tuple(f"{spell(left)} {spell(right)}" for left, right in merges),
    )


def sentence_piece(*, user_defined: Sequence[str] = ()) -> Vocabulary:
    """SentencePiece with byte fallback; every text gets a space in front."""
    pieces = (" ", *MERGED)
    return Vocabulary(
        algorithm="llama",
        tokens=(
            "<unk>",
            *CONTROL_TOKENS,
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *(text.replace(" ", "\u2581") for text in pieces),
            *user_defined,
        ),
        types=(
            TokenType.UNKNOWN,
            *[TokenType.CONTROL] * len(CONTROL_TOKENS),
            *[TokenType.BYTE] * 256,
            *[TokenType.NORMAL] * len(pieces),
            *[TokenType.USER_DEFINED] * len(user_defined),
        ),
        texts=(
            b"",
            *[b""] * len(CONTROL_TOKENS),
            *(bytes([byte]) for byte in range(256)),
            *(text.encode() for text in (*pieces, *user_defined)),
        ),
    )


BYTE_LEVEL = byte_level()
SENTENCE_PIECE = sentence_piece()

TELLING = "aSs1\u00b2?'l \n\r\t\u4e2d\u0301"
"""Characters of every kind that pre-tokenizers tell apart."""
_TELLING_BYTES = [bytes([byte]) for byte in sorted(set(TELLING.encode()))]
ALL_PAIRS = byte_level(merges=list(product(_TELLING_BYTES, repeat=2)))
"""Any two neighbours of `TELLING` merge, unless the pre-tokenizer cuts between them."""
