"""Slow workers are found soon, and only they: the sequential test, its properties, and what heartbeats make of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated_steps import false_alarms, straggler_delay
from services.detector import stragglers
from services.detector.stragglers import Change, PeerGroup, quantised
from shared.events import WorkerSlowed
from shared.plans import Layout
from shared.signals import StepReport
from tests.detector.kit import Cluster

SIGMA = 0.05

Slowness = Callable[[int, int], float]
"""(rank, step) -> factor on the rank's time."""


def course(ranks: int, steps: int, slow: Slowness, *, seed: int = 1, scale: float = 1.0) -> list[Change]:
    """Return what a group finds whose known slowdowns are those that it has found."""
    draw, group, known = random.Random(seed), PeerGroup(), dict[str, float]()
    found = []
    for step in range(1, steps + 1):
        times = {f"n{rank}/0": scale * slow(rank, step) * math.exp(draw.gauss(0.0, SIGMA)) for rank in range(ranks)}
        for change in group.take(step, times, known):
            found.append(change)
            known = (
                {**known, change.worker: change.slowdown}
                if change.slowdown > 1.0
                else {worker: value for worker, value in known.items() if worker != change.worker}
            )
    return found


def one_slow(factor: float, begin: int = 101, end: int = 10**9) -> Slowness:
    return lambda rank, step: factor if rank == 1 and begin <= step < end else 1.0


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_a_slow_rank_is_found_within_20_steps_and_its_recovery_too(ranks: int) -> None:
    found = course(ranks, 300, one_slow(1.3, end=201))
    began, over = [change for change in found if change.slowdown == 1.0 or change == found[0]]
    assert began.worker == "n1/0"
    assert began.slowdown == pytest.approx(1.3, rel=0.1)
    assert 100 < began.step <= 120
    assert over.worker == "n1/0"
    assert 200 < over.step <= 220


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-4, 0.37, 1.0, 2.0, 1e3]), ranks=st.integers(2, 9))
@settings(max_examples=15, deadline=None)
def test_the_unit_of_time_changes_nothing(seed: int, scale: float, ranks: int) -> None:
    as_it_is, scaled = (course(ranks, 150, one_slow(1.5), seed=seed, scale=by) for by in (1.0, scale))
    assert [(c.worker, c.step, c.slowdown) for c in as_it_is] == [(c.worker, c.step, c.slowdown) for c in scaled]


@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(6)))
@settings(max_examples=15, deadline=None)
def test_the_order_of_ranks_changes_nothing(seed: int, order: list[int]) -> None:
    draw, group, other = random.Random(seed), PeerGroup(), PeerGroup()
    for step in range(150):
        times = [math.exp(draw.gauss(0.0, SIGMA)) * (1.4 if rank == 2 and step > 50 else 1.0) for rank in range(6)]
        one = group.take(step, {f"w{rank}": times[rank] for rank in range(6)}, {})
        two = other.take(step, {f"w{rank}": times[rank] for rank in order}, {})
        assert sorted(one, key=lambda change: change.worker) == sorted(two, key=lambda change: change.worker)


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 8),
    phases=st.lists(st.tuples(st.integers(1, 250), st.integers(1, 100), st.floats(0.2, 20.0)), max_size=4),
)
@settings(max_examples=15, deadline=None)
def test_ranks_that_are_equally_slow_are_not_slow(seed: int, ranks: int, phases: list[tuple[int, int, float]]) -> None:
    """Also not a task that is suspended, evaluates, or waits for data as a whole."""

    def together(_: int, step: int) -> float:
        return math.prod(factor for begin, length, factor in phases if begin <= step < begin + length)

    assert course(ranks, 300, together, seed=seed) == []


@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 10), factor=st.floats(1.0, 1e6))
@settings(max_examples=15, deadline=None)
def test_a_stall_of_fewer_steps_than_the_evidence_is_no_straggler(seed: int, length: int, factor: float) -> None:
    assert course(4, 200, one_slow(factor, end=101 + length), seed=seed) == []


def test_a_slowdown_that_grows_is_published_again_and_noise_is_not() -> None:
    found = course(
        4, 600, lambda rank, step: (1.0 if step <= 100 else 1.35 if step <= 300 else 2.0) if rank == 1 else 1.0
    )
    assert len(found) <= 4  # it is estimated anew while it grows
    assert {change.worker for change in found} == {"n1/0"}
    assert found[0].slowdown == quantised(1.35)
    assert found[-1].slowdown == quantised(2.0)


