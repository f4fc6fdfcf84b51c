"""How a chat template writes tools, calls and results, found by asking it.

A short conversation with three calls, whose names, arguments and ids occur nowhere else, is
rendered. What stands around them is the model's own format, the one it was trained on: Hermes' and
Qwen's tags, Llama's bare JSON, Mistral's control tokens, and those that nobody here has seen. A
template that knows no tools, or whose calls are no JSON, has none; see `call_turns`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from langchain_swarmkv.prompts.call_format import CallFormat, Hole, Part, ReasoningTags
from langchain_swarmkv.prompts.messages import TemplateMessage
from langchain_swarmkv.prompts.tools import Tool

__all__ = ["NativeCalls", "find_native_calls"]

Render = Callable[[Sequence[TemplateMessage], Sequence[Tool]], str]
"""Messages and tools to text; raises whatever the template runs into."""

_TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probes.",
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }
    for name, key in (("probe_alpha", "key_alpha"), ("probe_delta", "key_delta"))
]
# Mistral's templates take only ids of nine letters and digits.
_CALLS = (
    ("aAlpha123", "probe_alpha", {"key_alpha": "value_alpha"}),
    ("dDelta456", "probe_delta", {"key_delta": "value_delta"}),
    ("oOmega789", "probe_alpha", {"key_alpha": "value_omega"}),
)
_RESULT = "result_of_the_probe"
_MIN_TRIGGER_CHARS = 3


@dataclass(frozen=True)
class NativeCalls:
    """A template's own way."""

    format: CallFormat
    arguments_as_text: bool
    """Whether the template wants arguments as JSON text rather than as a mapping."""


def find_native_calls(
    render: Render, ends: Iterable[str], reasoning: ReasoningTags | None
) -> NativeCalls | None:
    """The template's format; None: it does not tell of tools, or its calls are no JSON.

    Args:
        render: runs the template, and asks for an answer at the end.
        ends: texts of the tokens that end an answer.
        reasoning: tags that the template may open at the start of an answer.
    """
    for as_text in (False, True):
        found = _find_format(render, list(ends), reasoning, as_text)
        if found is not None:
            return NativeCalls(found, as_text)
    return None


def _find_format(
    render: Render, ends: Sequence[str], reasoning: ReasoningTags | None, as_text: bool
) -> CallFormat | None:
    user = {"role": "user", "content": "Probe."}
    try:
        before = render([user], _TOOLS)
        one = render([user, *_turns(1, as_text)], _TOOLS)
    except Exception:
        return None
    if not all(tool["function"]["name"] in before for tool in _TOOLS) or _RESULT not in one:
        return None
    start = _answer_start(before, reasoning)
    single = _split_calls(one, start, ends, 1)
    if single is None:
        return None
    try:
        many = render([user, *_turns(len(_CALLS), as_text)], _TOOLS)
    except Exception:
        return _format(single, None)
    several = _split_calls(many, start, ends, len(_CALLS))
    # Calls that are numbered differ in more than name, arguments and id.
    if several is None or len({*several.joints}) > 1 or len({*several.between}) > 1:
        return None
    return _format(single, several.joints[0])


def _answer_start(prompt: str, reasoning: ReasoningTags | None) -> str:
    """The prompt up to where an answer begins, without thoughts that the template opens itself."""
    if reasoning is None:
        return prompt
    bare = prompt.rstrip()
    for tag in (reasoning.closing, reasoning.opening):
        if bare.endswith(tag):
            bare = bare[: -len(tag)].rstrip()
            prompt = prompt[: len(bare)]
    return prompt


def _turns(num_calls: int, as_text: bool) -> list[TemplateMessage]:
    calls = [
        {
            "type": "function",
            "id": call_id,
            "function": {"name": name, "arguments": json.dumps(args) if as_text else args},
        }
        for call_id, name, args in _CALLS[:num_calls]
    ]
    results = [
        {"role": "tool", "content": _RESULT, "name": name, "tool_call_id": call_id}
        for call_id, name, _ in _CALLS[:num_calls]
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


@dataclass(frozen=True)
class _Calls:
    """What stands around names and arguments: `head NAME between ARGUMENTS joint NAME ... end`.

    All ids are spelled like the first.
    """

    head: str
    between: list[str]
    joints: list[str]
    end: str


def _split_calls(rendered: str, start: str, ends: Sequence[str], num_calls: int) -> _Calls | None:
    if not rendered.startswith(start):
        return None
    text = rendered[len(start) :]
    between, gaps, place = [], [], 0
    for call_id, name, arguments in _CALLS[:num_calls]:
        text = text.replace(call_id, _CALLS[0][0])
        name_at = text.find(name, place)
        if name_at < 0:
            return None
        after_name = name_at + len(name)
        found = _find_json(text, arguments, after_name)
        if found is None:
            return None
        gaps.append(text[place:name_at])
        between.append(text[after_name : found[0]])
        place = found[1]
    end_at = min((at for end in ends if (at := text.find(end, place)) >= 0), default=-1)
    if end_at < 0 or _RESULT in text[:end_at]:
        return None
    return _Calls(gaps[0].lstrip(), between, gaps[1:], text[place:end_at].rstrip())


def _find_json(text: str, value: object, start: int) -> tuple[int, int] | None:
    """Where a JSON text of the value stands."""
    decoder = json.JSONDecoder()
    at = text.find("{", start)
    while at >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except ValueError:
            found, end = None, at
        if found == value:
            return at, end
        at = text.find("{", at + 1)
    return None


def _format(calls: _Calls, joint: str | None) -> CallFormat | None:
    """Tell what belongs to each call from what stands around all of them."""
    opening, before, after, separator, closing = "", calls.head, calls.end, None, ""
    if joint is not None:
        before = _common_start(calls.head[::-1], joint[::-1])[::-1]
        rest = joint.removesuffix(before)
        after = _common_start(rest, calls.end)
        opening, closing = calls.head.removesuffix(before), calls.end.removeprefix(after)
        separator = rest.removeprefix(after)
    call = (
        *_with_id(before),
        Hole.NAME,
        *_with_id(calls.between[0]),
        Hole.ARGUMENTS,
        *_with_id(after),
    )
    found = CallFormat(opening, call, separator, closing)
    # Something must tell a call from text: markup, or that it is JSON.
    is_told = found.trigger[:1] in ("<", "[", "{") and len(found.trigger) >= _MIN_TRIGGER_CHARS
    return found if is_told and call.count(Hole.ID) <= 1 else None


def _common_start(first: str, second: str) -> str:
    size = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    return first[:size]


def _with_id(text: str) -> Iterator[Part]:
    for place, piece in enumerate(text.split(_CALLS[0][0])):
        if place:
            yield Hole.ID
        yield piece
