"""A long chat under LangChain's summarising middleware: it must act before the context is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.messages.utils import count_tokens_approximately

from langchain_swarmkv import ChatSwarmKV

N_CTX = 1024
NUM_TURNS = 11
ENGLISH = (
    "Paragraph {n} of the lease says that the tenant pays rent number {n} on day {n} of the month, "
    "keeps the garden, the roof and the heating of house {n} in repair, and asks before letting a "
    "room to anyone else; the landlord may look at the rooms after a notice of {n} days, repairs "
    "the walls within {n} weeks, and returns the deposit when the keys are back. What is due?"
)
CHINESE = (
    "租约第{n}段规定:承租人应在每月第{n}日支付租金,负责维护第{n}号房屋的花园、屋顶和暖气,"
    "转租房间须事先征得同意;出租人提前{n}天通知后可以查看房间。到期应付什么?"
)


@pytest.fixture(scope="module")
def llm(smollm2_q8_0: Path) -> Iterator[ChatSwarmKV]:
    with ChatSwarmKV(model_path=smollm2_q8_0, n_ctx=N_CTX, max_tokens=12) as model:
        yield model


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("text", "trigger", "is_counted_exactly"),
    [
        (ENGLISH, ("fraction", 0.7), False),
        (CHINESE, ("fraction", 0.6), False),
        (CHINESE, ("tokens", 600), False),
        (CHINESE, ("fraction", 0.8), True),
    ],
    ids=["english", "chinese", "chinese-tokens", "chinese-counted-by-the-model"],
)
def test_a_long_chat_is_summarised_before_the_context_is_full(
    llm: ChatSwarmKV, text: str, trigger: Any, is_counted_exactly: bool
) -> None:
    """By the share of the context that is taken, as the answers report it or the model counts it.

    LangChain's own count takes four characters for a token: of Chinese it sees a tenth.
    """
    counter = llm.get_num_tokens_from_messages if is_counted_exactly else count_tokens_approximately
    middleware = SummarizationMiddleware(
        llm,
        trigger=trigger,
        keep=("messages", 2),
        token_counter=counter,
        summary_prompt="Summarise in a sentence:\n{messages}",
    )
    agent = create_agent(llm, [], middleware=[middleware])
    messages: list[AnyMessage] = []
    num_summaries = 0
    longest = 0
    for number in range(1, NUM_TURNS + 1):
        question = HumanMessage(text.format(n=number))
        before = len(messages)
        messages = agent.invoke({"messages": [*messages, question]})["messages"]
        num_summaries += len(messages) < before + 2
        answer = messages[-1]
        assert isinstance(answer, AIMessage)
        assert answer.usage_metadata is not None
        longest = max(longest, answer.usage_metadata["total_tokens"])
    assert num_summaries >= 1
    profile = llm.profile
    assert profile is not None
    assert longest <= N_CTX
    # The chat would not have fitted whole.
    whole = [HumanMessage(text.format(n=number)) for number in range(1, NUM_TURNS + 1)]
    assert llm.get_num_tokens_from_messages(whole) > profile["max_input_tokens"]
