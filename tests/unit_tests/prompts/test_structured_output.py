"""Of answers, whole or cut, only whole objects are made."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.outputs import ChatGeneration, Generation
from pydantic import BaseModel

from langchain_swarmkv.errors import AnswerError, TruncatedAnswerError
from langchain_swarmkv.prompts.langchain_errors import CutAnswerError
from langchain_swarmkv.prompts.schema import output_schema
from langchain_swarmkv.prompts.structured_output import AnswerObjectParser, answer_object

ANYTHING = {"title": "answer", "type": ["object", "number", "array"]}


class Finding(BaseModel):
    text: str


def message(text: str, reason: str = "stop", **fields: Any) -> AIMessage:
    usage = {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12}
    return AIMessage(
        text, usage_metadata=usage, response_metadata={"finish_reason": reason}, **fields
    )


def parse(found: AIMessage, schema: Any = ANYTHING, tool_name: str | None = None) -> Any:
    parser = AnswerObjectParser(answer_schema=output_schema(schema), tool_name=tool_name)
    return parser.parse_result([ChatGeneration(message=found)])


@pytest.mark.parametrize("text", ["", '{"a', '{"a": [1,', '{"a": [1]', "12", "1.5", "-"])
def test_what_may_have_gone_on_is_cut(text: str) -> None:
    """A number may have had more digits; the error says how long the answer was."""
    with pytest.raises(
        TruncatedAnswerError, match="token limit cut the answer after 7 tokens"
    ) as it:
        answer_object(message(text, "length"), output_schema(ANYTHING))
    error = it.value
    assert isinstance(error, OutputParserException)
    assert (error.text, error.num_output_tokens) == (text, 7)  # type: ignore[attr-defined]
    assert error.llm_output == text


@pytest.mark.parametrize("text", ['{"a": [1]}', "[1]", "{}"])
def test_what_was_whole_at_the_limit_is_taken(text: str) -> None:
    """The cut fell behind it."""
    assert parse(message(text, "length")) == parse(message(text))


@pytest.mark.parametrize(
    "text", ["", "Sure: {}", "{} {}", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "[" * 9999]
)
def test_what_is_no_json_is_no_answer(text: str) -> None:
    """Nor is what Python's parser takes and JSON cannot say."""
    with pytest.raises(AnswerError, match="The answer is no 'answer'") as told:
        parse(message(text))
    assert not isinstance(told.value, TruncatedAnswerError)


def test_a_tools_arguments_are_the_object() -> None:
    """Of that tool alone; a call that does not parse, or none at all, is told as it is."""
    calls = [
        tool_call(name="other", args={"text": "no"}, id="1"),
        tool_call(name="Finding", args={"text": "yes"}, id="2"),
    ]
    assert parse(message("", tool_calls=calls), Finding, "Finding") == Finding(text="yes")
    bad = [invalid_tool_call(name="Finding", args='{"text": ', id="1", error=None)]
    for reason, kind in (("stop", AnswerError), ("length", TruncatedAnswerError)):
        with pytest.raises(kind) as told:
            parse(message("", reason, invalid_tool_calls=bad), Finding, "Finding")
        assert told.value.text == '{"text": '  # type: ignore[attr-defined]
    with pytest.raises(AnswerError) as told:
        parse(message("I would rather talk."), Finding, "Finding")
    assert told.value.text == "I would rather talk."  # type: ignore[attr-defined]


def test_texts_alone_say_too_little() -> None:
    """Whether an answer was cut is known of messages."""
    parser = AnswerObjectParser(answer_schema=output_schema(Finding))
    with pytest.raises(AnswerError, match="chat model"):
        parser.parse('{"text": "x"}')
    with pytest.raises(AnswerError, match="chat model"):
        parser.parse_result([Generation(text="{}")])


def test_errors_keep_their_words_when_they_travel() -> None:
    """LangChain adds a link to its errors' messages, and would once more to each copy."""
    error = CutAnswerError("It was cut.", text='{"a', num_output_tokens=3)
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert str(copy) == "It was cut."
        assert isinstance(copy, CutAnswerError)
        assert copy.facts == {"text": '{"a', "num_output_tokens": 3}
        assert copy.llm_output == '{"a'
