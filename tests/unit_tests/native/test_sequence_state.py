"""Sequence states: read to the last byte, rewritten for the other kernel, taken by llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_swarmkv.errors import SequenceError
from langchain_swarmkv.native.sequence_state import SequenceState
from tests.support.raw import Chunk, DecodeRefusedError, Logits, RawContext, RawModel
from tests.support.tiny_gguf import ARCHITECTURES, ATTENTION_ARCHITECTURES, HEAD_DIM, N_HEAD_KV
from tests.support.tolerances import F32_ROUNDING, FLASH_ROUNDING

NUM_CELLS = 512
N_EMBD_V = N_HEAD_KV * HEAD_DIM
F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30  # enum ggml_type; llama_cpp does not name all of them
KV_TYPES = [(F32, F32), (F16, F16), (BF16, BF16), (Q8_0, F16), (F16, BF16)]

_rng = np.random.default_rng(11)


def random_text(length: int) -> list[int]:
    return [int(token) for token in _rng.integers(32, 127, length)]


DOCUMENT = random_text(100)
SUFFIX = random_text(20)
ANSWER = random_text(4)


def open_context(
    model: RawModel, flash: bool, kv_types: tuple[int, int] = (F32, F32)
) -> RawContext:
    k, v = kv_types
    return RawContext(model, NUM_CELLS, n_seq_max=4, flash_attention=flash, kv_type=k, kv_type_v=v)


def continued(context: RawContext, seq_id: int, start: int) -> Logits:
    """Logits after each token of the answer."""
    rows = [context.decode([Chunk(seq_id, [t], start + i)]) for i, t in enumerate(ANSWER)]
    return np.concatenate(rows)


def rewritten(state: bytes, *, transposed: bool, first: int = 0, end: int | None = None) -> bytes:
    return SequenceState.parse(state).rewrite(transposed=transposed, first=first, end=end)


class Kernels(NamedTuple):
    """Whether the context that prefills has flash attention, and that which decodes."""

    prefill: bool
    decode: bool

    def assert_close(self, found: Logits, expected: Logits) -> None:
        # Two values swapped in each cell move logits by over 2, another token by over 9; that the
        # bytes are right is shown on bytes.
        tolerance = F32_ROUNDING if self.prefill == self.decode else FLASH_ROUNDING
        assert np.abs(found - expected).max() < tolerance


@pytest.fixture(params=ATTENTION_ARCHITECTURES)
def attention_model(request: pytest.FixtureRequest, tiny_gguf: Callable[..., Path]) -> Path:
    """Each architecture with a plain attention cache."""
    return tiny_gguf(request.param)


@pytest.fixture(
    params=[Kernels(True, False), Kernels(False, True), Kernels(False, False)],
    ids=["flash-plain", "plain-flash", "plain-plain"],
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Both ways, and one kernel alone, where no rounding hides anything."""
    kernels: Kernels = request.param
    return kernels


@pytest.fixture(params=[True, False], ids=["from_flash", "from_plain"])
def from_flash(request: pytest.FixtureRequest) -> bool:
    """Both ways: which kernel prefills."""
    return bool(request.param)


def test_a_rewritten_state_continues_as_if_prefilled_there(
    attention_model: Path, kernels: Kernels
) -> None:
    """Prefilled by one kernel, decoded by the other; against the other alone."""
    with (
        RawModel(attention_model) as model,
        open_context(model, kernels.prefill) as prefill,
        open_context(model, kernels.decode) as decode,
        open_context(model, kernels.decode) as alone,
    ):
        prefill.prefill(0, DOCUMENT)
        state = prefill.save(0)
        # Nothing but the layout is in the way.
        assert decode.restore(1, state) is (kernels.prefill == kernels.decode)
        assert decode.restore(1, rewritten(state, transposed=not kernels.decode))
        assert decode.positions(1) == (0, len(DOCUMENT) - 1)
        alone.prefill(0, DOCUMENT)
        size = len(DOCUMENT)
        kernels.assert_close(continued(decode, 1, size), continued(alone, 0, size))


