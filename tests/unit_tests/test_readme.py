"""The README tells what the benchmarks wrote, and nothing else."""

from __future__ import annotations

from pathlib import Path

from benchmarks import readme

ROOT = Path(readme.__file__).parents[1]


def test_the_figures_are_those_of_the_results() -> None:
    """Regenerated they are the same: none was edited, and no result was replaced without them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1
    assert readme.BEGIN + readme.figures() + readme.END in text


def test_every_result_names_machine_versions_and_date() -> None:
    """Whoever reads a figure can see where it comes from."""
    paths = list((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(paths) >= 8
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for field in ('"machine"', '"versions"', '"model"', '"llama-cpp-python"'):
            assert field in text, (path.name, field)
