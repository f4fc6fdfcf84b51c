"""The engine as callers see it: submit from any thread or event loop, one thread does the work.

caller ── submit ──> inbox ──> EngineLoop (one thread) ── Scheduler.step ──> Engine
   ^                                                            │
   └──────────── RequestHandle <── Channel <── chunks ──────────┘
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from typing_extensions import Self

from langchain_swarmkv.config import EngineConfig, SamplingParams, SnapshotPolicy
from langchain_swarmkv.engine.contract import Engine, EngineLimits, ModelFacts, Tokenizer
from langchain_swarmkv.engine.grammar import check_grammar
from langchain_swarmkv.errors import (
    ConfigurationError,
    ContextBudgetError,
    InvalidRequestError,
    SequenceError,
    SnapshotError,
    SnapshotMismatchError,
)
from langchain_swarmkv.scheduling.device_locks import DeviceLockManager
from langchain_swarmkv.scheduling.engine_loop import EngineLoop, Stores
from langchain_swarmkv.scheduling.process_lock import lock_folder
from langchain_swarmkv.scheduling.request import Request, RequestHandle
from langchain_swarmkv.scheduling.signals import check_may_wait
from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.snapshot import KVSnapshot, prefix_namespace
from langchain_swarmkv.snapshots.store import SnapshotStore
from langchain_swarmkv.statistics import EngineStatistics

__all__ = ["SwarmEngine"]


class SwarmEngine:
    """One model, one KV pool, any number of callers.

    Every request forks the longest prefix that the pool holds, and requests that arrive together
    share one prefill; nothing has to be declared. All methods are thread safe. Close it, or use it
    as a context manager.

    Args:
        engine: what to load, or an engine that exists already (`FakeEngine()` in tests); the
            latter is then owned and closed here.
        snapshot_memory_bytes: host memory for prefixes that had to leave the pool; 0: none.
        snapshot_dir: folder for prefixes that outlive the process; None: none do. They hold the
            documents in a recoverable form; for encryption give a `snapshot_store`.
        snapshot_policy: what goes there by itself.
        snapshot_store: any `SnapshotStore` in place of a folder; it is owned and closed here.
        device_locks: who may use the device when; None: the one manager that all engines of this
            process with the same `lock_dir` share.

    Raises:
        ModelError: the model cannot be loaded.
        DeviceLockError: the folder for lock files cannot be used.
        SnapshotStorageError: the folder for snapshots cannot be used.
    """

    def __init__(
        self,
        engine: EngineConfig | Engine,
        *,
        snapshot_memory_bytes: int = 1 << 30,
        snapshot_dir: Path | str | None = None,
        snapshot_policy: SnapshotPolicy | str = SnapshotPolicy.WRITE_THROUGH,
        snapshot_store: SnapshotStore | None = None,
        device_locks: DeviceLockManager | None = None,
    ) -> None:
        if not isinstance(engine, EngineConfig | Engine):
            raise ConfigurationError(
                f"engine is a {type(engine).__name__}; give an EngineConfig or an Engine."
            )
        if snapshot_memory_bytes < 0:
            raise ConfigurationError(
                f"snapshot_memory_bytes={snapshot_memory_bytes} is negative; 0 switches it off."
            )
        if not isinstance(snapshot_store, SnapshotStore | None):
            raise ConfigurationError(
                f"snapshot_store is a {type(snapshot_store).__name__}; give a SnapshotStore, or "
                "a folder as snapshot_dir."
            )
        if snapshot_dir is not None and snapshot_store is not None:
            raise ConfigurationError("give either snapshot_dir or snapshot_store.")
        policy = _checked_policy(snapshot_policy)
        if snapshot_dir is not None:
            snapshot_store = DiskSnapshotStore(snapshot_dir)
        self.snapshot_folder: Path | None = (
            snapshot_store.path if isinstance(snapshot_store, DiskSnapshotStore) else None
        )
        """Where snapshots go on this machine; None: nowhere, or to a store without a folder."""
        stores = Stores(MemorySnapshotStore(snapshot_memory_bytes), snapshot_store, policy)
        if device_locks is None:
            lock_dir = engine.lock_dir if isinstance(engine, EngineConfig) else None
            device_locks = _process_device_locks(lock_folder(lock_dir))
        self._loop = EngineLoop(engine, stores, device_locks)
        self._loop.start()
        self.facts: ModelFacts = self._loop.engine.facts
        self.limits: EngineLimits = self._loop.engine.limits
        self.tokenizer: Tokenizer = self._loop.engine.tokenizer

    @property
    def has_disk(self) -> bool:
        """Whether there is a folder or store for snapshots."""
        return self._loop.has_disk

    @property
    def closed(self) -> bool:
        """Whether requests are refused."""
        return self._loop.closed

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        name: str = "",
        cache_salt: str = "",
        keep_prefix: bool = True,
        pin: str | None = None,
        persist: bool = False,
        timeout_seconds: float | None = None,
        marks: Mapping[int, str] | None = None,
        expected_cached_tokens: int = 0,
    ) -> RequestHandle:
        """Queue a prompt and return at once.

        Args:
            tokens: the whole prompt, shared part included, as token ids.
            params: how to sample; None: greedy, 256 tokens. `max_tokens=0` only prefills.
            name: for statistics and messages.
            cache_salt: requests share prefixes only with requests of the same salt.
            keep_prefix: leave prompt and answer in the pool for later requests. False: a one-shot
                branch, whose cells are free when it ends.
            pin: keep the tokens resident, never evicted, until `release(pin)` with the same
                `cache_salt`. Repeating a pin changes nothing; for other tokens it is not set, and
                the log says so.
            persist: write prompt and answer to the disk, whatever the policy. The request ends
                once they are there, and fails with SnapshotStorageError if they cannot be written.
            timeout_seconds: the request fails if it takes longer, waiting included.
            marks: a character for each control token that shall be seen in the text, which they
                are not by themselves. A lone surrogate is one that no other token can write. A
                token that ends the answer is not written.
            expected_cached_tokens: how many prompt tokens the caller takes to be in the cache; what
                is not counts as `num_recomputed_tokens`.

        Raises:
            ConfigurationError: `persist` without a folder or store for snapshots.
            InvalidRequestError: an empty prompt, a token id outside the vocabulary, a pin or a
                cache_salt that is no string, or a mark that is not one character.
            ContextBudgetError: prompt and max_tokens can never fit.
            GrammarError: the grammar is too large or too deeply nested to be given to llama.cpp
                (one that does not parse fails the request instead); or llguidance refuses the
                guide, which is compiled here unless it is known.
            EngineClosedError: the engine is closed.
        """
        params = SamplingParams() if params is None else params
        request = self._prepared(
            tokens,
            params,
            name=name,
            cache_salt=cache_salt,
            keep_prefix=keep_prefix,
            pin=pin,
            persist=persist,
            timeout_seconds=timeout_seconds,
            marks=marks,
            expected_cached_tokens=expected_cached_tokens,
        )
        self._loop.submit(request)
        return RequestHandle(request, self._loop.cancel, self)

    def submit_all(
        self, tokens: Sequence[int], params: Sequence[SamplingParams], **options: Any
    ) -> list[RequestHandle]:
        """Queue one prompt for several answers: one request computes it, the others fork it there.

        Args:
            tokens: as for `submit`.
            params: how to sample each answer.
            options: for all of them, as for `submit`.

        Raises:
            SwarmKVError: as for `submit`; then none is queued.
        """
        requests: list[Request] = []
        for each in params:
            twin = requests[0] if requests else None
            requests.append(self._prepared(tokens, each, twin=twin, **options))
        self._loop.submit(*requests)
        return [RequestHandle(request, self._loop.cancel, self) for request in requests]

    def _prepared(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        name: str = "",
        cache_salt: str = "",
        keep_prefix: bool = True,
        pin: str | None = None,
        persist: bool = False,
        timeout_seconds: float | None = None,
        marks: Mapping[int, str] | None = None,
        expected_cached_tokens: int = 0,
        twin: Request | None = None,
    ) -> Request:
        """A request that has been checked and is not queued yet; see `submit`."""
        self._loop.check_usable()
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params is a {type(params).__name__}.")
        if persist and not self._loop.has_disk:
            raise ConfigurationError("persist needs a snapshot_dir or a snapshot_store.")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise InvalidRequestError(
                f"timeout_seconds={timeout_seconds} must be positive or None."
            )
        if not isinstance(expected_cached_tokens, int) or expected_cached_tokens < 0:
            raise InvalidRequestError(
                f"expected_cached_tokens={expected_cached_tokens!r} must be a whole number, at "
                "least 0."
            )
        if pin is not None and not isinstance(pin, str):
            raise InvalidRequestError(f"pin is a {type(pin).__name__}; give a string or None.")
        if params.grammar is not None:
            check_grammar(params.grammar)
        compiled_guide = None
        if params.guide is not None:
            compiled_guide = self._loop.engine.guides.check(params.guide)
        for token_id, mark in (marks or {}).items():
            if not isinstance(mark, str) or len(mark) != 1:
                raise InvalidRequestError(
                    f"the mark of token {token_id} is {mark!r}; give one character."
                )
        return self._request(
            tokens,
            params,
            cache_salt=cache_salt,
            name=name,
            keep_prefix=keep_prefix,
            pin=pin,
            persist=persist,
            timeout_seconds=timeout_seconds,
            marks=marks,
            stop_controls=self._stop_controls(params.stop),
            compiled_guide=compiled_guide,
            expected_cached_tokens=expected_cached_tokens,
            twin=twin,
        )

    def _request(
        self, tokens: Sequence[int], params: SamplingParams, *, cache_salt: str, **options: Any
    ) -> Request:
        token_list = self._checked(tokens)
        self._check_fits(len(token_list), params.max_tokens)
        return Request(
            token_list,
            params,
            namespace=self._namespace(cache_salt),
            now=self._loop.scheduler.now,
            **options,
        )

    def _stop_controls(self, stop: Sequence[str]) -> dict[int, str]:
        """The control tokens that stand in stop strings, whose texts the answer does not show."""
        if not stop:
            return {}
        return {
            token.token_id: text
            for text, token in self.tokenizer.special_tokens.items()
            if any(text in one for one in stop)
        }

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        try:
            ids = np.asarray(tokens, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"token ids must be integers: {error}") from error
        if ids.ndim != 1 or not ids.size:
            raise InvalidRequestError("the prompt has no tokens; at least one is needed.")
        if not np.array_equal(ids, np.asarray(tokens)):
            raise InvalidRequestError("token ids must be integers.")
        outside = ids[(ids < 0) | (ids >= self.facts.n_vocab)]
        if outside.size:
            raise InvalidRequestError(
                f"token id {outside[0]} is outside the vocabulary of {self.facts.n_vocab}.",
                token_id=int(outside[0]),
            )
        checked: list[int] = ids.tolist()
        return checked

    def _check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        needed = num_prompt_tokens + max_tokens
        for limit_name, limit in (
            ("n_ctx", self.limits.num_cells),
            ("n_ctx_train", self.facts.n_ctx_train),
        ):
            if needed > limit:
                raise ContextBudgetError(
                    f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: "
                    f"{needed} together, but {limit_name}={limit}. "
                    + _what_would_fit(limit_name, limit, num_prompt_tokens),
                    needed_tokens=needed,
                    limit_tokens=limit,
                    limit_name=limit_name,
                )

    def _namespace(self, cache_salt: str) -> str:
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(
                f'cache_salt is a {type(cache_salt).__name__}; give a string, or none for "".'
            )
        return prefix_namespace(self.facts.identity.digest, cache_salt)

    def release(self, pin: str, *, cache_salt: str = "") -> bool:
        """Let a pinned prefix be evicted again.

        Args:
            pin: its name, as given to `submit`.
            cache_salt: that of the request that set it; each salt has pins of its own.

        Returns:
            False: there was no such pin; harmless.
        """
        self._loop.check_process()
        namespace, scheduler = self._namespace(cache_salt), self._loop.scheduler
        with scheduler.lock:
            return not self.closed and scheduler.cache.release(namespace, pin)

    def is_resident(self, tokens: Sequence[int], cache_salt: str = "") -> bool:
        """Whether all of `tokens` lie in the pool now, ready to be forked."""
        self._loop.check_process()
        scheduler = self._loop.scheduler
        with scheduler.lock:
            return not self.closed and scheduler.cache.is_resident(
                self._namespace(cache_salt), self._checked(tokens)
            )

    def reset_prefix_cache(self) -> None:
        """Forget every prefix that is neither pinned nor in use, in the pool and in host memory.

        What lies on disk stays there, and is found again.

        For measurements that shall start cold, and to let go of documents at once.

        Raises:
            EngineClosedError: the engine is closed.
        """
        self._loop.check_usable()
        self._loop.call(self._loop.scheduler.reset_prefix_cache)

    def snapshot(self, tokens: Sequence[int], *, cache_salt: str = "") -> KVSnapshot:
        """The KV of exactly these tokens, computed first as far as it is not in the cache.

        Raises:
            SwarmKVError: as `submit`, or whatever makes the prefill fail.
        """
        self._loop.check_usable()
        check_may_wait("snapshot")
        request = self._request(
            tokens, SamplingParams(max_tokens=0), cache_salt=cache_salt, wants_snapshot=True
        )
        self._loop.submit(request)
        RequestHandle(request, self._loop.cancel, self).result()
        assert request.snapshot is not None  # taken before the request ended
        return request.snapshot

    def insert(self, snapshot: KVSnapshot, *, cache_salt: str = "") -> None:
        """Make a snapshot one that later requests with this salt may use.

        Raises:
            SnapshotMismatchError: it is of another model, of other settings or of another salt, or
                its tokens, its state and its logits do not belong together; `field` says which.
            SnapshotError: host memory has no room for it, and there is no disk.
            SnapshotStorageError: nor has the disk.
        """
        self._loop.check_usable()
        if not isinstance(snapshot, KVSnapshot):
            raise InvalidRequestError(f"snapshot is a {type(snapshot).__name__}.")
        ours = self.facts.identity
        difference = ours.difference(snapshot.identity)
        if difference is not None:
            raise SnapshotMismatchError(
                f"The snapshot differs in {difference.field}: {difference.theirs or 'none'}; this "
                f"engine has {difference.ours or 'none'}.",
                field=difference.field,
                expected=difference.ours,
                seen=difference.theirs,
            )
        if snapshot.namespace != self._namespace(cache_salt):
            raise SnapshotMismatchError(
                "The snapshot was saved under another cache_salt.", field="cache_salt"
            )
        self._check_whole(snapshot)
        if not self._loop.insert(snapshot):
            raise SnapshotError(
                f"There is no room in host memory for a snapshot of {snapshot.num_bytes} bytes; "
                "raise snapshot_memory_bytes.",
                num_bytes=snapshot.num_bytes,
            )

    def _check_whole(self, snapshot: KVSnapshot) -> None:
        """Refuse what would be found for its tokens, and would then not load."""
        n_vocab = self.facts.n_vocab
        if max(snapshot.tokens) >= n_vocab:
            raise SnapshotMismatchError(
                f"The snapshot has the token id {max(snapshot.tokens)}; the vocabulary of this "
                f"engine has {n_vocab}.",
                field="tokens",
            )
        if snapshot.num_logits not in (0, n_vocab):
            raise SnapshotMismatchError(
                f"The snapshot has {snapshot.num_logits} logits; this engine has {n_vocab}. "
                "Leave them out, or take the snapshot again.",
                field="logits",
            )
        if not np.isfinite(np.frombuffer(snapshot.logits or b"", dtype="<f4")).all():
            raise SnapshotMismatchError(
                "The snapshot's logits are not all numbers; take it again.", field="logits"
            )
        try:
            self._loop.engine.check_state(snapshot.state, snapshot.num_tokens)
        except SequenceError as error:
            raise SnapshotMismatchError(
                f"The snapshot's state is not one of its {snapshot.num_tokens} tokens: "
                f"{error} Take the snapshot again.",
                field="state",
            ) from error

    def flush(self) -> None:
        """Wait until every snapshot that is on its way to the disk is there."""
        self._loop.check_usable()
        self._loop.flush()

    def statistics(self) -> EngineStatistics:
        """The engine at this moment; the last picture once it is closed."""
        self._loop.check_process()
        return self._loop.statistics()

    def check(self) -> None:
        """Compare the engine's books with the cache itself, between two steps.

        Raises:
            AssertionError: they differ, a fault of this package.
        """
        self._loop.check_usable()
        self._loop.call(self._loop.scheduler.cache.check)

    def close(self) -> None:
        """Stop. Requests still there fail with EngineClosedError. Harmless when repeated."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        loop: EngineLoop | None = getattr(self, "_loop", None)
        if loop is not None and not loop.closed and os.getpid() == loop.pid:
            # NOTE: no waiting for the engine thread. The collector runs this on any thread, which
            # may hold what the engine thread needs to get to its end.
            loop.stop()
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        name = self.facts.name if hasattr(self, "facts") else "not loaded"
        return f"<SwarmEngine {name!r} {'closed' if self.closed else 'open'}>"


def _what_would_fit(limit_name: str, limit: int, num_prompt_tokens: int) -> str:
    room = limit - num_prompt_tokens
    if room > 0:
        return f"max_tokens={room} would fit."
    more = "raise n_ctx or " if limit_name == "n_ctx" else ""
    return f"Even without an answer it does not fit: {more}shorten the prompt."


def _checked_policy(policy: SnapshotPolicy | str) -> SnapshotPolicy:
    try:
        return SnapshotPolicy(policy)
    except ValueError:
        known = ", ".join(item.value for item in SnapshotPolicy)
        raise ConfigurationError(
            f"snapshot_policy={policy!r} is unknown; there are {known}."
        ) from None


@functools.cache
def _process_device_locks(folder: Path) -> DeviceLockManager:
    return DeviceLockManager(lock_dir=folder)
