"""Pictures of a result that the benchmark wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_results"]

Case = dict[str, Any]
Contender = dict[str, Any]

SUFFIXES = (".svg", ".png")
_MOST_ON_A_LINEAR_SCALE = 30
"""Times the smallest value."""
_MIN_SERIES = 3
_WIDTH_INCHES = 8.6
_MEGABYTE = 1e6


class _Look(NamedTuple):
    colour: str
    marker: str
    line: str = "-"


# Told apart by colour-blind eyes, and by marker where colours are lost.
_LOOKS = {
    "floor": _Look("#222222", "", "--"),
    "engine": _Look("#0072B2", "o"),
    "chat-model": _Look("#56B4E9", "s"),
    "graph": _Look("#009E73", "D"),
    "mutex": _Look("#E69F00", "^"),
    "chat-llama-cpp": _Look("#A6761D", "v"),
    "fresh-context": _Look("#D55E00", "X"),
    "copy-per-branch": _Look("#CC79A7", "P"),
    "llama-server": _Look("#882255", "<"),
    "example-server": _Look("#332288", ">"),
    "transformers": _Look("#888888", "*"),
}
_OTHER = _Look("#BBBBBB", ".")
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 160,
    "svg.fonttype": "none",  # text stays text: it can be searched, and selected
    "svg.hashsalt": "swarmkv",  # the same result gives the same file
}


def plot_results(result: dict[str, Any], out: Path) -> list[Path]:
    """Draw what the result shows: bars for single cases, lines where cases form a series.

    Args:
        result: the benchmark's JSON.
        out: a file that ends in .svg or .png, or a folder, which is made and gets .svg files. Where
            there are several pictures, the name of each is appended to that of the file.

    Returns:
        The files written.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: another kind of file, or nothing in the result to draw.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib: pip install 'langchain-swarmkv[bench]'"
        ) from error
    pictures = list(_pictures(result["cases"]))
    if not pictures:
        raise ValueError("the result has no case with a contender that came to its end")
    files = _files(out, [picture.name for picture in pictures])
    with matplotlib.rc_context(_STYLE):
        for picture, file in zip(pictures, files, strict=True):
            figure = Figure(figsize=(_WIDTH_INCHES, picture.height_inches), layout="constrained")
            picture.draw(figure)
            figure.supxlabel(_caption(result, picture.cases), fontsize=7.5, color="#555555")
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


class _Picture(NamedTuple):
    name: str
    cases: Sequence[Case]
    height_inches: float
    draw: Callable[[Figure], None]


def _files(out: Path, names: Sequence[str]) -> list[Path]:
    if not out.suffix:
        return [out / f"{name}.svg" for name in names]
    if out.suffix not in SUFFIXES:
        raise ValueError(f"{out.name}: give a name that ends in .svg or .png, or a folder")
    if len(names) == 1:
        return [out]
    return [out.with_name(f"{out.stem}-{name}{out.suffix}") for name in names]


def _pictures(cases: Sequence[Case]) -> Iterator[_Picture]:
    cases = [case for case in cases if any(_median(c) is not None for c in case["contenders"])]
    series = [*_series(cases, "branches", "document_tokens")]
    series += _series(cases, "document_tokens", "branches")
    for case in () if series else cases:
        height = 1.5 + 0.34 * len(case["contenders"])
        yield _Picture(f"contenders-{case['workload']['name']}", [case], height, _bars_of(case))
    for name, varied, members in series:
        yield _Picture(name, members, 6.2, _lines_of(varied, members))


def _series(
    cases: Sequence[Case], varied: str, fixed: str
) -> Iterator[tuple[str, str, list[Case]]]:
    """Cases that differ in one size alone: name, that size, and the cases in its order."""
    groups = defaultdict(list)
    for case in cases:
        groups[case["workload"][fixed]].append(case)
    long = {
        value: members
        for value, members in groups.items()
        if len({member["workload"][varied] for member in members}) >= _MIN_SERIES
    }
    for value, members in long.items():
        name = varied if len(long) == 1 else f"{varied}-{value}"
        members.sort(key=lambda case: int(case["workload"][varied]))
        yield name.replace("_", "-"), varied, members


def _bars_of(case: Case) -> Callable[[Figure], None]:
    def draw(figure: Figure) -> None:
        _bars(figure.subplots(), case)

    return draw


