"""Who runs next. `Scheduler.step` is schedule -> decode -> commit; one thread calls it.

A request waits until its sequence id and all its cells are granted (`admission`), then its prompt
is computed in chunks (`prefill`), then one token a step (`decode`). A batch holds one token of each
decoding request first and prefill chunks after, so that answers stream while a document is read.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from langchain_swarmkv.engine.contract import Batch, Engine
from langchain_swarmkv.errors import (
    ContextBudgetError,
    DecodeError,
    DecodeFatalError,
    EngineClosedError,
    NoRoomError,
    RequestCancelledError,
    SnapshotError,
    SwarmKVError,
)
from langchain_swarmkv.scheduling.prefix_cache import Logits, PrefixCache, PrefixMatch
from langchain_swarmkv.scheduling.request import (
    FinishReason,
    Request,
    RequestStatus,
    TokenLogprob,
)
from langchain_swarmkv.scheduling.restorer import MIN_SHARED_TOKENS, Restorer
from langchain_swarmkv.snapshots.prefix_index import TokenIds
from langchain_swarmkv.snapshots.tiers import SnapshotTiers
from langchain_swarmkv.statistics import EngineStatistics, PrefixSource

__all__ = ["Scheduler", "closed_by"]

_MIN_MEASURED_TOKENS = 256
"""Prefill rates of fewer tokens say nothing."""

LogitsOf = Callable[[], Logits | None]
"""Logits that are copied only for those who want them."""


@dataclass
class _Counters:
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    peak_running: int = 0
    prefill_seconds: float = 0.0
    prefill_only_tokens: int = 0
    decode_seconds: float = 0.0


@dataclass
class _Part:
    """One request's tokens in a step's batch."""

    request: Request
    num_tokens: int
    row: int | None
    """The batch row to sample from, if this part ends where a token is due."""


@dataclass
class _Plan:
    batch: Batch = field(default_factory=Batch)
    parts: list[_Part] = field(default_factory=list)
    num_decode_tokens: int = 0

    def add(self, request: Request, tokens: list[int], *, want_logits: bool) -> None:
        row = self.batch.add(request.seq_id, tokens, request.num_written, want_logits=want_logits)
        self.parts.append(_Part(request, len(tokens), row if want_logits else None))


class Scheduler:
    """Requests and sequences of one engine.

    `lock` guards the books, not the engine: it is held while a step is planned and committed, never
    while the model computes, so that statistics can be read at any time.
    """

    def __init__(
        self,
        engine: Engine,
        tiers: SnapshotTiers,
        *,
        mixed_prefill_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()
        self._engine = engine
        self._tiers = tiers
        self._mixed_prefill_tokens = mixed_prefill_tokens
        self._clock = clock
        self._started = clock()
        self.cache = PrefixCache(engine, tiers)
        self._restorer = Restorer(tiers, self.cache, self._prefill_seconds_per_token)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._saving: list[Request] = []
        """Their answers are complete, and are on their way to the disk."""
        self._counters = _Counters()

    @property
    def now(self) -> float:
        """Seconds since the engine started."""
        return self._clock() - self._started

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running or self._saving)

    @property
    def waits_for_disk(self) -> bool:
        """Whether all there is to do is to wait until snapshots are read or written."""
        if self._running:
            return False
        if any(r.look is not None and not r.look.done() for r in self._waiting):
            return True  # those that came together start together
        reading = [request.fetch for request in self._waiting]
        writing = [request.writing for request in self._saving]
        return all(job is not None and not job.done() for job in [*reading, *writing])

    def add(self, request: Request) -> None:
        """Queue a request."""
        with self.lock:
            self._waiting.append(request)

    # -- the step --------------------------------------------------------------------------------

    def step(self) -> None:
        """Advance every running request by one token or one prefill chunk."""
        with self.lock:
            self.reap()
            self._admit()
            self._tidy()
            plan = self._plan()
        if not plan.parts:
            return
        started = self._clock()
        try:
            self._decode(plan)
        except DecodeError as error:
            with self.lock:
                self._fail_step(plan, error)
            return
        with self.lock:
            self._count(plan, self._clock() - started)
            for part in plan.parts:
                part.request.num_written += part.num_tokens
                self.cache.written(part.request.seq_id, part.num_tokens)
        self._report_progress(plan)
        with self.lock:
            for part in plan.parts:
                self._commit(part)

    def reap(self) -> None:
        """End the requests that were written, were cancelled or have run out of time."""
        now = self.now
        for request in [*self._saving]:
            self._end_saved(request)
        for request in [*self._running, *self._waiting, *self._saving]:
            if request.cancelled:
                message = f"{request.name!r} was cancelled."
                self._abandon(request, RequestCancelledError(message))
            elif error := request.deadline_error(now):
                self._abandon(request, error)

    # -- admission -------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit in order of arrival, as far as sequence ids and cells reach, up to `max_running`.

        One that waits for another's prefill lets later ones pass; one that waits for room does not,
        or a large request would never get its turn.
        """
        for request in list(self._waiting):
            if len(self._running) >= self._engine.limits.max_running:
                break
            if request.is_prefix_pending:
                continue
            try:
                admitted = self._try_admit(request)
            except DecodeFatalError:
                raise  # the cache is no more what the books say: the engine closes
            except SwarmKVError as error:
                self._abandon(request, error)
                continue
            if request.waits_for is not None or request.reading is not None:
                continue
            if not admitted:
                if self._running:
                    break
                self._abandon(request, self._pinned_error(request))

    def _try_admit(self, request: Request) -> bool:
        request.waits_for = None
        cache, namespace = self.cache, request.namespace
        reusable = self._reusable(request)
        match = cache.computed_match(namespace, reusable)
        worth_tokens = (match.num_tokens if match else 0) + MIN_SHARED_TOKENS
        planned = cache.planned_match(namespace, reusable)
        if planned is not None and (
            planned.num_tokens >= worth_tokens or _is_of(request.twin, planned)
        ):
            self._wait_for(request, planned)
            return False
        reserved_cells = sum(running.reserved_cells for running in self._running)
        if not self._restorer.restore(request, match, reserved_cells):
            return False
        # Anew, since what was matched may have made way for a snapshot.
        match = cache.computed_match(namespace, self._reusable(request))
        logits = cache.last_logits(namespace, request.token_ids)
        opened = cache.open(
            namespace, request.token_ids, match, reserved_cells + request.max_total_tokens
        )
        if opened is None:
            return False
        self._start(request, *opened, logits)
        return True

    def _reusable(self, request: Request) -> TokenIds:
        """The tokens that need not be computed: not the last one, if its logits are not known."""
        tokens = request.token_ids
        if request.needs_logits and self.cache.last_logits(request.namespace, tokens) is None:
            return tokens[:-1]
        return tokens

    def _prefill_seconds_per_token(self) -> float | None:
        """As measured in steps without decoding; None: too few tokens to say."""
        counters = self._counters
        if counters.prefill_only_tokens < _MIN_MEASURED_TOKENS:
            return None
        return counters.prefill_seconds / counters.prefill_only_tokens

    def _wait_for(self, request: Request, planned: PrefixMatch) -> None:
        (leader,) = (running for running in self._running if running.seq_id == planned.seq_id)
        leader.branch_points.add(planned.num_tokens)
        request.waits_for = leader, planned.num_tokens

    def _start(self, request: Request, seq_id: int, shared: int, logits: Logits | None) -> None:
        self._waiting.remove(request)
        self._running.append(request)
        request.status = RequestStatus.PREFILL
        request.seq_id = seq_id
        request.num_cached_tokens = request.num_written = shared
        if shared:
            request.prefix_source = request.restored_from or PrefixSource.RESIDENT
        request.admitted_at = self.now
        counters = self._counters
        counters.prefix_cache_queries += 1
        counters.prefix_cache_hits += shared > 0
        counters.num_cached_tokens += shared
        expected = min(request.expected_cached_tokens, request.num_prompt_tokens)
        counters.num_recomputed_tokens += max(0, expected - shared)
        counters.peak_running = max(counters.peak_running, len(self._running))
        if request.params.max_tokens:
            request.sampler = self._engine.create_sampler(request.params, request.tokens)
            request.seed = request.sampler.seed
        if not request.remaining_prompt:
            self._begin_answer(request, lambda: logits)

    def _tidy(self) -> None:
        """Take out of the way what is idle, so that what runs attends over as little as can be."""
        if not self._running:
            return
        self.cache.spill_idle((request.namespace, request.token_ids) for request in self._waiting)
        self.cache.compact(sum(request.reserved_cells for request in self._running))

    def _pinned_error(self, request: Request) -> ContextBudgetError:
        limits, cache = self._engine.limits, self.cache
        no_ids = cache.num_pinned == limits.max_sequences
        return ContextBudgetError(
            f"{request.name!r} needs {request.max_total_tokens} cells (prompt and max_tokens) and "
            f"a sequence id, but pinned prefixes hold {cache.cells_pinned} of "
            f"n_ctx={limits.num_cells} cells and {cache.num_pinned} of "
            f"max_sequences={limits.max_sequences} ids, and nothing else is left to wait for. "
            "Release a pinned document, or raise the limit.",
            needed_tokens=request.max_total_tokens,
            limit_tokens=0 if no_ids else limits.num_cells - cache.cells_pinned,
            limit_name="max_sequences" if no_ids else "n_ctx",
        )

    # -- planning --------------------------------------------------------------------------------

    def _plan(self) -> _Plan:
        plan = _Plan()
        for request in self._running:
            if request.status is RequestStatus.DECODE:
                plan.add(request, request.output_tokens[-1:], want_logits=True)
        plan.num_decode_tokens = len(plan.batch)
        budget = self._engine.limits.max_batch_tokens - len(plan.batch)
        if plan.num_decode_tokens:
            budget = min(budget, self._mixed_prefill_tokens)
        for request in self._running:
            if request.status is RequestStatus.PREFILL and budget > 0:
                budget -= self._add_chunk(plan, request, budget)
        return plan

    def _add_chunk(self, plan: _Plan, request: Request, budget: int) -> int:
        start = request.num_written
        end = min(start + budget, request.next_stop())
        is_last = end == request.num_prompt_tokens
        plan.add(request, request.tokens[start:end], want_logits=is_last)
        return end - start

    # -- decoding --------------------------------------------------------------------------------

    def _decode(self, plan: _Plan) -> None:
        try:
            self._engine.decode(plan.batch)
        except NoRoomError:
            # The ledger promised room, so this is a surprise: let go of what is idle, once.
            with self.lock:
                self.cache.clear_idle()
            self._engine.decode(plan.batch)

    def _fail_step(self, plan: _Plan, error: DecodeError) -> None:
        # Without room the cache is unchanged, and one request less may be enough. After a fatal
        # code part of the batch may be in the cache (llama.h): none of its sequences can be kept.
        parts = plan.parts[-1:] if isinstance(error, NoRoomError) else plan.parts
        for part in parts:
            # Each its own, for those who catch it may add notes to it.
            self._abandon(part.request, copy.copy(error).with_traceback(error.__traceback__))

    def _count(self, plan: _Plan, seconds: float) -> None:
        counters = self._counters
        num_prefill_tokens = len(plan.batch) - plan.num_decode_tokens
        counters.num_steps += 1
        counters.num_decode_tokens += plan.num_decode_tokens
        counters.num_prefill_tokens += num_prefill_tokens
        if plan.num_decode_tokens:
            counters.decode_seconds += seconds
        else:
            counters.prefill_seconds += seconds
            counters.prefill_only_tokens += num_prefill_tokens

    # -- committing ------------------------------------------------------------------------------

    def _report_progress(self, plan: _Plan) -> None:
        """Call the listeners, without the lock: theirs may be held by one who wants ours."""
        for request in [part.request for part in plan.parts]:
            if request.status is not RequestStatus.PREFILL:
                continue
            try:
                request.report_progress()
            except BaseException as error:  # a listener's CancelledError too is its own alone
                with self.lock:
                    self._abandon(request, error)

    def _commit(self, part: _Part) -> None:
        request, row = part.request, part.row
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.PREFILL:
            self._keep_branch_point(request)
        if row is None:
            return
        try:
            if request.status is RequestStatus.PREFILL:
                self._begin_answer(request, lambda: self._engine.logits(row))
            else:
                assert request.sampler is not None
                self._accept(request, request.sampler.sample(row), lambda: self._engine.logits(row))
        except SwarmKVError as error:
            self._abandon(request, error)

    def _keep_branch_point(self, request: Request) -> None:
        if request.num_written in request.branch_points:
            request.branch_points.discard(request.num_written)
            if not self._engine.limits.can_cut:
                computed = request.tokens[: request.num_written]
                self.cache.keep_branch_point(request.seq_id, computed)

    def _begin_answer(self, request: Request, logits: LogitsOf) -> None:
        """Go on from a prompt that is all in the cache."""
        request.prefilled_at = self.now
        request.status = RequestStatus.DECODE
        if request.sampler is None:
            self._finish(request, "length", logits)
            return
        known = logits()
        assert known is not None  # _reusable saw to that
        self._accept(request, request.sampler.sample_from(known), logits)

    def _accept(self, request: Request, token_id: int, logits: LogitsOf) -> None:
        """Take a token into the answer."""
        if request.first_token_at is None:
            request.first_token_at = self.now
        tokenizer = self._engine.tokenizer
        if tokenizer.is_end(token_id) and not request.params.ignore_eos:
            request.accept_end(token_id)
            self._finish(request, "stop", logits)
            return
        data = tokenizer.token_bytes(token_id)
        request.accept(token_id, data, self._logprob(request, token_id, logits))
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason, logits)

    def _logprob(self, request: Request, token_id: int, logits: LogitsOf) -> TokenLogprob | None:
        num_top = request.params.logprobs
        if num_top is None:
            return None
        known = logits()
        assert known is not None  # the token was picked from them
        values = known.astype(np.float64)
        top = values.max()
        logprobs = values - (top + np.log(np.exp(values - top).sum()))
        best = np.argsort(-logprobs, kind="stable")[:num_top]
        return TokenLogprob(
            token_id, float(logprobs[token_id]), tuple((int(i), float(logprobs[i])) for i in best)
        )

    # -- ending ----------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason, logits: LogitsOf) -> None:
        """End a request whose answer is complete; `logits` are those after its last written token.

        Raises:
            SnapshotError: a snapshot was asked for and cannot be taken.
        """
        last = None
        if request.sampler is None or request.persist or request.wants_snapshot:
            last = logits()
        if request.persist or request.wants_snapshot:
            self._save(request, last)
        keep = request.keep_prefix or request.pin is not None or self._is_awaited(request)
        # Only a prefill can be followed by a prompt of the same tokens.
        self._vacate(request, keep=keep, pin=request.pin, logits=None if request.sampler else last)
        request.reason = reason
        self._saving.append(request)
        self._end_saved(request)

    def _save(self, request: Request, logits: Logits | None) -> None:
        """Take the snapshot that a request asked for, and have it written if it asked for that."""
        tokens, namespace = request.written_tokens, request.namespace
        if not request.wants_snapshot:
            # A file may be there some moments before it would survive a crash. Whether it is there
            # already, the writer's thread looks: this one must not wait for a disk.
            request.writing = self._tiers.pending(namespace, tokens)
            if request.writing is not None:
                return
        try:
            snapshot = self.cache.snapshot(request.seq_id, namespace, tokens, logits)
        except MemoryError as error:
            raise SnapshotError(
                f"The host has no memory for a snapshot of {len(tokens)} tokens."
            ) from error
        if request.wants_snapshot:
            request.snapshot = snapshot
        if request.persist:
            request.writing = self._tiers.write(snapshot, must=True)

    def _end_saved(self, request: Request) -> None:
        """End a complete request once it need not wait for the disk any more."""
        error = None
        if request.writing is not None:
            if not request.writing.done():
                return
            error = request.writing.exception()
        self._saving.remove(request)
        if error is not None:
            self._counters.num_failed += 1
            request.fail(error, self.now)
            return
        self._counters.num_finished += 1
        request.finish(request.reason, self.now)

    def _abandon(self, request: Request, error: BaseException) -> None:
        """End a request with an error, wherever it is.

        What it has computed is kept only if others wait for it.
        """
        if request in self._running:
            keep = self._is_awaited(request) and not isinstance(error, DecodeError)
            self._vacate(request, keep=keep, pin=None)
        else:
            self._leave(request)
        if isinstance(error, RequestCancelledError):
            self._counters.num_cancelled += 1
        else:
            self._counters.num_failed += 1
        request.fail(error, self.now)

    def _is_awaited(self, request: Request) -> bool:
        return any(
            other.waits_for is not None and other.waits_for[0] is request for other in self._waiting
        )

    def _vacate(
        self, request: Request, *, keep: bool, pin: str | None, logits: Logits | None = None
    ) -> None:
        """Take a running request's sequence, and leave what it wrote as a prefix if `keep`.

        It leaves the lists last: if the cache fails, whoever closes the engine still finds it.
        """
        if keep:
            self.cache.keep(request.seq_id, request.written_tokens, pin, logits)
        else:
            self.cache.close(request.seq_id)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        for place in (self._running, self._waiting, self._saving):
            if request in place:
                place.remove(request)
        if request.sampler is not None:
            request.sampler.close()
            request.sampler = None

    def abandon_all(self, cause: BaseException | None) -> None:
        """Fail every request because the engine closes."""
        with self.lock:
            for request in [*self._running, *self._waiting, *self._saving]:
                error = EngineClosedError(
                    f"The engine was closed while {request.name!r} ran{closed_by(cause)}"
                )
                error.__cause__ = cause
                self._leave(request)
                self._counters.num_failed += 1
                request.fail(error, self.now)

    def flush(self) -> None:
        """Put what the pool holds into the tiers, where the policy writes by itself."""
        if self._tiers.saves_at_the_end:
            self.cache.flush()  # without the lock: it may wait for the disk, and nothing else runs

    def reset_prefix_cache(self) -> None:
        """Forget what no request and no pin holds, here and in the store."""
        with self.lock:
            self.cache.clear_idle()
            self._tiers.clear_memory()

    # -- numbers ---------------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        """A consistent picture of this moment."""
        with self.lock:
            counters, cache = self._counters, self.cache
            return EngineStatistics(
                num_waiting=len(self._waiting),
                num_running=len(self._running),
                num_finished=counters.num_finished,
                num_failed=counters.num_failed,
                num_cancelled=counters.num_cancelled,
                num_steps=counters.num_steps,
                num_prefill_tokens=counters.num_prefill_tokens,
                num_decode_tokens=counters.num_decode_tokens,
                num_cached_tokens=counters.num_cached_tokens,
                num_recomputed_tokens=counters.num_recomputed_tokens,
                prefix_cache_queries=counters.prefix_cache_queries,
                prefix_cache_hits=counters.prefix_cache_hits,
                num_forks=cache.counters.num_forks,
                num_evictions=cache.counters.num_evictions,
                num_spills=cache.counters.num_spills,
                num_restores=cache.counters.num_restores,
                num_compactions=cache.counters.num_compactions,
                peak_running=counters.peak_running,
                cells_total=self._engine.limits.num_cells,
                cells_used=cache.cells_used,
                cells_reserved=sum(r.reserved_cells for r in self._running),
                cells_pinned=cache.cells_pinned,
                cells_idle=cache.cells_idle,
                sequences_total=self._engine.limits.max_sequences,
                sequences_used=cache.sequences_used,
                num_resident_prefixes=cache.num_residents,
                num_pinned_prefixes=cache.num_pinned,
                **self._tiers.statistics(),
                store_bytes=self._tiers.memory.num_bytes,
                prefill_seconds=counters.prefill_seconds,
                decode_seconds=counters.decode_seconds,
                prefill_only_tokens=counters.prefill_only_tokens,
            )


def _is_of(twin: Request | None, planned: PrefixMatch) -> bool:
    """Whether a match is with the request that came for the same prompt: however short it is."""
    return twin is not None and twin.seq_id == planned.seq_id


def closed_by(cause: BaseException | None) -> str:
    """The end of a sentence that says that the engine was closed."""
    return f", by {type(cause).__name__}: {cause}" if cause else "."
