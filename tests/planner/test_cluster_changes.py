"""Nodes that are lost, return or are isolated, and several tasks that share the cluster."""

from __future__ import annotations

from shared.events.plans import Response, Trigger
from shared.events.severities import Severity
from tests.planner.kit import World, change_of, running, sources, workers


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
