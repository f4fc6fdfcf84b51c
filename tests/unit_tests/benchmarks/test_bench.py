"""From options to result, and what the command refuses."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from benchmarks.fanout import bench
from benchmarks.fanout.workloads import Sizes
from langchain_swarmkv import ConfigurationError, cli
from langchain_swarmkv.cli import bench_command
from tests.unit_tests.benchmarks import fakes


@pytest.fixture
def run(tiny_long: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run the benchmark on a tiny case, with fakes among the contenders."""
    for name in ("Wrong", "Crashing"):
        monkeypatch.setitem(bench.CONTENDERS, name.lower(), f"{fakes.HERE}:{name}")

    def run(
        contenders: str, console: Console | None = None, **more: Callable[..., None]
    ) -> dict[str, Any]:
        options = bench.Options(
            model=tiny_long,
            sizes=Sizes(100, 2, 4),
            contenders=contenders,
            repeat=1,
            threads=1,
            tunes=False,
        )
        console = console or Console(file=io.StringIO())
        return bench.run_benchmark(
            options, command=["it"], console=console, tell=lambda text: None, **more
        )

    return run


def test_the_result_holds_what_readers_of_it_need(run: Callable[..., dict[str, Any]]) -> None:
    """The names of the fields are a contract; everything is plain data."""
    result = json.loads(json.dumps(run("fresh-context,floor"), allow_nan=False))
    assert bench.is_good(result)
    assert {"workload", "machine", "versions", "command", "date"} <= set(result)
    assert result["workload"]["branches"] == 2
    assert result["contenders"] == result["cases"][0]["contenders"]
    fresh, floor = result["contenders"]
    assert (fresh["name"], floor["name"]) == ("fresh-context", "floor")
    for contender in (fresh, floor):
        assert contender["settings"]["threads"] == 1
        assert contender["seconds"] == [contender["median_seconds"]]
        assert contender["output_tokens"] == 8
        assert contender["peak_rss_bytes"] > 1 << 20
        assert contender["oracle_agreement"]["agreeing"] == 8
        assert len(contender["activation_seconds"]) == 2
    assert fresh["computed_tokens"] > floor["computed_tokens"]
    assert floor["computed_tokens"] == result["workload"]["shared_prompt_tokens"]


def test_a_result_is_saved_before_it_is_printed(run: Callable[..., dict[str, Any]]) -> None:
    """A full disk behind stdout, or a reader who leaves, takes no measurement along."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space")

    saved: list[dict[str, Any]] = []
    with pytest.raises(OSError, match="no space"):
        run("floor", Console(file=Closed()), save=saved.append)
    assert [case["workload"]["branches"] for case in saved[0]["cases"]] == [2]


def test_who_is_wrong_or_fails_is_shown(run: Callable[..., dict[str, Any]]) -> None:
    """In red, with the reason; and the result as a whole is not good."""
    out = io.StringIO()
    result = run("wrong,crashing,floor", Console(file=out, force_terminal=True, width=100))
    by_name = {contender["name"]: contender for contender in result["contenders"]}
    assert not bench.is_good(result)
    agreement = by_name["wrong"]["oracle_agreement"]
    assert agreement["agreeing"] < agreement["tokens"]
    assert "SIGSEGV" in by_name["crashing"]["error"]
    assert by_name["crashing"]["median_seconds"] is None
    red = [line for line in out.getvalue().splitlines() if "\x1b[31m" in line]
    assert any("wrong" in line for line in red)
    assert any("crashing failed" in line and "SIGSEGV" in line for line in red)
    assert not any("floor" in line for line in red)


@pytest.mark.parametrize("names", ["fresh", "", "engine,none"])
def test_an_unknown_contender_is_refused(run: Callable[..., dict[str, Any]], names: str) -> None:
    """With the names of those there are."""
    with pytest.raises(ConfigurationError, match="copy-per-branch"):
        run(names)


def test_one_asked_for_by_name_that_cannot_run_is_refused(
    run: Callable[..., dict[str, Any]],
) -> None:
    """With `all` it would only be listed."""
    with pytest.raises(ConfigurationError, match="--server-script"):
        run("floor,example-server")


def fanout(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["bench", "fanout", *map(str, arguments)])


def assert_refused(result: Result, words: str) -> None:
    """Exit code 2 and one line on stderr."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_wrong_input_is_refused_in_one_line(tiny_long: Path, tmp_path: Path) -> None:
    """Before anything is measured."""
    model = ("--model", tiny_long)
    assert_refused(fanout(*model, "--workload", "W7"), "W1, W2")
    assert_refused(fanout(*model, "--contenders", "others"), "fresh-context")
    assert_refused(fanout(*model, "--document-tokens", 17_000), "16384")
    assert_refused(fanout("--model", tmp_path / "missing.gguf"), "missing.gguf")
    assert_refused(fanout(*model, "--json", tmp_path), "it is a folder")
    assert_refused(fanout(*model, "--server-script", tmp_path / "server.py"), "server.py")
    assert fanout("--repeat", 0).exit_code == 2


def test_without_matplotlib_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is measured, too."""
    monkeypatch.setattr(bench_command, "find_spec", lambda name: None)
    assert_refused(fanout("--plot", tmp_path), "langchain-swarmkv[bench]")