def test_a_slowdown_below_the_quantum_is_not_published() -> None:
    assert course(4, 1000, one_slow(1.1)) == []
    assert quantised(1.0) == 1.0
    assert stragglers.LEAST_PUBLISHED == quantised(stragglers.LEAST_PUBLISHED)


def test_of_two_ranks_the_one_that_becomes_faster_makes_the_other_not_slow() -> None:
    assert course(2, 300, one_slow(0.7)) == []


def test_no_false_alarm_in_generated_step_times() -> None:
    """A short course of ``benchmarks/simulated_steps.py``."""
    found = false_alarms(ranks=100, hours=2.0, seed=7)
    assert (found.alarms, found.rank_hours) == (0, 200.0)
    delays = [straggler_delay(8, seed) for seed in range(10)]
    assert [delay.wrong for delay in delays] == [0] * 10
    assert max(delay.steps or 999 for delay in delays) <= 20


# ---- heartbeats


class Reports:
    """Four nodes whose workers report their steps; ``n2`` is slower from step 31 on."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.cluster = Cluster(4, layout=layout)
        self.draw = random.Random(3)
        self.steps: dict[str, list[StepReport]] = {name: [] for name in self.cluster.names}
        self.found: list[Any] = []

    def step(self, number: int, *, slow: float = 1.0, lost: tuple[str, ...] = (), window: int = 3) -> None:
        """One step of all; every heartbeat has the newest ``window`` steps, and those of ``lost`` nodes are lost."""
        for name in self.cluster.names:
            time_s = 2.0 * math.exp(self.draw.gauss(0.0, 0.03)) * (slow if name == "n2" else 1.0)
            self.steps[name].append(StepReport(number, time_s, 4))
            if name not in lost:
                reports = self.steps[name][-window:]
                self.found += self.cluster.beat(name, number / 2, step=number, steps=reports).events

    def slowed(self) -> list[WorkerSlowed]:
        return [event for event in self.found if isinstance(event, WorkerSlowed)]


def test_a_slow_worker_is_in_the_log_once() -> None:
    reports = Reports()
    for number in range(1, 90):
        reports.step(number, slow=1.3 if number > 30 else 1.0)
    (event,) = reports.slowed()
    assert (event.node, event.worker, event.rank, event.generation) == ("n2", "n2/0", 2, 1)
    assert 30 < event.step <= 50
    assert event.slowdown == pytest.approx(1.3, rel=0.1)
    assert reports.cluster.monitor.state.slowed == {"n2/0": event.slowdown}


def test_lost_and_overlapping_heartbeats_neither_double_nor_invent_steps() -> None:
    """A heartbeat in four is lost, each of another node: what is found is what is found without."""
    whole, lossy = Reports(), Reports()
    for number in range(1, 90):
        slow = 1.3 if number > 30 else 1.0
        whole.step(number, slow=slow)
        lossy.step(number, slow=slow, lost=(f"n{number % 4}",))
    (one,), (other,) = whole.slowed(), lossy.slowed()
    assert (one.worker, one.step, one.slowdown, one.event_id) == (
        other.worker,
        other.step,
        other.slowdown,
        other.event_id,
    )


def test_a_node_whose_heartbeats_stay_away_delays_the_others_by_four_steps() -> None:
    reports = Reports()
    for number in range(1, 70):
        reports.step(number, slow=1.3 if number > 30 else 1.0, lost=("n0",) if number > 20 else ())
    (event,) = reports.slowed()
    assert event.worker == "n2/0"


def test_a_detector_that_starts_anew_neither_repeats_nor_forgets() -> None:
    reports = Reports()
    for number in range(1, 61):
        reports.step(number, slow=1.3 if number > 30 else 1.0)
    (event,) = reports.slowed()
    again = Reports()
    again.cluster.fold(event)
    for number in range(61, 121):
        again.step(number, slow=1.3 if number <= 90 else 1.0)
    (over,) = again.slowed()
    assert (over.worker, over.slowdown) == ("n2/0", 1.0)
    assert 90 < over.step <= 110
    assert again.cluster.monitor.state.slowed == {}


def test_peers_are_the_ranks_of_the_same_pipeline_stage() -> None:
    """The second stage takes three times as long as the first: none of its ranks is slow."""
    reports = Reports(Layout(tensor=1, pipeline=2, data=2, micro_batch=1))
    times = {"n0": 1.0, "n1": 1.0, "n2": 3.0, "n3": 3.0}
    for number in range(1, 60):
        for name, time_s in times.items():
            steps = [StepReport(number, time_s * math.exp(reports.draw.gauss(0.0, 0.03)), 4)]
            reports.found += reports.cluster.beat(name, number / 2, step=number, steps=steps).events
    assert reports.slowed() == []
