"""Ranks that hold up a plan: stopped, not leaving their step, not joining."""

from __future__ import annotations

from typing import Any

import pytest

from services.detector.view import TaskView
from shared.plans import Response, Stage, TaskChange
from shared.severities import ErrorKind, Severity
from tests.detector.kit import Cluster, moved, only_error, plan, restart_plan, stage


def stopped_from(cluster: Cluster, node: str, start_s: float, until_s: float, **status: Any) -> list[Any]:
    """All nodes send heartbeats four times a second; one shows its process stopped all the time."""
    events: list[Any] = []
    for quarter in range(round((until_s - start_s) * 4) + 1):
        now_s = start_s + quarter / 4
        for name in cluster.names:
            own = {"process_state": "T", "pid": 101, **status} if name == node else {"process_state": "S"}
            # The others wait, so that nothing but the stopped process can be seen.
            state = {"state": "waiting", "phase": "waiting"} if name != node else {}
            events += cluster.beat(name, now_s, **{**state, **own}).events
        events += cluster.tick(now_s)
    return events


def test_a_stopped_survivor_holds_no_plan_up() -> None:
    """It cannot be held; without a verdict the command would wait for it until its time is up."""
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert stopped_from(cluster, "n2", 1.0, 3.9) == []
    hang = only_error(stopped_from(cluster, "n2", 4.0, 5.0))
    assert (hang.kind, hang.severity, hang.worker, hang.node) == (ErrorKind.HANG, Severity.SEV2, "n2/0", "n2")
    assert (hang.generation, hang.escalates, hang.evidence["workers"]) == (1, None, ["n2/0"])
    # Answered by a plan that restarts it: nothing more is said of the old process.
    restart_plan("p3", hang, cluster, "n2/0", generation=3)
    assert stopped_from(cluster, "n2", 5.25, 12.0) == []


def test_who_matters_to_a_plan_is_put_together_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked anew for each worker it would take a task of thousands longer than the time between two ticks."""
    asked = []
    stages = TaskView.stages

    def counting(task: TaskView) -> list[Stage]:
        asked.append(task.name)
        return stages(task)

    def work(nodes: int) -> int:
        cluster = Cluster(nodes)
        error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
        restart_plan("p2", error, cluster, "n1/0")
        asked.clear()
        assert stopped_from(cluster, "n2", 1.0, 2.0) == []
        return len(asked)

    monkeypatch.setattr(TaskView, "stages", counting)
    assert 0 < work(3) == work(12)


def test_a_newcomer_stopped_before_it_joins_is_the_failed_restart() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    hang = only_error(
        stopped_from(cluster, "n1", 1.0, 5.0, state="ready", generation=2, phase=None, rank=None, progress_age_s=None)
    )
    assert (hang.kind, hang.severity, hang.worker) == (ErrorKind.HANG, Severity.SEV1, "n1/0")
    assert (hang.escalates, hang.incident) == (error.event_id, error.incident)


def test_a_process_that_goes_on_was_not_hanging() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert stopped_from(cluster, "n2", 1.0, 3.5) == []
    assert stopped_from(cluster, "n2", 3.75, 4.0, process_state="R") == []
    assert stopped_from(cluster, "n2", 4.25, 6.5) == []
    assert stopped_from(cluster, "n2", 6.75, 7.0, pid=102) == []  # another process by now
    assert stopped_from(cluster, "n2", 7.25, 9.75, pid=102) == []


def held_from(cluster: Cluster, start_s: float, until_s: float, **status: Any) -> list[Any]:
    """A dead rank's peers were told at ``start_s`` to leave their step; n2's has not done so."""
    events: list[Any] = []
    for quarter in range(round((until_s - start_s) * 4) + 1):
        age_s = quarter / 4
        cluster.beat("n0", start_s + age_s, state="waiting", phase="waiting", progress_age_s=age_s)
        cluster.beat("n1", start_s + age_s, state="ready", phase=None, progress_age_s=None, generation=2)
        fields = {"progress_age_s": age_s + 9.0, "hold_age_s": age_s, **status}
        cluster.beat("n2", start_s + age_s, step=15, **fields)
        events += cluster.tick(start_s + age_s)
    return events


def timed(cluster: Cluster) -> None:
    """The mean of its steps is known."""
    for index in range(1, 5):
        cluster.beat("n0", index / 10, step=index, step_s=0.1, steps_timed=index)


def test_a_survivor_that_does_not_leave_its_step_is_found() -> None:
    """However long it had waited for the dead rank before it was told."""
    cluster = Cluster()
    timed(cluster)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert held_from(cluster, 1.0, 4.0) == []
    hang = only_error(held_from(cluster, 1.0, 4.25))
    assert (hang.kind, hang.severity, hang.worker) == (ErrorKind.HANG, Severity.SEV2, "n2/0")
    assert (hang.incident, hang.evidence["limit_s"]) == (hang.event_id, 3.0)


@pytest.mark.parametrize(
    "status", [{"starved_s": 8.0}, {"phase": "checkpoint"}, {"phase": "setup"}, {"hold_age_s": None}]
)
def test_a_survivor_that_had_no_cpu_or_is_not_yet_told_is_not_hanging(status: dict[str, Any]) -> None:
    cluster = Cluster()
    timed(cluster)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert held_from(cluster, 1.0, 9.0, **status) == []


def joining(cluster: Cluster, age_s: float, parts: dict[str, int | None]) -> list[Any]:
    """The ranks of the stage in generation 3 have done some parts of joining it; None: they wait in the first step."""
    for name in cluster.names:
        done = parts[name]
        fields = {"phase": "reduce"} if done is None else {"phase": "setup", "micro_batch": done}
        cluster.beat(name, 2.0 + age_s, generation=3, progress_age_s=age_s, **fields)
    return cluster.tick(2.0 + age_s)


@pytest.mark.parametrize(("others", "age_s"), [(2, 5.1), (None, 5.1)])
def test_a_rank_that_hangs_as_it_joins_is_found(others: int | None, age_s: float) -> None:
    """In a user's ``build``, say: the others are further. The limit follows from how long joining took before."""
    cluster = Cluster()
    timed(cluster)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    cluster.fold(moved("p2", 2, "resumed", step=17, durations_s={"rebuild": 0.3, "agree": 0.1, "move": 0.0}))
    parts = {"n0": others, "n1": 1, "n2": others}
    assert joining(cluster, 4.9, parts) == []
    hang = only_error(joining(cluster, age_s, parts))
    assert (hang.kind, hang.worker, hang.generation) == (ErrorKind.HANG, "n1/0", 3)
    assert hang.evidence["limit_s"] == 5.0


