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
from services.detector.state import stragglers
from services.detector.state.stragglers import Change, PeerGroup, quantised
from shared.events.plans import Layout, Response, TaskChange
from shared.events.union import WorkerSlowed
from shared.messages.signals import StepReport
from tests.agent.kit import stage
from tests.detector.kit import Cluster, moved, plan
from tests.examples import examples

SIGMA = 0.05

Slowness = Callable[[int, int], float]
"""(rank, step) -> factor on the rank's time."""


def course(
    ranks: int,
    steps: int,
    slow: Slowness,
    *,
    seed: int = 1,
    scale: float = 1.0,
    compute_s: float = 1.0,
    group: PeerGroup | None = None,
    known: dict[str, float] | None = None,
) -> list[Change]:
    """Return what a group finds whose known slowdowns are those that it has found, and some from before."""
    draw, group, known = random.Random(seed), group or PeerGroup(), known or {}
    found = []
    for step in range(1, steps + 1):
        times = {f"n{rank}/0": scale * slow(rank, step) * math.exp(draw.gauss(0.0, SIGMA)) for rank in range(ranks)}
        for change in group.take(step, times, known, compute_s=compute_s):
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
@settings(max_examples=examples(15), deadline=None)
def test_the_unit_of_time_changes_nothing(seed: int, scale: float, ranks: int) -> None:
    as_it_is, scaled = (course(ranks, 150, one_slow(1.5), seed=seed, scale=by) for by in (1.0, scale))
    assert [(c.worker, c.step, c.slowdown) for c in as_it_is] == [(c.worker, c.step, c.slowdown) for c in scaled]


@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(6)))
@settings(max_examples=examples(15), deadline=None)
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
@settings(max_examples=examples(15), deadline=None)
def test_ranks_that_are_equally_slow_are_not_slow(seed: int, ranks: int, phases: list[tuple[int, int, float]]) -> None:
    """Also not a task that is suspended, evaluates, or waits for data as a whole."""

    def together(_: int, step: int) -> float:
        return math.prod(factor for begin, length, factor in phases if begin <= step < begin + length)

    assert course(ranks, 300, together, seed=seed) == []


@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 8), factor=st.floats(1.0, 1e6))
@settings(max_examples=examples(15), deadline=None)
def test_a_stall_of_fewer_steps_than_the_evidence_is_no_straggler(seed: int, length: int, factor: float) -> None:
    assert course(4, 200, one_slow(factor, end=101 + length), seed=seed) == []


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize(("compute_s", "is_found"), [(0.019, False), (0.05, True), (10.0, True)])
def test_a_burst_is_no_straggler_where_steps_are_short(ranks: int, compute_s: float, *, is_found: bool) -> None:
    """The longest burst that was seen on busy cores: 21 steps of 19 ms."""
    assert bool(course(ranks, 200, one_slow(2.0, end=122), compute_s=compute_s)) is is_found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("compute_s", [0.002, 0.019])
def test_a_rank_that_stays_slow_is_found_where_steps_are_short(ranks: int, compute_s: float) -> None:
    (change,) = course(ranks, 700, one_slow(1.5), compute_s=compute_s)
    assert change.worker == "n1/0"
    spent_s = (change.step - 100) * compute_s
    assert stragglers.EVIDENCE * stragglers.FULL_STEP_S <= spent_s + 1e-9
    assert spent_s <= 20 * stragglers.FULL_STEP_S


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_a_slowdown_does_not_hide_the_next_one(ranks: int) -> None:
    """What a slow rank's times were is no noise, neither of its own nor of its peers'."""

    def twice(rank: int, step: int) -> float:
        return (3.0 if 100 < step <= 164 else 1.3 if step > 228 else 1.0) if rank == 1 else 1.0

    found = course(ranks, 300, twice)
    again = next(change for change in found if change.step > 228)
    assert {change.worker for change in found} == {"n1/0"}
    assert again.slowdown == pytest.approx(1.3, rel=0.1)
    assert again.step <= 228 + (25 if ranks == 2 else 20)


