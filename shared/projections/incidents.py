"""The fold's part for incidents: from the error event to the return to planned strength."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from shared.costs.counterfactuals import other_answers_to
from shared.events.evidence import Evidence
from shared.events.union import ErrorDetected, IncidentObserved, PlanDecided, Recorded
from shared.model import filled
from shared.tasks.specification import TaskState
from shared.views.documents import Impact, IncidentView, Views
from shared.views.incident_parts import Attempt, OtherAnswers, with_duration

_LIVE = frozenset({"own", "live", "take"})
"""Sources of state that are the memory of a running process: the worker's own, or a peer's."""


_GOES_ON: dict[str, Any] = {"restored_at": None, "closed_at": None}
"""What is known of the end of an incident for which there is something to do again."""


def detected(views: Views, recorded: Recorded, event: ErrorDetected) -> None:
    """Add an incident; an escalation of a known one raises its severity and adds to its evidence.

    The same failure once more is a further attempt of it.
    """
    known = views.incidents.get(event.incident)
    if known is None:
        views.incidents[event.incident] = filled(
            IncidentView,
            event,
            id=event.incident,
            position=recorded.position,
            tasks=[event.task] if event.task else sorted(Evidence.read(event.evidence).tasks),
            attempts=[_attempt(event)],
        )
        return
    if event.repeats is not None:
        severity = min(known.severity, event.severity)
        changes = {"severity": severity, "attempts": [*known.attempts, _attempt(event)], **_GOES_ON}
        views.incidents[event.incident] = known.model_copy(update=changes)
        return
    escalation = {
        "severity": event.severity.value,
        "kind": event.kind.value,
        "method": event.method.value,
        "detected_at": event.detected_at.isoformat(),
        "evidence": event.evidence,
    }
    evidence = {**known.evidence, "escalations": [*known.evidence.get("escalations", []), escalation]}
    views.incidents[event.incident] = known.model_copy(
        # The names of severities sort from the worst. An escalation may be milder than the first error.
        update={"severity": min(known.severity, event.severity), "evidence": evidence, **_GOES_ON}
    )


def _attempt(event: ErrorDetected) -> Attempt:
    return filled(Attempt, event, event=event.event_id)


def observed(views: Views, event: IncidentObserved) -> None:
    """Add what ranks and methods saw of an incident."""
    view = views.incidents.get(event.incident)
    if view is not None:
        changes = {"observations": event.observations, "omitted": event.omitted, "root_cause": event.root_cause}
        views.incidents[event.incident] = view.model_copy(update=changes)


def planned(views: Views, incident: str, event: PlanDecided, at: datetime) -> None:
    """Note that a plan answers the incident: ``planned_at`` is that of the first plan, ``response`` of the last."""
    view = views.incidents.get(incident)
    if view is None:
        return
    tasks = [*view.tasks, *(name for name in views.plans[event.plan].impacts if name not in view.tasks)]
    changes: dict[str, Any] = {"plans": [*view.plans, event.plan], "tasks": tasks, **_GOES_ON}
    changes["planned_at"] = view.planned_at or at
    if incident == event.incident or incident in event.beside:
        changes["response"] = event.response.value
        answered = {"plan": event.plan, "response": event.response.value}
        changes["attempts"] = [
            one.model_copy(update=answered)
            if one.event == event.cause or (incident in event.beside and not one.plan)
            else one
            for one in view.attempts
        ]
    if not view.failed_tasks:
        changes["other_answers"] = other_answers_to(view, [views.plans[name] for name in changes["plans"]])
    views.incidents[incident] = view.model_copy(update=changes)
    refresh(views, incident)


def refresh(views: Views, incident: str) -> None:
    """Derive the incident's times, source of state and recomputed steps from its plans.

    An incident that a task did not survive, or that left one without workers, ends without having been healed: it has
    no time of recovery.
    """
    view = views.incidents.get(incident)
    if view is None or not view.plans:
        return
    chains: dict[str, list[Impact]] = {}
    sources: list[str] = []
    for name in view.plans:
        plan = views.plans[name]
        for task, impact in plan.impacts.items():
            chains.setdefault(task, []).append(impact)
        for milestone in plan.milestones:
            if milestone.phase in {"resumed", "restored"}:
                sources += milestone.sources.values()
    # A fault that touched no task has nothing to restore.
    closed = _latest([_closed_at(chain) for chain in chains.values()]) if chains else view.planned_at
    hit = {task: chain for task, chain in chains.items() if any(impact.faulted for impact in chain)}
    faulted = list(hit.values())
    going_on = [chain for chain in faulted if chain[-1].after or _resumed_at(chain) is not None]
    resumed = _latest([_resumed_at(chain) for chain in going_on]) if faulted else closed
    healed = not view.failed_tasks and all(_is_healed(views, task, chain) for task, chain in hit.items())
    changes: dict[str, Any] = {
        "closed_at": closed,
        "restored_at": closed if healed else None,
        "resumed_at": None if view.failed_tasks else resumed,
        "state_source": describe_sources(sources),
        "steps_recomputed": sum(max(impact.steps_recomputed for impact in chain) for chain in chains.values()),
    }
    views.incidents[incident] = now = view.model_copy(update=changes)
    cluster = views.cluster.get("cluster")
    if cluster is not None and now.restored_at is not None and now.restored_at != view.restored_at:
        took_s = max((now.restored_at - now.occurred_at).total_seconds(), 0.0)
        usual = with_duration(cluster.usual, now.kind, incident, took_s)
        views.cluster["cluster"] = cluster.model_copy(update={"usual": usual})


def failed(views: Views, incident: str, task: str, reason: str, at: datetime) -> None:
    """Note that a task has failed because of an incident, which is over then unless a plan still has work for it."""
    view = views.incidents.get(incident)
    if view is None:
        return
    changes: dict[str, Any] = {
        "failed_tasks": {**view.failed_tasks, task: reason},
        "response": view.response or "fail-task",
        # What other answers would have cost compares recoveries, of which there is none.
        "other_answers": OtherAnswers(),
    }
    if not view.plans:
        changes["closed_at"] = at
    views.incidents[incident] = view.model_copy(update=changes)
    refresh(views, incident)
    view = views.incidents[incident]
    if view.closed_at is not None:
        views.incidents[incident] = view.model_copy(update={"closed_at": max(view.closed_at, at)})


def _closed_at(chain: list[Impact]) -> datetime | None:
    """Return when the newest plan for a task was done; a plan that leaves no workers is done when all are free.

    None: it is not done.
    """
    last = chain[-1]
    if last.closed_at is None:
        return None
    return last.restored_at or (None if last.after else last.closed_at)


def _is_healed(views: Views, task: str, chain: list[Impact]) -> bool:
    """Return whether a task that the fault has hit trains again, or has done all of its steps since."""
    known = views.tasks.get(task)
    return chain[-1].restored_at is not None or (known is not None and known.state is TaskState.SUCCEEDED)


def _resumed_at(chain: list[Impact]) -> datetime | None:
    """Return when a task first completed a step again; None if it has not, or plans have left it without workers."""
    times = [at for impact in chain if (at := impact.resumed_at or impact.restored_at) is not None]
    return min(times, default=None)


def _latest(times: list[datetime | None]) -> datetime | None:
    """Return the latest of some times, or None while one is missing."""
    known = [at for at in times if at is not None]
    return max(known) if known and len(known) == len(times) else None


def describe_sources(sources: list[str]) -> str:
    """Return where state came from, several sources joined by ``+``; ``live``: from the memory of a running process."""
    kinds = ["live" if source in _LIVE else source for source in sources if source]
    return "+".join(dict.fromkeys(sorted(kinds, key=lambda kind: kind == "live")))
