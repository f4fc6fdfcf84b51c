"""Settings: validated when made, frozen afterwards, unknown names refused.

Two objects are enough: `EngineConfig` says which context llama.cpp builds (equal settings mean
one shared engine), `SamplingParams` says how one request picks its tokens.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

__all__ = [
    "MAX_SEQUENCES",
    "EngineConfig",
    "FlashAttention",
    "FlashAttentionName",
    "KVType",
    "KVTypeName",
    "LoraAdapter",
    "SamplingParams",
    "SnapshotPolicy",
    "SnapshotPolicyName",
    "SnapshotSettings",
    "Stop",
    "lists_fields",
]

MAX_SEQUENCES = 256
"""llama.cpp's own limit on sequence ids in one context (`LLAMA_MAX_SEQ`, src/llama-cparams.h)."""
_INT32_MAX = (1 << 31) - 1  # llama.cpp's counters; ctypes would cut a larger number silently
_MAX_THREADS = 512  # GGML_MAX_N_THREADS, ggml.h
_MAX_BIAS = 1e6
_MAX_ADAPTER_SCALE = 1e6
# llama_split_path, src/llama.cpp: a model in several files is opened by the first
_FIRST_SHARD = re.compile(r"(?P<prefix>.+)-00001-of-(?P<count>\d{5})\.gguf", re.DOTALL)


_Model = TypeVar("_Model", bound=BaseModel)


def lists_fields(*settings: type[BaseModel]) -> Callable[[type[_Model]], type[_Model]]:
    """A decorator that adds to a class's docstring what each of its fields means, and its default.

    The meaning is the docstring below the field, or below the field of that name in `settings`.
    Fields with neither are another library's, and named at the end.
    """

    def decorate(kind: type[_Model]) -> type[_Model]:
        meanings: dict[str, str] = {}
        sources: tuple[type[BaseModel], ...] = (*settings, kind)
        for source in sources:
            for name, field in source.model_fields.items():
                if name in kind.model_fields and field.description is not None:
                    meanings[name] = field.description
        lines = ["Fields:"]
        for name, field in kind.model_fields.items():
            if name in meanings:
                text = " ".join([f"{name}: {meanings[name]}", *_told_default(field)])
                lines += textwrap.wrap(
                    text, 96, initial_indent="    ", subsequent_indent="        "
                )
        foreign = [name for name in kind.model_fields if name not in meanings]
        if foreign:
            lines += ["", *textwrap.wrap(f"And those of its base class: {', '.join(foreign)}.", 96)]
        # Indented as the docstring is, for `inspect.getdoc`.
        section = textwrap.indent("\n".join(lines), "    ")
        kind.__doc__ = f"{(kind.__doc__ or '').rstrip()}\n\n{section}\n    "
        return kind

    return decorate


def _told_default(field: FieldInfo) -> list[str]:
    """Nothing where None is the default: the meaning says what that does."""
    if field.is_required():
        return ["Required."]
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Enum):
        default = default.value
    return [] if default is None else [f"Default: {default!r}."]


class FlashAttention(str, Enum):
    """Which attention kernel the context uses.

    `AUTO` chooses by device: off where everything runs on the CPU, where plain attention decodes
    a fan-out several times faster, and llama.cpp's own choice where layers are offloaded.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


FlashAttentionName: TypeAlias = Literal["auto", "on", "off"]


class KVType(str, Enum):
    """Number format of the KV cache. Quantised V needs flash attention."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"


KVTypeName: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]


class SnapshotPolicy(str, Enum):
    """Which prefixes go to the disk by themselves, where a folder for snapshots is given.

    A branch over a document that is there already does not: the document is what costs.
    """

    WRITE_THROUGH = "write_through"
    """Each as soon as it has been computed: they survive whatever ends the process."""
    WRITE_BACK = "write_back"
    """When memory has no more room for it, and at the end, if the engine is closed."""
    NEVER = "never"
    """Only what is asked for (`persist`)."""


