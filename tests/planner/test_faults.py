"""Responses to faults of one task: retry, restart, and node loss; one fault after another."""

from __future__ import annotations

import pytest

from services.planner.decide import DECIDER
from services.planner.replay.replay import Replayer, verify_records
from shared.events.plans import Response
from shared.events.severities import ErrorKind, Severity
from shared.events.union import TaskStopped
from tests.planner.kit import World, change_of, running, sources, workers


def test_sev3_is_retried_by_all_members_with_the_same_ranks() -> None:
    world = running()
    before = world.task()
    plan = world.error(ErrorKind.CONNECTION, task="a", generation=1)
    change = change_of(plan)
    assert plan.response is Response.RETRY
    assert plan.problem is None
    assert workers(change.interrupted) == list(before.members)
    assert (change.action, change.target, change.prepare, change.failed) == ("none", None, [], [])
    assert change.hold
    world.complete(plan)
    assert world.task().change is None
    assert world.task().owners == before.members


def test_sev3_of_a_generation_already_replaced_changes_nothing() -> None:
    world = running()
    world.exit(world.task().members[1])
    plan = world.error(ErrorKind.CONNECTION, task="a", generation=1)
    assert (plan.response, plan.changes) == (Response.NONE, [])


def test_sev3_of_the_generation_that_trains_on_until_a_plan_is_ready_is_retried() -> None:
    world = running(nodes=1)
    before = list(world.task().members)
    growth = change_of(world.join("n1"))
    assert (growth.hold, growth.interrupted, growth.from_generation) == (False, None, 1)
    plan = world.error(ErrorKind.COLLECTIVE_TIMEOUT, task="a", generation=1)
    change = change_of(plan)
    assert plan.response is Response.RETRY
    assert change.hold
    assert change.interrupted is not None
    assert (workers(change.interrupted), change.interrupted.generation) == (before, 3)
    assert growth.target is not None
    assert workers(change.target) == workers(growth.target)
    world.complete(plan)
    assert world.task().change is None


def test_sev3_of_the_task_that_had_the_name_before_changes_nothing() -> None:
    world = running()
    world.finish()
    world.submit()
    assert world.task().generation == 2
    plan = world.error(ErrorKind.CONNECTION, task="a", generation=1)
    assert (plan.response, plan.changes) == (Response.NONE, [])


def test_sev2_survivors_finish_the_step_and_the_rank_comes_back() -> None:
    world = running()
    a, b, c, d = world.task().members
    plan = world.exit(b)
    change = change_of(plan)
    assert (plan.response, plan.incident) == (Response.RESTART, "incident-8")
    assert change.interrupted is not None
    assert change.target is not None
    assert workers(change.interrupted) == [a, c, d]
    assert sources(change.interrupted) == ["live"] * 3
    assert workers(change.target) == [a, c, d, b]
    assert sources(change.target) == ["live", "live", "live", "take"]
    assert (change.interrupted.generation, change.target.generation) == (2, 3)
    assert (change.failed, change.prepare, change.release) == ([b], [b], [])
    assert change.survivors == [a, c, d]
    world.complete(plan)
    assert world.task().owners == (a, c, d, b)


def test_sev2_of_the_only_rank_goes_back_to_the_newest_checkpoint_or_begins_anew() -> None:
    world = running(nodes=1, workers=1)
    change = change_of(world.complete(world.exit("n0/0")))
    assert change.interrupted is None
    assert sources(change.target) == ["initial"]
    world.checkpoint(step=5)
    change = change_of(world.exit("n0/0"))
    assert change.target is not None
    assert (sources(change.target), change.target.checkpoint) == (["checkpoint"], "checkpoint-5")
    assert (change.failed, change.prepare, change.survivors) == (["n0/0"], ["n0/0"], [])