@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_that_are_slow_by_turns_are_found_each_time(seed: int) -> None:
    """The next slowdown begins as soon as the last one is known to be over."""
    draw, group, known = random.Random(seed), PeerGroup(), dict[str, float]()
    slow, began, delays = "", 0, list[int]()
    for step in range(1, 1200):
        if not slow and not known and step > 40:
            slow, began = f"n{len(delays) % 2}/0", step
        names = ("n0/0", "n1/0")
        times = {name: math.exp(draw.gauss(0.0, SIGMA)) * (1.3 if name == slow else 1.0) for name in names}
        for change in group.take(step, times, known):
            if change.slowdown > 1.0:
                assert change.worker == slow
                delays.append(step - began + 1)
                known, slow = {change.worker: change.slowdown}, ""
            else:
                known = {}
    assert len(delays) >= 30
    assert max(delays) <= 25


def test_noise_that_reaches_the_limit_raises_it() -> None:
    """Rises of the evidence that come to nothing are noise: without them the limit would be too low."""
    draw, group = random.Random(5), PeerGroup()
    for step in range(2000):
        assert group.take(step, {f"n{rank}/0": math.exp(draw.gauss(0.0, 0.3)) for rank in range(8)}, {}) == []
    assert all(track.scale() == pytest.approx(0.32, rel=0.3) for track in group.tracks.values())


