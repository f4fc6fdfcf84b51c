"""The command line: what it accepts and refuses, what it writes, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from langchain_swarmkv import ChatSwarmKV, DecodeFatalError, FakeEngine, SwarmEngine, cli
from langchain_swarmkv.cli import console, demo_command
from langchain_swarmkv.cli.demo_model import DemoModel

ROOT = Path(cli.__file__).parents[2]
ANALYSTS = [
    "novelty",
    "claim_mapping",
    "prior_art_queries",
    "freedom_to_operate",
    "ethics",
    "european_summary",
]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A document that leaves room for the tasks in a context of 4096 byte tokens."""
    path = tmp_path / "document.txt"
    path.write_text("A strip listens to the floor. " * 20)
    return path


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command gets engines without weights."""
    engines: list[SwarmEngine] = []

    def chat_model(
        *,
        model_path: Path,
        n_ctx: int,
        n_threads: int | None,
        snapshot_dir: Path | None,
        **sampling: Any,
    ) -> Any:
        fake = FakeEngine(num_cells=n_ctx, reply="An answer with [markup].")
        engines.append(SwarmEngine(fake, snapshot_dir=snapshot_dir))
        return ChatSwarmKV(engine=engines[-1], **sampling)

    monkeypatch.setattr(demo_command, "ChatSwarmKV", chat_model)
    own = DemoModel(Path("own.gguf"), "From a copy.")
    monkeypatch.setattr(demo_command, "demo_model", lambda: own)
    yield
    for engine in engines:
        engine.close()


def swarmkv(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def swarmkv_process(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The command as a process of its own, with its output in pipes."""
    command = [sys.executable, "-c", "from langchain_swarmkv.cli import main; main()"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=options.pop("cwd", ROOT),
        **options,
    )


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "swarmkv-engine"}


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that holds all words."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_the_version_is_the_distribution_s() -> None:
    """`--version` needs no command."""
    result = swarmkv("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("swarmkv 0.")


def test_without_a_command_the_help_is_shown() -> None:
    """The help names the command there is."""
    assert "demo" in swarmkv().output


@pytest.mark.usefixtures("fake_model")
def test_the_demo_prints_report_and_numbers(document: Path) -> None:
    """Report and summary go to stdout, progress to stderr, both without escape sequences."""
    asked = ("--document", document, "--n-ctx", 4096, "--max-tokens", 64)
    result = swarmkv("demo", "--model", "any.gguf", *asked)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "## Freedom to operate\n\nAn answer with [markup]." in result.stdout
    assert "without sharing" in result.stdout
    for name in ANALYSTS:
        assert name in result.stdout
        assert f"{name}: done" in result.stderr
    assert "document: " in result.stderr


@pytest.mark.usefixtures("fake_model")
def test_the_default_model_comes_with_a_warning_about_its_prose(document: Path) -> None:
    """Only without --model: who gave a model knows what it is."""
    demo = partial(swarmkv, "demo", "--document", document, "--n-ctx", 4096)
    own = demo()
    assert own.exit_code == 0, own.output
    assert "not the prose" in " ".join(own.stdout.split())
    assert "From a copy." in " ".join(own.stdout.split())
    assert "## Claimed system\n\nThe system comprises " in own.stdout
    assert "not the prose" not in " ".join(demo("--model", "any.gguf").stdout.split())


@pytest.mark.usefixtures("fake_model")
def test_json_and_html_are_written(document: Path, tmp_path: Path) -> None:
    """The document is computed once; every analyst reuses it; the page holds the report."""
    json_out, html_out = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ("--document", document, "--n-ctx", 4096, "--json", json_out, "--html", html_out)
    result = swarmkv("demo", "--model", "any.gguf", *arguments)
    assert result.exit_code == 0, result.output
    run = json.loads(json_out.read_text(encoding="utf-8"))
    assert [analyst["name"] for analyst in run["analysts"]] == ANALYSTS
    shared = run["document_tokens"]
    assert run["document"]["computed_tokens"] == shared
    for analyst in run["analysts"]:
        assert analyst["cached_tokens"] >= shared - 1
        assert analyst["text"] == "An answer with [markup]."
        assert analyst["ttft_seconds"] >= analyst["queue_seconds"] >= 0
    assert run["engine"]["num_prefill_tokens"] == run["savings"]["computed_tokens"]
    assert run["wall_seconds"] > 0
    assert "An answer with [markup]." in html_out.read_text(encoding="utf-8")


@pytest.mark.usefixtures("fake_model")
def test_what_was_guessed_in_a_document_stands_in_all_outputs(tmp_path: Path) -> None:
    """On stderr at once, in the JSON and on the page; `--encoding` decides."""
    document, json_out = tmp_path / "document.txt", tmp_path / "out.json"
    html_out = tmp_path / "out.html"
    document.write_bytes("Die Kündigungsfrist beträgt drei Monate. ".encode("latin-1") * 20)
    arguments = ("--document", document, "--n-ctx", 4096, "--json", json_out, "--html", html_out)
    done = swarmkv("demo", *arguments)
    assert done.exit_code == 0, done.output
    source = json.loads(json_out.read_text(encoding="utf-8"))["document_source"]
    assert source["source"] == str(document)
    assert source["encoding"] == "cp1252"
    (notice,) = source["notices"]
    assert f"notice: {notice}\n" in done.stderr
    assert notice in html_out.read_text(encoding="utf-8")
    done = swarmkv("demo", *arguments, "--encoding", "iso8859-15")
    assert done.exit_code == 0, done.output
    source = json.loads(json_out.read_text(encoding="utf-8"))["document_source"]
    assert (source["encoding"], source["notices"]) == ("iso8859-15", [])
    assert_refused(swarmkv("demo", *arguments, "--encoding", "klingon"), "klingon")


def test_the_next_run_of_a_demo_need_not_prefill(
    tiny_llama: Path, document: Path, tmp_path: Path
) -> None:
    """With a folder for snapshots the document is read from there."""
    computed = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        options = "--model", tiny_llama, "--n-ctx", 4096, "--max-tokens", 4, "--json", out
        folder = tmp_path / "kv"
        done = swarmkv("demo", "--document", document, *options, "--snapshot-dir", folder)
        assert done.exit_code == 0, done.stderr
        computed.append(json.loads(out.read_text(encoding="utf-8"))["document"]["computed_tokens"])
    assert computed[0] > 500
    assert computed[1] == 0


def test_the_engine_is_closed_after_the_run(tiny_llama: Path, document: Path) -> None:
    """No engine thread is left, whether the run came to its end or failed on the way."""
    before = engine_threads()
    demo = partial(swarmkv, "demo", "--document", document, "--model", tiny_llama)
    assert demo("--n-ctx", 4096, "--max-tokens", 4).exit_code == 0
    assert demo("--n-ctx", 4096, "--max-tokens", 4000).exit_code == 2
    assert engine_threads() <= before


@pytest.mark.usefixtures("fake_model")
def test_a_run_that_fails_on_the_way_has_another_exit_code(
    monkeypatch: pytest.MonkeyPatch, document: Path, tmp_path: Path
) -> None:
    """Exit code 1 and the engine's reason, without LangGraph's notes on where it was."""

    def fail(engine: FakeEngine, batch: Any) -> None:
        raise DecodeFatalError("llama_decode returned -3.", return_code=-3)

    monkeypatch.setattr(FakeEngine, "decode", fail)
    html_out = tmp_path / "out.html"
    result = swarmkv("demo", "--document", document, "--n-ctx", 4096, "--html", html_out)
    assert result.exit_code == 1
    assert "llama_decode returned -3" in result.stderr.splitlines()[-1]
    assert "During task" not in result.stderr
    assert not html_out.exists()


@pytest.mark.usefixtures("fake_model")
def test_a_document_too_long_is_refused_with_what_would_fit(tmp_path: Path) -> None:
    """The budget's numbers, before anything is computed."""
    document = tmp_path / "long.txt"
    document.write_text("word " * 2000)
    result = swarmkv("demo", "--document", document, "--n-ctx", 4096, "--json", tmp_path / "o.json")
    assert_refused(result, "4096", "a document of at most")
    assert not (tmp_path / "o.json").exists()


@pytest.mark.usefixtures("fake_model")
def test_what_would_fit_is_spelled_as_options_that_there_are(tmp_path: Path) -> None:
    """And the option does what the message says."""
    document = tmp_path / "long.txt"
    document.write_text("word " * 700)
    asked = ("demo", "--document", document, "--n-ctx", 4096)
    assert_refused(swarmkv(*asked), "at once", "--n-ctx ", "--max-tokens ", "--allow-waves")
    assert swarmkv(*asked, "--allow-waves").exit_code == 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.md", b"\n \n", "empty"),
        ("picture.txt", b"\x89PNG\x00\x01" + bytes(range(256)), "it is a picture"),
        ("broken.pdf", b"%PDF-1.7\nbroken", "no readable PDF"),
        ("letter.docx", b"text", ".txt, .md, .pdf"),
        ("missing.txt", None, "No such file"),
    ],
)
def test_an_unreadable_document_is_refused(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    """One line that names the file and the reason."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert_refused(swarmkv("demo", "--document", path), name, words)


def test_a_missing_model_is_refused(document: Path, tmp_path: Path) -> None:
    """Nothing is run with another model instead."""
    result = swarmkv("demo", "--document", document, "--model", tmp_path / "missing.gguf")
    assert_refused(result, "missing.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all, just text", b"GGUF\x03"])
def test_a_file_that_is_no_gguf_is_refused(document: Path, tmp_path: Path, content: bytes) -> None:
    """Empty, cut short or something else."""
    model = tmp_path / "model.gguf"
    model.write_bytes(content)
    assert_refused(swarmkv("demo", "--document", document, "--model", model), "model.gguf")


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_path_that_cannot_be_written_is_refused_before_the_run(
    document: Path, tmp_path: Path, option: str
) -> None:
    """A folder, or a file in a folder that does not exist."""
    demo = partial(swarmkv, "demo", "--document", document, "--model", "missing.gguf", option)
    assert_refused(demo(tmp_path), "it is a folder")
    assert_refused(demo(tmp_path / "missing" / "out"), "its folder does not exist")


def test_a_path_that_cannot_even_be_looked_at_is_refused(document: Path, tmp_path: Path) -> None:
    """The operating system's own reason; `Path.is_dir` raises it."""
    demo = partial(swarmkv, "demo", "--document", document, "--model")
    assert_refused(demo("missing.gguf", "--json", tmp_path / ("x" * 300)), "name too long")
    assert_refused(demo("~nobody-of-this-name/model.gguf"), "~nobody-of-this-name")


@pytest.mark.usefixtures("fake_model")
def test_nothing_is_written_over_what_another_option_names(document: Path, tmp_path: Path) -> None:
    """Neither the document, nor the model, nor the other output."""
    text, model, out = document.read_text(), tmp_path / "any.gguf", tmp_path / "out"
    demo = partial(swarmkv, "demo", "--document", document, "--n-ctx", 4096, "--model", model)
    aside = tmp_path / "folder" / ".." / "document.txt"
    (tmp_path / "folder").mkdir()
    assert_refused(demo("--json", aside), "document.txt", "same file")
    assert_refused(demo("--html", model), "any.gguf", "same file")
    assert_refused(demo("--json", out, "--html", out), "out", "same file")
    assert document.read_text() == text
    assert not out.exists()


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC])
def test_the_files_are_written_though_the_report_cannot_be_printed(
    monkeypatch: pytest.MonkeyPatch, document: Path, tmp_path: Path, number: int
) -> None:
    """`swarmkv demo --json out.json | head` still has its measurements; and no traceback."""

    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(demo_command._example("summary"), "print_analysis", fail)
    out = tmp_path / "out.json"
    result = swarmkv("demo", "--document", document, "--n-ctx", 4096, "--json", out)
    assert result.exit_code == 1
    assert json.loads(out.read_text(encoding="utf-8"))["analysts"]
    assert isinstance(result.exception, SystemExit)
    assert (os.strerror(number) in result.stderr) == (number != errno.EPIPE)