def test_a_second_fault_during_the_restart_supersedes_the_plan() -> None:
    world = running()
    a, b, c, d = world.task().members
    first = world.exit(b)
    second = world.exit(d)
    change = change_of(second)
    assert second.supersedes == [first.plan]
    assert workers(change.interrupted) == [a, c]
    assert workers(change.target) == [a, c, d, b]
    assert sources(change.target) == ["live", "live", "take", "take"]
    # b's process was being started: the agent keeps it if it has not joined anything yet.
    assert change.failed == [d]
    assert change.prepare == [d, b]
    assert change.target is not None
    assert change.interrupted is not None
    assert (change.interrupted.generation, change.target.generation) == (4, 5)


def test_nodes_that_are_lost_together_are_answered_by_one_plan() -> None:
    world = running(nodes=4)
    before = list(world.task().members)
    known = len(world.records)
    *earlier, plan = world.lose_together("n1", "n3", "n2")
    assert earlier == [None, None]
    assert plan is not None
    assert (plan.cause, plan.incident) == (f"e{known + 2}", f"incident-{known + 2}")
    assert plan.beside == [f"incident-{known}", f"incident-{known + 1}"]
    change = change_of(plan)
    assert workers(change.stages[-1]) == [worker for worker in before if worker.startswith("n0/")]
    assert len(change.failed) == 6
    assert world.state.beside == ()
    world.complete(plan)
    # What comes later is answered alone.
    assert world.join("n1").beside == []
    report = verify_records(world.records)
    assert report.ok
    assert report.verified == report.plans


def test_a_plan_that_leaves_out_a_loss_found_at_the_same_moment_is_no_plan_of_this_log() -> None:
    world = running(nodes=4)
    *_, plan = world.lose_together("n1", "n2")
    assert plan is not None
    index = next(i for i, record in enumerate(world.records) if record.event.event_id == plan.event_id)
    forged = plan.model_copy(update={"beside": []})
    records = [*world.records]
    records[index] = records[index].model_copy(update={"event": forged})
    report = Replayer(records, decider=DECIDER + 1).verify()
    (mismatch,) = report.mismatches
    assert "beside its cause" in str(mismatch)


def test_a_newcomer_holds_the_state_once_its_stage_is_known_to_have_formed() -> None:
    world = running()
    a, b, c, d = world.task().members
    plan = world.exit(b)
    target = change_of(plan).target
    assert target is not None
    world.resume(plan, change_of(plan))
    assert b not in world.task().owners
    world.progress("a", step=9, step_s=0.1, generation=target.generation)
    assert workers(change_of(world.exit(a)).interrupted) == [c, d, b]


def test_a_report_of_a_superseded_plan_is_ignored() -> None:
    world = running()
    a, b, c, d = world.task().members
    first = world.exit(b)
    second = world.exit(c)
    world.complete(first)
    assert world.task().plan == second.plan
    assert world.task().change == change_of(second)
    assert world.task().owners == (a, d)


def test_all_ranks_lost_one_after_the_other_end_at_the_checkpoint() -> None:
    world = running(nodes=1, workers=2)
    world.checkpoint(step=5)
    world.exit("n0/0")
    change = change_of(world.exit("n0/1"))
    assert change.interrupted is None
    assert sources(change.target) == ["checkpoint"] * 2
    assert change.failed == ["n0/1"]
    assert sorted(change.prepare) == ["n0/0", "n0/1"]
    assert change.hold


def test_a_fault_while_the_task_starts_begins_again() -> None:
    world = World()
    world.join("n0")
    first = world.submit("a")
    plan = world.exit("n0/0", generation=1)
    change = change_of(plan)
    assert plan.supersedes == [first.plan]
    assert change.interrupted is None
    assert sources(change.target) == ["initial"] * 2
    assert (change.failed, sorted(change.prepare)) == (["n0/0"], ["n0/0", "n0/1"])
    assert change.target is not None
    assert change.target.generation == 2


