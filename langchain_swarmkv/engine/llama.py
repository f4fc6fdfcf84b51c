"""The engine on llama.cpp: one model, one context, one pool of cells for all sequences."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.config import EngineConfig, FlashAttention, KVType, SamplingParams
from langchain_swarmkv.engine.cells import CellLedger
from langchain_swarmkv.engine.contract import (
    Batch,
    Engine,
    EngineLimits,
    ModelFacts,
    Sampler,
    check_logits,
)
from langchain_swarmkv.engine.cores import available_cores
from langchain_swarmkv.engine.grammar import check_grammar
from langchain_swarmkv.engine.guide import GuideCompiler, GuideMatcher
from langchain_swarmkv.engine.identity import ModelIdentity
from langchain_swarmkv.engine.llama_tokenizer import LlamaTokenizer
from langchain_swarmkv.engine.weights import weights_digest
from langchain_swarmkv.errors import (
    DecodeFatalError,
    EngineClosedError,
    InvalidBatchError,
    NoRoomError,
    SequenceError,
    UnsupportedModelError,
)
from langchain_swarmkv.native.adapter import load_adapter
from langchain_swarmkv.native.context import ContextHandle, ContextSettings
from langchain_swarmkv.native.library import library_build
from langchain_swarmkv.native.model import ModelHandle
from langchain_swarmkv.native.paired_context import PairedContext
from langchain_swarmkv.native.sampler import Candidates, SamplerChain
from langchain_swarmkv.native.sequence_state import SequenceState

__all__ = ["LlamaEngine"]

# magic, digest of the identity, tokens, bytes of the native state, their checksum
_STATE_HEADER = struct.Struct("<8s32sQQ32s")
_STATE_MAGIC = b"SWARMKV2"
_CHECKSUM_COLUMNS = 4096
_KERNELS = {True: "flash attention", False: "plain attention", None: "llama.cpp's choice"}
_MAX_RUNNING_ON_CPU = 16
"""Each token attends over the cells of all that run, so more at once may take longer in all; see
docs/performance.md."""
_MOVE_COST_TOKENS_ON_CPU = 16
"""A cell takes about 20 us to save and restore, and 1.2 us of each token while it lies in the pool
(docs/performance.md). On GPUs neither was measured, so there nothing leaves early."""


class LlamaEngine(Engine):
    """See `Engine`. Loads in the constructor.

    Raises:
        ModelError: the file is missing or unusable, or the context cannot be made.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._model: ModelHandle | None = None
        self._context: ContextHandle | None = None
        self._ledger: CellLedger | None = None
        self._form: _StateForm | None = None
        self.tokenizer: LlamaTokenizer = LlamaTokenizer(config.model_path)
        self.guides = GuideCompiler(self.tokenizer)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="swarmkv-digest") as pool:
                # Reading a large file takes seconds, and so does loading it.
                self._open(config, [pool.submit(weights_digest, path) for path in config.files])
        except BaseException:
            self.close()
            raise

    def _open(self, config: EngineConfig, digests: Sequence[Future[str]]) -> None:
        self._model = model = ModelHandle(
            config.model_path,
            vocab_only=False,
            n_gpu_layers=config.n_gpu_layers,
            use_mmap=config.use_mmap,
        )
        if not model.is_decoder:
            raise UnsupportedModelError(
                f"{config.model_path} is not a decoder-only model; it cannot continue a prompt.",
                path=config.model_path,
            )
        for adapter in config.adapters:
            load_adapter(model, adapter.path, adapter.scale)
        settings = _context_settings(config)
        if config.prefill_flash_attention:
            context: ContextHandle = PairedContext(model, settings)
            # NOTE: neither of the two contexts knows whether the tokens of both fit into one pool.
            self._ledger = CellLedger(config.n_ctx)
        else:
            context = ContextHandle(model, settings)
        self._context = context
        self._candidates = Candidates(model.n_vocab)
        self._outputs: set[int] = set()
        self.device = config.device_name
        on_cpu = config.n_gpu_layers == 0
        if on_cpu:
            self.num_cores = max(settings.n_threads, settings.n_threads_batch)
        kv_bytes_per_token = self._measure_cell()
        self.limits = EngineLimits(
            num_cells=config.n_ctx,
            max_sequences=context.n_seq_max,
            max_batch_tokens=min(context.n_batch, config.n_batch),
            can_cut=model.can_cut,
            max_running=config.max_running
            or (_MAX_RUNNING_ON_CPU if on_cpu else context.n_seq_max),
            # A state that does not grow with its tokens slows down nobody.
            move_cost_tokens=_MOVE_COST_TOKENS_ON_CPU if on_cpu and kv_bytes_per_token else None,
        )
        architecture = model.metadata("general.architecture") or "unknown"
        self.facts = ModelFacts(
            name=config.model_path.stem,
            architecture=architecture,
            identity=_identity(
                config,
                [one.result() for one in digests],
                architecture,
                _rope(config, model, context.n_ctx),
                self.tokenizer.digest,
                # A cache that grows but is of another form holds a V that nobody can rewrite.
                kernel=_KERNELS[settings.flash_attention]
                if self._form is None and kv_bytes_per_token > 0
                else "",
            ),
            n_vocab=model.n_vocab,
            n_ctx_train=model.n_ctx_train,
            kv_bytes_per_token=kv_bytes_per_token,
        )

    def _measure_cell(self) -> int:
        """Bytes by which one more token grows a sequence's state: measured, for layouts differ.

        Also touches all weights once, so that the first request does not pay for reading the file.
        """
        self._empty_state_bytes = self._native.state_size(0)
        sizes = []
        for position in range(2):
            batch = Batch()
            batch.add(0, [0], position, want_logits=True)
            self.decode(batch)
            sizes.append(self._native.state_size(0))
        self._note_form(self._native.save(0))
        self.clear(0)
        return max(0, sizes[1] - sizes[0])

    def _note_form(self, state: bytes) -> None:
        """Learn from a state of ours how all must be laid out, if it is of a kind that is known."""
        with suppress(SequenceError):
            parsed = SequenceState.parse(state)
            self._form = _StateForm(parsed.is_transposed, parsed.shape)

    @property
    def _native(self) -> ContextHandle:
        if self._context is None:
            raise EngineClosedError("The engine is closed; open a new one.")
        return self._context

    @property
    def _loaded(self) -> ModelHandle:
        if self._model is None:
            raise EngineClosedError("The engine is closed; open a new one.")
        return self._model

    def decode(self, batch: Batch) -> None:
        """See `Engine.decode`."""
        self._validate(batch)
        self._outputs = set()
        if self._ledger is not None and len(batch) > self._ledger.free:
            raise NoRoomError(
                f"a batch of {len(batch)} tokens, {self._ledger.free} cells free.", return_code=1
            )
        self._native.decode(batch.tokens, batch.positions, batch.seq_ids, batch.output_rows)
        self._outputs = set(batch.output_rows)
        if self._ledger is not None:
            for seq_id, num_tokens in Counter(batch.seq_ids).items():
                self._ledger.append(seq_id, num_tokens)

    def _validate(self, batch: Batch) -> None:
        if not 0 < len(batch) <= self._native.n_batch:
            raise InvalidBatchError(
                f"a batch of {len(batch)} tokens; the limit is {self._native.n_batch}.",
                return_code=-1,
            )
        if min(batch.tokens) < 0 or max(batch.tokens) >= self.tokenizer.n_vocab:
            raise InvalidBatchError("a token id is outside the vocabulary.", return_code=-1)
        if any(not 0 <= row < len(batch) for row in batch.output_rows):
            raise InvalidBatchError("an output row is outside the batch.", return_code=-1)
        next_pos: dict[int, int] = {}
        for position, seq_id in zip(batch.positions, batch.seq_ids, strict=True):
            expected = next_pos.get(seq_id)
            if expected is None:
                expected = self.num_tokens(seq_id)
            if position != expected:
                raise InvalidBatchError(
                    f"position {position} for sequence {seq_id}, whose next is {expected}.",
                    return_code=-1,
                )
            next_pos[seq_id] = expected + 1

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """See `Engine.logits`."""
        native = self._native
        self._check_row(row)
        return np.array(native.logits(row))

    def _check_row(self, row: int) -> None:
        if row not in self._outputs:
            raise InvalidBatchError(f"row {row} of the last batch has no logits.", return_code=-1)

    def create_sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """See `Engine.create_sampler`."""
        model = self._loaded
        if params.grammar is not None:
            check_grammar(params.grammar)
        guide = None if params.guide is None else self.guides.matcher(params.guide)
        return _LlamaSampler(self, SamplerChain(model, params, prompt), guide)

    def output_logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a row of the last batch themselves, which the next `decode` overwrites."""
        native = self._native
        self._check_row(row)
        return native.logits(row)

    def sample_from(
        self, chain: SamplerChain, guide: GuideMatcher | None, logits: npt.NDArray[np.float32]
    ) -> int:
        """Let a chain choose among the tokens that the guide allows."""
        check_logits(logits, self._loaded.n_vocab)
        if guide is None:
            return chain.sample(logits, self._candidates)
        token_id = chain.sample(logits, self._candidates, guide.allowed())
        guide.accept(token_id)
        return token_id

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """See `Engine.fork`: `llama_memory_seq_cp` on a unified cache, which moves no bytes."""
        length = self.num_tokens(source)
        self._check_empty(target)
        if not 0 < num_tokens <= length:
            raise SequenceError(f"cannot fork {num_tokens} of the {length} tokens of {source}.")
        if num_tokens < length and not self.limits.can_cut:
            raise SequenceError(
                f"{self.facts.architecture} sequences can only be forked whole: "
                f"{num_tokens} of {length} tokens were asked for."
            )
        self._native.fork(source, target, None if num_tokens == length else num_tokens)
        if self._ledger is not None:
            self._ledger.fork(source, target, num_tokens)

    def move_down(self, holders: Sequence[int], first: int, end: int, scratch: int) -> None:
        """See `Engine.move_down`."""
        self._check_empty(scratch)
        if not 0 <= first < end <= min(map(self.num_tokens, holders)):
            raise SequenceError(f"positions {first} to {end} are not in all of {list(holders)}.")
        if not self._native.move_down(holders, first, end, scratch):
            raise DecodeFatalError(
                f"llama.cpp did not take back {end - first} cells of sequences {list(holders)}.",
                return_code=-2,
            )

    def _check_empty(self, seq_id: int) -> None:
        if self.num_tokens(seq_id):
            raise SequenceError(f"sequence {seq_id} is in use; clear it first.")

    def clear(self, seq_id: int) -> None:
        """See `Engine.clear`.

        Raises:
            DecodeFatalError: a state from outside has put something there that llama.cpp cannot
                remove.
        """
        self._check_id(seq_id)
        self._native.clear(seq_id)
        if self._ledger is not None:
            self._ledger.clear(seq_id)
        # NOTE: positions of states whose form is not known are not looked at before llama.cpp takes
        # them, and it never removes 2^31 - 1 or negative ones. The count of tokens, which is that
        # of one part of such a cache, may be 0, and the next sequence of this id would see them.
        if self._form is None and self._native.state_size(seq_id) != self._empty_state_bytes:
            raise DecodeFatalError(
                f"the cache of sequence {seq_id} cannot be emptied; open a new engine.",
                return_code=-2,
            )

    def num_tokens(self, seq_id: int) -> int:
        """See `Engine.num_tokens`."""
        self._check_id(seq_id)
        return self._native.num_tokens(seq_id)

    def _check_id(self, seq_id: int) -> None:
        if not 0 <= seq_id < self._native.n_seq_max:
            raise InvalidBatchError(
                f"sequence {seq_id}; this context has {self._native.n_seq_max}.", return_code=-1
            )

    def save(self, seq_id: int) -> bytes:
        """See `Engine.save`."""
        num_tokens = self.num_tokens(seq_id)
        identity = bytes.fromhex(self.facts.identity.digest)

        def header(state: memoryview) -> bytes:
            return _STATE_HEADER.pack(
                _STATE_MAGIC, identity, num_tokens, len(state), _checksum(state)
            )

        return self._native.save(seq_id, head=(_STATE_HEADER.size, header))

    def state_bytes(self, seq_id: int) -> int:
        """See `Engine.state_bytes`."""
        self._check_id(seq_id)
        return _STATE_HEADER.size + self._native.state_size(seq_id)

    def check_state(self, state: bytes, num_tokens: int) -> None:
        """See `Engine.check_state`."""
        self._checked_state(state, num_tokens, is_checked=False)

    def restore(
        self, seq_id: int, state: bytes, num_tokens: int, *, is_checked: bool = False
    ) -> None:
        """See `Engine.restore`. All bytes are checked before llama.cpp sees one: it has asserts."""
        self._check_empty(seq_id)
        payload = self._checked_state(state, num_tokens, is_checked=is_checked)
        if not self._native.restore(seq_id, payload) or self.num_tokens(seq_id) != num_tokens:
            self.clear(seq_id)
            raise SequenceError(f"llama.cpp refused a state of {num_tokens} tokens.")
        if self._ledger is not None:
            self._ledger.append(seq_id, num_tokens)

    def _checked_state(self, state: bytes, num_tokens: int, *, is_checked: bool) -> memoryview:
        if len(state) < _STATE_HEADER.size:
            raise SequenceError(f"a state of {len(state)} bytes is too short to have a header.")
        magic, identity, saved_tokens, num_bytes, checksum = _STATE_HEADER.unpack_from(state)
        if magic != _STATE_MAGIC:
            raise SequenceError("not a state that this package saved.")
        if identity.hex() != self.facts.identity.digest:
            raise SequenceError("the state belongs to another model or to other settings.")
        payload = memoryview(state)[_STATE_HEADER.size :]
        if saved_tokens != num_tokens or num_bytes != len(payload):
            raise SequenceError(
                f"the state holds {saved_tokens} tokens in {num_bytes} bytes; expected were "
                f"{num_tokens} tokens, and there are {len(payload)} bytes."
            )
        if not is_checked and _checksum(payload) != checksum:
            raise SequenceError("the state is damaged: its checksum differs.")
        return self._in_our_form(payload, num_tokens, is_checked=is_checked)

    def _in_our_form(self, payload: memoryview, num_tokens: int, *, is_checked: bool) -> memoryview:
        """The state as this context's attention kernel keeps it.

        Its checksum was right; that its form is, too, is looked at once more, for who can write a
        file can write any checksum, and llama.cpp has asserts on this path.
        """
        if self._form is None:
            return payload  # a cache of another kind, whose form is llama.cpp's alone
        state = SequenceState.parse(payload)
        is_whole = np.array_equal(np.sort(state.positions), np.arange(num_tokens))
        if not is_whole or state.shape != self._form.shape:
            raise SequenceError(
                f"the state has {state.num_cells} cells and {len(state.layers)} layers, and they "
                f"are not those of {num_tokens} tokens of this model."
            )
        if not is_checked and not state.is_finite:
            raise SequenceError("the state holds what is no number, which no model computes.")
        if state.is_transposed == self._form.is_transposed:
            return payload
        return memoryview(state.rewrite(transposed=self._form.is_transposed))

    def close(self) -> None:
        """See `Engine.close`."""
        if self._context is not None:
            self._context.close()
        if self._model is not None:
            self._model.close()
        self._context = self._model = None
        self.tokenizer.close()


class _StateForm(NamedTuple):
    """What all states of a context have in common, where their layout is known."""

    is_transposed: bool
    shape: tuple[tuple[int, int, int, int], ...]


class _LlamaSampler(Sampler):
    def __init__(
        self, engine: LlamaEngine, chain: SamplerChain, guide: GuideMatcher | None
    ) -> None:
        self._engine = engine
        self._chain = chain
        self._guide = guide
        self.seed = chain.seed

    def sample(self, row: int) -> int:
        return self.sample_from(self._engine.output_logits(row))

    def sample_from(self, logits: npt.NDArray[np.float32]) -> int:
        return self._engine.sample_from(self._chain, self._guide, logits)

    def close(self) -> None:
        self._chain.close()


def _checksum(state: memoryview) -> bytes:
    """SHA-256 over the sums of the 64-bit words that share a column of 32 KiB wide rows.

    It takes a quarter of the time of a digest of all bytes, and what damages files or buffers does
    not leave every sum as it was. No protection from someone who means harm: stores have digests.
    """
    num_rows = len(state) // (8 * _CHECKSUM_COLUMNS)
    words = np.frombuffer(state, dtype="<u8", count=num_rows * _CHECKSUM_COLUMNS)
    sums = words.reshape(num_rows, _CHECKSUM_COLUMNS).sum(axis=0, dtype=np.uint64)
    digest = hashlib.sha256(sums.tobytes())
    digest.update(state[words.nbytes :])
    return digest.digest()


def _context_settings(config: EngineConfig) -> ContextSettings:
    n_threads = config.n_threads or available_cores()
    return ContextSettings(
        n_ctx=config.n_ctx,
        n_batch=config.n_batch,
        n_ubatch=config.n_ubatch or config.n_batch,
        n_seq_max=config.max_sequences,
        n_threads=n_threads,
        n_threads_batch=config.n_threads_batch or n_threads,
        flash_attention=_flash_attention(config),
        kv_type_k=config.kv_type_k.value,
        kv_type_v=config.kv_type_v.value,
        rope_freq_base=config.rope_freq_base,
        rope_freq_scale=config.rope_freq_scale,
    )


def _flash_attention(config: EngineConfig) -> bool | None:
    if config.flash_attention is not FlashAttention.AUTO:
        return config.flash_attention is FlashAttention.ON
    if config.kv_type_v in (KVType.Q8_0, KVType.Q4_0):
        return True
    return False if config.n_gpu_layers == 0 else None


def _identity(
    config: EngineConfig,
    digests: Sequence[str],
    architecture: str,
    rope: str,
    tokenizer: str,
    *,
    kernel: str,
) -> ModelIdentity:
    """The digests are those of `config.files`."""
    num_shards = len(digests) - len(config.adapters)
    shards, of_adapters = digests[:num_shards], digests[num_shards:]
    return ModelIdentity(
        weights=(
            shards[0] if num_shards == 1 else hashlib.sha256("".join(shards).encode()).hexdigest()
        ),
        architecture=architecture,
        tokenizer=tokenizer,
        kv_type_k=config.kv_type_k.value,
        kv_type_v=config.kv_type_v.value,
        rope=rope,
        llama_cpp=library_build(),
        adapters=", ".join(
            f"{digest} x {adapter.scale}"
            for digest, adapter in zip(of_adapters, config.adapters, strict=True)
        ),
        kernel=kernel,
    )


def _rope(config: EngineConfig, model: ModelHandle, n_ctx: int) -> str:
    base, scale = config.rope_freq_base, config.rope_freq_scale
    rope = f"base {base or 'of the model'}, scale {scale or 'of the model'}"
    architecture = model.metadata("general.architecture")
    bound = model.metadata(f"{architecture}.rope.scaling.original_context_length")
    if bound is None:
        return rope
    # LongRoPE: by the size of the context, llama.cpp picks one of two sets of factors for all
    # positions (get_rope_factors, src/llama-model.cpp).
    return f"{rope}, {'long' if n_ctx > int(bound) else 'short'} context"
