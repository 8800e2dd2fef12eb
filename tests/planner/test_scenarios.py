"""What is decided in each case: faults, ends, joins, stops, and several of them at once."""

from __future__ import annotations

import pytest

from services.planner.problem import horizons_s
from shared.plans import Response, Stage, Trigger
from shared.severities import ErrorKind, Severity
from tests.planner.kit import World, change_of, running


def workers(stage: Stage | None) -> list[str]:
    assert stage is not None
    return [m.worker for m in stage.members]


def sources(stage: Stage | None) -> list[str]:
    assert stage is not None
    return [m.source for m in stage.members]


def test_a_submitted_task_starts_on_all_useful_workers_from_its_initial_state() -> None:
    world = World()
    assert world.join("n0").response is Response.NONE
    world.join("n1")
    plan = world.submit("a", workers={"max": 3})
    change = change_of(plan)
    assert (plan.trigger, plan.response) == (Trigger.TASK_SUBMITTED, Response.RECONFIGURE)
    assert change.interrupted is None
    assert not change.hold
    assert sources(change.target) == ["initial"] * 3
    assert change.target is not None
    assert (change.target.generation, change.target.layout.data) == (1, 3)
    # Spread over nodes: each has one before either has two.
    assert {w.split("/")[0] for w in workers(change.target)[:2]} == {"n0", "n1"}
    assert sorted(change.prepare) == sorted(workers(change.target))


def test_a_resumed_task_starts_from_its_checkpoint() -> None:
    world = World()
    world.join("n0")
    change = change_of(world.submit("a", saved="saved", step=9))
    assert change.target is not None
    assert sources(change.target) == ["checkpoint"] * 2
    assert change.target.checkpoint == "saved"
    assert world.task().step == 9


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
    assert world.task().holders == before.members


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
    assert world.task().holders == (a, c, d, b)


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


def test_a_newcomer_holds_the_state_once_its_stage_is_known_to_have_formed() -> None:
    world = running()
    a, b, c, d = world.task().members
    plan = world.exit(b)
    target = change_of(plan).target
    assert target is not None
    world.resume(plan, change_of(plan))
    assert b not in world.task().holders
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
    assert world.task().holders == (a, d)


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


def test_a_lost_node_without_ranks_changes_nothing() -> None:
    world = World()
    world.join("n0", 1)
    world.join("n1", 1)
    world.complete(world.submit("a", workers={"max": 1}))
    idle = "n1" if world.task().members == ("n0/0",) else "n0"
    plan = world.lose(idle)
    assert (plan.response, plan.changes) == (Response.NONE, [])
    assert plan.problem is not None
    assert plan.problem.workers == 1
    assert world.lose(idle).changes == []


def test_a_node_that_returns_is_used_again_with_new_processes() -> None:
    world = running()
    survivors = [w for w in world.task().members if w.startswith("n0/")]
    world.complete(world.lose("n1"))
    plan = world.join("n1")
    change = change_of(plan)
    assert plan.trigger is Trigger.NODE_JOINED
    assert change.interrupted is None
    assert not change.hold
    assert workers(change.target)[:2] == survivors
    assert sources(change.target) == ["live", "live", "take", "take"]
    assert change.prepare == ["n1/0", "n1/1"]
    assert change.failed == []
    assert world.state.losses == 1


def test_a_node_that_rejoins_unnoticed_has_lost_its_processes() -> None:
    world = running()
    survivors = [w for w in world.task().members if w.startswith("n0/")]
    change = change_of(world.join("n1"))
    assert workers(change.interrupted) == survivors
    assert workers(change.target)[:2] == survivors
    assert sorted(change.failed) == ["n1/0", "n1/1"]


