"""Fields of settings and of the chat model: told by `help`, and to type checkers, as they are."""

from __future__ import annotations

import ast
import collections.abc
import importlib
import inspect
import pydoc
import re
import types
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from langchain_core.language_models.chat_models import BaseChatModel
from pydantic import BaseModel

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.config import EngineConfig, LoraAdapter, SamplingParams, SnapshotSettings

KINDS: list[type[BaseModel]] = [
    ChatSwarmKV,
    EngineConfig,
    LoraAdapter,
    SamplingParams,
    SnapshotSettings,
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
LANGCHAINS = set(BaseChatModel.model_fields)


def own_fields(kind: type[BaseModel]) -> list[str]:
    """Those that this package declares."""
    return [name for name in kind.model_fields if kind is not ChatSwarmKV or name not in LANGCHAINS]


# -- help ----------------------------------------------------------------------------------------


def told_fields(kind: type[BaseModel]) -> list[tuple[str, str]]:
    """Name and meaning of each entry under "Fields:" in what `help` prints."""
    text = pydoc.plain(pydoc.render_doc(kind))
    section = text.split(" |  Fields:\n")[1].split("\n |  \n")[0]
    told = re.findall(r"^ \|      (\w+): (.*(?:\n \|          .*)*)", section, re.M)
    return [(name, re.sub(r"\n \| +", " ", meaning)) for name, meaning in told]


@kinds
def test_help_tells_every_field_once_with_its_meaning(kind: type[BaseModel]) -> None:
    """In the order of the fields; a sentence each."""
    told = told_fields(kind)
    assert [name for name, _ in told] == own_fields(kind)
    for name, meaning in told:
        assert len(meaning) > 15, name
        assert meaning.endswith("."), name


@kinds
def test_help_tells_defaults(kind: type[BaseModel]) -> None:
    """As they are given, where they are not None."""
    for name, meaning in told_fields(kind):
        field = kind.model_fields[name]
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        default = default.value if isinstance(default, Enum) else default
        assert ("Required." in meaning) == field.is_required(), name
        assert (f"Default: {default!r}." in meaning) == (
            default is not None and not field.is_required()
        ), name


def test_help_names_langchains_fields_too() -> None:
    """In one line below; their meaning is LangChain's to tell."""
    doc = inspect.getdoc(ChatSwarmKV)
    assert doc is not None
    last = " ".join(doc.split("those of its base class: ")[1].split())
    assert set(last.rstrip(".").split(", ")) == set(ChatSwarmKV.model_fields) - set(
        own_fields(ChatSwarmKV)
    )


def test_what_the_class_says_besides_is_still_there() -> None:
    """The fields come last."""
    doc = inspect.getdoc(ChatSwarmKV)
    assert doc is not None
    assert doc.startswith("A local model on llama.cpp")
    assert doc.index("Raises (any call)") < doc.index("Fields:")


# -- what type checkers are told -----------------------------------------------------------------


def told_parameters(kind: type[BaseModel]) -> dict[str, Any]:
    """Name and type of the keyword parameters that `__init__` has for type checkers alone."""
    module = importlib.import_module(kind.__module__)
    assert module.__file__ is not None
    (declared,) = (
        node
        for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    (initializer,) = (
        node
        for node in ast.walk(declared)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    told = initializer.args
    assert [each.arg for each in told.args] == ["self"]
    assert told.kwarg is None
    parameters = {}
    for each, default in zip(told.kwonlyargs, told.kw_defaults, strict=True):
        assert each.annotation is not None
        # The default itself stands with the field.
        is_optional = isinstance(default, ast.Constant) and default.value is ...
        assert is_optional or default is None
        assert is_optional != kind.model_fields[each.arg].is_required(), each.arg
        parameters[each.arg] = eval(ast.unparse(each.annotation), vars(module))
    return parameters


@kinds
def test_type_checkers_know_every_field(kind: type[BaseModel]) -> None:
    """None is missing, none is there that is no field. LangChain may add fields to its own."""
    told = set(told_parameters(kind))
    assert told - LANGCHAINS == set(own_fields(kind))
    if kind is ChatSwarmKV:
        assert told & LANGCHAINS <= LANGCHAINS
        assert {"name", "cache", "callbacks", "tags", "metadata", "profile"} <= told


def members(hint: Any) -> list[Any]:
    """The types of a union, without what annotations add."""
    if get_origin(hint) is Annotated:
        return members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [member for each in get_args(hint) for member in members(each)]
    return [hint]


def is_covered(narrow: Any, wide: list[Any]) -> bool:
    """Whether a value of the one type is a value of one of the others."""
    if narrow in wide or Any in wide:
        return True
    origin = get_origin(narrow)
    if origin is None or origin is Literal:
        return False
    arguments = [each for each in get_args(narrow) if each is not ...]
    for each in wide:
        other = get_origin(each)
        if inspect.isclass(other) and issubclass(origin, other):
            pairs = zip(arguments, get_args(each), strict=True)
            if all(all(is_covered(m, members(b)) for m in members(a)) for a, b in pairs):
                return True
    return False


@kinds
def test_type_checkers_let_pass_what_a_field_holds(kind: type[BaseModel]) -> None:
    """Whatever can be read from a field can be given for it."""
    for name, hint in told_parameters(kind).items():
        if name in own_fields(kind):
            wide = members(hint)
            for member in members(kind.model_fields[name].annotation):
                assert is_covered(member, wide), (name, member)


SAMPLES: dict[Any, Any] = {
    str: "x",
    int: 1,
    float: 1.0,
    bool: True,
    type(None): None,
    Path: Path("x"),
}
"""A value of each plain type that a parameter has."""


def samples(hint: Any, default: Any) -> list[Any]:
    """Values of all members of a parameter's type that pydantic has to convert or to take."""
    found: list[Any] = []
    for member in members(hint):
        if type(default) is member:
            found.append(default)
        elif member in SAMPLES:
            found.append(SAMPLES[member])
        elif get_origin(member) is Literal:
            found += get_args(member)
        elif get_origin(member) is collections.abc.Sequence and get_args(member) == (str,):
            found += [["x"], ("x", "y")]
        elif get_origin(member) is collections.abc.Sequence:
            found += [[{"path": "x"}], [LoraAdapter(path="x")], ()]
        elif get_origin(member) is collections.abc.Mapping and get_args(member)[0] is int:
            found += [{5: 1}, types.MappingProxyType({5: 1.0})]
        elif get_origin(member) is collections.abc.Mapping:
            found += [{"x": 1}]
        elif inspect.isclass(member) and issubclass(member, Enum):
            found += list(member)
    return found


BESIDE: dict[str, dict[str, Any]] = {"kv_type_v": {"flash_attention": "on"}}
"""What else must be given for some values to make sense."""
REQUIRED = {ChatSwarmKV: {"model_path": "m"}, EngineConfig: {"model_path": "m"}}


@kinds
def test_what_type_checkers_let_pass_is_taken(kind: type[BaseModel]) -> None:
    """Every form of every parameter; enumerations by each of their names."""
    num_forms = 0
    for name, hint in told_parameters(kind).items():
        if name not in own_fields(kind):
            continue
        field = kind.model_fields[name]
        for value in samples(hint, field.get_default(call_default_factory=True)):
            options = {**REQUIRED.get(kind, {}), **BESIDE.get(name, {}), name: value}
            if kind is LoraAdapter:
                options = {"path": "x", **options}
            if name == "model_path" and value is None:
                continue  # the environment variable's, or an engine is given
            kind(**options)
            num_forms += 1
        enumerations = [m for m in members(hint) if inspect.isclass(m) and issubclass(m, Enum)]
        for enumeration in enumerations:
            names = [get_args(m) for m in members(hint) if get_origin(m) is Literal]
            assert names == [tuple(each.value for each in enumeration)], name
    assert num_forms >= len(own_fields(kind)) - 1
