"""The course of a fault: its time line, its phases, and where state came from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from services.api.postmortem.model import FailedWorker, Moment, Phase, StateSource
from shared.events.evidence import Evidence
from shared.events.severities import Severity
from shared.events.union import (
    ErrorDetected,
    FaultInjected,
    IncidentObserved,
    NodeJoined,
    NodeReturned,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskFailed,
    WorkerSlowed,
)
from shared.interface.models import Incident

TYPES = (
    "error.detected",
    "incident.observed",
    "plan.decided",
    "state.moved",
    "task.failed",
    "node.joined",
    "node.returned",
)
"""The types of the records of which a time line is made."""

_PHASES = {
    "held": "the survivors have left the broken step",
    "prepared": "the new processes are up",
    "resumed": "the interrupted step is done",
    "drained": "all ranks have stopped at a step boundary",
    "released": "the workers that the plan gives up are free",
    "restored": "the new stage has done its first step",
    "ended": "the task has given up its workers",
    "failed": "the plan has failed for the task",
}


def belongs(record: Recorded, incident: Incident) -> bool:
    """Return whether a record is part of the incident's course."""
    match record.event:
        case ErrorDetected() | IncidentObserved():
            return record.event.incident == incident.id
        case PlanDecided():
            return record.event.plan in incident.plans
        case StateMoved():
            return record.event.plan in incident.plans
        case TaskFailed():
            return record.event.incident == incident.id
        case NodeJoined() | NodeReturned():
            return incident.severity is Severity.SEV1 and record.event.node == incident.node
        case _:
            return False


def timeline(began: datetime, records: Sequence[Recorded]) -> list[Moment]:
    """Return the time line. ``began``: time of the fault; ``records``: of its course, in the order of the log."""
    moments = [moment for record in records for moment in _moments(began, record)]
    return sorted(moments, key=lambda moment: moment.at)


def _moments(began: datetime, record: Recorded) -> Iterator[Moment]:
    event = record.event
    match event:
        case ErrorDetected():
            where = event.worker or event.node or event.task or "the cluster"
            first = event.escalates is None and event.repeats is None
            if first:
                yield _moment(began, event.occurred_at, f"the fault: {event.kind.value} of {where}", record)
            how = f"detected by {event.method.value}, {event.severity.value}"
            text = how if first else f"the answer has failed; now {event.severity.value} ({event.method.value})"
            if event.repeats is not None:
                text = f"the same failure once more, on {where} ({event.severity.value})"
            yield _moment(began, event.detected_at, text, record)
        case IncidentObserved():
            cause = event.root_cause
            where = cause.worker or cause.node or "no single place"
            text = f"seen {len(event.observations) + event.omitted} times; root cause: {cause.kind.value} of {where}"
            yield _moment(began, record.recorded_at, text, record)
        case TaskFailed():
            text = f"{event.task} has failed: {event.reason}"
            yield _moment(began, event.occurred_at, text, record).model_copy(update={"task": event.task})
        case NodeJoined():
            yield _moment(began, record.recorded_at, f"node {event.node} joined again", record)
        case NodeReturned():
            yield _moment(began, record.recorded_at, f"node {event.node} may be used again", record)
        case FaultInjected():
            text = f"the fault {event.fault} was asked for, as a test, by {event.actor or 'a user'}"
            yield _moment(began, event.occurred_at, text, record)
        case WorkerSlowed():
            text = f"{event.worker} found {event.slowdown:.3g} times as slow as its peers, at step {event.step}"
            if event.slowdown <= 1.0:
                text = f"{event.worker} is as fast as its peers again{', and trusted' if event.ends else ''}"
            yield _moment(began, event.occurred_at, text, record)
        case PlanDecided():
            text = f"plan {event.plan} decided: {event.response.value}"
            if event.supersedes:
                text += f", in place of {', '.join(event.supersedes)}"
            yield _moment(began, record.recorded_at, text, record)
        case StateMoved():
            text = f"{event.phase}: {_PHASES[event.phase]}"
            if event.step:
                text += f"; {event.step} steps done"
            if event.detail:
                text += f"; {event.detail}"
            moment = _moment(began, event.occurred_at, text, record)
            yield moment.model_copy(update={"task": event.task, "durations_s": event.durations_s})
        case _:
            return


def _moment(began: datetime, at: datetime, what: str, record: Recorded) -> Moment:
    since_s = (at - began).total_seconds()
    return Moment(at=at, since_fault_s=since_s, what=what, position=record.position)


