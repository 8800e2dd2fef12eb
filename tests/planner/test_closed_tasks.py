"""Tasks that take no newcomers, since these are not what those that train are."""

from __future__ import annotations

from services.planner.state.cluster import node_of
from shared.events.plans import Response
from shared.events.severities import ErrorKind
from shared.events.union import ErrorDetected, PlanDecided
from tests.planner.kit import World, change_of, running, workers

DETAIL = "code: train.py is b here and a on rank 0"


def differs(world: World, worker: str, *, again: bool = False) -> PlanDecided:
    evidence = {"detail": DETAIL, **({"rule": "task"} if again else {})}
    return world.error(ErrorKind.DIFFERENCE, worker=worker, node=node_of(worker), task="a", evidence=evidence)


def closed(world: World) -> PlanDecided:
    """Have two newcomers differ; return the plan that answers the second."""
    lost = world.task().members[-1]
    world.exit(lost)
    first = differs(world, lost)
    assert first.response is Response.RESTART
    return differs(world, lost, again=True)


def test_a_second_difference_leaves_the_task_to_the_workers_that_have_its_state() -> None:
    world = running()
    *survivors, lost = world.task().members
    plan = closed(world)
    change = change_of(plan)
    assert plan.response is Response.RECONFIGURE
    assert change.prepare == []
    assert workers(change.interrupted) == survivors
    world.complete(plan)
    assert world.task().members == tuple(survivors)
    assert all(node.usable for node in world.state.nodes.values())
    assert node_of(lost) not in world.state.incidents or world.state.incidents[node_of(lost)] == 1  # its first exit


def test_a_closed_task_takes_no_worker_that_joins_and_shrinks_with_every_loss() -> None:
    world = running(nodes=2, workers=1)
    kept = world.task().members[0]
    world.complete(closed(world))
    assert world.task().members == (kept,)
    assert world.join("n9").changes == []
    plan = world.exit(kept)
    assert change_of(plan).prepare == []
    assert DETAIL in plan.queued["a"]


def test_a_node_that_is_drained_is_no_reason_to_start_what_would_differ() -> None:
    world = running(nodes=3, workers=1)
    *_, lost = world.task().members
    world.complete(closed(world))
    staying = [w for w in world.task().members if w != world.task().members[0]]
    change = change_of(world.drain(node_of(world.task().members[0])))
    assert change.prepare == []
    assert lost not in workers(change.target or change.interrupted)
    assert set(workers(change.target)) == set(staying)


def test_a_task_that_is_stopped_and_resumed_takes_newcomers_again() -> None:
    world = running(nodes=2, workers=1)
    world.complete(closed(world))
    world.complete(world.stop())
    world.stopped()
    plan = world.submit(saved="stop-checkpoint", step=5)
    assert len(workers(change_of(plan).target)) == 2
    assert not world.task().closed


def test_the_node_of_a_newcomer_that_differs_is_no_lemon() -> None:
    world = running()
    lost = world.task().members[-1]
    before = dict(world.state.incidents)
    differs(world, lost)
    assert world.state.incidents == before
    assert isinstance(world.records[-2].event, ErrorDetected)
