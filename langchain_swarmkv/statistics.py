"""What was measured: frozen dataclasses, made by the object that knows the numbers.

Clock times are seconds since the engine started (monotonic), so that requests can be drawn on one
line of time; the others are durations in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "DeviceStatistics",
    "EngineStatistics",
    "LockStatistics",
    "OwnerLockStatistics",
    "PercentileSeconds",
    "PrefixSource",
    "RequestStatistics",
]


class PrefixSource(str, Enum):
    """Where the reused part of a prompt came from."""

    NONE = "none"
    RESIDENT = "resident"
    """Forked from a sequence that was in the pool."""
    MEMORY = "memory"
    """Restored from the host's memory."""
    DISK = "disk"
    """Read from the disk and restored."""


@dataclass(frozen=True)
class RequestStatistics:
    """One request. `num_prompt_tokens == num_cached_tokens + num_computed_tokens`."""

    name: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens reused from another sequence or a snapshot."""
    num_computed_tokens: int
    """Prompt tokens that this request decoded itself."""
    num_output_tokens: int
    prefix_source: PrefixSource
    submitted_at: float
    admitted_at: float | None
    prefilled_at: float | None
    """When the last prompt token was in the cache."""
    first_token_at: float | None
    finished_at: float | None

    @property
    def queue_seconds(self) -> float | None:
        """From submission until a sequence and its cells were granted."""
        return _difference(self.submitted_at, self.admitted_at)

    @property
    def prefill_seconds(self) -> float | None:
        """From admission until the whole prompt was in the cache."""
        return _difference(self.admitted_at, self.prefilled_at)

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token, from submission."""
        return _difference(self.submitted_at, self.first_token_at)

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        span = _difference(self.first_token_at, self.finished_at)
        if span is None or self.num_output_tokens < 2:
            return None
        return span / (self.num_output_tokens - 1)

    @property
    def e2e_seconds(self) -> float | None:
        """From submission to the end."""
        return _difference(self.submitted_at, self.finished_at)


def _difference(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True)
class EngineStatistics:
    """The engine at one moment. Counters run from its start."""

    num_waiting: int
    num_running: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_steps: int
    num_prefill_tokens: int
    """Prompt tokens decoded, each counted once however many branches use it."""
    num_decode_tokens: int
    """Output tokens fed back through the model."""
    num_cached_tokens: int
    """Prompt tokens that requests reused instead of decoding."""
    num_recomputed_tokens: int
    """Prompt tokens computed although the caller took them to be in the cache: a document that an
    analyst had to read again."""
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_forks: int
    num_evictions: int
    num_spills: int
    """Prefixes saved to the host's store before they left the pool."""
    num_restores: int
    """Prefixes brought back from the host's store."""
    num_compactions: int
    """Times that used cells were moved down over a hole in the pool."""
    peak_running: int
    cells_total: int
    cells_used: int
    cells_reserved: int
    """Cells promised to running requests and not yet written."""
    cells_pinned: int
    cells_idle: int
    """Cells of unpinned prefixes that no running request uses."""
    sequences_total: int
    sequences_used: int
    num_resident_prefixes: int
    num_pinned_prefixes: int
    num_disk_reads: int
    num_disk_writes: int
    num_disk_failures: int
    """Snapshots that could not be read or written; what they hold is computed again."""
    num_snapshots_dropped_disk_slow: int
    """Snapshots not written, for what waits to be written had no room in host memory."""
    num_snapshots_dropped_no_room: int
    """Prefixes that left the pool uncopied, for neither host memory nor the disk could take one."""
    num_snapshots_refused: int
    """Snapshots found in host memory or on disk that did not load, and were dropped."""
    num_snapshots_evicted: int
    """Snapshots that left host memory for others, and are not on disk."""
    store_bytes: int
    prefill_only_tokens: int
    """Prompt tokens decoded in steps that only prefilled."""
    prefill_seconds: float
    """Time in steps that only prefilled."""
    decode_seconds: float
    """Time in steps that decoded at least one branch."""

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Measured over the steps that only prefilled."""
        return self.prefill_only_tokens / self.prefill_seconds if self.prefill_seconds else None


@dataclass(frozen=True)
class PercentileSeconds:
    """Percentiles of a window of recent durations."""

    count: int
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class OwnerLockStatistics:
    """One owner's use of one device."""

    owner: str
    num_acquired: int
    num_timeouts: int
    wait: PercentileSeconds
    hold: PercentileSeconds
    num_waiting: int = 0
    """Threads and tasks of this owner that wait now."""


@dataclass(frozen=True)
class DeviceStatistics:
    """One device: who holds it, how many wait, and each owner's waits and holds."""

    device: str
    locked: bool
    """Whether somebody of this process holds it, or cores of it."""
    holder: str | None
    """Who has held it longest of those who do."""
    tasks_waiting: int
    owners: tuple[OwnerLockStatistics, ...]
    holders: tuple[str, ...] = ()
    """All who hold it, or cores of it, in this process."""
    num_units: int = 1
    """Cores of a CPU; 1 for other devices."""
    num_units_held: int = 0
    """By those of this process."""


@dataclass(frozen=True)
class LockStatistics:
    """All devices that a manager has seen."""

    devices: tuple[DeviceStatistics, ...]