SnapshotPolicyName: TypeAlias = Literal["write_through", "write_back", "never"]

# Fields say what they are once validated. What may be given is more (a string for a path, a list
# for a tuple): `__init__` says that to type checkers, which know nothing of pydantic's conversions.


@lists_fields()
class SnapshotSettings(BaseModel):
    """Where prefixes go that leave the pool. Part of what makes two engines one."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    snapshot_memory_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Host memory for prefixes that had to leave the pool; 0: none."""
    snapshot_dir: Path | None = None
    """Folder for prefixes that outlive the process; None: none do. They hold the documents in a
    recoverable form."""
    snapshot_policy: SnapshotPolicy = SnapshotPolicy.WRITE_THROUGH
    """What goes there by itself."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            snapshot_memory_bytes: int = ...,
            snapshot_dir: Path | str | None = ...,
            snapshot_policy: SnapshotPolicy | SnapshotPolicyName = ...,
        ) -> None: ...

    @field_validator("snapshot_dir")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else _absolute_path(path)


@lists_fields()
class LoraAdapter(BaseModel):
    """A fine-tuning of the model in a file of its own, and how much of it is added."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: Path
    """The GGUF file, as llama.cpp's `convert_lora_to_gguf.py` writes it."""
    scale: Annotated[float, Field(ge=-_MAX_ADAPTER_SCALE, le=_MAX_ADAPTER_SCALE)] = 1.0
    """Factor of what the adapter adds; 0: nothing."""

    if TYPE_CHECKING:

        def __init__(self, *, path: Path | str, scale: float = ...) -> None: ...

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return _absolute_path(path)