@pytest.mark.parametrize("kv_types", KV_TYPES, ids=["f32", "f16", "bf16", "q8_0-f16", "f16-bf16"])
def test_rewritten_bytes_are_those_that_llama_cpp_writes(
    tiny_llama: Path, kv_types: tuple[int, int], from_flash: bool
) -> None:
    """In every part that no kernel has touched; and all of it comes out of a context as it went in.

    Layer 0 sees embeddings only: there its K and V have the same bits whichever kernel ran.
    """
    with (
        RawModel(tiny_llama) as model,
        open_context(model, from_flash, kv_types) as source,
        open_context(model, not from_flash, kv_types) as target,
    ):
        source.prefill(0, DOCUMENT)
        target.prefill(0, DOCUMENT)
        mine, theirs = rewritten(source.save(0), transposed=from_flash), target.save(0)
        assert len(mine) == len(theirs)
        found, expected = SequenceState.parse(mine), SequenceState.parse(theirs)
        assert found.is_transposed is expected.is_transposed is from_flash
        assert np.array_equal(found.cells, expected.cells)
        assert [(x.k_type, x.v_type, x.k.shape, x.v.shape) for x in found.layers] == [
            (x.k_type, x.v_type, x.k.shape, x.v.shape) for x in expected.layers
        ]
        assert np.array_equal(found.layers[0].k, expected.layers[0].k)
        assert np.array_equal(found.layers[0].v, expected.layers[0].v)
        target.clear(0)
        assert target.restore(0, mine)
        assert target.save(0) == mine


def test_there_and_back_gives_equal_bytes(attention_model: Path, from_flash: bool) -> None:
    """And the same layout again gives a copy."""
    with RawModel(attention_model) as model, open_context(model, from_flash, (F16, F16)) as context:
        context.prefill(0, DOCUMENT)
        state = context.save(0)
    there = rewritten(state, transposed=from_flash)
    assert there != state
    assert rewritten(there, transposed=not from_flash) == state
    assert rewritten(state, transposed=not from_flash) == state


def test_arrays_are_views_of_the_bytes(tiny_llama: Path, from_flash: bool) -> None:
    """Shapes and types as said, and no copy; the bytes may start anywhere in a larger buffer."""
    with RawModel(tiny_llama) as model, open_context(model, from_flash, (F16, F16)) as context:
        context.prefill(0, DOCUMENT)
        state = context.save(0)
    buffer = np.frombuffer(b"\0" + state, dtype=np.uint8)
    parsed = SequenceState.parse(memoryview(buffer)[1:])
    assert parsed.seq_id == 0
    assert parsed.num_cells == len(DOCUMENT)
    assert parsed.positions.dtype == np.int32
    assert parsed.positions.tolist() == list(range(len(DOCUMENT)))
    rows, columns = (len(DOCUMENT), 2 * N_EMBD_V), (N_EMBD_V, len(DOCUMENT), 2)
    assert len(parsed.layers) == 2
    for layer in parsed.layers:
        assert (layer.k_type, layer.v_type) == (F16, F16)
        assert (layer.k.shape, layer.v.shape) == (rows, rows if from_flash else columns)
        assert np.shares_memory(layer.k, buffer)
        assert np.shares_memory(layer.v, buffer)
    assert parsed.rewrite(transposed=from_flash) == rewritten(state, transposed=from_flash)


PREFIX = len(DOCUMENT)
WHOLE = [*DOCUMENT, *SUFFIX]


def saved_elsewhere(model: RawModel, flash: bool, tokens: Sequence[int]) -> bytes:
    """State of tokens that were prefilled in a context of their own."""
    with open_context(model, flash) as context:
        context.prefill(0, tokens)
        return context.save(0)


def expected_of(model: RawModel, flash: bool, tokens: Sequence[int]) -> Logits:
    """What `continued` gives where nothing was moved or shared."""
    with open_context(model, flash) as context:
        context.prefill(0, tokens)
        return continued(context, 0, len(tokens))


