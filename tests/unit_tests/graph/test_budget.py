"""The budget: its numbers, its verdicts, what it says would fit, and what it cannot know."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.prompts import PromptTemplate
from langgraph.graph import END, START
from langgraph.graph.state import StateGraph
from langgraph.types import Send

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.errors import (
    ConfigurationError,
    ContextBudgetError,
    ModelNotFoundError,
    PromptError,
)
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget import check_budget
from langchain_swarmkv.graph.budget_report import BudgetReport, Verdict
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState
from langchain_swarmkv.prompts import session
from tests.unit_tests.graph.support import DOCUMENT, fake_llm, fan_out, idle_llm

Graph = StateGraph[Any, Any, Any, Any]


def over(report: BudgetReport) -> ContextBudgetError:
    assert report.verdict is Verdict.OVER
    with pytest.raises(ContextBudgetError) as caught:
        report.raise_if_over()
    return caught.value


# -- numbers -------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_prompts_that_are_sent(llm: ChatSwarmKV) -> None:
    """Document and task together are what each analyst's call reports."""
    graph = fan_out(llm, max_tokens=20)
    report = check_budget(graph, document=DOCUMENT)
    sent = {
        event["node"]: event["prompt_tokens"]
        for event in graph.compile().stream({"document": DOCUMENT}, stream_mode="custom")
        if event["type"] == "analyst"
    }
    assert {row.node: row.document_tokens + row.task_tokens for row in report.rows} == sent
    assert {row.max_tokens for row in report.rows} == {20}
    (pool,) = report.pools
    assert pool.document_tokens == report.rows[0].document_tokens
    assert pool.num_branches == 3
    assert pool.needed_cells == pool.document_tokens + sum(r.branch_tokens for r in report.rows)
    assert report.fits
    report.raise_if_over()


def test_the_document_nodes_instructions_are_counted(llm: ChatSwarmKV) -> None:
    """For its own prefix and for the analysts that are given its reference."""
    graph = StateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm, instructions="Be brief."))
    graph.add_node("why", AnalystNode(llm, "Why?"))
    graph.add_edge(START, "document")
    graph.add_edge("document", "why")
    report = check_budget(graph, document=DOCUMENT)
    ref = graph.compile().invoke({"document": DOCUMENT})["document_ref"]
    assert report.rows[0].document_tokens == ref["num_tokens"]
    assert report.pools[0].num_documents == 1


def test_a_number_of_tokens_counts_like_a_text_of_that_many(llm: ChatSwarmKV) -> None:
    """Instructions and markup are added to it, and the text may have any length."""
    graph = fan_out(llm)
    assert check_budget(graph, document_tokens=len(DOCUMENT)) == check_budget(
        graph, document=DOCUMENT
    )


def test_each_branch_counts_the_document_once_between_them() -> None:
    """The case of a split context: 2600 + 2 x (200 + 400) fits 8192, whatever a third is (D1)."""
    with fake_llm(num_cells=8192, max_tokens=400) as model:
        graph = fan_out(model, ("a", "b"), task=lambda name: name * 200)
        report = check_budget(graph, document_tokens=2600)
        markup = report.rows[0].overhead_tokens + 2 * (report.rows[0].task_tokens - 200)
        assert report.pools[0].needed_cells == 2600 + 2 * (200 + 400) + markup
        assert report.fits
        limit = 8192 - report.pools[0].needed_cells + 2600
        assert check_budget(graph, document_tokens=limit).fits
        assert over(check_budget(graph, document_tokens=limit + 1)).needed_tokens == 8193


def test_copies_multiply(llm: ChatSwarmKV) -> None:
    """`max_fanout` branches of one analyst at once."""
    graph = fan_out(llm, ())
    graph.add_node("section", AnalystNode(llm, "Sum up.", max_fanout=7))
    graph.add_conditional_edges("document", lambda state: [Send("section", state)], ["section"])
    (pool,) = check_budget(graph, document=DOCUMENT).pools
    (row,) = pool.branches
    assert pool.num_branches == 7
    assert pool.needed_cells == pool.document_tokens + 7 * row.branch_tokens
    assert pool.needed_sequences == 8