@lists_fields()
class EngineConfig(BaseModel):
    """What llama.cpp is asked for. Two equal configs share one engine in a process."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True
    )

    model_path: Path
    """The GGUF file; of a model in several, the first."""
    adapters: tuple[LoraAdapter, ...] = ()
    """LoRA adapters, added to the weights for all that this engine computes."""
    n_ctx: Annotated[int, Field(ge=1, le=_INT32_MAX)] = 8192
    """Cells of the one KV pool that all sequences share, in tokens."""
    n_batch: Annotated[int, Field(ge=1, le=_INT32_MAX)] = 512
    """Most tokens given to one step: all decoding branches, then prefill chunks."""
    n_ubatch: Annotated[int, Field(ge=1)] | None = None
    """Most tokens computed at once inside a step; None: the same as `n_batch`."""
    max_sequences: Annotated[int, Field(ge=2, le=MAX_SEQUENCES)] = 64
    """Sequence ids: resident prefixes plus branches that run at once (`n_seq_max`)."""
    max_running: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    """Most requests computed at once; more wait. None: 16 on a CPU, where more may be slower in
    all, else `max_sequences`."""
    mixed_prefill_tokens: Annotated[int, Field(ge=1)] = 128
    """Most prefill tokens in a step that also decodes, so that streams do not stall."""
    n_threads: Annotated[int, Field(ge=1, le=_MAX_THREADS)] | None = None
    """Threads for decode steps; None: one for each core this process may use."""
    n_threads_batch: Annotated[int, Field(ge=1, le=_MAX_THREADS)] | None = None
    """Threads for prefill steps; None: the same as `n_threads`."""
    n_gpu_layers: Annotated[int, Field(ge=-1, le=_INT32_MAX)] = 0
    """Layers to offload; -1: all of them."""
    device: str | None = None
    """Name of the device lock; None: "cpu", or "cuda:0" where layers are offloaded. Engines on
    "cpu", or on one name that begins with "cpu:", compute side by side as far as there are cores
    for their threads. Any other name is a device that one engine at a time has."""
    lock_dir: Path | None = None
    """Folder for the files of the device lock; None: what the environment variable SWARMKV_LOCK_DIR
    names, else a folder of the user's own. Processes that compute on one device must share it."""
    flash_attention: FlashAttention = FlashAttention.AUTO
    """Which attention kernel to use."""
    prefill_flash_attention: bool = False
    """Prefill in a second context, with flash attention, and decode in the first, without it. It
    pays on CPUs where flash attention prefills faster (`swarmkv doctor` measures that), and costs
    as much memory again as one sequence of full length."""
    kv_type_k: KVType = KVType.F16
    """Number format of the keys."""
    kv_type_v: KVType = KVType.F16
    """Number format of the values."""
    use_mmap: bool = True
    """Map the file instead of reading it."""
    rope_freq_base: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """RoPE base frequency; None: the model's."""
    rope_freq_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """RoPE frequency scale; None: the model's."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            model_path: Path | str,
            adapters: Sequence[LoraAdapter | Mapping[str, Any]] = ...,
            n_ctx: int = ...,
            n_batch: int = ...,
            n_ubatch: int | None = ...,
            max_sequences: int = ...,
            max_running: int | None = ...,
            mixed_prefill_tokens: int = ...,
            n_threads: int | None = ...,
            n_threads_batch: int | None = ...,
            n_gpu_layers: int = ...,
            device: str | None = ...,
            lock_dir: Path | str | None = ...,
            flash_attention: FlashAttention | FlashAttentionName = ...,
            prefill_flash_attention: bool = ...,
            kv_type_k: KVType | KVTypeName = ...,
            kv_type_v: KVType | KVTypeName = ...,
            use_mmap: bool = ...,
            rope_freq_base: float | None = ...,
            rope_freq_scale: float | None = ...,
        ) -> None: ...

    @field_validator("model_path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return _absolute_path(path)

    @field_validator("lock_dir")
    @classmethod
    def _absolute_folder(cls, path: Path | None) -> Path | None:
        return None if path is None else _absolute_path(path)

    @field_validator("adapters")
    @classmethod
    def _each_once(cls, adapters: tuple[LoraAdapter, ...]) -> tuple[LoraAdapter, ...]:
        paths = [adapter.path for adapter in adapters]
        for path in set(paths):
            if paths.count(path) > 1:
                raise ValueError(f"{path} is given more than once; give it one scale.")
        return adapters

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.n_ubatch is not None and self.n_ubatch > self.n_batch:
            raise ValueError(
                f"n_ubatch={self.n_ubatch} is more than n_batch={self.n_batch}; lower it."
            )
        if self.max_sequences > self.n_batch:
            raise ValueError(
                f"max_sequences={self.max_sequences} is more than n_batch={self.n_batch}: "
                "a step must have room for one token of each branch. Raise n_batch."
            )
        quantised_v = self.kv_type_v in (KVType.Q8_0, KVType.Q4_0)
        if quantised_v and self.flash_attention is FlashAttention.OFF:
            raise ValueError(
                f"kv_type_v={self.kv_type_v.value!r} needs flash attention, which is off."
            )
        if self.prefill_flash_attention:
            self._check_pair(quantised_v)
        return self

    def _check_pair(self, quantised_v: bool) -> None:
        if quantised_v or self.flash_attention is FlashAttention.ON:
            raise ValueError(
                "prefill_flash_attention is for contexts that decode without flash attention: "
                "leave flash_attention off, and kv_type_v one of f32, f16 and bf16."
            )
        if self.n_gpu_layers:
            raise ValueError("prefill_flash_attention is for models that run on the CPU alone.")
        if self.max_sequences == MAX_SEQUENCES:
            raise ValueError(
                f"prefill_flash_attention needs a sequence of its own: lower max_sequences to "
                f"{MAX_SEQUENCES - 1}."
            )

    @property
    def files(self) -> tuple[Path, ...]:
        """The model's files, then one for each adapter: what is in them changes every answer."""
        return *_shards(self.model_path), *(adapter.path for adapter in self.adapters)

    @property
    def device_name(self) -> str:
        """The device that the engine locks for each step."""
        if self.device is not None:
            return self.device
        return "cpu" if self.n_gpu_layers == 0 else "cuda:0"


