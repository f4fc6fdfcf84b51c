"""The node that answers one question about the document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig

from langchain_swarmkv.chat_models.threads import on_thread
from langchain_swarmkv.errors import (
    AnswerError,
    ConfigurationError,
    ContextBudgetError,
    DocumentMissingError,
    PromptError,
    TruncatedAnswerError,
)
from langchain_swarmkv.graph.node_model import NodeLLM, NodeModel
from langchain_swarmkv.graph.node_run import NodeRun, described, read_key
from langchain_swarmkv.graph.state import FINDINGS_KEY, MESSAGES_KEY
from langchain_swarmkv.graph.tasks import Task, atask_messages, check_task, task_messages
from langchain_swarmkv.prompts.call import CALL_OPTIONS, Call
from langchain_swarmkv.prompts.document import (
    DEFAULT_INSTRUCTIONS,
    DocumentRef,
    document_message,
    document_text,
)
from langchain_swarmkv.prompts.schema import output_schema
from langchain_swarmkv.prompts.structured_output import answer_object

__all__ = ["AnalystNode"]


class AnalystNode(Runnable[Any, dict[str, Any]]):
    """Asks one question about the document, on a fork of its KV cache.

    A LangGraph node for any `StateGraph`; sync and async. Its prompt is always the whole prompt,
    `[system: instructions and document] [user: task]`: what of it is in the cache is reused, and
    what is not is computed, so that it never answers without the document.

    The text, a `Document` or a list of them comes from the state: under `document_key` if that is
    given, else under the key that the `DocumentRef` names. Where the state has only the reference
    (as `Send` may pass it on), the text that this process prefilled for it is used.

    Tokens go out on the `messages` stream, and one `analyst` event at the end on `custom`. Where
    much of a prefilled document had to be computed again, a `warning` comes once a run.

    Args:
        llm: the model that answers; it may have options or retries bound to it (`llm.bind(seed=1)`,
            `llm.with_retry()`).
        task: a text, a prompt template whose variables are state keys, or a function of the state,
            which may be async and may take LangGraph's `config` and `runtime` beside it.
        name: name of the finding; None: the node's name in the graph. Copies that `Send` starts get
            their number: `section[0]`, `section[1]`, ...
        max_tokens: most tokens of the answer; None: the model's setting.
        output_key: state key of the answer, a string; None: `{name: answer}` under `findings`.
            "messages": the whole AIMessage, as LangGraph's message states want it.
        document_key: state key of the text; None: the reference's, or "document" without one.
        ref_key: state key of the `DocumentRef`.
        required_prefix_tokens: read only that many tokens of the shared part, and start as soon as
            they are in the cache.
        max_task_tokens: most prompt tokens after the shared part, the template's markup included;
            needed for the budget where the task depends on the state, and kept to when it runs.
        max_fanout: how many copies `Send` starts at most at once; for the budget.
        schema: the finding is an object of this pydantic class or dataclass, or a dict for a
            TypedDict or a JSON schema. The prompt tells it, and decoding is held to it. Checkpoints
            keep dicts as they are; objects come back from them without a warning if the saver
            knows the class, as with `serde=JsonPlusSerializer(allowed_msgpack_modules=[Finding])`.
        strict: False: the finding is checked, but not held to the schema while it is written.
    """

    def __init__(
        self,
        llm: NodeLLM,
        task: Task,
        *,
        name: str | None = None,
        max_tokens: int | None = None,
        output_key: str | None = None,
        document_key: str | None = None,
        ref_key: str = "document_ref",
        required_prefix_tokens: int | None = None,
        max_task_tokens: int | None = None,
        max_fanout: int | None = None,
        schema: dict[str, Any] | type | None = None,
        strict: bool | None = None,
    ) -> None:
        self._model = NodeModel(llm)
        check_task(task)
        bound = self._model.options
        if max_tokens is None:
            max_tokens = bound.get("max_tokens")
        if required_prefix_tokens is None:
            required_prefix_tokens = bound.get("required_prefix_tokens")
        _check_positive(
            max_tokens=max_tokens,
            required_prefix_tokens=required_prefix_tokens,
            max_task_tokens=max_task_tokens,
            max_fanout=max_fanout,
        )
        self.llm = self._model.llm
        self.task = task
        self.name = name
        self.max_tokens = max_tokens
        self.output_key = output_key
        self.document_key = document_key
        self.ref_key = ref_key
        self.required_prefix_tokens = required_prefix_tokens
        self.max_task_tokens = max_task_tokens
        self.max_fanout = max_fanout
        self.schema = None if schema is None else output_schema(schema)
        schema_options = (
            {} if self.schema is None else self.schema.call_options("json_schema", strict)
        )
        self.call_options = {
            **{name: value for name, value in bound.items() if name in CALL_OPTIONS},
            **schema_options,
        }
        """What each call asks for besides its messages: tools, a schema."""
        Call.read(self.call_options).check()

    def invoke(
        self,
        input: Any,
        # Spelled so that LangGraph passes it to a bound method too (`add_node("a", node.ainvoke)`).
        config: Optional[RunnableConfig] = None,  # noqa: UP045
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Answer for one state.

        Returns:
            `{"findings": {name: answer}}`, or `{output_key: answer}`; the answer is a text, or the
            object of the schema.

        Raises:
            DocumentMissingError: neither the state nor this process has the document.
            PromptError: the task or the document is no text.
            ContextBudgetError: it does not fit, or the task is longer than `max_task_tokens`.
            TruncatedAnswerError: max_tokens cut the object.
            AnswerError: it does not validate.
        """
        run = NodeRun(self.get_name(), config)
        document = self._document(input, run)
        call = self._call(document, task_messages(self.task, input, run), run)
        self._check_task_tokens(call, run)
        cached = document.cached
        if not document.is_known:
            cached = self._model.call(
                lambda: run.prefill(self.llm, document.shared, prompt_time=call.prompt_time),
                run.config,
            )
        options = {**call.options, **self._expectation(cached)}
        answer = self._model.given.invoke(call.messages, run.config, **options)
        return self._output(run, cached, answer)

    async def ainvoke(
        self,
        input: Any,
        # Spelled so that LangGraph passes it to a bound method too (`add_node("a", node.ainvoke)`).
        config: Optional[RunnableConfig] = None,  # noqa: UP045
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Like `invoke`; cancelling it ends the branch within one step."""
        run = NodeRun(self.get_name(), config)
        document = self._document(input, run)
        call = self._call(document, await atask_messages(self.task, input, run), run)
        if self.max_task_tokens is not None:
            # Counting a long document takes too long for an event loop.
            await on_thread(lambda: self._check_task_tokens(call, run))
        cached = document.cached
        if not document.is_known:
            cached = await self._model.acall(
                lambda: run.aprefill(self.llm, document.shared, prompt_time=call.prompt_time),
                run.config,
            )
        options = {**call.options, **self._expectation(cached)}
        answer = await self._model.given.ainvoke(call.messages, run.config, **options)
        return self._output(run, cached, answer)

    def _document(self, state: object, run: NodeRun) -> _Document:
        ref: DocumentRef | None = read_key(state, self.ref_key) or None
        known_text = self.llm.document_of(ref) if ref else None
        text = self._text(state, ref) or known_text
        if text is None:
            raise self._document_missing(ref, run)
        instructions = ref["instructions"] if ref else DEFAULT_INSTRUCTIONS
        shared: list[BaseMessage] = [document_message(text, instructions)]
        # One that waits for a part of the document only must not wait for all of it.
        is_known = text == known_text or self.required_prefix_tokens is not None
        return _Document(shared, ref, ref if text == known_text else None, is_known)

    def _call(self, document: _Document, task: list[BaseMessage], run: NodeRun) -> _Call:
        messages = [*document.shared, *task]
        return _Call(document.shared, messages, self._options(run, document.ref))

    def _text(self, state: object, ref: DocumentRef | None) -> str | None:
        key = self.document_key or (ref["text_key"] if ref else "document")
        document = read_key(state, key)
        if document is None or document == []:
            return None
        text = document_text(document)
        if text is None:
            raise PromptError(
                f"state[{key!r}] is {described(document)}; AnalystNode needs the document's text "
                "there, a Document or a list of them.",
                key=key,
            )
        return text if text.strip() else None

    def _document_missing(self, ref: DocumentRef | None, run: NodeRun) -> DocumentMissingError:
        key = self.document_key or (ref["text_key"] if ref else "document")
        seen = (
            f"state[{self.ref_key!r}] refers to a document that this process has not prefilled"
            if ref
            else f"there is no DocumentRef under {self.ref_key!r} either"
        )
        return DocumentMissingError(
            f"Analyst {run.node!r} has no document: state[{key!r}] is empty or missing, and "
            f"{seen}. Put the text into the state (with Send, into what it passes on) under "
            f"{key!r}, or run a DocumentNode first.",
            node=run.node,
            key=key,
        )

    def _check_task_tokens(self, call: _Call, run: NodeRun) -> None:
        if self.max_task_tokens is None:
            return
        time = call.prompt_time
        prompt = self.llm.prompt_token_ids(call.messages, prompt_time=time, **self.call_options)
        shared = self.llm.prefix_token_ids(call.shared, prompt_time=time)
        num_tokens = len(prompt) - len(shared)
        if num_tokens > self.max_task_tokens:
            raise ContextBudgetError(
                f"The task of {run.node!r} has {num_tokens} tokens, its markup included, but "
                f"max_task_tokens={self.max_task_tokens} was declared. Shorten the task, or "
                "declare more and check the budget again.",
                node=run.node,
                needed_tokens=num_tokens,
                limit_tokens=self.max_task_tokens,
                limit_name="max_task_tokens",
            )

    def _options(self, run: NodeRun, ref: DocumentRef | None) -> dict[str, Any]:
        options = {
            **self.call_options,
            "keep_prefix": False,
            "request_name": self._finding(run),
            "n": 1,  # more would be computed for nobody
        }
        if ref and "prompt_time" in ref:
            options["prompt_time"] = ref["prompt_time"]
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        if self.required_prefix_tokens is not None:
            present = ref["num_tokens"] if ref else self.required_prefix_tokens
            options["required_prefix_tokens"] = min(self.required_prefix_tokens, present)
        return options

    def _expectation(self, cached: DocumentRef | None) -> dict[str, int]:
        """What of the prompt should be in the cache by now."""
        if cached is None:
            return {}
        num_tokens = min(cached["num_tokens"], self.required_prefix_tokens or cached["num_tokens"])
        return {"expected_cached_tokens": num_tokens}

    def _output(
        self, run: NodeRun, cached: DocumentRef | None, answer: AIMessage
    ) -> dict[str, Any]:
        _tell_analyst(run, answer)
        if cached is not None:
            run.tell_shortfall(
                cached["digest"],
                expected_tokens=self._expectation(cached)["expected_cached_tokens"],
                cached_tokens=_cached_tokens(answer),
            )
        if self.output_key == MESSAGES_KEY:
            self._content(answer, run)  # an object that does not validate is an error here too
            named = answer.name or self._finding(run)
            return {MESSAGES_KEY: [answer.model_copy(update={"name": named})]}
        finding = self._content(answer, run)
        if self.output_key is not None:
            return {self.output_key: finding}
        return {FINDINGS_KEY: {self._finding(run): finding}}

    def _content(self, answer: AIMessage, run: NodeRun) -> Any:
        if self.schema is None:
            return str(answer.text)
        try:
            return answer_object(answer, self.schema)
        except AnswerError as error:
            kind = type(error)
            if self._is_sampled:
                # LangChain's own kinds are ValueErrors, which LangGraph never tries again.
                is_cut = isinstance(error, TruncatedAnswerError)
                kind = TruncatedAnswerError if is_cut else AnswerError
            raise kind(f"Analyst {run.node!r}: {error}", **error.facts, node=run.node) from error

    @property
    def _is_sampled(self) -> bool:
        """Whether the same call may be answered in another way the next time."""
        temperature, seed, top_k = (
            self._model.options.get(name, getattr(self.llm, name))
            for name in ("temperature", "seed", "top_k")
        )
        return bool(temperature) and seed is None and top_k != 1

    def _finding(self, run: NodeRun) -> str:
        name, number = self.name or run.node, run.copy_number
        return name if number is None else f"{name}[{number}]"


@dataclass(frozen=True)
class _Document:
    """What the analyst reads."""

    shared: list[BaseMessage]
    ref: DocumentRef | None
    """The state's reference."""
    cached: DocumentRef | None
    """The same, if this process has prefilled just this text for it."""
    is_known: bool
    """Whether the document needs no prefill of its own. It needs one where this process has not
    prefilled it yet (after a restart, or when the text was changed), so that it stays for the
    analysts after this one; their own cells go when they end."""


@dataclass(frozen=True)
class _Call:
    """One answer to ask for."""

    shared: list[BaseMessage]
    messages: list[BaseMessage]
    options: dict[str, Any]

    @property
    def prompt_time(self) -> str | None:
        return self.options.get("prompt_time")


def _cached_tokens(answer: AIMessage) -> int:
    usage = answer.usage_metadata
    return usage.get("input_token_details", {}).get("cache_read", 0) if usage else 0


def _tell_analyst(run: NodeRun, answer: AIMessage) -> None:
    usage = answer.usage_metadata
    metadata = answer.response_metadata
    prompt_tokens = usage["input_tokens"] if usage else 0
    cached_tokens = _cached_tokens(answer)
    run.tell(
        "analyst",
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        computed_tokens=prompt_tokens - cached_tokens,
        output_tokens=usage["output_tokens"] if usage else 0,
        finish_reason=metadata.get("finish_reason"),
        **metadata.get("timings", {}),
    )


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigurationError(f"{name}={value!r} must be a whole number, at least 1.")
