"""Chat templates: from template messages to the text of a prompt, whole or not at all."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import cached_property

from jinja2.exceptions import SecurityError

from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.errors import ChatTemplateError
from langchain_swarmkv.prompts.call_format import CallFormat, ReasoningTags
from langchain_swarmkv.prompts.call_turns import (
    DEFAULT_FORMAT,
    calls_apart,
    native_calls,
    plain_calls,
    plain_results,
    plain_tools,
)
from langchain_swarmkv.prompts.messages import (
    TemplateMessage,
    content_strings,
    fold,
    merge,
    num_leading_systems,
    with_user_text,
)
from langchain_swarmkv.prompts.sandbox import compile_template, render, strftime_at
from langchain_swarmkv.prompts.segments import unused_characters
from langchain_swarmkv.prompts.text_proof import TextProof
from langchain_swarmkv.prompts.tool_style import NativeCalls, find_native_calls
from langchain_swarmkv.prompts.tools import Tool

__all__ = ["PLAIN_TEMPLATE", "ChatTemplate"]

PLAIN_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- message.content + '\\n\\n' }}
{%- elif message.role == 'user' %}
{{- 'User: ' + message.content + '\\n\\n' }}
{%- else %}
{{- 'Assistant: ' + message.content + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
"""For models without a template (base models): plain words, no control tokens.

