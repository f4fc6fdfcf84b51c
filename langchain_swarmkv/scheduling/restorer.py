"""Brings snapshots back into the pool for the requests that they save work."""

from __future__ import annotations

from collections.abc import Callable

from langchain_swarmkv.scheduling.prefix_cache import PrefixCache, PrefixMatch
from langchain_swarmkv.scheduling.request import Request
from langchain_swarmkv.snapshots.prefix_index import TokenIds
from langchain_swarmkv.snapshots.store import FoundPrefix
from langchain_swarmkv.snapshots.tiers import Look, SnapshotTiers, Tier, TierMatch
from langchain_swarmkv.statistics import PrefixSource

__all__ = ["MIN_SHARED_TOKENS", "Restorer"]

MIN_SHARED_TOKENS = 16
"""A shorter common prefix is neither waited for nor restored: computing it is as quick."""


class Restorer:
    """For one scheduler, whose lock guards it.

    Args:
        tiers: where snapshots are.
        cache: where they are restored to.
        prefill_seconds_per_token: how quickly this engine computes; None: not known yet.
    """

    def __init__(
        self,
        tiers: SnapshotTiers,
        cache: PrefixCache,
        prefill_seconds_per_token: Callable[[], float | None],
    ) -> None:
        self._tiers = tiers
        self._cache = cache
        self._prefill_seconds_per_token = prefill_seconds_per_token

    def restore(self, request: Request, match: PrefixMatch | None, reserved_cells: int) -> bool:
        """Bring back a snapshot that shares more than `match`, if that is quicker than computing.

        False: it is being read, and the request waits for that.
        """
        num_matched = match.num_tokens if match else 0
        stored = request.take_fetched()
        if stored is not None and stored.num_tokens <= num_matched:
            return True  # another request waited for the same file, and has restored it
        if stored is not None and self._cache.restore(stored.snapshot, reserved_cells):
            request.restored_from = PrefixSource.DISK
            return True
        min_tokens = num_matched + MIN_SHARED_TOKENS
        if request.num_prompt_tokens < min_tokens:
            return True
        if not self._has_looked(request, num_matched):
            return False
        for found in self._tiers.find(
            request.namespace,
            request.token_ids,
            min_tokens,
            needs_logits=request.needs_logits,
            on_disk=_found_by(request.look),
        ):
            if not self._is_worth_it(found, num_matched):
                continue
            shared = request.token_ids[: found.found.num_tokens]
            if found.tier is Tier.DISK and not request.has_fetched:  # it is tried once
                request.fetch = self._tiers.fetch(found, request.namespace, shared)
                return False
            if found.tier is Tier.MEMORY and self._from_memory(request, shared, reserved_cells):
                return True
        return True

    def _has_looked(self, request: Request, num_matched: int) -> bool:
        """Whether the disk was asked for this prompt; asks it, once, and again if less is here."""
        if request.look_tokens < 0 or num_matched < request.look_tokens:
            request.look = self._tiers.look(
                request.namespace,
                request.token_ids,
                MIN_SHARED_TOKENS,
                needs_logits=request.needs_logits,
            )
            request.look_tokens = num_matched
        return request.look is None or request.look.done()

    def _from_memory(self, request: Request, shared: TokenIds, reserved_cells: int) -> bool:
        stored = self._tiers.get(request.namespace, shared, len(shared))
        if stored is None or not self._cache.restore(stored.snapshot, reserved_cells):
            return False
        request.restored_from = PrefixSource.MEMORY
        return True

    def _is_worth_it(self, match: TierMatch, num_matched: int) -> bool:
        """Whether it fits the pool, and is quicker than computing by the rates so far."""
        found = match.found
        if not self._cache.can_ever_hold(found.snapshot_tokens):
            return False
        prefill, counters, reading = (
            self._prefill_seconds_per_token(),
            self._cache.counters,
            self._tiers.counters,
        )
        if not prefill or not counters.restored_bytes:
            return True  # not measured yet
        seconds = found.num_bytes * counters.restore_seconds / counters.restored_bytes
        if match.tier is Tier.DISK and reading.disk_read_bytes:
            seconds += found.num_bytes * reading.disk_read_seconds / reading.disk_read_bytes
        return seconds < prefill * (found.num_tokens - num_matched)


def _found_by(look: Look | None) -> FoundPrefix | None:
    return None if look is None or look.cancelled() else look.result()