def _bars(axes: Axes, case: Case) -> None:
    """Median seconds, the fastest on top; the range as a whisker; the ratio to the floor."""
    done = [c for c in case["contenders"] if _median(c) is not None]
    done.sort(key=lambda contender: float(contender["median_seconds"]))
    failed = [c for c in case["contenders"] if _median(c) is None]
    floor = next((c["median_seconds"] for c in done if c["name"] == "floor"), None)
    longest = max(max(c["seconds"]) for c in done)
    for row, contender in enumerate(done):
        middle, most = contender["median_seconds"], max(contender["seconds"])
        spread = [[middle - min(contender["seconds"])], [most - middle]]
        axes.barh(row, middle, height=0.66, color=_look(contender["name"]).colour)
        axes.errorbar(middle, row, xerr=spread, color="#222222", capsize=3, lw=1.1)
        ratio = f"  {middle / floor:.2f} x floor" if floor else ""
        axes.text(most + longest * 0.012, row, f"{middle:.2f} s{ratio}", va="center")
    for row in range(len(done), len(done) + len(failed)):
        axes.text(longest * 0.012, row, "failed", va="center", style="italic", color="#555555")
    axes.set_yticks(range(len(done) + len(failed)), [c["name"] for c in done + failed])
    axes.set_ylim(len(done) + len(failed) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.24)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds a run: median, and range of all runs (less is better)")
    axes.set_title(_bars_title(case["workload"]), weight="bold")


def _bars_title(sizes: dict[str, Any]) -> str:
    several = sizes.get("documents", 1)
    documents = "1 document" if several == 1 else f"{several} documents"
    return (
        f"{sizes['name']}: {documents} of {sizes['document_tokens']:,} tokens, "
        f"{_branches(sizes['branches'])} x {sizes['max_tokens']} tokens"
    )


def _lines_of(varied: str, cases: Sequence[Case]) -> Callable[[Figure], None]:
    def draw(figure: Figure) -> None:
        _lines(figure, varied, cases)

    return draw


def _lines(figure: Figure, varied: str, cases: Sequence[Case]) -> None:
    """Three panels over the size that varies, and the legend in the place of a fourth."""
    panels = figure.subplots(2, 2)
    measures: list[tuple[Axes, str, Callable[[Contender], float | None]]] = [
        (panels[0, 0], "Seconds a run", _median),
        (panels[0, 1], "Prompt tokens computed a run", lambda c: c["computed_tokens"]),
        (panels[1, 0], "Peak memory (MB)", _megabytes),
    ]
    for axes, title, measure in measures:
        _panel(axes, varied, cases, measure)
        axes.set_title(title)
    legend = panels[1, 1]
    legend.axis("off")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    legend.legend(handles, labels, loc="center left", frameon=False, handlelength=3)
    figure.suptitle(_lines_title(varied, cases[0]["workload"]), weight="bold", fontsize=11)


def _panel(
    axes: Axes, varied: str, cases: Sequence[Case], measure: Callable[[Contender], float | None]
) -> None:
    names = dict.fromkeys(c["name"] for case in cases for c in case["contenders"])
    values: list[float] = []
    for name in names:
        points = [
            (case["workload"][varied], value)
            for case in cases
            for contender in case["contenders"]
            if contender["name"] == name and (value := measure(contender)) is not None
        ]
        values += [value for _, value in points]
        look = _look(name)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=look.colour,
            marker=look.marker,
            linestyle=look.line,
            markersize=5,
            linewidth=1.7,
            zorder=4 if name == "floor" else 3,
        )
    sizes = sorted({case["workload"][varied] for case in cases})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    _scale(axes, values)
    axes.set_xlabel("branches" if varied == "branches" else "document (tokens)")


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """From zero, so that flat looks flat; logarithmic only where small values would vanish."""
    if not values or max(values) <= _MOST_ON_A_LINEAR_SCALE * min(values):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}" if y >= 10 or y == 0 else f"{y:g}")
        return
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_yticks(*_ticks(axes.get_ylim()))


def _ticks(limits: tuple[float, float]) -> tuple[list[float], list[str]]:
    """1, 2, 5, 10, ... within the limits, written as plain numbers."""
    low, high = limits
    ticks = [m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    return ticks, [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks]


def _lines_title(varied: str, sizes: dict[str, Any]) -> str:
    if varied == "branches":
        return (
            f"Cost against branches: one document of {sizes['document_tokens']:,} tokens, "
            f"{sizes['max_tokens']} output tokens a branch"
        )
    return (
        f"Cost against document length: {_branches(sizes['branches'])} "
        f"x {sizes['max_tokens']} output tokens"
    )


def _branches(count: int) -> str:
    return "1 branch" if count == 1 else f"{count} branches"


def _median(contender: Contender) -> float | None:
    value: float | None = contender["median_seconds"]
    return value


def _megabytes(contender: Contender) -> float | None:
    peak: int | None = contender["peak_rss_bytes"]
    return peak / _MEGABYTE if peak else None


def _look(name: str) -> _Look:
    return _LOOKS.get(name, _OTHER)


def _caption(result: dict[str, Any], cases: Sequence[Case]) -> str:
    """Model, machine, versions and number of runs."""
    machine, versions = result["machine"], result["versions"]
    runs = {len(c["seconds"]) for case in cases for c in case["contenders"] if c["seconds"]}
    counts = f"{min(runs)}" if len(runs) == 1 else f"{min(runs)}-{max(runs)}"
    return (
        f"{result['model']['name']} · {machine['processor']}, {machine['cores']} cores · "
        f"llama-cpp-python {versions.get('llama-cpp-python', '?')} · "
        f"{counts} run{'s' if runs != {1} else ''} each · {result['date'][:10]}"
    )
