"""Where chat templates run: they come with a model file and are code, so they are not trusted.

Jinja's immutable sandbox keeps them from attributes of Python's inside and from changing what they
are given. On top of it, work is bounded: the length of a template and of what it prints, turns of
loops and calls of macros, processor time, and the size of every value that it can make grow. A size
is looked at before the value is made; filters and methods of which no bound is known are not there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from itertools import islice
from string import Formatter
from typing import Any, NoReturn

from jinja2 import Environment, Template, nodes, pass_context, pass_environment
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = ["MAX_RENDERED_CHARS", "MAX_TEMPLATE_CHARS", "compile_template", "render", "strftime_at"]

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 1 << 25
"""Characters that one rendering prints, and of any value on the way; an item counts as several."""
MAX_TURNS = 200_000
"""Loop turns and macro calls of one rendering."""
MAX_SECONDS = 5.0
"""Processor time of one rendering."""
_MAX_INTEGER_BITS = 4096
_ITEM_CHARS = 64
_MAX_INDENT = 64

# They make much of little, or take long for it, and no chat template needs them.
_NO_FILTERS = (
    *("batch", "center", "filesizeformat", "forceescape", "format", "pprint", "random", "slice"),
    *("striptags", "sum", "urlize", "wordwrap", "xmlattr"),
)
_NO_METHODS = frozenset(
    {"center", "encode", "expandtabs", "ljust", "rjust", "to_bytes", "translate", "zfill"}
)
_FIELD_WIDTH = re.compile(r"\d{4}|[{*]")
_PERCENT_FIELD = re.compile(r"%[^a-zA-Z%]*")

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
    return "".join(template.generate({**variables, _WORK: _Work()}))


class _Work:
    """Counts what one rendering does."""

    def __init__(self) -> None:
        self._turns = 0
        self._chars = 0
        self._end = time.thread_time() + MAX_SECONDS

    def add_turn(self) -> None:
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise SecurityError(f"its loops and macros take more than {MAX_TURNS} turns")
        if time.thread_time() > self._end:
            raise SecurityError(f"it takes more than {MAX_SECONDS} seconds")

    def add_text(self, text: str) -> str:
        self._chars += len(text)
        if self._chars > MAX_RENDERED_CHARS:
            raise SecurityError(f"it writes more than {MAX_RENDERED_CHARS} characters")
        return text


@pass_context
def _count_turn(context: Context, _: object) -> str:
    context[_WORK].add_turn()
    return ""


@pass_context
def _printed(context: Context, value: object) -> str:
    """Every text that `{{ }}` prints, into a macro's or a block's text too."""
    work: _Work = context[_WORK]
    return work.add_text(_to_text(value))


@pass_context
def _concatenated(context: Context, values: tuple[object, ...]) -> str:
    """What `~` makes. With a context, so that it is not computed while compiling."""
    return _join(values)


@pass_context
def _checked(context: Context, value: object) -> object:
    _check_size(value)
    return value


def _check_size(value: object, times: int = 1) -> None:
    """Refuse a value that would be too much as text, what it holds twice counted twice."""
    size, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            left += item
        size += _ITEM_CHARS
        _check_chars(size * times)


def _check_chars(num_chars: int) -> None:
    if num_chars > MAX_RENDERED_CHARS:
        raise SecurityError(f"it makes a value of more than {MAX_RENDERED_CHARS} characters")


class _Namespace(Namespace):
    """May stand in lists, as a message does, and is never text: it may hold itself many times."""

    def __repr__(self) -> str:
        raise SecurityError("it prints a namespace")


class _Bounded(NodeTransformer):
    """Puts checks where a template can repeat itself or make a value grow."""

    def _visit_repeated(self, node: Any) -> Any:
        self.generic_visit(node)
        count = _filter("_count_turn", nodes.Const(None), node.lineno)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _visit_repeated

    def _visit_literal(self, node: Any) -> Any:
        self.generic_visit(node)
        is_written = isinstance(node, nodes.Tuple) and node.ctx != "load"  # `for a, b in`
        return node if is_written else _filter("_checked", node, node.lineno)

    visit_List = visit_Tuple = visit_Dict = _visit_literal

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # printed like everything else

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_concatenated", nodes.Tuple(node.nodes, "load"), node.lineno)


def _filter(name: str, value: nodes.Expr, line: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a check at everything that a template can repeat or make grow."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that would not fit into memory."""
        if operator == "+":
            _check_sum(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, _PERCENT_FIELD.findall(left), right)
        else:
            _check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse methods without a bound, and arguments that make the others overstep it."""
        # Jinja wraps `str.format` to make it safe.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(owner, (str, int, float)) and name in _NO_METHODS:
            raise SecurityError(f"it calls {name}(), which is not there")
        if isinstance(owner, str):
            if name == "join":
                return _join(args[0], owner)
            if name == "replace":
                return _replace(owner, *args)
            if name in ("format", "format_map"):
                specs = [spec for _, _, spec, _ in Formatter().parse(owner) if spec is not None]
                _check_format(owner, specs, (args, kwargs))
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, (list, tuple, dict)):
            _check_size(result)
        return result


def _check_sum(left: Any, right: Any) -> None:
    for kind, chars in ((str, 1), ((list, tuple), _ITEM_CHARS)):
        if isinstance(left, kind) and isinstance(right, kind):
            _check_chars((len(left) + len(right)) * chars)


def _check_format(text: str, fields: list[str], values: object) -> None:
    if any(_FIELD_WIDTH.search(field) for field in fields):
        raise SecurityError("it pads a text to thousands of characters")
    _check_size(values, times=max(1, len(fields)))
    _check_chars(len(text))


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if operator != "%" and bits + right.bit_length() > _MAX_INTEGER_BITS:
            raise SecurityError("it computes with numbers beyond any use")
        return
    for value, times in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(times, int):
            _check_size(value, times=max(1, times))


class _GenerationTag(Extension):
    """`{% generation %}` marks, for training, what an assistant said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration has no ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(_to_text(message))


