"""The run as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from .graph import title
from .results import Analysis
from .summary import saving_lines, seconds
from .timeline import LABEL_WIDTH, layout

# Answers are untrusted text: raw HTML is escaped, and nothing may point out of the page.
_MARKDOWN = (
    MarkdownIt("commonmark", {"html": False})
    .enable("table")
    .disable(["image", "link", "autolink", "reference", "html_block", "html_inline"])
)


def render_page(analysis: Analysis, note: str = "") -> str:
    """Render the report, its numbers and a timeline; everything is inside the page.

    Args:
        analysis: the run.
        note: one sentence for the reader, shown under the title.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"markdown": _markdown, "seconds": seconds, "title": title}
    return environment.get_template("page.html.j2").render(
        analysis=analysis,
        note=note,
        savings=saving_lines(analysis),
        timeline=layout(analysis),
        label_width=LABEL_WIDTH,
    )


def _markdown(text: str) -> Markup:
    return Markup(_MARKDOWN.render(text))
