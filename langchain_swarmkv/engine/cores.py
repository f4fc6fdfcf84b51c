"""The cores of the CPU that this process may compute on."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["available_cores", "usable_cores"]


def available_cores() -> int:
    """How many cores this process may use: its affinity, or less if its control group says so."""
    return len(usable_cores())


def usable_cores() -> tuple[int, ...]:
    """Their numbers, ascending.

    A control group limits time, not cores. Its limit is taken as a number of cores, rounded up, and
    the lowest allowed cores stand for it: the processes of one container share the limit, and so
    name the same cores.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = cores[: max(1, math.ceil(int(quota) / int(period)))]
    except (OSError, ValueError):
        pass  # no control groups of version 2 here
    return tuple(cores)