def test_a_slice_completes_a_shared_prefix(attention_model: Path, kernels: Kernels) -> None:
    """Restored beside it and shared into it: the prefix keeps its cells, nothing is there twice."""
    with RawModel(attention_model) as model, open_context(model, kernels.decode) as context:
        context.prefill(0, DOCUMENT)
        context.fork(0, 1)
        state = saved_elsewhere(model, kernels.prefill, WHOLE)
        part = rewritten(state, transposed=not kernels.decode, first=PREFIX)
        assert context.restore(2, part)
        assert context.positions(2) == (PREFIX, len(WHOLE) - 1)
        context.share(2, 1, PREFIX, len(WHOLE))
        context.clear(2)
        assert context.positions(1) == (0, len(WHOLE) - 1)
        expected = expected_of(model, kernels.decode, WHOLE)
        kernels.assert_close(continued(context, 1, len(WHOLE)), expected)
        assert context.positions(0) == (0, PREFIX - 1)
        # All other cells are free, and no more than those.
        context.prefill(3, random_text(NUM_CELLS - len(WHOLE) - len(ANSWER)))
        with pytest.raises(DecodeRefusedError, match="returned 1"):
            context.prefill(2, random_text(1))


def test_a_slice_restored_into_its_target_takes_the_prefix_afterwards(
    attention_model: Path, kernels: Kernels
) -> None:
    """The same without another sequence: the upper part first, then the fork below it."""
    with RawModel(attention_model) as model, open_context(model, kernels.decode) as context:
        context.prefill(0, DOCUMENT)
        state = saved_elsewhere(model, kernels.prefill, WHOLE)
        part = rewritten(state, transposed=not kernels.decode, first=PREFIX)
        assert context.restore(1, part)
        context.fork(0, 1, PREFIX)
        assert context.positions(1) == (0, len(WHOLE) - 1)
        expected = expected_of(model, kernels.decode, WHOLE)
        kernels.assert_close(continued(context, 1, len(WHOLE)), expected)


def test_a_restore_needs_no_cells_that_follow_each_other(
    tiny_llama: Path, kernels: Kernels
) -> None:
    """80 free cells, no two side by side, take 80 tokens; a state of 81 is refused."""
    tokens = random_text(80)
    with RawModel(tiny_llama) as model, open_context(model, kernels.decode) as context:
        for position in range(len(tokens)):
            context.decode([Chunk(0, [65], position), Chunk(3, [66], position)])
        context.prefill(2, random_text(NUM_CELLS - 2 * len(tokens)))
        context.clear(3)
        transposed = not kernels.decode
        more = saved_elsewhere(model, kernels.prefill, [*tokens, 65])
        assert not context.restore(3, rewritten(more, transposed=transposed))
        assert context.positions(3) == (-1, -1)
        state = saved_elsewhere(model, kernels.prefill, tokens)
        assert context.restore(3, rewritten(state, transposed=transposed))
        context.clear(2)
        expected = expected_of(model, kernels.decode, tokens)
        kernels.assert_close(continued(context, 3, len(tokens)), expected)


def scattered_state(model: RawModel, flash: bool, tokens: Sequence[int]) -> bytes:
    """Of 120 tokens: positions 30 to 69 lie below the first 30, which lie in every second cell."""
    with open_context(model, flash) as context:
        context.prefill(1, random_text(40))
        for position, token in enumerate(tokens[:30]):
            context.decode([Chunk(0, [token], position), Chunk(2, [66], position)])
        context.clear(1)
        context.decode([Chunk(0, tokens[30:], 30)])
        state = context.save(0)
    positions = [*range(30, 70), *range(30), *range(70, 120)]
    assert SequenceState.parse(state).positions.tolist() == positions
    return state


