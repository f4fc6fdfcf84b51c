"""A request's own book-keeping, and the handle that callers hold."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.errors import RequestCancelledError, RequestTimeoutError
from langchain_swarmkv.scheduling.request import (
    PrefillProgress,
    Request,
    RequestHandle,
    RequestStatus,
    TokenLogprob,
)


def make_request(num_tokens: int = 10, **options: Any) -> Request:
    timeout_seconds = options.pop("timeout_seconds", None)
    return Request(
        list(range(num_tokens)),
        SamplingParams(**options),
        name="",
        namespace="",
        keep_prefix=True,
        pin=None,
        timeout_seconds=timeout_seconds,
        now=0.0,
    )


def make_handle(request: Request) -> tuple[RequestHandle, list[Request]]:
    """A handle, and the list of requests that were cancelled through it."""
    cancelled: list[Request] = []
    return RequestHandle(request, cancelled.append, object()), cancelled


def speak(request: Request, text: str) -> None:
    for byte in text.encode():
        request.accept(byte, bytes([byte]), None)


def test_a_request_reserves_what_it_may_still_write() -> None:
    """Prompt and max_tokens, less what is written; the prompt's rest never falls below zero."""
    request = make_request(10, max_tokens=5)
    assert (request.max_total_tokens, request.reserved_cells, request.remaining_prompt) == (
        15,
        15,
        10,
    )
    request.num_written = 12
    assert (request.reserved_cells, request.remaining_prompt) == (3, 0)


def test_prefill_stops_at_the_next_branch_point() -> None:
    """The nearest one ahead; points that were passed count no more; then the whole prompt."""
    request = make_request(10)
    request.branch_points |= {3, 7}
    stops = []
    for written in (0, 3, 5, 7, 9):
        request.num_written = written
        stops.append(request.next_stop())
    assert stops == [3, 7, 7, 10, 10]


def test_waiting_for_a_prefix_ends_with_the_leaders_prefill() -> None:
    """Pending until the leader has written so much; not any more when it has left the prefill."""
    leader, follower = make_request(), make_request()
    assert not follower.is_prefix_pending
    leader.status = RequestStatus.PREFILL
    follower.waits_for = leader, 4
    assert follower.is_prefix_pending
    leader.num_written = 4
    assert not follower.is_prefix_pending
    leader.num_written = 3
    for status in (RequestStatus.DECODE, RequestStatus.FINISHED):
        leader.status = status
        assert not follower.is_prefix_pending


def test_a_deadline_error_tells_how_far_it_came() -> None:
    """None before the deadline and without one; then the limit and the progress, as facts too."""
    assert make_request().deadline_error(1e9) is None
    request = make_request(timeout_seconds=2.0)
    request.num_written = 4
    assert request.deadline_error(1.99) is None
    error = request.deadline_error(2.0)
    assert isinstance(error, RequestTimeoutError)
    assert "within 2 s" in str(error)
    assert "4 of 10 prompt" in str(error)
    assert error.facts == {"timeout_seconds": 2.0, "num_output_tokens": 0}
    request.num_written = 25
    assert "10 of 10 prompt" in str(request.deadline_error(2.0))
    (hint,) = error.__notes__
    assert "timeout of ChatSwarmKV" in hint
    assert "timeout_seconds of SwarmEngine" in hint


def test_chunks_carry_the_tokens_of_their_text() -> None:
    """Tokens are told with the chunk that brings their text; only the last has a reason."""
    request = make_request(max_tokens=20, stop=("STOP",))
    for byte, logprob in zip("aé STOP".encode(), range(20), strict=False):
        request.accept(byte, bytes([byte]), TokenLogprob(byte, -logprob, ()))
    assert request.finish_reason == "stop"
    request.finish("stop", 1.0)
    chunks = list(request.channel.read())
    assert [(chunk.text, bytes(chunk.token_ids), chunk.finish_reason) for chunk in chunks] == [
        ("a", b"a", None),
        ("é", "é".encode(), None),
        (" ", b" ", None),
        ("", b"STOP", "stop"),
    ]
    for chunk in chunks:
        assert tuple(item.token_id for item in chunk.logprobs) == chunk.token_ids


def test_an_answer_that_ends_inside_a_character_ends_in_one_mark() -> None:
    """B7: by max_tokens; the stream and the result have the same text."""
    request = make_request(max_tokens=3)
    handle, _ = make_handle(request)
    for byte in "a👩".encode()[:3]:
        request.accept(byte, bytes([byte]), None)
    assert request.finish_reason == "length"
    request.finish("length", 1.0)
    assert "".join(chunk.text for chunk in handle) == handle.result().text == "a\ufffd"
    assert handle.result().token_ids == tuple("a👩".encode()[:3])


def test_progress_never_contradicts_itself() -> None:
    """Cached and computed tokens add up to what is written of the prompt, at any moment."""
    request = make_request(10, max_tokens=5)
    assert request.progress == PrefillProgress(10, 0, 0)
    request.num_cached_tokens = 4  # set before num_written, and read from another thread between
    assert request.progress == PrefillProgress(10, 0, 0)
    request.num_written = 7
    assert request.progress == PrefillProgress(10, 4, 3)
    request.num_written = 12
    assert request.progress == PrefillProgress(10, 4, 6)


