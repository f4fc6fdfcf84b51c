"""Stop strings that name tokens which an answer does not show, on generated models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage

from langchain_swarmkv.chat_models import ChatSwarmKV
from tests.support.vocabularies import CONTROL_TOKENS, IM_END, IM_START, byte_level

CALL = "<tool_call>"
FORCED = 1e6


@pytest.fixture(scope="module", params=["control", "user-defined"])
def llm(request: pytest.FixtureRequest, tiny_gguf: Callable[..., Path]) -> Iterator[ChatSwarmKV]:
    """One whose `<tool_call>` is a token, of either kind."""
    if request.param == "control":
        vocabulary = byte_level(control=(*CONTROL_TOKENS, CALL))
    else:
        vocabulary = byte_level(user_defined=(CALL,))
    path = tiny_gguf("llama", vocabulary=vocabulary)
    with ChatSwarmKV(model_path=path, n_ctx=512, max_tokens=8, n_threads=1) as model:
        yield model


def token_id(llm: ChatSwarmKV, text: str) -> int:
    tokenizer = llm.tokenizer
    return {**tokenizer.special_tokens, **tokenizer.user_defined_tokens}[text].token_id


@pytest.mark.parametrize("text", [IM_START, IM_END, CALL])
@pytest.mark.parametrize("ways", ["invoke", "stream"])
def test_a_token_that_the_model_wants_ends_the_answer(
    llm: ChatSwarmKV, text: str, ways: str
) -> None:
    """I4: with the reason `stop`, nothing shown; with tools, too, whose calls it may open."""
    options = {"logit_bias": {token_id(llm, text): FORCED}, "ignore_eos": True}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for model in (llm, llm.bind_tools(tools, strict=False)):
        bound = model.bind(**options, stop=[text])
        if ways == "invoke":
            answer = bound.invoke("Hi")
        else:
            pieces = list(bound.stream("Hi"))
            answer = pieces[0]
            for piece in pieces[1:]:
                answer += piece
        assert isinstance(answer, AIMessage)
        assert answer.content == ""
        assert answer.invalid_tool_calls == answer.tool_calls == []
        assert answer.response_metadata["finish_reason"] == "stop"
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == 1


def test_text_and_token_end_the_answer_together(llm: ChatSwarmKV) -> None:
    """I4: what the model writes before the token belongs to the stop string."""
    guide = "start: /ab/ <|im_start|> /c/"
    whole = llm.invoke("Hi", guide=guide)
    assert (whole.content, whole.response_metadata["finish_reason"]) == ("abc", "stop")
    for stop, text in {"b<|im_start|>": "a", "<|im_start|>c": "ab", "b<|im_start|>c": "a"}.items():
        answer = llm.invoke("Hi", guide=guide, stop=[stop])
        assert (answer.content, answer.response_metadata["finish_reason"]) == (text, "stop")