def test_cells_may_lie_anywhere_in_any_order(tiny_llama: Path, kernels: Kernels) -> None:
    """Scattered cells, later positions below earlier ones: order is kept, slices are right."""
    tokens = random_text(120)
    transposed = not kernels.decode
    with RawModel(tiny_llama) as model, open_context(model, kernels.decode) as context:
        state = scattered_state(model, kernels.prefill, tokens)
        expected = expected_of(model, kernels.decode, tokens)
        there = rewritten(state, transposed=transposed)
        assert np.array_equal(SequenceState.parse(there).cells, SequenceState.parse(state).cells)
        assert rewritten(there, transposed=not kernels.prefill) == state

        assert context.restore(0, there)
        kernels.assert_close(continued(context, 0, 120), expected)
        context.clear(0)
        for seq_id, first, end in ((1, 0, 20), (2, 20, 90), (3, 90, None)):
            assert context.restore(
                seq_id, rewritten(state, transposed=transposed, first=first, end=end)
            )
            context.share(seq_id, 0, -1, -1)
            context.clear(seq_id)
        assert context.positions(0) == (0, 119)
        kernels.assert_close(continued(context, 0, 120), expected)


@pytest.mark.parametrize(("first", "end"), [(100, None), (5, 5), (7, 3), (0, 0)])
def test_a_slice_without_cells_is_an_empty_state(tiny_llama: Path, first: int, end: int) -> None:
    """The bytes that llama.cpp writes for a sequence without cells; they can be read, too."""
    with RawModel(tiny_llama) as model, open_context(model, False) as context:
        context.prefill(0, DOCUMENT)
        empty = rewritten(context.save(0), transposed=True, first=first, end=end)
        context.clear(0)
        assert empty == context.save(0)
    assert SequenceState.parse(empty).num_cells == 0
    assert rewritten(empty, transposed=False) == empty


NO_NUMBERS: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    F32: ((1e28, -1e28, 0.0), (np.inf, -np.inf, np.nan, 1e38)),
    F16: ((65504.0, -65504.0), (np.inf, -np.inf, np.nan)),
    Q8_0: ((65504.0, -65504.0), (np.inf, -np.inf, np.nan)),
    Q4_0: ((65504.0, -65504.0), (np.inf, -np.inf, np.nan)),
}
"""For each type what K may hold, in a block the scale, and what goes through attention's mask."""


@pytest.mark.parametrize("kv_type", NO_NUMBERS)
def test_what_is_no_number_is_seen_in_every_layer(tiny_llama: Path, kv_type: int) -> None:
    """The first value of K and of V in each; large ones that a model may compute pass."""
    with (
        RawModel(tiny_llama) as model,
        RawContext(model, 256, kv_type=kv_type, flash_attention=True) as context,
    ):
        context.prefill(0, list(range(40, 60)))
        data = context.save(0)
    assert SequenceState.parse(data).is_finite
    fine, wrong = NO_NUMBERS[kv_type]
    width = np.float32 if kv_type == F32 else np.float16
    for layer in SequenceState.parse(data).layers:
        for values in (layer.k, layer.v):
            offset = data.index(values[0].tobytes())
            for number in (*fine, *wrong):
                changed = bytearray(data)
                word = np.array(number, dtype=width).tobytes()
                changed[offset : offset + len(word)] = word
                assert SequenceState.parse(bytes(changed)).is_finite == (number in fine)


def test_a_quantised_v_cannot_be_transposed(tiny_llama: Path) -> None:
    """It can be cut, and restored into flash attention."""
    with RawModel(tiny_llama) as model, open_context(model, True, (Q8_0, Q8_0)) as context:
        context.prefill(0, DOCUMENT)
        state = context.save(0)
        with pytest.raises(SequenceError, match=r"quantised type 8.*flash attention"):
            rewritten(state, transposed=True)
        part = rewritten(state, transposed=False, end=40)
        assert rewritten(state, transposed=False) == state
        assert context.restore(1, part)
        assert context.positions(1) == (0, 39)
        assert context.save(1)[8:16] == part[8:16]
        assert np.array_equal(
            SequenceState.parse(part).layers[1].v, SequenceState.parse(state).layers[1].v[:40]
        )


