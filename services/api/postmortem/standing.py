"""How an incident stands, and what there is to do about it: the sentences that a reader looks for first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from services.api.postmortem.model import Shortfall
from services.api.postmortem.timeline import between_s
from services.api.postmortem.words import ADVICE, clock, seconds
from shared.events.severities import ErrorKind, Severity
from shared.interface.models import Incident
from shared.tasks.specification import ENDED
from shared.views.documents import NodeState, SpanView, TaskView
from shared.views.incident_parts import than_usual


def shortfalls(spans: Sequence[SpanView], closed_at: datetime | None) -> list[Shortfall]:
    """Return the times in which tasks have fewer workers, without positions; adjacent spans of one task become one.

    Args:
        spans: the incident's, in the order in which they began.
        closed_at: when nothing was left to do; times that had ended by then are left out.
    """
    found: dict[str, Shortfall] = {}
    for span in spans:
        since = Shortfall(task=span.task, workers=span.after, before=span.before, since=span.start, until=span.end)
        known = found.get(span.task, since)
        found[span.task] = known.model_copy(update={"workers": span.after, "until": span.end})
    return [one for one in found.values() if one.until is None or closed_at is None or one.until > closed_at]


def headline(incident: Incident, short: Sequence[Shortfall], back_at: datetime | None, now: datetime) -> str:
    """Return what happened, in one sentence.

    Args:
        incident: the incident.
        short: times in which tasks have fewer workers because of it.
        back_at: when the incident's node, if it was lost or isolated, came back.
        now: the present.
    """
    where = incident.worker or incident.node or incident.task or "the cluster"
    cause = incident.root_cause
    what = f"{incident.kind.value} of {where}"
    if cause is not None and (cause.worker or cause.node) not in (None, incident.worker, incident.node):
        what += f", caused by {cause.kind.value} of {cause.worker or cause.node}"
    if incident.tasks:
        what += f"; it hit or changed {', '.join(incident.tasks)}"
    what = f"{incident.severity.value}: {what}; {_outcome(incident, short, now)}"
    return what if back_at is None else f"{what}; {incident.node} was back after {_after(incident, back_at)}"


def _outcome(incident: Incident, short: Sequence[Shortfall], now: datetime) -> str:
    if incident.failed_tasks:
        return f"{' and '.join(incident.failed_tasks)} failed"
    if incident.closed_at is None:
        return f"not at planned strength yet: {_open_for(incident, now)}"
    if incident.restored_at is None:
        waiting = [one.task for one in short if one.workers == 0]
        return f"{' and '.join(waiting)} waits for workers" if waiting else "not all tasks that it hit train again"
    after = _after(incident, incident.restored_at)
    if not short:
        return f"at full strength again {after} after the fault"
    return f"training again {after} after the fault, {', '.join(map(_fewer, short))}"


def _open_for(incident: Incident, now: datetime) -> str:
    """Return for how long an incident has been open, beside how long one of its kind usually is."""
    if incident.stuck_s is not None:
        return f"stuck, {seconds(incident.stuck_s)} longer than {than_usual(incident.usual_s)}"
    usual = "none of its kind was healed before" if incident.usual_s is None else f"usually {seconds(incident.usual_s)}"
    return f"open for {_after(incident, now)} ({usual})"


def _fewer(one: Shortfall) -> str:
    return f"{one.task} on {one.workers} of {one.before} workers"


def _after(incident: Incident, at: datetime) -> str:
    return seconds(between_s(incident.occurred_at, at))


def standing(incident: Incident, short: Sequence[Shortfall], now: datetime) -> list[str]:
    """Return how an incident stands, in sentences.

    Args:
        incident: the incident.
        short: times in which tasks have fewer workers because of it.
        now: the present.
    """
    found = [f"{task} failed: {reason}." for task, reason in incident.failed_tasks.items()]
    times = len({one.generation for one in incident.attempts})  # ranks that fail alike in one generation fail once
    if times > 1:
        newest = clock(incident.attempts[-1].occurred_at)
        found.append(f"The same failure came {times} times in a row, at last at {newest} UTC.")
    if incident.closed_at is None:
        open_for = _open_for(incident, now)
        found.append(f"Not over: not all tasks train on the workers that their plan gives them; {open_for}.")
        return found
    since = f"since {clock(incident.closed_at)} UTC"
    if incident.failed_tasks and set(incident.tasks) <= incident.failed_tasks.keys():
        return [*found, f"Its workers are free {since}; no other task was hit."]
    if not incident.failed_tasks and incident.restored_at is None:
        found.append(f"Nothing is being done about it any more {since}, and not all tasks that it hit train again.")
        return found + [_lacked(one) for one in short]
    others = "all other tasks" if incident.failed_tasks else "all tasks"
    found.append(f"Over: {others} train on the workers that the plan gives them, {since}.")
    return found + [_lacked(one) for one in short]


def _lacked(one: Shortfall) -> str:
    workers = f"{one.workers} of {one.before} workers"
    if one.until is None and one.workers == 0:
        return f"{one.task} waits: it has none of the {one.before} workers that it had before."
    if one.until is None:
        return f"{one.task} went on with {workers}, and still has fewer than before."
    proof = "" if one.position is None else f" (log position {one.position})"
    went_on = f"went on with {workers}" if one.workers else f"waited without any of its {one.before} workers"
    return f"{one.task} {went_on}; what it lacked is a cost of this incident until {clock(one.until)} UTC{proof}."


def held_back(tasks: Iterable[TaskView]) -> list[str]:
    """Return what there is to do about tasks that wait after failures, in sentences."""
    found = []
    for task in tasks:
        if task.wait is None or task.state in ENDED:
            continue
        until = "until it is resumed" if task.wait.until is None else f"before {clock(task.wait.until)} UTC"
        found.append(
            f"{task.name} starts no process {until}, since the same failure comes again: mend its cause; "
            f"`unicron resume {task.name}` tries it at once."
        )
    return found


def todo(
    incident: Incident,
    node: NodeState | None,
    short: Sequence[Shortfall],
    away: Sequence[str] = (),
    waits: Sequence[str] = (),
) -> list[str]:
    """Return what there is to do about an incident, in sentences; "Nothing" only where nothing is open.

    Args:
        incident: the incident.
        node: the present state of the incident's node; None: it has no node, or the node is not known.
        short: times in which tasks have fewer workers because of it.
        away: parts of the control plane that do not work, in words.
        waits: the sentences of ``held_back`` about its tasks.
    """
    found = [
        f"{task}: look at the last error below, mend its cause, then `unicron resume {task}`."
        for task in incident.failed_tasks
    ]
    found += waits if waits and not away and incident.restored_at is None else _while_open(incident, away)
    lacking = [one.task for one in short if one.until is None]
    found += [
        f"{task} has fewer workers than before: `unicron show {task}` says what it waits for." for task in lacking
    ]
    name, general = incident.node, ADVICE.get(incident.kind)
    if incident.severity is Severity.SEV1 and name is not None and node is not None:
        if node is NodeState.LOST:
            found.append(f"{name} is lost: {ADVICE[ErrorKind.NODE_LOST]}")
        elif node is NodeState.ISOLATED:
            advice = general if incident.kind in _MENDED_FIRST else None
            found.append(f"{name} is isolated: {advice or f'mend its cause, then `unicron return {name}`.'}")
        elif not found:
            state = "has left since" if node is NodeState.LEFT else f"is {node.value} now"
            again = "" if node is NodeState.LEFT else " If it happens again, look at its machine."
            found.append(f"Nothing: {name} {state}.{again}")
        return found
    return found or ["Nothing." if general is None else f"Nothing now. {general}"]


def _while_open(incident: Incident, away: Sequence[str]) -> list[str]:
    """Return what there is to do about an incident that is not over; nothing for one that is."""
    if incident.closed_at is not None:
        return []
    if away:
        return [f"The control plane does not work, so nothing heals it: {'; '.join(away)}. Start again what is away."]
    if incident.stuck_s is not None:
        return ["It is stuck: `unicron status -o wide` says how far each part is, the log of that part why."]
    return ["Wait: it is being healed. `unicron status` says whether every part of the control plane works."]


_MENDED_FIRST = (ErrorKind.DEVICE, ErrorKind.BROKEN_LINK, ErrorKind.REPORTED)
"""Kinds of incidents after which a node comes back in a way of its own."""
