"""`with_structured_output`: decoding is held to the schema, and cut answers are no objects."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, Field, v1
from typing_extensions import NotRequired, TypedDict

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import AnswerError, ConfigurationError, TruncatedAnswerError
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from tests.unit_tests.chat_support import chat

METHODS = ("json_schema", "function_calling", "json_mode")
HELD = METHODS[:2]


@contextmanager
def model(reply: str | Callable[[str], str] | None, **options: Any) -> Iterator[ChatSwarmKV]:
    template = options.pop("chat_template", None)
    with SwarmEngine(FakeEngine(reply=reply, num_cells=8192)) as engine:
        yield chat(engine, **{"max_tokens": 400, **options}, chat_template=template)


class Spy(SwarmEngine):
    """Keeps the sampling parameters of what was asked for."""

    def __init__(self, reply: str) -> None:
        super().__init__(FakeEngine(reply=reply, num_cells=8192))
        self.params: list[SamplingParams] = []

    def submit(self, tokens: Any, params: Any = None, **options: Any) -> Any:
        self.params.append(params)
        return super().submit(tokens, params, **options)


# -- F1: all kinds of schemas --------------------------------------------------------------------


class Point(BaseModel):
    x: int
    y: int


class Line(BaseModel):
    start: Point
    end: Point


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Tree(BaseModel):
    label: str
    children: list[Tree] = []


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Rich(BaseModel):
    note: str | None = None
    level: Literal["low", "high"]
    colour: Colour
    points: list[Point]
    counts: dict[str, int]
    either: int | str
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Claim(TypedDict):
    """A claim."""

    text: Annotated[str, ..., "What is claimed."]
    page: NotRequired[int]


class Branch(TypedDict):
    label: str
    parts: list[Branch]


@dataclasses.dataclass
class Part:
    name: str


@dataclasses.dataclass
class Machine:
    parts: list[Part]


class Old(v1.BaseModel):
    text: str
    point: int = 3


POINT: dict[str, Any] = {"x": 1, "y": -2}
RICH: dict[str, Any] = {
    "note": None,
    "level": "high",
    "colour": "blue",
    "points": [POINT],
    "counts": {"a": 1, "b": 2},
    "either": "both",
    "pet": {"kind": "dog", "name": "Rex"},
}
JSON_SCHEMA: dict[str, Any] = {
    "title": "point",
    "description": "A point.",
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
FUNCTION = {"name": "point", "description": "A point.", "parameters": JSON_SCHEMA}
LEAVES = {"label": "a", "children": [{"label": "b", "children": []}]}
PARTS = {"label": "a", "parts": [{"label": "b", "parts": []}]}
SCHEMAS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "flat": (Point, POINT, Point(x=1, y=-2)),
    "nested, used twice": (Line, {"start": POINT, "end": POINT}, None),
    "all kinds of fields": (Rich, RICH, None),
    "recursive": (Tree, LEAVES, None),
    "TypedDict": (Claim, {"text": "x", "page": 2}, {"text": "x", "page": 2}),
    "recursive TypedDict": (Branch, PARTS, PARTS),
    "dataclass": (Machine, {"parts": [{"name": "lid"}]}, Machine([Part("lid")])),
    "pydantic 1": (Old, {"text": "x", "point": 4}, Old(text="x", point=4)),
    "JSON schema": (JSON_SCHEMA, POINT, POINT),
    "function": (FUNCTION, POINT, POINT),
}

BOUNDED = ("flat", "nested, used twice", "JSON schema", "function")
"""Without strings or lists, which noise may continue up to any limit."""


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_kind_of_schema_gives_its_object(name: str, method: Any, strict: Any) -> None:
    """Decoding is held to it unless strict=False, and to some object in JSON mode."""
    schema, value, expected = SCHEMAS[name]
    expected = schema.model_validate(value) if expected is None else expected
    title = "point" if isinstance(schema, dict) else schema.__name__
    text = json.dumps(value)
    if method == "function_calling":
        text = f'<tool_call>\n{{"name": "{title}", "arguments": {text}}}\n</tool_call>'
    with Spy(text) as engine:
        llm = chat(engine, max_tokens=400).with_structured_output(
            schema, method=method, strict=strict
        )
        assert llm.invoke("?") == expected
        [params] = engine.params
    is_held = strict is not False or method == "json_mode"
    assert (params.guide is not None) is is_held


@pytest.mark.parametrize("method", HELD)
@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_model_likes_to_write_is_an_object(name: str, method: Any) -> None:
    """Noise under the guide is an object of the class; or it was cut, where strings may go on."""
    schema, value, _ = SCHEMAS[name]
    wanted = type(value) if isinstance(schema, dict) or hasattr(schema, "__total__") else schema
    with model("I'd rather not." + "}" * 30, max_tokens=600) as llm:
        found = llm.with_structured_output(schema, method=method, include_raw=True).invoke("?")
    if found["parsed"] is None:
        assert isinstance(found["parsing_error"], TruncatedAnswerError)
        assert name not in BOUNDED
    else:
        assert isinstance(found["parsed"], wanted)


@pytest.mark.parametrize("method", HELD)
def test_what_decoding_cannot_be_held_to_is_refused_before_a_model_is_loaded(
    method: Any, tmp_path: Path
) -> None:
    """Naming the feature; with strict=False it is only told."""
    schema = {**JSON_SCHEMA, "dependentRequired": {"x": ["y"]}}
    llm = ChatSwarmKV(model_path=tmp_path / "no-such-file.gguf")
    with pytest.raises(ConfigurationError, match="dependentRequired"):
        llm.with_structured_output(schema, method=method)
    llm.with_structured_output(schema, method=method, strict=False)
    with pytest.raises(ConfigurationError, match="json_schema, function_calling, json_mode"):
        llm.with_structured_output(schema, method="yaml")  # type: ignore[arg-type]


def test_traces_see_the_schema() -> None:
    """LangChain's own key tells what was asked for."""

    class Tracer(BaseCallbackHandler):
        seen: Any = None

        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.seen = kwargs["options"].get("ls_structured_output_format")

    tracer = Tracer()
    with model(json.dumps(POINT)) as llm:
        llm.with_structured_output(Point).invoke("?", {"callbacks": [tracer]})
    assert tracer.seen["kwargs"] == {"method": "json_schema"}
    assert tracer.seen["schema"]["title"] == "Point"


