"""The chat model: LangChain in front, one shared engine behind.

A call goes messages -> token ids (`prompts`) -> `SwarmEngine.submit` -> chunks. Sync and async,
streamed and whole, all take this one way; `_generate` folds what `_stream` yields.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
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

from langchain_swarmkv.config import (
    EngineConfig,
    FlashAttention,
    KVType,
    LoraAdapter,
    SamplingParams,
    SnapshotPolicy,
    SnapshotSettings,
)
from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.errors import (
    ConfigurationError,
    ContextBudgetError,
    DocumentMissingError,
    SnapshotFormatError,
)
from langchain_swarmkv.prompts.answering import Answering
from langchain_swarmkv.prompts.call import CALL_OPTIONS, Call
from langchain_swarmkv.prompts.counting import count_prompt
from langchain_swarmkv.prompts.document import DocumentRef, document_digest, document_parts
from langchain_swarmkv.prompts.encoder import EncodedPrompt, PromptEncoder
from langchain_swarmkv.prompts.langchain_errors import PromptOverflowError
from langchain_swarmkv.prompts.messages import as_messages
from langchain_swarmkv.prompts.schema import output_schema
from langchain_swarmkv.prompts.session import EngineKey, Seat
from langchain_swarmkv.prompts.structured_output import AnswerObjectParser, structured
from langchain_swarmkv.prompts.tools import ToolLike, openai_tools
from langchain_swarmkv.scheduling.request import PrefillProgress, RequestHandle
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.snapshot_file import expanded, read_snapshot, save_snapshot
from langchain_swarmkv.snapshots.wrapping import SnapshotCipher
from langchain_swarmkv.statistics import EngineStatistics, RequestStatistics

__all__ = ["ChatSwarmKV"]

MODEL_PATH_VARIABLE = "SWARMKV_MODEL_PATH"
"""Environment variable: the model file where none is given."""

_ENGINE_FIELDS = tuple(EngineConfig.model_fields)
_SNAPSHOT_FIELDS = tuple(SnapshotSettings.model_fields)
_SAMPLING_FIELDS = tuple(SamplingParams.model_fields)
_CALL_OPTIONS = ("keep_prefix", "request_name", "required_prefix_tokens", *CALL_OPTIONS)
_METHODS = ("json_schema", "function_calling", "json_mode")

_Settings = TypeVar("_Settings", bound=BaseModel)
_Started = TypeVar("_Started")
ProgressCallback = Callable[[PrefillProgress], None]


class ChatSwarmKV(BaseChatModel):
    """A local model on llama.cpp whose callers share prefixes and decode together.

        llm = ChatSwarmKV(model_path="model.gguf", n_ctx=8192, max_tokens=256)
        llm.invoke("Hello")

    Nothing is loaded before the first call. Objects with equal engine settings, and all copies of
    one, share one engine in the process, from any number of threads and event loops. Close it, or
    use it as a context manager; the last user closes the engine.

    A call takes, besides `stop`, every sampling field by keyword (`invoke(..., max_tokens=20)`,
    `bind(seed=1)`), and:

        keep_prefix: False frees the cells of prompt and answer at the end (a one-shot branch).
        request_name: for statistics and messages.
        required_prefix_tokens: see only that many tokens of the system messages' prefix.

    Raises (any call):
        PromptError: the messages cannot be made into a prompt.
        ConfigurationError: an unknown or wrong option.
        ContextBudgetError: prompt and max_tokens can never fit.
        ModelError: the model cannot be loaded.
        RequestError, EngineError: see `errors`.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    # The engine; `EngineConfig` documents and checks these.
    model_path: Path | None = None
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
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    grammar: str | None = None
    guide: str | None = None
    ignore_eos: bool = False

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

    @model_validator(mode="before")
    @classmethod
    def _path_from_environment(cls, given: Any) -> Any:
        path = os.environ.get(MODEL_PATH_VARIABLE)
        names_model = isinstance(given, Mapping) and (
            given.get("model_path") or given.get("engine")
        )
        return given if names_model or not path else {**given, "model_path": path}

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
        return _validated(EngineConfig, {name: getattr(self, name) for name in _ENGINE_FIELDS})

    @property
    def snapshot_settings(self) -> SnapshotSettings:
        """Where the prefixes of the engine that is loaded at the first call go."""
        return _validated(
            SnapshotSettings, {name: getattr(self, name) for name in _SNAPSHOT_FIELDS}
        )

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

    def engine_statistics(self) -> EngineStatistics:
        """What the engine has done so far, for all its users."""
        return self._engine().statistics()

    def close(self) -> None:
        """Give the engine back; harmless twice. Copies and other objects keep theirs."""
        self._seat.leave()

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

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (*_ENGINE_FIELDS, *_SNAPSHOT_FIELDS, "engine"):
            raise ConfigurationError(
                f"{name} cannot be changed any more, others may use the engine. Use "
                f"model_copy(update={{{name!r}: ...}}) or make a new object."
            )
        super().__setattr__(name, value)

    @override
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy on the same engine, or on another one if its settings are updated."""
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
        n_ctx = self.n_ctx
        if self.engine is not None:
            n_ctx = min(self.engine.limits.num_cells, self.engine.facts.n_ctx_train)
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
        **options: Any,
    ) -> list[int]:
        """The ids that a call with these messages and options sends to the model."""
        return self._prompt(as_messages(messages), Call.read(options), required_prefix_tokens).ids

    def _prompt(
        self, messages: Sequence[BaseMessage], call: Call, required_prefix_tokens: int | None
    ) -> EncodedPrompt:
        ask = call.ask(self.keep_reasoning)
        if required_prefix_tokens is None:
            return self._encoder.prompt(messages, ask)
        return self._encoder.prompt_slice(messages, required_prefix_tokens, ask)

    def prefix_token_ids(self, messages: LanguageModelInput) -> list[int]:
        """The ids that every conversation which begins with these messages begins with."""
        return self._encoder.shared_prefix(as_messages(messages))

    @override
    def get_token_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    @override
    def get_num_tokens(self, text: str) -> int:
        return self.tokenizer.count(text)

    @override
    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that a call would send, with the template's markup and the tools.

        Parts of a history that are no conversation by themselves count too; see `count_prompt`.
        """
        return count_prompt(lambda part: self.prompt_token_ids(part, tools=tools), messages)

    # -- documents -------------------------------------------------------------------------------

    def prefill(
        self,
        messages: LanguageModelInput,
        *,
        pin: bool = True,
        persist: bool = False,
        config: RunnableConfig | None = None,
        on_progress: ProgressCallback | None = None,
        on_finish: Callable[[RequestStatistics], None] | None = None,
    ) -> DocumentRef:
        """Compute what all conversations that begin with these messages share.

        Doing it again costs nothing while it is in the cache.

        Args:
            messages: usually one `document_message`.
            pin: never evict it, until `release`.
            persist: it is on disk when this returns, whatever `snapshot_policy` says.
            config: of the run that asks; names the request.
            on_progress: called on the engine's thread after each chunk; must be quick.
            on_finish: called once at the end, on the calling thread.
        """
        document, handle = self._start_prefill(messages, config, pin=pin, persist=persist)
        progress = _Progress(handle, on_progress, on_finish)
        with handle:
            handle.result()
        progress.finish()
        return self._remember(document)

    async def aprefill(
        self,
        messages: LanguageModelInput,
        *,
        pin: bool = True,
        persist: bool = False,
        config: RunnableConfig | None = None,
        on_progress: ProgressCallback | None = None,
        on_finish: Callable[[RequestStatistics], None] | None = None,
    ) -> DocumentRef:
        """Like `prefill`; cancelling it stops the work within one chunk."""
        document, handle = await _on_thread(
            lambda: self._start_prefill(messages, config, pin=pin, persist=persist),
            handle_of=lambda started: started[1],
        )
        progress = _Progress(handle, on_progress, on_finish)
        with handle:
            await handle.aresult()
        progress.finish()
        return self._remember(document)

    def _start_prefill(
        self,
        given: LanguageModelInput,
        config: RunnableConfig | None,
        *,
        pin: bool,
        persist: bool,
    ) -> tuple[_Document, RequestHandle]:
        messages = as_messages(given)
        ids = self._encoder.shared_prefix(messages)
        text, instructions = document_parts(messages)
        document = self._document(ids, text, instructions)
        handle = self._send(
            ids,
            SamplingParams(max_tokens=0),
            name=_request_name(config),
            pin=document.ref["digest"] if pin else None,
            persist=persist,
        )
        return document, handle

    def _document(self, ids: Sequence[int], text: str, instructions: str) -> _Document:
        identity = self._engine().facts.identity.digest
        ref = DocumentRef(
            digest=document_digest(self.cache_salt, identity, ids),
            num_tokens=len(ids),
            model=identity,
            text_key="document",
            instructions=instructions,
        )
        return _Document(ref, text, ids)

    def _remember(self, document: _Document) -> DocumentRef:
        self._seat.remember(document.ref["digest"], document.text, document.ids)
        return document.ref

    def handoff(self, messages: LanguageModelInput) -> DocumentRef:
        """Keep a whole conversation for whoever goes on with it: another node, agent or process.

        The next call that begins with these messages computes none of them; with `snapshot_dir`
        also in another process, on a model with the same settings.

        Args:
            messages: the conversation so far, answers included.
        """
        return self.prefill(messages, pin=False, persist=self._engine().has_disk)

    async def ahandoff(self, messages: LanguageModelInput) -> DocumentRef:
        """Like `handoff`."""
        engine = await asyncio.to_thread(self._engine)
        return await self.aprefill(messages, pin=False, persist=engine.has_disk)

    def save(self, ref: DocumentRef, path: Path | str, *, key: bytes | None = None) -> int:
        """Write a prefilled document to a file of its own, with its text, for `load`.

        It is computed again first, as far as it is not in the cache. The file holds the document
        in a recoverable form, unless there is a key.

        Args:
            ref: from `prefill`, `handoff` or `load`.
            path: replaced once the new file is whole.
            key: 32 bytes; the file is then encrypted (needs the package cryptography).

        Returns:
            The bytes of the file.

        Raises:
            DocumentMissingError: this process has not prefilled the document.
            SnapshotStorageError: the file cannot be written.
        """
        known = self._seat.recall(ref["digest"])
        if known is None:
            raise DocumentMissingError(
                "This process has not prefilled the document of the reference; call prefill first."
            )
        snapshot = self._engine().snapshot(list(known.prefix_ids), cache_salt=self.cache_salt)
        note = {"text": known.text, "instructions": ref["instructions"]}
        snapshot = dataclasses.replace(snapshot, extra=json.dumps(note).encode())
        return save_snapshot(expanded(path), snapshot, _cipher(key))

    async def asave(self, ref: DocumentRef, path: Path | str, *, key: bytes | None = None) -> int:
        """Like `save`, beside the event loop."""
        return await asyncio.to_thread(self.save, ref, path, key=key)

    def load(self, path: Path | str, *, key: bytes | None = None) -> DocumentRef:
        """Make a document that `save` wrote one that is in the cache; no prefill.

        Raises:
            SnapshotKeyError: the file is encrypted, and `key` is missing or another one.
            SnapshotFormatError: the file is no snapshot, or it is damaged.
            SnapshotMismatchError: it is of another model, of other settings or of another salt.
            SnapshotStorageError: the file cannot be read.
        """
        path = expanded(path)
        snapshot = read_snapshot(path, _cipher(key))
        text, instructions = _saved_text(snapshot, path)
        self._engine().insert(snapshot, cache_salt=self.cache_salt)
        return self._remember(self._document(snapshot.tokens, text, instructions))

    async def aload(self, path: Path | str, *, key: bytes | None = None) -> DocumentRef:
        """Like `load`, beside the event loop."""
        return await asyncio.to_thread(self.load, path, key=key)

    def release(self, ref: DocumentRef) -> bool:
        """Let the document be evicted. False: it was not pinned, which is harmless."""
        engine = self.engine if self.engine is not None else self._seat.loaded_engine
        return engine is not None and engine.release(ref["digest"])

    def document_of(self, ref: DocumentRef) -> str | None:
        """The text that this object, or a copy, prefilled for a reference; None: not known here."""
        known = self._seat.recall(ref["digest"])
        return None if known is None else known.text

    # -- tools and objects -----------------------------------------------------------------------

    @override
    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: Mapping[str, Any] | str | bool | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model, told in the way of its own template.

        Args:
            tools: pydantic classes, functions, LangChain tools, or their dicts.
            tool_choice: None or "auto": as the model likes; "none"; "any", "required" or True: a
                call, of whichever tool; a tool's name, or OpenAI's dict: of that one.
            parallel_tool_calls: whether an answer may hold several calls. None: where it need not
                hold any; a model that must call may not know when to stop.
            strict: False: calls are not held to the tools' schemas while they are written; what
                does not parse is then found under `invalid_tool_calls`.
            kwargs: more options of the call.

        Raises:
            ConfigurationError: what is given is no tool, or the chosen one is not among them; or a
                schema has something that decoding cannot be held to.
        """
        formatted = openai_tools(tools, strict=strict)
        options = {**kwargs, "tools": formatted, "tool_choice": tool_choice}
        if parallel_tool_calls is not None:
            options["parallel_tool_calls"] = parallel_tool_calls
        self._check_options(options)
        return self.bind(**options)

    @override
    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answer with an object instead of a message.

        Args:
            schema: a pydantic class (v2 or v1), a dataclass, a TypedDict, a JSON schema, or an
                OpenAI function. Classes give their objects, the others dicts.
            method: "json_schema": the answer is held to the schema while it is written, and the
                prompt tells it; "function_calling": the same by way of a tool call; "json_mode":
                your prompt says what to write, and the answer is held to the schema if that can
                be, else to be some JSON object.
            include_raw: give `{"raw": message, "parsed": object, "parsing_error": error}` and
                raise nothing about the answer.
            strict: False: the answer is not held to the schema while it is written. Objects of
                classes and TypedDicts are checked afterwards, dicts of a JSON schema are not.
            kwargs: more options of the call.

        Raises:
            ConfigurationError: it is no schema, or has something that decoding cannot be held to.
            TruncatedAnswerError: (when called) max_tokens cut the answer.
            AnswerError: (when called) the answer does not validate.
        """
        if method not in _METHODS:
            raise ConfigurationError(f"method={method!r}: use {', '.join(_METHODS)}.")
        found = output_schema(schema)
        options = {**kwargs, **found.call_options(method, strict)}
        self._check_options(options)
        tracing = {"kwargs": {"method": method}, "schema": found.shown}
        llm = self.bind(**options, ls_structured_output_format=tracing)
        tool_name = found.name if method == "function_calling" else None
        parser = AnswerObjectParser(answer_schema=found, tool_name=tool_name)
        return structured(llm, parser, include_raw=include_raw)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        self._sampling_params(None, options)
        Call.read(options).check()

    # -- LangChain -------------------------------------------------------------------------------

    def _submit(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Answering:
        """Encode, load what is not loaded, and queue. May take a while: not for an event loop."""
        call = Call.read(options)
        prompt = self._prompt(messages, call, options.get("required_prefix_tokens"))
        style = self._encoder.answers
        params = self._sampling_params(stop, options)
        guide = call.guide(style, prompt.thinking)
        if guide is not None:
            params = _guided(params, guide)
        parser = call.parser(style, prompt.thinking)
        handle = self._send(
            prompt.ids,
            params,
            name=options.get("request_name", ""),
            keep_prefix=options.get("keep_prefix", True),
            marks=style.marks.by_token,
        )
        return Answering(handle, parser, self.model_name, self.tokenizer)

    def _send(self, ids: Sequence[int], params: SamplingParams, **options: Any) -> RequestHandle:
        try:
            return self._engine().submit(
                ids,
                params,
                cache_salt=self.cache_salt,
                timeout_seconds=self.timeout,
                **options,
            )
        except ContextBudgetError as error:
            raise PromptOverflowError(str(error), **error.facts) from error

    async def _asubmit(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Answering:
        return await _on_thread(
            lambda: self._submit(messages, stop, options),
            handle_of=lambda answering: answering.handle,
        )

    def _sampling_params(
        self, stop: Sequence[str] | None, options: Mapping[str, Any]
    ) -> SamplingParams:
        # NOTE: `stream` is LangChain's own, it decides which of our methods is called.
        unknown = set(options) - {*_SAMPLING_FIELDS, *_CALL_OPTIONS, "stream"}
        if unknown:
            raise ConfigurationError(
                f"ChatSwarmKV does not know the option(s) {', '.join(sorted(unknown))}. A call "
                f"takes {', '.join(sorted((*_SAMPLING_FIELDS, *_CALL_OPTIONS)))}.",
                unknown=sorted(unknown),
            )
        values = {name: options.get(name, getattr(self, name)) for name in _SAMPLING_FIELDS}
        if stop is not None:
            values["stop"] = stop
        return _validated(SamplingParams, values)

    @override
    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        # Leaving the block in any way, an abandoned generator included, cancels the request.
        with self._submit(messages, stop, kwargs) as answering:
            for chunk in answering.chunks():
                if run_manager:
                    run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                yield chunk

    @override
    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with await self._asubmit(messages, stop, kwargs) as answering:
            async with aclosing(answering.achunks()) as chunks:
                async for chunk in chunks:
                    if run_manager:
                        await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                    yield chunk

    @override
    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._submit(messages, stop, kwargs) as answering:
            for chunk in answering.chunks():
                if run_manager:
                    run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
            return answering.result()

    @override
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with await self._asubmit(messages, stop, kwargs) as answering:
            async with aclosing(answering.achunks()) as chunks:
                async for chunk in chunks:
                    if run_manager:
                        await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
            return answering.result()

    @property
    def _llm_type(self) -> str:
        return "swarmkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that changes an answer: LangChain's response cache takes this as its key."""
        config = self.engine_config
        salt = self.cache_salt.encode("utf-8", "surrogatepass")
        return {
            "model": config.model_dump(mode="json") if config else None,
            "model_identity": (
                tuple(map(_file_identity, config.files)) if config else self._given_identity
            ),
            # LangChain puts the stop of a call under "stop", where it would hide the field's.
            "default_stop": self.stop,
            **{name: getattr(self, name) for name in _SAMPLING_FIELDS if name != "stop"},
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
            "keep_reasoning": self.keep_reasoning,
            # Traces and caches get to see these parameters, and a salt is a secret.
            "cache_salt": hashlib.sha256(salt).hexdigest(),
        }

    @property
    def _given_identity(self) -> str:
        assert self.engine is not None
        return self.engine.facts.identity.digest

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        stop = list(self.stop) if stop is None else stop
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "swarmkv"
        params["ls_model_name"] = kwargs.get("model") or self.model_name
        return params


async def _on_thread(
    start: Callable[[], _Started], *, handle_of: Callable[[_Started], RequestHandle]
) -> _Started:
    """Submit on a thread. If the caller is cancelled meanwhile, so is the request.

    Dropping the handle would not do: asyncio's futures keep it in a reference cycle, and the
    request would run on until the next garbage collection.
    """
    handles: list[RequestHandle] = []
    is_abandoned = threading.Event()

    def work() -> _Started:
        started = start()
        handles.append(handle_of(started))
        if is_abandoned.is_set():
            handles[0].cancel()
        return started

    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        is_abandoned.set()
        for handle in handles:
            handle.cancel()
        raise


@dataclasses.dataclass(frozen=True)
class _Document:
    """What was, or will be, prefilled."""

    ref: DocumentRef
    text: str
    ids: Sequence[int]


def _cipher(key: bytes | None) -> SnapshotCipher | None:
    return None if key is None else SnapshotCipher(key)


def _saved_text(snapshot: KVSnapshot, path: Path) -> tuple[str, str]:
    """Text and instructions that `save` put beside a state; a file without them has neither."""
    try:
        note = json.loads(snapshot.extra or b"{}")
        text, instructions = note.get("text", ""), note.get("instructions", "")
    except (ValueError, RecursionError, AttributeError):
        text, instructions = None, None
    if not isinstance(text, str) or not isinstance(instructions, str):
        raise SnapshotFormatError(
            f"What stands beside the state in {path} is no document.",
            path=str(path),
            reason="what stands beside the state is no document",
        )
    return text, instructions


class _Progress:
    """Tells listeners how far a prefill is, and that it has ended."""

    def __init__(
        self,
        handle: RequestHandle,
        listener: ProgressCallback | None,
        on_finish: Callable[[RequestStatistics], None] | None,
    ) -> None:
        self._handle = handle
        self._listener = listener
        self._on_finish = on_finish
        self._told: PrefillProgress | None = None
        if listener is not None:
            handle.on_progress(self._tell)

    def _tell(self, progress: PrefillProgress) -> None:
        assert self._listener is not None
        self._told = progress
        self._listener(progress)

    def finish(self) -> None:
        """Tell the end; its progress only if the last chunk was not told already."""
        if self._listener is not None and self._told != self._handle.progress:
            self._tell(self._handle.progress)
        if self._on_finish is not None:
            self._on_finish(self._handle.statistics)


def _validated(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    try:
        return kind(**values)
    except ValidationError as error:
        faults = (
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()
        )
        raise ConfigurationError("; ".join(faults)) from None


def _guided(params: SamplingParams, guide: str) -> SamplingParams:
    if params.grammar is not None or params.guide is not None:
        raise ConfigurationError(
            "A grammar of your own contradicts the one that tools or a schema make. Leave it out, "
            "or bind the tools with strict=False."
        )
    return _validated(SamplingParams, {**params.model_dump(), "guide": guide})


def _request_name(config: RunnableConfig | None) -> str:
    metadata = (config or {}).get("metadata") or {}
    return str(metadata.get("langgraph_node", ""))


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Size and time of change: a file that was replaced is another model or adapter."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