class BusyCores:
    """Times of ranks on busy cores, as ``benchmarks/detection_soak.py`` recorded them.

    Log ratios of two ranks have a deviation of 0.45; their autocorrelation is 0.24 after one step and 0.05 after ten.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._phase: dict[str, float] = {}

    def time(self, name: str) -> float:
        self._phase[name] = 0.85 * self._phase.get(name, 0.0) + self._draw.gauss(0.0, 0.084)
        return math.exp(self._phase[name] + self._draw.gauss(0.0, 0.27))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_how_much_times_vary_outlives_the_processes(ranks: int) -> None:
    """A recovery every 250 steps, as in the soak: each time the limit would be too low for a while."""
    for seed in range(8):
        busy, group = BusyCores(seed), PeerGroup()
        for step in range(5000):
            if step % 250 == 0:
                group.renew()
            times = {f"n{rank}/0": busy.time(f"n{rank}/0") for rank in range(ranks)}
            assert group.take(step, times, {}, compute_s=0.025) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_who_is_noisy_from_the_first_step_on_is_not_slow(ranks: int) -> None:
    """Before any noise is known: a rise that begins at once would go on without it."""
    for seed in range(60):
        busy, group = BusyCores(seed), PeerGroup()
        for step in range(100):
            times = {f"n{rank}/0": busy.time(f"n{rank}/0") for rank in range(ranks)}
            assert group.take(step, times, {}, compute_s=0.025) == []


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


def test_of_two_ranks_what_one_has_become_is_its_past_after_a_while() -> None:
    """One becomes faster, and stays so: that does not hide a slowdown of the other for ever."""

    def faster_then_slow(rank: int, step: int) -> float:
        return (0.7 if step > 100 else 1.0) if rank == 0 else (1.3 if step > 400 else 1.0)

    (change,) = course(2, 450, faster_then_slow)
    assert change.worker == "n1/0"
    assert 400 < change.step <= 425


def test_of_two_ranks_evidence_that_rises_slowly_is_not_forgotten() -> None:
    """Of each 25 steps 13 speak for a straggler, and 12 against: it takes more steps than the window has."""
    draw, group, found = random.Random(2), PeerGroup(), list[Change]()
    for step in range(1, 600):
        factor = 1.4 if step > 100 and (step - 101) % 25 % 2 == 0 else 1.0
        times = {"n0/0": math.exp(draw.gauss(0.0, 0.005)), "n1/0": factor * math.exp(draw.gauss(0.0, 0.005))}
        found += group.take(step, times, {change.worker: change.slowdown for change in found})
    assert found[0].worker == "n1/0"
    assert 100 + stragglers.WINDOW < found[0].step < 400


def of_stages(rank: int, step: int) -> float:
    """The stages take different times; all of them twice as long from some step on, and one is slow for a while."""
    return (1.0 + rank) * (2.0 if step > 60 else 1.0) * (1.3 if rank == 1 and 100 < step <= 200 else 1.0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_of_ranks_that_have_a_stage_each_the_one_that_changes_is_found(ranks: int) -> None:
    found = course(ranks, 300, of_stages, group=PeerGroup(unequal=True))
    began, over = [change for change in found if change.slowdown == 1.0 or change == found[0]]
    assert {change.worker for change in found} == {"n1/0"}
    assert 100 < began.step <= 120
    assert 200 < over.step <= 220


def test_of_unequal_ranks_those_that_have_other_work_are_not_slow() -> None:
    """The ranks of four stages change places."""
    group = PeerGroup(unequal=True)
    assert course(4, 100, lambda rank, step: 1.0 + rank, group=group) == []
    group.forget_work()
    assert course(4, 100, lambda rank, step: 4.0 - rank, group=group) == []


def test_an_unequal_rank_that_is_slow_as_its_work_becomes_another_is_found_to_be_over_later() -> None:
    group = PeerGroup(unequal=True)
    (over,) = course(4, 200, lambda rank, step: of_stages(rank, step + 100), group=group, known={"n1/0": 1.331})
    assert (over.worker, over.slowdown) == ("n1/0", 1.0)
    assert 100 < over.step <= 120


def test_unequal_ranks_of_whom_one_reports_nothing_keep_their_past() -> None:
    group, times = PeerGroup(unequal=True), {f"n{rank}/0": 1.0 + rank for rank in range(3)}
    for step in range(stragglers.LEAST_HISTORY):
        group.take(step, times, {})
    silent = stragglers.LEAST_HISTORY
    assert group.take(silent, {worker: times[worker] for worker in ("n0/0", "n1/0")}, {}) == []
    steps = range(silent + 1, silent + 10)
    found = [change for step in steps for change in group.take(step, times | {"n1/0": 4.0}, {})]
    assert [change.worker for change in found] == ["n1/0"]


def test_no_false_alarm_in_generated_step_times() -> None:
    """A short course of ``benchmarks/simulated_steps.py``."""
    found = false_alarms(ranks=100, hours=2.0, seed=7)
    assert (found.alarms, found.rank_hours) == (0, 200.0)
    for stage_ranks in (1, 4):
        assert false_alarms(ranks=40, hours=2.0, seed=7, stage_ranks=stage_ranks).alarms == 0
    delays = [straggler_delay(8, seed) for seed in range(10)]
    assert [delay.wrong for delay in delays] == [0] * 10
    assert max(delay.steps or 999 for delay in delays) <= 20


# ---- heartbeats


class Reports:
    """Four nodes whose workers report their steps; ``n2`` is slower from step 31 on."""

    def __init__(self, layout: Layout | None = None, compute_s: float = 2.0) -> None:
        self.cluster = Cluster(4, layout=layout)
        self.compute_s = compute_s
        self.draw = random.Random(3)
        self.steps: dict[str, list[StepReport]] = {name: [] for name in self.cluster.names}
        self.found: list[Any] = []

    def step(self, number: int, *, slow: float = 1.0, lost: tuple[str, ...] = (), window: int = 3) -> None:
        """One step of all; every heartbeat has the newest ``window`` steps, and those of ``lost`` nodes are lost."""
        for name in self.cluster.names:
            time_s = self.compute_s * math.exp(self.draw.gauss(0.0, 0.03)) * (slow if name == "n2" else 1.0)
            self.steps[name].append(StepReport(number, time_s, 4))
            if name not in lost:
                reports = self.steps[name][-window:]
                self.found += self.cluster.beat(name, number / 2, step=number, steps=reports).events

    def enter(self, generation: int, **sources: str) -> None:
        """Have the same workers go on in another generation; ``sources``: node -> of its rank, if not its memory."""
        next_stage = stage(generation, self.cluster.workers)
        members = [m.model_copy(update={"source": sources.get(m.node, m.source)}) for m in next_stage.members]
        change = TaskChange(
            task="gpt",
            reason="a deal",
            action="move",
            from_generation=generation - 1,
            survivors=self.cluster.workers,
            target=next_stage.model_copy(update={"members": members}),
        )
        name = f"p{generation}"
        self.cluster.fold(plan(name, "a worker slowed", change, response=Response.RECONFIGURE))
        self.cluster.fold(moved(name, generation, "restored", complete=True))
        self.cluster.generation = generation
        for steps in self.steps.values():
            steps.clear()

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


def test_the_time_of_all_micro_batches_of_a_step_is_what_counts() -> None:
    """A rank is slower for 21 steps: a burst of busy cores in steps of 19 ms, a straggler in long ones."""
    found = {}
    for compute_s in (0.019, 2.0):
        reports = Reports(compute_s=compute_s)
        for number in range(1, 90):
            reports.step(number, slow=2.0 if 30 < number <= 51 else 1.0)
        found[compute_s] = [event.slowdown > 1.0 for event in reports.slowed()]
    assert found == {0.019: [], 2.0: [True, False]}


def test_a_generation_of_the_same_processes_keeps_the_evidence() -> None:
    """A deal of micro-batches comes when seven steps have spoken for a straggler: it costs the steps of its warm-up."""
    reports = Reports()
    for number in range(1, 90):
        if number == 40:
            reports.enter(2)
        reports.step(number, slow=1.3 if number > 32 else 1.0)
    (event,) = reports.slowed()
    assert (event.worker, event.generation) == ("n2/0", 2)
    assert 40 < event.step <= 50


def test_the_evidence_against_a_process_is_none_against_the_next() -> None:
    """Also where the generation in which it came has ended before it reported a step."""
    reports = Reports()
    for number in range(1, 90):
        if number == 40:
            reports.enter(2, n2="take")
            reports.enter(3)
        reports.step(number, slow=1.3 if number > 32 else 1.0)
    (event,) = reports.slowed()
    assert (event.worker, event.generation) == ("n2/0", 3)
    assert event.step >= 41 + stragglers.EVIDENCE


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


def test_ranks_that_have_a_pipeline_stage_each_are_compared_over_their_past() -> None:
    """The worker of ``n2`` is slow; later all processes move on by a stage, and those of longer stages are not."""
    reports = Reports(Layout(tensor=1, pipeline=4, data=1, micro_batch=1))

    def step(number: int, stages: dict[str, float], slow: float) -> None:
        for name, time_s in stages.items():
            factor = time_s * (slow if name == "n2" else 1.0) * math.exp(reports.draw.gauss(0.0, 0.03))
            report = StepReport(number, factor, 4)
            reports.found += reports.cluster.beat(name, number / 2, step=number, steps=[report]).events

    for number in range(1, 60):
        step(number, {"n0": 1.0, "n1": 3.0, "n2": 0.5, "n3": 2.0}, 1.3 if number > 30 else 1.0)
    (event,) = reports.slowed()
    assert (event.worker, event.evidence["peers"]) == ("n2/0", 3)
    assert 30 < event.step <= 50


def test_peers_are_the_ranks_of_the_same_pipeline_stage() -> None:
    """The second stage takes three times as long as the first: none of its ranks is slow."""
    reports = Reports(Layout(tensor=1, pipeline=2, data=2, micro_batch=1))
    times = {"n0": 1.0, "n1": 1.0, "n2": 3.0, "n3": 3.0}
    for number in range(1, 60):
        for name, time_s in times.items():
            steps = [StepReport(number, time_s * math.exp(reports.draw.gauss(0.0, 0.03)), 4)]
            reports.found += reports.cluster.beat(name, number / 2, step=number, steps=steps).events
    assert reports.slowed() == []
