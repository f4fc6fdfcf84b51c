"""Whatever LangChain takes as tools becomes OpenAI's function dicts, and every choice one of three.

What a model sees of a tool, and what its calls are held to, is the same dict.
"""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import pydantic.v1
import pytest
from langchain_core.tools import InjectedToolArg, StructuredTool, tool
from langgraph.prebuilt import InjectedState
from pydantic import BaseModel, Field
from typing_extensions import NotRequired, TypedDict

from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts.tools import ToolChoice, Tools, map_tool, openai_tools, tool_choice

QUERY = {"description": "Words.", "type": "string"}
LIMIT = {"default": 10, "type": "integer"}
FUNCTION = {"name": "search", "description": "Find pages.", "parameters": {"type": "object"}}


class search(BaseModel):
    """Find pages."""

    query: str = Field(description="Words.")
    limit: int = 10


class OldSearch(pydantic.v1.BaseModel):
    """Find pages."""

    query: str = pydantic.v1.Field(description="Words.")
    limit: int = 10


class SearchDict(TypedDict):
    """Find pages."""

    query: str
    limit: NotRequired[int]


def search_function(query: str, limit: int = 10) -> str:
    """Find pages.

    Args:
        query: Words.
        limit: How many.
    """
    return query * limit


@tool
def search_tool(query: str, user: Annotated[str, InjectedToolArg]) -> str:
    """Find pages."""
    return query + user


@tool(args_schema={"type": "object", "properties": {"query": QUERY}, "required": ["query"]})
def search_dict(query: str) -> str:
    """Find pages."""
    return query


class Node(BaseModel):
    """A tree."""

    name: str
    children: list[Node] = []


class OldNode(pydantic.v1.BaseModel):
    """A tree."""

    name: str
    children: list[OldNode] = []


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    OldNode.update_forward_refs()

TREE = {
    "type": "object",
    "title": "walk",
    "properties": {"tree": {"$ref": "#/$defs/Node"}},
    "required": ["tree"],
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
        }
    },
}


def walk(tree: Node, state: Annotated[dict[str, Any], InjectedState]) -> str:
    """Walk."""
    return tree.name + str(state)


# As in a module without `from __future__ import annotations`: LangChain reads no text.
walk.__annotations__["state"] = Annotated[dict[str, Any], InjectedState]


@tool
def walk_tool(tree: Node, user: Annotated[str, InjectedToolArg]) -> str:
    """Walk."""
    return tree.name + user


@tool(args_schema=TREE)
def walk_dict(tree: Any) -> str:
    """Walk."""
    return str(tree)


def converted(given: Any) -> dict[str, Any]:
    [made] = openai_tools([given])
    assert made["type"] == "function"
    function: dict[str, Any] = made["function"]
    return function


@pytest.mark.parametrize(
    ("given", "name", "properties", "required"),
    [
        (search, "search", {"query": QUERY, "limit": LIMIT}, ["query"]),
        (OldSearch, "OldSearch", {"query": QUERY, "limit": LIMIT}, ["query"]),
        (
            search_function,
            "search_function",
            {"query": QUERY, "limit": {**LIMIT, "description": "How many."}},
            ["query"],
        ),
        (search_tool, "search_tool", {"query": {"type": "string"}}, ["query"]),
        (search_dict, "search_dict", {"query": QUERY}, ["query"]),
        (
            StructuredTool.from_function(search_function, name="s", args_schema=search),
            "s",
            {"query": QUERY, "limit": LIMIT},
            ["query"],
        ),
        (
            SearchDict,
            "SearchDict",
            {
                "query": {"title": "Query", "type": "string"},
                "limit": {"title": "Limit", "type": "integer"},
            },
            ["query"],
        ),
        (
            {"name": "s", "description": "Find pages.", "input_schema": search_dict.args_schema},
            "s",
            {"query": QUERY},
            ["query"],
        ),
        (
            {"title": "s", "description": "Find pages.", "properties": {"query": QUERY}},
            "s",
            {"query": QUERY},
            None,
        ),
    ],
)
def test_all_kinds_of_tools_become_function_dicts(
    given: Any, name: str, properties: dict[str, Any], required: list[str] | None
) -> None:
    """Name, description and arguments, those hidden that the model does not give."""
    function = converted(given)
    assert function["name"] == name
    assert function["description"].startswith("Find pages.")
    parameters = function["parameters"]
    assert parameters["properties"] == properties
    assert parameters.get("required") == required


