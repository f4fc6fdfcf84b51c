"""Whole prompts and shared prefixes as token ids.

What a conversation shares with every other that begins with the same messages is a prefix of ids,
not of text: the last characters of the shared text may merge with what follows. It is therefore
found by encoding several continuations and taking what they have in common.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cached_property
from heapq import nsmallest
from typing import TypeAlias, TypeVar

from langchain_core.messages import BaseMessage

from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.errors import ChatTemplateError, InvalidRequestError
from langchain_swarmkv.prompts.call_format import CallFormat, ReasoningTags
from langchain_swarmkv.prompts.clock import read_clock
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

_SEAM_CHARS = 32
"""Longest piece of a vocabulary, in characters, whose beginning is looked for at a seam."""
_NUM_JOINING = 16

_log = logging.getLogger(__name__)


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
        self._unshared_roles: set[str] = set()

    @cached_property
    def answers(self) -> AnswerStyle:
        """How the model writes calls and thoughts, with marks in place of control tokens."""
        marks = ControlMarks(self._segmenter)
        tags = self._template.reasoning
        reasoning = tags and ReasoningTags(marks.mark(tags.opening), marks.mark(tags.closing))
        return AnswerStyle(self._template.call_format.map_text(marks.mark), reasoning, marks)

    @property
    def reads_clock(self) -> bool:
        """Whether prompts depend on when they are rendered."""
        return self._template.reads_clock

    def encode(self, messages: Sequence[BaseMessage], tools: Sequence[Tool] = ()) -> list[int]:
        """The token ids of `prompt`."""
        return self.prompt(messages, Ask(tools)).ids

    def prompt(
        self,
        messages: Sequence[BaseMessage],
        ask: Ask = NOTHING_MORE,
        instant: datetime | None = None,
    ) -> EncodedPrompt:
        """A prompt that asks for the next turn of the conversation.

        Args:
            messages: the conversation.
            ask: what else the call says.
            instant: date and time for the template; None: the present.

        Raises:
            PromptError: there are no messages, they hold something that is not text, or the
                template refuses them.
        """
        prompt = self._conversation(messages, ask, instant)
        text = prompt.render()
        return EncodedPrompt(self.with_start(prompt.ids(text)), self._thinking(text))

    def _conversation(
        self, messages: Sequence[BaseMessage], ask: Ask, instant: datetime | None
    ) -> _Prompt:
        converted = template_messages(messages, keep_reasoning=ask.keep_reasoning)
        tags = self._template.reasoning
        if tags is not None:
            # The template would do this, but it does not see markup in content.
            converted = [split_thoughts(m, tags, keep=ask.keep_reasoning) for m in converted]
        if ask.instructions:
            converted = with_user_text(converted, after=ask.instructions)
        return _Prompt(self._segmenter, self._template_at(instant), converted, ask.tools)

    def _template_at(self, instant: datetime | None) -> ChatTemplate:
        return self._template.at(read_clock(None) if instant is None else instant)

    def _thinking(self, prompt_text: str) -> Thinking:
        tags, text = self._template.reasoning, prompt_text.rstrip()
        if tags is None or text.endswith(tags.closing):
            return Thinking.OFF
        return Thinking.BEGUN if text.endswith(tags.opening) else Thinking.FREE

    def with_start(self, ids: list[int]) -> list[int]:
        """A prompt's ids with the start token: templates may write it too, but one is enough."""
        bos_id = self.tokenizer.bos_id if self.tokenizer.adds_bos else None
        return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]

    def shared_prefix(
        self, messages: Sequence[BaseMessage], instant: datetime | None = None
    ) -> list[int]:
        """The longest ids that every conversation beginning with these messages begins with.

        Whatever comes next: nothing, or a turn of any role. A role whose turns make the template
        put these messages elsewhere, so that hardly anything would be left, is not counted; a
        warning in the log says so.

        Args:
            messages: how the conversations begin.
            instant: date and time for the template; None: the present.

        Raises:
            PromptError: as in `encode`; or the template puts something before these messages.
        """
        shared = template_messages(messages)
        return _SharedPrefix(self, shared, self._template_at(instant)).ids()

    def prompt_of(self, turns: Sequence[TemplateMessage], template: ChatTemplate) -> _Prompt:
        """A conversation on its way through a template."""
        return _Prompt(self._segmenter, template, turns)

    def ends_with_control(self, ids: Sequence[int]) -> bool:
        """Whether nothing that follows can join the last of these tokens."""
        return not ids or self._segmenter.is_control_id(ids[-1])

    def joining_texts(self, text: str) -> list[str]:
        """Texts that, right behind this one, make one token with its end; the worst first."""
        text = text[-2 * _SEAM_CHARS :]
        alone = self.tokenizer.encode(text)
        found: list[tuple[int, str]] = []
        for size in range(1, min(_SEAM_CHARS, len(text)) + 1):
            start = text[-size:]
            first = bisect_left(self._pieces, start)
            last = bisect_left(self._pieces, start + chr(0x10FFFF))
            longer = (piece for piece in self._pieces[first:last] if len(piece) > size)
            for piece in nsmallest(_NUM_JOINING, longer, key=len):
                rest = piece[size:]
                kept = len(_common_prefix([alone, self.tokenizer.encode(text + rest)]))
                if kept < len(alone):
                    found.append((kept, rest))
        return [rest for _, rest in sorted(found)[:_NUM_JOINING]]

    @cached_property
    def _pieces(self) -> list[str]:
        """The texts of all tokens that are longer than a character, in order."""
        texts = (self.tokenizer.decode([token]) for token in range(self.tokenizer.n_vocab))
        return sorted({text for text in texts if len(text) > 1 and "\ufffd" not in text})

    def tell_unshared(self, role: str, num_tokens: int, num_expected: int) -> None:
        """Say, once for each role, that conversations which go on with it share little."""
        if role in self._unshared_roles:
            return
        self._unshared_roles.add(role)
        _log.warning(
            "The chat template of %r puts the first messages elsewhere when a turn of role %r "
            "follows them: such conversations share %d of %d prefilled tokens, and compute the "
            "rest again. Put what that turn says into the first message or into a user's.",
            self.tokenizer.name,
            role,
            num_tokens,
            num_expected,
        )

    def prompt_slice(
        self,
        messages: Sequence[BaseMessage],
        num_prefix_tokens: int,
        ask: Ask = NOTHING_MORE,
        instant: datetime | None = None,
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
        instant = read_clock(None) if instant is None else instant
        prefix = self.shared_prefix(messages[:size], instant)
        prompt = self._conversation(messages, ask, instant)
        text = prompt.render()
        head, tail = prompt.render_split(size - 1)
        whole = self.with_start(prompt.ids(text))
        document = _common_prefix([self.with_start(prompt.ids(head)), whole])
        _check_slice(prefix, num_prefix_tokens)
        if num_prefix_tokens < len(document):
            rest = prompt.ids(tail, goes_on=True)
            whole = watermark_slice(document, rest, num_prefix_tokens)
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

    def ids(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Token ids of rendered text, or of the rest of one that goes on in the middle."""
        return self._segmenter.encode(text, self._stand_ins, goes_on=goes_on)

    def shown(self, text: str) -> str:
        """Rendered text, the stand-ins replaced."""
        return self._stand_ins.put_back(text)


def _turn(role: str, content: str) -> TemplateMessage:
    return {"role": role, "content": content}


_Tail: TypeAlias = Callable[[str], list[TemplateMessage]]
"""The turns after the shared ones, the first of which begins with the text."""


def _user_tail(text: str) -> list[TemplateMessage]:
    return [_turn("user", text)]


_OTHER_TAILS: Mapping[str, _Tail] = {
    "none": lambda _: [],
    "system": lambda text: [_turn("system", text), _turn("user", "a")],
    "assistant": lambda text: [_turn("assistant", text), _turn("user", "a")],
    "tool": lambda text: [_turn("tool", text), _turn("user", "a")],
}
"""By the role that comes next."""


class _SharedPrefix:
    """What all conversations that begin with some turns have in common, by trying continuations.

    User turns are tried with many beginnings. The first turn of another role is tried with more
    than two only if its beginning decides where it leaves what user turns have in common.
    """

    def __init__(
        self, encoder: PromptEncoder, shared: Sequence[TemplateMessage], template: ChatTemplate
    ) -> None:
        self._encoder = encoder
        self._shared = shared
        self._template = template

    def ids(self) -> list[int]:
        prefix = self._without_merges(self._expected(), _user_tail)
        if not prefix:
            name = self._encoder.tokenizer.name
            raise ChatTemplateError(
                f"The chat template of {name!r} shares nothing between conversations that begin "
                "with these messages.",
                model=name,
            )
        for role, tail in _OTHER_TAILS.items():
            prefix = self._with_role(prefix, role, tail)
        return prefix

    def _expected(self) -> list[int]:
        """What user turns have in common, and after other messages than system ones any turn."""
        tails: list[list[TemplateMessage]] = [[_turn("user", probe)] for probe in _PROBES]
        if self._shared[-1]["role"] != "system":
            answer = _turn("assistant", "a")
            tails += [[], [answer], [answer, _turn("user", "a")], [_turn("tool", "a")]]
        found, refusals = [], []
        for tail in tails:
            try:
                found.append(self._encode(tail))
            except ChatTemplateError as error:
                refusals.append(error)
        if not found:
            raise refusals[0]
        return _common_prefix(found)

    def _with_role(self, prefix: list[int], role: str, tail: _Tail) -> list[int]:
        try:
            first = self._prompt(tail("a"))
            text = first.render()
            found = [self._ids(first, text), self._encode(tail("\n\na"))]
            left = _common_prefix([prefix, *found])
            if len(left) < len(prefix) and not self._keeps_text(first.shown(text)):
                self._encoder.tell_unshared(role, len(left), len(prefix))
                return prefix
            is_before_text = len(_common_prefix(found)) > len(left) or found[0] == found[1]
            if is_before_text or self._encoder.ends_with_control(left):
                return left
            found += [self._encode(tail(probe)) for probe in _PROBES]
        except ChatTemplateError:
            return prefix  # there are no such conversations
        return self._without_merges(_common_prefix([prefix, *found]), tail)

    def _keeps_text(self, text: str) -> bool:
        """Whether a prompt begins as with a user turn, up to the last text of these messages."""
        prompt = self._prompt([_turn("user", "a")])
        head, _ = prompt.render_split(len(self._shared) - 1)
        return head != "" and text.startswith(prompt.shown(head))

    def _without_merges(self, prefix: list[int], tail: _Tail) -> list[int]:
        """Without the last tokens, if a piece of the vocabulary joins them to what follows."""
        if self._encoder.ends_with_control(prefix):
            return prefix
        try:
            prompts = [self._prompt(tail(probe)) for probe in ("a", "b")]
            before = _common_prefix([prompt.shown(prompt.render()) for prompt in prompts])
            joined = [self._encode(tail(rest)) for rest in self._encoder.joining_texts(before)]
        except ChatTemplateError:
            return prefix
        return _common_prefix([prefix, *joined])

    def _prompt(self, tail: Sequence[TemplateMessage]) -> _Prompt:
        return self._encoder.prompt_of([*self._shared, *tail], self._template)

    def _encode(self, tail: Sequence[TemplateMessage]) -> list[int]:
        prompt = self._prompt(tail)
        return self._ids(prompt, prompt.render())

    def _ids(self, prompt: _Prompt, text: str) -> list[int]:
        return self._encoder.with_start(prompt.ids(text))


_Text = TypeVar("_Text", list[int], str)


def _common_prefix(prompts: Sequence[_Text]) -> _Text:
    # What the smallest and the largest share, in the order of lists, all between them share.
    first, last = min(prompts), max(prompts)
    size = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
    return first[:size]
