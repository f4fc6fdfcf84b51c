"""Progress for people: live rows on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .graph import TASKS, title
from .results import AnalystResult, DocumentResult

PLAIN_STEPS = 4
"""Lines that the prefill gets where no bar can be drawn."""


def printable(text: str) -> str:
    """The text without control characters: a model must not be able to drive the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


class PlainDisplay:
    """One line for each thing that happened."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps_shown = 0
        self._started: set[str] = set()

    def __enter__(self) -> PlainDisplay:
        self._line("loading the model")
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to take down."""

    def prefill(self, done_tokens: int, total_tokens: int) -> None:
        """See `Observer`."""
        step = PLAIN_STEPS * done_tokens // max(total_tokens, 1)
        if step > self._steps_shown:
            self._steps_shown = step
            self._line(f"prefill: {done_tokens} of {total_tokens} tokens")

    def document(self, result: DocumentResult) -> None:
        """See `Observer`."""
        self._line(f"document: {result.prompt_tokens} tokens in the cache")

    def token(self, analyst: str, text: str) -> None:
        """See `Observer`."""
        if analyst not in self._started:
            self._started.add(analyst)
            self._line(f"{analyst}: first words")

    def analyst(self, result: AnalystResult) -> None:
        """See `Observer`."""
        self._line(
            f"{result.name}: {result.end}, {result.output_tokens} tokens; of its prompt "
            f"{result.cached_tokens} tokens reused and {result.computed_tokens} computed"
        )

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A bar for the prefill and a row for each analyst, redrawn in place."""

    def __init__(self, console: Console, analysts: Iterable[str] = TASKS) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            console=console,
            expand=True,
        )
        self._prefill = self._progress.add_task("Loading the model", total=None)
        self._rows = {name: _Row() for name in analysts}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> LiveDisplay:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def prefill(self, done_tokens: int, total_tokens: int) -> None:
        """See `Observer`."""
        self._progress.update(
            self._prefill, description="Prefill", completed=done_tokens, total=total_tokens
        )

    def document(self, result: DocumentResult) -> None:
        """See `Observer`."""
        self.prefill(result.prompt_tokens, result.prompt_tokens)
        for row in self._rows.values():
            row.state = "reading"

    def token(self, analyst: str, text: str) -> None:
        """See `Observer`."""
        row = self._rows[analyst]
        row.state = "writing"
        row.num_tokens += 1
        row.tail = (row.tail + printable(text))[-400:]

    def analyst(self, result: AnalystResult) -> None:
        """See `Observer`."""
        row = self._rows[result.name]
        row.state, row.num_tokens = result.end, result.output_tokens

    def _render(self) -> Group:
        table = Table(box=None, expand=True, padding=(0, 1), header_style="dim")
        table.add_column("analyst", no_wrap=True)
        table.add_column("state", no_wrap=True, width=7)
        table.add_column("tokens", justify="right", no_wrap=True, width=6)
        table.add_column("last words", no_wrap=True, ratio=1)
        width = max(self._console.width - 46, 10)
        for name, row in self._rows.items():
            words = Text(row.last_words(width), style="dim", no_wrap=True, overflow="crop")
            state = Text(row.state, style=STATE_STYLES[row.state])
            table.add_row(title(name), state, str(row.num_tokens or ""), words)
        return Group(self._progress, table)


STATE_STYLES = {
    "waiting": "dim",
    "reading": "yellow",
    "writing": "cyan",
    "done": "green",
    "cut": "magenta",
}


class _Row:
    def __init__(self) -> None:
        self.state = "waiting"
        self.num_tokens = 0
        self.tail = ""

    def last_words(self, width: int) -> str:
        """The end of the answer on one line of at most `width` cells of the terminal."""
        line = " ".join(self.tail.split())
        if cell_len(line) <= width:
            return line
        while cell_len(line) >= width:
            line = line[1:]
        return "…" + line


def display_for(console: Console, analysts: Iterable[str] = TASKS) -> PlainDisplay | LiveDisplay:
    """The one that suits where the console writes to."""
    return LiveDisplay(console, analysts) if console.is_terminal else PlainDisplay(console)