def test_an_escalated_error_isolates_the_node_until_it_joins_anew() -> None:
    world = running()
    b = world.task().members[1]
    node = b.split("/")[0]
    first = world.exit(b)
    plan = world.exit(b, severity=Severity.SEV1, escalates="e8")
    assert plan.supersedes == [first.plan]
    assert not world.state.nodes[node].usable
    assert all(not w.startswith(node) for w in world.task().members)
    assert world.join(node).changes
    assert world.state.nodes[node].usable


def test_two_tasks_share_by_weight_and_exchange_workers_in_one_plan() -> None:
    world = World()
    for index in range(4):
        world.join(f"n{index}")
    world.complete(world.submit("a", weight=1.0, workers={"min": 2}))
    assert len(world.task("a").members) == 8
    plan = world.submit("b", weight=3.0, workers={"min": 2})
    a, b = change_of(plan, "a"), change_of(plan, "b")
    assert not a.hold
    assert a.interrupted is None
    assert set(b.prepare) <= set(a.release)
    assert set(workers(a.target)).isdisjoint(workers(b.target))
    assert set(workers(a.target)) == set(a.survivors) - set(a.release)
    assert len(workers(a.target)) + len(workers(b.target)) <= 8
    assert sources(a.target) == ["live"] * len(workers(a.target))
    assert [s.label for s in plan.alternatives] == ["second-best", "equal-split"]


def test_a_task_that_is_starting_is_shrunk_without_waiting_for_it() -> None:
    world = World()
    for index in range(2):
        world.join(f"n{index}")
    first = world.submit("a", workers={"min": 2})
    plan = world.submit("b", weight=2.0, workers={"min": 2})
    a, b = change_of(plan, "a"), change_of(plan, "b")
    assert plan.supersedes == [first.plan]
    assert a.hold
    assert a.survivors == []
    assert a.failed == []
    assert a.prepare == workers(a.target)
    assert set(a.release) == set(workers(b.target))


def test_a_healthy_task_in_transition_that_must_move_finishes_its_step_with_those_that_hold_the_state() -> None:
    world = running()
    a, b, c, d = world.task().members
    world.exit(b)
    plan = world.submit("b", weight=5.0, workers={"min": 2})
    change = change_of(plan, "a")
    assert workers(change.interrupted) == [a, c, d]
    assert set(workers(change.target)) <= {a, c, d}


def test_a_node_loss_hits_every_task_on_it_in_one_plan() -> None:
    world = World()
    for index in range(4):
        world.join(f"n{index}")
    world.complete(world.submit("a", workers={"min": 2, "max": 4}))
    world.complete(world.submit("b", workers={"min": 2, "max": 4}))
    hit = {"a", "b"}
    assert all(any(w.startswith("n0/") for w in world.task(name).members) for name in hit)
    plan = world.lose("n0")
    assert {c.task for c in plan.changes} == hit
    for name in hit:
        assert change_of(plan, name).interrupted is not None
        assert all(not w.startswith("n0/") for w in world.task(name).members)


def test_a_healthy_task_is_left_alone_by_the_fault_of_another() -> None:
    world = World()
    world.join("n0")
    world.join("n1")
    world.complete(world.submit("a", workers={"min": 2, "max": 2}))
    world.complete(world.submit("b", workers={"min": 2, "max": 2}))
    assert {c.task for c in world.exit(world.task("b").members[0], task="b").changes} == {"b"}


def test_a_task_that_needs_more_than_there_is_is_queued_and_runs_when_it_can() -> None:
    world = World()
    world.join("n0")
    plan = world.submit("a", workers={"min": 4})
    assert plan.response is Response.NONE
    assert plan.queued == {"a": "needs at least 4 workers; 2 can be had"}
    assert world.error(ErrorKind.EXCEPTION, task="a").queued == plan.queued
    plan = world.join("n1")
    assert plan.queued == {}
    assert len(change_of(plan).prepare) == 4


