"""What the scheduler may ask of an engine, in the order of a sequence's life.

    decode -> logits / sample -> fork -> save -> clear -> restore -> ... -> close

A **sequence** is one lane of the KV cache, named by `seq_id` in `[0, limits.max_sequences)`. Its
tokens occupy **cells** of one pool. The invariant behind every call: a sequence with n tokens holds
exactly the positions `[0, n)`, so the next token decoded on it has position n. `fork` shares cells
and copies none.

An engine is not thread safe: one thread owns every call, except those of its `Tokenizer`, its
`GuideCompiler` and `check_state`.
Every call either does all that it says or raises and changes nothing; only `DecodeAbortedError` and
`DecodeFatalError` leave sequences of the failed batch in doubt, and those must then be cleared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.identity import ModelIdentity
from langchain_swarmkv.errors import InvalidRequestError

if TYPE_CHECKING:
    from langchain_swarmkv.engine.guide import GuideCompiler

__all__ = [
    "Batch",
    "Engine",
    "EngineLimits",
    "ModelFacts",
    "Sampler",
    "SpecialToken",
    "Tokenizer",
]


@dataclass(frozen=True)
class ModelFacts:
    """What a model says of itself."""

    name: str
    architecture: str
    identity: ModelIdentity
    """Everything that changes the KV of a token sequence; equal for equal engines."""
    n_vocab: int
    n_ctx_train: int
    """Most positions one sequence may have."""
    kv_bytes_per_token: int
    """Bytes of one cell over all layers; 0 where the cache does not grow with tokens."""


@dataclass(frozen=True)
class EngineLimits:
    """What the context can hold."""

    num_cells: int
    """Tokens in the pool, all sequences together, shared ones counted once."""
    max_sequences: int
    max_batch_tokens: int
    can_cut: bool
    """True: a sequence can be forked at any length. False (sliding window, recurrent, hybrid):
    only whole, at its present end."""
    max_running: int
    """Most requests worth computing at once: each token attends over the cells of all."""
    move_cost_tokens: int | None = None
    """Moving a cell to the host and back takes as long as this many tokens take to attend to it.
    None: what is idle may stay where it is."""


@dataclass(frozen=True)
class SpecialToken:
    """A token of the vocabulary that stands for markup, not for text."""

    token_id: int
    text: str
    strips_left: bool = False
    """White space before it is swallowed (the GGUF's LSTRIP attribute)."""
    strips_right: bool = False


class Tokenizer(ABC):
    """Text to token ids and back. Thread safe; needs no weights."""

    n_vocab: int
    n_ctx_train: int
    name: str
    """The model's name, for messages to people."""
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    """Whether prompts of this model start with `bos_id`."""
    chat_template: str | None
    """The model's own jinja template, if it has one."""
    tool_use_template: str | None = None
    """The model's own for conversations with tools, if it has another one for them."""
    special_tokens: Mapping[str, SpecialToken]
    """Control tokens by their text."""
    user_defined_tokens: Mapping[str, SpecialToken] = MappingProxyType({})
    """Tokens that `encode` finds in plain text before everything else, by their text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: no start token, and control tokens in the text stay text."""

    def count(self, text: str) -> int:
        """`len(encode(text))`; may be quicker than encoding."""
        return len(self.encode(text))

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; empty for control tokens."""

    @abstractmethod
    def is_end(self, token_id: int) -> bool:
        """Whether the token ends a generation."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens; broken UTF-8 becomes U+FFFD, control tokens nothing."""
        data = b"".join(map(self.token_bytes, token_ids))
        return data.decode("utf-8", errors="replace")

    def close(self) -> None:  # noqa: B027 - most tokenizers own nothing
        """Release what the tokenizer owns; harmless twice, and beside calls on other threads.

        Later calls raise EngineClosedError where they need what was released.
        """


@dataclass
class Batch:
    """Tokens for one `decode`, of any sequences, each at its next position.

    Rows are indices into the batch; ask for logits only where a token will be sampled.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    output_rows: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, seq_id: int, tokens: Sequence[int], start: int, *, want_logits: bool) -> int:
        """Append `tokens` at positions `[start, start + len(tokens))`; return the last row."""
        self.tokens.extend(tokens)
        self.positions.extend(range(start, start + len(tokens)))
        self.seq_ids.extend([seq_id] * len(tokens))
        row = len(self.tokens) - 1
        if want_logits:
            self.output_rows.append(row)
        return row


class Sampler(ABC):
    """Picks the tokens of one request, and keeps the state that this needs."""

    seed: int
    """The seed in use, drawn by the sampler where the request named none."""

    @abstractmethod
    def sample(self, row: int) -> int:
        """Pick a token from the logits of `row` of the last batch, and remember it.

        Raises:
            GrammarError: the grammar or guide allows no token here.
            InvalidRequestError: logit biases forbid every token.
            ModelError: the logits are not numbers.
        """

    @abstractmethod
    def sample_from(self, logits: npt.NDArray[np.float32]) -> int:
        """The same from logits that were kept, shape (n_vocab,).

        Raises:
            InvalidRequestError: they have another shape; and as `sample`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release native memory; harmless twice."""


class Engine(ABC):
    """See the module's docstring. Subclasses set all of these."""

    facts: ModelFacts
    limits: EngineLimits
    tokenizer: Tokenizer
    guides: GuideCompiler
    """Compiles `SamplingParams.guide` for the tokenizer."""
    device: str
    """Name of the device lock to hold during native work."""
    num_cores: int | None = None
    """Cores of a CPU that it computes on; None: the device is its own during native work."""

    @abstractmethod
    def decode(self, batch: Batch) -> None:
        """Compute the batch and append its tokens to their sequences.

        Invalidates the logits of the batch before.

        Raises:
            DecodeError: by llama.cpp's return code; see `errors`.
        """

    @abstractmethod
    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """A copy of the logits of one output row of the last batch, shape (n_vocab,).

        Raises:
            InvalidBatchError: the last batch asked for no logits there.
        """

    @abstractmethod
    def create_sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """A sampler for one request; `prompt` feeds the penalties.

        Raises:
            GrammarError: the grammar or guide is refused.
            InvalidRequestError: a biased token id is outside the vocabulary.
        """

    @abstractmethod
    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """Make `target`, which must be empty, share the first `num_tokens` cells of `source`.

        Raises:
            SequenceError: `target` is in use, `num_tokens` is not in [1, tokens of source], or
                the model cannot cut and `num_tokens` is not the whole of `source`.
        """

    @abstractmethod
    def move_down(self, holders: Sequence[int], first: int, end: int, scratch: int) -> None:
        """Move the cells of positions [first, end) to the lowest free; just `holders` share them.

        Only where `can_cut`. `scratch` is an empty sequence, and is empty afterwards.

        Raises:
            SequenceError: `scratch` is in use, or a holder does not have these positions.
            DecodeFatalError: the cells were lost on the way; the holders must be cleared.
        """

    @abstractmethod
    def clear(self, seq_id: int) -> None:
        """Empty a sequence. Cells that another sequence shares stay.

        Raises:
            DecodeFatalError: something stays behind that no call removes; close the engine.
        """

    @abstractmethod
    def num_tokens(self, seq_id: int) -> int:
        """Tokens in the sequence, as the cache itself says.

        This and every other call refuse a `seq_id` that the context does not have, with
        InvalidBatchError.
        """

    @abstractmethod
    def save(self, seq_id: int) -> bytes:
        """The sequence's KV state, to be given to `restore` of an engine with equal identity."""

    @abstractmethod
    def state_bytes(self, seq_id: int) -> int:
        """Bytes that `save` would return now; copies nothing."""

    @abstractmethod
    def check_state(self, state: bytes, num_tokens: int) -> None:
        """Look whether `restore` would accept the bytes; on any thread, beside other calls.

        Raises:
            SequenceError: they are no state of this engine, are damaged, or hold another number of
                tokens or other positions than `[0, num_tokens)`.
        """

    @abstractmethod
    def restore(
        self, seq_id: int, state: bytes, num_tokens: int, *, is_checked: bool = False
    ) -> None:
        """Fill an empty sequence from `save`'s bytes. On failure the sequence is empty.

        Args:
            seq_id: an empty sequence.
            state: of this engine, or of one with equal identity.
            num_tokens: tokens that the state must hold.
            is_checked: this engine has made these very bytes or restored them before, and they
                have not left this process: damage and numbers are not looked for again.

        Raises:
            SequenceError: the state does not fit this engine, or there is no room.
            DecodeFatalError: as `clear`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; harmless twice. Other calls raise EngineClosedError afterwards."""


def check_logits(logits: npt.NDArray[np.float32], n_vocab: int) -> None:
    """Refuse logits that are not one float for each token of the vocabulary."""
    if logits.shape != (n_vocab,) or logits.dtype != np.float32:
        raise InvalidRequestError(
            f"logits of shape {logits.shape} and type {logits.dtype}; expected were float32, "
            f"({n_vocab},)."
        )
