"""Text to token ids so that content never becomes control.

A rendered prompt is a mix of the template's own words, where `<|im_start|>` is one control token,
and of content, where the same letters are just text. Once rendered, the two look alike. So before
rendering, wherever content could be read as (a part of) a control token's text, its first character
there is replaced by a stand-in: a private-use character that occurs nowhere else. What still reads
as control after rendering was written by the template; the stand-ins are put back, and everything
between control tokens is encoded as plain text, a whole fragment at once.

The places where content gets a stand-in, for a control text such as `<|im_end|>`:

    whole   ...<|im_end|>...   it stands in the content
    end     ...<|im_           the content ends with its beginning, and what follows may go on
    start   end|>...           the content begins with its end
    inside  im_end             the content is a piece of it; templates do write `<|` + name + `|>`

White space around the content is looked through, since templates trim. Letters match in either
case, since templates change it. A piece that no control token can cover costs nothing: the ids are
those of `llama_tokenize(rendered, parse_special=True)`.

Many models keep their markers (`<tool_call>`, `<think>`) as user-defined tokens, which llama.cpp
finds in plain text too. They are treated like control tokens, and where one stands in content the
text is encoded in two parts that meet inside of it. Other user-defined tokens (runs of spaces, HTML
tags) are text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from langchain_swarmkv.engine.contract import SpecialToken, Tokenizer
from langchain_swarmkv.errors import UnsupportedContentError

__all__ = ["Segmenter", "StandIns", "unused_characters"]

_PRIVATE_USE = re.compile("[\ue000-\uf8ff]")
_WHITE_SPACE = " \t\n\v\f\r"  # what C's isspace() knows
_LONG_FRAGMENT_CHARS = 1024
_MIN_MARKER_CHARS = 3
_PRIVATE_USE_CHARACTER = "\ue000"  # in no vocabulary's pieces, so it never merges with a neighbour

# Markers that a template may put together from pieces, or leave to the model to write.
_MARKER_SHAPES = re.compile(r"<\|.+\|>|<\uff5c.+\uff5c>|\[/?[A-Z][A-Z_]+\]", re.DOTALL)
_MARKER_NAMES = (
    *("think", "tools", "tool", "tool_call", "tool_calls", "tool_response", "tool_result"),
    *("function_call", "arg_key", "arg_value", "start_of_turn", "end_of_turn"),
)
_KNOWN_MARKERS = {f"<{slash}{name}>" for name in _MARKER_NAMES for slash in ("", "/")}


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Private-use characters that occur in none of the texts.

    Raises:
        UnsupportedContentError: all 6400 occur.
    """
    used = {char for text in texts for char in _PRIVATE_USE.findall(text)}
    yield from (char for char in map(chr, range(0xE000, 0xF900)) if char not in used)
    raise UnsupportedContentError(
        "The messages use every private-use character (U+E000 to U+F8FF), so that none is left to "
        "mark what is text and what is markup. Remove some.",
        content_type="text",
    )


class StandIns:
    """One private-use character for each character that had to be hidden in a prompt."""

    def __init__(self, unused: Iterator[str]) -> None:
        self._unused = unused
        self._hidden: dict[str, str] = {}

    def hide(self, char: str) -> str:
        """The stand-in of a character."""
        if char not in self._hidden:
            self._hidden[char] = next(self._unused)
        return self._hidden[char]

    def put_back(self, text: str) -> str:
        """The text with the hidden characters in their places."""
        for char, stand_in in self._hidden.items():
            text = text.replace(stand_in, char)
        return text


