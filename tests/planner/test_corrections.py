"""Corrections of T by measured step times: quantised, with hysteresis, per layout and in general."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.replay.replay import verify_records
from services.planner.state.cluster import HardwareLayout
from services.planner.throughput.corrections import corrected_exponent, correction, exponent_of
from services.planner.throughput.model import flop_per_step, hardware_of, modelled_flop_per_s
from services.planner.throughput.tables import table_of, throughput_of
from shared.events.plans import Problem
from shared.events.union import ClusterConfigured
from tests.planner.kit import World, running


def modelled(world: World, name: str = "a") -> float:
    """T of the task's newest generation, before correction."""
    task = world.task(name)
    size = task.trained[task.generation]
    return modelled_flop_per_s(task.spec, size, hardware_of(world.state, size.hardware))


def progress(world: World, ratio: float, name: str = "a", step: int = 8, generation: int | None = None) -> None:
    """Report steps that take 1 / ratio of what the model says."""
    task = world.task(name)
    generation = task.generation if generation is None else generation
    size = task.trained[generation]
    rate = modelled_flop_per_s(task.spec, size, hardware_of(world.state, size.hardware)) * ratio
    world.progress(name, step, flop_per_step(task.spec) / rate, generation)


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


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(-300, 300), min_size=1, max_size=8))
def test_a_layout_that_behaves_as_believed_leaves_the_general_correction(exponents: list[int]) -> None:
    task = running().task()
    sizes = {HardwareLayout("cpu", 1, 1, d): e for d, e in enumerate(exponents, 1)}
    task = task.model_copy(update={"measured": sizes})
    general = task.general_exponent("cpu")
    assert general is not None
    assert min(exponents) <= general <= max(exponents)
    assert abs(general - sum(exponents) / len(exponents)) <= 0.5
    more = task.model_copy(update={"measured": {**sizes, HardwareLayout("cpu", 1, 1, 100): general}})
    assert more.general_exponent("cpu") == general
    assert more.general_exponent("h100") is None


def test_progress_corrects_its_task_and_informs_the_others() -> None:
    world = running()
    before = throughput_of(world.state, world.task(), 4)
    progress(world, 2.0)
    assert world.task().measured == {HardwareLayout("cpu", 1, 1, 4): 7}  # 1.1 ** 7 = 1.95
    plan = world.submit("b")
    problem = world.solved(plan)
    first, second = sorted(problem.tasks, key=lambda t: t.name)
    assert first.throughput == second.throughput
    assert first.throughput == {x: pytest.approx(rate * 1.1**7) for x, rate in before.items()}
    assert first.correction == second.correction == pytest.approx(1.1**7)
    assert problem.tasks == Problem.model_validate_json(problem.model_dump_json()).tasks


def test_each_layout_has_its_own_correction_and_the_others_their_mean() -> None:
    world = running()
    progress(world, 2.0)
    world.complete(world.lose("n1"))
    progress(world, 1.1**3)
    task = world.task()
    assert task.measured == {HardwareLayout("cpu", 1, 1, 4): 7, HardwareLayout("cpu", 1, 1, 2): 3}
    assert exponent_of(world.state, task, "cpu") == 5
    world.join("n1", 4)
    raw = {
        x: modelled_flop_per_s(task.spec, HardwareLayout("cpu", 1, 1, x), hardware_of(world.state, "cpu"))
        for x in (2, 3, 4)
    }
    table = table_of(world.state, world.task())
    assert table.exponent == 5
    assert {x: table.throughput[x] / raw[x] for x in raw} == pytest.approx({2: 1.1**3, 3: 1.1**5, 4: 1.1**7})


def test_a_report_counts_for_the_layout_of_its_generation() -> None:
    """Until the new stage has formed, the members of the one before report theirs."""
    world = running()
    before = world.task().generation
    plan = world.lose("n1")
    progress(world, 2.0, generation=before)
    assert world.task().measured == {HardwareLayout("cpu", 1, 1, 4): 7}
    world.complete(plan)
    world.progress("a", step=9, step_s=1e-9, generation=before + 100)
    assert world.task().measured == {HardwareLayout("cpu", 1, 1, 4): 7}


def test_a_correction_below_its_hysteresis_changes_no_table_and_no_plan() -> None:
    def course(*wobbles: float) -> tuple[World, list[object]]:
        world = running()
        progress(world, 2.0)
        plan = world.submit("b", weight=0.5, workers={"min": 1})
        world.complete(plan)
        answers: list[object] = [plan.problem, plan.solution]
        # The second layout begins with what is believed of it.
        for step, wobble in enumerate(wobbles):
            table = throughput_of(world.state, world.task(), 4)
            progress(world, 1.1**7 * wobble, step=9 + step)
            assert throughput_of(world.state, world.task(), 4) == table
        plan = world.lose("n1")
        return world, [*answers, plan.problem, plan.solution, plan.changes]

    steady, wavering = course(1.0, 1.0, 1.0), course(1.15, 0.85, 1.1)
    assert steady[1] == wavering[1]
    assert verify_records(wavering[0].records).ok


def test_a_correction_beyond_its_hysteresis_changes_the_table() -> None:
    world = running()
    progress(world, 2.0)
    before = throughput_of(world.state, world.task(), 4)
    progress(world, 2.0 * 1.5)
    after = throughput_of(world.state, world.task(), 4)
    assert after[4] > before[4] * 1.3


def test_another_worker_rate_forgets_what_was_measured_against_the_old_one() -> None:
    world = running()
    progress(world, 2.0)
    configured = world.state.config
    assert configured is not None
    world.log(ClusterConfigured(**{**configured.model_dump(), **world.base(), "mtbf_node_s": 2e6}))
    assert world.task().measured
    world.log(ClusterConfigured(**{**configured.model_dump(), **world.base(), "worker_flop_per_s": 6e9}))
    assert not world.task().measured


def test_a_name_used_again_keeps_corrections_only_of_the_same_model() -> None:
    for batch, kept in (({"global": 24}, True), ({"global": 48}, False)):
        world = running(batch={"global": 24})
        progress(world, 2.0)
        world.finish()
        world.submit("a", batch=batch)
        assert bool(world.task().measured) == kept
