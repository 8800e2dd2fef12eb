"""Ranks that delay a plan: stopped, not leaving their step, not joining."""

from __future__ import annotations

from typing import Any

import pytest

from services.detector.state.task import MonitoredTask
from shared.events.plans import Layout, Response, Stage, TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import TaskStopped, derived_id
from tests.detector.hanging import drain_plan, held_from, joining, stalled, stopped_from
from tests.detector.kit import Cluster, at, grow_plan, moved, only_error, plan, restart_plan, timed


def test_a_stopped_survivor_does_not_delay_a_plan() -> None:
    """A stopped process cannot be held: the command would wait for it until the command times out."""
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert stopped_from(cluster, "n2", 1.0, 3.9) == []
    hang = only_error(stopped_from(cluster, "n2", 4.0, 5.0))
    assert (hang.kind, hang.severity, hang.worker, hang.node) == (ErrorKind.HANG, Severity.SEV2, "n2/0", "n2")
    assert (hang.generation, hang.escalates, hang.evidence["workers"]) == (1, None, ["n2/0"])
    # Once a plan restarts it, the old process causes no further event.
    restart_plan("p3", hang, cluster, "n2/0", generation=3)
    assert stopped_from(cluster, "n2", 5.25, 12.0) == []


def test_the_workers_that_matter_to_a_plan_are_collected_once_for_any_number_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collected for each worker, a task of thousands would take longer than the time between two ticks."""
    asked = []
    stages = MonitoredTask.stages

    def counting(task: MonitoredTask) -> list[Stage]:
        asked.append(task.name)
        return stages(task)

    def work(nodes: int) -> int:
        cluster = Cluster(nodes)
        error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
        restart_plan("p2", error, cluster, "n1/0")
        asked.clear()
        assert stopped_from(cluster, "n2", 1.0, 2.0) == []
        return len(asked)

    monkeypatch.setattr(MonitoredTask, "stages", counting)
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


def test_a_survivor_that_does_not_leave_its_step_is_found() -> None:
    """The time that it waited for the dead rank before it was asked does not count."""
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert held_from(cluster, 1.0, 4.0) == []
    hang = only_error(held_from(cluster, 1.0, 4.25))
    assert (hang.kind, hang.severity, hang.worker) == (ErrorKind.HANG, Severity.SEV2, "n2/0")
    assert (hang.incident, hang.evidence["limit_s"]) == (hang.event_id, 3.0)


@pytest.mark.parametrize(
    "status", [{"starved_s": 8.0}, {"phase": "checkpoint"}, {"phase": "setup"}, {"hold_age_s": None}]
)
def test_a_survivor_that_had_no_cpu_or_was_not_asked_yet_is_not_hanging(status: dict[str, Any]) -> None:
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert held_from(cluster, 1.0, 9.0, **status) == []


@pytest.mark.parametrize(("others", "age_s"), [(2, 5.1), (None, 5.1)])
def test_a_rank_that_hangs_as_it_joins_is_found(others: int | None, age_s: float) -> None:
    """For example in a user's ``build``. The limit follows from how long joining took before."""
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
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
    timed(cluster, 0.1, 0.1)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    cluster.fold(moved("p2", 2, "resumed", step=17, durations_s={"rebuild": 1.5, "agree": 0.1, "move": 0.4}))
    parts: dict[str, int | None] = {"n0": 2, "n1": 2, "n2": 2}
    assert joining(cluster, 9.9, parts) == []
    assert only_error(joining(cluster, 10.1, parts)).kind is ErrorKind.COLLECTIVE_TIMEOUT


def test_a_rank_that_hangs_while_its_task_drains_is_found() -> None:
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
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


def test_ranks_of_a_task_that_has_just_paused_are_not_judged() -> None:
    """Its state is saved, and the newest heartbeats are from before: they still have its ranks."""
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
    pause = TaskChange(task="gpt", reason="saves", action="pause", from_generation=1, survivors=cluster.workers)
    cluster.fold(plan("p2", "draining", pause, response=Response.RECONFIGURE))
    for name in cluster.names:
        cluster.beat(name, 2.0, step=4, phase="checkpoint", progress_age_s=1.0)
    cluster.fold(
        TaskStopped(
            event_id="stopped", occurred_at=at(2.1), task="gpt", generation=1, step=4, path="/checkpoints/step-4"
        )
    )
    assert cluster.tick(2.2) == []


def test_a_stall_that_no_plan_ends_is_recorded_once() -> None:
    """A second event would have the same id and another content, which the log refuses for good."""
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
    drain_plan(cluster)

    def stalled_for(age_s: float) -> list[Any]:
        events: list[Any] = []
        for name in cluster.names:
            events += cluster.beat(name, 1.0 + age_s, step=4, phase="reduce", progress_age_s=age_s).events
        return events + cluster.tick(1.0 + age_s)

    stall = only_error(stalled_for(5.5))
    assert (stall.kind, stall.generation) == (ErrorKind.COLLECTIVE_TIMEOUT, 1)
    cluster.fold(plan("p3", stall.event_id, response=Response.NONE))
    assert stalled_for(6.0) == []


