"""The bytes of a sequence's state in llama.cpp, and the same cells as the other kernel has them.

What `llama_state_seq_get_data` returns for a plain attention cache with one stream
(`state_write` in llama-kv-cache.cpp), little-endian:

    magic u32, sequence i32, streams u32 (1), cells u32; with no cells, nothing follows
    each cell      position i32, sequences u32 (1), sequence i32
    V transposed u32, layers u32
    each layer     K: type i32, row bytes u64; for each cell a row
    each layer     V in rows: type i32, row bytes u64; for each cell a row
                   V transposed: type i32, element bytes u32, elements u32; for each element its
                   values in all cells

Flash attention keeps V in rows, plain attention transposed, and nothing else differs: what one
kernel prefilled the other can decode. Other caches (window, recurrent, hybrid, without V, with more
data a cell) have other layouts, and are refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.errors import SequenceError

__all__ = ["LayerState", "SequenceState"]

Bytes = npt.NDArray[np.uint8]

_MAGIC = 0xAF143CD8
_HEADER = struct.Struct("<IiII")
_CELL = np.dtype([("position", "<i4"), ("num_sequences", "<u4"), ("sequence", "<i4")])
_LAYERS = struct.Struct("<II")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")
# Types whose elements stand alone, F32, F16 and BF16 (enum ggml_type, ggml.h), as words to move.
_WORDS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u4"),
    1: np.dtype("<u2"),
    30: np.dtype("<u2"),
}
# For each type the bits of an exponent that no value has which a model computes, as a word's value,
# and the bytes from one such word to the next: in quantised blocks (Q4_0, Q8_0) the scale alone.
# Of F32 and BF16 these are 2**97 and more, so that no product with a query overflows.
_EXPONENTS: dict[int, tuple[str, int, int]] = {
    0: ("<u4", 0x7000_0000, 4),
    1: ("<u2", 0x7C00, 2),
    30: ("<u2", 0x7000, 2),
    2: ("<u2", 0x7C00, 18),
    8: ("<u2", 0x7C00, 34),
}


@dataclass(frozen=True, eq=False)
class LayerState:
    """K and V of one layer, views of the state's bytes."""

    k_type: int
    """enum ggml_type, as `v_type`."""
    k: Bytes
    """Shape (cells, row bytes)."""
    v_type: int
    v: Bytes
    """Shape (cells, row bytes); transposed (elements, cells, element bytes)."""


