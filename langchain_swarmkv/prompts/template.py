"""Chat templates: from template messages to the text of a prompt, whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cached_property
from itertools import islice

from jinja2.exceptions import SecurityError

from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.errors import ChatTemplateError
from langchain_swarmkv.prompts.call_format import CallFormat, ReasoningTags
from langchain_swarmkv.prompts.call_turns import (
    DEFAULT_FORMAT,
    native_calls,
    plain_calls,
    plain_tools,
)
from langchain_swarmkv.prompts.messages import (
    TemplateMessage,
    content_strings,
    fold,
    merge,
    with_user_text,
)
from langchain_swarmkv.prompts.sandbox import compile_template, render, strftime_at
from langchain_swarmkv.prompts.segments import unused_characters
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
        source: the jinja source; None: the model's own, or `PLAIN_TEMPLATE` if it has none.
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
        self.source = source or tokenizer.chat_template or PLAIN_TEMPLATE
        self._tokenizer = tokenizer
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
            self._template = compile_template(self.source)
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
        return template

    @cached_property
    def reasoning(self) -> ReasoningTags | None:
        """The tags around thoughts; None: the template writes none."""
        tags = (t for t in _REASONING_TAGS if t.opening in self.source and t.closing in self.source)
        return next(tags, None)

    @property
    def call_format(self) -> CallFormat:
        """How the model writes tool calls: the template's way, or `DEFAULT_FORMAT`."""
        return self._native_calls.format if self._native_calls else DEFAULT_FORMAT

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

        A template that refuses the conversation, or leaves the text of a system message out, gets
        it once more with neighbours of one role merged, and then with system texts folded into
        user turns.

        Args:
            messages: the conversation. Where the template has no way to write tool calls, calls
                and results become text of ordinary turns.
            tools: what the model may call; told by the template, or at the start of the first user
                turn.
            documents: in place of the variable of this name; None: as it is.

        Raises:
            ChatTemplateError: it refuses that as well.
        """
        variables = {} if documents is None else {"documents": documents}
        if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            return self._render(messages, variables)
        if self._native_calls is not None:
            if tools:
                variables["tools"] = tools
            return self._render(native_calls(messages, self._native_calls), variables)
        messages = plain_calls(messages)
        if tools:
            messages = with_user_text(messages, before=plain_tools(tools))
        return self._render(messages, variables)

    def _render(self, messages: Sequence[TemplateMessage], variables: Mapping[str, object]) -> str:
        attempts = [list(messages)]
        for changed in (merge(messages), fold(messages)):
            if changed != attempts[-1]:
                attempts.append(changed)
        reasons: list[Exception] = []
        for attempt in attempts:
            try:
                self._check_system_text(attempt, variables)
                return self._run(attempt, variables)
            except Exception as error:
                reasons.append(error)
                if isinstance(error, SecurityError):
                    break  # another conversation makes it no safer, nor quicker
        raise self._refusal(messages, reasons) from reasons[0]

    def _check_system_text(
        self, messages: Sequence[TemplateMessage], variables: Mapping[str, object]
    ) -> None:
        """Run the template with a mark in place of each system text and look for the marks."""
        places = [i for i, message in enumerate(messages) if message["role"] == "system"]
        if not places:
            return
        probe = list(messages)
        texts = [self.source, *content_strings(messages)]
        marks = list(islice(unused_characters(texts), len(places)))
        for place, mark in zip(places, marks, strict=True):
            probe[place] = {**probe[place], "content": mark}
        rendered = self._run(probe, variables)
        if not all(mark in rendered for mark in marks):
            raise ChatTemplateError("it leaves the text of a system message out")

    def _run(self, messages: Sequence[TemplateMessage], variables: Mapping[str, object]) -> str:
        return render(self._template, {**self._variables, **variables, "messages": list(messages)})

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
