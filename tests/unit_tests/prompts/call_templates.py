"""Chat templates with their formats of calls, and small ones of the kinds that are not at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from langchain_swarmkv.prompts.call_format import CallFormat
from langchain_swarmkv.prompts.encoder import PromptEncoder
from langchain_swarmkv.prompts.sandbox import compile_template, render, strftime_at
from tests.unit_tests.prompts.answer_cases import ARGUMENTS, HERMES, ID, NAME
from tests.unit_tests.prompts.vocabularies import MarkedTokenizer

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parents[2] / "data" / "templates").glob("*.jinja"))
}
_TURNS = (
    "{% for t in tools or [] %}{{ t | tojson + '\\n' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.tool_calls %}CALLS{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}"
)


def _with_calls(calls: str) -> str:
    return _TURNS.replace("CALLS", calls)


# Bare JSON, as Llama 3 writes it, and one call a turn.
TEMPLATES["like-llama-3"] = _with_calls(
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    """{% set f = m.tool_calls[0].function %}{{ '{"name": "' + f.name + '", "parameters": ' }}"""
    "{{ f.arguments | tojson + '}' }}"
)
# Control tokens around each call and all of them, and arguments joined to text, as DeepSeek does.
TEMPLATES["like-deepseek"] = _with_calls(
    "{{ '<|calls|>' }}{% for c in m.tool_calls %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|call|>' + c.function.name + '<|sep|>' + c.function.arguments + '<|/call|>' }}"
    "{% endfor %}{{ '<|/calls|>' }}"
)

FORMATS: dict[str, CallFormat] = {
    **dict.fromkeys(("granite-4.0", "qwen2.5", "qwen3", "qwq"), HERMES),
    "mistral-nemo": CallFormat(
        opening="[TOOL_CALLS][",
        call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, ', "id": "', ID, '"}'),
        separator=", ",
        closing="]",
    ),
    "mistral-small-3.2": CallFormat(
        opening="",
        call=("[TOOL_CALLS]", NAME, "[CALL_ID]", ID, "[ARGS]", ARGUMENTS, ""),
        separator="",
        closing="",
    ),
    "own-one-call": CallFormat(
        opening="",
        call=('<|python_tag|>{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
        separator=None,
        closing="",
    ),
    "like-llama-3": CallFormat(
        opening="",
        call=('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
        separator=None,
        closing="",
    ),
    "like-deepseek": CallFormat(
        opening="<|calls|>",
        call=("<|call|>", NAME, "<|sep|>", ARGUMENTS, "<|/call|>"),
        separator="\n",
        closing="<|/calls|>",
    ),
}
"""Of those in which a format is found."""

ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|end_of_text|>", "<|endoftext|>")
ENDS += ("<|end|>", "<|call_end|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|user|>")
CONTROLS = ("<|im_start|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<s>")
CONTROLS += ("<|python_tag|>", "<|calls|>", "<|/calls|>", "<|call|>", "<|/call|>", "<|sep|>")


def renderer(name: str) -> Callable[..., str]:
    """`(messages, tools) -> text`, straight through the template."""
    template = compile_template(TEMPLATES[name])

    def run(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        variables: dict[str, Any] = {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_generation_prompt": True,
        }
        variables |= {"messages": list(messages), "tools": tools or None}
        variables["strftime_now"] = strftime_at(datetime(2026, 12, 1))
        return render(template, variables)

    return run


@dataclass(frozen=True)
class Model:
    """A template on a vocabulary that knows its control tokens."""

    tokenizer: MarkedTokenizer
    encoder: PromptEncoder


def model(name: str, *, controls: Sequence[str] = CONTROLS, **variables: object) -> Model:
    tokenizer = MarkedTokenizer(controls, ENDS)
    encoder = PromptEncoder(tokenizer, chat_template=TEMPLATES[name], variables=variables)
    return Model(tokenizer, encoder)
