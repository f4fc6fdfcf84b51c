"""A chat model's settings, the engine that they share, and the prompts that it is sent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from langchain_core.callbacks import Callbacks
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import BaseMessage, MessageLikeRepresentation
from langchain_core.outputs import LLMResult
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from typing_extensions import Self, override

from langchain_swarmkv.chat_models.threads import on_own_thread, on_thread, once_for_all
from langchain_swarmkv.config import (
    EngineConfig,
    FlashAttention,
    KVType,
    LoraAdapter,
    SamplingParams,
    SnapshotPolicy,
    SnapshotSettings,
    Stop,
)
from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.errors import ConfigurationError, ContextBudgetError, ModelError
from langchain_swarmkv.prompts.call import CALL_OPTIONS, Call
from langchain_swarmkv.prompts.clock import Clock, as_instant, prompt_times, read_clock
from langchain_swarmkv.prompts.counting import count_prompt
from langchain_swarmkv.prompts.document import num_document_messages
from langchain_swarmkv.prompts.encoder import EncodedPrompt, PromptEncoder
from langchain_swarmkv.prompts.langchain_errors import PromptOverflowError
from langchain_swarmkv.prompts.messages import as_messages, template_messages
from langchain_swarmkv.prompts.session import EngineKey, Seat
from langchain_swarmkv.prompts.time_notes import read_note
from langchain_swarmkv.scheduling.request import RequestHandle
from langchain_swarmkv.scheduling.signals import is_loop_thread
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.snapshots.snapshot_file import expanded
from langchain_swarmkv.statistics import EngineStatistics

__all__ = ["EngineModel", "hint_at_names", "validated"]

MODEL_PATH_VARIABLE = "SWARMKV_MODEL_PATH"
"""Environment variable: the model file where none is given."""

_ENGINE_FIELDS = tuple(EngineConfig.model_fields)
_SNAPSHOT_FIELDS = tuple(SnapshotSettings.model_fields)
_SAMPLING_FIELDS = tuple(SamplingParams.model_fields)
_CALL_OPTIONS = (
    "expected_cached_tokens",
    "keep_prefix",
    "n",
    "prompt_time",
    "request_name",
    "required_prefix_tokens",
    *CALL_OPTIONS,
)

MAX_ANSWERS = 256
"""Most answers to one prompt; more are a slip."""

_OTHERS_NAMES = {
    "base_url": "model_path: the model runs in this process",
    "default_request_timeout": "timeout",
    "format": "with_structured_output",
    "last_n_tokens_size": "penalty_window_tokens",
    "lora_path": "adapters",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "model": "model_path",
    "model_id": "model_path",
    "model_name": "model_path",
    "n_predict": "max_tokens",
    "num_ctx": "n_ctx",
    "num_gpu": "n_gpu_layers",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "num_thread": "n_threads",
    "reasoning": "chat_template_kwargs={'enable_thinking': ...}",
    "repeat_last_n": "penalty_window_tokens",
    "repetition_penalty": "repeat_penalty",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
    "top_logprobs": "logprobs",
}
"""What other chat models call options that this one has, too."""

_Settings = TypeVar("_Settings", bound=BaseModel)


class EngineModel(BaseChatModel):
    """What a chat model on a shared engine is before it answers; `ChatSwarmKV` documents it."""

    model_config = ConfigDict(
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    # The engine; `EngineConfig` documents and checks these.
    model_path: Path | None = None
    """The GGUF file; of a model in several, the first. None: the one that the environment variable
    SWARMKV_MODEL_PATH names, unless there is an `engine`."""
    adapters: tuple[LoraAdapter, ...] = ()
    n_ctx: int = 8192
    n_batch: int = 512
    n_ubatch: int | None = None
    max_sequences: int = 64
    max_running: int | None = None
    mixed_prefill_tokens: int = 128
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_gpu_layers: int = 0
    device: str | None = None
    lock_dir: Path | None = None
    flash_attention: FlashAttention = FlashAttention.AUTO
    prefill_flash_attention: bool = False
    kv_type_k: KVType = KVType.F16
    kv_type_v: KVType = KVType.F16
    use_mmap: bool = True
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None

    # Sampling; `SamplingParams` documents and checks these.
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window_tokens: int = 64
    seed: int | None = None
    logit_bias: dict[int, float] = Field(default_factory=dict)
    stop: Stop = ()
    logprobs: int | None = None
    grammar: str | None = None
    guide: str | None = None
    ignore_eos: bool = False

    n: int = Field(default=1, ge=1, le=MAX_ANSWERS)
    """How many answers `generate` gives to each prompt, from one prefill. Each draws with a seed of
    its own: at temperature 0 all are the same. `invoke` gives the first."""

    engine: SwarmEngine | None = Field(default=None, exclude=True, repr=False)
    """Use this engine instead of loading `model_path`. It stays its owner's to close."""

    # Where prefixes go that leave the pool; `SnapshotSettings` documents and checks these.
    snapshot_memory_bytes: int = 1 << 30
    snapshot_dir: Path | None = None
    snapshot_policy: SnapshotPolicy = SnapshotPolicy.WRITE_THROUGH

    chat_template: str | None = None
    """Jinja source; None: the model's own template, or plain words if it has none."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More variables for the template, such as `enable_thinking`."""
    clock: Clock | None = None
    """The date and time that templates may write: a datetime, always that one; or a function that
    returns one, asked for each new document and conversation. None: the machine's clock. With a
    time zone, or local. A document, and a conversation that goes on, keep the time that they began
    with; see `prompt_time` and `DocumentRef`."""
    keep_reasoning: bool = False
    """Whether the template gets to see earlier answers' thoughts; most models want none."""
    cache_salt: str = Field(default="", repr=False)
    """Prefixes are shared only between equal salts: one for each tenant keeps them apart."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds a request may take, waiting included."""
    streaming: bool = False
    """Whether `invoke` streams inside, as LangChain's models do; callbacks see tokens anyway."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Not used: code that makes models of any kind passes one."""
    max_retries: int | None = Field(default=None, exclude=True, repr=False)
    """Not used: there is no connection that could fail. See `with_retry`."""

    _seat: Seat = PrivateAttr()
    _seen_files: dict[EngineConfig, tuple[tuple[int, int] | None, ...]] = PrivateAttr(
        default_factory=dict
    )

    @model_validator(mode="before")
    @classmethod
    def _read_options(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if hint := hint_at_names(given):
            raise ValueError(hint)
        salt = given.get("cache_salt", "")
        if not isinstance(salt, str):
            raise ValueError(_wrong_salt(salt))
        # None is how other models' options say "as it is"; a salt of None could mean anybody's.
        options = {k: v for k, v in given.items() if v is not None or k == "cache_salt"}
        path = os.environ.get(MODEL_PATH_VARIABLE)
        if path and "model_path" not in options and "engine" not in options:
            options["model_path"] = path
        return options

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if (self.engine is None) == (self.model_path is None):
            raise ValueError(f"give either model_path (or set {MODEL_PATH_VARIABLE}) or engine.")
        ignored = [
            name
            for name in (*_ENGINE_FIELDS, *_SNAPSHOT_FIELDS)
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if self.engine is not None and ignored:
            raise ValueError(f"{', '.join(ignored)}: the engine that was given has its own.")
        self._sampling_params(None, {})
        self.snapshot_settings  # noqa: B018 - checked early
        self._seat = Seat(self._engine_key)
        if self.profile is None:
            del self.profile  # see `__getattr__`
        return self

    # -- the engine ------------------------------------------------------------------------------

    @property
    def engine_config(self) -> EngineConfig | None:
        """The settings of the engine that is loaded at the first call; None with `engine`."""
        if self.model_path is None:
            return None
        return validated(EngineConfig, {name: getattr(self, name) for name in _ENGINE_FIELDS})

    @property
    def snapshot_settings(self) -> SnapshotSettings:
        """Where the prefixes of the engine that is loaded at the first call go."""
        return validated(SnapshotSettings, {name: getattr(self, name) for name in _SNAPSHOT_FIELDS})

    @property
    def model_name(self) -> str:
        """The file's name without its ending, or the given engine's model."""
        if self.engine is not None:
            return self.engine.facts.name
        assert self.model_path is not None
        return self.model_path.stem

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's vocabulary; loads no weights and takes no lock.

        Raises:
            ModelError: the file cannot be used.
        """
        return self.engine.tokenizer if self.engine is not None else self._seat.tokenizer()

    @property
    def _known_tokenizer(self) -> Tokenizer | None:
        """The vocabulary, if no file must be read for it."""
        return self.engine.tokenizer if self.engine is not None else self._seat.known_tokenizer

    def engine_statistics(self) -> EngineStatistics:
        """What the engine has done so far, for all its users."""
        return self._engine().statistics()

    def close(self) -> None:
        """Give the engine back; harmless twice. Copies and other objects keep theirs."""
        self._seat.leave()

    async def aclose(self) -> None:
        """Like `close`, beside the event loop; it goes on if the caller is cancelled."""
        await on_own_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _engine_key(self) -> EngineKey:
        return self.engine_config, self.snapshot_settings

    def _engine(self) -> SwarmEngine:
        self._seat.check_open()
        return self.engine if self.engine is not None else self._seat.engine()

    @property
    def _must_load(self) -> bool:
        """Whether the next call waits for a load."""
        if self.engine is not None:
            return False
        loaded = self._seat.loaded_engine
        return loaded is None or loaded.closed

    async def _aload(self) -> None:
        """Load the engine, if need be; one thread does, and none waits for it."""
        self._seat.check_open()
        if self._must_load:
            await once_for_all(self._seat.load)

    def _send(self, ids: Sequence[int], params: SamplingParams, **options: Any) -> RequestHandle:
        return self._send_all(ids, [params], **options)[0]

    def _send_all(
        self, ids: Sequence[int], params: Sequence[SamplingParams], **options: Any
    ) -> list[RequestHandle]:
        """Queue one prompt for each answer; what can never fit is LangChain's error, too."""
        engine = self._engine()
        options = {"cache_salt": self.cache_salt, "timeout_seconds": self.timeout, **options}
        try:
            if len(params) == 1:
                return [engine.submit(ids, params[0], **options)]
            return engine.submit_all(ids, params, **options)
        except ContextBudgetError as error:
            raise PromptOverflowError(str(error), **error.facts) from error

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (*_ENGINE_FIELDS, *_SNAPSHOT_FIELDS, "engine"):
            raise ConfigurationError(
                f"{name} cannot be changed any more, others may use the engine. Use "
                f"model_copy(update={{{name!r}: ...}}) or make a new object."
            )
        if name == "cache_salt" and not isinstance(value, str):
            raise ConfigurationError(_wrong_salt(value))
        if name not in ("n", *_SAMPLING_FIELDS):
            super().__setattr__(name, value)
            return
        before = getattr(self, name)
        super().__setattr__(name, value)
        try:
            self._sampling_params(None, {})
            self._num_answers({})
        except ConfigurationError:
            super().__setattr__(name, before)
            raise

    @override
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy on the same engine, or on another one if its settings are updated."""
        unknown = sorted(set(update or ()) - set(type(self).model_fields))
        if unknown:
            raise ConfigurationError(f"ChatSwarmKV has no field {', '.join(unknown)}.")
        salt = (update or {}).get("cache_salt", "")
        if not isinstance(salt, str):
            raise ConfigurationError(_wrong_salt(salt))
        copied = super().model_copy(update=update, deep=deep)
        if copied._seat.key != copied._engine_key:
            copied._seat = copied._seat.move(copied._engine_key)
        return copied

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._seat = self._seat.another()
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        if self.engine is not None:
            memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        if self.engine is not None:
            raise ConfigurationError(
                "A ChatSwarmKV with an engine object cannot be pickled: the engine lives in this "
                "process. Give model_path instead; it is opened again where it is unpickled."
            )
        return super().__getstate__()

    if not TYPE_CHECKING:  # it would let any name pass

        def __getattr__(self, name: str) -> Any:
            # Not stored unless it was given: it would not follow the settings of copies.
            if name == "profile":
                return self._own_profile()
            return super().__getattr__(name)

    def _own_profile(self) -> ModelProfile:
        """What the model can do.

        On an event loop no file is read for it: until a call has done so, `n_ctx` alone bounds the
        input there.
        """
        n_ctx = self.n_ctx if self.engine is None else self.engine.limits.num_cells
        try:
            tokenizer = self._known_tokenizer if is_loop_thread() else self.tokenizer
        except ModelError:
            tokenizer = None  # there is no such file yet
        if tokenizer is not None:
            n_ctx = min(n_ctx, tokenizer.n_ctx_train)
        return ModelProfile(
            name=self.model_name,
            # The largest prompt that has room for its answer.
            max_input_tokens=max(0, n_ctx - self.max_tokens),
            max_output_tokens=self.max_tokens,
            text_inputs=True,
            image_inputs=False,
            image_url_inputs=False,
            pdf_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            image_outputs=False,
            audio_outputs=False,
            video_outputs=False,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
            attachment=False,
            temperature=True,
        )

    # -- prompts ---------------------------------------------------------------------------------

    @property
    def _encoder(self) -> PromptEncoder:
        return self._seat.encoder(self.tokenizer, self.chat_template, self.chat_template_kwargs)

    def prompt_token_ids(
        self,
        messages: LanguageModelInput,
        *,
        required_prefix_tokens: int | None = None,
        prompt_time: datetime | str | None = None,
        **options: Any,
    ) -> list[int]:
        """The ids that a call with these messages and options sends to the model."""
        given = as_messages(messages)
        instant = self._prompt_instant(given, prompt_time, is_asked=False)
        return self._prompt(given, Call.read(options), required_prefix_tokens, instant).ids

    def _prompt(
        self,
        messages: Sequence[BaseMessage],
        call: Call,
        required_prefix_tokens: int | None,
        instant: datetime | None,
    ) -> EncodedPrompt:
        ask = call.ask(self.keep_reasoning)
        if required_prefix_tokens is None:
            return self._encoder.prompt(messages, ask, instant)
        return self._encoder.prompt_slice(messages, required_prefix_tokens, ask, instant)

    def prefix_token_ids(
        self, messages: LanguageModelInput, *, prompt_time: datetime | str | None = None
    ) -> list[int]:
        """The ids that every conversation which begins with these messages begins with."""
        given = as_messages(messages)
        return self._encoder.shared_prefix(given, self._document_instant(given, prompt_time))

    def prompt_time(self, messages: LanguageModelInput) -> str | None:
        """Date and time in prompts that begin with these messages, which become a document's.

        ISO 8601, with the offset from UTC. None: the template writes no time.
        """
        instant = self._document_instant(as_messages(messages), None)
        return None if instant is None else instant.isoformat()

    def _prompt_instant(
        self,
        messages: Sequence[BaseMessage],
        given: datetime | str | None,
        *,
        is_asked: bool,
    ) -> datetime | None:
        """When a prompt is rendered; None: it does not matter."""
        instant = self._fixed_instant(given)
        if instant is not None or not self._encoder.reads_clock:
            return instant
        return prompt_times.conversation(
            self.cache_salt,
            template_messages(messages),
            self._new_instant,
            num_document_turns=num_document_messages(messages),
            is_asked=is_asked,
        )

    def _document_instant(
        self, messages: Sequence[BaseMessage], given: datetime | str | None
    ) -> datetime | None:
        """When a document is rendered, and what begins with it; None: it does not matter."""
        instant = self._fixed_instant(given)
        if not self._encoder.reads_clock:
            return None
        turns = template_messages(messages)
        if instant is None:
            return prompt_times.document(self.cache_salt, turns, self._new_instant)
        if given is not None:  # a clock that stands still is this model's own: others have theirs
            prompt_times.set_document(self.cache_salt, turns, instant)
        return instant

    def _new_instant(self, digests: Sequence[bytes]) -> datetime:
        """The instant of messages that this process meets for the first time."""
        folder = self._snapshot_folder
        noted = None if folder is None else read_note(folder, digests)
        return noted or read_clock(self.clock)

    @property
    def _snapshot_folder(self) -> Path | None:
        if self.engine is not None:
            return self.engine.snapshot_folder
        return None if self.snapshot_dir is None else expanded(self.snapshot_dir)

    def _fixed_instant(self, given: datetime | str | None) -> datetime | None:
        if given is not None:
            return as_instant(given)
        return read_clock(self.clock) if isinstance(self.clock, datetime) else None

    @override
    def get_token_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    @override
    def get_num_tokens(self, text: str) -> int:
        return self.tokenizer.count(text)

    @override
    def get_num_tokens_from_messages(
        self, messages: Iterable[MessageLikeRepresentation], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that a call would send, with the template's markup and the tools.

        Parts of a history that are no conversation by themselves count too; see `count_prompt`.
        """
        given = [*messages] if isinstance(messages, Iterator) else messages
        return count_prompt(
            lambda part: self.prompt_token_ids(part, tools=tools),
            as_messages(cast("LanguageModelInput", given)),
        )

    # -- what a call is made of -------------------------------------------------------------------

    def _sampling_params(
        self, stop: Sequence[str] | None, options: Mapping[str, Any]
    ) -> SamplingParams:
        if hint := hint_at_names(options):
            raise ConfigurationError(hint)
        # NOTE: `stream` is LangChain's own, it decides which of our methods is called.
        unknown = set(options) - {*_SAMPLING_FIELDS, *_CALL_OPTIONS, "stream"}
        if unknown:
            raise ConfigurationError(
                f"A call does not take the option(s) {', '.join(sorted(unknown))}; it takes "
                f"{', '.join(sorted((*_SAMPLING_FIELDS, *_CALL_OPTIONS)))}. What else the model "
                "has is changed by model_copy(update={...}).",
                unknown=sorted(unknown),
            )
        # None is how other models' options say "as it is".
        given = {name: value for name, value in options.items() if value is not None}
        values = {name: given.get(name, getattr(self, name)) for name in _SAMPLING_FIELDS}
        if stop is not None:
            values["stop"] = stop
        return validated(SamplingParams, values)

    def _num_answers(self, options: Mapping[str, Any]) -> int:
        given = options.get("n")
        n = self.n if given is None else given
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_ANSWERS:
            raise ConfigurationError(f"n={n!r}: ask for 1 to {MAX_ANSWERS} answers.")
        return n

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that changes an answer: LangChain's response cache takes this as its key."""
        config = self.engine_config
        salt = self.cache_salt.encode("utf-8", "surrogatepass")
        return {
            "model": config.model_dump(mode="json") if config else None,
            "model_identity": self._file_identities(config) if config else self._given_identity,
            # LangChain puts the stop of a call under "stop", where it would hide the field's.
            "default_stop": self.stop,
            "n": self.n,
            **{name: getattr(self, name) for name in _SAMPLING_FIELDS if name != "stop"},
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
            "keep_reasoning": self.keep_reasoning,
            # One that goes on is no part of the key: an answer would never be found again.
            "clock": self.clock.isoformat() if isinstance(self.clock, datetime) else None,
            # Traces and caches get to see these parameters, and a salt is a secret.
            "cache_salt": hashlib.sha256(salt).hexdigest(),
        }

    def _file_identities(self, config: EngineConfig) -> tuple[tuple[int, int] | None, ...]:
        """Size and time of change of each file.

        An event loop must not wait for a disk: there they are as another thread last saw them,
        which each `agenerate` has one do.
        """
        if is_loop_thread():
            return self._seen_files.get(config, ())
        found = tuple(map(_file_identity, config.files))
        self._seen_files = {config: found}
        return found

    @override
    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See LangChain's; its cache is asked with the files as they are now."""
        if (config := self.engine_config) is not None:
            await on_thread(lambda: self._file_identities(config))
        return await super().agenerate(messages, stop, callbacks, **kwargs)

    @property
    def _given_identity(self) -> str:
        assert self.engine is not None
        return self.engine.facts.identity.digest


def validated(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """Settings that pydantic has checked.

    Raises:
        ConfigurationError: naming what is wrong.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        faults = (
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()
        )
        raise ConfigurationError("; ".join(faults)) from None


def hint_at_names(options: Iterable[str]) -> str:
    """What options of other chat models are called here; empty: all are called as here."""
    hints = [
        f"{name}: it is {_OTHERS_NAMES[name]} here." for name in options if name in _OTHERS_NAMES
    ]
    return " ".join(hints)


def _wrong_salt(salt: object) -> str:
    hint = "salt.hex(), say" if isinstance(salt, bytes) else 'or none for ""'
    return f"cache_salt is a {type(salt).__name__}; give a string ({hint})."


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Size and time of change: a file that was replaced is another model or adapter."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
