"""The course of an incident: its time line, its phases, and where state came from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from services.api.models import Incident
from services.api.postmortem.model import FailedWorker, Moment, Phase, StateSource
from shared.events import ErrorDetected, IncidentObserved, PlanDecided, Recorded, StateMoved
from shared.evidence import Evidence

TYPES = ("error.detected", "incident.observed", "plan.decided", "state.moved")
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
        case _:
            return False


def timeline(incident: Incident, records: Sequence[Recorded]) -> list[Moment]:
    """Return the time line. ``records``: those that belong to the incident, in the order of the log."""
    moments = [moment for record in records for moment in _moments(incident, record)]
    return sorted(moments, key=lambda moment: moment.at)


def _moments(incident: Incident, record: Recorded) -> Iterator[Moment]:
    event = record.event
    match event:
        case ErrorDetected():
            where = event.worker or event.node or event.task or "the cluster"
            first = event.escalates is None
            if first:
                yield _moment(incident, event.occurred_at, f"the fault: {event.kind.value} of {where}", record)
            how = f"detected by {event.method.value}, {event.severity.value}"
            text = how if first else f"the answer has failed; now {event.severity.value} ({event.method.value})"
            yield _moment(incident, event.detected_at, text, record)
        case IncidentObserved():
            cause = event.root_cause
            where = cause.worker or cause.node or "no single place"
            text = f"seen {len(event.observations) + event.omitted} times; root cause: {cause.kind.value} of {where}"
            yield _moment(incident, record.recorded_at, text, record)
        case PlanDecided():
            text = f"plan {event.plan} decided: {event.response.value}"
            if event.supersedes:
                text += f", in place of {', '.join(event.supersedes)}"
            yield _moment(incident, record.recorded_at, text, record)
        case StateMoved():
            text = f"{event.phase}: {_PHASES[event.phase]}"
            if event.step:
                text += f"; {event.step} steps done"
            if event.detail:
                text += f"; {event.detail}"
            moment = _moment(incident, event.occurred_at, text, record)
            yield moment.model_copy(update={"task": event.task, "durations_s": event.durations_s})
        case _:
            return


def _moment(incident: Incident, at: datetime, what: str, record: Recorded) -> Moment:
    since_s = (at - incident.occurred_at).total_seconds()
    return Moment(at=at, since_fault_s=since_s, what=what, position=record.position)


def phases(incident: Incident, records: Sequence[Recorded]) -> list[Phase]:
    """Return the parts of the way from the fault to full strength. ``records``: those that belong to the incident."""
    detected = next((r.position for r in records if isinstance(r.event, ErrorDetected)), None)
    decided = next((r.position for r in records if isinstance(r.event, PlanDecided)), None)
    resumed, restored = _ended(records, incident.resumed_at), _ended(records, incident.restored_at)
    found = [
        Phase(
            name="detection",
            meaning="from the fault until the detector knew it",
            duration_s=_between_s(incident.occurred_at, incident.detected_at),
            position=detected,
        ),
        Phase(
            name="decision",
            meaning="until the plan was in the log",
            duration_s=_between_s(incident.detected_at, incident.planned_at),
            position=decided,
        ),
        Phase(
            name="interrupted step",
            meaning="until the survivors had done the step that the fault broke",
            duration_s=_between_s(incident.planned_at, incident.resumed_at),
            position=resumed,
        ),
        Phase(
            name="full strength",
            meaning="until all tasks trained on the workers that the plan gives them",
            duration_s=_between_s(incident.resumed_at or incident.planned_at, incident.restored_at),
            position=restored,
        ),
        Phase(
            name="all of it",
            meaning="from the fault to full strength",
            duration_s=_between_s(incident.occurred_at, incident.restored_at),
            position=restored,
        ),
    ]
    if incident.resumed_at is None and incident.restored_at is not None:
        found = [phase for phase in found if phase.name != "interrupted step"]
    return found


def _ended(records: Sequence[Recorded], at: datetime | None) -> int | None:
    """Return the position of the record that says what ended at a time."""
    moves = (record for record in records if isinstance(record.event, StateMoved))
    return next((record.position for record in moves if record.event.occurred_at == at), None)


def _between_s(start: datetime | None, end: datetime | None) -> float | None:
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


def headline(incident: Incident) -> str:
    """Return what happened, in one sentence."""
    where = incident.worker or incident.node or incident.task or "the cluster"
    cause = incident.root_cause
    what = f"{incident.kind.value} of {where}"
    if cause is not None and (cause.worker or cause.node) not in (None, incident.worker, incident.node):
        what += f", caused by {cause.kind.value} of {cause.worker or cause.node}"
    if incident.tasks:
        what += f"; it hit or changed {', '.join(incident.tasks)}"
    if incident.restored_at is None:
        return f"{incident.severity.value}: {what}; not at full strength yet"
    seconds = (incident.restored_at - incident.occurred_at).total_seconds()
    return f"{incident.severity.value}: {what}; at full strength again {seconds:.3g} s after the fault"


def found_by(incident: Incident) -> str:
    """Return what saw the fault and how late, in words."""
    late_s = (incident.detected_at - incident.occurred_at).total_seconds()
    text = f"{incident.method.value} saw it {late_s:.3g} s after it occurred"
    others = sorted({one.method.value for one in incident.observations} - {incident.method.value})
    if others:
        text += f"; {', '.join(others)} saw it too"
    seen = len(incident.observations) + incident.omitted
    return f"{text}; {seen} observations in all" if seen > 1 else text
