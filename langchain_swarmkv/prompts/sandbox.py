"""Where chat templates run: they come with a model file and are code, so they are not trusted.

Jinja's immutable sandbox keeps them from attributes of Python's inside and from changing what they
are given. On top of it, work is bounded: the length of a template and of what it renders, turns of
loops and calls of macros in one rendering, `range`, and what `*` and `**` may make.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["MAX_RENDERED_CHARS", "MAX_TEMPLATE_CHARS", "compile_template", "render"]

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 1 << 25
MAX_TURNS = 200_000
"""Loop turns and macro calls of one rendering."""
_MAX_INTEGER_BITS = 4096

# Not an identifier, so that no template can read or set it.
_WORK = "work done"


@lru_cache(maxsize=64)
def compile_template(source: str) -> Template:
    """Parse a template as Hugging Face's tokenizers do.

    Raises:
        TemplateError: it does not parse, or is too long.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"{len(source)} characters long; the limit is {MAX_TEMPLATE_CHARS}")
    return _environment.from_string(source)


def render(template: Template, variables: Mapping[str, object]) -> str:
    """Run a template.

    Raises:
        Exception: whatever the template runs into; `SecurityError` if it oversteps.
    """
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate({**variables, _WORK: _Work()}):
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise SecurityError(f"it writes more than {MAX_RENDERED_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


class _Work:
    """Counts the turns of one rendering."""

    def __init__(self) -> None:
        self._turns = 0

    def add_turn(self) -> None:
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise SecurityError(f"its loops and macros take more than {MAX_TURNS} turns")


@pass_context
def _count_turn(context: Context, _: object) -> str:
    context[_WORK].add_turn()
    return ""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a count at the head of everything that a template can repeat."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        repeated: list[nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block] = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
            *tree.find_all(nodes.CallBlock),
            *tree.find_all(nodes.Block),
        ]
        for part in repeated:
            count = nodes.Filter(nodes.Const(None), "_count_turn", [], [], None, None)
            part.body.insert(0, nodes.ExprStmt(count, lineno=part.lineno))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products that would not fit into memory."""
        _check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if bits + right.bit_length() > _MAX_INTEGER_BITS:
            raise SecurityError("it computes with numbers beyond any use")
        return
    for text, times in ((left, right), (right, left)):
        is_repeated = hasattr(text, "__len__") and isinstance(times, int)
        if is_repeated and len(text) * times > MAX_RENDERED_CHARS:
            raise SecurityError(f"it repeats a text {times} times")


class _GenerationTag(Extension):
    """`{% generation %}` marks, for training, what an assistant said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration has no ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter: no HTML escapes, and other scripts are left as they are."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _ascii_json(text) if ensure_ascii else text


def _ascii_json(text: str) -> str:
    # NOTE: private-use characters are left alone, they are this package's own; see `segments`.
    return "".join(
        char if char.isascii() or "\ue000" <= char <= "\uf8ff" else json.dumps(char)[1:-1]
        for char in text
    )


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    filters: dict[str, Callable[..., str]] = {"tojson": _to_json, "_count_turn": _count_turn}
    environment.filters.update(filters)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_environment = _make_environment()