def test_a_task_below_its_minimum_is_paused_and_comes_back_from_its_checkpoint() -> None:
    world = running(workers=2, nodes=2)
    world2 = World()
    world2.join("n0")
    world2.join("n1")
    world2.complete(world2.submit("a", workers={"min": 4}))
    plan = world2.lose("n1")
    change = change_of(plan)
    assert change.action == "pause"
    assert [w.split("/")[0] for w in workers(change.interrupted)] == ["n0", "n0"]
    assert sorted(change.release) == sorted(change.survivors)
    assert list(plan.queued) == ["a"]
    assert world2.stopped("a", step=8, path="paused") is None
    world2.complete(plan)
    assert world2.task().life == "active"
    back = change_of(world2.join("n1"))
    assert back.target is not None
    assert (sources(back.target), back.target.checkpoint) == (["checkpoint"] * 4, "paused")
    assert world.task().members


def test_a_finished_task_leaves_its_workers_to_the_other() -> None:
    world = World()
    world.join("n0")
    world.join("n1")
    world.complete(world.submit("a", workers={"min": 2, "max": 2}))
    world.complete(world.submit("b", workers={"min": 1}))
    freed = set(world.task("a").members)
    plan = world.finish("a")
    assert plan.trigger is Trigger.TASK_ENDED
    end, grown = change_of(plan, "a"), change_of(plan, "b")
    assert (end.action, set(end.release)) == ("end", freed)
    assert freed <= set(grown.prepare)
    assert grown.interrupted is None
    world.complete(plan)
    assert world.task("a").occupied == ()
    assert world.task("b").change is None


def test_a_failed_task_is_ended_and_its_nodes_are_not_blamed() -> None:
    world = running()
    members = world.task().members
    change = change_of(world.fail())
    assert (change.action, change.release) == ("end", sorted(members))
    assert all(node.usable for node in world.state.nodes.values())
    assert world.exit(members[0]).changes == []


def test_a_stop_drains_saves_and_frees_the_workers_once_done() -> None:
    world = running()
    members = world.task().members
    plan = world.stop()
    change = change_of(plan)
    assert (plan.trigger, change.action, change.target) == (Trigger.STOP_REQUESTED, "stop", None)
    assert change.survivors == list(members)
    assert not change.hold
    queued = world.submit("b")
    assert queued.queued == {"b": "no layout of it runs on 0 workers"}
    ended = world.stopped("a")
    assert ended is not None
    assert set(change_of(ended, "b").prepare) == set(members)
    assert world.stop().changes == []


def test_a_stop_of_a_queued_task_is_done_at_once() -> None:
    world = World()
    world.submit("a", saved="saved", step=9)
    plan = world.stop()
    assert (plan.response, plan.changes, plan.queued) == (Response.NONE, [], {})
    last = world.records[-1].event
    assert last.type == "task.stopped"
    assert (last.task, last.path, last.step) == ("a", "saved", 9)
    assert world.task().life == "ended"


def test_a_stop_of_a_starting_task_ends_it_and_offers_its_workers() -> None:
    world = World()
    world.join("n0")
    world.submit("a")
    world.submit("b", workers={"min": 2})
    assert world.task("b").members == () or world.task("a").members == ()
    starting, waiting = ("a", "b") if world.task("a").members else ("b", "a")
    plan = world.stop(starting)
    assert change_of(plan, starting).action == "end"
    assert len(change_of(plan, waiting).prepare) == 2
    assert world.task(starting).life == "ended"


def test_a_fault_while_the_task_stops_still_saves_its_state() -> None:
    world = running()
    a, b, c, d = world.task().members
    first = world.stop()
    plan = world.exit(b)
    change = change_of(plan)
    assert plan.supersedes == [first.plan]
    assert change.action == "stop"
    assert workers(change.interrupted) == [a, c, d]
    assert change.failed == [b]


