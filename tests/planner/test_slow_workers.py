"""Slow workers: with them, without them, with others in their places, or dealt by speed."""

from __future__ import annotations

from typing import Any

import pytest

from services.api.plan_text import explain
from services.planner.lookahead.table import LookAhead
from services.planner.placement.cells import PlacementRequest
from services.planner.placement.ranks import place
from services.planner.replay.replay import Replayer, verify_records
from services.planner.state.slow_workers import MEMORY_S, TRIAL_MAX_S, TRIAL_S, trial_s
from shared.events.plans import Response, Trigger
from shared.events.union import PlanDecided, WorkerSlowed
from tests.planner.kit import World, change_of, sources, workers


def cluster(size: int, *, free: int = 0, least: int = 1, **fields: Any) -> World:
    """Nodes of one worker each; task ``a`` has the first of them, and some are free."""
    world = World()
    for index in range(size + free):
        world.join(f"n{index}", 1)
    world.complete(world.submit("a", workers={"min": least, "max": size}, **fields))
    assert len(world.task().members) == size
    return world


def slowed(world: World, worker: str, slowdown: float, task: str = "a") -> PlanDecided:
    plan = world.slow(worker, slowdown, task)
    assert plan is not None
    assert plan.trigger is Trigger.WORKER_SLOWED
    return plan


def taken(plan: PlanDecided) -> str:
    assert plan.slow is not None
    return plan.slow.choices[0].label


@pytest.mark.parametrize(
    ("free", "slowdown", "label", "members"),
    [
        (1, 1.02, "keep", 4),  # a spare would be better, by less than the margin
        (1, 1.5, "spare", 4),
        (0, 1.2, "keep", 4),
        (0, 1.5, "dealt-by-speed", 4),
        (0, 3.0, "without-slow", 3),
    ],
)
def test_the_best_use_of_a_slow_worker(free: int, slowdown: float, label: str, members: int) -> None:
    world = cluster(4, free=free)
    slow = world.task().members[1]
    plan = slowed(world, slow, slowdown)
    assert taken(plan) == label
    assert len(world.task().members) == members
    assert (slow in world.task().members) == (label in ("keep", "dealt-by-speed"))
    assert (plan.response is Response.NONE) == (label == "keep")
    assert label in explain(plan)
    assert plan.slow is not None
    assert plan.slow.slowdowns == {slow: slowdown}
    values = [choice.objective for choice in plan.slow.choices]
    best = max(values)
    if label == "keep":
        assert best <= values[0] * 1.05  # the margin; a task that gains less stays as it is
    else:
        assert values[0] == best
        assert plan.slow.margin > 0.0


def test_the_task_trains_on_and_moves_at_a_boundary() -> None:
    """No fault: nobody is held, no step is interrupted, all but the newcomer bring their state."""
    world = cluster(4, free=1)
    change = change_of(slowed(world, "n0/0", 1.5))
    assert (change.action, change.hold, change.interrupted, change.failed) == ("move", False, None, [])
    assert sorted(workers(change.target)) == ["n1/0", "n2/0", "n3/0", "n4/0"]
    assert sources(change.target) == ["live", "live", "live", "take"]
    assert change.release == ["n0/0"]


def test_micro_batches_are_dealt_by_speed_and_equally_again() -> None:
    world = cluster(4)
    plan = world.complete(slowed(world, "n2/0", 1.5))
    stage = change_of(plan).target
    assert stage is not None
    replica = workers(stage).index("n2/0")
    assert (sum(stage.shares), stage.shares[replica], min(stage.shares)) == (24, 4, 4)
    assert world.task().shares == tuple(stage.shares)
    assert "micro-batches" in explain(plan)
    assert world.slow("n2/0", 1.0) is None  # on trial
    again = world.end_trial()
    assert taken(again) == "dealt-equally"
    assert change_of(again).target is not None
    assert world.task().shares == ()


def test_a_deal_that_is_under_way_is_replaced() -> None:
    """The members are the same, and all have to be told the other shares."""
    world = cluster(4)
    first = change_of(slowed(world, "n2/0", 1.5)).target
    second = change_of(slowed(world, "n2/0", 2.0)).target
    assert first is not None
    assert second is not None
    assert workers(first) == workers(second)
    assert sorted(first.shares) == [4, 6, 7, 7]
    assert sorted(second.shares) == [3, 7, 7, 7]


def test_a_slow_worker_is_taken_last_on_its_node_although_a_process_could_start_there_at_once() -> None:
    world = World()
    world.join("n0", 3)
    request = PlacementRequest(name="a", count=2, slow={"n0/0": 2.0})
    placed = place([request], world.state.nodes, {"n0": ["n0/1", "n0/2"]}, busy={"n0/1", "n0/2"})
    assert placed["a"].workers == ["n0/1", "n0/2"]


def test_a_fault_of_a_task_that_deals_by_speed() -> None:
    """A retry goes on with the same members and shares; a lost worker ends the deal."""
    world = cluster(4)
    world.complete(slowed(world, "n2/0", 1.5))
    shares = world.task().shares
    retried = world.exit("n1/0")
    assert change_of(retried).target is not None
    world.complete(retried)
    assert world.task().shares in ((), shares)
    lost = world.complete(world.lose("n1"))
    assert world.task().shares == ()
    assert verify_records(world.records).mismatches == []
    assert change_of(lost).interrupted is not None