Such a model does not know where its answer ends; give `stop=["\\n\\nUser:"]`."""

_REASONING_TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
)

_SOME_DAY = datetime(2000, 1, 1, tzinfo=timezone.utc)
"""When a template is asked how it writes things; what it answers must not depend on the day."""


class ChatTemplate:
    """One template for one model.

    Args:
        source: the jinja source; None: the model's own, or `PLAIN_TEMPLATE` if it has none. Where
            the model has one of its own for tools beside it, that one tells tools and calls.
        tokenizer: whose start and end tokens the template may write.
        variables: more variables for the template (`enable_thinking`, say).

    Raises:
        ChatTemplateError: the template does not parse.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        variables: Mapping[str, object] | None = None,
    ) -> None:
        own = (tokenizer.chat_template, tokenizer.tool_use_template)
        main = source or own[0] or own[1] or PLAIN_TEMPLATE
        self._tool_use_source = own[1] if main == own[0] else None
        self.source = main + (self._tool_use_source or "")
        """All that the templates in use may write."""
        self._tokenizer = tokenizer
        self._given_variables = variables
        self._model = tokenizer.name
        control = {token.token_id: text for text, token in tokenizer.special_tokens.items()}
        self._variables: dict[str, object] = {
            "tools": None,
            "documents": None,
            "strftime_now": strftime_at(_SOME_DAY),
            **(variables or {}),
            "add_generation_prompt": True,
            "bos_token": control.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else "",
            "eos_token": control.get(tokenizer.eos_id, "") if tokenizer.eos_id is not None else "",
        }
        self.reads_clock = "strftime_now" in self.source and "strftime_now" not in (variables or ())
        """Whether prompts depend on when they are rendered."""
        try:
            self._template = compile_template(main)
        except Exception as error:
            raise ChatTemplateError(
                f"The chat template of {self._model!r} cannot be used: {_reason(error)}. "
                "Give another one as chat_template.",
                model=self._model,
            ) from error

    def at(self, instant: datetime) -> ChatTemplate:
        """This template at an instant; all that it is asked there has the same date and time."""
        if not self.reads_clock:
            return self
        for name, attribute in vars(ChatTemplate).items():
            if isinstance(attribute, cached_property):
                getattr(self, name)  # found out once, not again at each instant
        template = copy.copy(self)
        template._variables = {**self._variables, "strftime_now": strftime_at(instant)}
        template._tool_use = self._tool_use and self._tool_use.at(instant)
        return template

    @cached_property
    def reasoning(self) -> ReasoningTags | None:
        """The tags around thoughts; None: the template writes none."""
        tags = (t for t in _REASONING_TAGS if t.opening in self.source and t.closing in self.source)
        return next(tags, None)

    @property
    def call_format(self) -> CallFormat:
        """How the model writes tool calls: the template's way, or `DEFAULT_FORMAT`."""
        native = self._for_tools._native_calls
        return native.format if native else DEFAULT_FORMAT

    @property
    def _for_tools(self) -> ChatTemplate:
        """The template that tells tools and calls."""
        return self._tool_use or self

    @cached_property
    def _tool_use(self) -> ChatTemplate | None:
        if self._tool_use_source is None:
            return None
        named = ChatTemplate(self._tool_use_source, self._tokenizer, self._given_variables)
        return named if named._native_calls else None

    @cached_property
    def _native_calls(self) -> NativeCalls | None:
        specials = self._tokenizer.special_tokens.values()
        ends = [token.text for token in specials if self._tokenizer.is_end(token.token_id)]
        return find_native_calls(
            lambda messages, tools: self._run(messages, {"tools": tools}), ends, self.reasoning
        )

    @property
    def documents(self) -> object:
        """The template's variable of this name: texts from outside."""
        return self._variables["documents"]

    def render(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Tool] = (),
        documents: object = None,
    ) -> str:
        """The text of the prompt, up to where the answer begins.

        Every prompt is proved to hold the text of every message; see `text_proof`. A template that
        refuses the conversation, or leaves a text out, gets it changed, no more than it must be:
        neighbours of one role merged, later system texts folded into user turns, and then the
        leading ones; texts beside calls as turns of their own.

        Args:
            messages: the conversation. Where the template has no way to write tool calls, calls
                and results become text of ordinary turns.
            tools: what the model may call; told by the template, or at the start of the first user
                turn.
            documents: in place of the variable of this name; None: as it is.

        Raises:
            ChatTemplateError: it refuses all of these as well, or loses a text each time.
        """
        variables = {} if documents is None else {"documents": documents}
        if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            return self._render(messages, variables)
        native = self._for_tools._native_calls
        if native is not None:
            if tools:
                variables["tools"] = tools
            return self._for_tools._render(native_calls(messages, native), variables)
        messages = plain_calls(messages)
        if tools:
            messages = with_user_text(messages, before=plain_tools(tools))
        return self._render(messages, variables)

    def _render(self, messages: Sequence[TemplateMessage], variables: Mapping[str, object]) -> str:
        reasons: list[Exception] = []
        for attempt in _attempts(messages):
            try:
                return self._proved(attempt, variables)
            except Exception as error:
                reasons.append(error)
                if isinstance(error, SecurityError):
                    break  # another conversation makes it no safer, nor quicker
        raise self._refusal(messages, reasons) from reasons[0]

    def _proved(self, messages: Sequence[TemplateMessage], variables: Mapping[str, object]) -> str:
        """Run the template, and prove that the prompt holds what the messages say."""
        documents = variables.get("documents", self.documents)
        # All that a template may print: tools have stand-ins of their own, see `segments`.
        others = json.dumps({**self._variables, **variables}, ensure_ascii=False, default=str)
        marks = unused_characters([self.source, others, *content_strings(messages)])
        proof = TextProof(messages, documents, marks, self.source)
        marked = self._run(proof.messages, {**variables, "documents": proof.documents})
        proof.check(marked)
        rendered = self._run(messages, variables)
        proof.confirm(marked, rendered)
        return rendered

    def _run(self, messages: Sequence[TemplateMessage], variables: Mapping[str, object]) -> str:
        typed = self._typed_roles
        given = [_with_blocks(m) if m["role"] in typed else m for m in messages]
        return self._write(given, variables)

    def _write(self, messages: Sequence[TemplateMessage], variables: Mapping[str, object]) -> str:
        return render(self._template, {**self._variables, **variables, "messages": list(messages)})

    @cached_property
    def _typed_roles(self) -> frozenset[str]:
        """Roles whose text it reads from a list of blocks alone, as templates for images do."""
        mark = next(unused_characters([self.source]))
        typed: set[str] = set()
        for role, probe in _role_probes(mark):
            given = [_with_blocks(m) if m["role"] in typed else m for m in probe]
            blocks = [_with_blocks(m) if m["role"] == role else m for m in given]
            # Python writes a printed list with escapes in place of such a mark.
            if mark not in self._tried(given) and mark in self._tried(blocks):
                typed.add(role)
        return frozenset(typed)

    def _tried(self, messages: Sequence[TemplateMessage]) -> str:
        try:
            return self._write(messages, {})
        except Exception:
            return ""

    def _refusal(
        self, messages: Sequence[TemplateMessage], reasons: Sequence[Exception]
    ) -> ChatTemplateError:
        roles = [message["role"] for message in messages]
        changed = f", and merged and folded: {_reason(reasons[-1])}" if len(reasons) > 1 else ""
        return ChatTemplateError(
            f"The chat template of {self._model!r} refuses these messages "
            f"(roles: {', '.join(roles)}): {_reason(reasons[0])}{changed}. "
            "Change their order or roles, or give another chat_template.",
            model=self._model,
            roles=roles,
            reason=_reason(reasons[0]),
        )


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


def _attempts(messages: Sequence[TemplateMessage]) -> Iterator[list[TemplateMessage]]:
    """The conversation, and what to try where it is refused, the smallest change first."""
    start = num_leading_systems(messages)
    known: list[list[TemplateMessage]] = []
    for calls in (list, calls_apart, plain_results):
        for changed in (
            list(messages),
            merge(messages),
            fold(messages, start=start, others=False),
            fold(messages, start=start),
            fold(messages),
        ):
            attempt = calls(changed)
            if attempt not in known:
                known.append(attempt)
                yield attempt


def _role_probes(mark: str) -> Iterator[tuple[str, list[TemplateMessage]]]:
    """For each role a conversation in which its text is the mark."""
    user = {"role": "user", "content": "Probe."}
    call = {"name": "probe", "arguments": {"key": "value"}}
    calls = [{"type": "function", "id": "aAlpha123", "function": call}]
    yield "user", [{"role": "user", "content": mark}]
    yield "system", [{"role": "system", "content": mark}, user]
    yield "assistant", [user, {"role": "assistant", "content": mark}, user]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    yield "tool", [user, asked, {"role": "tool", "content": mark, "tool_call_id": "aAlpha123"}]


def _with_blocks(message: TemplateMessage) -> TemplateMessage:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
