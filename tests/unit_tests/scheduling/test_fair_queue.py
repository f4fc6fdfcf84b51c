"""The fair queue: who goes next, by counting; time is a number here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_swarmkv.scheduling.fair_queue import RETURN_SECONDS, Entry, FairQueue, Owner


class Simulation:
    """One device; owners hold it one after the other, by the queue's choice."""

    def __init__(self) -> None:
        self.queue: FairQueue[Entry] = FairQueue()
        self.now = 0.0
        self.grants: list[str] = []
        self.held_seconds: dict[str, float] = {}

    def join(self, owner: Owner, weight: float = 1.0, share: float = 1.0) -> None:
        self.queue.join(Entry(owner, weight, share), self.now)

    def serve(self, hold_seconds: dict[str, float], *, busy: bool = True) -> str:
        """Grant, hold, release; a busy owner joins again at once, before the next grant."""
        entry = self.queue.take(self.now)
        assert entry is not None
        name, held_seconds = entry.owner.name, hold_seconds[entry.owner.name]
        self.now += held_seconds
        self.grants.append(name)
        self.held_seconds[name] = self.held_seconds.get(name, 0.0) + held_seconds
        self.queue.finish(entry, held_seconds, self.now)
        if busy:
            self.join(entry.owner, entry.weight, entry.share)
        return name


def test_equals_go_in_the_order_of_arrival() -> None:
    """Without use, the first to come is the first to go; also within one owner."""
    queue: FairQueue[Entry] = FairQueue()
    shared = Owner("a")
    entries = [Entry(owner, 1.0) for owner in (Owner("b"), shared, Owner("c"), shared)]
    for entry in entries:
        queue.join(entry, 0.0)
    assert [queue.take(0.0) for _ in range(5)] == [*entries, None]


def test_held_time_is_shared_by_weight() -> None:
    """Weights 3 and 1 with equal steps: three steps to one."""
    simulation = Simulation()
    simulation.join(Owner("a"), weight=3.0)
    simulation.join(Owner("b"), weight=1.0)
    for _ in range(40):
        simulation.serve({"a": 1.0, "b": 1.0})
    assert simulation.grants.count("a") == 30


def test_equal_steps_interleave_one_by_one() -> None:
    """Two owners with the same weight and equal steps take turns."""
    simulation = Simulation()
    simulation.join(Owner("a"))
    simulation.join(Owner("b"))
    for _ in range(10):
        simulation.serve({"a": 1.0, "b": 1.0})
    assert simulation.grants == ["a", "b"] * 5


def test_short_steps_make_up_for_a_long_one() -> None:
    """Time is shared, not turns: fifty steps of 20 ms weigh as much as a prefill of 1 s."""
    simulation = Simulation()
    simulation.join(Owner("prefill"))
    simulation.join(Owner("decode"))
    for _ in range(102):
        simulation.serve({"prefill": 1.0, "decode": 0.02})
    assert simulation.grants.count("prefill") == 2


def test_who_takes_a_quarter_goes_four_times_as_often() -> None:
    """Cores times seconds are shared: four steps on one core of four weigh as one on all."""
    simulation = Simulation()
    simulation.join(Owner("wide"))
    simulation.join(Owner("narrow"), share=0.25)
    for _ in range(50):
        simulation.serve({"wide": 1.0, "narrow": 1.0})
    assert simulation.grants.count("wide") == 10


def test_time_goes_on_while_several_hold_the_device() -> None:
    """Whoever was idle starts level with those that held halves of it together."""
    simulation = Simulation()
    queue = simulation.queue
    entries = [Entry(Owner(name), 1.0, 0.5) for name in "ab"]
    for entry in entries:
        queue.join(entry, 0.0)
    assert [queue.take(0.0), queue.take(0.0)] == entries
    for entry in entries:
        queue.finish(entry, 10.0, 10.0)
    assert queue.virtual_seconds == pytest.approx(7.5)  # 5 s of two, then 5 s of one
    newcomer = Entry(Owner("c"), 1.0)
    queue.join(newcomer, 10.0)
    assert newcomer.owner.virtual_seconds == queue.virtual_seconds


def test_a_newcomer_has_no_credit() -> None:
    """One who comes after a hundred seconds shares from then on, and does not catch up."""
    simulation = Simulation()
    simulation.join(Owner("old"))
    for _ in range(100):
        simulation.serve({"old": 1.0})
    simulation.join(Owner("new"))
    for _ in range(10):
        simulation.serve({"old": 1.0, "new": 1.0})
    assert simulation.grants[100:].count("new") == 5


