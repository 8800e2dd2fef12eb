"""Processes that no plan names any more: their node is asked to end them, and nobody else is disturbed."""

from __future__ import annotations

import pytest

from services.detector.nodes.leftovers import LEFTOVER_S, Clean
from shared.events.plans import TaskChange
from shared.events.union import TaskFinished
from tests.agent.kit import stage
from tests.detector.kit import START, Cluster, at, complete, moved, plan, restart_plan

INTERVAL_S = 0.25


def asked(cluster: Cluster, node: str, seconds: float, *, since_s: float = 0.0) -> list[Clean]:
    """Let a node report its process of ``gpt`` for some time; return what it is asked for."""
    cleans: list[Clean] = []
    for quarter in range(round(seconds / INTERVAL_S) + 1):
        cleans += cluster.beat(node, since_s + quarter * INTERVAL_S).cleans
    return cleans


def shrunk(cluster: Cluster) -> None:
    """The task has given up worker n2/0 and trains in generation 2 on the others."""
    kept = cluster.workers[:2]
    change = TaskChange(
        task="gpt",
        reason="shrink",
        action="move",
        from_generation=1,
        survivors=cluster.workers,
        release=["n2/0"],
        target=stage(2, kept),
    )
    cluster.fold(plan("p2", "cause", change), moved("p2", 2, "restored", complete=True))


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


def test_a_process_that_no_plan_names_is_ended() -> None:
    cluster = Cluster()
    shrunk(cluster)
    assert asked(cluster, "n2", LEFTOVER_S - INTERVAL_S) == []
    # The newest generation: the agent refuses an older one.
    assert asked(cluster, "n2", 0.0, since_s=LEFTOVER_S) == [Clean("n2", "gpt", 2, ["n2/0"])]
    assert asked(cluster, "n2", 0.5, since_s=LEFTOVER_S + 0.25) == [], "the agent has a moment to do it"
    assert asked(cluster, "n2", 0.0, since_s=LEFTOVER_S + 1.0) != [], "and is asked again"


def test_what_was_gone_in_between_is_another_process() -> None:
    cluster = Cluster()
    shrunk(cluster)
    assert asked(cluster, "n2", LEFTOVER_S - INTERVAL_S) == []
    cluster.beat("n2", LEFTOVER_S, task=None)
    assert asked(cluster, "n2", LEFTOVER_S - INTERVAL_S, since_s=LEFTOVER_S) == []


def test_members_and_workers_of_a_plan_in_progress_are_left_alone() -> None:
    cluster = Cluster()
    assert asked(cluster, "n2", 2 * LEFTOVER_S) == []
    change = TaskChange(task="gpt", reason="stop", action="stop", from_generation=1, survivors=cluster.workers)
    cluster.fold(plan("p2", "cause", change))
    assert asked(cluster, "n2", 2 * LEFTOVER_S, since_s=20.0) == []


def test_a_task_that_the_log_does_not_know_is_left_alone() -> None:
    cluster = Cluster()
    for quarter in range(40):
        assert cluster.beat("n2", quarter * INTERVAL_S, task="unknown").cleans == []


def test_the_ranks_of_a_task_that_has_ended_are_ended() -> None:
    cluster = Cluster()
    cluster.fold(finished())
    assert asked(cluster, "n0", LEFTOVER_S) == [Clean("n0", "gpt", 1, ["n0/0"])]


@pytest.mark.parametrize("failed", [False, True])
def test_the_release_of_an_ended_task_comes_first(failed: bool) -> None:
    """As long as the transition service is at it. If it gave up, because an agent did not answer, the rule applies."""
    cluster = Cluster()
    end = TaskChange(task="gpt", reason="ended", action="end", from_generation=1, release=cluster.workers)
    cluster.fold(finished(), plan("p2", "finished", end))
    assert asked(cluster, "n0", 2 * LEFTOVER_S) == []
    if failed:
        cluster.fold(moved("p2", 1, "failed", code="timeout", failed_workers=["n0/0"]))
    assert bool(asked(cluster, "n0", LEFTOVER_S, since_s=20.0)) == failed


def test_a_restart_in_progress_is_no_leftover() -> None:
    cluster = Cluster()
    error = cluster.signal(cluster.exited("n2/0", 1.0), 1.0)[0]
    restart_plan("p2", error, cluster, "n2/0")
    assert asked(cluster, "n2", 2 * LEFTOVER_S, since_s=1.0) == []
    complete("p2", cluster, 3)
    assert asked(cluster, "n2", 2 * LEFTOVER_S, since_s=20.0) == []


def test_a_heartbeat_that_a_later_one_has_overtaken_is_dropped() -> None:
    cluster = Cluster()
    cluster.beat("n0", 1.0, step=5)
    late = cluster.monitor.state.nodes["n0"].heartbeat
    cluster.beat("n0", 2.0, task=None)
    assert late is not None
    for heartbeat in (late, late):
        assert cluster.monitor.feed(heartbeat, at(3.0)).events == []
    assert cluster.monitor.state.nodes["n0"].heard_at == at(2.0)
    status = cluster.monitor.state.status("n0/0")
    assert status is not None
    assert status.task is None