def test_losing_everybody_while_it_stops_ends_the_task_at_its_checkpoint() -> None:
    world = running(nodes=1, workers=1)
    world.checkpoint(step=5)
    world.stop()
    plan = world.exit("n0/0")
    assert change_of(plan).action == "end"
    last = world.records[-1].event
    assert last.type == "task.stopped"
    assert (last.step, last.path) == (5, "checkpoint-5")


def test_a_name_may_be_used_again_and_its_generations_go_on() -> None:
    world = running()
    world.complete(world.stop())
    plan = world.stopped("a", step=7, path="saved")
    assert plan is not None
    again = change_of(world.submit("a", saved="saved", step=7))
    assert again.target is not None
    assert again.target.generation == 2
    assert world.task().life == "active"


def test_whole_replicas_finish_the_step_and_the_rest_of_a_broken_one_stands_by() -> None:
    world = running(nodes=2, workers=2, parallel={"tensor": 2})
    world.checkpoint(step=5)
    a, b, c, d = world.task().members
    assert a.split("/")[0] == b.split("/")[0] != c.split("/")[0] == d.split("/")[0]
    plan = world.exit(b)
    change = change_of(plan)
    assert change.hold
    assert change.survivors == [a, c, d]
    assert change.interrupted is not None
    assert workers(change.interrupted) == [c, d]
    assert (change.interrupted.layout.tensor, change.interrupted.layout.data) == (2, 1)
    assert change.prepare == [b]
    assert change.target is not None
    assert dict(zip(workers(change.target), sources(change.target), strict=True)) == {
        a: "live", b: "take", c: "live", d: "live",
    }  # fmt: skip
    # Another of the same replica before that has formed: a is a step behind, and no whole replica is left. Copies in
    # memory have what is missing.
    last = change_of(world.exit(d))
    assert last.hold
    assert last.interrupted is None
    assert last.target is not None
    assert (last.target.complete, last.target.checkpoint) == (False, "checkpoint-5")
    assert dict(zip(workers(last.target), sources(last.target), strict=True)) == {
        a: "live", b: "take", c: "live", d: "take",
    }  # fmt: skip
    assert last.survivors == [a, c]


COPIED = {"every": 5, "memory_every": 1}
NOT_COPIED = {"every": 5, "memory_every": 0}


@pytest.mark.parametrize(("checkpoint", "source"), [(COPIED, "live"), (NOT_COPIED, "checkpoint")])
def test_all_replicas_retry_and_a_divided_optimizer_needs_all_its_parts(
    checkpoint: dict[str, int], source: str
) -> None:
    parallel = {"tensor": 2, "distributed_optimizer": True}
    world = running(nodes=2, workers=2, parallel=parallel, checkpoint=checkpoint)
    world.checkpoint(step=5)
    members = list(world.task().members)
    retry = change_of(world.complete(world.error(ErrorKind.CONNECTION, task="a", generation=1)))
    assert retry.interrupted is not None
    assert (workers(retry.interrupted), retry.action) == (members, "none")
    change = change_of(world.exit(members[3]))
    assert change.hold
    assert change.interrupted is None
    assert change.target is not None
    assert change.target.checkpoint == "checkpoint-5"
    assert (change.survivors, sources(change.target)[:3]) == (members[:3], [source] * 3)


def test_the_survivors_of_a_divided_optimizer_finish_the_step_by_what_is_copied() -> None:
    """Each replica holds a part: the lost one's is in the memory of nodes, until the survivors have divided it anew."""
    world = running(parallel={"distributed_optimizer": True}, checkpoint=COPIED)
    a, b, c, d = world.task().members
    plan = world.exit(b)
    change = change_of(plan)
    assert change.interrupted is not None
    assert change.target is not None
    assert (workers(change.interrupted), change.interrupted.complete) == ([a, c, d], False)
    assert (workers(change.target), change.target.complete) == ([a, c, d, b], True)
    # Another one before that has formed: still nobody has b's part.
    second = world.exit(d)
    change = change_of(second)
    assert change.interrupted is not None
    assert (workers(change.interrupted), change.interrupted.complete) == ([a, c], False)
    # Now the two have all of it, and it is saved when the task stops.
    world.resume(second, change)
    assert (world.task().holders, world.task().ranks) == ((a, c), {a: 0, c: 1})
    stop = change_of(world.stop())
    assert stop.interrupted is not None
    assert (workers(stop.interrupted), stop.interrupted.complete) == ([a, c], True)