def test_an_idle_owner_saves_up_nothing() -> None:
    """One that was idle while the other worked starts level with it."""
    simulation = Simulation()
    idle = Owner("idle")
    simulation.join(idle)
    simulation.serve({"idle": 1.0}, busy=False)
    simulation.join(Owner("busy"))
    for _ in range(100):
        simulation.serve({"busy": 1.0})
    simulation.join(idle)
    for _ in range(10):
        simulation.serve({"busy": 1.0, "idle": 1.0})
    assert simulation.grants[101:].count("idle") == 5


def test_a_stream_of_new_names_starves_nobody() -> None:
    """Beside two owners that are always new, a regular one gets its third."""
    simulation = Simulation()
    names = [str(number) for number in range(100)]
    newcomers = iter(names)
    for owner in (Owner("regular"), Owner(next(newcomers)), Owner(next(newcomers))):
        simulation.join(owner)
    regular = simulation.queue.waiting[0].owner
    for _ in range(90):
        name = simulation.serve(dict.fromkeys(["regular", *names], 1.0), busy=False)
        simulation.join(regular if name == "regular" else Owner(next(newcomers)))
    assert 28 <= simulation.grants.count("regular") <= 32


def owed_owner(simulation: Simulation) -> Owner:
    """Let `owed` release the lock while it is owed more time than `other`, which waits."""
    owed, other = Owner("owed"), Owner("other")
    simulation.join(other)
    simulation.join(owed)
    hold_seconds = {"owed": 0.1, "other": 1.0}
    assert [simulation.serve(hold_seconds) for _ in range(3)] == ["other", "owed", "owed"]
    simulation.serve(hold_seconds, busy=False)
    return owed


def test_the_lock_waits_a_moment_for_an_owner_that_is_owed_it() -> None:
    """It is granted to nobody else before that moment has passed, then to the next."""
    simulation = Simulation()
    owed_owner(simulation)
    assert simulation.queue.reserved_seconds(simulation.now) == pytest.approx(RETURN_SECONDS)
    assert simulation.queue.take(simulation.now + RETURN_SECONDS / 2) is None
    simulation.now += RETURN_SECONDS
    assert simulation.queue.reserved_seconds(simulation.now) is None
    assert simulation.serve({"other": 1.0}) == "other"


def test_the_lock_waits_for_nobody_who_was_late_before() -> None:
    """An owner that came late is not waited for again until it has come quickly."""
    simulation = Simulation()
    owed = owed_owner(simulation)
    simulation.now += 2 * RETURN_SECONDS
    simulation.join(owed)
    assert simulation.serve({"owed": 0.1}, busy=False) == "owed"
    assert simulation.queue.reserved_seconds(simulation.now) is None
    assert simulation.serve({"other": 1.0}) == "other"


def test_a_lock_that_nobody_wants_is_free_at_once() -> None:
    """An owner that is owed time is not waited for when nobody waited as it released."""
    simulation = Simulation()
    owed = Owner("owed")
    simulation.join(owed)
    for _ in range(3):
        simulation.serve({"owed": 0.1})
    simulation.serve({"owed": 0.1}, busy=False)
    simulation.join(Owner("new", virtual_seconds=1000.0))
    assert owed.returns_at_once
    assert simulation.queue.reserved_seconds(simulation.now) is None
    assert simulation.serve({"new": 1.0}) == "new"


def test_a_third_owner_that_is_owed_more_need_not_wait() -> None:
    """A reservation holds back those only that have had more."""
    simulation = Simulation()
    owed_owner(simulation)
    simulation.join(Owner("third", released_at=simulation.now))
    assert simulation.queue.reserved_seconds(simulation.now) is None
    assert simulation.serve({"third": 1.0}) == "third"


OWNERS = st.lists(
    st.tuples(st.floats(0.1, 10.0), st.lists(st.floats(0.01, 2.0), min_size=1, max_size=4)),
    min_size=2,
    max_size=5,
)


@given(owners=OWNERS)
def test_busy_owners_never_drift_apart(
    owners: list[tuple[float, list[float]]],
) -> None:
    """Held / weight of any two differs by no more than one step of each, whatever the steps."""
    simulation = Simulation()
    accounts = [Owner(str(index)) for index in range(len(owners))]
    for account, (weight, _) in zip(accounts, owners, strict=True):
        simulation.join(account, weight)
    for turn in range(60):
        simulation.serve({str(i): steps[turn % len(steps)] for i, (_, steps) in enumerate(owners)})
    shares = [
        simulation.held_seconds.get(str(i), 0.0) / weight for i, (weight, _) in enumerate(owners)
    ]
    largest_step = max(max(steps) / weight for weight, steps in owners)
    # The first return is not known to be quick, so that turn may be lost: two steps.
    assert max(shares) - min(shares) <= 2 * largest_step + 1e-9
