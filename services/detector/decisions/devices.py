"""Faults of devices, as their node's agent reports them: what follows from each. Pure.

``shared.events.device_faults`` has the severity. SEV1 isolates the node; it is used again once a user returns it, or
with a new agent (``isolation.may_return``). SEV2 has the processes on the device's workers started again. Anything else
is recorded by the agent alone.

A rank may meet the fault as well, as an exception or as the end of its process, and one fault may have several codes.
Whatever comes first is the incident. A further report while that incident is not over adds nothing, except that a worse
severity escalates the incident.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from services.detector.decisions import incidents
from services.detector.decisions.decision import Decision
from services.detector.incidents.faults import METHOD, SERVICE, Fault
from services.detector.state.cluster import DetectorState
from services.detector.state.known_errors import KnownError
from services.detector.state.node import MonitoredNode
from services.detector.state.task import MonitoredTask
from shared.events.device_faults import DeviceFault, device_fault
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, derived_id
from shared.messages.signals import DeviceFailed

MOST_EARLY = 16
"""Most signals that are kept of a node that has not joined yet: all that an agent sends about the devices of one
machine at its start. An agent looks at its devices before its first heartbeat."""


def failed(decision: Decision, signal: DeviceFailed) -> None:
    """Take the report of a device's fault."""
    node = decision.state.nodes.get(signal.node)
    if node is None or node.incarnation != signal.incarnation:
        _keep(decision.state, signal)
        return
    fault = device_fault(signal.fault)
    if fault.severity is Severity.SEV1:
        _isolate(decision, node, signal, fault)
    elif fault.severity is not None:
        _restart(decision, node, signal, fault)


def joined(decision: Decision, node: str) -> None:
    """Take the reports that came before their node joined."""
    for signal in decision.state.early_devices.pop(node, []):
        if signal.incarnation == decision.state.nodes[node].incarnation:
            failed(decision, signal)


def _keep(state: DetectorState, signal: DeviceFailed) -> None:
    """Keep a signal of an agent that has not joined yet. Signals of an earlier agent are of no use."""
    kept = [one for one in state.early_devices.get(signal.node, []) if one.incarnation == signal.incarnation]
    state.early_devices[signal.node] = [*kept, signal][-MOST_EARLY:]


def _isolate(decision: Decision, node: MonitoredNode, signal: DeviceFailed, fault: DeviceFault) -> None:
    """Isolate the node, unless it is because of a device already."""
    state, now = decision.state, decision.now
    if state.is_held_by_device(node.name):
        return
    original = _outstanding(state, signal)
    event_id = derived_id(signal.signal_id, SERVICE, "device")
    evidence = Evidence(incarnation=node.incarnation, tasks=state.lost_ranks(node))
    event = ErrorDetected(
        event_id=event_id,
        occurred_at=min(signal.occurred_at, now),
        incident=original.incident if original is not None else event_id,
        kind=ErrorKind.DEVICE,
        severity=Severity.SEV1,
        method=METHOD[ErrorKind.DEVICE],
        detected_at=now,
        node=node.name,
        evidence=evidence.mapping(**_evidence(signal, fault)),
        escalates=original.event_id if original is not None else None,
    )
    decision.add(event)


def _restart(decision: Decision, node: MonitoredNode, signal: DeviceFailed, fault: DeviceFault) -> None:
    """Have the processes on the device's workers started again; isolate the node if that has not helped."""
    found = [(task, one) for task in decision.state.tasks.values() if (one := _of_task(task, signal, fault))]
    if any(task.failures.repeats(one.key) for task, one in found):
        _isolate(decision, node, signal, fault)
        return
    for task, one in found:
        incidents.record(decision, task, one)


def _of_task(task: MonitoredTask, signal: DeviceFailed, fault: DeviceFault) -> Fault | None:
    """Return the fault of a task that has processes on the device; None if no such fault is news.

    A process that the task's plan starts has not met the fault, or ends because of it and is found by that.
    """
    starting = set(task.change.prepare) if task.change is not None else set()
    generation = task.newest_generation()
    hit = [worker for worker in signal.workers if worker not in starting and task.accepts(worker, generation)]
    if not hit:
        return None
    member = task.members.get(hit[0])
    return Fault(
        cause=signal.signal_id,
        kind=ErrorKind.DEVICE,
        error=f"{fault.name} of {signal.uuid or f'device {signal.device}'}",
        occurred_at=signal.occurred_at,
        generation=generation,
        step=task.step,
        worker=hit[0],
        node=signal.node,
        rank=member.rank if member is not None else None,
        evidence=Evidence(workers=hit).mapping(**_evidence(signal, fault)),
        severity=fault.severity,
    )


def _outstanding(state: DetectorState, signal: DeviceFailed) -> KnownError | None:
    """Return the newest error of a worker of the device whose incident is not over: the same fault, found before."""
    answering = [t.cause for t in state.tasks.values() if t.change is not None and t.cause is not None]
    known = [error for error in (*answering, *state.unanswered.values()) if error.worker in signal.workers]
    return max(known, key=_detected_at, default=None)


def _detected_at(error: KnownError) -> datetime:
    return error.detected_at


def _evidence(signal: DeviceFailed, fault: DeviceFault) -> dict[str, Any]:
    """Return what the evidence says of the device and of its fault."""
    device = {"device": signal.device, "uuid": signal.uuid, "name": signal.name, "device_workers": signal.workers}
    meaning = {"fault": fault.name, "meaning": fault.meaning, "response": fault.response, "why": fault.why}
    return {**meaning, **device, "readings": signal.readings, "injected": signal.injected}