def test_the_fullest_superstep_decides(llm: ChatSwarmKV) -> None:
    """Analysts in a row share the room, those side by side do not."""
    graph = fan_out(llm, ("a", "b"))
    graph.add_node("c", AnalystNode(llm, "Last?", max_tokens=9))
    graph.add_edge(["a", "b"], "c")
    (pool,) = check_budget(graph, document=DOCUMENT).pools
    assert [row.node for row in pool.branches] == ["a", "b"]


def test_nodes_of_subgraphs_are_rows_of_their_own(llm: ChatSwarmKV) -> None:
    """With the path as name, and counted beside the parent's branches."""
    inner = StateGraph(SwarmState)
    inner.add_node("novelty", AnalystNode(llm, "What is new?"))
    inner.add_edge(START, "novelty")
    graph = fan_out(llm, ("claims",))
    graph.add_node("review", inner.compile())
    graph.add_edge("document", "review")
    report = check_budget(graph.compile(), document=DOCUMENT)
    assert [row.node for row in report.rows] == ["claims", "review:novelty"]
    assert report.pools[0].num_branches == 2


def test_a_slice_of_the_document_takes_fewer_positions(llm: ChatSwarmKV) -> None:
    """The pool still holds the whole document; the branch repeats the markup behind it."""
    graph = fan_out(llm, ("early",), required_prefix_tokens=100)
    report = check_budget(graph, document=DOCUMENT)
    (row,) = report.rows
    events = graph.compile().stream({"document": DOCUMENT}, stream_mode="custom")
    sent = [event["prompt_tokens"] for event in events if event["type"] == "analyst"]
    assert (row.document_tokens, row.document_tokens + row.task_tokens) == (100, *sent)
    assert report.pools[0].document_tokens > len(DOCUMENT)


@pytest.mark.parametrize("spare", [-1, 0])
def test_a_slice_that_waits_for_others_needs_no_more_than_it_reads(spare: int) -> None:
    """The rest of the document may leave the pool for it, so that is not counted."""
    options: dict[str, Any] = {"required_prefix_tokens": 100, "max_tokens": 900}
    with fake_llm() as model:
        report = check_budget(fan_out(model, ("early",), **options), document=DOCUMENT)
        cells = report.rows[0].needed_positions
    with fake_llm(num_cells=cells + spare) as model:
        graph = fan_out(model, ("early",), **options)
        is_over = check_budget(graph, document=DOCUMENT, allow_waves=True).verdict is Verdict.OVER
        assert is_over == (spare < 0)
        if is_over:
            with pytest.raises(ContextBudgetError):
                graph.compile().invoke({"document": DOCUMENT})
        else:
            graph.compile().invoke({"document": DOCUMENT})


def test_a_slice_longer_than_the_document_is_the_document(llm: ChatSwarmKV) -> None:
    """As when it runs."""
    graph = fan_out(llm, ("early",), required_prefix_tokens=100_000)
    assert (
        check_budget(graph, document=DOCUMENT).rows
        == check_budget(fan_out(llm, ("early",)), document=DOCUMENT).rows
    )


# -- several documents, several engines ----------------------------------------------------------


def two_documents(llm: ChatSwarmKV, *, parallel: bool, pin: bool) -> Graph:
    graph = StateGraph(dict_state("a", "b"))
    for name in ("a", "b"):
        node = DocumentNode(llm, input_key=f"text_{name}", output_key=f"ref_{name}", pin=pin)
        graph.add_node(f"read_{name}", node)
        graph.add_node(
            f"ask_{name}",
            AnalystNode(llm, "Why?", ref_key=f"ref_{name}", output_key=f"out_{name}"),
        )
        graph.add_edge(f"read_{name}", f"ask_{name}")
    graph.add_edge(START, "read_a")
    graph.add_edge(START if parallel else "ask_a", "read_b")
    return graph


def dict_state(*names: str) -> Any:
    from typing_extensions import TypedDict

    keys = {f"{kind}_{name}": Any for kind in ("text", "ref", "out") for name in names}
    return TypedDict("State", keys)