@pytest.mark.parametrize("option", ["--n-ctx", "--threads"])
def test_a_number_beyond_llama_cpp_s_is_refused(document: Path, option: str) -> None:
    """In one line, as all that is wrong with what was given."""
    demo = partial(swarmkv, "demo", "--document", document, "--model", "missing.gguf")
    assert_refused(demo(option, 1 << 40), option[2:].replace("-", "_").removeprefix("max_"))


def test_a_wrong_number_is_refused(document: Path) -> None:
    """Typer's own usage error has the same exit code."""
    assert swarmkv("demo", "--document", document, "--max-tokens", 0).exit_code == 2


def test_without_the_small_model_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, document: Path
) -> None:
    """The line can be pasted into a shell."""

    def not_installed(name: str) -> None:
        raise console.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(console.metadata, "files", not_installed)
    result = swarmkv("demo", "--document", document)
    assert_refused(result, "pip install 'langchain-swarmkv[demo]'", "--model")


def test_a_refusal_is_one_line_in_a_process_too(tmp_path: Path) -> None:
    """No traceback, no log line of a library, exit code 2."""
    document = tmp_path / "broken.pdf"
    document.write_bytes(
        b"%PDF-1.4\n1 0 obj << /Type /Catalog >> endobj\ntrailer << /Root 1 0 R >>"
    )
    process = swarmkv_process("demo", "--document", document)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stdout == ""
    assert stderr.startswith("error: cannot read the document")
    assert stderr.count("\n") == 1


