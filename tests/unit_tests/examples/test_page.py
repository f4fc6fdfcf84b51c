"""The HTML page: complete, escaped, and without anything from outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from examples.patent_analysis.graph import TASKS, title
from examples.patent_analysis.page import render_page
from tests.unit_tests.examples.samples import analysis

VOID = {"meta"}


class Outline(HTMLParser):
    """Collects tags, attributes and text, and checks that elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def answers(text: str) -> dict[str, str]:
    return dict.fromkeys(TASKS, text)


def test_the_page_holds_answers_numbers_and_timeline() -> None:
    """Each analyst's heading and text, its counts, and one drawing."""
    page = Outline(render_page(analysis(), note="A note to the reader."))
    for name in TASKS:
        assert title(name) in page.text
        assert f"Answer of {name}." in page.text
    assert page.tags.count("svg") == 1
    assert page.tags.count("article") == 6
    assert "1,050" in page.text or "1050" in page.text
    assert "A note to the reader." in page.text
    assert "Estimate" in page.text


def test_the_page_needs_nothing_from_outside() -> None:
    """No script, no style sheet, image, font or frame, and no address to load."""
    html = render_page(analysis(answers("See https://example.org/x and ![i](http://h/i.png)")))
    page = Outline(html)
    assert not {"script", "link", "img", "iframe", "object", "base", "image"} & set(page.tags)
    assert not {"src", "href", "srcset", "xlink:href"} & {name for name, _ in page.attributes}
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"@import|url\(", style)


def test_answers_are_escaped() -> None:
    """A model cannot write markup, links or event handlers into the page."""
    hostile = (
        "<script>alert(1)</script> <b onclick='x()'>bold</b> [a](javascript:alert(2))\n\n"
        "<iframe src=x></iframe>\n\n<javascript:alert(3)>"
    )
    page = Outline(render_page(analysis(answers(hostile), model="<img src=x>"), note="<b>&"))
    assert not {"script", "b", "iframe", "a", "img"} & set(page.tags) - {"b"}
    assert not {"onclick", "href", "src"} & {name for name, _ in page.attributes}
    assert "<script>alert(1)</script>" in page.text
    assert "<img src=x>" in page.text


def test_markdown_in_answers_is_rendered() -> None:
    """Lists, emphasis and tables of an answer are drawn as such."""
    text = "**strong**\n\n1. one\n2. two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    page = Outline(render_page(analysis(answers(text))))
    assert page.tags.count("strong") == 6
    assert page.tags.count("li") == 5 + 2 * 6
    assert page.tags.count("table") == 1 + 6


def test_the_page_serves_screen_readers_small_and_dark_screens() -> None:
    """Language, viewport, both colour schemes, a described drawing, scoped table headings."""
    html = render_page(analysis())
    page = Outline(html)
    assert ("lang", "en") in page.attributes
    assert ("role", "img") in page.attributes
    assert ("scope", "row") in page.attributes
    assert ("content", "width=device-width, initial-scale=1") in page.attributes
    assert "prefers-color-scheme: dark" in html
