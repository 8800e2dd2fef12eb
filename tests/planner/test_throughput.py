"""T(t, x) and its correction by measurement."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.throughput import (
    corrected_exponent,
    correction,
    flop_per_step,
    largest_count,
    modelled_flop_per_s,
    throughput_table,
)
from tests.planner.kit import World, running, spec


def test_one_worker_achieves_the_worker_rate() -> None:
    assert modelled_flop_per_s(spec(), 1, 5e9) == 5e9


def test_counts_are_multiples_of_a_replica_within_every_limit() -> None:
    wide = spec(parallel={"tensor": 2, "pipeline": 2}, workers={"min": 4, "max": 30}, model=_deep())
    assert sorted(throughput_table(wide, 100, 1.0)) == [4, 8, 12, 16, 20, 24, 28]
    assert sorted(throughput_table(wide, 9, 1.0)) == [4, 8]
    few = spec(batch={"global": 6, "micro": 2})
    assert largest_count(few, 50) == 3
    assert modelled_flop_per_s(wide, 6, 1.0) == 0.0
    assert modelled_flop_per_s(few, 4, 1.0) == 0.0


def test_the_most_loaded_replica_counts() -> None:
    """12 micro-batches: 5 replicas do 3 rounds, as 4 do, and reduce over more."""
    table = throughput_table(spec(batch={"global": 12}), 12, 1.0)
    assert table[5] < table[4] < table[6]


def test_flop_of_a_step_is_that_of_the_model() -> None:
    a = spec()
    assert flop_per_step(a) == pytest.approx(72 * 32 * 2 * 32 * 32 * (1 + 32 / (6 * 32) + 257 / (12 * 2 * 32)) * 24)


@settings(derandomize=True)
@given(st.floats(1e-9, 1e9))
def test_the_first_measurement_is_met_within_half_a_step(ratio: float) -> None:
    exponent = corrected_exponent(None, ratio, 0.2)
    assert abs(math.log(ratio / correction(exponent))) <= math.log(1.1) / 2 + 1e-9


@settings(derandomize=True)
@given(st.integers(-50, 50), st.floats(0.81, 1.19))
def test_within_the_hysteresis_nothing_moves(exponent: int, relative: float) -> None:
    assert corrected_exponent(exponent, correction(exponent) * relative, 0.2) == exponent


def test_beyond_the_hysteresis_it_does() -> None:
    assert corrected_exponent(0, 1.3, 0.2) == 3
    assert corrected_exponent(0, 0.7, 0.2) == -4


@pytest.mark.parametrize("ratio", [0.0, 5e-324, 1e308, math.inf])
def test_absurd_measurements_are_bounded(ratio: float) -> None:
    assert abs(corrected_exponent(None, ratio, 0.2)) <= 300


def test_progress_corrects_the_model_of_its_task_and_informs_the_others() -> None:
    world = running(nodes=2)
    flop = flop_per_step(world.task().spec)
    modelled = modelled_flop_per_s(world.task().spec, 4, 5e9)
    world.progress("a", step=8, step_s=flop / (modelled * 2.0))
    assert world.task().exponent == 7  # 1.1 ** 7 = 1.95
    plan = world.submit("b")
    assert plan.problem is not None
    first, second = sorted(plan.problem.tasks, key=lambda t: t.name)
    assert first.throughput == second.throughput
    assert first.throughput[4] == pytest.approx(modelled * 1.1**7)


def test_a_correction_below_the_hysteresis_changes_no_plan() -> None:
    def last_problem(wobble: float) -> object:
        world: World = running(nodes=2)
        flop, modelled = flop_per_step(world.task().spec), modelled_flop_per_s(world.task().spec, 4, 5e9)
        world.progress("a", step=8, step_s=flop / (modelled * 2.0))
        world.progress("a", step=9, step_s=flop / (modelled * 2.0 * wobble))
        return world.submit("b").problem

    assert last_problem(1.0) == last_problem(1.12) == last_problem(0.9)
    assert last_problem(1.0) != last_problem(1.5)


def _deep() -> dict[str, int]:
    return {"layers": 4, "hidden": 32, "heads": 4, "sequence_length": 32}
