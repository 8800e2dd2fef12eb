"""Tasks that end as failed: the same failure again and again, or a rank that refuses the task."""

from __future__ import annotations

from typing import Any

from shared.events.plans import Response, TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, TaskFailed, TaskFinished, TaskSubmitted
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import START, Cluster, at, complete, moved, only_error, plan, restart_plan


def fail_again(cluster: Cluster, times: int, *, step: int = 16, gap_s: float = 10.0) -> list[Any]:
    """A rank raises at the same step, is restarted, and raises again."""
    events: list[Any] = []
    for index in range(times):
        now = at(1.0 + index * gap_s)
        signal = cluster.raised("n1/0", 1.0 + index * gap_s, "exception", step=step)
        events += cluster.monitor.feed(signal, now).events
        if isinstance(events[-1], ErrorDetected):
            restart_plan(f"p{index + 2}", events[-1], cluster, "n1/0", generation=cluster.generation)
            complete(f"p{index + 2}", cluster, cluster.generation + 2)
    return events


def test_the_same_failure_more_than_max_restarts_times_ends_the_task() -> None:
    cluster = Cluster()
    events = fail_again(cluster, 4)
    assert [type(e) for e in events] == [ErrorDetected] * 3 + [TaskFailed]
    assert {e.severity for e in events[:3]} == {Severity.SEV2}
    assert "ValueError" in events[3].reason
    assert "4 times" in events[3].reason
    assert events[3].reason.endswith(": ValueError: it broke")
    assert events[3].traceback == "Traceback ...\nValueError: it broke\n"
    assert events[3].incident == events[2].incident
    # The end of its ranks causes no further event.
    assert cluster.signal(cluster.exited("n0/0", 60.0), 60.0) == []


def test_no_restart_is_allowed_with_max_restarts_zero() -> None:
    assert [type(e) for e in fail_again(Cluster(max_restarts=0), 1)] == [TaskFailed]


def test_the_reason_of_a_task_whose_processes_exit_ends_with_their_last_output() -> None:
    cluster = Cluster(max_restarts=0)
    [failed] = cluster.signal(
        cluster.exited("n1/0", 1.0, code=1, last_output="loading\ntraining\nout of ideas\n\n"), 1.0
    )
    assert failed.reason == "process-exit (exit 1) at step 16 happened 1 times; max_restarts is 0: out of ideas"


def test_the_reason_of_a_task_whose_processes_wrote_nothing_ends_with_the_count() -> None:
    cluster = Cluster(max_restarts=0)
    [failed] = cluster.signal(cluster.exited("n1/0", 1.0, code=1, last_output=""), 1.0)
    assert failed.reason == "process-exit (exit 1) at step 16 happened 1 times; max_restarts is 0"


def test_the_failed_task_names_the_incident_of_the_same_failure() -> None:
    """Another failure between two of them has another incident."""
    cluster = Cluster(max_restarts=1)
    same = only_error(fail_again(cluster, 1))
    other = only_error(cluster.signal(cluster.exited("n2/0", 5.0), 5.0))
    restart_plan("other", other, cluster, "n2/0", generation=cluster.generation)
    complete("other", cluster, cluster.generation + 2)
    [failed] = cluster.signal(cluster.raised("n1/0", 9.0, "exception"), 9.0)
    assert (failed.incident, same.incident == other.incident) == (same.incident, False)


def test_a_task_that_fails_for_the_first_time_has_no_incident() -> None:
    [failed] = fail_again(Cluster(max_restarts=0), 1)
    assert failed.incident == ""


def test_failures_at_the_edge_of_the_window_count() -> None:
    """The fourth failure comes 600 seconds after the first."""
    assert [type(e) for e in fail_again(Cluster(), 4, gap_s=200.0)] == [ErrorDetected] * 3 + [TaskFailed]


def test_failures_outside_the_window_do_not_count() -> None:
    assert [type(e) for e in fail_again(Cluster(), 6, gap_s=300.0)] == [ErrorDetected] * 6


