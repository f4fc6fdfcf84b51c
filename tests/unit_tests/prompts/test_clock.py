"""The instant of a prompt: read once, kept with a document, written the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from langchain_swarmkv.engine.fake import FakeTokenizer
from langchain_swarmkv.errors import ConfigurationError
from langchain_swarmkv.prompts import clock
from langchain_swarmkv.prompts.clock import PromptTimes, as_instant, read_clock, run_digests
from langchain_swarmkv.prompts.encoder import PromptEncoder
from langchain_swarmkv.prompts.template import ChatTemplate
from langchain_swarmkv.prompts.time_notes import read_note, write_note

START = datetime(2026, 12, 1, 23, 59, 58, tzinfo=timezone(timedelta(hours=1)))
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "doc"}]
ASKED = [*SYSTEM, {"role": "user", "content": "Why?"}]
TICKING = (
    "{{ strftime_now('%H:%M:%S.%f %z %Z') }}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{{ strftime_now('%S.%f') }}"
)


class Ticking:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self, start: datetime = START) -> None:
        self.next = start
        self.reads = 0

    def __call__(self) -> datetime:
        self.reads += 1
        self.next += timedelta(seconds=1)
        return self.next


def at(instant: datetime) -> Callable[[Sequence[bytes]], datetime]:
    return lambda digests: instant


@pytest.mark.parametrize(
    "given",
    [START, START.replace(tzinfo=None), START.replace(tzinfo=timezone.utc), datetime(1970, 1, 1)],
)
def test_an_instant_is_written_alike_after_any_travel(given: datetime) -> None:
    """As text and back, its offset and the name of its zone included."""
    instant = read_clock(given)
    travelled = as_instant(json.loads(json.dumps(instant.isoformat())))
    for pattern in ("%Y-%m-%d %H:%M:%S.%f", "%z", "%Z", "%A %B %j"):
        assert travelled.strftime(pattern) == instant.strftime(pattern)
    assert instant.utcoffset() is not None


@pytest.mark.parametrize("given", ["yesterday", "", 5, b"2026-12-01", None])
def test_what_is_no_time_is_refused(given: object) -> None:
    """With what to give."""
    with pytest.raises(ConfigurationError, match="ISO 8601"):
        as_instant(given)


def test_a_clock_that_tells_no_time_is_refused() -> None:
    """By the type of what it told; a time that no zone has, too."""
    with pytest.raises(ConfigurationError, match="clock gave a str"):
        read_clock(lambda: "now")  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match="time zone"):
        read_clock(datetime.min)


def test_all_renderings_of_a_prompt_have_one_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a prompt with a system text is rendered twice, and a prefix some twenty times."""
    ticking = Ticking()
    monkeypatch.setattr("langchain_swarmkv.prompts.encoder.read_clock", lambda _: ticking())
    tokenizer = FakeTokenizer()
    encoder = PromptEncoder(tokenizer, chat_template=TICKING)
    messages = [SystemMessage("The document."), HumanMessage("Why?")]
    text = tokenizer.readable(encoder.encode(messages))
    assert ticking.reads == 1
    assert text == "23:59:59.000000 +0100 UTC+01:00[system]The document.[user]Why?59.000000"
    prefix = tokenizer.readable(encoder.shared_prefix(messages[:1]))
    assert ticking.reads == 2
    assert prefix == "00:00:00.000000 +0100 UTC+01:00[system]The document."
    encoder.prompt_slice(messages, 40)
    assert ticking.reads == 3


def test_a_template_at_an_instant_is_the_template() -> None:
    """What was found out of it stays; one that reads no clock is the same object."""
    plain = ChatTemplate("{{ messages[0].content }}", FakeTokenizer())
    assert plain.at(START) is plain
    template = ChatTemplate(TICKING, FakeTokenizer())
    moved = template.at(START)
    assert moved.call_format is template.call_format
    assert "59" not in template.render([{"role": "user", "content": "x"}])
    assert "23:59:58" in moved.render([{"role": "user", "content": "x"}])