@pytest.mark.parametrize(
    "given", [FUNCTION, {"type": "function", "function": FUNCTION, "extra": 1}]
)
def test_openai_dicts_stay_as_they_are(given: dict[str, Any]) -> None:
    """But for what stands beside the function."""
    assert converted(given) == FUNCTION


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f"},
        {"name": "f", "description": None, "parameters": None},
        {"name": "f", "parameters": {}},
    ],
)
def test_a_function_may_say_nothing_of_itself(function: dict[str, Any]) -> None:
    """It has no arguments then, and templates find all keys."""
    assert converted({"type": "function", "function": function}) == {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


@pytest.mark.parametrize("given", [walk, walk_tool, walk_dict, TREE])
def test_recursion_is_kept_whole(given: Any) -> None:
    """LangChain's conversion would cut it to {}; injected arguments stay hidden all the same."""
    parameters = converted(given)["parameters"]
    assert parameters["properties"] == {"tree": {"$ref": "#/$defs/Node"}}
    assert parameters["required"] == ["tree"]
    children = parameters["$defs"]["Node"]["properties"]["children"]
    assert children["items"] == {"$ref": "#/$defs/Node"}


@pytest.mark.parametrize("given", [Node, OldNode])
def test_a_class_that_holds_itself_has_properties(given: Any) -> None:
    """Templates read them at the top, and two different tools of one name are told by them."""
    parameters = converted(given)["parameters"]
    reference = parameters["properties"]["children"]["items"]["$ref"]
    assert reference.rsplit("/", 1)[-1] == given.__name__
    assert "$ref" not in parameters
    with pytest.raises(ConfigurationError, match="Two tools are named"):
        openai_tools([given, {"name": given.__name__}])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "web_search"}, "'web_search' runs at a provider"),
        ({"type": "computer_20250124", "name": "computer"}, "'computer_20250124' runs at"),
        ({"type": "custom", "name": "free_text"}, "'custom' runs at a provider"),
        ({"type": "function"}, "needs a function with a name"),
        ({"type": "function", "name": "f", "parameters": {}}, "needs a function with a name"),
        ({"type": "function", "function": {"name": ""}}, "needs a function with a name"),
        ({"type": "function", "function": {"name": 3}}, "needs a function with a name"),
        ({"type": "function", "function": {"name": "f", "parameters": "x"}}, "no JSON schema"),
        ({"name": 'a"b'}, "could not be told from the markup"),
        ({"name": "a<b>"}, "could not be told from the markup"),
        ({"name": "a\nb"}, "could not be told from the markup"),
        (lambda: None, "could not be told from the markup"),
        ({"title": ""}, "needs a function with a name"),
        ({}, "cannot be made a tool"),
        ("search", "cannot be made a tool"),
        (None, "cannot be made a tool"),
        (3, "cannot be made a tool"),
        (int, "cannot be made a tool"),
    ],
)
def test_what_is_no_function_tool_is_refused(given: Any, said: str) -> None:
    """With the reason, whatever it is."""
    with pytest.raises(ConfigurationError, match=said):
        openai_tools([given])


@pytest.mark.parametrize("name", ["get-weather", "server/tool.v1", "a:b", "My Search", "суд_2"])
def test_names_of_many_kinds_are_taken(name: str) -> None:
    """Whatever cannot be taken for the markup around it."""
    assert converted({"name": name})["name"] == name


def test_a_name_stands_for_one_tool() -> None:
    """One that is given twice counts once; two different ones are refused."""
    assert openai_tools([search, search]) == openai_tools([search])
    odd = {"type": "function", "function": {"name": "search", "parameters": {"properties": None}}}
    with pytest.raises(ConfigurationError, match="Two tools are named 'search'"):
        openai_tools([search, odd])


