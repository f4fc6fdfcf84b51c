"""Progress and summary on terminals, in files and in pipes."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from examples.patent_analysis.display import LiveDisplay, PlainDisplay, display_for, printable
from examples.patent_analysis.graph import TASKS
from examples.patent_analysis.summary import print_analysis, seconds
from tests.unit_tests.examples.samples import analysis

RUN = analysis()


def terminal(width: int = 80) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def play(display: PlainDisplay | LiveDisplay, text: str = "some words ") -> None:
    """The calls of a whole run."""
    with display:
        for done in range(0, 1001, 100):
            display.prefill(done, 1000)
        display.document(RUN.document)
        for result in RUN.analysts:
            display.token(result.name, text)
            display.token(result.name, text)
        for result in RUN.analysts:
            display.analyst(result)


def test_a_pipe_gets_plain_lines() -> None:
    """No escape sequence, four lines of prefill, two lines for each analyst."""
    console = Console(file=StringIO())
    display = display_for(console)
    play(display)
    lines = written(console).splitlines()
    assert "\x1b" not in written(console)
    assert [line for line in lines if line.startswith("prefill")] == [
        f"prefill: {done} of 1000 tokens" for done in (300, 500, 800, 1000)
    ]
    assert sum(line.startswith("novelty") for line in lines) == 2
    assert "1000 tokens reused and 50 computed" in written(console)
    assert "novelty: cut, 10 tokens" in written(console)
    assert "ethics: done, 10 tokens" in written(console)


def test_a_terminal_gets_a_bar_and_live_rows() -> None:
    """The last frame shows the full bar and every analyst, done or cut, with its last words."""
    console = terminal(100)
    display = display_for(console)
    assert isinstance(display, LiveDisplay)
    play(display)
    last_frame = written(console)[-6000:]
    assert "1000/1000" in last_frame
    assert "some words some words" in last_frame
    assert last_frame.count("done") >= len(TASKS) - 1
    assert "cut" in last_frame


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_a_live_row_never_wraps(width: int) -> None:
    """Long answers and wide characters are cut to what the terminal shows of one line."""
    console = terminal(width)
    play(LiveDisplay(console), "跌倒检测系统 " * 40)
    plain = Console(file=StringIO(), width=width)
    display = LiveDisplay(plain)
    for name in TASKS:
        display.token(name, "跌倒检测系统 " * 40)
    plain.print(display._render())
    lines = written(plain).splitlines()
    assert len(lines) == 1 + 1 + len(TASKS)
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize("console", [Console(file=StringIO()), terminal()])
def test_an_answer_cannot_drive_the_terminal(console: Console) -> None:
    """Escape sequences and rich's own markup in an answer are shown, not obeyed."""
    hostile = "\x1b]0;owned\x07 \x1b[2J [red]markup[/red] \x9b5n"
    assert printable(hostile) == "]0;owned [2J [red]markup[/red] 5n"
    run = analysis(dict.fromkeys(TASKS, hostile))
    with display_for(console) as display:
        display.token("novelty", hostile)
    print_analysis(console, run)
    for sequence in ("\x1b]0;", "\x1b[2J", "\x07", "\x9b"):
        assert sequence not in written(console)
    assert "[red]" in written(console)


def test_the_summary_shows_counts_times_and_a_labelled_estimate() -> None:
    """Names are whole at 80 columns, and the saved time is called an estimate."""
    console = Console(file=StringIO(), width=80)
    print_analysis(console, RUN, "A note.")
    output = written(console)
    assert RUN.report in output
    for name in TASKS:
        row = next(line for line in output.splitlines() if line.startswith(f" {name} "))
        assert row.split()[1:5] == ["1050", "1000", "50", "10"]
        assert cell_len(row) <= 80
    assert "Prompt tokens computed: 1300; without sharing: 6300." in output
    assert "Estimate: sharing saved about 50.0 s of prefill" in output
    assert output.rstrip().endswith("A note.")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ""), (0.0, "0 ms"), (0.0944, "94 ms"), (1.234, "1.23 s"), (75.04, "75.0 s")],
)
def test_durations_read_well(value: float | None, shown: str) -> None:
    """Milliseconds below a second, and nothing where nothing was measured."""
    assert seconds(value) == shown
