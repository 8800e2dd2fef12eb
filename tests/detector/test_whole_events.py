"""Whole events: what the log, the folds and the reader of an incident get of each kind of fault.

The ids are compared, too: a detector that starts again, or an upgraded one, must derive the ids that the log has.
"""

from __future__ import annotations

from typing import Any

import pytest

from services.detector.state.error_classes import exit_name
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import TaskFailed
from tests.detector.kit import START, Cluster, at, grow_plan, lose, only_error, restart_plan, timed
from tests.detector.whole import TRACEBACK, event_id, failure, incident, without_ranks

# ---- faults of signals


def test_the_end_of_a_process() -> None:
    cluster = Cluster()
    cluster.signal(cluster.raised("n0/0", 0.99, "communication"), 1.0)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.05))
    assert without_ranks(error) == incident(
        event_id("signal 2", "gpt/process-exit"),
        ErrorKind.PROCESS_EXIT,
        Severity.SEV2,
        Method.PROCESS_SUPERVISION,
        (at(0.99), at(1.05)),
        node="n1",
        worker="n1/0",
        task="gpt",
        rank=1,
        generation=1,
        step=16,
        evidence={
            "exit": "SIGKILL",
            "exit_code": -9,
            "pid": 100,
            "last_output": "the end",
            "broken_sockets_of": ["n0/0"],
            "mean_step_s": None,
            **failure("process-exit/SIGKILL/step 16"),
        },
    )


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (0, "exit 0"),
        (1, "exit 1"),
        (-9, "SIGKILL"),
        (-100, "signal 100"),
        (77, "exit 77: its communicators could not be aborted in time"),
    ],
)  # Linux has no signal 100
def test_the_name_of_an_exit(code: int, name: str) -> None:
    assert exit_name(code) == name


@pytest.mark.parametrize(
    ("cause", "kind", "method", "raised"),
    [
        ("exception", ErrorKind.EXCEPTION, Method.EXCEPTION, "ValueError"),
        ("non_finite", ErrorKind.NON_FINITE, Method.STATISTICS, "NonFiniteValue"),
    ],
)
def test_what_a_rank_raised(cause: str, kind: ErrorKind, method: Method, raised: str) -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.raised("n1/0", 1.0, cause), 1.05))
    assert without_ranks(error) == incident(
        event_id("signal 1", f"gpt/{kind.value}"),
        kind,
        Severity.SEV2,
        method,
        (at(1.0), at(1.05)),
        node="n1",
        worker="n1/0",
        task="gpt",
        rank=1,
        generation=1,
        step=16,
        evidence={
            "error": raised,
            "detail": "it broke",
            "traceback": TRACEBACK.format(raised),
            "mean_step_s": None,
            **failure(f"{kind.value}/{raised}/step 16"),
        },
    )


def test_broken_sockets_without_a_cause() -> None:
    """The rank that the detector heard of first stands for all; the fault is as old as the oldest of them."""
    cluster = Cluster()
    cluster.signal(cluster.raised("n2/0", 1.02, "communication", step=17), 1.1)
    cluster.signal(cluster.raised("n0/0", 1.0, "communication", step=16), 1.15)
    for node in cluster.names:
        cluster.beat(node, 1.5)
    error = only_error(cluster.tick(1.5))
    assert without_ranks(error) == incident(
        event_id("gpt/1", "gpt/connection"),
        ErrorKind.CONNECTION,
        Severity.SEV3,
        Method.EXCEPTION,
        (at(1.0), at(1.5)),
        node="n2",
        worker="n2/0",
        task="gpt",
        rank=2,
        generation=1,
        step=17,
        evidence={
            "error": "CommunicationFailed",
            "detail": "it broke",
            "traceback": TRACEBACK.format("CommunicationFailed"),
            "broken_sockets_of": ["n2/0", "n0/0"],
            "mean_step_s": None,
            **failure("connection/CommunicationFailed/step 17"),
        },
    )


def test_broken_sockets_that_end_the_task() -> None:
    cluster = Cluster(max_restarts=0)
    cluster.signal(cluster.raised("n2/0", 1.0, "communication"), 1.0)
    for node in cluster.names:
        cluster.beat(node, 1.5)
    assert cluster.tick(1.5) == [
        TaskFailed(
            event_id=event_id("gpt/1", "gpt/connection"),
            occurred_at=at(1.5),
            task="gpt",
            generation=1,
            step=16,
            reason="connection (CommunicationFailed) at step 16 happened 1 times; max_restarts is 0: "
            "CommunicationFailed: it broke",
            traceback=TRACEBACK.format("CommunicationFailed"),
        )
    ]


def test_a_refusal() -> None:
    cluster = Cluster(trained=False)
    assert cluster.signal(cluster.raised("n1/0", 1.0, "refused", rank=None, step=0), 1.05) == [
        TaskFailed(
            event_id=event_id("signal 1", "gpt/refused"),
            occurred_at=at(1.05),
            task="gpt",
            generation=1,
            step=0,
            reason="worker n1/0 of node n1 cannot run it: ImportError: it broke",
            traceback=TRACEBACK.format("ImportError"),
        )
    ]


# ---- lost nodes