def test_strict_is_a_property_of_each_tool() -> None:
    """Said for all of them, or by a tool itself; one tool that is not strict unbinds the calls."""
    own = {"type": "function", "function": {**FUNCTION, "strict": False}}
    assert "strict" not in converted(search)
    assert converted(own)["strict"] is False
    assert [t["function"]["strict"] for t in openai_tools([own, walk], strict=True)] == [True, True]
    assert Tools(tuple(openai_tools([search, walk]))).is_constrained
    assert not Tools(tuple(openai_tools([own, walk]))).is_constrained
    assert Tools(tuple(openai_tools([own, walk])), ToolChoice("required", "walk")).is_constrained


def test_outside_text_in_a_tool_can_be_changed_everywhere() -> None:
    """But for the keys and type names that templates compare; the tool itself stays."""
    parameters = {
        "type": "object",
        "properties": {"type": {"type": "string", "enum": ["a"]}, "b": {"$ref": "#/$defs/b"}},
        "$defs": {"b": {"type": ["null", "x"]}},
    }
    given = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    changed = map_tool(given, str.upper)
    assert changed["function"] == {
        "name": "F",
        "parameters": {
            "type": "object",
            "properties": {
                "type": {"type": "string", "ENUM": ["A"]},
                "B": {"$REF": "#/$DEFS/B"},
            },
            "$DEFS": {"B": {"type": ["null", "X"]}},
        },
    }
    assert given["function"]["name"] == "f"


TOOLS = openai_tools([search, walk])
AUTO, NONE, REQUIRED = ToolChoice("auto"), ToolChoice("none"), ToolChoice("required")
NAMED = ToolChoice("required", "search")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, AUTO),
        (False, AUTO),
        ("auto", AUTO),
        ({"type": "auto"}, AUTO),
        ("none", NONE),
        ({"type": "none"}, NONE),
        ("any", REQUIRED),
        ("required", REQUIRED),
        (True, REQUIRED),
        ({"type": "any"}, REQUIRED),
        ("search", NAMED),
        ({"type": "function", "function": {"name": "search"}}, NAMED),
        ({"type": "function", "name": "search"}, NAMED),
        ({"type": "tool", "name": "search"}, NAMED),
    ],
)
def test_every_way_to_choose_is_understood(given: Any, expected: ToolChoice) -> None:
    """LangChain's, OpenAI's and Anthropic's; the tools that may be called follow from it."""
    assert tool_choice(given, TOOLS) == expected
    names = [t["function"]["name"] for t in Tools(tuple(TOOLS), expected).callable]
    expected_names = {"none": [], "auto": ["search", "walk"], "required": ["search", "walk"]}
    assert names == (["search"] if expected.name else expected_names[expected.mode])
    assert Tools(tuple(TOOLS), expected).offered == TOOLS


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("missing", "names 'missing', but the tools are search, walk"),
        ({"type": "function", "function": {"name": "missing"}}, "names 'missing'"),
        ({"type": "tool", "name": "missing"}, "names 'missing'"),
        (1, "tool_choice=1: use None"),
        (0, "tool_choice=0: use None"),
        (["search"], "use None"),
        ({}, "tool_choice={}: use None"),
        ({"type": "function"}, "use None"),
        ({"type": "function", "function": {}}, "use None"),
    ],
)
def test_a_choice_without_meaning_is_refused(given: Any, said: str) -> None:
    """An unknown name is told with those that there are."""
    with pytest.raises(ConfigurationError, match=said):
        tool_choice(given, TOOLS)


@pytest.mark.parametrize("given", ["any", True, "search"])
def test_a_call_of_no_tools_cannot_be_required(given: Any) -> None:
    """There is nothing to choose from."""
    with pytest.raises(ConfigurationError, match=r"there are no tools|the tools are none"):
        tool_choice(given, [])


class Undocumented(TypedDict):
    text: str


def test_a_typed_dict_without_a_docstring_has_no_description() -> None:
    """LangChain's conversion would take the built-in dict's."""
    [converted] = openai_tools([Undocumented])
    assert converted["function"]["description"] == ""
    assert "dict" not in str(converted["function"]["parameters"])