def phases(incident: Incident, records: Sequence[Recorded]) -> list[Phase]:
    """Return the parts of the way from the fault to planned strength. ``records``: of the incident's course."""
    detected = next((r.position for r in records if isinstance(r.event, ErrorDetected)), None)
    decided = next((r.position for r in records if isinstance(r.event, PlanDecided)), None)
    resumed, closed = end_position(records, incident.resumed_at), end_position(records, incident.closed_at)
    occurred, found, planned = incident.occurred_at, incident.detected_at, incident.planned_at
    known = [
        phase("detection", "from the fault until the detector knew it", occurred, found, detected),
        phase("decision", "until the plan was in the log", found, planned, decided),
    ]
    if (over := incident.closed_at) is not None and incident.restored_at is None:
        # A task did not recover: no time in the last phases is one of recovery.
        end = "until nothing was left to do; not all tasks train again"
        known.append(phase("end", end, planned or found, over, closed))
        known.append(phase("all of it", "from the fault until nothing was left to do", occurred, over, closed))
        return known
    on, strength = incident.resumed_at, incident.restored_at
    if on is not None or strength is None:
        step = "until the survivors had done the step that the fault broke"
        known.append(phase("interrupted step", step, planned, on, resumed))
    workers = "until all tasks trained on the workers that the plan gives them"
    known.append(phase("planned strength", workers, on or planned, strength, closed))
    known.append(phase("all of it", "from the fault to planned strength", occurred, strength, closed))
    return known


def phase(name: str, meaning: str, start: datetime | None, end: datetime | None, position: int | None) -> Phase:
    """Return a part of a way. ``position``: of the record with which it ended."""
    return Phase(name=name, meaning=meaning, duration_s=between_s(start, end), position=position)


def end_position(records: Sequence[Recorded], at: datetime | None) -> int | None:
    """Return the position of the record that says what ended at a time."""
    moves = (record for record in records if isinstance(record.event, StateMoved))
    return next((record.position for record in moves if record.event.occurred_at == at), None)


def without_later_returns(records: Sequence[Recorded]) -> list[Recorded]:
    """Return the records without those of a node that joins, or may be used, once more: the first ends the absence."""
    found: list[Recorded] = []
    seen: set[type] = set()
    for record in records:
        kind = type(record.event)
        if kind in (NodeJoined, NodeReturned):
            if kind in seen:
                continue
            seen.add(kind)
        found.append(record)
    return found


def back_at(records: Sequence[Recorded]) -> datetime | None:
    """Return when the incident's node came back; None: it has not, or was not away. ``records``: of the course."""
    return next((r.recorded_at for r in records if isinstance(r.event, NodeJoined | NodeReturned)), None)


def between_s(start: datetime | None, end: datetime | None) -> float | None:
    """Return the seconds between two times; None while one of them is missing."""
    return None if start is None or end is None else max(0.0, (end - start).total_seconds())


def sources(records: Sequence[Recorded]) -> list[StateSource]:
    """Return where the members of each stage had their state from."""
    found = []
    for record in records:
        event = record.event
        if isinstance(event, StateMoved) and event.sources:
            workers: dict[str, list[str]] = {}
            for worker, source in sorted(event.sources.items()):
                workers.setdefault(source, []).append(worker)
            found.append(
                StateSource(
                    task=event.task,
                    phase=event.phase,
                    generation=event.generation,
                    workers=workers,
                    move_s=event.durations_s.get("move"),
                    position=record.position,
                )
            )
    return found


def failed_workers(records: Sequence[Recorded]) -> list[FailedWorker]:
    """Return the workers whose processes the fault has stopped, as its first record names them."""
    event = next((record.event for record in records if isinstance(record.event, ErrorDetected)), None)
    if event is None:
        return []
    evidence = Evidence.read(event.evidence)
    parts = {task: (part.workers, part.generation) for task, part in evidence.tasks.items()}
    if event.task is not None and event.generation is not None:
        parts[event.task] = (evidence.workers or ([event.worker] if event.worker else []), event.generation)
    return [
        FailedWorker(task=task, worker=worker, generation=generation)
        for task, (workers, generation) in sorted(parts.items())
        for worker in workers
    ]


def found_by(incident: Incident) -> str:
    """Return what saw the fault and how late, in words."""
    late_s = (incident.detected_at - incident.occurred_at).total_seconds()
    text = f"{incident.method.value} saw it {late_s:.3g} s after it occurred"
    others = sorted({one.method.value for one in incident.observations} - {incident.method.value})
    if others:
        text += f"; {', '.join(others)} saw it too"
    seen = len(incident.observations) + incident.omitted
    return f"{text}; {seen} observations in all" if seen > 1 else text