@dataclass(frozen=True, eq=False)
class SequenceState:
    """A parsed state; it copies nothing, so the bytes must stay as they are."""

    seq_id: int
    """The sequence that was saved. A restore ignores it."""
    cells: npt.NDArray[Any]
    """Records of a cell, in the order of the pool: that of positions or not."""
    is_transposed: bool
    """Whether V is; False without cells, for then the bytes do not say."""
    layers: tuple[LayerState, ...]

    @classmethod
    def parse(cls, data: bytes | memoryview) -> SequenceState:
        """Read a state without copying it.

        Raises:
            SequenceError: the bytes are malformed, or belong to another kind of cache.
        """
        reader = _Reader(data)
        magic, seq_id, num_streams, num_cells = reader.fields(_HEADER)
        if magic != _MAGIC or num_streams != 1:
            raise SequenceError(
                f"no state of a plain attention cache: magic {magic:#x} (expected {_MAGIC:#x}), "
                f"{num_streams} streams (expected 1)."
            )
        cells = reader.take(num_cells * _CELL.itemsize).view(_CELL)
        _check_cells(cells, seq_id)
        transposed, num_layers = reader.fields(_LAYERS) if num_cells else (0, 0)
        if transposed > 1:
            raise SequenceError(f"the layout of V is {transposed}; expected was 0 or 1.")
        # A count that was made up ends at the end of the bytes: no layer is without any.
        keys = [reader.rows(num_cells) for _ in range(num_layers)]
        read_values = reader.columns if transposed else reader.rows
        values = [read_values(num_cells) for _ in range(num_layers)]
        reader.finish()
        layers = (LayerState(*k, *v) for k, v in zip(keys, values, strict=True))
        return cls(seq_id, cells, bool(transposed), tuple(layers))

    @property
    def num_cells(self) -> int:
        """Cells, one a token."""
        return len(self.cells)

    @property
    def shape(self) -> tuple[tuple[int, int, int, int], ...]:
        """For each layer the types of K and V and their bytes a cell.

        Alike for all states of a context, whatever its kernel.
        """
        return tuple(
            (layer.k_type, layer.k.shape[1], layer.v_type, layer.v.size // self.num_cells)
            for layer in self.layers
        )

    @property
    def is_finite(self) -> bool:
        """Whether all K and V are numbers that attention can mask.

        Plain attention adds minus infinity to what a sequence must not see, and multiplies its V
        by zero: infinities and what is no number go through both, into every sequence of the pool,
        even from cells that were freed.
        """
        return all(
            _is_finite(layer.k_type, layer.k) and _is_finite(layer.v_type, layer.v)
            for layer in self.layers
        )

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """Position of each cell, shape (cells,)."""
        positions: npt.NDArray[np.int32] = self.cells["position"]
        return positions

    def rewrite(self, *, transposed: bool, first: int = 0, end: int | None = None) -> bytes:
        """The cells at positions [first, end) as llama.cpp writes them in either layout.

        Cells keep their order, which llama.cpp does not mind: so there and back gives equal bytes,
        and cells that follow each other are copied in one piece.

        Args:
            transposed: The layout of V: True for plain attention, False for flash attention.
            first: The first position.
            end: The position after the last; None: all that follow.

        Raises:
            SequenceError: V is of a quantised type, which cannot be transposed.
        """
        cells = self._between(first, end)
        records = np.ascontiguousarray(self.cells[cells])
        parts: list[Any] = [_HEADER.pack(_MAGIC, self.seq_id, 1, len(records)), records]
        if len(records):
            parts.append(_LAYERS.pack(transposed, len(self.layers)))
            for layer in self.layers:
                parts += [_ROWS.pack(layer.k_type, layer.k.shape[1]), layer.k[cells]]
            for layer in self.layers:
                values = _by_cell(layer, self.is_transposed)[cells]
                parts += _v_parts(layer.v_type, values, transposed)
        return b"".join(parts)

    def _between(self, first: int, end: int | None) -> slice | npt.NDArray[np.intp]:
        """Index of the cells at these positions: a slice if they follow each other."""
        inside = self.positions >= first
        if end is not None:
            inside &= self.positions < end
        indices = np.flatnonzero(inside)
        if len(indices) and len(indices) == indices[-1] + 1 - indices[0]:
            return slice(indices[0], indices[-1] + 1)
        return indices


class _Reader:
    """Takes one piece of the bytes after the other; SequenceError where they end too early."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._bytes: Bytes = np.frombuffer(data, dtype=np.uint8)
        self._offset = 0

    def take(self, num_bytes: int) -> Bytes:
        start, self._offset = self._offset, self._offset + num_bytes
        if self._offset > len(self._bytes):
            raise SequenceError(
                f"the state ends after {len(self._bytes)} bytes, within a piece of {num_bytes} "
                f"bytes at {start}."
            )
        return self._bytes[start : self._offset]

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size).data)

    def rows(self, num_cells: int) -> tuple[int, Bytes]:
        """Type, and an array of shape (cells, row bytes)."""
        kind, row_bytes = self.fields(_ROWS)
        if row_bytes == 0 or row_bytes % _word(kind).itemsize:
            raise SequenceError(f"rows of {row_bytes} bytes cannot hold values of type {kind}.")
        return kind, self.take(num_cells * row_bytes).reshape(num_cells, row_bytes)

    def columns(self, num_cells: int) -> tuple[int, Bytes]:
        """Type, and an array of shape (elements, cells, element bytes)."""
        kind, element_bytes, num_elements = self.fields(_COLUMNS)
        if kind not in _WORDS or element_bytes != _WORDS[kind].itemsize or num_elements == 0:
            raise SequenceError(
                f"{num_elements} elements of {element_bytes} bytes and type {kind} in a transposed "
                "V; expected were some of type F32, F16 or BF16."
            )
        shape = num_elements, num_cells, element_bytes
        return kind, self.take(num_elements * num_cells * element_bytes).reshape(shape)

    def finish(self) -> None:
        left = len(self._bytes) - self._offset
        if left:
            raise SequenceError(
                f"{left} bytes follow the state of a plain attention cache; window, recurrent and "
                "hybrid caches have another layout."
            )


def _check_cells(cells: npt.NDArray[Any], seq_id: int) -> None:
    positions = cells["position"]
    if np.any(cells["num_sequences"] != 1) or np.any(cells["sequence"] != seq_id):
        raise SequenceError(f"not all of the {len(cells)} cells belong to sequence {seq_id} alone.")
    if np.any(positions < 0) or len(np.unique(positions)) != len(positions):
        raise SequenceError(f"a position among {len(cells)} cells is negative or there twice.")


def _is_finite(kind: int, values: Bytes) -> bool:
    word, exponent, stride = _EXPONENTS[kind]
    words = values.reshape(-1, stride)[:, : np.dtype(word).itemsize].view(word)
    return bool(np.max(words & exponent) < exponent)


def _word(kind: int) -> np.dtype[Any]:
    """What a row of values of this type is made of; bytes, where they come in blocks."""
    return _WORDS.get(kind, np.dtype(np.uint8))


def _by_cell(layer: LayerState, is_transposed: bool) -> npt.NDArray[Any]:
    """V as words, shape (cells, words)."""
    words = layer.v.view(_word(layer.v_type))
    return words.squeeze(2).T if is_transposed else words


def _v_parts(kind: int, values: npt.NDArray[Any], transposed: bool) -> list[Any]:
    """V with what stands before it, from words of shape (cells, words)."""
    num_words, word_bytes = values.shape[1], values.itemsize
    if not transposed:
        return [_ROWS.pack(kind, num_words * word_bytes), np.ascontiguousarray(values)]
    if kind not in _WORDS:
        raise SequenceError(
            f"V is of the quantised type {kind}, whose blocks span elements and cannot be "
            "transposed: only flash attention can use this state."
        )
    return [_COLUMNS.pack(kind, word_bytes, num_words), np.ascontiguousarray(values.T)]
