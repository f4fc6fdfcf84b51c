"""Gates for a `FakeEngine`, and a clock: no test may depend on who is faster.

A gate is an `on_decode`: it is called on the engine's thread before each step.
"""

from __future__ import annotations

import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest

from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.scheduling import prefix_cache
from langchain_swarmkv.scheduling.request import Request
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.snapshots import tiers

PATIENCE_SECONDS = 60.0
"""Far more than anything takes: only a fault comes near it."""


class Gate:
    """Holds the engine at the beginning of every step until it is opened, for good."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._is_open = threading.Event()

    def __call__(self, batch: Batch) -> None:
        self.entered.set()
        assert self._is_open.wait(PATIENCE_SECONDS), "the gate was not opened"

    def open(self) -> None:
        self._is_open.set()


class Steps:
    """Lets the engine take the steps that it is given, one permit each, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self._permits = threading.Semaphore(0)
        self._is_free = False

    def allow(self, number: int = 1) -> None:
        self._permits.release(number)

    def set_free(self) -> None:
        self._is_free = True
        self._permits.release()

    def __call__(self, batch: Batch) -> None:
        if not self._is_free:
            assert self._permits.acquire(timeout=PATIENCE_SECONDS), "no step was allowed"
        self.count += 1


class Together:
    """Holds the engine at its first step until so many requests have been submitted to it."""

    def __init__(self, num_requests: int) -> None:
        self._num_missing = num_requests
        self._lock = threading.Lock()
        self._are_there = threading.Event()
        self.num_coming = 0
        """Requests that have been submitted or are about to be."""

    def watch(self, engine: SwarmEngine) -> None:
        loop, submit = engine._loop, engine._loop.submit

        def counted(*requests: Request) -> None:
            with self._lock:
                self.num_coming += len(requests)
            submit(*requests)
            with self._lock:
                self._num_missing -= len(requests)
                if self._num_missing <= 0:
                    self._are_there.set()

        loop.submit = counted  # type: ignore[method-assign]

    def __call__(self, batch: Batch) -> None:
        assert self._are_there.wait(PATIENCE_SECONDS), "requests are missing"


def let_restoring_take(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """What reading a snapshot, and restoring one, is measured to take: exactly 0, or at least this.

    By these measurements the engine decides whether it restores or computes. With real ones a busy
    machine would decide.
    """
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: seconds * next(ticks), monotonic=time.monotonic)
    for module in (tiers, prefix_cache):
        monkeypatch.setattr(module, "time", clock)