def test_a_lost_worker_is_replaced_by_a_healthy_one_where_there_is_one() -> None:
    """Also where the slow one is on the more reliable node."""
    world = cluster(3, free=3)
    world.complete(slowed(world, "n0/0", 2.0))
    assert sorted(world.task().members) == ["n1/0", "n2/0", "n3/0"]
    plan = world.lose("n1")
    assert sorted(world.task().members) == ["n2/0", "n3/0", "n4/0"]
    assert taken(plan) == "keep"


def test_a_slow_worker_is_the_last_resort() -> None:
    world = cluster(3, free=1, least=3)
    world.complete(slowed(world, "n0/0", 4.0))
    assert sorted(world.task().members) == ["n1/0", "n2/0", "n3/0"]
    plan = world.complete(world.lose("n1"))
    assert taken(plan) == "last-resort"
    assert sorted(world.task().members) == ["n0/0", "n2/0", "n3/0"]
    assert plan.problem is not None
    assert plan.problem.tasks[0].slowdown == 4.0
    # A healthy one that joins takes its place.
    assert taken(world.complete(world.join("n5", 1))) == "spare"
    assert sorted(world.task().members) == ["n2/0", "n3/0", "n5/0"]


def test_a_slow_worker_is_not_shared_out_to_a_second_task() -> None:
    """Two tasks, all workers in use: the slow one holds up one task, whatever the counts."""
    world = World()
    for index in range(4):
        world.join(f"n{index}", 1)
    world.complete(world.submit("a", workers={"min": 2, "max": 2}))
    world.complete(world.submit("b", workers={"min": 2, "max": 2}))
    slow = world.task("b").members[0]
    plan = slowed(world, slow, 2.0, "b")
    assert world.task("a").members + world.task("b").members
    assert plan.solution is not None
    assert plan.solution.assignment == {"a": 2, "b": 2}
    assert slow not in world.task("a").members


def test_it_is_used_again_after_its_trial() -> None:
    world = cluster(4)
    world.complete(slowed(world, "n0/0", 3.0))
    assert len(world.task().members) == 3
    assert world.slow("n0/0", 1.0) is None
    assert len(world.task().members) == 3
    world.complete(world.end_trial())
    assert sorted(world.task().members) == ["n0/0", "n1/0", "n2/0", "n3/0"]


def test_a_worker_that_flaps_comes_back_less_and_less_often() -> None:
    world = cluster(4)
    trials = []
    for _ in range(4):
        world.complete(slowed(world, "n0/0", 3.0))
        world.slow("n0/0", 1.0)
        trial = world.state.slow["n0/0"].trial
        assert trial is not None
        trials.append((trial.ends_at - world.records[-1].recorded_at).total_seconds())
        world.complete(world.end_trial())
    assert trials == [TRIAL_S, 2 * TRIAL_S, 4 * TRIAL_S, 8 * TRIAL_S]
    assert trial_s(100) == TRIAL_MAX_S
    world.wait(MEMORY_S + 1)
    world.complete(slowed(world, "n0/0", 3.0))
    world.slow("n0/0", 1.0)
    trial = world.state.slow["n0/0"].trial
    assert trial is not None
    assert (trial.ends_at - world.records[-1].recorded_at).total_seconds() == TRIAL_S
    assert verify_records(world.records).ok


def test_a_worker_that_is_slow_again_in_its_trial_stays_out() -> None:
    """The timer of the ended trial may be in the log behind that; it counts for nothing."""
    world = cluster(4)
    world.complete(slowed(world, "n0/0", 3.0))
    assert world.slow("n0/0", 1.0) is None
    trial = world.state.slow["n0/0"].trial
    assert trial is not None
    world.complete(slowed(world, "n0/0", 2.5))
    late = WorkerSlowed(
        **world.base(), node="n0", worker="n0/0", slowdown=1.0, task="a", generation=1, ends=trial.cause
    )
    assert world.log(late) is None
    assert world.state.slow["n0/0"].slowdown == 2.5
    assert len(world.state.slow["n0/0"].began) == 2
    assert "n0/0" not in world.task().members


@pytest.mark.parametrize("how", ["lose", "leave", "rejoin"])
def test_a_node_that_goes_or_joins_anew_has_no_slow_worker(how: str) -> None:
    world = cluster(3, free=2)
    world.complete(slowed(world, "n0/0", 2.0))
    if how == "lose":
        world.complete(world.lose("n0"))
    elif how == "leave":
        world.complete(world.leave("n0"))
    else:
        world.complete(world.join("n0", 1))
    assert world.state.slow["n0/0"].slowdown == 1.0
    assert len(world.state.slow["n0/0"].began) == 1  # how often it became slow is remembered


