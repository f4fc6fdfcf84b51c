"""README and docs do what they say: their code runs, their commands exist, their links lead on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from langchain_swarmkv import ChatSwarmKV
from langchain_swarmkv.cli import app
from tests.support.models import smollm2_path
from tests.support.pages import PAGES, ROOT, examples, name_of

INTEGRATIONS = sorted((ROOT / "docs" / "integrations").rglob("*.md"))

CONTRACT = """\
1. The lease begins on 1 May 2027 and runs for five years.
2. Either party may end it with a notice of three months.
3. The rent is due on the third day of each month.
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [ROOT / "README.md", *INTEGRATIONS], ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_stands_below(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block after block in one namespace, as a reader would try it, beside a model and a text."""
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").symlink_to(smollm2_path())
    Path("contract.txt").write_text(CONTRACT, encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for example in examples(page):
            # Its place on the page is where a traceback points to.
            code = "\n" * example.line + example.code
            exec(compile(code, page, "exec", dont_inherit=True), namespace)
            printed = capsys.readouterr().out
            if example.output is not None:
                assert printed == example.output, f"{name_of(page)}:{example.line}"
    finally:
        for value in namespace.values():
            if isinstance(value, ChatSwarmKV):
                value.close()


def test_pages_have_code_and_outputs() -> None:
    """Or nothing above would be tested."""
    for page in INTEGRATIONS:
        assert any(example.output for example in examples(page)), name_of(page)
    assert list(examples(ROOT / "README.md"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_a_page_exist(page: Path) -> None:
    """`swarmkv ...`, in blocks and in the text, with the options that are given there."""
    for line in re.findall(r"(?:^|`|/)swarmkv ([a-z][^`\n]*)", page.read_text("utf-8"), re.M):
        words = line.split()
        command = typer.main.get_command(app)
        while isinstance(command, typer.core.TyperGroup):
            command = command.commands[words.pop(0)]
        options = {name for option in command.params for name in option.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Those within the repository, and to their headings."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            path, _, heading = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not heading or heading in headings(linked), target


def headings(page: Path) -> set[str]:
    """As links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