# -- F6: the limit -------------------------------------------------------------------------------

LIST = {
    "title": "list",
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "items": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "items"],
}
LISTED = {"name": "parts", "items": ["lid", "hinge"]}
TEXT = json.dumps(LISTED)
CUTS = {
    "in a string": TEXT.index("nge"),
    "after a comma": TEXT.index(' "hinge"'),
    "before the last bracket": len(TEXT) - 2,
    "before the last brace": len(TEXT) - 1,
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_cut_object_is_an_error(cut: int) -> None:
    """It names the limit; the raw message says "length"."""
    with model(TEXT, max_tokens=cut) as llm:
        with pytest.raises(TruncatedAnswerError, match=f"{cut} tokens.*Raise max_tokens") as told:
            llm.with_structured_output(LIST).invoke("?")
        found = llm.with_structured_output(LIST, include_raw=True).invoke("?")
    assert isinstance(told.value, OutputParserException)
    assert found["raw"].response_metadata["finish_reason"] == "length"
    assert found["raw"].text == TEXT[:cut]
    assert found["parsed"] is None
    assert isinstance(found["parsing_error"], TruncatedAnswerError)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
async def test_a_stream_of_a_cut_object_ends_with_the_error(cut: int) -> None:
    """What came before it grew, and was shown as growing."""
    seen: list[Any] = []

    def read(values: Iterator[Any]) -> None:
        seen.extend(values)

    async def aread(values: AsyncIterator[Any]) -> None:
        async for value in values:
            seen.append(value)

    with model(TEXT, max_tokens=cut) as llm:
        held = llm.with_structured_output(LIST)
        with pytest.raises(TruncatedAnswerError):
            read(held.stream("?"))
        with pytest.raises(TruncatedAnswerError):
            await aread(held.astream("?"))
    half = seen[: len(seen) // 2]
    assert seen == half * 2
    assert half[0] in ({}, {"name": ""})
    sizes = [len(json.dumps(value)) for value in half]
    assert sizes == sorted(sizes)


async def test_the_limit_may_fall_just_behind_the_object() -> None:
    """Then it is whole, though nothing says so but its last brace."""
    with model(TEXT, max_tokens=len(TEXT)) as llm:
        held = llm.with_structured_output(LIST)
        assert held.invoke("?") == LISTED
        assert [*held.stream("?")][-1] == LISTED
        assert [value async for value in held.astream("?")][-1] == LISTED


def test_a_cut_call_is_an_error() -> None:
    """As a cut text is."""
    text = f'<tool_call>\n{{"name": "list", "arguments": {TEXT}}}\n</tool_call>'
    for cut in (10, text.index("nge"), len(text) - 15):
        with model(text, max_tokens=cut) as llm:
            held = llm.with_structured_output(LIST, method="function_calling")
            with pytest.raises(TruncatedAnswerError, match=str(cut)):
                held.invoke("?")
            with pytest.raises(TruncatedAnswerError, match=str(cut)):
                [*held.stream("?")]


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_would_write_blank_lines_comes_to_an_end(method: Any) -> None:
    """White space is only where the schema's form has it; strings end by the model's own noise."""
    with model("\n" * 1000, max_tokens=2000) as llm:
        held = llm.with_structured_output(JSON_SCHEMA, method=method, include_raw=True)
        found = held.invoke("?")
        pieces = [chunk["raw"] for chunk in held.stream("?") if "raw" in chunk]
    assert set(found["parsed"]) == {"x", "y"}
    assert found["raw"].response_metadata["finish_reason"] != "length"
    arguments = [call["args"] for piece in pieces for call in piece.tool_call_chunks]
    text = "".join(str(piece.content) for piece in pieces) + "".join(map(str, arguments))
    assert re.fullmatch(r'\{"x": -?\d+, "y": -?\d+\}', text)


# -- in chains -----------------------------------------------------------------------------------


async def test_it_goes_in_chains() -> None:
    """With prompts before it and functions behind; streamed, in batches, and async."""
    with model(TEXT) as llm:
        prompt = ChatPromptTemplate.from_messages([("human", "List {what}.")])
        chain = (
            prompt | llm.with_structured_output(LIST) | RunnableLambda(lambda v: len(v["items"]))
        )
        asked = {"what": "parts"}
        assert chain.invoke(asked) == await chain.ainvoke(asked) == 2
        assert chain.batch([asked] * 3) == await chain.abatch([asked] * 3) == [2] * 3
        held = prompt | llm.with_structured_output(LIST)
        assert [*held.stream(asked)][-1] == LISTED
        assert [value async for value in held.astream(asked)][-1] == LISTED
        [whole] = (prompt | llm.with_structured_output(Point)).stream(asked)
        assert isinstance(whole, Point)


def test_a_cut_answer_can_be_tried_again_or_left_to_another() -> None:
    """By LangChain's own means, which know the error."""
    with model(TEXT, max_tokens=10) as short, model(TEXT) as long:
        held = short.with_structured_output(LIST)
        other = long.with_structured_output(LIST)
        assert held.with_fallbacks([other]).invoke("?") == LISTED
        known = held.with_fallbacks([other], exceptions_to_handle=(OutputParserException,))
        assert known.invoke("?") == LISTED
        retried = held.with_retry(
            retry_if_exception_type=(TruncatedAnswerError,),
            stop_after_attempt=2,
            wait_exponential_jitter=False,
        )
        with pytest.raises(TruncatedAnswerError):
            retried.invoke("?")


@pytest.mark.parametrize("method", METHODS)
def test_what_was_only_told_is_checked(method: Any) -> None:
    """A class finds what is wrong in an answer that was not held to it."""
    wrong = '{"x": 1, "y": "two"}'
    if method == "function_calling":
        wrong = f'<tool_call>\n{{"name": "Point", "arguments": {wrong}}}\n</tool_call>'
    with model(wrong) as llm:
        held = llm.with_structured_output(Point, method=method, strict=False)
        with pytest.raises(AnswerError, match="no 'Point'"):
            held.invoke("?")


async def test_with_raw_nothing_is_raised_about_an_answer() -> None:
    """Nor in a stream, which shows the message as it comes and the outcome at its end."""
    for text, error in ((json.dumps(POINT), type(None)), ('{"x": 1}', AnswerError)):
        with model(text) as llm:
            told = llm.with_structured_output(Point, strict=False, include_raw=True)
            found = [told.invoke("?"), await told.ainvoke("?")]
            pieces = [*told.stream("?")]
            found += [sum(pieces[1:], pieces[0])]
            apieces = [piece async for piece in told.astream("?")]
            found += [sum(apieces[1:], apieces[0])]
        for each in found:
            assert each["raw"].text == text
            assert isinstance(each["parsing_error"], error)
            assert each["parsed"] == (None if each["parsing_error"] else Point(x=1, y=-2))
        assert len(pieces) == len(apieces) > 2


def test_an_answer_in_words_is_no_call() -> None:
    """Where calls are not held to."""
    with model("I would rather talk.") as llm:
        held = llm.with_structured_output(Point, method="function_calling", strict=False)
        with pytest.raises(AnswerError) as told:
            held.invoke("?")
    assert told.value.text == "I would rather talk."  # type: ignore[attr-defined]


# -- models that think ---------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ begin }}{% endif %}"
)


@pytest.mark.parametrize(
    ("begin", "thought"),
    [
        ("", ""),
        ("", "<think></think>"),
        ("", "<think>\n\n</think>\n\n"),
        ("", "<think>\nTwo {numbers}.\n</think>\n\n"),
        ("<think>\n", "Two {numbers}.\n</think>\n\n"),
        ("<think>\n\n</think>\n\n", ""),
    ],
)
async def test_thoughts_come_before_the_object(begin: str, thought: str) -> None:
    """They are free, and no part of it."""
    options: dict[str, Any] = {"chat_template_kwargs": {"begin": begin}, "chat_template": CHATML}
    with model(thought + json.dumps(POINT), **options) as llm:
        held = llm.with_structured_output(Point, include_raw=True)
        for found in (held.invoke("?"), await held.ainvoke("?")):
            assert found["parsed"] == Point(x=1, y=-2), found
            kept = found["raw"].additional_kwargs.get("reasoning_content", "")
            assert ("numbers" in kept) is ("numbers" in thought)
        dicts = [*llm.with_structured_output(JSON_SCHEMA).stream("?")]
        assert dicts[-1] == POINT


def test_an_answer_cut_in_its_thoughts_is_cut() -> None:
    """There is no object yet."""
    with model("<think>\nWell, well.", max_tokens=12, chat_template=CHATML) as llm:
        held = llm.with_structured_output(Point)
        with pytest.raises(TruncatedAnswerError, match="12 tokens"):
            held.invoke("?")