OTHER_CACHES = [name for name in ARCHITECTURES if name not in ATTENTION_ARCHITECTURES]


@pytest.mark.parametrize("architecture", OTHER_CACHES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 100])
@pytest.mark.parametrize("flash", [False, True])
def test_other_caches_are_refused(
    tiny_gguf: Callable[..., Path], architecture: str, num_tokens: int, flash: bool
) -> None:
    """A window's, a recurrent and a hybrid cache; also where their bytes start like ours."""
    with RawModel(tiny_gguf(architecture)) as model, open_context(model, flash) as context:
        if num_tokens:
            context.prefill(0, DOCUMENT[:num_tokens])
        with pytest.raises(SequenceError):
            SequenceState.parse(context.save(0))


def test_a_cache_with_several_streams_is_refused(tiny_llama: Path) -> None:
    """Their cells would follow stream by stream."""
    state = bytearray(synthetic_state(False, F16, F16))
    state[8:12] = (2).to_bytes(4, "little")
    with pytest.raises(SequenceError, match="2 streams"):
        SequenceState.parse(bytes(state))


@cache
def synthetic_state(transposed: bool, k_type: int, v_type: int) -> bytes:
    """Three layers, five cells in no order, written field by field as llama.cpp does."""
    row_bytes = {F32: 128, F16: 64, BF16: 64, Q8_0: 34}
    data = struct.pack("<IiII", 0xAF143CD8, 3, 1, 5)
    for position in (9, 2, 3, 4, 7):
        data += struct.pack("<iIi", position, 1, 3)
    data += struct.pack("<II", transposed, 3)
    rng = np.random.default_rng(k_type + v_type)
    for _ in range(3):
        data += struct.pack("<iQ", k_type, row_bytes[k_type]) + rng.bytes(5 * row_bytes[k_type])
    for _ in range(3):
        if transposed:
            data += struct.pack("<iII", v_type, row_bytes[v_type] // 32, 32)
        else:
            data += struct.pack("<iQ", v_type, row_bytes[v_type])
        data += rng.bytes(5 * row_bytes[v_type])
    return data


SYNTHETIC = [
    synthetic_state(transposed, k_type, v_type)
    for transposed, k_type, v_type in [
        (False, F32, F32),
        (True, F16, F16),
        (False, Q8_0, Q8_0),
        (True, Q8_0, BF16),
    ]
]


@settings(deadline=None)
@given(st.sampled_from(SYNTHETIC), st.integers(0, 10), st.integers(0, 10))
def test_slices_hold_the_values_of_their_cells(state: bytes, first: int, end: int) -> None:
    """Element by element, for cells in any order and with gaps, in both layouts."""
    parsed = SequenceState.parse(state)
    chosen = [i for i, p in enumerate(parsed.positions.tolist()) if first <= p < end]
    for transposed in (False, True):
        if transposed and parsed.layers[0].v_type == Q8_0:
            continue
        part = SequenceState.parse(parsed.rewrite(transposed=transposed, first=first, end=end))
        assert part.positions.tolist() == parsed.positions[chosen].tolist()
        assert len(part.layers) == (3 if chosen else 0)
        for layer, whole in zip(part.layers, parsed.layers, strict=False):
            assert [row.tobytes() for row in layer.k] == [whole.k[i].tobytes() for i in chosen]
            for row, i in enumerate(chosen):
                found = layer.v[:, row] if transposed else layer.v[row]
                expected = whole.v[:, i] if parsed.is_transposed else whole.v[i]
                assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("state", SYNTHETIC)
def test_every_truncation_is_refused(state: bytes) -> None:
    """At every byte, and so is a byte too many."""
    SequenceState.parse(state)
    for size in range(len(state)):
        with pytest.raises(SequenceError):
            SequenceState.parse(memoryview(state)[:size])
    with pytest.raises(SequenceError, match="1 bytes follow"):
        SequenceState.parse(state + b"\0")


FIELDS = [
    (0, 0xAF143CD9, "magic"),
    (4, 5, "sequence 5 alone"),
    (8, 0, "0 streams"),
    (12, 4, "rows of|elements of|layout of V|cells"),
    (12, 0xFFFFFFFF, "the state ends"),
    (16, 0xFFFFFFFF, "negative"),
    (16, 2, "there twice"),
    (20, 0, "sequence 3 alone"),
    (24, 2, "sequence 3 alone"),
    (76, 2, "layout of V is 2"),
    (80, 0, "bytes follow"),
    (80, 2, "rows of|elements of|bytes follow|ends after"),
    (80, 0xFFFFFFFF, "rows of|the state ends"),
    (88, 0, "rows of 0 bytes"),
    (92, 0x7FFFFFFF, "the state ends"),
]


@pytest.mark.parametrize(("offset", "value", "message"), FIELDS)
@pytest.mark.parametrize("state", [SYNTHETIC[0], SYNTHETIC[1]], ids=["rows", "transposed"])
def test_every_field_is_checked(state: bytes, offset: int, value: int, message: str) -> None:
    """Before it is used as a size or a count."""
    damaged = state[:offset] + value.to_bytes(4, "little") + state[offset + 4 :]
    with pytest.raises(SequenceError, match=message):
        SequenceState.parse(damaged)


@pytest.mark.parametrize(("field", "value"), [(0, Q8_0), (0, F32), (4, 4), (4, 0), (8, 0), (8, 33)])
def test_the_header_of_a_transposed_v_is_checked(field: int, value: int) -> None:
    """Only types whose elements stand alone, of their size, and some of them."""
    state = synthetic_state(True, F16, F16)
    offset = 16 + 5 * 12 + 8 + 3 * (12 + 5 * 64) + field
    damaged = state[:offset] + value.to_bytes(4, "little") + state[offset + 4 :]
    with pytest.raises(SequenceError):
        SequenceState.parse(damaged)


ONE_CELL = struct.pack("<IiIIiIi", 0xAF143CD8, 0, 1, 1, 0, 1, 0)


def test_rows_hold_whole_values() -> None:
    """A row of five bytes is none of F16 values."""
    data = ONE_CELL + struct.pack("<IIiQ", 0, 1, F16, 5) + bytes(5)
    with pytest.raises(SequenceError, match="rows of 5 bytes"):
        SequenceState.parse(data)


def test_a_v_without_elements_is_refused() -> None:
    """Though its size would fit."""
    data = ONE_CELL + struct.pack("<IIiQ", 1, 1, F16, 2) + bytes(2)
    SequenceState.parse(data + struct.pack("<iII", F16, 2, 1) + bytes(2))
    with pytest.raises(SequenceError, match="0 elements"):
        SequenceState.parse(data + struct.pack("<iII", F16, 2, 0))


def read_and_rewrite(data: bytes) -> None:
    """SequenceError is the only error, and what is accepted is accounted for to the last byte."""
    try:
        parsed = SequenceState.parse(data)
        assert parsed.rewrite(transposed=parsed.is_transposed) == data
        parsed.rewrite(transposed=not parsed.is_transposed, first=3)
    except SequenceError:
        pass


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.sampled_from(SYNTHETIC),
    st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=4),
    st.integers(0, 40),
)
def test_damaged_states_raise_nothing_else(
    state: bytes, changes: Sequence[tuple[int, int]], cut: int
) -> None:
    """Changed bytes, most of them in the headers, and a cut end."""
    data = bytearray(state)
    for offset, value in changes:
        data[offset] = value
    read_and_rewrite(bytes(data[: len(data) - cut]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_raise_nothing_else(data: bytes, with_magic: bool) -> None:
    """Also behind the right magic."""
    read_and_rewrite(struct.pack("<IiI", 0xAF143CD8, 0, 1) + data if with_magic else data)
