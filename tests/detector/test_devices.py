"""Faults of devices: one incident whatever found it first, and what brings an isolated node back."""

from __future__ import annotations

from typing import Any

import pytest

from services.detector.decisions.inputs import NodeTested
from shared.events.node_events import CheckResult
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import NodeJoined, NodeReturned
from shared.messages.self_test import SelfTestResult
from shared.messages.signals import DeviceFailed
from tests.detector.kit import START, Cluster, at, complete, only_error, restart_plan

ECC = {"error": "AcceleratorError", "detail": "CUDA error: uncorrectable ECC error encountered"}


def failed(cluster: Cluster, fault: str, seconds: float = 1.0, node: str = "n1", **rest: Any) -> DeviceFailed:
    cluster.signals += 1
    fields: dict[str, Any] = {"workers": [f"{node}/0"], "uuid": f"GPU-of-{node}", "device": 0, **rest}
    incarnation = fields.pop("incarnation", f"first {node}")
    return DeviceFailed(
        signal_id=f"signal {cluster.signals}",
        node=node,
        incarnation=incarnation,
        occurred_at=at(seconds),
        fault=fault,
        **fields,
    )


def raised_ecc(cluster: Cluster, worker: str, seconds: float) -> Any:
    return cluster.raised(worker, seconds, "exception").model_copy(update=ECC)


@pytest.mark.parametrize("fault", ["xid-79", "xid-48", "xid-64", "xid-74", "xid-95", "gpu-lost", "reset-required"])
def test_a_fault_that_the_device_does_not_survive_isolates_its_node(fault: str) -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(failed(cluster, fault), 1.1))
    assert (error.kind, error.method, error.severity) == (ErrorKind.DEVICE, Method.DEVICE, Severity.SEV1)
    assert (error.node, error.task, error.occurred_at, error.detected_at) == ("n1", None, at(1.0), at(1.1))
    evidence = error.evidence
    assert (evidence["fault"], evidence["device"], evidence["uuid"]) == (fault, 0, "GPU-of-n1")
    assert evidence["response"].startswith("The node is isolated.")
    assert evidence["tasks"]["gpt"]["workers"] == ["n1/0"]
    assert error.incident == error.event_id
    # What the ranks there report of it, their peers' broken sockets and further faults of the device add nothing.
    assert cluster.signal(raised_ecc(cluster, "n1/0", 1.2), 1.2) == []
    assert cluster.signal(cluster.exited("n1/0", 1.2), 1.3) == []
    assert cluster.signal(cluster.raised("n0/0", 1.2, "communication"), 1.3) == []
    assert cluster.signal(failed(cluster, fault, 1.3), 1.3) == []
    assert cluster.signal(failed(cluster, "gpu-lost", 1.3), 1.3) == []
    assert cluster.signal(failed(cluster, "xid-94", 1.3), 1.3) == []


@pytest.mark.parametrize("fault", ["xid-13", "xid-31", "xid-43", "xid-45", "xid-63", "xid-154", "xid-4242", "on-fire"])
def test_what_breaks_nothing_by_itself_is_no_incident(fault: str) -> None:
    cluster = Cluster()
    assert cluster.signal(failed(cluster, fault), 1.1) == []


@pytest.mark.parametrize("fault", ["xid-94", "xid-109", "drain-peers"])
def test_a_contained_fault_restarts_the_processes_of_the_device(fault: str) -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(failed(cluster, fault), 1.1))
    assert (error.kind, error.method, error.severity) == (ErrorKind.DEVICE, Method.DEVICE, Severity.SEV2)
    assert (error.task, error.node, error.worker, error.rank) == ("gpt", "n1", "n1/0", 1)
    assert error.evidence["workers"] == ["n1/0"]
    assert cluster.signal(cluster.exited("n1/0", 1.2), 1.2) == []
    assert cluster.signal(failed(cluster, fault, 1.2), 1.2) == []
    restart_plan("p2", error, cluster, "n1/0")
    assert cluster.signal(failed(cluster, fault, 1.3), 1.3) == []


def test_a_contained_fault_of_a_device_without_processes_restarts_nothing() -> None:
    cluster = Cluster()
    assert cluster.signal(failed(cluster, "xid-94", workers=["n1/5"]), 1.1) == []
    assert cluster.signal(failed(cluster, "xid-94", workers=[]), 1.1) == []


def test_a_contained_fault_that_a_restart_has_not_ended_isolates_the_node() -> None:
    cluster = Cluster()
    first = only_error(cluster.signal(failed(cluster, "xid-94"), 1.1))
    restart_plan("p2", first, cluster, "n1/0")
    complete("p2", cluster, 3, step=0)
    again = only_error(cluster.signal(failed(cluster, "xid-94", 2.0), 2.0))
    assert (again.severity, again.node, again.task) == (Severity.SEV1, "n1", None)