@pytest.mark.parametrize(
    ("parallel", "pin", "num_documents"),
    [(True, False, 2), (False, False, 1), (False, True, 2), (True, True, 2)],
)
def test_documents_count_while_they_are_in_use_or_pinned(
    llm: ChatSwarmKV, parallel: bool, pin: bool, num_documents: int
) -> None:
    """One that is neither makes room when it is needed."""
    graph = two_documents(llm, parallel=parallel, pin=pin)
    texts = {"text_a": DOCUMENT, "text_b": DOCUMENT * 2}
    report = check_budget(graph, document=texts)
    a, b = (row.document_tokens or 0 for row in report.rows)
    assert b - a == len(DOCUMENT)
    (pool,) = report.pools
    assert pool.num_documents == num_documents
    assert pool.document_tokens == (a + b if num_documents == 2 else b)
    assert check_budget(graph, document_tokens={k: len(v) for k, v in texts.items()}) == report


def test_a_document_of_which_nothing_was_said_is_unknown(llm: ChatSwarmKV) -> None:
    """A mapping may leave one out."""
    graph = two_documents(llm, parallel=True, pin=False)
    report = check_budget(graph, document={"text_a": DOCUMENT})
    assert [row.verdict for row in report.rows] == [Verdict.FITS, Verdict.UNKNOWN]
    assert any("'text_b'" in reason for reason in report.unknown)
    assert not any("'text_a'" in reason for reason in report.unknown)


def test_engines_have_a_sum_each() -> None:
    """A graph on two models needs each to hold its own part."""
    with fake_llm(max_tokens=10) as one, fake_llm(max_tokens=20) as other:
        graph = fan_out(one, ("a",))
        graph.add_node("b", AnalystNode(other, "Why?"))
        graph.add_edge("document", "b")
        report = check_budget(graph, document=DOCUMENT)
        assert [[row.node for row in pool.branches] for pool in report.pools] == [["a"], ["b"]]
        assert all(pool.document_tokens > len(DOCUMENT) for pool in report.pools)


def test_equal_settings_are_one_engine(tiny_llama: Path) -> None:
    """Two objects, one pool: the document is shared."""
    graph = fan_out(ChatSwarmKV(model_path=tiny_llama, n_ctx=2048), ("a",))
    graph.add_node("b", AnalystNode(ChatSwarmKV(model_path=tiny_llama, n_ctx=2048), "Why?"))
    graph.add_edge("document", "b")
    (pool,) = check_budget(graph, document_tokens=100).pools
    assert (pool.num_documents, pool.num_branches) == (1, 2)


def test_tenants_do_not_share_a_document(tiny_llama: Path) -> None:
    """Another cache salt is another copy of it."""
    graph = fan_out(ChatSwarmKV(model_path=tiny_llama, cache_salt="x"), ("a",))
    graph.add_node("b", AnalystNode(ChatSwarmKV(model_path=tiny_llama, cache_salt="y"), "Why?"))
    graph.add_edge("document", "b")
    (pool,) = check_budget(graph, document_tokens=100).pools
    assert (pool.num_documents, pool.num_branches) == (2, 2)


# -- what it opens -------------------------------------------------------------------------------


