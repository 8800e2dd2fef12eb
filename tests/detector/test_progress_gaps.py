"""Limits for hangs by the recent times without progress of each rank in each phase."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detector.progress_gaps import FIRST_STEPS, WARM_UP, WINDOW, GapLimits, HangLimit, ProgressGaps
from shared.severities import ErrorKind
from tests.detector.hanging import drain_plan
from tests.detector.kit import LIMITS, Cluster, moved, only_error

BOUNDS = GapLimits(floor_s=0.5, bound_s=120.0, latency_s=0.35)
STEPS = FIRST_STEPS + WARM_UP
FLOOR_S = LIMITS.stalls.hang_floor_s
LATENCY_S = LIMITS.stalls.latency_s

TIMES = st.lists(st.floats(0.001, 300.0), min_size=WARM_UP, max_size=2 * WINDOW)


def learnt(steps_s: list[float], gaps_s: list[float], first_s: float = 1.0) -> ProgressGaps:
    """What is known after some first steps, these steps, and these gaps of ``w`` in ``compute``."""
    gaps = ProgressGaps()
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


def test_a_new_generation_begins_with_the_limit_of_the_mean() -> None:
    cluster = Cluster()
    trained(cluster, 20.0, compute=1.5)
    drain_plan(cluster)
    cluster.fold(moved("p2", 2, "restored", complete=True))
    cluster.generation = 2
    assert stands(cluster, n0=4.6, n1=4.6, n2=4.6) == []
