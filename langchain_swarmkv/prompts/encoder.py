"""Whole prompts and shared prefixes as token ids.

What a conversation shares with every other that begins with the same messages is a prefix of ids,
not of text: the last characters of the shared text may merge with what follows. It is therefore
found by encoding several continuations and taking what they have in common.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from langchain_core.messages import BaseMessage

from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.errors import ChatTemplateError, InvalidRequestError
from langchain_swarmkv.prompts.call_format import CallFormat, ReasoningTags
from langchain_swarmkv.prompts.control_marks import ControlMarks
from langchain_swarmkv.prompts.messages import (
    TemplateMessage,
    content_strings,
    map_content,
    map_strings,
    split_thoughts,
    template_messages,
    with_user_text,
)
from langchain_swarmkv.prompts.segments import Segmenter, StandIns, unused_characters
from langchain_swarmkv.prompts.template import ChatTemplate
from langchain_swarmkv.prompts.tools import Tool, map_tool

__all__ = [
    "AnswerStyle",
    "Ask",
    "EncodedPrompt",
    "PromptEncoder",
    "Thinking",
    "watermark_slice",
]

# First characters of each kind that pre-tokenizers tell apart, those that merge with white space or
# punctuation before them, and no character at all.
_PROBES = ("", "a", "A", "1", " a", "\na", "\n\na", "\ta", "?", "'s", "<", "_", "中", "é", "😀")


class Thinking(Enum):
    """Whether an answer begins with thoughts."""

    OFF = "off"
    """The model writes none, or the prompt has closed them."""
    FREE = "free"
    """As the model likes."""
    BEGUN = "begun"
    """The prompt has opened them."""


@dataclass(frozen=True)
class Ask:
    """What a call says to the model besides its messages."""

    tools: Sequence[Tool] = ()
    instructions: str = ""
    """Follows the text of the first user turn."""
    keep_reasoning: bool = False
    """Whether templates get to see earlier thoughts."""


NOTHING_MORE = Ask()


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids, and how the answer begins."""

    ids: list[int]
    thinking: Thinking


@dataclass(frozen=True)
class AnswerStyle:
    """How one model writes calls and thoughts."""

    calls: CallFormat
    reasoning: ReasoningTags | None
    marks: ControlMarks