def test_counting_loads_no_weights(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the vocabulary; n_ctx and n_ctx_train are known from settings and file."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(session, "acquire_engine", refuse)
    graph = fan_out(ChatSwarmKV(model_path=tiny_llama, n_ctx=1234, max_tokens=5))
    report = check_budget(graph, document=DOCUMENT)
    assert {row.n_ctx for row in report.rows} == {1234}
    assert all(row.n_ctx_train for row in report.rows)
    assert report.verdict in (Verdict.FITS, Verdict.OVER)


def test_without_a_document_no_file_is_opened() -> None:
    """The structure is checked all the same; with one, the missing file is named."""
    graph = fan_out(idle_llm())
    assert check_budget(graph).verdict is Verdict.UNKNOWN
    with pytest.raises(ModelNotFoundError):
        check_budget(graph, document=DOCUMENT)


# -- what is unknown -----------------------------------------------------------------------------


def unknown(graph: Graph, **options: Any) -> tuple[str, ...]:
    report = check_budget(graph, **options)
    assert report.verdict is Verdict.UNKNOWN
    assert not report.fits
    report.raise_if_over()
    return report.unknown


def test_a_document_that_was_not_given_is_unknown_and_said_once(llm: ChatSwarmKV) -> None:
    """With what to do about it; nothing else is repeated for each row."""
    (reason,) = unknown(fan_out(llm))
    assert "'document'" in reason
    assert "document_tokens=" in reason


def test_a_task_from_the_state_needs_a_declared_bound(llm: ChatSwarmKV) -> None:
    """A template with variables or a function; without variables it is counted."""
    for task in (PromptTemplate.from_template("{topic}"), lambda state: state["topic"]):
        graph = fan_out(llm, ("a",), task=lambda name, task=task: task)
        (reason,) = unknown(graph, document=DOCUMENT)
        assert "'a'" in reason
        assert "max_task_tokens" in reason
        bound = fan_out(llm, ("a",), task=lambda name, task=task: task, max_task_tokens=50)
        (row,) = check_budget(bound, document=DOCUMENT).rows
        assert (row.task_tokens, row.verdict) == (50, Verdict.FITS)
    fixed = fan_out(llm, ("a",), task=lambda name: PromptTemplate.from_template("Why?"))
    assert check_budget(fixed, document=DOCUMENT).fits


def test_the_number_of_copies_needs_a_declared_bound(llm: ChatSwarmKV) -> None:
    """Whether the Send is behind a path map or not."""
    for path_map in (["section"], None):
        for max_fanout in (None, 3):
            graph = fan_out(llm, ())
            graph.add_node("section", AnalystNode(llm, "Sum up.", max_fanout=max_fanout))
            graph.add_conditional_edges("document", lambda s: [Send("section", s)], path_map)
            report = check_budget(graph, document=DOCUMENT)
            assert report.rows[0].fanout == max_fanout
            reasons = " ".join(report.unknown)
            assert ("max_fanout" in reasons) == (max_fanout is None)
            assert ("path map" in reasons) == (path_map is None)
            assert report.fits == (not report.unknown)


def test_documents_that_are_sent_to_are_unknown(llm: ChatSwarmKV) -> None:
    """Each copy may read another one."""
    graph = StateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_conditional_edges(START, lambda s: [Send("document", s)], ["document"])
    (reason,) = unknown(graph, document=DOCUMENT)
    assert "'document'" in reason


def test_what_is_unknown_counts_as_nothing_and_can_still_be_too_much() -> None:
    """The known part alone does not fit, so it is refused."""
    with fake_llm(num_cells=100, max_tokens=40) as model:
        error = over(check_budget(fan_out(model)))
        assert error.limit_tokens == 100
        assert error.needed_tokens == 120


# -- what would fit ------------------------------------------------------------------------------


def needed_for(model: ChatSwarmKV, names: tuple[str, ...] = ("a", "b", "c")) -> int:
    return check_budget(fan_out(model, names), document=DOCUMENT).pools[0].needed_cells


def suggested(message: str, pattern: str) -> int:
    found = re.search(pattern, message)
    assert found, message
    return int(found.group(1))


@pytest.mark.parametrize("missing", [1, 7, 20])
def test_what_the_pool_error_says_would_fit_does_and_one_more_does_not(missing: int) -> None:
    """`n_ctx`, `max_tokens` and the length of the document, each exactly at its limit."""
    names = ("a", "b", "c")
    with fake_llm(max_tokens=30) as model:
        needed = needed_for(model)
    with fake_llm(num_cells=needed - missing, max_tokens=30) as model:
        error = over(check_budget(fan_out(model, names), document=DOCUMENT))
        message = str(error)
        assert (error.needed_tokens, error.limit_tokens) == (needed, needed - missing)
        assert error.limit_name == "n_ctx"
        assert str(needed) in message
        assert str(needed - missing) in message
        assert all(repr(name) in message for name in names)
        n_ctx = suggested(message, r"fit with n_ctx=(\d+)")
        max_tokens = suggested(message, r"max_tokens=(\d+) for each")
        length = suggested(message, r"a document of at most (\d+) tokens")
        assert "allow_waves=True (they would run in about 2 turns)" in message

        def fits(max_tokens: int = 30, length: int = len(DOCUMENT)) -> bool:
            graph = fan_out(model, names, max_tokens=max_tokens)
            return check_budget(graph, document_tokens=length).fits

        assert fits(max_tokens)
        assert not fits(max_tokens + 1)
        assert fits(length=length)
        assert not fits(length=length + 1)
    for size, verdict in ((n_ctx, True), (n_ctx - 1, False)):
        with fake_llm(num_cells=size, max_tokens=30) as model:
            assert check_budget(fan_out(model, names), document=DOCUMENT).fits is verdict


@pytest.mark.parametrize("limit_name", ["n_ctx", "n_ctx_train"])
def test_what_the_position_error_says_would_fit_does_and_one_more_does_not(limit_name: str) -> None:
    """For one analyst alone; the trained context cannot be raised."""
    with fake_llm(max_tokens=30) as model:
        needed = needed_for(model, ("a",))
    limit = {"num_cells" if limit_name == "n_ctx" else "n_ctx_train": needed - 5}
    with fake_llm(max_tokens=30, **limit) as model:
        error = over(check_budget(fan_out(model, ("a",)), document=DOCUMENT))
        message = str(error)
        assert (error.limit_name, error.limit_tokens) == (limit_name, needed - 5)
        assert (f"n_ctx={needed}" in message) == (limit_name == "n_ctx")
        max_tokens = suggested(message, r"max_tokens=(\d+)(?: for each)?(?:, or|\.)")
        length = suggested(message, r"a document of at most (\d+) tokens")
        for more in (0, 1):
            graph = fan_out(model, ("a",), max_tokens=max_tokens + more)
            assert check_budget(graph, document=DOCUMENT).fits is not bool(more)
            report = check_budget(fan_out(model, ("a",)), document_tokens=length + more)
            assert report.fits is not bool(more)


def test_when_nothing_helps_it_does_not_pretend() -> None:
    """A task alone longer than the trained context."""
    with fake_llm(n_ctx_train=60, max_tokens=30) as model:
        graph = fan_out(model, ("a",), task=lambda name: name * 100)
        assert "Shorten the tasks" in str(over(check_budget(graph, document=DOCUMENT)))


def test_the_trained_context_is_named_before_a_pool_that_could_be_raised() -> None:
    """Raising n_ctx would not help, so it is not suggested."""
    with fake_llm(num_cells=700, n_ctx_train=720, max_tokens=30) as model:
        error = over(check_budget(fan_out(model), document=DOCUMENT))
        assert (error.limit_name, error.limit_tokens) == ("n_ctx_train", 720)
        assert "fit with n_ctx" not in str(error)
        length = suggested(str(error), r"a document of at most (\d+) tokens")
        assert check_budget(fan_out(model), document_tokens=length).fits
        assert not check_budget(fan_out(model), document_tokens=length + 1).fits


def test_the_length_that_would_fit_is_one_for_the_longest_analyst() -> None:
    """A short task has room for a text that a long one has not, whichever stands first."""
    tasks = {"a": "Short.", "b": "A task that takes many more tokens than the other. " * 3}
    with fake_llm(n_ctx_train=1000, max_tokens=200) as model:
        for names in (("a", "b"), ("b", "a")):
            graph = fan_out(model, names, task=tasks.__getitem__)
            error = over(check_budget(graph, document=DOCUMENT))
            assert (error.limit_name, error.node) == ("n_ctx_train", "b")  # type: ignore[attr-defined]
            length = suggested(str(error), r"a document of at most (\d+) tokens")
            assert check_budget(graph, document_tokens=length).fits
            assert not check_budget(graph, document_tokens=length + 1).fits
            assert check_budget(graph, document=DOCUMENT[:length]).fits
            max_tokens = suggested(str(error), r"max_tokens=(\d+) for each")
            for more in (0, 1):
                shorter = fan_out(
                    model, names, task=tasks.__getitem__, max_tokens=max_tokens + more
                )
                assert check_budget(shorter, document=DOCUMENT).fits is not bool(more)


def test_too_few_sequences_are_an_error_of_their_own() -> None:
    """Cells alone do not let branches run at once."""
    with fake_llm(max_sequences=3) as model:
        error = over(check_budget(fan_out(model), document=DOCUMENT))
        assert (error.needed_tokens, error.limit_tokens) == (4, 3)
        assert error.limit_name == "max_sequences"
        assert "max_sequences=4, or allow_waves=True" in str(error)
        assert check_budget(fan_out(model), document=DOCUMENT, allow_waves=True).waves == 2


# -- waves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "waves"), [(6, 1), (5, 2), (3, 2), (2, 3), (1, 6)])
def test_waves_need_room_for_the_largest_branch_only(room: int, waves: int) -> None:
    """The report says in how many turns the branches would run."""
    names = tuple("abcdef")
    with fake_llm(max_tokens=30) as model:
        row = check_budget(fan_out(model, names), document=DOCUMENT).rows[0]
    cells = (row.document_tokens or 0) + room * row.branch_tokens
    with fake_llm(num_cells=cells, max_tokens=30) as model:
        graph = fan_out(model, names)
        report = check_budget(graph, document=DOCUMENT, allow_waves=True)
        assert report.fits
        assert report.waves == waves
        text = " ".join(str(report).split())
        assert (f"in about {waves} turns" in text) == (waves > 1)
        assert check_budget(graph, document=DOCUMENT).fits == (waves == 1)
    with fake_llm(num_cells=cells - room * row.branch_tokens + 1, max_tokens=30) as model:
        report = check_budget(fan_out(model, names), document=DOCUMENT, allow_waves=True)
        assert f"'a' alone needs {row.needed_positions}" in str(over(report))


def test_a_branch_with_its_pinned_neighbours_must_fit_even_in_waves() -> None:
    """What is pinned cannot make room."""
    with fake_llm(num_cells=4 * len(DOCUMENT)) as model:
        sizes = {"text_a": 2 * len(DOCUMENT), "text_b": 2 * len(DOCUMENT)}
        for pin in (False, True):
            graph = two_documents(model, parallel=False, pin=pin)
            report = check_budget(graph, document_tokens=sizes, allow_waves=True)
            assert report.fits is not pin
            if pin:
                assert "fewer pinned documents" in str(over(report))


# -- the report as a value -----------------------------------------------------------------------


def test_the_report_prints_a_table(llm: ChatSwarmKV) -> None:
    """With each analyst, the sum of the fullest step, and what is unknown."""
    graph = fan_out(llm, max_tokens=20)
    text = str(check_budget(graph, document=DOCUMENT))
    report = check_budget(graph, document=DOCUMENT)
    for row in report.rows:
        assert re.search(rf"{row.node} .* {row.task_tokens} .* 20 .* fits", text)
    assert f"{report.pools[0].needed_cells:,} of 4,096 cells" in text
    assert "How long the document" in str(check_budget(graph))
    assert max(map(len, text.splitlines())) <= 100


def test_an_error_carries_its_report_even_to_another_process() -> None:
    """Values all through."""
    with fake_llm(num_cells=100, max_tokens=40) as model:
        report = check_budget(fan_out(model), document=DOCUMENT)
        error = pickle.loads(pickle.dumps(over(report)))
        assert error.report == report
        assert hash(error.report) == hash(report)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"document": " "}, PromptError, "empty"),
        ({"document": {"document": ""}}, PromptError, "empty"),
        ({"document": Path("contract.txt")}, ConfigurationError, "document is a .*Path"),
        ({"document": {"document": 7}}, ConfigurationError, "document is a int"),
        ({"document_tokens": 0}, ConfigurationError, "document_tokens=0"),
        ({"document_tokens": "800"}, ConfigurationError, "document_tokens='800'"),
        ({"document": "x", "document_tokens": 1}, ConfigurationError, "not both"),
        ({"max_turns": 0}, ConfigurationError, "max_turns=0"),
    ],
)
def test_wrong_arguments_are_refused(
    llm: ChatSwarmKV, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """With the value that was given."""
    with pytest.raises(error, match=message):
        check_budget(fan_out(llm), **options)


def test_a_graph_without_nodes_of_ours_has_nothing_to_check() -> None:
    """And fits."""
    graph = StateGraph(SwarmState)
    function: Callable[[SwarmState], dict[str, Any]] = lambda state: {}  # noqa: E731
    graph.add_node("plain", function)
    graph.add_edge(START, "plain")
    graph.add_edge("plain", END)
    report = check_budget(graph)
    assert report.fits
    assert (report.rows, report.pools, report.waves) == ((), (), 0)
