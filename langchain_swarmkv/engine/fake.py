"""An engine without weights, for tests: of this package and of graphs that use it.

It keeps what a real KV cache would make observable and nothing else: which tokens each sequence
holds, and logits that depend on every one of them. An answer computed from the wrong prefix is
therefore a different answer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.cells import CellLedger, CellRange
from langchain_swarmkv.engine.contract import (
    Batch,
    Engine,
    EngineLimits,
    ModelFacts,
    Sampler,
)
from langchain_swarmkv.engine.fake_sampler import NoiseSampler, ReplySampler
from langchain_swarmkv.engine.fake_tokenizer import (
    BOS_ID,
    CHATML,
    END_ID,
    NUM_TOKENS,
    START_ID,
    FakeTokenizer,
)
from langchain_swarmkv.engine.guide import GuideCompiler
from langchain_swarmkv.engine.identity import ModelIdentity
from langchain_swarmkv.errors import (
    ConfigurationError,
    EngineClosedError,
    GrammarError,
    InvalidBatchError,
    InvalidRequestError,
    NoRoomError,
    SequenceError,
)

__all__ = ["BOS_ID", "END_ID", "START_ID", "FakeEngine", "FakeTokenizer"]

_STATE_MAGIC = b"FAKEKV1\n"
_STATE_HEADER_BYTES = len(_STATE_MAGIC) + hashlib.sha256().digest_size

# The rolling hash that stands for "all tokens so far" (Knuth's MMIX multiplier).
_MULTIPLIER, _INCREMENT, _MASK = 6364136223846793005, 1442695040888963407, (1 << 64) - 1


class FakeEngine(Engine):
    """A deterministic engine: `FakeEngine(reply="Yes.")` answers everything with "Yes.".

    Args:
        num_cells: size of the pool in tokens.
        max_sequences: sequence ids.
        max_batch_tokens: most tokens a step.
        n_ctx_train: most positions of one sequence; None: `num_cells`.
        can_cut: False behaves like a sliding-window or recurrent model: only whole sequences
            can be forked.
        reply: every answer, or a function from the readable prompt (control tokens spelled out)
            to the answer. None: printable noise that depends on the whole prompt. Under a guide,
            the reply goes on wherever the guide allows its next byte; elsewhere the noise chooses,
            and after the last byte the answer ends as soon as it may.
        chat_template: the template that the "model" carries.
        adds_bos: whether prompts start with `<|bos|>`.
        max_running: most requests computed at once; None: `max_sequences`.
        move_cost_tokens: see `EngineLimits`; a number makes idle prefixes leave the pool early.
        step_seconds: how long each decode takes.
        on_decode: called with each batch before it is computed; may wait, or raise to simulate a
            native failure.
        device: name of the device lock.

    Attributes:
        decoded_tokens: tokens given to `decode` so far, those of failed steps not counted.
    """

    def __init__(
        self,
        *,
        num_cells: int = 4096,
        max_sequences: int = 16,
        max_batch_tokens: int = 512,
        n_ctx_train: int | None = None,
        can_cut: bool = True,
        reply: str | Callable[[str], str] | None = None,
        chat_template: str | None = CHATML,
        adds_bos: bool = False,
        max_running: int | None = None,
        move_cost_tokens: int | None = None,
        step_seconds: float = 0.0,
        on_decode: Callable[[Batch], None] | None = None,
        device: str = "fake",
    ) -> None:
        if max_sequences > max_batch_tokens:
            raise ConfigurationError(
                f"max_sequences={max_sequences} is more than max_batch_tokens={max_batch_tokens}: "
                "a step must have room for one token of each branch."
            )
        n_ctx_train = num_cells if n_ctx_train is None else n_ctx_train
        self._tokenizer = FakeTokenizer(
            n_ctx_train=n_ctx_train, chat_template=chat_template, adds_bos=adds_bos
        )
        self.tokenizer = self._tokenizer
        self.guides = GuideCompiler(self._tokenizer)
        self.facts = ModelFacts(
            name="fake",
            architecture="fake",
            identity=ModelIdentity(
                architecture="fake",
                tokenizer="fake",
                weights="fake",
                kv_type_k="fake",
                kv_type_v="fake",
                rope="fake",
                llama_cpp="fake",
            ),
            n_vocab=NUM_TOKENS,
            n_ctx_train=n_ctx_train,
            kv_bytes_per_token=4,
        )
        self.limits = EngineLimits(
            num_cells=num_cells,
            max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens,
            can_cut=can_cut,
            max_running=max_running or max_sequences,
            move_cost_tokens=move_cost_tokens,
        )
        self.device = device
        self.decoded_tokens = 0
        self.on_decode = on_decode
        self._reply = reply
        self._step_seconds = step_seconds
        self._ledger = CellLedger(num_cells)
        # One rolling hash for each token of each sequence.
        self._tokens: list[list[int]] = [[] for _ in range(max_sequences)]
        self._hashes: list[list[int]] = [[] for _ in range(max_sequences)]
        self._rows: dict[int, int] = {}
        self._closed = False

    def decode(self, batch: Batch) -> None:
        """See `Engine.decode`; also checks what llama.cpp would check, and more."""
        self._validate(batch)
        if self.on_decode is not None:
            self.on_decode(batch)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        outputs = set(batch.output_rows)
        self._rows = {}
        for row, (token, seq_id) in enumerate(zip(batch.tokens, batch.seq_ids, strict=True)):
            value = self._append(seq_id, token)
            if row in outputs:
                self._rows[row] = value
        self.decoded_tokens += len(batch)

    def _validate(self, batch: Batch) -> None:
        self._check_open()
        if not 0 < len(batch) <= self.limits.max_batch_tokens:
            raise InvalidBatchError(
                f"a batch of {len(batch)} tokens; the limit is {self.limits.max_batch_tokens}.",
                return_code=-1,
            )
        if len(batch) > self._ledger.free:
            raise NoRoomError(
                f"a batch of {len(batch)} tokens, {self._ledger.free} cells free.", return_code=1
            )
        if any(not 0 <= row < len(batch) for row in batch.output_rows):
            raise InvalidBatchError("an output row is outside the batch.", return_code=-1)
        expected: dict[int, int] = {}
        for token, position, seq_id in zip(
            batch.tokens, batch.positions, batch.seq_ids, strict=True
        ):
            next_pos = expected.get(seq_id, self.num_tokens(seq_id))
            if position != next_pos or not 0 <= token < NUM_TOKENS:
                raise InvalidBatchError(
                    f"token {token} at position {position} of sequence {seq_id}; "
                    f"its next position is {next_pos}.",
                    return_code=-1,
                )
            expected[seq_id] = next_pos + 1

    def _append(self, seq_id: int, token: int) -> int:
        hashes = self._hashes[seq_id]
        previous = hashes[-1] if hashes else 0
        value = ((previous ^ (token + 1)) * _MULTIPLIER + _INCREMENT) & _MASK
        hashes.append(value)
        self._tokens[seq_id].append(token)
        self._ledger.append(seq_id, 1)
        return value

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Normal noise on the printable bytes, a small chance for the end, nothing elsewhere."""
        self._check_open()
        if row not in self._rows:
            raise InvalidBatchError(f"row {row} of the last batch has no logits.", return_code=-1)
        noise = np.random.default_rng(self._rows[row]).standard_normal(NUM_TOKENS)
        logits = np.full(NUM_TOKENS, -1e9, dtype=np.float32)
        logits[32:127] = noise[32:127]
        logits[END_ID] = noise[END_ID]
        return logits

    def create_sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """See `Engine.create_sampler`. A grammar needs a `reply`, which is taken as it is."""
        self._check_open()
        outside = [i for i in params.logit_bias if not 0 <= i < NUM_TOKENS]
        if outside:
            raise InvalidRequestError(
                f"logit_bias names token {outside[0]}; the vocabulary has {NUM_TOKENS}."
            )
        guide = None if params.guide is None else self.guides.matcher(params.guide)
        if self._reply is not None:
            text = self._reply
            if not isinstance(text, str):
                text = text(self._tokenizer.readable(prompt))
            return ReplySampler(self, text, params.seed or 0, guide)
        if params.grammar is not None:
            raise GrammarError(
                "FakeEngine cannot follow a grammar; give it a reply that matches the grammar."
            )
        return NoiseSampler(self, params, guide)

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """See `Engine.fork`."""
        length = self.num_tokens(source)
        if self.num_tokens(target):
            raise SequenceError(f"sequence {target} is in use; clear it before a fork into it.")
        can_fork = 0 < num_tokens <= length if self.limits.can_cut else 0 < num_tokens == length
        if not can_fork:
            raise SequenceError(
                f"cannot fork {num_tokens} of the {length} tokens of sequence {source}."
            )
        self._tokens[target] = self._tokens[source][:num_tokens]
        self._hashes[target] = self._hashes[source][:num_tokens]
        self._ledger.fork(source, target, num_tokens)

    def move_down(self, holders: Sequence[int], first: int, end: int, scratch: int) -> None:
        """See `Engine.move_down`. Nothing is lost if the caller's ledger agrees with this one."""
        if self.num_tokens(scratch):
            raise SequenceError(f"sequence {scratch} is in use; clear it before moving through it.")
        if not 0 <= first < end <= min(map(self.num_tokens, holders)):
            raise SequenceError(f"positions {first} to {end} are not in all of {list(holders)}.")
        self._ledger.move(CellRange(tuple(holders), first, end))

    def clear(self, seq_id: int) -> None:
        """See `Engine.clear`."""
        self._check_id(seq_id)
        self._tokens[seq_id] = []
        self._hashes[seq_id] = []
        self._ledger.clear(seq_id)

    def num_tokens(self, seq_id: int) -> int:
        """See `Engine.num_tokens`."""
        self._check_id(seq_id)
        return len(self._tokens[seq_id])

    def _check_id(self, seq_id: int) -> None:
        self._check_open()
        if not 0 <= seq_id < self.limits.max_sequences:
            raise InvalidBatchError(
                f"sequence {seq_id} of {self.limits.max_sequences}", return_code=-1
            )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("The engine is closed; open a new one.")

    def save(self, seq_id: int) -> bytes:
        """See `Engine.save`."""
        self._check_id(seq_id)
        payload = np.asarray(self._tokens[seq_id], dtype="<i4").tobytes()
        return _STATE_MAGIC + hashlib.sha256(payload).digest() + payload

    def state_bytes(self, seq_id: int) -> int:
        """See `Engine.state_bytes`."""
        return _STATE_HEADER_BYTES + 4 * self.num_tokens(seq_id)

    def check_state(self, state: bytes, num_tokens: int) -> None:
        """See `Engine.check_state`."""
        head, payload = state[:_STATE_HEADER_BYTES], state[_STATE_HEADER_BYTES:]
        is_whole = head == _STATE_MAGIC + hashlib.sha256(payload).digest()
        if not is_whole or len(payload) != 4 * num_tokens:
            raise SequenceError(f"not a state of {num_tokens} tokens: {len(state)} bytes.")

    def restore(
        self, seq_id: int, state: bytes, num_tokens: int, *, is_checked: bool = False
    ) -> None:
        """See `Engine.restore`."""
        if self.num_tokens(seq_id):
            raise SequenceError(f"sequence {seq_id} is in use; clear it before restoring.")
        if not is_checked:
            self.check_state(state, num_tokens)
        payload = state[_STATE_HEADER_BYTES:]
        if len(payload) != 4 * num_tokens:
            raise SequenceError(f"not a state of {num_tokens} tokens: {len(state)} bytes.")
        if num_tokens > self._ledger.free:
            raise SequenceError(f"{num_tokens} tokens, {self._ledger.free} cells free.")
        for token in np.frombuffer(payload, dtype="<i4").tolist():
            self._append(seq_id, token)

    def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