def test_a_silent_node() -> None:
    cluster = Cluster()
    cluster.beat("n0", 1.0, step=12)
    joined = cluster.monitor.state.nodes["n1"].joined
    error = only_error(lose(cluster, "n1"))
    assert error == incident(
        event_id(joined, "lost"),
        ErrorKind.NODE_LOST,
        Severity.SEV1,
        Method.NODE_HEALTH,
        (at(10.0), at(11.6)),
        node="n1",
        evidence={
            "reason": "no heartbeat",
            "last_heartbeat_at": at(10.0).isoformat(),
            "silence_s": 1.6,
            "limit_s": 1.5,
            "limit_source": "warm-up",
            "limit_samples": 0,
            "incarnation": "first n1",
            "tasks": {"gpt": {"workers": ["n1/0"], "generation": 1, "ranks": {"n1/0": 1}, "step": 12}},
        },
    )


def test_a_node_that_a_restarted_detector_never_heard_is_lost_since_that_began_to_listen() -> None:
    cluster = Cluster()
    [joined] = cluster.beat("n3", 0.0, task=None).events
    successor = Cluster()
    successor.fold(joined)
    successor.listen_until(1.6)
    for name in successor.names:
        successor.beat(name, 1.5)  # where none is heard, the detector itself may be cut off
    [error] = [e for e in successor.tick(1.6) if e.node == "n3"]
    assert (error.occurred_at, error.detected_at, error.evidence["listened_s"]) == (at(0.0), at(1.6), 1.6)
    assert error.evidence.keys().isdisjoint({"silence_s", "last_heartbeat_at"})
    assert error.event_id == event_id(joined.event_id, "lost")


def test_a_lost_node_has_no_part_of_a_task_that_has_ended() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    ended = TaskFailed(event_id="ended", occurred_at=START, task="gpt", generation=1, step=16, reason="a bug")
    cluster.fold(ended)
    assert only_error(lose(cluster, "n2")).evidence["tasks"] == {}


# ---- ranks that stand still


def train(cluster: Cluster, seconds: float, **of: dict[str, Any]) -> list[Any]:
    """All ranks wait in the reduction of step 10 since four seconds, but for what is given of a node's rank."""
    for name in cluster.names:
        cluster.beat(name, seconds, **{"step": 10, "phase": "reduce", "progress_age_s": 4.0, **of.get(name, {})})
    return cluster.tick(seconds)


def test_a_rank_that_hangs() -> None:
    cluster = Cluster()
    timed(cluster, 0.25, 0.25)
    error = only_error(train(cluster, 8.0, n2={"step": 9, "phase": "compute"}))
    assert without_ranks(error) == incident(
        event_id("gpt/1/9", "gpt/hang"),
        ErrorKind.HANG,
        Severity.SEV2,
        Method.STATISTICS,
        (at(4.0), at(8.0)),
        node="n2",
        worker="n2/0",
        task="gpt",
        rank=2,
        generation=1,
        step=9,
        evidence={
            "stalled_s": 4.0,
            "limit_s": 3.0,
            "limit_source": "floor",
            "limit_samples": 0,
            "workers": ["n2/0"],
            "mean_step_s": 0.25,
            **failure("hang/compute/step 9"),
        },
    )


def test_a_collective_that_times_out() -> None:
    cluster = Cluster()
    timed(cluster, 0.25, 0.25)
    longer = {name: {"progress_age_s": 5.5} for name in cluster.names}
    error = only_error(train(cluster, 8.0, **longer))
    assert without_ranks(error) == incident(
        event_id("gpt/1/10", "gpt/collective-timeout"),
        ErrorKind.COLLECTIVE_TIMEOUT,
        Severity.SEV3,
        Method.STATISTICS,
        (at(2.5), at(8.0)),
        task="gpt",
        generation=1,
        step=10,
        evidence={
            "stalled_s": 5.5,
            "limit_s": 5.0,
            "limit_source": "collective",
            "limit_samples": 0,
            "workers": [],
            "mean_step_s": 0.25,
            **failure("collective-timeout//step 10"),
        },
    )


def test_ranks_that_delay_a_plan_have_an_event_of_their_own() -> None:
    """Two ranks may hang at the same step, one after the other, between two stages of a plan."""
    cluster = Cluster()
    timed(cluster, 0.25, 0.25)
    grow_plan(cluster, [])
    late = {"step": 9, "phase": "compute"}
    error = only_error(train(cluster, 8.0, n1=late, n2=late))
    assert without_ranks(error) == incident(
        event_id("gpt/1/9/n1/0,n2/0", "gpt/hang"),
        ErrorKind.HANG,
        Severity.SEV2,
        Method.STATISTICS,
        (at(4.0), at(8.0)),
        node="n1",
        worker="n1/0",
        task="gpt",
        rank=1,
        generation=1,
        step=9,
        evidence={
            "stalled_s": 4.0,
            "limit_s": 3.0,
            "limit_source": "floor",
            "limit_samples": 0,
            "workers": ["n1/0", "n2/0"],
            "mean_step_s": 0.25,
            **failure("hang/compute/step 9"),
        },
    )


def test_a_process_that_stops_before_it_joins_hangs_in_no_phase() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    joins = {"state": "ready", "generation": 2, "rank": None, "phase": None, "progress_age_s": None, "step": 0}
    events: list[Any] = []
    for quarter in range(14):
        seconds = 1.0 + quarter / 4
        events += train(cluster, seconds, n1={**joins, "process_state": "T"})
    hang = only_error(events)
    assert hang.event_id == event_id("gpt/2/0/n1/0", "gpt/hang")
    assert (hang.worker, hang.generation, hang.step, hang.rank) == ("n1/0", 2, 0, None)
    assert hang.evidence["failure"] == "hang//step 0"