def test_the_example_is_found_inside_an_installed_wheel(tmp_path: Path, document: Path) -> None:
    """The wheel carries the example inside the package; its copy is the one that runs."""
    package = tmp_path / "site" / "langchain_swarmkv"
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "langchain_swarmkv", package, ignore=no_caches)
    example = package / "examples" / "patent_analysis"
    shutil.copytree(ROOT / "examples" / "patent_analysis", example, ignore=no_caches)
    (example / "__init__.py").write_text(
        "from langchain_swarmkv import SwarmKVError\n"
        "raise SwarmKVError('read by the copy in the wheel')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    process = swarmkv_process("demo", cwd=tmp_path, env=environment)
    _, stderr = process.communicate(timeout=60)
    assert stderr == "error: read by the copy in the wheel\n"
    assert process.returncode == 1


def test_an_interrupt_ends_the_run_with_130(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    """Ctrl-C while the analysts write: one line, no traceback, soon."""
    document = tmp_path / "document.txt"
    document.write_text("words " * 50)
    model = tiny_gguf("llama", n_ctx_train=1 << 20)
    arguments = ("--document", document, "--model", model, "--n-ctx", 300_000)
    process = swarmkv_process("demo", *arguments, "--max-tokens", 40_000)
    assert process.stderr is not None
    for line in process.stderr:
        if "first words" in line:
            break
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert stderr.splitlines()[-1] == "error: interrupted."
    assert "Traceback" not in stderr
    assert process.returncode == 130
