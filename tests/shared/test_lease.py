"""The lease of a service: who may take it, and that the appends of one holder alone count, in both databases."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.bus.connection import Bus
from shared.errors import LeaseLost
from shared.log.journal import Journal
from shared.log.lease import MOST_DOUBLINGS, RATE_WINDOW_S, Lease, LeaseWatch
from shared.log.log import EventLog
from shared.service.lease_keeper import LeaseKeeper
from tests.condition import until
from tests.shared.samples import node_joined

LEASE_S = 2.0

numbers = itertools.count(1)


@pytest.fixture
def log(log_url: str) -> Iterator[EventLog]:
    opened = EventLog(log_url)
    yield opened
    opened.close()


def test_an_append_without_the_newest_token_is_refused(log: EventLog) -> None:
    first = log.take_lease("planner", "a", None)
    assert first is not None
    log.append([node_joined(1)], lease=first)
    second = log.take_lease("planner", "b", log.leases()["planner"])
    assert second is not None
    assert second.token > first.token
    with pytest.raises(LeaseLost, match="another planner has taken the lease"):
        log.append([node_joined(2)], lease=first)
    with pytest.raises(LeaseLost):
        log.append([node_joined(1)], lease=first)  # not even what is there already
    with pytest.raises(LeaseLost):
        log.renew_lease(first)
    log.append([node_joined(3)], lease=second)
    log.append([node_joined(4)])  # the api needs no lease
    assert [record.event.event_id for record in log.read()] == [node_joined(n).event_id for n in (1, 3, 4)]
    assert log.verify().ok


async def test_a_holder_that_cannot_move_its_lease_on_says_so(tmp_path: Path, bus: Bus) -> None:
    with closing(EventLog(f"sqlite:///{tmp_path / 'log.db'}")) as log:
        keeper = LeaseKeeper(Journal(log, bus), "planner", 0.5)
        assert not keeper.is_held
        assert await keeper.seek()
        assert keeper.is_held
        with closing(sqlite3.connect(tmp_path / "log.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await until(lambda: not keeper.is_held)
            other.execute("ROLLBACK")
        await until(lambda: keeper.is_held)
        await keeper.give_back()
        assert not keeper.is_held


def test_a_lease_that_has_moved_is_not_taken(log: EventLog) -> None:
    first = log.take_lease("planner", "a", None)
    assert first is not None
    assert log.take_lease("planner", "b", None) is None
    seen = log.leases()["planner"]
    log.renew_lease(first, handled=7)
    assert log.take_lease("planner", "b", seen) is None
    found = log.leases()["planner"]
    assert (found.holder, found.handled, found.moved > seen.moved) == ("a", 7, True)
    log.release_lease(first)
    released = log.leases()["planner"]
    assert LeaseWatch(LEASE_S).may_take(released, 0.0)
    second = log.take_lease("planner", "b", released)
    assert second is not None
    assert second.handled == 7
    log.release_lease(first)
    assert log.leases()["planner"].holder == "b"


def stood_still_s(watch: LeaseWatch, lease: Lease, now_s: float) -> float:
    """How long an instance looks at a lease that does not move before it may take it."""
    began_s = now_s
    while not watch.may_take(lease, now_s):
        now_s += LEASE_S / 4
    return now_s - began_s


def test_takeovers_are_rare() -> None:
    watch, now_s = LeaseWatch(LEASE_S), 0.0
    for token in range(1, MOST_DOUBLINGS + 3):
        waited_s = stood_still_s(watch, Lease("planner", token, 0, "a"), now_s)
        now_s += waited_s
        assert waited_s == LEASE_S * 2 ** min(token - 1, MOST_DOUBLINGS)
    assert stood_still_s(watch, Lease("planner", token, 1, "a"), now_s + RATE_WINDOW_S + 1) == LEASE_S


def test_what_happened_between_two_looks_that_are_far_apart_is_not_known() -> None:
    watch, lease = LeaseWatch(LEASE_S), Lease("planner", 1, 0, "a")
    assert not watch.may_take(lease, 0.0)
    assert not watch.may_take(lease, 100.0)  # the database was away, for the holder, too
    assert stood_still_s(watch, lease, 100.5) == LEASE_S - 0.5


@dataclass
class Instance:
    """One instance of the service, with a clock of its own. ``alone_until_s``: by that clock."""

    name: str
    offset_s: float
    watch: LeaseWatch = field(default_factory=lambda: LeaseWatch(LEASE_S))
    lease: Lease | None = None
    seen: Lease | None = None
    may_take: bool = False
    began_s: float | None = None
    alone_until_s: float = float("-inf")


class Course:
    """Some instances over one real log: each step is one of theirs, or time that passes."""

    def __init__(self, log: EventLog) -> None:
        self.log, self.service, self.now_s = log, f"planner-{next(numbers)}", 0.0
        self.instances = [Instance("a", 0.0), Instance("b", -1000.0), Instance("c", 1e6)]
        self.tokens: list[int] = []
        self.newest: Lease | None = None

    def step(self, what: str, which: int) -> None:
        instance = self.instances[which]
        clock_s = self.now_s + instance.offset_s
        match what:
            case "look and take":
                self.step("look", which)
                self.step("take", which)
            case "look" if instance.lease is None:
                instance.seen = self.log.leases().get(self.service)
                instance.may_take = instance.watch.may_take(instance.seen, clock_s)
            case "take" if instance.lease is None and instance.may_take:
                instance.may_take = False
                instance.lease = self.log.take_lease(self.service, instance.name, instance.seen)
                if instance.lease is not None:
                    assert self.newest is None or instance.lease.token > self.newest.token
                    self.newest = instance.lease
                    instance.alone_until_s = clock_s + LEASE_S
            case "begin to renew" if instance.lease is not None:
                instance.began_s = clock_s
            case "renew" if instance.lease is not None and instance.began_s is not None:
                began_s, instance.began_s = instance.began_s, None
                if self.counts(instance, lambda lease: self.log.renew_lease(lease)):
                    instance.alone_until_s = began_s + LEASE_S
            case "append" if instance.lease is not None:
                token = instance.lease.token
                event = node_joined(next(numbers))
                if self.counts(instance, lambda lease: self.log.append([event], lease=lease)):
                    self.tokens.append(token)
            case "stop" if instance.lease is not None:
                self.log.release_lease(instance.lease)
                self.instances[which] = Instance(instance.name, instance.offset_s + 5.0)

    def counts(self, instance: Instance, change: object) -> bool:
        """Return whether a change of an instance was taken; it was exactly if that one has the newest token."""
        assert callable(change)
        try:
            change(instance.lease)
        except LeaseLost:
            assert instance.lease != self.newest
            instance.lease, instance.began_s, instance.watch = None, None, LeaseWatch(LEASE_S)
            return False
        assert instance.lease == self.newest
        return True


STEPS = ("look and take", "look and take", "look", "take", "begin to renew", "renew", "append", "stop")
WAITS_S = (0.0, 0.0, 0.0, 0.5, 0.9, 0.9, 2.0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example has a service of its own there
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.sampled_from(WAITS_S)), min_size=60))
def test_whatever_happens_one_instance_counts(log: EventLog, steps: list[tuple[str, int, float]]) -> None:
    course = Course(log)
    for what, which, wait_s in steps:
        course.now_s += wait_s
        course.step(what, which)
        alone = [
            instance.name
            for instance in course.instances
            if instance.lease is not None and course.now_s + instance.offset_s < instance.alone_until_s
        ]
        assert len(alone) <= 1, alone
    assert course.tokens == sorted(course.tokens)
