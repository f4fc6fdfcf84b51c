"""The error tree: drawn as it is, agreeing with LangGraph's retries, and whole after a journey."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.types import RetryPolicy

from langchain_swarmkv import errors
from langchain_swarmkv.errors import (
    ContextBudgetError,
    ForkedProcessError,
    GrammarError,
    RequestTimeoutError,
    SwarmKVError,
)

ERRORS: list[type[SwarmKVError]] = [getattr(errors, name) for name in errors.__all__]


def drawn_tree() -> dict[str, str | None]:
    """Each name in the docstring's tree, and the name that it hangs from."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        found = re.match(r"[│├└─ ]*(\w+Error)\b", line)
        if found is None:
            continue
        column = found.start(1)
        while above and above[-1][0] >= column:
            above.pop()
        parents[found[1]] = above[-1][1] if above else None
        above.append((column, found[1]))
    return parents


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    """Every class, once, below the one that it inherits from, and nothing else."""
    tree = drawn_tree()
    assert sorted(tree) == sorted(errors.__all__)
    for kind in ERRORS:
        parent = tree[kind.__name__]
        own_bases = [base.__name__ for base in kind.__bases__ if base.__name__ in tree]
        assert own_bases == ([] if parent is None else [parent])


def test_all_names_every_error() -> None:
    """Sorted, and no public class is left out."""
    defined = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and not name.startswith("_")
    ]
    assert errors.__all__ == sorted(defined)


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind is not SwarmKVError])
def test_retryable_agrees_with_langgraph(kind: type[SwarmKVError]) -> None:
    """What its default policy retries is what may succeed later."""
    should_retry = RetryPolicy().retry_on
    assert callable(should_retry)
    assert should_retry(kind("x")) == kind.retryable


@pytest.mark.parametrize("kind", ERRORS)
def test_each_says_in_a_sentence_what_it_means(kind: type[SwarmKVError]) -> None:
    """One line that ends with a full stop."""
    assert kind.__doc__
    assert kind.__doc__.splitlines()[0].endswith(".")


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("journey", ["pickle", "copy", "deepcopy"])
def test_facts_survive_a_journey(kind: type[SwarmKVError], journey: str) -> None:
    """Between processes and in checkpoints: class, message, facts and advice."""
    error = kind("what was seen", needed_tokens=5, path="model.gguf")
    journeys: dict[str, Callable[[], Any]] = {
        "pickle": lambda: pickle.loads(pickle.dumps(error)),
        "copy": lambda: copy.copy(error),
        "deepcopy": lambda: copy.deepcopy(error),
    }
    travelled = journeys[journey]()
    assert type(travelled) is kind
    assert str(travelled) == "what was seen"
    assert travelled.facts == {"needed_tokens": 5, "path": "model.gguf"}
    assert vars(travelled).items() >= travelled.facts.items()
    assert getattr(travelled, "__notes__", []) == getattr(error, "__notes__", [])


def test_advice_given_later_survives_too() -> None:
    """Not only the class's own."""
    error = ContextBudgetError("too long")
    error.add_hint("Shorten the document.")
    again = pickle.loads(pickle.dumps(error))
    assert again.__notes__ == ["Shorten the document."]


@pytest.mark.parametrize("kind", [RequestTimeoutError, ForkedProcessError])
def test_a_hint_is_a_note(kind: type[SwarmKVError]) -> None:
    """Shown below the message, not inside of it."""
    error = kind("what was seen")
    assert str(error) == "what was seen"
    assert error.__notes__ == [kind.hint]  # type: ignore[attr-defined]


def test_errors_without_a_hint_have_no_notes() -> None:
    """Nothing is added where nothing is to be said."""
    assert not hasattr(GrammarError("x"), "__notes__")


def test_facts_are_keyword_only_and_their_own() -> None:
    """Two errors of a class share nothing."""
    first, second = ContextBudgetError("a", needed_tokens=1), ContextBudgetError("b")
    assert first.facts == {"needed_tokens": 1}
    assert second.facts == {}
    assert not hasattr(second, "needed_tokens")
    with pytest.raises(TypeError):
        ContextBudgetError("a", 1)  # type: ignore[call-arg]
