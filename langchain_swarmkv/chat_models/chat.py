"""The chat model: LangChain in front, one shared engine behind.

A call goes messages -> token ids (`prompts`) -> `SwarmEngine.submit` -> chunks. Sync and async,
streamed and whole, all take this one way.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.caches import BaseCache
from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.callbacks.manager import BaseRunManager
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import Runnable
from langchain_core.utils.utils import LC_ID_PREFIX
from pydantic import SecretStr, model_validator
from typing_extensions import Self, override

from langchain_swarmkv.chat_models.documents import DocumentModel
from langchain_swarmkv.chat_models.engine_model import hint_at_names, validated
from langchain_swarmkv.chat_models.threads import on_thread, start_on_thread
from langchain_swarmkv.config import (
    EngineConfig,
    FlashAttention,
    FlashAttentionName,
    KVType,
    KVTypeName,
    LoraAdapter,
    SamplingParams,
    SnapshotPolicy,
    SnapshotPolicyName,
    SnapshotSettings,
    lists_fields,
)
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.answering import Answering, Answers
from langchain_swarmkv.prompts.answers import PROVIDER
from langchain_swarmkv.prompts.call import Call
from langchain_swarmkv.prompts.held_schema import check_schema
from langchain_swarmkv.prompts.schema import output_schema
from langchain_swarmkv.prompts.structured_output import AnswerObjectParser, structured
from langchain_swarmkv.prompts.tools import ToolLike, openai_tools
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

__all__ = ["ChatSwarmKV"]

_log = logging.getLogger(__name__)

_PACKAGE = "langchain-swarmkv"
_MAX_SEED = (1 << 32) - 2
_METHODS = ("json_schema", "function_calling", "json_mode")


@lists_fields(EngineConfig, SnapshotSettings, SamplingParams)
class ChatSwarmKV(DocumentModel):
    """A local model on llama.cpp whose callers share prefixes and decode together.

        llm = ChatSwarmKV(model_path="model.gguf", n_ctx=8192, max_tokens=256)
        llm.invoke("Hello")

    Nothing is loaded before the first call. Objects with equal engine settings, and all copies of
    one, share one engine in the process, from any number of threads and event loops. Close it, or
    use it as a context manager; the last user closes the engine.

    A call takes, besides `stop`, every sampling field by keyword (`invoke(..., max_tokens=20)`,
    `bind(seed=1)`), and:

        expected_cached_tokens: how much of the prompt should be in the cache; what is not is
            counted as `num_recomputed_tokens` of the engine's statistics.
        n: how many answers `generate` gives, from one prefill. A stream is one answer.
        keep_prefix: False frees the cells of prompt and answer at the end (a one-shot branch).
        prompt_time: date and time for a template that writes them; `DocumentRef["prompt_time"]`.
        request_name: for statistics and messages.
        required_prefix_tokens: see only that many tokens of the system messages' prefix.
        tools, tool_choice, parallel_tool_calls: see `bind_tools`.
        response_format: OpenAI's; see `with_structured_output`.

    Raises (any call):
        PromptError: the messages cannot be made into a prompt.
        ConfigurationError: an unknown or wrong option.
        ContextBudgetError: prompt and max_tokens can never fit.
        ModelError: the model cannot be loaded.
        RequestError, EngineError: see `errors`.
    """

    if TYPE_CHECKING:
        # What may be given; the fields say what it becomes. None: as if it were not given.
        def __init__(
            self,
            *,
            model_path: Path | str | None = ...,
            adapters: Sequence[LoraAdapter | Mapping[str, Any]] | None = ...,
            n_ctx: int | None = ...,
            n_batch: int | None = ...,
            n_ubatch: int | None = ...,
            max_sequences: int | None = ...,
            max_running: int | None = ...,
            mixed_prefill_tokens: int | None = ...,
            n_threads: int | None = ...,
            n_threads_batch: int | None = ...,
            n_gpu_layers: int | None = ...,
            device: str | None = ...,
            lock_dir: Path | str | None = ...,
            flash_attention: FlashAttention | FlashAttentionName | None = ...,
            prefill_flash_attention: bool | None = ...,
            kv_type_k: KVType | KVTypeName | None = ...,
            kv_type_v: KVType | KVTypeName | None = ...,
            use_mmap: bool | None = ...,
            rope_freq_base: float | None = ...,
            rope_freq_scale: float | None = ...,
            max_tokens: int | None = ...,
            temperature: float | None = ...,
            top_k: int | None = ...,
            top_p: float | None = ...,
            min_p: float | None = ...,
            repeat_penalty: float | None = ...,
            frequency_penalty: float | None = ...,
            presence_penalty: float | None = ...,
            penalty_window_tokens: int | None = ...,
            seed: int | None = ...,
            logit_bias: Mapping[int, float] | None = ...,
            stop: str | Sequence[str] | None = ...,
            logprobs: int | None = ...,
            grammar: str | None = ...,
            guide: str | None = ...,
            ignore_eos: bool | None = ...,
            n: int | None = ...,
            engine: SwarmEngine | None = ...,
            snapshot_memory_bytes: int | None = ...,
            snapshot_dir: Path | str | None = ...,
            snapshot_policy: SnapshotPolicy | SnapshotPolicyName | None = ...,
            chat_template: str | None = ...,
            chat_template_kwargs: Mapping[str, Any] | None = ...,
            clock: datetime | Callable[[], datetime] | None = ...,
            keep_reasoning: bool | None = ...,
            cache_salt: str = ...,
            timeout: float | None = ...,
            streaming: bool | None = ...,
            api_key: SecretStr | str | None = ...,
            max_retries: int | None = ...,
            # LangChain's own:
            name: str | None = ...,
            cache: BaseCache | bool | None = ...,
            verbose: bool | None = ...,
            callbacks: Callbacks = ...,
            tags: list[str] | None = ...,
            metadata: dict[str, Any] | None = ...,
            custom_get_token_ids: Callable[[str], list[int]] | None = ...,
            rate_limiter: BaseRateLimiter | None = ...,
            disable_streaming: bool | Literal["tool_calling"] | None = ...,
            output_version: str | None = ...,
            profile: ModelProfile | None = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _set_swarmkv_version(self) -> Self:
        if hasattr(self, "_add_version"):  # the first langchain-core 1.2 keep no versions
            self._add_version(_PACKAGE, _package_version())
        return self

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
            strict: None: calls are held to the tools' schemas while they are written. What cannot
                be held of a schema is logged once; a call is checked against all of it when it is
                whole, and is found under `invalid_tool_calls`, with the reason, if it does not fit.
                True: a schema that cannot be held whole is refused. False: calls are neither held
                nor checked; what does not parse is found under `invalid_tool_calls`. Nor does
                anything hold the model to `tool_choice` and `parallel_tool_calls` then.
            kwargs: more options of the call.

        Raises:
            ConfigurationError: what is given is no tool, or the chosen one is not among them; or a
                strict one's schema has something that decoding cannot be held to.
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
        schema: dict[str, Any] | type | None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answer with an object instead of a message.

        Args:
            schema: a pydantic class (v2 or v1), a dataclass, a TypedDict, a JSON schema, or an
                OpenAI function. Classes give their objects, the others dicts. None, with
                "json_mode": any object.
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
        if schema is None and method == "json_mode":
            schema = {"type": "object"}
        found = output_schema(schema)  # type: ignore[arg-type]
        options = {**kwargs, **found.call_options(method, strict)}
        if method == "function_calling" and strict is not False:
            check_schema(found.json_schema, f"The schema {found.name!r}")
        self._check_options(options)
        tracing = {"kwargs": {"method": method}, "schema": found.shown}
        llm = self.bind(**options, ls_structured_output_format=tracing)
        tool_name = found.name if method == "function_calling" else None
        parser = AnswerObjectParser(answer_schema=found, tool_name=tool_name)
        return structured(llm, parser, include_raw=include_raw)

    if not TYPE_CHECKING:  # for them it is LangChain's

        def bind(self, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
            """Give options to all calls; see the class for what a call takes."""
            if hint := hint_at_names(kwargs):
                raise ConfigurationError(hint)
            return super().bind(**kwargs)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        self._sampling_params(None, options)
        self._num_answers(options)
        Call.read(options).check()

    # -- LangChain -------------------------------------------------------------------------------

    def _submit(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Answers:
        """Encode, load what is not loaded, and queue. May take a while: not for an event loop."""
        return self._prepared(messages, stop, options)()

    def _prepared(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Callable[[], Answers]:
        """Encode, and return what is left to do with an engine."""
        n = self._num_answers(options)
        call = Call.read(options)
        instant = self._prompt_instant(messages, options.get("prompt_time"), is_asked=True)
        prompt = self._prompt(messages, call, options.get("required_prefix_tokens"), instant)
        style = self._encoder.answers
        params = self._sampling_params(stop, options)
        guide = call.guide(style, prompt.thinking)
        if guide is not None:
            params = _guided(params, guide)

        def send() -> Answers:
            handles = self._send_all(
                prompt.ids,
                _each_its_seed(params, n),
                name=options.get("request_name", ""),
                keep_prefix=options.get("keep_prefix", True),
                expected_cached_tokens=options.get("expected_cached_tokens") or 0,
                marks=style.marks.by_token,
            )
            return Answers(
                [
                    Answering(
                        handle, call.parser(style, prompt.thinking), self.model_name, self.tokenizer
                    )
                    for handle in handles
                ]
            )

        return send

    async def _asubmit(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Answers:
        def submit() -> Answers:
            return self._submit(messages, stop, options)

        send = submit
        if self._must_load:
            # A wrong prompt is told before the load.
            send = await on_thread(lambda: self._prepared(messages, stop, options))
            await self._aload()
        return await start_on_thread(send, handle_of=lambda answers: answers)

    @override
    def _should_stream(self, *, async_api: bool, run_manager: Any = None, **kwargs: Any) -> bool:
        # A stream is one answer. Whoever asks for a stream is told so (`_stream`); a callback
        # that would like one gets the first answer's tokens from `_generate` all the same.
        if self._num_answers(kwargs) > 1 and not kwargs.get("stream"):
            return False
        return super()._should_stream(async_api=async_api, run_manager=run_manager, **kwargs)

    @override
    def _should_use_protocol_streaming(
        self, *, async_api: bool, run_manager: Any = None, **kwargs: Any
    ) -> bool:
        if self._num_answers(kwargs) > 1:
            return False
        return super()._should_use_protocol_streaming(
            async_api=async_api, run_manager=run_manager, **kwargs
        )

    def _check_one_answer(self, options: Mapping[str, Any]) -> None:
        n = self._num_answers(options)
        if n > 1:
            raise ConfigurationError(
                f"n={n}: a stream is one answer. Ask `generate` or `agenerate` for several, or "
                "stream with n=1."
            )

    @override
    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        self._check_one_answer(kwargs)
        # Leaving the block in any way, an abandoned generator included, cancels the request.
        with self._submit(messages, stop, kwargs) as answers:
            for chunk in answers.chunks():
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
        self._check_one_answer(kwargs)
        with await self._asubmit(messages, stop, kwargs) as answers:
            async with aclosing(answers.achunks()) as chunks:
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
        with self._submit(messages, stop, kwargs) as answers:
            for chunk in answers.chunks():
                if run_manager:
                    chunk.message.id = _first_id(run_manager)
                    run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
            return answers.result()

    @override
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with await self._asubmit(messages, stop, kwargs) as answers:
            async with aclosing(answers.achunks()) as chunks:
                async for chunk in chunks:
                    if run_manager:
                        chunk.message.id = _first_id(run_manager)
                        await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
            return await answers.aresult()

    @property
    def _llm_type(self) -> str:
        return "swarmkv"

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        stop = list(self.stop) if stop is None else stop
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = kwargs.get("model") or self.model_name
        return params


def _first_id(run_manager: BaseRunManager) -> str:
    """What LangChain will call the first answer: handlers know its chunks by that."""
    return f"{LC_ID_PREFIX}-{run_manager.run_id}-0"


def _each_its_seed(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The settings of each answer. A seed that was given is the first one's."""
    if n > 1 and params.temperature == 0:
        _say_that_greedy_answers_are_equal()
    if n == 1 or params.seed is None:
        return [params] * n
    seeds = ((params.seed + number) % (_MAX_SEED + 1) for number in range(n))
    return [params.model_copy(update={"seed": seed}) for seed in seeds]


@cache
def _say_that_greedy_answers_are_equal() -> None:
    _log.warning("n answers were asked for at temperature 0: all of them will be the same.")


@cache
def _package_version() -> str:
    return metadata.version(_PACKAGE)


with suppress(metadata.PackageNotFoundError):
    _package_version()  # read now: models may be made on an event loop


def _guided(params: SamplingParams, guide: str) -> SamplingParams:
    if params.grammar is not None or params.guide is not None:
        raise ConfigurationError(
            "A grammar of your own contradicts the one that tools or a schema make. Leave it out, "
            "or bind the tools with strict=False."
        )
    return validated(SamplingParams, {**params.model_dump(), "guide": guide})