def test_ranks_that_are_equally_far_in_joining_are_a_matter_of_their_collective() -> None:
    cluster = Cluster()
    timed(cluster)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    cluster.fold(moved("p2", 2, "resumed", step=17, durations_s={"rebuild": 1.5, "agree": 0.1, "move": 0.4}))
    parts: dict[str, int | None] = {"n0": 2, "n1": 2, "n2": 2}
    assert joining(cluster, 9.9, parts) == []
    assert only_error(joining(cluster, 10.1, parts)).kind is ErrorKind.COLLECTIVE_TIMEOUT


def drain_plan(cluster: Cluster) -> None:
    """A healthy task is to go on with one worker less."""
    change = TaskChange(
        task="gpt",
        reason="shrink",
        action="move",
        from_generation=1,
        survivors=cluster.workers,
        release=cluster.workers[2:],
        target=stage(2, cluster.workers[:2]),
    )
    cluster.fold(plan("p2", "another task", change, response=Response.RECONFIGURE))


def test_a_rank_that_hangs_while_its_task_drains_is_found() -> None:
    cluster = Cluster()
    timed(cluster)
    drain_plan(cluster)
    events: list[Any] = []
    for age_s in (2.0, 2.9, 3.1, 3.5):
        for name in cluster.names:
            phase = "compute" if name == "n1" else "reduce"
            events += cluster.beat(name, 1.0 + age_s, step=4, phase=phase, progress_age_s=age_s).events
        events += cluster.tick(1.0 + age_s)
    hang = only_error(events)
    assert (hang.kind, hang.severity, hang.worker, hang.evidence["limit_s"]) == (
        ErrorKind.HANG,
        Severity.SEV2,
        "n1/0",
        3.0,
    )


def test_a_stall_that_no_plan_ends_is_told_once() -> None:
    """Told again it would have the same id and another content, which the log refuses for good."""
    cluster = Cluster()
    timed(cluster)
    drain_plan(cluster)

    def stalled_for(age_s: float) -> list[Any]:
        events: list[Any] = []
        for name in cluster.names:
            events += cluster.beat(name, 1.0 + age_s, step=4, phase="reduce", progress_age_s=age_s).events
        return events + cluster.tick(1.0 + age_s)

    told = only_error(stalled_for(5.5))
    assert (told.kind, told.generation) == (ErrorKind.COLLECTIVE_TIMEOUT, 1)
    cluster.fold(plan("p3", told.event_id, response=Response.NONE))
    assert stalled_for(6.0) == []


def test_ranks_that_wait_for_others_on_the_way_do_not_hang() -> None:
    cluster = Cluster()
    drain_plan(cluster)
    for now_s in (1.0, 200.0, 400.0):  # another task's release may take minutes
        cluster.listen_until(now_s)
        for name in cluster.names:
            cluster.beat(name, now_s, state="waiting", phase="waiting", progress_age_s=now_s)
        assert cluster.tick(now_s) == []
