"""One request: what the caller holds (`RequestHandle`) and what the engine thread works on.

A request's tokens fall into half-open ranges, in this order:

    [0, num_cached)              shared with the sequence it was forked from
    [num_cached, num_prompt)     computed by this request's own prefill
    [num_prompt, num_written)    its output, fed back one token a step

`num_written == Engine.num_tokens(seq_id)` between steps. The last output token is sampled but never
written, so a request with max_tokens m writes at most m - 1 output cells; it reserves m.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Literal

import numpy as np
from typing_extensions import Self

from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.engine.contract import Sampler
from langchain_swarmkv.errors import RequestTimeoutError
from langchain_swarmkv.scheduling.channel import Channel
from langchain_swarmkv.scheduling.signals import inside_callback
from langchain_swarmkv.scheduling.text_stream import TextStream
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.store import StoredPrefix
from langchain_swarmkv.snapshots.tiers import Fetch, Look, Writing
from langchain_swarmkv.statistics import PrefixSource, RequestStatistics

__all__ = [
    "FinishReason",
    "PrefillProgress",
    "Request",
    "RequestHandle",
    "RequestResult",
    "RequestStatus",
    "TokenChunk",
    "TokenLogprob",
]

FinishReason = Literal["stop", "length"]


class RequestStatus(str, Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True)
class PrefillProgress:
    """How much of a prompt is in the cache: `num_cached_tokens + num_computed_tokens` of it."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log probabilities before any sampling setting is applied."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log probabilities, best first."""


@dataclass(frozen=True)
class TokenChunk:
    """A piece of an answer, ending on a character boundary.

    Text is held back while it may be the beginning of a stop string; the tokens are then told with
    the chunk that brings their text. Only the last chunk has a `finish_reason`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class RequestResult:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    """Output tokens, without the one that ended the answer."""
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    seed: int
    statistics: RequestStatistics


_request_ids = itertools.count(1)


