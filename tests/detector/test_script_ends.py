"""What a script does behind the last step: it may take its time, and its failure is the task's."""

from __future__ import annotations

import pytest

from shared.events.severities import ErrorKind
from shared.events.union import ErrorDetected, TaskFailed, TaskFinished
from shared.tasks.specification import DEFAULT_FINISH_TIMEOUT_S
from tests.detector.kit import Cluster, only_error, timed


def in_tail(seconds: float, since_s: float = 1.0) -> Cluster:
    """Return a cluster whose ranks have all been behind the last step since a time."""
    cluster = Cluster()
    timed(cluster, *[0.1] * 10)
    cluster.listen_until(seconds)
    for node in cluster.names:
        cluster.beat(node, seconds, phase="tail", step=17, progress_age_s=seconds - since_s)
    return cluster


def test_a_script_may_go_on_behind_the_last_step_alone_and_for_minutes() -> None:
    """The scripts of the other ranks have ended: their workers are idle."""
    cluster = in_tail(10.0)
    for seconds in range(20, int(DEFAULT_FINISH_TIMEOUT_S), 20):
        cluster.listen_until(seconds)
        cluster.beat("n0", seconds, phase="tail", step=17, progress_age_s=seconds - 1.0)
        for node in ("n1", "n2"):
            cluster.beat(node, seconds, task=None)
        assert cluster.tick(seconds) == []
    events = cluster.signal(cluster.finished("n0/0", 599.0, step=17), 599.0)
    assert [type(event) for event in events] == [TaskFinished]


def test_a_script_that_does_not_end_in_time_ends_the_task_with_that_reason() -> None:
    cluster = in_tail(DEFAULT_FINISH_TIMEOUT_S + 2.0)
    (failed,) = cluster.tick(DEFAULT_FINISH_TIMEOUT_S + 2.0)
    assert isinstance(failed, TaskFailed)
    assert failed.reason.startswith("its script did not end within 600 s behind the last step (finish_timeout_s)")
    assert cluster.tick(DEFAULT_FINISH_TIMEOUT_S + 3.0) == []


def test_an_error_behind_the_last_step_ends_the_task_with_its_text_and_blames_no_node() -> None:
    cluster = in_tail(10.0)
    raised = cluster.raised("n1/0", 10.1, "exception", trained=True)
    (failed,) = cluster.signal(raised, 10.1)
    assert isinstance(failed, TaskFailed)
    assert failed.reason.startswith("its script failed behind the last step, on worker n1/0: ValueError: it broke;")
    assert failed.traceback == raised.traceback
    assert cluster.signal(cluster.exited("n1/0", 10.2, code=1, trained=True), 10.2) == []


def test_an_exit_status_behind_the_last_step_ends_the_task_with_its_last_output() -> None:
    cluster = in_tail(10.0)
    (failed,) = cluster.signal(cluster.exited("n1/0", 10.1, code=3, trained=True), 10.1)
    assert isinstance(failed, TaskFailed)
    assert "on worker n1/0: exit 3: the end;" in failed.reason


@pytest.mark.parametrize("trained", [False, True])
def test_a_process_that_is_killed_behind_the_last_step_is_an_incident_as_elsewhere(trained: bool) -> None:
    cluster = in_tail(10.0)
    error = only_error(cluster.signal(cluster.exited("n1/0", 10.1, trained=trained), 10.1))
    assert isinstance(error, ErrorDetected)
    assert (error.kind, error.worker) == (ErrorKind.PROCESS_EXIT, "n1/0")


def test_a_peer_that_is_lost_behind_the_last_step_is_no_failure_of_the_script() -> None:
    cluster = in_tail(10.0)
    assert cluster.signal(cluster.raised("n0/0", 10.1, "communication", trained=True), 10.1) == []
    error = only_error(cluster.signal(cluster.exited("n1/0", 10.1, trained=True), 10.2))
    assert error.worker == "n1/0"
