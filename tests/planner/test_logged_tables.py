"""Throughput tables in the log: each is written once, under its digest, and found again by who reads the plan."""

from __future__ import annotations

import pytest

from services.planner.decide import DECIDER
from services.planner.replay.replay import Replayer
from shared.events.plans import LoggedTable, Problem
from shared.events.union import PlanDecided, Recorded
from tests.planner.kit import World, running
from tests.planner.test_replay import changed, course


def tables(plan: PlanDecided) -> dict[str, str]:
    """The digest of each task's table, as the plan names it."""
    assert plan.problem is not None
    return {task.name: task.table for task in plan.problem.tasks}


def test_a_table_is_in_the_first_plan_that_names_it_alone() -> None:
    world = running()
    first = world.complete(world.submit("b", weight=2.0))
    assert first.tables.keys() <= set(tables(first).values()) == world.state.tables.keys()
    lost = world.lose("n1")
    assert (lost.tables, tables(lost)) == ({}, tables(first))
    assert lost.problem is not None
    assert all(task.throughput == {} for task in lost.problem.tasks)
    # What was solved: the table up to the two workers that are left, and the present count.
    assert all(x <= 2 or x == task.current for task in world.solved(lost).tasks for x in task.throughput)


def test_tasks_that_are_alike_share_a_table() -> None:
    world = World()
    world.join("n0", 4)
    world.submit("a")
    plan = world.submit("b")
    assert len(set(tables(plan).values())) == 1
    assert plan.tables == {}


def test_a_table_that_a_measurement_changes_is_logged_again_and_the_old_one_forgotten() -> None:
    world = running()
    before = set(world.state.tables)
    world.progress("a", step=9, step_s=1e3)
    plan = world.lose("n1")
    assert set(plan.tables) == set(world.state.tables) == {tables(plan)["a"]}
    assert not before & set(world.state.tables)


def test_the_table_of_a_task_that_has_ended_is_forgotten() -> None:
    world = running()
    world.complete(world.submit("b", batch={"global": 48}))
    assert len(world.state.tables) == 2
    plan = world.finish("a")
    assert world.state.tables.keys() == {tables(plan)["b"]}


def test_a_retry_poses_no_problem_and_forgets_no_table() -> None:
    world = running()
    known = world.state.tables
    assert world.exit(world.task().members[0]).problem is None
    assert world.state.tables is known


def test_a_problem_that_is_larger_than_its_table_keeps_the_rate_of_the_present_count() -> None:
    """Eight workers on two nodes, of which one is lost: the table is cut off at four, T(t, 8) remains."""
    world = running(nodes=2, workers=4)
    plan = world.lose("n1")
    assert plan.problem is not None
    (logged,), (solved,) = plan.problem.tasks, world.solved(plan).tasks
    assert (logged.current, max(world.state.tables[logged.table].throughput)) == (8, 8)
    assert solved.throughput[8] == logged.current_flop_per_s
    assert [count for count in solved.throughput if count > 4] == [8]


def test_what_is_unset_is_no_part_of_a_problems_text() -> None:
    """Its digest is in recorded plans."""
    problem = Problem.model_validate(
        {
            "workers": 2,
            "tasks": [
                {
                    "name": "a", "weight": 1.0, "necessary": 1, "maximum": 2, "current": 0, "transition_s": 0.0,
                    "running_s": 1.0, "throughput": {"1": 2.0},
                }
            ],
        }
    )  # fmt: skip
    assert "table" not in problem.model_dump()["tasks"][0]
    assert problem.with_tables({}) == problem
    zero = problem.tasks[0].model_copy(update={"table": "x", "reload_s": 0.0})
    assert zero.model_dump()["reload_s"] == 0.0


# ---- forged logs


def altered(plan: PlanDecided) -> dict[str, object]:
    """Its first table with other rates, under the digest that it had."""
    digest, table = next(iter(plan.tables.items()))
    rates = {count: rate * 2.0 for count, rate in table.throughput.items()}
    return {"tables": {**plan.tables, digest: LoggedTable(throughput=rates, reloading=table.reloading)}}


def missing(plan: PlanDecided) -> dict[str, object]:
    return {"tables": {}}


@pytest.mark.parametrize("decider", [DECIDER, DECIDER + 1])
@pytest.mark.parametrize(
    ("forge", "words"), [(altered, "has other contents than its digest says"), (missing, "is in no plan before it")]
)
def test_a_forged_table_is_named_whoever_decided(forge: object, words: str, decider: int) -> None:
    records = course().records
    at, plan = first_with_tables(records)
    assert callable(forge)
    records[at] = changed(records[at], **forge(plan))
    report = Replayer(records, decider=decider).verify()
    assert not report.ok
    assert (records[at].position, True) in {(m.position, words in m.problem) for m in report.mismatches}


def first_with_tables(records: list[Recorded]) -> tuple[int, PlanDecided]:
    for at, record in enumerate(records):
        if isinstance(record.event, PlanDecided) and record.event.tables:
            return at, record.event
    raise AssertionError("no plan has tables")
