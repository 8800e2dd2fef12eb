"""Limits for hangs by the recent times without progress of each rank in each phase."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detector.state.progress_gaps import (
    FIRST_STEPS,
    LAYOUTS,
    WARM_UP,
    WINDOW,
    GapLimits,
    HangLimit,
    ProgressGaps,
    ProgressHistory,
)
from shared.events.plans import Layout, TaskChange
from shared.events.severities import ErrorKind
from tests.agent.kit import stage
from tests.detector.hanging import stopped_from
from tests.detector.kit import LIMITS, Cluster, moved, only_error, plan, restart_plan
from tests.examples import examples

BOUNDS = GapLimits(floor_s=0.5, bound_s=120.0, latency_s=0.35)
STEPS = FIRST_STEPS + WARM_UP
FLOOR_S = LIMITS.stalls.hang_floor_s
LATENCY_S = LIMITS.stalls.latency_s

TIMES = st.lists(st.floats(0.001, 300.0), min_size=WARM_UP, max_size=2 * WINDOW)


def learnt(steps_s: list[float], gaps_s: list[float], first_s: float = 1.0) -> ProgressGaps:
    """What is known after some first steps, these steps, and these gaps of ``w`` in ``compute``."""
    gaps = ProgressGaps()
    gaps.begin({"w": 0})
    for number in range(1, FIRST_STEPS + 1):
        gaps.note("w", "compute", first_s)
        gaps.note_step(number, first_s)
    for number, step_s in enumerate(steps_s, FIRST_STEPS + 1):
        gaps.note_step(number, step_s)
    for seconds in gaps_s:
        gaps.note("w", "compute", seconds)
    return gaps


def limit(gaps: ProgressGaps, phase: str = "compute", bounds: GapLimits = BOUNDS) -> HangLimit:
    found = gaps.limit("w", phase, bounds)
    assert found is not None
    return found


@settings(deadline=None, derandomize=True)
@given(TIMES, TIMES)
def test_limits_are_within_their_bounds_and_above_what_was_seen(steps_s: list[float], gaps_s: list[float]) -> None:
    found = limit(learnt(steps_s, gaps_s))
    assert BOUNDS.floor_s <= found.limit_s <= BOUNDS.bound_s
    assert found.limit_s >= min(BOUNDS.bound_s, max(gaps_s[-WINDOW:]))


@settings(deadline=None, derandomize=True)
@given(TIMES, TIMES, st.floats(0.01, 100.0))
def test_limits_have_no_scale_of_their_own(steps_s: list[float], gaps_s: list[float], scale: float) -> None:
    free = GapLimits(0.0, math.inf, 0.0)
    one = limit(learnt(steps_s, gaps_s), bounds=free)
    other = limit(learnt([s * scale for s in steps_s], [s * scale for s in gaps_s]), bounds=free)
    assert other.limit_s == pytest.approx(scale * one.limit_s)


@settings(deadline=None, derandomize=True)
@given(st.floats(0.1, 20.0), st.floats(0.001, 1.0))
def test_a_hang_is_found_within_twice_the_steps_of_the_recent_past(step_s: float, part: float) -> None:
    found = limit(learnt([step_s] * WINDOW, [part * step_s] * WINDOW))
    assert found.limit_s <= max(BOUNDS.floor_s, 2.0 * step_s - BOUNDS.latency_s, 1.5 * part * step_s) + 1e-9


def test_a_short_phase_of_a_long_step_has_a_limit_of_its_own() -> None:
    gaps = learnt([20.0] * WARM_UP, [0.6] * WARM_UP)
    found = limit(gaps)
    assert (found.source, found.quantile_s, found.factor, found.samples) == ("phase", 0.6, 3.0, WARM_UP)
    assert found.limit_s == pytest.approx(1.8)
    assert limit(gaps, "reduce") == HangLimit(39.65, "step", 20.0, 2.0, WARM_UP)


def test_too_little_is_known_at_first() -> None:
    gaps = learnt([1.0] * (WARM_UP - 1), [1.0] * WARM_UP)
    assert gaps.limit("w", "compute", BOUNDS) is None
    gaps.note_step(STEPS - 1, 1.0)
    assert gaps.limit("w", "compute", BOUNDS) is None
    gaps.note_step(STEPS, 1.0)
    assert gaps.limit("w", "compute", BOUNDS) is not None


def test_first_steps_that_tune_kernels_are_forgotten() -> None:
    assert limit(learnt([0.1] * WARM_UP, [0.1] * WARM_UP, first_s=60.0)).limit_s == BOUNDS.floor_s


def test_a_stall_that_came_once_comes_again() -> None:
    gaps = learnt([1.0] * WARM_UP, [0.5] * WARM_UP)
    before = limit(gaps)
    gaps.note("w", "begun", 8.0)
    assert limit(gaps) == before
    assert limit(gaps, "begun") == HangLimit(12.0, "longest", None, 1.5, 1)
    for _ in range(2400):  # ten minutes
        gaps.note("w", "begun", 0.01)
    assert limit(gaps, "begun").limit_s >= 8.0
    for _ in range(12 * 2400):
        gaps.note("w", "begun", 0.01)
    assert limit(gaps, "begun").limit_s == BOUNDS.floor_s


@pytest.mark.parametrize("deviation", [0.1, 0.5])
def test_gaps_of_a_log_normal_distribution_are_no_hangs(deviation: float) -> None:
    draw = random.Random(7)
    gaps = learnt([400.0] * WINDOW, [draw.lognormvariate(0.0, deviation) for _ in range(WINDOW)])
    for _ in range(20_000):
        seconds = draw.lognormvariate(0.0, deviation)
        assert seconds <= limit(gaps).limit_s
        gaps.note("w", "compute", seconds)


@settings(deadline=None, derandomize=True, max_examples=examples(50))
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([0.3, 0.9, 1.0, 1.1, 3.0, 20.0]), min_size=2, max_size=5))
def test_generations_of_any_speed_with_slow_first_steps_have_no_hangs(seed: int, speeds: list[float]) -> None:
    draw, gaps = random.Random(seed), ProgressGaps()
    for speed in speeds:
        gaps.begin({"w": 0})
        for number in range(1, draw.choice([FIRST_STEPS, STEPS, WINDOW])):
            first = draw.uniform(2.0, 30.0) if number <= 3 else 1.0
            step_s = 10.0 * speed * first * draw.lognormvariate(0.0, 0.1)
            found = gaps.limit("w", "compute", BOUNDS)
            assert found is None or 0.25 * step_s <= found.limit_s
            gaps.note("w", "compute", 0.25 * step_s)
            gaps.note_step(number, step_s)


# ---- in the detector


def trained(cluster: Cluster, step_s: float, **gaps_s: float) -> None:
    """All ranks do enough steps, a heartbeat each."""
    for step in range(1, STEPS + 1):
        for name in cluster.names:
            cluster.beat(name, step * 0.01, step=step, step_s=step_s, steps_timed=step, gaps_s=gaps_s)


def stands(cluster: Cluster, **age_s: float) -> list[Any]:
    """A tick at which ``n1`` computes, and the others wait for it, without progress for these times."""
    for name in cluster.names:
        phase = "compute" if name == "n1" else "reduce"
        cluster.beat(name, 500.0, step=STEPS, phase=phase, progress_age_s=age_s[name])
    return cluster.tick(500.0)


def test_a_hang_is_judged_by_the_phase_of_its_rank() -> None:
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5, reduce=10.0)
    assert stands(cluster, n0=4.4, n1=4.4, n2=4.4) == []
    hang = only_error(stands(cluster, n0=4.6, n1=4.6, n2=4.6))
    assert (hang.kind, hang.worker) == (ErrorKind.HANG, "n1/0")
    shown = {name: value for name, value in hang.evidence.items() if name.startswith("limit_")}
    assert shown == {
        "limit_s": 4.5,
        "limit_source": "phase",
        "limit_samples": WARM_UP + 1,
        "limit_quantile_s": 1.5,
        "limit_factor": 3.0,
    }


def test_a_data_parallel_rank_that_computes_for_too_long_is_found_while_others_make_progress() -> None:
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5, reduce=10.0)
    hang = only_error(stands(cluster, n0=0.1, n1=4.6, n2=0.1))
    assert (hang.kind, hang.worker, hang.evidence["stalled_s"]) == (ErrorKind.HANG, "n1/0", 4.6)


@pytest.mark.parametrize(("peer_step", "found"), [(STEPS, ["n1/0"]), (STEPS + 1, ["n1/0"]), (STEPS - 1, [])])
def test_in_its_first_micro_batch_a_rank_may_wait_for_the_parameters_of_one_that_has_done_fewer_steps(
    peer_step: int, found: list[str]
) -> None:
    cluster = Cluster()
    trained(cluster, 20.0, begun=1.5, compute=1.5)
    for name, step, phase, age_s in [
        ("n0", peer_step, "update", 0.1),
        ("n1", STEPS, "begun", 4.6),
        ("n2", STEPS, "begun", 0.1),
    ]:
        cluster.beat(name, 500.0, step=step, phase=phase, progress_age_s=age_s)
    assert [(e.kind, e.worker) for e in cluster.tick(500.0)] == [(ErrorKind.HANG, worker) for worker in found]


def test_a_rank_that_hangs_while_others_make_progress_is_asked_for_its_stacks() -> None:
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5)
    for age_s, asked in [(2.2, False), (2.3, True)]:
        assert stands(cluster, n0=0.1, n1=age_s, n2=0.1) == []
        assert ("gpt" in cluster.monitor.state.standstills) is asked


@pytest.mark.parametrize(("step_s", "limit_s"), [(20.0, 40.0 - LATENCY_S), (0.1, FLOOR_S)])
def test_a_process_is_stopped_for_no_longer_than_its_steps_may_take(step_s: float, limit_s: float) -> None:
    cluster = Cluster()
    trained(cluster, step_s)
    limit_s = max(limit_s, cluster.monitor.limits.stalls.stop_floor_s)
    quarters_s = 0.25 * int(limit_s / 0.25)
    assert stopped_from(cluster, "n1", 500.0, 500.0 + quarters_s) == []
    hang = only_error(stopped_from(cluster, "n1", 500.0 + quarters_s + 0.25, 500.5 + quarters_s))
    assert (hang.kind, hang.worker) == (ErrorKind.HANG, "n1/0")
    assert hang.evidence["limit_s"] == pytest.approx(limit_s)


def test_a_rank_beside_one_in_a_slow_region_may_wait_for_it() -> None:
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5)
    for name, phase, age_s in [("n0", "aside", 30.0), ("n1", "compute", 30.0), ("n2", "reduce", 30.0)]:
        cluster.beat(name, 500.0, step=STEPS, phase=phase, progress_age_s=age_s)
    assert cluster.tick(500.0) == []


def test_no_limit_is_below_the_floor() -> None:
    cluster = Cluster()
    trained(cluster, 0.05, compute=0.005)
    assert stands(cluster, n0=FLOOR_S, n1=FLOOR_S, n2=FLOOR_S) == []
    late_s = FLOOR_S + 0.1
    assert only_error(stands(cluster, n0=late_s, n1=late_s, n2=late_s)).evidence["limit_source"] == "floor"


def test_agents_that_report_no_gaps_have_the_limit_of_the_steps() -> None:
    cluster = Cluster()
    trained(cluster, 4.0)
    limit_s = 8.0 - LATENCY_S
    assert stands(cluster, n0=limit_s, n1=limit_s, n2=limit_s) == []
    late_s = limit_s + 0.1
    assert only_error(stands(cluster, n0=late_s, n1=late_s, n2=late_s)).evidence["limit_source"] == "step"


def resumed(cluster: Cluster, generation: int, workers: list[str], **fields: Any) -> None:
    """The task has begun a generation on these workers, by a plan of its own."""
    name = f"p{generation}"
    target = stage(generation, workers)
    target = target.model_copy(update={"layout": fields.pop("layout", target.layout)})
    change = TaskChange(task="gpt", reason="restart", action="move", from_generation=generation - 1, target=target)
    cluster.fold(plan(name, f"cause of {name}", change), moved(name, generation, "restored", complete=True))
    cluster.generation = generation


def recovered(cluster: Cluster) -> None:
    """The survivors of a fault have finished its step alone, and all go on: two further generations."""
    resumed(cluster, cluster.generation + 1, cluster.workers[:2])
    resumed(cluster, cluster.generation + 1, cluster.workers)


def first_steps(cluster: Cluster, step_s: float, steps: int = FIRST_STEPS, **gaps_s: float) -> None:
    """All ranks do the first steps of a generation."""
    for timed in range(1, steps + 1):
        for name in cluster.names:
            cluster.beat(name, 450.0 + timed, step=timed, step_s=step_s, steps_timed=timed, gaps_s=gaps_s)


def test_a_recovery_keeps_the_limits_of_its_layout() -> None:
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5, reduce=10.0)
    recovered(cluster)
    first_steps(cluster, 20.0, compute=1.5)
    assert stands(cluster, n0=4.4, n1=4.4, n2=4.4) == []
    hang = only_error(stands(cluster, n0=4.6, n1=4.6, n2=4.6))
    assert (hang.generation, hang.worker, hang.evidence["limit_s"]) == (3, "n1/0", 4.5)


def test_the_first_steps_of_a_generation_have_the_limit_of_the_mean() -> None:
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5, reduce=10.0)
    recovered(cluster)
    first_steps(cluster, 30.0, FIRST_STEPS - 1, compute=40.0)
    assert stands(cluster, n0=89.9, n1=89.9, n2=89.9) == []
    assert only_error(stands(cluster, n0=90.1, n1=90.1, n2=90.1)).evidence["limit_source"] == "mean"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=1, pipeline=3, data=1, micro_batch=1),
        Layout(tensor=3, pipeline=1, data=1, micro_batch=1),
        Layout(tensor=1, pipeline=1, data=3, micro_batch=2),
    ],
)
def test_another_layout_begins_with_the_limit_of_the_mean(layout: Layout) -> None:
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5)
    resumed(cluster, 2, cluster.workers, layout=layout)
    first_steps(cluster, 20.0, compute=1.5)
    assert stands(cluster, n0=4.6, n1=4.6, n2=4.6) == []
    assert only_error(stands(cluster, n0=60.1, n1=60.1, n2=60.1)).evidence["limit_source"] == "mean"


@pytest.mark.parametrize(("pipeline", "source"), [(1, "phase"), (3, "step")])
def test_a_worker_in_another_pipeline_stage_has_the_limit_of_the_steps(pipeline: int, source: str) -> None:
    """Its phases take other times there. Among the replicas of a stage, a recovery deals the workers anew."""
    layout = Layout(tensor=1, pipeline=pipeline, data=3 // pipeline, micro_batch=1)
    cluster = Cluster(layout=layout)
    trained(cluster, 20.0, compute=1.5)
    resumed(cluster, 2, [*cluster.workers[1:], cluster.workers[0]], layout=layout)
    for timed in range(1, FIRST_STEPS + 1):
        cluster.beat("n1", 450.0 + timed, rank=0, step=timed, step_s=20.0, steps_timed=timed)
    for rank, name in enumerate(["n1", "n2", "n0"]):
        cluster.beat(name, 500.0, rank=rank, step=STEPS, progress_age_s=100.0)
    assert only_error(cluster.tick(500.0)).evidence["limit_source"] == source


@pytest.mark.parametrize(("step_s", "source", "limit_s"), [(19.0, "phase", 4.5), (30.0, "step", 60.0 - LATENCY_S)])
def test_a_slower_generation_has_the_limit_of_its_steps(step_s: float, source: str, limit_s: float) -> None:
    """Another node, or another task beside it, has made the layout slower than nearly all steps before."""
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5)
    recovered(cluster)
    first_steps(cluster, step_s, compute=1.5)
    evidence = only_error(stands(cluster, n0=100.0, n1=100.0, n2=100.0)).evidence
    assert (evidence["limit_source"], evidence["limit_s"]) == (source, pytest.approx(limit_s))


def test_a_slower_generation_remembers_the_longest_gap() -> None:
    gaps = learnt([1.0] * WARM_UP, [4.0] * WARM_UP)
    gaps.begin({"w": 0})
    for number in range(1, FIRST_STEPS + 1):
        gaps.note_step(number, 3.0)
    assert limit(gaps) == HangLimit(18.0, "longest", None, 1.5, 0)
    assert limit(gaps, "reduce") == HangLimit(5.65, "step", 3.0, 2.0, WARM_UP)


def test_steps_that_took_no_time_are_no_measure() -> None:
    """An agent may report that a step took 0 s."""
    gaps = learnt([0.0] * WARM_UP, [0.5] * WARM_UP)
    gaps.begin({"w": 0})
    for number in range(1, FIRST_STEPS + 1):
        gaps.note_step(number, 3.0)
    assert gaps.limit("w", "compute", BOUNDS) is None


def test_a_rank_that_waits_for_one_that_hangs_learns_nothing_from_it() -> None:
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5, reduce=10.0)
    gaps = cluster.monitor.state.tasks["gpt"].gaps
    before = gaps.of("n0/0", "reduce")
    assert before is not None
    assert before.longest_s == pytest.approx(10.0)
    error = only_error(stands(cluster, n0=41.0, n1=41.0, n2=41.0))
    cluster.beat("n0", 501.0, gaps_s={"reduce": 42.0})
    restart_plan("p2", error, cluster, "n1/0")
    cluster.beat("n0", 502.0, gaps_s={"reduce": 43.0})
    assert before.longest_s == pytest.approx(10.0)


def test_only_some_layouts_are_remembered() -> None:
    history = ProgressHistory()
    layouts = [Layout(tensor=1, pipeline=1, data=data, micro_batch=1) for data in range(1, LAYOUTS + 2)]
    known = []
    for layout in layouts:
        history.enter(layout, [])
        known.append(history.present)
    history.enter(layouts[1], [])
    assert history.present is known[1]
    history.enter(layouts[0], [])
    assert history.present is not known[0]