def test_ranks_that_fail_alike_in_one_generation_count_once() -> None:
    cluster = Cluster(max_restarts=1)
    events = []
    for worker in cluster.workers:
        events += cluster.signal(cluster.raised(worker, 1.0, "exception"), 1.0)
    assert [type(e) for e in events] == [ErrorDetected] * 3


def test_a_repeated_failure_blames_no_node() -> None:
    """The restarted rank raises again at the same step before the plan is done: a bug, not a bad node."""
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.raised("n1/0", 1.0, "exception"), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    again = cluster.raised("n1/0", 2.0, "exception", generation=3)
    second = only_error(cluster.signal(again, 2.0))
    assert second.severity is Severity.SEV2
    assert second.evidence["occurrences"] == 2


def refused(cluster: Cluster, worker: str, **rest: Any) -> Any:
    return cluster.raised(worker, 1.0, "refused", step=0, rank=None, **rest)


def test_a_refusal_before_the_task_has_trained_ends_it_at_once_and_blames_no_node() -> None:
    cluster = Cluster(trained=False)
    events = cluster.signal(refused(cluster, "n1/0"), 1.0)
    # The other ranks refuse, too, and all processes end.
    for worker in cluster.workers:
        events += cluster.signal(refused(cluster, worker), 1.1)
        events += cluster.signal(cluster.exited(worker, 1.2, code=1, step=0, rank=None), 1.2)
    events += cluster.fold(moved("p1", 1, "failed", failed_workers=cluster.workers)).events
    [failed] = events
    assert isinstance(failed, TaskFailed)
    assert failed.reason == "worker n1/0 of node n1 cannot run it: ImportError: it broke"
    assert (failed.incident, failed.generation) == ("", 1)
    assert failed.traceback.startswith("Traceback")


def test_an_exception_before_the_task_has_trained_is_an_incident() -> None:
    cluster = Cluster(trained=False)
    error = only_error(cluster.signal(cluster.raised("n1/0", 1.0, "exception", step=0), 1.0))
    assert (error.kind, error.severity) == (ErrorKind.EXCEPTION, Severity.SEV2)


def test_a_refusal_of_a_task_that_has_trained_is_a_fault_of_the_worker() -> None:
    """The task can run: this node lacks something."""
    cluster = Cluster()
    error = only_error(cluster.signal(refused(cluster, "n1/0"), 1.0))
    assert (error.kind, error.severity, error.worker) == (ErrorKind.EXCEPTION, Severity.SEV2, "n1/0")
    assert error.evidence["error"] == "ImportError"


def test_a_refusal_of_a_task_submitted_again_ends_it() -> None:
    """What an earlier task of its name did proves nothing about the new specification."""
    cluster = Cluster()
    finished = {"generation": 1, "step": 100, "samples_sha256": "", "parameters_path": ""}
    cluster.fold(TaskFinished(event_id="finished", occurred_at=START, task="gpt", **finished))  # type: ignore[arg-type]
    spec = parse_spec(SPEC)
    cluster.fold(TaskSubmitted(event_id="again", occurred_at=START, task="gpt", spec=spec))
    change = TaskChange(
        task="gpt", reason="new", action="move", from_generation=1, prepare=["n1/0"], target=stage(2, ["n1/0"])
    )
    cluster.fold(plan("p2", "again", change, response=Response.RECONFIGURE))
    assert [type(e) for e in cluster.signal(refused(cluster, "n1/0", generation=2), 1.0)] == [TaskFailed]


def test_a_refusal_on_a_worker_that_the_newest_plan_has_given_up_is_dropped() -> None:
    cluster = Cluster(trained=False)
    workers = ["n0/0", "n1/0"]
    change = TaskChange(
        task="gpt", reason="fewer", action="move", from_generation=1, prepare=workers, target=stage(2, workers)
    )
    cluster.fold(plan("p2", "another", change, response=Response.RECONFIGURE))
    assert cluster.signal(refused(cluster, "n2/0"), 1.0) == []