@pytest.mark.parametrize("newcomer", ["a0", "z0"])
def test_a_collective_that_times_out_during_a_plan_is_one_of_the_ranks_that_train(newcomer: str) -> None:
    """A process that is up for the next stage has another generation and step, and takes no part."""
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
    grow_plan(cluster, [f"{newcomer}/0"])
    for name in cluster.names:
        cluster.beat(name, 8.0, step=10, phase="reduce", progress_age_s=5.5)
    cluster.names.append(newcomer)
    cluster.beat(newcomer, 8.0, state="ready", generation=2, rank=None, phase=None, progress_age_s=None)
    error = only_error(cluster.tick(8.0))
    assert error.event_id == derived_id("gpt/1/10/", "detector", "gpt/collective-timeout")
    assert (error.generation, error.step, error.worker, error.rank) == (1, 10, None, None)
    assert error.evidence["failure"] == "collective-timeout//step 10"


def test_ranks_that_wait_for_others_on_the_way_do_not_hang() -> None:
    cluster = Cluster()
    drain_plan(cluster)
    for now_s in (1.0, 200.0, 400.0):  # another task's release may take minutes
        cluster.listen_until(now_s)
        for name in cluster.names:
            cluster.beat(name, now_s, state="waiting", phase="waiting", progress_age_s=now_s)
        assert cluster.tick(now_s) == []


# ---- the ranks that are compared


@pytest.mark.parametrize(
    ("tensor", "pipeline", "blamed"), [(1, 1, ["n1/0", "n2/0"]), (3, 1, ["n1/0"]), (1, 3, ["n1/0"])]
)
@pytest.mark.parametrize("draining", [False, True])
def test_all_late_ranks_are_to_blame_if_none_of_them_waits_for_another(
    tensor: int, pipeline: int, blamed: list[str], draining: bool
) -> None:
    data = 3 // (tensor * pipeline)
    cluster = Cluster(layout=Layout(tensor=tensor, pipeline=pipeline, data=data, micro_batch=1))
    timed(cluster, 0.1, 0.1)
    if draining:
        drain_plan(cluster)
    cluster.beat("n0", 8.0, phase="reduce", progress_age_s=4.0)
    cluster.beat("n1", 8.0, micro_batch=1, progress_age_s=4.0)
    cluster.beat("n2", 8.0, micro_batch=2, progress_age_s=4.0)
    assert only_error(cluster.tick(8.0)).evidence["workers"] == blamed


def test_a_task_is_judged_once_all_its_ranks_are_known_to_train() -> None:
    """The rank that is missing may be the cause: its end is known a moment later."""
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
    grow_plan(cluster, ["n3/0"])
    cluster.fold(moved("p2", 2, "restored", complete=True))
    assert stalled(cluster, 130.0, generation=2) == [], "nothing was heard of n3 yet"
    cluster.names.append("n3")
    cluster.beat("n3", 500.0, task=None)
    assert only_error(stalled(cluster, 130.0, generation=2)).kind is ErrorKind.COLLECTIVE_TIMEOUT


def test_a_stage_of_a_plan_is_judged_once_all_its_ranks_train_in_it() -> None:
    cluster = Cluster()
    timed(cluster, 0.1, 0.1)
    grow_plan(cluster, ["n3/0"])
    assert stalled(cluster, 130.0, generation=2) == [], "nothing was heard of n3 yet"
    cluster.names.append("n3")

    def beside(**newcomer: Any) -> list[Any]:
        cluster.beat("n3", 500.0, **newcomer)
        cluster.names.remove("n3")
        events = stalled(cluster, 130.0, generation=2)
        cluster.names.append("n3")
        return events

    assert beside(task=None) == []
    assert beside(state="ready", generation=2, phase=None, progress_age_s=None) == []
    late = only_error(beside(generation=2, phase="reduce", progress_age_s=130.0))
    assert (late.kind, late.generation) == (ErrorKind.COLLECTIVE_TIMEOUT, 2)


def test_a_process_whose_failure_is_known_delays_no_plan() -> None:
    """It is stopped until the plan has ended it."""
    cluster = Cluster()
    hang = only_error(stopped_from(cluster, "n1", 1.0, 5.0))
    restart_plan("p2", hang, cluster, "n1/0")
    assert stopped_from(cluster, "n1", 5.25, 12.0) == []


def test_a_process_of_another_task_delays_no_plan() -> None:
    """The other task still has the worker that the plan gives to this one."""
    cluster = Cluster()
    grow_plan(cluster, ["n3/0"])
    assert cluster.tick(0.5) == [], "nothing was heard of n3 yet"
    cluster.names.append("n3")
    events = [e for e in stopped_from(cluster, "n3", 1.0, 9.0, task="other", generation=7) if e.type != "node.joined"]
    assert events == []