class PromptEncoder:
    """Turns messages into the ids that one model is given.

    Args:
        tokenizer: the model's vocabulary.
        chat_template: jinja source; None: the model's own, or the plain fallback.
        variables: more variables for the template.

    Raises:
        ChatTemplateError: the template does not parse.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(chat_template, tokenizer, variables)
        tags = self._template.reasoning
        # Whether an answer begins with thoughts, the template's words alone decide.
        hidden = (tags.opening, tags.closing) if tags else ()
        self._segmenter = Segmenter(tokenizer, self._template.source, hidden)

    @cached_property
    def answers(self) -> AnswerStyle:
        """How the model writes calls and thoughts, with marks in place of control tokens."""
        marks = ControlMarks(self._segmenter)
        tags = self._template.reasoning
        reasoning = tags and ReasoningTags(marks.mark(tags.opening), marks.mark(tags.closing))
        return AnswerStyle(self._template.call_format.map_text(marks.mark), reasoning, marks)

    def encode(self, messages: Sequence[BaseMessage], tools: Sequence[Tool] = ()) -> list[int]:
        """The token ids of `prompt`."""
        return self.prompt(messages, Ask(tools)).ids

    def prompt(self, messages: Sequence[BaseMessage], ask: Ask = NOTHING_MORE) -> EncodedPrompt:
        """A prompt that asks for the next turn of the conversation.

        Raises:
            PromptError: there are no messages, they hold something that is not text, or the
                template refuses them.
        """
        prompt = self._conversation(messages, ask)
        text = prompt.render()
        return EncodedPrompt(self._with_start(prompt.ids(text)), self._thinking(text))

    def _conversation(self, messages: Sequence[BaseMessage], ask: Ask) -> _Prompt:
        converted = template_messages(messages, keep_reasoning=ask.keep_reasoning)
        tags = self._template.reasoning
        if tags is not None:
            # The template would do this, but it does not see markup in content.
            converted = [split_thoughts(m, tags, keep=ask.keep_reasoning) for m in converted]
        if ask.instructions:
            converted = with_user_text(converted, after=ask.instructions)
        return _Prompt(self._segmenter, self._template, converted, ask.tools)

    def _thinking(self, prompt_text: str) -> Thinking:
        tags, text = self._template.reasoning, prompt_text.rstrip()
        if tags is None or text.endswith(tags.closing):
            return Thinking.OFF
        return Thinking.BEGUN if text.endswith(tags.opening) else Thinking.FREE

    def _encode(self, messages: Sequence[TemplateMessage]) -> list[int]:
        prompt = _Prompt(self._segmenter, self._template, messages)
        return self._with_start(prompt.ids(prompt.render()))

    def _with_start(self, ids: list[int]) -> list[int]:
        # Templates may write the start token themselves; there must be one, and only one.
        bos_id = self.tokenizer.bos_id if self.tokenizer.adds_bos else None
        return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]

    def shared_prefix(self, messages: Sequence[BaseMessage]) -> list[int]:
        """The longest ids that every conversation beginning with these messages begins with.

        After a system message a user turn is expected, after others any turn or none.

        Raises:
            PromptError: as in `encode`; or the template puts something before these messages.
        """
        shared = template_messages(messages)
        prefix = _common_prefix(list(self._continuations(shared)))
        if not prefix:
            raise ChatTemplateError(
                f"The chat template of {self.tokenizer.name!r} shares nothing between "
                "conversations that begin with these messages.",
                model=self.tokenizer.name,
            )
        return prefix

    def _continuations(self, shared: Sequence[TemplateMessage]) -> Iterator[list[int]]:
        tails: list[list[TemplateMessage]] = [[_turn("user", probe)] for probe in _PROBES]
        if shared[-1]["role"] != "system":
            answer = _turn("assistant", "a")
            tails += [[], [answer], [answer, _turn("user", "a")], [_turn("tool", "a")]]
        refusals: list[ChatTemplateError] = []
        for tail in tails:
            try:
                yield self._encode([*shared, *tail])
            except ChatTemplateError as error:
                refusals.append(error)
        if len(refusals) == len(tails):
            raise refusals[0]

    def prompt_slice(
        self, messages: Sequence[BaseMessage], num_prefix_tokens: int, ask: Ask = NOTHING_MORE
    ) -> EncodedPrompt:
        """A prompt that holds only the first tokens of its document, and all that follows it.

        The document is the run of system messages at the start. Asking for as much as there is
        gives the whole prompt.

        Raises:
            InvalidRequestError: no such document, or not `1 <= num_prefix_tokens <=` its prefix.
        """
        size = next((i for i, m in enumerate(messages) if m.type != "system"), len(messages))
        if size == 0:
            raise InvalidRequestError(
                "required_prefix_tokens needs a document: the first message must be a system "
                "message.",
            )
        prefix = self.shared_prefix(messages[:size])
        prompt = self._conversation(messages, ask)
        text = prompt.render()
        head, tail = prompt.render_split(size - 1)
        whole = self._with_start(prompt.ids(text))
        document = _common_prefix([self._with_start(prompt.ids(head)), whole])
        _check_slice(prefix, num_prefix_tokens)
        if num_prefix_tokens < len(document):
            whole = watermark_slice(document, prompt.ids(tail), num_prefix_tokens)
        return EncodedPrompt(whole, self._thinking(text))


def watermark_slice(
    prefix_ids: Sequence[int], rest_ids: Sequence[int], num_prefix_tokens: int
) -> list[int]:
    """The prompt of a branch that sees only the first `num_prefix_tokens` of a prefix.

    Raises:
        InvalidRequestError: not `1 <= num_prefix_tokens <= len(prefix_ids)`.
    """
    _check_slice(prefix_ids, num_prefix_tokens)
    return [*prefix_ids[:num_prefix_tokens], *rest_ids]


def _check_slice(prefix_ids: Sequence[int], num_prefix_tokens: int) -> None:
    is_number = isinstance(num_prefix_tokens, int)
    if not is_number or not 1 <= num_prefix_tokens <= len(prefix_ids):
        raise InvalidRequestError(
            f"required_prefix_tokens={num_prefix_tokens}, but the shared prefix has "
            f"{len(prefix_ids)} tokens; ask for 1 to {len(prefix_ids)}.",
            required_prefix_tokens=num_prefix_tokens,
            num_prefix_tokens=len(prefix_ids),
        )


class _Prompt:
    """One conversation on its way through the template, with its own stand-ins."""

    def __init__(
        self,
        segmenter: Segmenter,
        template: ChatTemplate,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Tool] = (),
    ) -> None:
        others = json.dumps([tools, template.documents], ensure_ascii=False, default=str)
        self._unused = unused_characters([template.source, *content_strings(messages), others])
        self._stand_ins = StandIns(self._unused)
        self._segmenter = segmenter
        self._template = template
        self._messages = [map_content(message, self._hide) for message in messages]
        self._tools = [map_tool(tool, self._hide) for tool in tools]
        self._documents = map_strings(template.documents, self._hide, keys=False)

    def _hide(self, text: str) -> str:
        return self._segmenter.hide_control(text, self._stand_ins)

    def render(self) -> str:
        """The prompt's text, stand-ins in it."""
        return self._template.render(self._messages, self._tools, self._documents)

    def render_split(self, place: int) -> tuple[str, str]:
        """The prompt's text up to the end of a message's content, and from there on."""
        mark = next(self._unused)
        content = self._messages[place]["content"]
        # Before the white space at the end, which the template may trim.
        end = len(content.rstrip())
        marked = [*self._messages]
        marked[place] = {**marked[place], "content": content[:end] + mark + content[end:]}
        head, _, tail = self._template.render(marked, self._tools, self._documents).rpartition(mark)
        return head, tail

    def ids(self, text: str) -> list[int]:
        """Token ids of rendered text."""
        return self._segmenter.encode(text, self._stand_ins)


def _turn(role: str, content: str) -> TemplateMessage:
    return {"role": role, "content": content}


def _common_prefix(prompts: Sequence[list[int]]) -> list[int]:
    # What the smallest and the largest share, in the order of lists, all between them share.
    first, last = min(prompts), max(prompts)
    size = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
    return first[:size]
