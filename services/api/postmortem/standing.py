"""How an incident stands, and what there is to do about it: the sentences that a reader looks for first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from services.api.models import Incident
from services.api.postmortem.durations import clock, seconds
from services.api.postmortem.model import Shortfall
from services.api.postmortem.timeline import between_s
from services.api.postmortem.words import ADVICE
from services.api.views import NodeState, SpanView
from shared.severities import ErrorKind, Severity


def shortfalls(spans: Sequence[SpanView], restored_at: datetime | None) -> list[Shortfall]:
    """Return the times in which tasks have fewer workers; spans of one task that meet are one. Positions are left out.

    Args:
        spans: of the incident, in the order in which they began.
        restored_at: when all tasks were back at planned strength; what had ended by then did not last.
    """
    found: dict[str, Shortfall] = {}
    for span in spans:
        known = found.get(span.task)
        if known is not None:
            found[span.task] = known.model_copy(update={"until": span.end})
            continue
        left = span.before - len(span.workers)
        found[span.task] = Shortfall(task=span.task, workers=left, before=span.before, since=span.start, until=span.end)
    return [one for one in found.values() if one.until is None or restored_at is None or one.until > restored_at]


def headline(incident: Incident, short: Sequence[Shortfall], back_at: datetime | None) -> str:
    """Return what happened, in one sentence.

    Args:
        incident: it.
        short: times in which tasks have fewer workers because of it.
        back_at: when its node, if it was lost or isolated, came back.
    """
    where = incident.worker or incident.node or incident.task or "the cluster"
    cause = incident.root_cause
    what = f"{incident.kind.value} of {where}"
    if cause is not None and (cause.worker or cause.node) not in (None, incident.worker, incident.node):
        what += f", caused by {cause.kind.value} of {cause.worker or cause.node}"
    if incident.tasks:
        what += f"; it hit or changed {', '.join(incident.tasks)}"
    what = f"{incident.severity.value}: {what}; {_outcome(incident, short)}"
    return what if back_at is None else f"{what}; {incident.node} was back after {_after(incident, back_at)}"


def _outcome(incident: Incident, short: Sequence[Shortfall]) -> str:
    if incident.failed_tasks:
        return f"{' and '.join(incident.failed_tasks)} failed"
    if incident.restored_at is None:
        return "not at planned strength yet"
    after = _after(incident, incident.restored_at)
    if not short:
        return f"at full strength again {after} after the fault"
    return f"training again {after} after the fault, {', '.join(map(_fewer, short))}"


def _fewer(one: Shortfall) -> str:
    return f"{one.task} on {one.workers} of {one.before} workers"


def _after(incident: Incident, at: datetime) -> str:
    return seconds(between_s(incident.occurred_at, at))


def standing(incident: Incident, short: Sequence[Shortfall]) -> list[str]:
    """Return how it stands, in sentences. ``short``: times in which tasks have fewer workers because of it."""
    found = [f"{task} failed: {reason}." for task, reason in incident.failed_tasks.items()]
    if incident.restored_at is None:
        return found or ["Not over: not all tasks train on the workers that their plan gives them."]
    since = f"since {clock(incident.restored_at)} UTC"
    if found and set(incident.tasks) <= incident.failed_tasks.keys():
        return [*found, f"Its workers are free {since}; no other task was hit."]
    others = "all other tasks" if found else "all tasks"
    found.append(f"Over: {others} train on the workers that the plan gives them, {since}.")
    return found + [_lacked(one) for one in short]


def _lacked(one: Shortfall) -> str:
    if one.until is None:
        return f"{one.task} went on with {one.workers} of {one.before} workers, and still has fewer than before."
    proof = "" if one.position is None else f" (log position {one.position})"
    return (
        f"{one.task} went on with {one.workers} of {one.before} workers; what it lacked is a cost of this incident "
        f"until {clock(one.until)} UTC{proof}."
    )


def todo(incident: Incident, node: NodeState | None) -> list[str]:
    """Return what there is to do about it, in sentences.

    Args:
        incident: it.
        node: the present state of its node; None: it has none, or the node is not known.
    """
    found = [
        f"{task}: look at the last error below, mend its cause, then `unicron resume {task}`."
        for task in incident.failed_tasks
    ]
    general = ADVICE.get(incident.kind)
    if incident.severity is not Severity.SEV1 or incident.node is None or node is None:
        return found or ["Nothing." if general is None else f"Nothing now. {general}"]
    name = incident.node
    if node is NodeState.LOST:
        found.append(f"{name} is lost: {ADVICE[ErrorKind.NODE_LOST]}")
    elif node is NodeState.ISOLATED:
        advice = general if incident.kind in _MENDED_FIRST else None
        found.append(f"{name} is isolated: {advice or f'mend its cause, then `unicron return {name}`.'}")
    elif node is NodeState.LEFT:
        found.append(f"Nothing: {name} has left since.")
    else:
        found.append(f"Nothing: {name} is {node.value} now. If it happens again, look at its machine.")
    return found


_MENDED_FIRST = (ErrorKind.DEVICE, ErrorKind.BROKEN_LINK)
"""Kinds after which a node comes back in a way of its own."""
