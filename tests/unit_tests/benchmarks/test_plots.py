"""The pictures of a result."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fanout.contenders import CONTENDERS
from benchmarks.fanout.plots import plot_results

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
CAPTION = "tiny.gguf · A processor, 2 cores · llama-cpp-python 0.3.36"


def contender(name: str, *seconds: float, computed: int = 1234) -> dict[str, Any]:
    """As the report writes it; without seconds it failed."""
    done = bool(seconds)
    return {
        "name": name,
        "settings": {"threads": 2},
        "seconds": list(seconds),
        "median_seconds": sorted(seconds)[len(seconds) // 2] if done else None,
        "computed_tokens": computed if done else None,
        "output_tokens": 8 if done else None,
        "peak_rss_bytes": 300_000_000 if done else None,
        "error": None if done else "it fell over",
    }


def case(name: str, *contenders: dict[str, Any], tokens: int = 512, branches: int = 4) -> Any:
    """One case of a result."""
    sizes = {"documents": 1, "document_tokens": tokens, "branches": branches, "max_tokens": 16}
    return {"workload": {"name": name, **sizes}, "contenders": list(contenders), "oracle": {}}


def result(*cases: dict[str, Any]) -> dict[str, Any]:
    """A whole result."""
    return {
        "model": {"name": "tiny.gguf", "bytes": 1},
        "machine": {"processor": "A processor", "cores": 2},
        "versions": {"llama-cpp-python": "0.3.36"},
        "date": "2026-01-02T03:04:05+00:00",
        "cases": list(cases),
    }


def scaling() -> dict[str, Any]:
    """Three lengths and three fan-outs, of which one case is common."""
    grid = {(512, 4), (1024, 4), (2048, 4), (1024, 1), (1024, 16)}
    return result(
        *(
            case(
                f"W6-d{tokens}-b{branches}",
                contender("graph", tokens / 400 + branches / 8),
                contender("floor", tokens / 500 + branches / 9),
                tokens=tokens,
                branches=branches,
            )
            for tokens, branches in sorted(grid)
        )
    )


def texts(svg: Path) -> list[str]:
    """What is written in a picture."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg.read_text(encoding="utf-8"))


def test_bars_name_each_contender_with_its_median_and_its_ratio_to_the_floor(
    tmp_path: Path,
) -> None:
    """Whatever the order of the result, the fastest comes first."""
    slow, floor = contender("mutex", 6.0, 5.0, 9.0), contender("floor", 2.0, 2.5, 1.5)
    out = tmp_path / "bars.svg"
    assert plot_results(result(case("W2", slow, floor)), out) == [out]
    written = texts(out)
    assert "W2: 1 document of 512 tokens, 4 branches x 16 tokens" in written
    assert [text for text in written if " s  " in text] == [
        "2.00 s  1.00 x floor",
        "6.00 s  3.00 x floor",
    ]
    assert {"mutex", "floor"} <= set(written)
    assert f"{CAPTION} · 3 runs each · 2026-01-02" in written


def test_bars_without_a_floor_have_seconds_alone(tmp_path: Path) -> None:
    """There is nothing to compare with."""
    out = tmp_path / "bars.svg"
    plot_results(result(case("W2", contender("mutex", 6.0))), out)
    assert "6.00 s" in texts(out)
    assert not [text for text in texts(out) if "floor" in text]


def test_a_contender_that_failed_is_shown_as_such(tmp_path: Path) -> None:
    """A picture hides no failure."""
    out = tmp_path / "bars.svg"
    plot_results(result(case("W2", contender("graph"), contender("floor", 1.0))), out)
    assert {"graph", "failed"} <= set(texts(out))


def test_cases_that_vary_one_size_become_lines(tmp_path: Path) -> None:
    """A folder gets a picture for each series, and no bars."""
    branches, lengths = plot_results(scaling(), tmp_path / "plots")
    assert [branches.name, lengths.name] == ["branches.svg", "document-tokens.svg"]
    assert "Cost against branches: one document of 1,024 tokens, 16 output tokens a branch" in (
        texts(branches)
    )
    assert "Cost against document length: 4 branches x 16 output tokens" in texts(lengths)
    panels = {"Seconds a run", "Prompt tokens computed a run", "Peak memory (MB)"}
    assert {*panels, "graph", "floor", "1", "4", "16", "branches"} <= set(texts(branches))
    assert {*panels, "512", "1,024", "2,048", "document (tokens)"} <= set(texts(lengths))


def test_a_contender_has_one_colour_in_all_pictures(tmp_path: Path) -> None:
    """So one legend is learnt once."""
    bars = tmp_path / "bars.svg"
    plot_results(result(case("W2", contender("graph", 2.0))), bars)
    branches, lengths = plot_results(scaling(), tmp_path / "plots")
    for picture in (bars, branches, lengths):
        assert "#009e73" in picture.read_text(encoding="utf-8").lower()


def test_all_contenders_differ_in_colour(tmp_path: Path) -> None:
    """None is drawn as unknown, and no two alike."""
    out = tmp_path / "bars.svg"
    plot_results(result(case("W2", *(contender(name, 2.0) for name in CONTENDERS))), out)
    svg = out.read_text(encoding="utf-8").lower()
    colours = set(re.findall(r'clip-path="[^"]+" style="fill: (#[0-9a-f]{6})"', svg))
    assert len(colours) == len(CONTENDERS)
    assert "#bbbbbb" not in colours


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_several_pictures_for_one_file_name_get_their_names_appended(
    tmp_path: Path, suffix: str
) -> None:
    """The kind of file follows the suffix."""
    cases = [case(name, contender("floor", 1.0)) for name in ("W4-cold", "W4-warm")]
    files = plot_results(result(*cases), tmp_path / "new" / f"out{suffix}")
    assert [file.name for file in files] == [
        f"out-contenders-W4-cold{suffix}",
        f"out-contenders-W4-warm{suffix}",
    ]
    for file in files:
        content = file.read_bytes()
        assert len(content) > 5000
        assert content.startswith(PNG_MAGIC if suffix == ".png" else b"<?xml")


def test_the_same_result_gives_the_same_file(tmp_path: Path) -> None:
    """A committed picture changes only with its figures."""
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for file in (first, second):
        plot_results(result(case("W2", contender("floor", 1.0))), file)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("cases", "name", "reason"),
    [
        ([case("W2", contender("floor", 1.0))], "out.pdf", r"\.svg or \.png"),
        ([case("W2", contender("floor"))], "out.svg", "no case"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, cases: list[dict[str, Any]], name: str, reason: str
) -> None:
    """Another format; no contender that ended."""
    with pytest.raises(ValueError, match=reason):
        plot_results(result(*cases), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plots are optional."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"langchain-swarmkv\[bench\]"):
        plot_results(result(case("W2", contender("floor", 1.0))), tmp_path / "out.svg")
