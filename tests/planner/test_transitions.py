"""D_transition by kind of change: modelled from bytes, measured from the log."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.placement.transition_costs import kind_of_change, on_grid, transition_cost
from shared.events.plans import TaskProblem
from shared.events.severities import ErrorKind
from shared.events.union import PlanDecided
from shared.planning.performance.hardware import profile
from shared.planning.waf import term
from tests.planner.kit import World, change_of, running

LARGE = {"layers": 12, "hidden": 512, "heads": 8, "sequence_length": 512, "vocabulary": 8192}
"""Its state is 0.7 GB."""

FIXED_S = 2.0  # transition_prior_s of the world


def of(plan: PlanDecided, name: str = "a") -> TaskProblem:
    assert plan.problem is not None
    return next(task for task in plan.problem.tasks if task.name == name)


def close(value: float, expected: float) -> bool:
    """Whether a value is the expected one on the grid."""
    return expected / 1.1 - 1e-9 <= value <= expected + 1e-9


@given(st.floats(1e-6, 1e12))
def test_the_grid_is_a_tenth_fine_and_stable(value: float) -> None:
    found = on_grid(value)
    assert found <= value
    assert value < 1e-3 or value < found * 1.1 * (1 + 1e-12)
    assert math.isclose(on_grid(found * 1.0001), found, rel_tol=1e-12) or value < 2e-3


def test_until_something_was_measured_bytes_over_bandwidth_count() -> None:
    world = running(nodes=2, model=LARGE)
    task = world.task()
    state_bytes = 16 * task.spec.model.parameters()
    live_s = FIXED_S + state_bytes / profile("cpu").inter_bytes_per_s
    stored_s = FIXED_S + state_bytes / 1e9
    grown = of(world.join("n2"))
    assert grown.staying == 4
    assert close(grown.transition_s, FIXED_S)
    assert close(grown.transition_s + grown.newcomers_s, live_s)
    assert close(grown.transition_to_s[0], stored_s + FIXED_S)  # saved; nothing saved yet that would be read


def test_a_checkpoint_is_read_at_the_bandwidth_of_the_storage_and_lost_steps_are_computed_again() -> None:
    world = World(storage_bytes_per_s=1e8)
    world.join("n0", 4)
    world.complete(world.submit("a", model=LARGE, parallel={"tensor": 2}))
    world.checkpoint(step=10)
    world.progress("a", step=60, step_s=0.5)
    state_bytes = 16 * world.task().spec.model.parameters() / 2
    moved = of(world.join("n1", 1))
    assert (moved.staying, moved.newcomers_s) == (0, 0.0)
    assert close(moved.transition_s, FIXED_S + state_bytes / 1e8 + 50 * 0.5)
    # Paused, it would save first: no step is lost.
    assert close(moved.transition_to_s[0], 2 * (FIXED_S + state_bytes / 1e8))


def test_who_is_hurt_by_a_fault_and_takes_newcomers_pays_for_them() -> None:
    world = World()
    for node in ("n0", "n1", "n2"):
        world.join(node, 2)
    world.complete(world.submit("a", model=LARGE, workers={"max": 4}))
    node = world.task().members[0].partition("/")[0]
    (lost,) = world.solved(world.lose(node)).tasks
    assert lost.faulted
    assert lost.staying == sum(not w.startswith(f"{node}/") for w in world.task().live_owners) < 4
    rate = lost.throughput[4]
    assert term(lost, 4).penalty == rate * (lost.transition_s + lost.newcomers_s)
    assert term(lost, lost.staying).penalty == rate * lost.transition_s


def test_a_task_that_nobody_holds_any_more_is_restored() -> None:
    world = running(nodes=1, workers=1)
    world.join("n1", 1)
    world.checkpoint(step=5)
    world.progress("a", step=25, step_s=1.0)
    for worker in world.task().members:
        world.exit(worker)
    lost = of(world.lose("n0"))
    assert lost.staying == 0
    assert close(lost.transition_s, FIXED_S + 20.0)
    # There is nothing to save in a pause, and as much to compute again.
    assert lost.transition_to_s[0] == lost.transition_s


def test_each_kind_is_measured_by_itself() -> None:
    world = running(nodes=2)
    start = dict(world.state.transitions)
    assert start == {}  # the first start moved no running task
    retry = world.error(ErrorKind.CONNECTION, task="a", generation=1)
    assert kind_of_change(change_of(retry)) == "survivors"
    world.wait(3.0)
    world.complete(retry)
    number, total_s = world.state.transitions["survivors"]
    assert number == 1
    assert 3.0 <= total_s < 3.1
    assert "newcomers" not in world.state.transitions
    grown = of(world.join("n2"))
    assert close(grown.transition_s, (FIXED_S + 3.0) / 2)


def test_a_task_that_trains_until_its_newcomers_are_up_does_not_stand_still() -> None:
    world = running(nodes=2)
    plan = world.exit(world.task().members[1])
    change = change_of(plan)
    assert kind_of_change(change) == "newcomers"
    assert change.target is not None
    world.wait(1.0)
    world.resume(plan, change)
    world.wait(60.0)  # the survivors train while the process starts
    world.moved(plan, "a", "drained", change.target.generation)
    world.wait(2.0)
    world.moved(plan, "a", "restored", change.target.generation, complete=True)
    number, total_s = world.state.transitions["newcomers"]
    assert number == 1
    assert 3.0 <= total_s < 3.2


def test_a_restore_and_a_pause_are_measured() -> None:
    world = World()
    world.join("n0")
    world.join("n1")
    world.complete(world.submit("a", workers={"min": 4}))
    paused = world.lose("n1")
    assert kind_of_change(change_of(paused)) == "pause"
    world.wait(4.0)
    world.complete(paused)
    assert world.state.transitions.keys() == {"pause"}
    world.complete(world.join("n1"))
    assert world.state.transitions.keys() == {"pause"}  # what did not run was not moved
    for worker in world.task().members:
        plan = world.exit(worker)
    assert kind_of_change(change_of(plan)) == "restore"
    world.wait(5.0)
    world.complete(plan)
    number, total_s = world.state.transitions["restore"]
    assert number == 1
    assert 5.0 <= total_s < 5.1


def test_a_step_more_or_less_changes_no_problem() -> None:
    world = running(nodes=1, workers=4, parallel={"tensor": 2})
    world.progress("a", step=1000, step_s=0.5)
    before = of(world.join("n1", 1))
    world.progress("a", step=1001, step_s=0.5)
    after = of(world.join("n2", 1))
    assert (before.transition_s, before.transition_to_s) == (after.transition_s, after.transition_to_s)


def test_a_replica_over_several_workers_moves_by_memory_where_it_has_copies() -> None:
    def transition_s(**parameters: Any) -> float:
        w = World(storage_bytes_per_s=1e3, **parameters)
        w.join("n0", workers=4)
        w.complete(w.submit("a", steps=10**9, parallel={"tensor": 2}, workers={"min": 2}))
        w.checkpoint("a", 5)
        w.progress("a", 100, 3.0)
        return w.solved(w.join("n1", workers=4)).tasks[0].transition_s

    # 95 steps since the checkpoint, 3 s each, and its state from slow storage.
    assert transition_s() > 95 * 3.0
    assert transition_s(memory_copies=True) <= 2.0


@pytest.mark.parametrize("divided", [False, True])
def test_a_fault_costs_half_the_interval_between_copies_where_only_they_complete_the_state(divided: bool) -> None:
    def transition_s(memory_every: int | None) -> float:
        w = World(transition_prior_s=2.0, memory_copies=True)
        for node in ("n0", "n1"):
            w.join(node, workers=2)
        parallel = {"tensor": 2, "distributed_optimizer": divided}
        w.complete(w.submit("a", steps=10**9, parallel=parallel, workers={"min": 2}))
        w.progress("a", 100, 3.0, memory_every=memory_every)
        assert w.task().memory_every == memory_every
        before = transition_cost(w.state, w.task()).transition_s
        assert before <= 2.0, "nothing is lost where a healthy task moves"
        return w.solved(w.lose("n1")).tasks[0].transition_s

    assert transition_s(None) == transition_s(1) <= 2.0
    # Copies lie every 21 steps of 3 s; the other replica has all of a state that is not divided.
    assert transition_s(21) == (on_grid(2.0 + 30.0) if divided else transition_s(1))