def strftime_at(instant: datetime) -> Callable[[str], str]:
    """The `strftime_now` of templates, for which it is always this instant."""

    def strftime_now(pattern: str) -> str:
        _check_format(pattern, [pattern], ())
        return instant.strftime(pattern)

    return strftime_now


def _to_text(value: object) -> str:
    _check_size(value)
    return str(value)


def _to_list(values: Iterable[Any]) -> list[Any]:
    items = list(islice(values, MAX_RENDERED_CHARS // _ITEM_CHARS + 1))
    _check_chars(len(items) * _ITEM_CHARS)
    return items


def _join(values: Iterable[Any], separator: object = "") -> str:
    items, between = _to_list(values), _to_text(separator)
    _check_size([*items, ""])
    _check_chars(len(between) * len(items))
    return between.join(map(str, items))


@pass_environment
def _join_filter(
    environment: Environment, values: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return _join(values, d)


def _replace(text: object, old: object, new: object, count: int | None = None) -> str:
    before, part, after = map(_to_text, (text, old, new))
    _check_chars(len(before) + before.count(part) * len(after))
    return before.replace(part, after, -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, int) else len(width)
    _check_chars(len(text) + margin * (len(text.splitlines()) + 1))
    return do_indent(text, width, first, blank)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter: no HTML escapes, and other scripts are left as they are."""
    if indent and (indent if isinstance(indent, int) else len(indent)) > _MAX_INDENT:
        raise SecurityError(f"it indents by more than {_MAX_INDENT}")
    encoder = json.JSONEncoder(
        ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces, num_chars = [], 0
    for piece in encoder.iterencode(value):
        num_chars += len(piece)
        _check_chars(num_chars)
        pieces.append(piece)
    text = "".join(pieces)
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
        finalize=_printed,
    )
    filters: dict[str, Callable[..., Any]] = {
        "indent": _indent,
        "join": _join_filter,
        "list": _to_list,
        "replace": _replace,
        "string": _to_text,
        "tojson": _to_json,
        "_checked": _checked,
        "_concatenated": _concatenated,
        "_count_turn": _count_turn,
    }
    environment.filters.update(filters)
    for name in _NO_FILTERS:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.globals.update(namespace=_Namespace, raise_exception=_raise_exception)
    return environment


_environment = _make_environment()
