"""README and docs: their pages, and the code on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Example:
    """A block of code, and what stands behind it as its output; None: anything."""

    line: int
    code: str
    output: str | None


def examples(page: Path) -> Iterator[Example]:
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "fence" and token.info == "python":
            assert token.map is not None
            has_output = after is not None and after.type == "fence" and after.info == "text"
            yield Example(token.map[0] + 1, token.content, after.content if has_output else None)
