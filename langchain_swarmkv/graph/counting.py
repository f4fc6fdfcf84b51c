"""Exact token counts for the budget, from the vocabulary alone: no weights, no lock.

A prompt is `shared prefix + task`. The prefix is what `DocumentNode` prefills, and everything after
it (the task, with the markup around it) belongs to the branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from langchain_core.messages import BaseMessage

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.tasks import static_task_messages
from langchain_swarmkv.prompts.document import document_message

__all__ = [
    "DocumentSize",
    "PoolLimits",
    "Prefix",
    "PrefixCounter",
    "pool_key",
    "pool_limits",
    "read_tokens",
]

_STAND_IN = "x"
"""A document of one token, to measure the markup and the instructions around one."""


@dataclass(frozen=True)
class DocumentSize:
    """What is known of the documents before the graph runs, by their state key."""

    texts: Mapping[str, str | None] | str | None = None
    num_tokens: Mapping[str, int] | int | None = None

    @property
    def is_given(self) -> bool:
        """Whether anything is known."""
        return self.texts is not None or self.num_tokens is not None

    def text(self, key: str) -> str | None:
        """The document's text, if it was given."""
        return self.texts if isinstance(self.texts, str | None) else self.texts.get(key)

    def tokens(self, key: str) -> int | None:
        """The tokens of the document's text alone, if they were given."""
        tokens = self.num_tokens
        return tokens.get(key) if isinstance(tokens, Mapping) else tokens


@dataclass(frozen=True)
class Prefix:
    """The shared part of one document's prompts, for one model object."""

    key: object
    """Equal for prefixes that share their cells."""
    input_key: str
    """State key of the document."""
    num_tokens: int | None
    """None: nothing is known of the document."""
    overhead_tokens: int
    """Tokens of it that are not the document's text: markup and instructions."""
    messages: tuple[BaseMessage, ...]
    """The message that was counted; with a stand-in where the text is not known."""
    token_ids: tuple[int, ...]
    prompt_time: str | None = None
    """Date and time in the prompts, as the document's node will have them."""


class PrefixCounter:
    """Counts prefixes and tasks of one model object; nothing is read where no size is given."""

    def __init__(self, llm: ChatSwarmKV, size: DocumentSize) -> None:
        self._llm = llm
        self._size = size
        self._prefixes: dict[tuple[str, str, int], Prefix] = {}

    def prefix(self, input_key: str, instructions: str, reader: ChatSwarmKV) -> Prefix:
        """The shared part of the document under a state key.

        Args:
            input_key: the state key.
            instructions: what stands before the document.
            reader: the model of the document's node, whose clock decides.
        """
        key = input_key, instructions, id(reader)
        if key not in self._prefixes:
            self._prefixes[key] = self._count(input_key, instructions, reader)
        return self._prefixes[key]

    def _count(self, input_key: str, instructions: str, reader: ChatSwarmKV) -> Prefix:
        text, num_tokens = self._size.text(input_key), self._size.tokens(input_key)
        message = document_message(_STAND_IN if text is None else text, instructions)
        if not self._size.is_given:
            key: object = (self._llm.cache_salt, input_key, instructions)
            return Prefix(key, input_key, None, 0, (message,), ())
        time = reader.prompt_time([message])
        ids = self._llm.prefix_token_ids([message], prompt_time=time)
        overhead = self._overhead(_STAND_IN, instructions, time)
        if text is not None:
            num_tokens = len(ids)
            # Tokens merge at the seams, in one text more than in another.
            overhead = max(overhead, len(ids) - self._llm.get_num_tokens(text))
        elif num_tokens is not None:
            num_tokens += overhead
        key = (self._llm.cache_salt, input_key, tuple(ids))
        return Prefix(key, input_key, num_tokens, overhead, (message,), tuple(ids), time)

    def _overhead(self, text: str, instructions: str, time: str | None) -> int:
        message = document_message(text, instructions)
        ids = self._llm.prefix_token_ids([message], prompt_time=time)
        return len(ids) - self._llm.get_num_tokens(text)

    def task_tokens(self, analyst: AnalystNode, prefix: Prefix) -> int | None:
        """Prompt tokens after the shared part; None if they depend on the state."""
        task = static_task_messages(analyst.task)
        if task is None or not prefix.token_ids:
            return analyst.max_task_tokens
        messages = [*prefix.messages, *task]
        options = {**analyst.call_options, "prompt_time": prefix.prompt_time}
        if _is_slice(analyst, prefix):
            # What follows the slice does not depend on its length.
            ids = self._llm.prompt_token_ids(messages, required_prefix_tokens=1, **options)
            return len(ids) - 1
        ids = self._llm.prompt_token_ids(messages, **options)
        return len(ids) - len(prefix.token_ids)


def read_tokens(analyst: AnalystNode, prefix: Prefix) -> int | None:
    """Tokens of the shared part that the analyst reads; None: not known."""
    return analyst.required_prefix_tokens if _is_slice(analyst, prefix) else prefix.num_tokens


def _is_slice(analyst: AnalystNode, prefix: Prefix) -> bool:
    required = analyst.required_prefix_tokens
    return required is not None and (prefix.num_tokens is None or required < prefix.num_tokens)


@dataclass(frozen=True)
class PoolLimits:
    """What one engine can hold, as its settings say."""

    model: str
    n_ctx: int
    n_ctx_train: int | None
    """None: not read."""
    max_sequences: int


def pool_key(llm: ChatSwarmKV) -> object:
    """Equal for model objects that share one engine."""
    return llm.engine if llm.engine is not None else (llm.engine_config, llm.snapshot_settings)


def pool_limits(llm: ChatSwarmKV, *, read_file: bool) -> PoolLimits:
    """The limits of a model object's engine; at most its vocabulary is loaded, if asked."""
    if llm.engine is not None:
        limits, facts = llm.engine.limits, llm.engine.facts
        return PoolLimits(llm.model_name, limits.num_cells, facts.n_ctx_train, limits.max_sequences)
    n_ctx_train = llm.tokenizer.n_ctx_train if read_file else None
    return PoolLimits(llm.model_name, llm.n_ctx, n_ctx_train, llm.max_sequences)
