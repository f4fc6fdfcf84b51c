"""How much memory a process had at most."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["peak_rss_bytes"]


def peak_rss_bytes(children: Iterable[int] = ()) -> int:
    """Highest resident size of this process so far, and of others, added up.

    Args:
        children: ids of processes that count too; those that have ended count nothing.
    """
    own = _high_water_mark("self") or _own_peak()
    return own + sum(_high_water_mark(str(child)) or 0 for child in children)


def _high_water_mark(process: str) -> int | None:
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _own_peak() -> int:
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
