"""The README's table and list tell what the benchmarks wrote."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import readme

ROOT = Path(readme.__file__).parents[1]


def test_the_figures_are_those_of_the_results() -> None:
    """Regenerated they are the same: none was edited, and no result was replaced without them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1
    assert readme.BEGIN + readme.figures() + readme.END in text


def test_every_result_says_where_it_comes_from() -> None:
    """Machine, versions and model; those of the fan-out with the command and the date."""
    results = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in (ROOT / "benchmarks" / "results").glob("*.json")
    }
    assert {f"fanout-W{number}" for number in range(1, 7)} <= set(results)
    for name, result in results.items():
        assert {"machine", "versions", "model"} <= set(result), name
        assert "llama-cpp-python" in result["versions"], name
        if name.startswith("fanout-"):
            assert result["command"][:3] == ["swarmkv", "bench", "fanout"], name
            assert result["date"], name