def _one_or_many(stop: object) -> object:
    return (stop,) if isinstance(stop, str) else stop


Stop = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
"""Stop strings; one alone may be given as such."""


@lists_fields()
class SamplingParams(BaseModel):
    """How one request picks its tokens. From the second step on, the order is llama.cpp's own.

    guide -> logit bias -> penalties -> grammar -> top_k -> top_p -> min_p -> temperature -> draw.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_tokens: Annotated[int, Field(ge=0)] = 256
    """Most tokens to generate; 0: only prefill."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """0: greedy, whatever the other settings leave."""
    top_k: Annotated[int, Field(ge=0, le=_INT32_MAX)] = 0
    """Keep the k likeliest tokens; 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set that holds this much probability; 1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this times the likeliest; 0: none."""
    repeat_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divides the logits of tokens seen in the window; 1: off."""
    frequency_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Taken off a logit for each time its token was seen in the window; 0: off."""
    presence_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Taken off a logit once if its token was seen in the window; 0: off."""
    penalty_window_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 64
    """How many last tokens (prompt and answer) the penalties look at."""
    seed: Annotated[int, Field(ge=0, lt=(1 << 32) - 1)] | None = None
    """Seed of the draw. None: a new one each time; the result tells which."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logits of these token ids, up to a million; -inf forbids a token."""
    stop: Stop = ()
    """Generation ends before any of these; they are not part of the text. A control token counts
    as its own text, whole: `"<|im_start|>"` ends an answer there."""
    logprobs: Annotated[int, Field(ge=0, le=64)] | None = None
    """Report each token's log probability and that many alternatives; None: neither."""
    grammar: str | None = None
    """A GBNF grammar with a rule `root`; the text will match it."""
    guide: str | None = None
    """A grammar for llguidance (its Lark dialect, or the JSON of its `grammar_from`); the text will
    match it."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says (for benchmarks)."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            max_tokens: int = ...,
            temperature: float = ...,
            top_k: int = ...,
            top_p: float = ...,
            min_p: float = ...,
            repeat_penalty: float = ...,
            frequency_penalty: float = ...,
            presence_penalty: float = ...,
            penalty_window_tokens: int = ...,
            seed: int | None = ...,
            logit_bias: Mapping[int, float] = ...,
            stop: str | Sequence[str] = ...,
            logprobs: int | None = ...,
            grammar: str | None = ...,
            guide: str | None = ...,
            ignore_eos: bool = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _grammar_ends(self) -> SamplingParams:
        if self.grammar is not None and self.guide is not None:
            raise ValueError("grammar and guide both say what the text is; give one of them.")
        if self.ignore_eos and (self.grammar is not None or self.guide is not None):
            name = "grammar" if self.guide is None else "guide"
            raise ValueError(f"a {name} says where the text ends; ignore_eos contradicts it.")
        return self

    @field_validator("stop")
    @classmethod
    def _stop_not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in stop):
            raise ValueError("a stop string is empty; it would end every answer at once.")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _bias_is_a_number(cls, bias: dict[int, float]) -> dict[int, float]:
        for token_id, value in bias.items():
            if value != float("-inf") and not abs(value) <= _MAX_BIAS:
                raise ValueError(
                    f"logit_bias[{token_id}] is {value}; use a number up to {_MAX_BIAS:g}, or -inf."
                )
        return bias


def _shards(path: Path) -> tuple[Path, ...]:
    """The file, and those that llama.cpp loads with it, as far as they exist."""
    name = _FIRST_SHARD.fullmatch(path.name)
    if name is None:
        return (path,)
    count = int(name["count"])
    others = (
        path.with_name(f"{name['prefix']}-{number:05}-of-{count:05}.gguf")
        for number in range(2, count + 1)
    )
    return path, *(shard for shard in others if shard.exists())


def _absolute_path(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{str(path)!r} names the home of a user that there is not.") from error