def test_events_of_workers_that_are_not_used_have_no_plan() -> None:
    world = cluster(3, free=1)
    world.complete(world.lose("n3"))
    assert world.slow("n3/0", 2.0) is None
    assert world.slow("elsewhere/0", 2.0) is None
    slowed(world, "n0/0", 1.0)  # as fast as it was: a plan that changes nothing, with the trigger's name


def test_a_slowdown_of_one_changes_no_byte_of_later_plans() -> None:
    one, other = cluster(3, free=1), cluster(3, free=1)
    slowed(one, "n0/0", 1.0)
    other.slow("n3/0", 1.0)
    plans = [world.lose("n1") for world in (one, other)]
    assert plans[0].canonical() == plans[1].canonical().replace(plans[1].event_id, plans[0].event_id)
    assert plans[0].slow is None
    assert '"slowdown"' not in plans[0].canonical()


def test_step_times_of_a_task_that_is_held_up_correct_no_table() -> None:
    world = cluster(4)
    world.progress("a", 10, 1.0)
    before = world.task().measured
    slowed(world, "n0/0", 1.2)
    world.progress("a", 20, 1.3 * 1.3)
    assert world.task().measured == before
    slowed(world, "n0/0", 1.0)
    world.progress("a", 30, 1.3 * 1.3)
    assert world.task().measured != before


def test_a_worker_whose_loss_would_cost_live_state_stays() -> None:
    """The optimizer is divided: each worker has a part that no other has."""
    world = cluster(2, free=1, parallel={"distributed_optimizer": True}, checkpoint={"memory_every": 0})
    plan = slowed(world, "n0/0", 3.0)
    assert "n0/0" in world.task().members
    assert plan.slow is not None
    assert {choice.label for choice in plan.slow.choices} <= {"keep", "dealt-by-speed"}


def test_tensor_groups_with_a_slow_worker_are_given_up_whole() -> None:
    world = World()
    for index in range(3):
        world.join(f"n{index}", 2)
    world.complete(world.submit("a", parallel={"tensor": 2}, workers={"min": 2, "max": 4}))
    slow = world.task().members[0]
    world.complete(slowed(world, slow, 3.0))
    assert len(world.task().members) == 4
    assert slow not in world.task().members
    assert verify_records(world.records).ok


@pytest.mark.parametrize("number", [0, 3, 6], ids="rank-{}".format)
@pytest.mark.parametrize(
    ("free", "slowdown", "label", "members"),
    [
        (0, 1.02, "keep", 8),
        (1, 1.5, "spare", 8),
        (0, 1.5, "dealt-by-speed", 8),
        (0, 40.0, "without-slow", 4),
    ],
)
def test_a_slow_worker_inside_a_replica_is_answered_like_one_that_is_a_replica(
    free: int, slowdown: float, label: str, members: int, number: int
) -> None:
    """Two replicas of two stages of two tensor ranks: whoever is slow, its replica computes less or goes without it."""
    world = World()
    for index in range(4 + free):
        world.join(f"n{index}", 2)
    layout = {"tensor": 2, "pipeline": 2}
    world.complete(world.submit("a", parallel=layout, batch={"global": 24, "micro": 1}, workers={"min": 4, "max": 8}))
    slow = world.task().members[number]
    plan = slowed(world, slow, slowdown)
    assert taken(plan) == label
    assert len(world.task().members) == members
    assert (slow in world.task().members) == (label in ("keep", "dealt-by-speed"))
    if label == "dealt-by-speed":
        slow_replica = number // 2 % 2
        assert world.task().shares[slow_replica] < world.task().shares[1 - slow_replica]
    assert verify_records(world.records).ok


def story() -> World:
    """Slow workers amid faults, joins and ends of two tasks."""
    world = cluster(4, free=2)
    world.complete(world.submit("b", workers={"min": 1}))
    world.complete(slowed(world, "n0/0", 1.6))
    world.complete(world.lose("n1"))
    world.slow("n0/0", 1.0)
    world.complete(slowed(world, "n2/0", 1.3))
    world.complete(world.end_trial())
    world.complete(world.join("n1", 1))
    world.complete(slowed(world, world.task("b").members[0], 2.0, "b"))
    world.cordon("n2")
    world.complete(world.exit("n2/0", "a" if "n2/0" in world.task().members else "b"))
    world.complete(world.drain("n3"))
    world.complete(world.finish("a"))
    return world


def test_replay_decides_the_same() -> None:
    world = story()
    report = verify_records(world.records)
    assert report.mismatches == []
    assert report.problems == []
    assert report.verified == report.plans > 10
    older = Replayer(world.records, decider=99).verify()
    assert older.mismatches == []
    assert older.older == report.plans


def test_a_plan_from_the_look_ahead_is_the_same() -> None:
    """The first losses after a slow worker are solved ahead, each way to use it."""
    world = World()
    for index in range(3):
        world.join(f"n{index}", 2)
    world.complete(world.submit("a", workers={"min": 1, "max": 5}))
    world.complete(slowed(world, world.task().members[0], 1.7))
    table = LookAhead()
    assert table.rebuild(world.state, world.now)
    world.fold._solve = table.solve
    world.lose("n2")
    assert table.hits > 0
    assert verify_records(world.records).mismatches == []