def test_a_handle_can_be_read_many_times() -> None:
    """Iterating twice and asking for the result twice all tell the same."""
    request = make_request(max_tokens=10)
    handle, _ = make_handle(request)
    speak(request, "hello")
    request.finish("stop", 1.0)
    texts = ["".join(chunk.text for chunk in handle) for _ in range(2)]
    assert texts == ["hello", "hello"]
    assert handle.result() == handle.result()
    assert handle.result().text == "hello"

    async def read() -> str:
        assert await handle.aresult() == handle.result()
        return "".join([chunk.text async for chunk in handle])

    assert asyncio.run(read()) == "hello"


def test_waiting_for_a_result_has_a_limit_and_the_request_goes_on() -> None:
    """The waiting ends with an error that names the limit; the request is not cancelled."""
    request = make_request()
    handle, cancelled = make_handle(request)
    with pytest.raises(RequestTimeoutError) as caught:
        handle.result(timeout_seconds=0.01)
    assert caught.value.facts == {"timeout_seconds": 0.01}
    assert cancelled == []
    request.finish("stop", 1.0)
    assert handle.result(timeout_seconds=0.01).finish_reason == "stop"


def test_the_error_comes_after_the_chunks() -> None:
    """What was said before a failure can be read; then every way of asking raises the error."""
    request = make_request()
    handle, _ = make_handle(request)
    speak(request, "ab")
    request.fail(RequestCancelledError("cancelled"), 1.0)
    received = []
    with pytest.raises(RequestCancelledError):
        received.extend(chunk.text for chunk in handle)
    iterator = iter(handle)
    assert [next(iterator).text, next(iterator).text] == ["a", "b"]
    with pytest.raises(RequestCancelledError):
        handle.result()
    with pytest.raises(RequestCancelledError):
        asyncio.run(handle.aresult())


def test_dropping_the_handle_cancels() -> None:
    """With the last reference, once; a finished request is left alone."""
    request = make_request()
    handle, cancelled = make_handle(request)
    del handle
    gc.collect()
    assert cancelled == [request]

    finished = make_request()
    finished.finish("stop", 1.0)
    handle, cancelled = make_handle(finished)
    handle.cancel()
    del handle
    gc.collect()
    assert cancelled == []


def test_an_iterator_keeps_its_handle_alive() -> None:
    """`for chunk in engine.submit(...)` must not cancel what it reads; leaving the loop must."""
    request = make_request()
    handle, cancelled = make_handle(request)
    iterator = iter(handle)
    del handle
    speak(request, "ab")
    assert next(iterator).text == "a"
    gc.collect()
    assert cancelled == []
    del iterator
    gc.collect()
    assert cancelled == [request]


def test_closing_an_iterator_lets_its_handle_go() -> None:
    """C2: `close()` on the iterator, which nothing else needs, cancels the request."""
    request = make_request()
    handle, cancelled = make_handle(request)
    iterator: Any = iter(handle)
    del handle
    speak(request, "a")
    next(iterator)
    iterator.close()
    gc.collect()
    assert cancelled == [request]


async def test_an_async_iterator_keeps_its_handle_alive() -> None:
    """The same for `async for`; and dropping it cancels at once, not when the loop comes to it."""
    request = make_request()
    handle, cancelled = make_handle(request)
    iterator = aiter(handle)
    del handle
    speak(request, "ab")
    assert (await anext(iterator)).text == "a"
    gc.collect()
    assert cancelled == []
    del iterator
    gc.collect()
    assert cancelled == [request]


async def test_an_async_iterator_survives_a_cancelled_wait() -> None:
    """`wait_for(anext(...))` may time out and be tried again: no chunk is lost."""
    request = make_request()
    handle, _ = make_handle(request)
    iterator = aiter(handle)
    speak(request, "a")
    assert (await anext(iterator)).text == "a"
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(iterator), 0.001)
    speak(request, "b")
    request.finish("stop", 1.0)
    assert [chunk.text async for chunk in iterator] == ["b", ""]
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)


def test_leaving_the_block_cancels() -> None:
    """As a context manager, also when an exception leaves it."""
    request = make_request()
    handle, cancelled = make_handle(request)
    with pytest.raises(KeyError), handle:
        raise KeyError
    assert cancelled == [request]


def test_statistics_are_live() -> None:
    """The handle shows the request as it is, without waiting for its end."""
    request = make_request(10, max_tokens=5, seed=3)
    handle, _ = make_handle(request)
    assert handle.statistics.finished_at is None
    assert handle.seed == 3
    request.num_written = 6
    assert handle.progress == PrefillProgress(10, 0, 6)
    assert handle.statistics.num_computed_tokens == 6
    speak(request, "abc")
    assert handle.statistics.num_output_tokens == 3
    request.finish("stop", 4.0)
    assert handle.statistics.e2e_seconds == 4.0
