"""Claims on one device, driven call by call with signals that only record."""

from __future__ import annotations

import pytest

from langchain_swarmkv.scheduling.device_claims import LIVENESS_SECONDS, Claim, ClaimState, Device
from langchain_swarmkv.scheduling.fair_queue import RETURN_SECONDS


class Recorder:
    """A signal that remembers whether it was set."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True


class Bench:
    """A device and its clock; a claim here is as a thread would make it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device = Device("cpu", None, lambda: self.now)
        self.signals: dict[Claim, Recorder] = {}

    def ask(self, owner: str) -> Claim:
        signal = Recorder()
        claim = self.device.claim(owner, 1.0, signal, None)
        self.signals[claim] = signal
        self.device.look(claim)
        return claim

    def use(self, claim: Claim, seconds: float) -> None:
        assert self.device.look(claim) == 0.0
        assert self.device.try_hold(claim)
        self.now += seconds
        self.device.give_back(claim)


def test_a_claim_is_granted_when_the_one_before_is_given_back() -> None:
    """And its owner is woken; the one that asks while the device is free needs no waking."""
    bench = Bench()
    first, second = bench.ask("a"), bench.ask("b")
    assert first.state is ClaimState.GRANTED
    assert not bench.signals[first].is_set
    assert bench.device.look(second) == LIVENESS_SECONDS
    bench.use(first, 1.0)
    assert second.state is ClaimState.GRANTED
    assert bench.signals[second].is_set


def test_who_waits_is_told_how_long_the_lock_is_reserved() -> None:
    """It is woken at the release, and again at once if the first of those who wait leaves."""
    bench = Bench()
    short, long = bench.ask("short"), bench.ask("long")
    bench.use(short, 0.02)
    short = bench.ask("short")
    bench.use(long, 1.0)
    long, last = bench.ask("long"), bench.ask("long")
    bench.use(short, 0.02)
    assert long.state is ClaimState.WAITING
    assert bench.signals[long].is_set
    assert bench.device.look(long) == pytest.approx(RETURN_SECONDS)
    assert not bench.signals[last].is_set
    bench.device.give_back(long)
    assert bench.signals[last].is_set
    bench.now += RETURN_SECONDS
    assert bench.device.look(last) == 0.0


def test_giving_back_more_than_once_is_harmless() -> None:
    """Before it has joined, while it waits, and after the end: nobody else is disturbed."""
    bench = Bench()
    unborn = bench.device.claim("a", 1.0, Recorder(), None)
    bench.device.give_back(unborn)
    holder, waiter = bench.ask("a"), bench.ask("b")
    for _ in range(2):
        bench.device.give_back(waiter)
    assert holder.state is ClaimState.GRANTED
    assert bench.device.statistics().tasks_waiting == 1
    for _ in range(2):
        bench.device.give_back(holder)
    assert holder.state is ClaimState.ENDED
    assert bench.device.statistics().tasks_waiting == 0
