"""Tokens to text: whole characters, no part of a stop string, wherever the tokens are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_swarmkv.scheduling.text_stream import TextStream


def feed(tokens: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """What each token and the end gave, and whether a stop string ended it."""
    stream = TextStream(stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream.stopped


def one_by_one(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


@pytest.mark.parametrize("text", ["歪", "👩‍🚀", "é", "a歪b👩‍🚀é"])
def test_characters_arrive_whole(text: str) -> None:
    """B7: bytes one at a time give the same characters, each in one piece."""
    pieces, _ = feed(one_by_one(text))
    assert [piece for piece in pieces if piece] == list(text)


def test_interleaved_streams_do_not_mix() -> None:
    """B7: three branches, a byte each in turn, keep their own unfinished characters."""
    texts = ["歪歪", "👩‍🚀", "éa歪"]
    streams = [TextStream() for _ in texts]
    received = ["", "", ""]
    for position in range(11):
        for index, text in enumerate(texts):
            received[index] += streams[index].push(text.encode()[position : position + 1])
    assert [r + s.finish() for r, s in zip(received, streams, strict=True)] == texts


def test_an_unfinished_character_at_the_end_is_one_replacement_mark() -> None:
    """B7: an answer cut inside a character ends in one U+FFFD, not in one for each byte."""
    pieces, stopped = feed(one_by_one("ok👩")[:-1])
    assert "".join(pieces) == "ok\ufffd"
    assert not stopped


@pytest.mark.parametrize(
    ("tokens", "expected", "stops"),
    [
        (["ABC", "DEF", "G", "HI", "J"], "ABC", True),
        (["ABC", "DEF"], "ABCDEF", False),
        (["x\n", "\nQ", "uiet"], "x\n\nQuiet", False),
        (["x\n", "\nQ", ":"], "x", True),
        (["okDEFGHIJzz"], "ok", True),
        (["DEFGHIJ"], "", True),
        (["DDEFGHIJ"], "D", True),
        (["DEF", "DEFGHIJ"], "DEF", True),
    ],
)
def test_stop_strings_span_tokens(tokens: list[str], expected: str, stops: bool) -> None:
    """B8: nothing of a stop string gets out, and what was no stop string after all does."""
    pieces, stopped = feed([token.encode() for token in tokens], ("DEFGHIJ", "\n\nQ:"))
    assert ("".join(pieces), stopped) == (expected, stops)


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    """B8: "ABC" goes out with its own token, "DEF" waits, and comes with the end."""
    pieces, _ = feed([b"ABC", b"DEF"], ("DEFGHIJ",))
    assert pieces == ["ABC", "", "DEF"]


def test_the_first_stop_string_to_be_complete_counts() -> None:
    """However the text is cut; of two that end together it is the one that begins first."""
    assert feed(one_by_one("xabcd"), ("abcd", "bc")) == (["x", "", "", "a", ""], True)
    assert feed([b"xabcd"], ("abcd", "bc")) == (["xa", ""], True)
    assert feed([b"xabcd"], ("cd", "abcd")) == (["x", ""], True)


@settings(deadline=None)
@given(st.binary(max_size=40), st.data())
def test_any_bytes_give_the_text_of_the_whole(data: bytes, draw: st.DataObject) -> None:
    """However bytes are cut into tokens, and however broken: the text is that of one decoding."""
    cuts = draw.draw(st.lists(st.integers(0, len(data)), max_size=8).map(sorted))
    tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    pieces, stopped = feed(tokens)
    assert "".join(pieces) == data.decode(errors="replace")
    assert not stopped


def test_a_mark_stands_where_its_token_came() -> None:
    """After an unfinished character before it, and without disturbing the next."""
    stream = TextStream()
    text = (
        stream.push(b"a\xc3") + stream.push_control("\ud800", "\ud800") + stream.push("é".encode())
    )
    assert text + stream.finish() == "a\ufffd\ud800é"


def test_a_mark_waits_behind_what_is_held_back() -> None:
    """A stop string may break off at a mark, or go through one that it names."""
    stream = TextStream(("DEF",))
    assert [stream.push(b"xDE"), stream.push_control("\ud800", "\ud800"), stream.finish()] == [
        "x",
        "DE\ud800",
        "",
    ]
    stream = TextStream(("E\ud800F",))
    assert stream.push(b"xE") + stream.push_control("\ud800", "\ud800") + stream.push(b"F") == "x"
    assert stream.stopped


START = "<|start|>"


@pytest.mark.parametrize("shown", ["", "\ud800"])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (START, "ab"),
        ("b" + START, "a"),
        (START + "c", "ab"),
        ("b" + START + "c", "a"),
        (START + START, None),
        ("<", None),  # no part of a control token
        ("b<", None),
        ("start", None),
        ("|>c", None),
        ("bc", None),  # it stands between
    ],
)
def test_stop_strings_see_control_tokens_whole(shown: str, stop: str, expected: str | None) -> None:
    """I4: at the token, with text before and after it; the stop is not told, nor is the mark."""
    stream = TextStream((stop,))
    text = stream.push(b"ab") + stream.push_control(START, shown)
    if not stream.stopped:
        text += stream.push(b"cd")
    assert stream.stopped == (expected is not None)
    text += stream.finish()
    assert text == (f"ab{shown}cd" if expected is None else expected)


def test_a_control_token_that_is_spelled_out_stops_too() -> None:
    """I4: a stop string is a text, whichever tokens write it."""
    stream = TextStream((START,))
    assert stream.push(b"a<|st") + stream.push(b"art|>b") == "a"
    assert stream.stopped


CONTROL = "<a>"


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "<", ">", None]), max_size=14),
    st.lists(st.text(alphabet="ab<>", min_size=1, max_size=6), min_size=1, max_size=3),
    st.sampled_from(["", "\ud800"]),
)
def test_stops_with_control_tokens_equal_the_naive_model(
    tokens: list[str | None], stops: list[str], shown: str
) -> None:
    """None: the control token. A stop covers a whole number of tokens and is the first to end."""
    expected = "".join(token or shown for token in tokens)
    endings = (
        (begin, end)
        for end in range(1, len(tokens) + 1)
        for begin in range(end)
        if "".join(token or CONTROL for token in tokens[begin:end]) in stops
    )
    found = next(endings, None)
    if found is not None:
        expected = "".join(token or shown for token in tokens[: found[0]])
    stream = TextStream(stops)
    text = ""
    for token in tokens:
        text += (
            stream.push_control(CONTROL, shown) if token is None else stream.push(token.encode())
        )
        if stream.stopped:
            break
    assert text + stream.finish() == expected
    assert stream.stopped == (found is not None)


# Few letters, so that stop strings begin, break off and complete often.
LETTERS = st.text(alphabet="abé", max_size=16)


@settings(deadline=None)
@given(
    LETTERS, st.lists(LETTERS.filter(bool).map(lambda s: s[:5]), min_size=1, max_size=3), st.data()
)
def test_stops_equal_the_naive_model(text: str, stops: list[str], draw: st.DataObject) -> None:
    """Together: the text before the first stop. Held back: only what a stop may begin with."""
    data = text.encode()
    cuts = draw.draw(st.lists(st.integers(0, len(data)), max_size=8).map(sorted))
    stream = TextStream(stops)
    emitted = ""
    for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
        emitted += stream.push(data[a:b])
        if stream.stopped:
            break
        held = data[:b].decode(errors="ignore")[len(emitted) :]
        assert any(stop.startswith(held) and stop != held for stop in stops)
    emitted += stream.finish()
    complete = [
        (end, min(end - len(stop) for stop in stops if text[:end].endswith(stop)))
        for end in range(1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops)
    ]
    assert emitted == (text[: complete[0][1]] if complete else text)
    assert stream.stopped == bool(complete)
