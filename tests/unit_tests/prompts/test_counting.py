"""Any part of a history counts, in either order, and a conversation counts exactly."""

from __future__ import annotations

from itertools import combinations

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)

from langchain_swarmkv.engine.fake import FakeTokenizer
from langchain_swarmkv.errors import ChatTemplateError
from langchain_swarmkv.prompts.counting import count_prompt
from langchain_swarmkv.prompts.encoder import PromptEncoder

ALTERNATING = """\
{%- for m in messages if m.role != 'tool' and not m.tool_calls -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant') -}}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}[{{ m.role }}]{{ m.content }}{%- for c in m.tool_calls or [] -%}
({{ c.function.name }}{{ c.function.arguments | tojson }}){%- endfor -%}{%- endfor -%}[assistant]"""
STRICT_TOOLS = """\
{%- for m in messages -%}
{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls -%}
{{- raise_exception('a tool message must follow a call') -}}
{%- endif -%}
[{{ m.role }}]{{ m.content }}{{ m.tool_calls | length if m.tool_calls else '' }}
{%- endfor -%}[assistant]"""


def _call(number: int) -> AIMessage:
    call = {"name": "search", "args": {"query": "x" * number}, "id": f"call_{number}"}
    return AIMessage("", tool_calls=[call])


HISTORY: list[BaseMessage] = [
    SystemMessage("Be brief."),
    HumanMessage("The first question."),
    _call(1),
    ToolMessage("What was found. " * 3, tool_call_id="call_1"),
    AIMessage("The first answer."),
    HumanMessage("The second question, which is longer. " * 2),
    AIMessage("The second answer."),
    HumanMessage("And the third?"),
    _call(2),
    ToolMessage("Nothing.", tool_call_id="call_2"),
]
PARTS = [HISTORY[start:end] for start, end in combinations(range(len(HISTORY) + 1), 2)]


@pytest.fixture(params=[None, ALTERNATING, STRICT_TOOLS], ids=["chatml", "alternating", "tools"])
def encoder(request: pytest.FixtureRequest) -> PromptEncoder:
    return PromptEncoder(FakeTokenizer(), chat_template=request.param)


def test_a_conversation_counts_exactly(encoder: PromptEncoder) -> None:
    """Where the template takes the messages as they are, they are what is counted."""
    assert count_prompt(encoder.encode, HISTORY) == len(encoder.encode(HISTORY))
    assert count_prompt(encoder.encode, []) == 0


@pytest.mark.parametrize("is_reversed", [False, True])
def test_every_part_of_a_history_counts(encoder: PromptEncoder, is_reversed: bool) -> None:
    """As a prompt, and never less than the texts in it."""
    for part in PARTS:
        least = sum(len(str(message.content)) for message in part)
        assert count_prompt(encoder.encode, part[::-1] if is_reversed else part) > least


def test_a_template_that_takes_none_of_it_says_why() -> None:
    """Messages that can never be sent have no count; the first refusal is told."""
    encoder = PromptEncoder(FakeTokenizer(), chat_template="{{ raise_exception('never') }}")
    with pytest.raises(ChatTemplateError, match="never"):
        count_prompt(encoder.encode, HISTORY[:2])


@pytest.mark.parametrize("history", [HISTORY, HISTORY[:8], HISTORY[:6]], ids=len)
def test_what_is_trimmed_fits(encoder: PromptEncoder, history: list[BaseMessage]) -> None:
    """For every limit; the system message and the newest question stay."""

    def count(messages: list[BaseMessage]) -> int:
        return count_prompt(encoder.encode, messages)

    num_kept = set()
    for max_tokens in range(count([history[0]]), count(history) + 40, 7):
        kept = trim_messages(
            history,
            max_tokens=max_tokens,
            token_counter=count,
            strategy="last",
            include_system=True,
            start_on="human",
        )
        assert kept[0] == history[0]
        assert count(kept) <= max_tokens
        assert len(kept) == 1 or isinstance(kept[1], HumanMessage)
        num_kept.add(len(kept))
    assert len(num_kept) > 2