def test_a_user_may_give_the_function_itself() -> None:
    """As a variable of the template; then prompts do not depend on a clock."""
    own = {"strftime_now": lambda pattern: "long ago"}
    encoder = PromptEncoder(
        FakeTokenizer(),
        chat_template="{{ strftime_now('%Y') }} {{ messages[0].content }}",
        variables=own,
    )
    assert not encoder.reads_clock
    assert FakeTokenizer().decode(encoder.encode([HumanMessage("x")])) == "long ago x"


def test_what_begins_with_a_document_has_its_instant() -> None:
    """The longest of several; another salt has its own."""
    times = PromptTimes()
    later, last = START + timedelta(days=1), START + timedelta(days=2)
    assert times.document("", SYSTEM, at(START)) == START
    assert times.document("", SYSTEM, at(later)) == START
    assert times.conversation("", ASKED, at(later)) == START
    assert times.conversation("other", ASKED, at(later)) == later
    times.set_document("", ASKED, last)
    assert times.conversation("", [*ASKED, *ASKED], at(later)) == last


def test_a_conversation_keeps_its_instant_and_the_same_question_does_not() -> None:
    """What goes on was begun then; what is asked once more is asked now."""
    times = PromptTimes()
    later = START + timedelta(days=1)
    assert times.conversation("", ASKED, at(START)) == START
    assert times.conversation("", [*ASKED, *ASKED], at(later)) == START
    assert times.conversation("", ASKED, at(later)) == later


def test_what_is_only_counted_begins_no_conversation() -> None:
    """`trim_messages` counts every part of a history; a document among them is one."""
    times = PromptTimes()
    later = START + timedelta(days=1)
    times.conversation("", SYSTEM, at(START), is_asked=False)
    assert times.conversation("", ASKED, at(later), is_asked=False) == later
    times.conversation("", ASKED, at(START), num_document_turns=1, is_asked=False)
    assert times.conversation("", [*SYSTEM, *ASKED], at(later)) == START


def test_a_clock_is_asked_without_the_lock() -> None:
    """A user's clock may use the model itself."""
    times = PromptTimes()

    def asks_again(digests: Sequence[bytes]) -> datetime:
        return times.document("", ASKED, at(START))

    assert times.document("", SYSTEM, asks_again) == START


def test_old_times_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those used longest ago."""
    monkeypatch.setattr(clock, "MAX_TIMES", 2)
    times = PromptTimes()
    later = START + timedelta(days=1)
    one, two, three = ([{"role": "system", "content": text}] for text in "123")
    for document in (one, two, one, three):
        times.document("", document, at(START))
    found = [times.document("", document, at(later)) for document in (one, three, two)]
    assert found == [START, START, later]


def test_a_note_holds_while_its_snapshot_is_there(tmp_path: Path) -> None:
    """And tells nothing of what the document says."""
    digests = run_digests("salt", ASKED)
    write_note(tmp_path, digests[0], START.isoformat(), "abc123")
    (note,) = tmp_path.iterdir()
    assert "doc" not in note.read_text()
    assert read_note(tmp_path, digests) is None
    (tmp_path / "abc123.swarmkv").touch()
    assert read_note(tmp_path, digests) == START
    assert read_note(tmp_path, run_digests("", ASKED)) is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"prompt_time": "x", "snapshot": "abc"}', '{"prompt_time": 5}',
     '{"prompt_time": "2026-12-01", "snapshot": "../abc"}', "[" * 5000],
)  # fmt: skip
def test_a_damaged_note_is_none(tmp_path: Path, text: str) -> None:
    """Whoever may write into the folder."""
    digests = run_digests("", SYSTEM)
    (tmp_path / "abc.swarmkv").touch()
    (tmp_path / f"{digests[0].hex()}.time").write_text(text)
    assert read_note(tmp_path, digests) is None


def test_a_note_that_cannot_be_written_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The document is computed again later, which is no reason to fail now."""
    write_note(tmp_path / "gone", b"x", START.isoformat(), "abc")
    assert "computes the document again" in caplog.text