class Segmenter:
    """Knows the control tokens of one vocabulary.

    Args:
        tokenizer: the vocabulary.
        template_source: the chat template; user-defined tokens that it writes are markers.
        hidden: more texts that content must not be read as, though they are no tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, template_source: str = "", hidden: Iterable[str] = ()
    ) -> None:
        specials = [token for token in tokenizer.special_tokens.values() if token.text]
        markers = [
            token
            for text, token in tokenizer.user_defined_tokens.items()
            if _is_marker(text, template_source)
        ]
        self._control_ids = {special.token_id for special in specials}
        specials += markers
        # llama.cpp looks for the longest text first, everywhere, and length is in bytes.
        self._longest_first = sorted(specials, key=_num_bytes, reverse=True)
        self._written = _Finder((special.text for special in specials), str)
        self._markers = _Finder((marker.text for marker in markers), str)
        self._control = _ControlParts([*(special.text for special in specials), *hidden])
        self._tokenizer = tokenizer
        # SentencePiece puts a space before every text, which the second part of one must not have.
        adds_space = tokenizer.decode(tokenizer.encode("a")).startswith(" ")
        self._guard = _PRIVATE_USE_CHARACTER if adds_space else ""
        self._num_guard_tokens = len(tokenizer.encode(self._guard))
        self._encode_long = lru_cache(maxsize=8)(self._encode_parts)

    def is_control(self, token: SpecialToken) -> bool:
        """Whether the token adds no text to an answer."""
        return token.token_id in self._control_ids

    def is_control_id(self, token_id: int) -> bool:
        """Whether the token is one that text is cut at."""
        return token_id in self._control_ids

    def hide_control(self, content: str, stand_ins: StandIns) -> str:
        """The content with a stand-in wherever a part of it could be read as control."""
        starts = sorted(self._control.starts(content))
        pieces = [content[: starts[0]] if starts else content]
        for start, end in zip(starts, [*starts[1:], len(content)], strict=False):
            pieces += stand_ins.hide(content[start]), content[start + 1 : end]
        return "".join(pieces)

    def encode(self, rendered: str, stand_ins: StandIns, *, goes_on: bool = False) -> list[int]:
        """Token ids of rendered text: control tokens where it reads so, plain text elsewhere.

        Args:
            rendered: the text.
            stand_ins: what in it was hidden.
            goes_on: it follows other text, so that SentencePiece's space must not be before it.
        """
        ids: list[int] = []
        for place, piece in enumerate(self.pieces(rendered)):
            if isinstance(piece, SpecialToken):
                ids.append(piece.token_id)
            else:
                text = stand_ins.put_back(piece)
                cuts = tuple(self._cuts(piece, text))
                ids.extend(self._encode(text, cuts, goes_on=goes_on and place == 0))
        return ids

    def _cuts(self, piece: str, text: str) -> list[int]:
        """Where to cut the text, so that no marker that content has a part in stays whole."""
        if piece == text:
            return []
        cuts = set()
        for start, marker in self._markers.find(text):
            end = start + len(marker)
            hidden = next((i for i in range(start, end) if piece[i] != text[i]), None)
            if hidden is not None:
                cuts.add(max(hidden, start + 1))
        return sorted(cuts)

    def _encode(self, text: str, cuts: tuple[int, ...], *, goes_on: bool) -> tuple[int, ...]:
        # Branches on one document share its fragment, which is long to encode and worth keeping.
        if len(text) < _LONG_FRAGMENT_CHARS:
            return self._encode_parts(text, cuts, goes_on)
        return self._encode_long(text, cuts, goes_on)

    def _encode_parts(self, text: str, cuts: tuple[int, ...], goes_on: bool) -> tuple[int, ...]:
        ids: list[int] = []
        for start, end in pairwise((0, *cuts, len(text))):
            if start == 0 and not goes_on:
                ids += self._tokenizer.encode(text[:end])
            else:
                guarded = self._tokenizer.encode(self._guard + text[start:end])
                ids += guarded[self._num_guard_tokens :]
        return tuple(ids)

    def pieces(self, rendered: str) -> list[str | SpecialToken]:
        """Rendered text cut into control tokens and the text between them."""
        pieces: list[str | SpecialToken] = [rendered]
        for special in self._occurring(rendered):
            pieces = [
                part
                for piece in pieces
                for part in (_split(piece, special) if isinstance(piece, str) else (piece,))
            ]
        return [piece for piece in pieces if piece != ""]

    def _occurring(self, rendered: str) -> list[SpecialToken]:
        texts = {text for _, text in self._written.find(rendered)}
        return [
            special
            for special in self._longest_first
            if any(text.startswith(special.text) for text in texts)
        ]


def _is_marker(text: str, template_source: str) -> bool:
    # A word alone is none, even if it is a token of its own and stands in the template.
    if len(text) < _MIN_MARKER_CHARS or text.isspace() or text.isalnum():
        return False
    return (
        text in template_source
        or text in _KNOWN_MARKERS
        or _MARKER_SHAPES.fullmatch(text) is not None
    )


def _num_bytes(special: SpecialToken) -> int:
    return len(special.text.encode())


def _split(text: str, special: SpecialToken) -> Iterator[str | SpecialToken]:
    fragments = text.split(special.text)
    for place, fragment in enumerate(fragments):
        if place > 0:
            yield special
            if special.strips_right:
                fragment = fragment.lstrip(_WHITE_SPACE)
        if place < len(fragments) - 1 and special.strips_left:
            fragment = fragment.rstrip(_WHITE_SPACE)
        yield fragment


class _Finder:
    """Finds texts of a set in a long text, after `fold` has been applied to both."""

    def __init__(self, texts: Iterable[str], fold: Callable[[str], str]) -> None:
        self._texts = {fold(text) for text in texts}
        self._sizes = sorted({len(text) for text in self._texts}, reverse=True)
        self._fold = fold
        # Thousands of texts open with the same few characters; the rest is looked up.
        openings = sorted({re.escape(text[:2]) for text in self._texts})
        self._opening = re.compile(f"(?={'|'.join(openings) or '(?!)'})", re.IGNORECASE)

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Where one of the texts begins, and the longest that does."""
        for match in self._opening.finditer(text):
            start = match.start()
            candidates = (self._fold(text[start : start + size]) for size in self._sizes)
            found = next((text for text in candidates if text in self._texts), None)
            if found is not None:
                yield start, found


class _ControlParts:
    """Finds where content could be read as a control text, or as a part of one."""

    def __init__(self, texts: Iterable[str]) -> None:
        folded = sorted({text.casefold() for text in texts})
        self._whole = _Finder(folded, str.casefold)
        self._longest = max(map(len, folded), default=0)
        self._from_the_left = folded
        self._from_the_right = sorted(text[::-1] for text in folded)
        self._joined = "\0".join(folded)

    def starts(self, content: str) -> set[int]:
        """Indices of the characters to hide."""
        starts = {start for start, _ in self._whole.find(content)}
        first = len(content) - len(content.lstrip())
        last = len(content.rstrip())
        for size in range(1, min(self._longest, last - first) + 1):
            if _has_beginning(self._from_the_left, content[last - size : last].casefold()):
                starts.add(last - size)
            head = content[first : first + size].casefold()
            if _has_beginning(self._from_the_right, head[::-1]):
                starts.add(first)
        core = content[first:last].casefold() if last - first < self._longest else ""
        if core and core in self._joined:
            starts.add(first)
        return starts


def _has_beginning(ordered: Sequence[str], beginning: str) -> bool:
    """Whether one of the texts, which are in order, begins so."""
    place = bisect_left(ordered, beginning)
    return place < len(ordered) and ordered[place].startswith(beginning)
