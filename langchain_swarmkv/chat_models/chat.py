"""The chat model: LangChain in front, one shared engine behind.

A call goes messages -> token ids (`prompts`) -> `SwarmEngine.submit` -> chunks. Sync and async,
streamed and whole, all take this one way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from typing_extensions import override

from langchain_swarmkv.chat_models.documents import DocumentModel
from langchain_swarmkv.chat_models.engine_model import validated
from langchain_swarmkv.chat_models.threads import on_thread
from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.answering import Answering
from langchain_swarmkv.prompts.call import Call
from langchain_swarmkv.prompts.schema import output_schema
from langchain_swarmkv.prompts.structured_output import AnswerObjectParser, structured
from langchain_swarmkv.prompts.tools import ToolLike, openai_tools

__all__ = ["ChatSwarmKV"]

_METHODS = ("json_schema", "function_calling", "json_mode")


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
        keep_prefix: False frees the cells of prompt and answer at the end (a one-shot branch).
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
                does not parse is then found under `invalid_tool_calls`. Nor does anything hold the
                model to `tool_choice` and `parallel_tool_calls` then.
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
            expected_cached_tokens=options.get("expected_cached_tokens", 0),
            marks=style.marks.by_token,
        )
        return Answering(handle, parser, self.model_name, self.tokenizer)

    async def _asubmit(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Answering:
        return await on_thread(
            lambda: self._submit(messages, stop, options),
            handle_of=lambda answering: answering.handle,
        )

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

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        stop = list(self.stop) if stop is None else stop
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "swarmkv"
        params["ls_model_name"] = kwargs.get("model") or self.model_name
        return params


def _guided(params: SamplingParams, guide: str) -> SamplingParams:
    if params.grammar is not None or params.guide is not None:
        raise ConfigurationError(
            "A grammar of your own contradicts the one that tools or a schema make. Leave it out, "
            "or bind the tools with strict=False."
        )
    return validated(SamplingParams, {**params.model_dump(), "guide": guide})