def test_a_divided_optimizer_that_shrinks_is_whole_once_its_survivors_have_formed() -> None:
    world = running(nodes=3, workers=1, parallel={"distributed_optimizer": True}, checkpoint=COPIED)
    plan = world.lose("n1")
    change = change_of(plan)
    assert change.action == "none"
    assert change.interrupted is not None
    assert not change.interrupted.complete
    world.complete(plan)
    joined = change_of(world.join("n3"))
    assert joined.interrupted is None
    assert joined.target is not None
    assert joined.target.complete


def test_a_worker_lost_while_another_task_waits_for_it() -> None:
    """a gives workers to b; one of them dies before that: a finishes its step without it, b starts it anew."""
    world = World()
    world.join("n0")
    world.join("n1")
    world.complete(world.submit("a", workers={"min": 2}))
    exchange = world.submit("b", weight=2.0, workers={"min": 2})
    given = change_of(exchange, "a").release[0]
    assert given in world.task("b").members
    plan = world.exit(given, task="a")
    change = change_of(plan, "a")
    assert given not in workers(change.interrupted)
    assert given not in workers(change.target)
    assert set(change.release) == set(change_of(exchange, "a").release) - {given}
    assert {c.task for c in plan.changes} == {"a"}


def test_little_remaining_work_is_not_worth_a_move() -> None:
    world = running(nodes=2, steps=100)
    world.complete(world.lose("n1"))
    world.progress("a", step=99, step_s=0.01)
    assert world.join("n1").changes == []
    other = running(nodes=2)
    other.complete(other.lose("n1"))
    assert other.join("n1").changes != []


def test_what_a_move_may_cost_is_bounded_by_the_remaining_work() -> None:
    """Five minutes from its end, a task's D_running is five minutes, not the hours until the next failure."""
    world = running(nodes=1, steps=10_000)
    world.progress("a", step=1000, step_s=1.0)
    long = world.join("n1").problem
    world.progress("a", step=9700, step_s=1.0)
    short = world.join("n2").problem
    assert long is not None
    assert short is not None
    # The correction, and so the rate, is known to a power of 1.1; times lie on a grid of 1.1.
    assert 300 / 1.1**2 < short.tasks[0].running_s < 300 * 1.1
    assert 9000 / 1.1**2 < long.tasks[0].running_s < 9000 * 1.1
    assert horizons_s(world.state, world.now)["cpu"] > 200_000


def test_failures_seen_shorten_the_expected_time_between_them() -> None:
    world = running(nodes=4, steps=1_000_000, model={"layers": 9, "hidden": 999, "heads": 9, "sequence_length": 999})
    before = world.join("n4").problem
    after = world.lose("n4").problem
    assert before is not None
    assert after is not None
    # One failure more than the prior's one halves the mean; four nodes in place of five.
    assert 0.6 < after.tasks[0].running_s / before.tasks[0].running_s < 0.63


def test_the_last_holder_on_a_worker_given_away_leaves_the_checkpoint() -> None:
    world = World()
    world.join("n0")
    world.join("n1")
    world.complete(world.submit("a", workers={"min": 2}))
    exchange = world.submit("b", weight=2.0, workers={"min": 2})
    staying = world.task("a").members
    for worker in staying:
        plan = world.exit(worker, task="a")
    change = change_of(plan, "a")
    assert sources(change.target) == ["initial"] * 2
    assert set(workers(change.target)) == set(staying)
    assert set(change.release) == set(change_of(exchange, "a").release)
    assert change.hold