class Request:
    """The engine thread's side of a request. Only that thread changes it after submission."""

    def __init__(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        namespace: str,
        now: float,
        name: str = "",
        keep_prefix: bool = True,
        pin: str | None = None,
        persist: bool = False,
        wants_snapshot: bool = False,
        timeout_seconds: float | None = None,
        marks: Mapping[int, str] | None = None,
        stop_controls: Mapping[int, str] | None = None,
        compiled_guide: object = None,
        expected_cached_tokens: int = 0,
        twin: Request | None = None,
    ) -> None:
        self.request_id = next(_request_ids)
        # Kept, so that no guide is compiled on the engine's thread.
        self._compiled_guide = compiled_guide
        self.twin = twin
        """An earlier request for another answer to the same prompt, which it lets compute it."""
        self.tokens = tokens
        self.token_ids = np.asarray(tokens, dtype=np.int32)
        """The same for look-ups, which compare arrays."""
        self.params = params
        self.name = name or f"request-{self.request_id}"
        self.namespace = namespace
        self.keep_prefix = keep_prefix
        self.pin = pin
        self.timeout_seconds = timeout_seconds
        self.expected_cached_tokens = expected_cached_tokens
        self.num_prompt_tokens = len(tokens)

        self.status = RequestStatus.WAITING
        self.cancelled = False
        self.seq_id = -1
        self.num_cached_tokens = 0
        self.num_written = 0
        self.output_tokens: list[int] = []
        self.sampler: Sampler | None = None
        self.seed = params.seed or 0
        self.prefix_source = PrefixSource.NONE
        self.persist = persist
        self.wants_snapshot = wants_snapshot
        self.snapshot: KVSnapshot | None = None
        """What it wrote, taken when it ended."""
        self.reason: FinishReason = "stop"
        """Why its answer is complete, once it is."""
        self.writing: Writing | None = None
        """Its way to the disk, which it waits for at the end."""
        self.restored_from: PrefixSource | None = None
        """Where its prefix came back from, perhaps some steps before it is admitted."""
        self.fetch: Fetch | None = None
        """A snapshot that is being read for it, or has been."""
        self.look: Look | None = None
        """What the disk holds of its prompt, which another thread finds out."""
        self.look_tokens = -1
        """How much of the prompt was in the pool when the disk was asked; -1: it was not asked."""
        self.has_fetched = False
        """Whether one was read: it is tried once."""
        self.waits_for: tuple[Request, int] | None = None
        """(leader, num_tokens): a request whose prefill is to be forked at that length."""
        self.branch_points: set[int] = set()
        """Lengths of this prompt at which others wait to fork; prefill chunks end there."""

        self.submitted_at = now
        self.admitted_at: float | None = None
        self.prefilled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

        self.channel: Channel[TokenChunk] = Channel()
        self.progress_callbacks: list[Callable[[PrefillProgress], None]] = []
        self._text = TextStream(params.stop)
        self._marks = dict(marks or {})
        """What control tokens add to the text."""
        self._stop_controls = dict(stop_controls or {})
        """The texts of control tokens that stand in stop strings."""
        self._pending_tokens: list[int] = []
        self._pending_logprobs: list[TokenLogprob] = []

    @property
    def needs_logits(self) -> bool:
        """Whether it asks for the logits after its prompt, so that not all may be cached."""
        return self.params.max_tokens > 0 or self.persist or self.wants_snapshot

    @property
    def max_total_tokens(self) -> int:
        """Cells that the whole request may come to occupy, shared ones included."""
        return self.num_prompt_tokens + self.params.max_tokens

    @property
    def reserved_cells(self) -> int:
        """Cells promised to this running request and not yet written."""
        return self.max_total_tokens - self.num_written

    @property
    def written_tokens(self) -> list[int]:
        """What its sequence holds."""
        return (self.tokens + self.output_tokens)[: self.num_written]

    @property
    def remaining_prompt(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return max(0, self.num_prompt_tokens - self.num_written)

    @property
    def is_prefix_pending(self) -> bool:
        """Whether the prefix that this request waits for is still being computed, or read."""
        if self.reading is not None and not self.reading.done():
            return True
        if self.waits_for is None:
            return False
        leader, num_tokens = self.waits_for
        return leader.status is RequestStatus.PREFILL and leader.num_written < num_tokens

    @property
    def reading(self) -> Future[Any] | None:
        """What it waits for from the disk."""
        if self.fetch is not None:
            return self.fetch
        return self.look if self.look is not None and not self.look.done() else None

    def take_fetched(self) -> StoredPrefix | None:
        """The snapshot that was read for it, once; None: there is none, or it could not be used."""
        fetch, self.fetch = self.fetch, None
        if fetch is None:
            return None
        self.has_fetched = True
        return None if fetch.cancelled() else fetch.result()

    def next_stop(self) -> int:
        """Where the next prefill chunk must end at the latest."""
        ahead = [point for point in self.branch_points if point > self.num_written]
        return min(ahead, default=self.num_prompt_tokens)

    def deadline_error(self, now: float) -> RequestTimeoutError | None:
        """The error of a request that has taken longer than it may."""
        if self.timeout_seconds is None or now - self.submitted_at < self.timeout_seconds:
            return None
        return RequestTimeoutError(
            f"{self.name!r} did not finish within {self.timeout_seconds:g} s: "
            f"status {self.status.value}, {self.num_prompt_tokens - self.remaining_prompt} of "
            f"{self.num_prompt_tokens} prompt tokens in the cache, {len(self.output_tokens)} "
            "tokens generated.",
            timeout_seconds=self.timeout_seconds,
            num_output_tokens=len(self.output_tokens),
        )

    def accept(self, token_id: int, data: bytes, logprob: TokenLogprob | None) -> None:
        """Add an output token and stream the text that became certain."""
        self.output_tokens.append(token_id)
        self._pending_tokens.append(token_id)
        if logprob is not None:
            self._pending_logprobs.append(logprob)
        shown = self._marks.get(token_id)
        written = self._stop_controls.get(token_id, shown)
        if written is None:
            text = self._text.push(data)
        else:
            text = self._text.push_control(written, shown or "")
        if text:
            self._emit(text, None)

    def accept_end(self, token_id: int) -> None:
        """Let stop strings see the token that ends the answer; it is no part of it."""
        written = self._stop_controls.get(token_id)
        if written is not None and (text := self._text.push_control(written, "")):
            self._emit(text, None)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is complete, if a stop string or the token limit ended it."""
        if self._text.stopped:
            return "stop"
        return "length" if len(self.output_tokens) >= self.params.max_tokens else None

    def finish(self, reason: FinishReason, now: float) -> None:
        """Send the last chunk and end the stream."""
        self.status = RequestStatus.FINISHED
        self.finished_at = now
        self._emit(self._text.finish(), reason)
        self.channel.end()

    def fail(self, error: BaseException, now: float) -> None:
        """End the stream with an error."""
        self.status = RequestStatus.FINISHED
        self.finished_at = now
        self.channel.end(error)

    def _emit(self, text: str, reason: FinishReason | None) -> None:
        chunk = TokenChunk(text, tuple(self._pending_tokens), tuple(self._pending_logprobs), reason)
        self._pending_tokens, self._pending_logprobs = [], []
        self.channel.put(chunk)

    @property
    def progress(self) -> PrefillProgress:
        """See `PrefillProgress`."""
        written = min(self.num_written, self.num_prompt_tokens)
        cached = min(self.num_cached_tokens, written)
        return PrefillProgress(self.num_prompt_tokens, cached, written - cached)

    def report_progress(self) -> None:
        """Tell the listeners about a prefill chunk."""
        for callback in self.progress_callbacks:
            with inside_callback():
                callback(self.progress)

    def statistics(self) -> RequestStatistics:
        """The numbers as they are now."""
        progress = self.progress
        return RequestStatistics(
            name=self.name,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=progress.num_cached_tokens,
            num_computed_tokens=progress.num_computed_tokens,
            num_output_tokens=len(self.output_tokens),
            prefix_source=self.prefix_source,
            submitted_at=self.submitted_at,
            admitted_at=self.admitted_at,
            prefilled_at=self.prefilled_at,
            first_token_at=self.first_token_at,
            finished_at=self.finished_at,
        )


class _AsyncChunks(AsyncIterator[TokenChunk]):
    """The chunks of a handle, which it keeps alive.

    No async generator: a dropped one lives on until its event loop, if that still runs, ends it.
    """

    def __init__(self, handle: RequestHandle, channel: Channel[TokenChunk]) -> None:
        self._handle = handle
        self._channel = channel
        self._place = 0

    async def __anext__(self) -> TokenChunk:
        chunk = await self._channel.item(self._place)
        self._place += 1
        return chunk


class RequestHandle:
    """A submitted request. Iterate it, from sync or async code, or ask for the `result`.

    Each iteration starts from the first chunk. Dropping the last reference to it and its iterators
    cancels the request, as does leaving it as a context manager; a finished request is not affected
    by either.
    """

    def __init__(self, request: Request, cancel: Callable[[Request], None], owner: object) -> None:
        self._request = request
        self._cancel = cancel
        # Keeps the engine's public object, and so the engine, alive while an answer is awaited.
        self._owner = owner

    def __iter__(self) -> Iterator[TokenChunk]:
        """Chunks as they come; the request's error, if any, is raised after the last."""
        # A generator of this method, so that the handle lives as long as the iterator.
        yield from self._request.channel.read()

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        """Chunks as they come, on any event loop."""
        return _AsyncChunks(self, self._request.channel)

    def result(self, timeout_seconds: float | None = None) -> RequestResult:
        """Wait for the whole answer.

        Args:
            timeout_seconds: how long to wait. The request itself goes on; cancel it if it must not.

        Raises:
            RequestTimeoutError: it did not end in time, or its own deadline passed.
            SwarmKVError: whatever made the request fail.
        """
        started = time.monotonic()
        if not self._request.channel.wait(timeout_seconds):
            waited = time.monotonic() - started
            raise RequestTimeoutError(
                f"{self._request.name!r} was not finished after {waited:.1f} s of waiting.",
                timeout_seconds=timeout_seconds,
            )
        return self._result()

    async def aresult(self) -> RequestResult:
        """Like `result`. Cancelling the waiting task does not cancel the request."""
        await self._request.channel.wait_async()
        return self._result()

    def _result(self) -> RequestResult:
        chunks = list(self._request.channel.read())
        reason = chunks[-1].finish_reason
        assert reason is not None  # the channel ends without an error only after a last chunk
        return RequestResult(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            finish_reason=reason,
            logprobs=tuple(item for chunk in chunks for item in chunk.logprobs),
            seed=self._request.seed,
            statistics=self.statistics,
        )

    def cancel(self) -> None:
        """Stop the request within one step; its result then raises RequestCancelledError."""
        if not self._request.channel.ended:
            self._cancel(self._request)

    def on_progress(self, callback: Callable[[PrefillProgress], None]) -> None:
        """Call `callback` on the engine thread after each prefill chunk. It must be quick.

        It may submit, cancel and close; where it would wait for a request, of whichever engine, it
        gets InvalidRequestError.
        """
        self._request.progress_callbacks.append(callback)

    @property
    def progress(self) -> PrefillProgress:
        """How much of the prompt is in the cache now."""
        return self._request.progress

    @property
    def statistics(self) -> RequestStatistics:
        """The numbers as they are now; final once the request has ended."""
        return self._request.statistics()

    @property
    def seed(self) -> int:
        """The seed in use; final once the first chunk has come."""
        return self._request.seed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # NOTE: __init__ may have failed, and at interpreter exit the engine may be gone.
        request = getattr(self, "_request", None)
        if request is not None and not request.channel.ended:
            self._cancel(request)
