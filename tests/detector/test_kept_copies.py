"""Copies in memory that nodes keep without a process of their task: deleted when the task is over, and not before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.detector.nodes.kept_copies import ASKED_EVERY_S, FAILED_S, LINGER_S
from services.detector.nodes.leftovers import Clean
from shared.events.plans import TaskChange
from shared.events.union import (
    Event,
    TaskDeleted,
    TaskFailed,
    TaskFinished,
    TaskStopped,
    TaskStopRequested,
    TaskSubmitted,
)
from shared.messages.signals import KeptCopies
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import START, Cluster, at, moved, plan

FAR_S = 30 * FAILED_S


def asked(cluster: Cluster, seconds: float, task: str = "gpt", node: str = "n0") -> list[Clean]:
    """Let a node report copies of a task, and no process; return what it is asked for."""
    return cluster.beat(node, seconds, task=None, copies=[KeptCopies(task=task, size_bytes=4096)]).cleans


def paused(*, path: str = "", step: int = 0) -> Cluster:
    """A task that has left all its workers and may go on; ``path``: of the checkpoint that it has left."""
    cluster = Cluster()
    cluster.beat("n0", 0.1, step=50)
    change = TaskChange(task="gpt", reason="no room", action="pause", from_generation=1, survivors=cluster.workers)
    stopped = TaskStopped(event_id="paused", occurred_at=START, task="gpt", generation=1, step=step, path=path)
    cluster.fold(plan("p2", "cause", change), *([stopped] if step else []), moved("p2", 1, "ended", complete=True))
    return cluster


def submitted() -> TaskSubmitted:
    return TaskSubmitted(event_id="again", occurred_at=at(10.0), task="gpt", spec=parse_spec(SPEC))


def stopped(step: int, path: str = "/c") -> TaskStopped:
    return TaskStopped(event_id="stopped", occurred_at=START, task="gpt", generation=1, step=step, path=path)


def failed() -> TaskFailed:
    return TaskFailed(event_id="failed", occurred_at=START, task="gpt", generation=1, step=50, reason="too often")


def finished() -> TaskFinished:
    return TaskFinished(
        event_id="finished",
        occurred_at=START,
        task="gpt",
        generation=1,
        step=100,
        samples_sha256="",
        parameters_path="",
    )


@pytest.mark.parametrize(("path", "step"), [("", 0), ("", 50), ("/c", 49)])
def test_those_of_a_task_that_is_not_over_stay_however_long_it_waits(path: str, step: int) -> None:
    cluster = paused(path=path, step=step)
    for seconds in (1.0, LINGER_S + 1.0, FAR_S):
        assert asked(cluster, seconds) == []


def test_those_of_a_paused_task_whose_state_is_saved_are_deleted() -> None:
    cluster = paused(path="/c", step=50)
    assert asked(cluster, 1.0) == [Clean("n0", "gpt", 1, [], copies=True)]
    assert asked(cluster, ASKED_EVERY_S) == [], "the agent has a moment to do it"
    assert asked(cluster, ASKED_EVERY_S + 1.0) != [], "and is asked again"


@pytest.mark.parametrize("event", [finished, lambda: stopped(50)])
def test_those_of_a_task_that_is_over_are_deleted_whenever_the_node_reports_them(event: Callable[[], Event]) -> None:
    """Its agent may have been away, or restarted, when the task ended."""
    cluster = Cluster()
    cluster.beat("n0", 0.1, step=50)
    cluster.fold(event())
    assert asked(cluster, FAR_S) == [Clean("n0", "gpt", 1, [], copies=True)]


@pytest.mark.parametrize("event", [failed, lambda: stopped(40), lambda: stopped(50, path="")])
def test_those_of_a_task_that_ended_without_its_newest_state_saved_stay_for_a_day(event: Callable[[], Event]) -> None:
    cluster = Cluster()
    cluster.beat("n0", 0.1, step=50)
    cluster.fold(event())
    assert asked(cluster, FAILED_S - 1.0) == []
    assert asked(cluster, FAILED_S) != []


def test_those_of_a_failed_task_that_is_resumed_stay_and_of_one_that_is_deleted_do_not() -> None:
    cluster = Cluster()
    cluster.fold(failed())
    deleted = TaskDeleted(event_id="deleted", occurred_at=at(1.0), task="gpt", actor="uid/0")
    for event, seconds, are_asked in ((submitted(), FAR_S, False), (failed(), 1.0, False), (deleted, 1.0, True)):
        cluster.fold(event)
        assert bool(asked(cluster, seconds)) == are_asked


@pytest.mark.parametrize("at_once", [False, True])
def test_those_of_a_task_whose_steps_a_user_gives_up_are_deleted(at_once: bool) -> None:
    cluster = Cluster()
    cluster.beat("n0", 0.1, step=50)
    about = {"event_id": "stop", "occurred_at": START, "task": "gpt", "at_once": at_once, "lose_steps": not at_once}
    cluster.fold(TaskStopRequested.model_validate(about), stopped(40))
    assert asked(cluster, 1.0) != []


def test_those_of_a_task_that_trains_elsewhere_stay_for_a_while() -> None:
    cluster = Cluster()
    target = stage(2, cluster.workers[:2])
    change = TaskChange(
        task="gpt",
        reason="moves",
        action="move",
        from_generation=1,
        survivors=cluster.workers,
        release=["n2/0"],
        target=target,
    )
    cluster.fold(plan("p2", "cause", change))
    assert asked(cluster, 1.0, node="n2") == []
    assert asked(cluster, LINGER_S + 1.0, node="n2") == [], "the plan is not done"
    cluster.fold(moved("p2", 2, "restored", complete=True))
    since_s = LINGER_S + 2.0
    assert asked(cluster, since_s, node="n2") == []
    assert asked(cluster, since_s + LINGER_S - 1.0, node="n2") == []
    assert asked(cluster, since_s + LINGER_S, node="n2") == [Clean("n2", "gpt", 2, [], copies=True)]
    assert asked(cluster, since_s + 2 * LINGER_S, node="n0") == [], "it has a worker there, which is being started"


def test_those_of_a_task_that_the_log_does_not_know_stay_for_a_while() -> None:
    cluster = Cluster()
    assert asked(cluster, 1.0, task="unknown") == []
    assert asked(cluster, LINGER_S, task="unknown") == []
    assert asked(cluster, LINGER_S + 1.0, task="unknown") == [Clean("n0", "unknown", 0, [], copies=True)]


def test_nothing_is_asked_of_a_node_that_keeps_none() -> None:
    cluster = Cluster()
    cluster.fold(finished())
    assert cluster.beat("n0", 1.0, task=None).cleans == []