def test_another_contained_fault_later_is_another_incident() -> None:
    cluster = Cluster()
    first = only_error(cluster.signal(failed(cluster, "xid-94"), 1.1))
    restart_plan("p2", first, cluster, "n1/0")
    complete("p2", cluster, 3, step=40)
    again = only_error(cluster.signal(failed(cluster, "xid-94", 2.0), 2.0))
    assert (again.severity, again.incident != first.incident) == (Severity.SEV2, True)


def test_what_a_rank_met_first_is_the_incident() -> None:
    """The exception of a failed device: its Xid comes after it."""
    cluster = Cluster()
    error = only_error(cluster.signal(raised_ecc(cluster, "n1/0", 1.0), 1.1))
    assert (error.kind, error.severity, error.worker) == (ErrorKind.DEVICE, Severity.SEV1, "n1/0")
    assert cluster.signal(failed(cluster, "xid-48"), 1.2) == []
    assert cluster.signal(failed(cluster, "xid-94"), 1.2) == []


def test_an_xid_escalates_the_incident_of_the_process_that_it_ended() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0, code=-6), 1.0))
    assert error.severity is Severity.SEV2
    worse = only_error(cluster.signal(failed(cluster, "xid-79", 1.0), 1.1))
    assert (worse.severity, worse.node, worse.kind) == (Severity.SEV1, "n1", ErrorKind.DEVICE)
    assert (worse.incident, worse.escalates) == (error.incident, error.event_id)
    restart_plan("p2", error, cluster, "n1/0")  # too late: the plan of the first error
    assert cluster.signal(failed(cluster, "gpu-lost", 1.2), 1.2) == []


def test_an_xid_during_the_restart_escalates_it() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(failed(cluster, "xid-94"), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    worse = only_error(cluster.signal(failed(cluster, "xid-95", 1.5), 1.5))
    assert (worse.severity, worse.incident, worse.escalates) == (Severity.SEV1, error.incident, error.event_id)


def test_an_isolated_node_is_used_again_once_it_is_returned_and_not_by_its_links() -> None:
    cluster = Cluster()
    only_error(cluster.signal(failed(cluster, "xid-79"), 1.0))
    cluster.listen_until(20.0)
    for second in range(2, 20):
        assert cluster.beat("n1", float(second), task=None).events == []
    returned = NodeReturned(event_id="r", occurred_at=START, node="n1", incarnation="first n1", actor="u")
    cluster.fold(returned)
    assert only_error(cluster.signal(failed(cluster, "xid-79", 20.0), 20.0)).node == "n1"


def test_an_isolated_node_that_was_lost_meanwhile_does_not_join_by_itself() -> None:
    cluster = Cluster()
    only_error(cluster.signal(failed(cluster, "xid-79"), 1.0))
    cluster.monitor.state.nodes["n1"].lost = "an error"
    assert cluster.beat("n1", 2.0, task=None).events == []


def test_a_new_agent_brings_the_node_back_and_a_successor_does_not() -> None:
    cluster = Cluster(supervised=True)
    only_error(cluster.signal(failed(cluster, "xid-79"), 1.0))
    adopted = cluster.beat("n1", 2.0, task=None, incarnation="second n1").events
    assert [event.type for event in adopted] == ["node.adopted"]
    assert cluster.monitor.state.is_held_by_device("n1")
    found = cluster.beat("n1", 3.0, task=None, incarnation="third n1", supervisor="another")
    assert [event.type for event in found.events if event.type != "task.progressed"] == ["error.detected"]
    (question,) = found.tests
    passed = SelfTestResult(incarnation="third n1", checks=[CheckResult(name="devices", ok=True)])
    cluster.monitor.feed(NodeTested(question, passed), at(0.0))
    joined = cluster.beat("n1", 3.5, task=None, incarnation="third n1", supervisor="another").events
    assert [event.type for event in joined] == ["node.joined"]
    assert not cluster.monitor.state.is_held_by_device("n1")


def test_what_an_agent_finds_before_it_has_joined_isolates_the_node_as_it_joins() -> None:
    cluster = Cluster()
    signal = failed(cluster, "reset-required", node="n9", incarnation="first n9")
    stale = failed(cluster, "xid-79", node="n8", incarnation="another n8")
    assert cluster.signal(stale, 1.0) == []
    assert cluster.signal(signal, 1.0) == []
    cluster.names.append("n9")
    joined, error = cluster.beat("n9", 1.1, task=None).events
    assert isinstance(joined, NodeJoined)
    assert (error.severity, error.node) == (Severity.SEV1, "n9")
    assert [event.type for event in cluster.beat("n8", 1.2, task=None, rank=None).events] == ["node.joined"]


def test_a_signal_of_an_agent_that_was_replaced_or_of_a_lost_node_means_nothing() -> None:
    cluster = Cluster()
    cluster.monitor.state.nodes["n1"].past = frozenset({"earlier n1"})
    assert cluster.signal(failed(cluster, "xid-79", incarnation="earlier n1"), 1.0) == []
    cluster.monitor.state.nodes["n1"].lost = "an error"
    assert cluster.signal(failed(cluster, "xid-79"), 1.0) == []