def test_sev2_that_names_several_workers_restarts_them_all() -> None:
    world = running()
    a, b, c, d = world.task().members
    plan = world.error(ErrorKind.HANG, task="a", worker=b, evidence={"workers": [b, c]})
    assert workers(change_of(plan).interrupted) == [a, d]
    assert change_of(plan).prepare == [b, c]


def test_sev2_that_names_nobody_keeps_the_lowest_rank_for_the_state() -> None:
    world = running()
    a, b, c, d = world.task().members
    retry = world.error(ErrorKind.COLLECTIVE_TIMEOUT, task="a")
    plan = world.error(ErrorKind.COLLECTIVE_TIMEOUT, task="a", severity=Severity.SEV2, escalates="e1")
    change = change_of(plan)
    assert plan.supersedes == [retry.plan]
    assert workers(change.interrupted) == [a]
    assert change.prepare == [b, c, d]
    plan = world.error(ErrorKind.COLLECTIVE_TIMEOUT, task="a", severity=Severity.SEV1, escalates="e2")
    assert change_of(plan).survivors == []
    assert sorted(change_of(plan).prepare) == sorted([a, b, c, d])
    assert all(node.usable for node in world.state.nodes.values())


def test_sev1_shrinks_the_task_to_what_is_left() -> None:
    world = running()
    a, b, c, d = world.task().members
    lost = {w for w in (a, b, c, d) if w.startswith("n1/")}
    plan = world.lose("n1")
    change = change_of(plan)
    assert plan.response is Response.RECONFIGURE
    assert plan.problem is not None
    assert plan.solution is not None
    assert plan.problem.workers == 2
    assert plan.problem.tasks[0].current == 4
    assert plan.problem.tasks[0].faulted
    assert change.interrupted is not None
    assert workers(change.interrupted) == [w for w in (a, b, c, d) if w not in lost]
    # The survivors are what the solver wants: nothing follows the interrupted stage.
    assert (change.target, change.action) == (None, "none")
    assert set(change.failed) == lost
    assert change.release == []


def test_sev1_uses_an_idle_worker_in_place_of_the_lost_one() -> None:
    world = World()
    for node in ("n0", "n1", "n2"):
        world.join(node, 1)
    world.complete(world.submit("a", workers={"max": 2}))
    change = change_of(world.lose("n1"))
    assert workers(change.interrupted) == ["n0/0"]
    assert workers(change.target) == ["n0/0", "n2/0"]
    assert change.prepare == ["n2/0"]


def test_behind_the_last_step_all_start_anew_from_it_and_nothing_else_moves_the_task() -> None:
    """Its processes have left the loop, so none can be held; what their scripts have done since is done again."""
    world = running(nodes=2, steps=100)
    before = list(world.task().members)
    world.checkpoint(step=100)
    assert world.join("n9").changes == []
    plan = world.exit(before[1])
    change = change_of(plan)
    assert plan.response is Response.RESTART
    assert (change.survivors, change.hold, change.interrupted) == ([], True, None)
    assert sorted(change.prepare) == sorted(before)
    assert sorted(workers(change.target)) == sorted(before)
    assert sources(change.target) == ["checkpoint"] * len(before)
    assert change.target is not None
    assert change.target.checkpoint.endswith("100")
    world.complete(plan)
    assert world.join("n10").changes == []
    lost = change_of(world.lose(before[0].rpartition("/")[0]))
    assert lost.survivors == []
    assert set(sources(lost.target)) == {"checkpoint"}


@pytest.mark.parametrize("how", ["stop", "discard"])
def test_a_stop_behind_the_last_step_has_nothing_to_save(how: str) -> None:
    world = running(nodes=1, steps=100)
    world.checkpoint(step=100)
    plan = world.stop(lose_steps=how == "discard")
    assert change_of(plan).action == "end"
    (stopped,) = [r.event for r in world.records if isinstance(r.event, TaskStopped)]
    assert (stopped.step, stopped.path) == (100, "checkpoint-100")
