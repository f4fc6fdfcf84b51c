"""Counting the tokens of any messages, those too that the template refuses as a conversation.

LangChain's `trim_messages` asks about parts of a history, the newest message first. Such a part may
begin with an answer or with a tool's result, which strict templates refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.messages.tool import tool_call

from langchain_swarmkv.errors import ChatTemplateError

__all__ = ["count_prompt"]


def count_prompt(
    encode: Callable[[list[BaseMessage]], Sequence[int]], messages: Sequence[BaseMessage]
) -> int:
    """Tokens of the prompt that these messages make; 0 for none.

    A part in which a result stands before its call is read from its end. Messages that the template
    refuses count as in the first conversation with them that it takes: the other way round, after
    an empty question, or after an empty question and a call.

    Raises:
        ChatTemplateError: the template takes none of these.
    """
    if not messages:
        return 0
    refusal: ChatTemplateError | None = None
    for conversation in _conversations(list(messages)):
        try:
            return len(encode(conversation))
        except ChatTemplateError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _conversations(messages: list[BaseMessage]) -> Iterator[list[BaseMessage]]:
    given, other = messages, messages[::-1]
    if _is_backwards(messages):
        given, other = other, given
    question = HumanMessage("")
    call = AIMessage("", tool_calls=[tool_call(name="f", args={}, id="call_0000")])
    for opening in ([], [question], [question, call]):
        yield [*opening, *given]
        yield [*opening, *other]


def _is_backwards(messages: Sequence[BaseMessage]) -> bool:
    answered: set[str] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
        elif isinstance(message, AIMessage) and answered:
            return any(call["id"] in answered for call in message.tool_calls)
    return False
