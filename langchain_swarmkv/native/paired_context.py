"""Two contexts of one model, each with the attention kernel that suits its phase.

On some CPUs flash attention prefills faster, and plain attention decodes a fan-out several times
faster. Long chunks of a prompt are computed in a context with the one, and the finished state is
rewritten (`SequenceState.rewrite`) for the context with the other, where branches fork and decode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.errors import (
    DecodeError,
    DecodeFatalError,
    InvalidBatchError,
    SequenceError,
    UnsupportedModelError,
)
from langchain_swarmkv.native.context import ContextHandle, ContextSettings, Head
from langchain_swarmkv.native.model import ModelHandle
from langchain_swarmkv.native.sequence_state import SequenceState

__all__ = ["PairedContext"]

MIN_CHUNK_TOKENS = 64
"""A shorter chunk gains less than the prefix before it costs to bring over."""


class PairedContext(ContextHandle):
    """The context that decodes, and with it one that prefills; used like a single one.

    A sequence is **ahead** while the prefill context has all of its tokens and this one only those
    before the first long chunk. It stays so until it is used for anything else than prefill; then
    what is missing here is brought over, into cells of its own behind those that it shares.

    Raises:
        ModelLoadError: as for a single context.
        UnsupportedModelError: the state of this model's cache cannot be rewritten.
    """

    def __init__(self, model: ModelHandle, settings: ContextSettings) -> None:
        self._prefill: ContextHandle | None = None
        self._ahead: dict[int, int] = {}
        self._places: dict[int, tuple[ContextHandle, int]] = {}
        # One sequence more, through which what is brought over goes.
        plain = replace(settings, flash_attention=False, n_seq_max=settings.n_seq_max + 1)
        super().__init__(model, plain)
        self.n_seq_max = self._scratch = settings.n_seq_max
        try:
            n_ctx = min(settings.n_ctx, model.n_ctx_train)
            self._prefill = ContextHandle(
                model, replace(settings, flash_attention=True, n_ctx=n_ctx)
            )
            self._check_layout(model)
        except BaseException:
            self.close()
            raise

    def _check_layout(self, model: ModelHandle) -> None:
        super().decode([0], [0], [0], [])
        try:
            SequenceState.parse(super().save(0))
        except SequenceError as error:
            raise UnsupportedModelError(
                f"The KV cache of {model.path} cannot be rewritten for another attention kernel: "
                f"{error} Leave prefill_flash_attention off.",
                path=model.path,
            ) from error
        super().clear(0)

    @property
    def _prefiller(self) -> ContextHandle:
        assert self._prefill is not None
        return self._prefill

    def decode(
        self, tokens: list[int], positions: list[int], seq_ids: list[int], output_rows: list[int]
    ) -> None:
        """See `ContextHandle.decode`: long chunks in the prefill context, the rest in this one."""
        apart = self._long_chunks(seq_ids)
        for seq_id in set(seq_ids) - apart:
            self._bring_over(seq_id)
        self._places = {}
        rows = range(len(tokens))
        here = [row for row in rows if seq_ids[row] not in apart]
        there = [row for row in rows if seq_ids[row] in apart]
        batch = tokens, positions, seq_ids, set(output_rows)
        if here:
            super().decode(*self._part(self, here, *batch))
        if there:
            try:
                for seq_id in apart - self._ahead.keys():
                    self._lend(seq_id)
                self._prefiller.decode(*self._part(self._prefiller, there, *batch))
            except (DecodeError, SequenceError) as error:
                # What was computed here is in the cache already, so nothing can be tried again.
                raise DecodeFatalError(str(error), return_code=-2) from error
            for seq_id in apart:
                self._ahead[seq_id] = self._prefiller.num_tokens(seq_id)

    def _long_chunks(self, seq_ids: list[int]) -> set[int]:
        """The sequences of a batch to prefill apart, as far as there is room for them."""
        free = self._prefiller.n_ctx - sum(self._ahead.values())
        chosen = set()
        for seq_id, num_tokens in Counter(seq_ids).items():
            is_ahead = seq_id in self._ahead
            needed = num_tokens + (0 if is_ahead else super().num_tokens(seq_id))
            if num_tokens >= (2 if is_ahead else MIN_CHUNK_TOKENS) and needed <= free:
                free -= needed
                chosen.add(seq_id)
        return chosen

    def _part(
        self,
        context: ContextHandle,
        rows: list[int],
        tokens: list[int],
        positions: list[int],
        seq_ids: list[int],
        outputs: set[int],
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """These rows of a batch as a batch of their own; notes where their logits will be."""
        output_rows = []
        for place, row in enumerate(rows):
            if row in outputs:
                self._places[row] = context, place
                output_rows.append(place)
        return (
            [tokens[row] for row in rows],
            [positions[row] for row in rows],
            [seq_ids[row] for row in rows],
            output_rows,
        )

    def _lend(self, seq_id: int) -> None:
        """Copy what a sequence holds here to the prefill context."""
        if not super().num_tokens(seq_id):
            return
        state = SequenceState.parse(super().save(seq_id)).rewrite(transposed=False)
        if not self._prefiller.restore(seq_id, state):
            raise SequenceError(f"the prefill context refused the prefix of sequence {seq_id}.")

    def _bring_over(self, seq_id: int) -> None:
        """Let a sequence be ahead no longer: what it lacks here comes from the prefill context."""
        num_tokens = self._ahead.pop(seq_id, None)
        if num_tokens is None:
            return
        first = super().num_tokens(seq_id)
        state = SequenceState.parse(self._prefiller.save(seq_id))
        self._prefiller.clear(seq_id)
        missing = state.rewrite(transposed=True, first=first)
        if not super().restore(self._scratch, missing):
            raise DecodeFatalError(
                f"llama.cpp did not take {num_tokens - first} cells of sequence {seq_id} from the "
                "prefill context.",
                return_code=-2,
            )
        super().share(self._scratch, seq_id, first, num_tokens)
        super().clear(self._scratch)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """See `ContextHandle.logits`."""
        if row not in self._places:
            raise InvalidBatchError(f"row {row} of the last batch has no logits", return_code=-1)
        context, place = self._places[row]
        return ContextHandle.logits(context, place)

    def num_tokens(self, seq_id: int) -> int:
        """See `ContextHandle.num_tokens`."""
        return self._ahead.get(seq_id) or super().num_tokens(seq_id)

    def fork(self, source: int, target: int, num_tokens: int | None) -> None:
        """See `ContextHandle.fork`."""
        self._bring_over(source)
        super().fork(source, target, num_tokens)

    def move_down(self, holders: Sequence[int], first: int, end: int, scratch: int) -> bool:
        """See `ContextHandle.move_down`."""
        for holder in holders:
            self._bring_over(holder)
        return super().move_down(holders, first, end, scratch)

    def clear(self, seq_id: int) -> None:
        """Empty a sequence in both contexts.

        A decode that failed leaves cells in the prefill context of a sequence that is not ahead.
        """
        self._ahead.pop(seq_id, None)
        # NOTE: the prefill context has no scratch sequence, and such an id ends the process.
        if self._prefill is not None and seq_id != self._scratch:
            self._prefill.clear(seq_id)
        super().clear(seq_id)

    def state_size(self, seq_id: int) -> int:
        """See `ContextHandle.state_size`."""
        self._bring_over(seq_id)
        return super().state_size(seq_id)

    def save(self, seq_id: int, *, head: Head | None = None) -> bytes:
        """See `ContextHandle.save`."""
        self._bring_over(seq_id)
        return super().save(seq_id, head=head)

    def close(self) -> None:
        """Free both; harmless twice."""
        if self._prefill is not None:
            self._prefill.close()
        super().close()
