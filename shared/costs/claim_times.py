"""When the claims of a view begin and end, and from when on a change of the view alters them. Pure.

Seconds are charged one by one: who gets a second of a worker follows from the claims that cover it, and from their
order, which never changes. So what was settled stays right up to the earliest time at which any claim has changed
(``plan_changed_from_s`` and the others), and a window needs only the views whose claims reach into it.

Times are in seconds since the epoch; a time that has not come yet is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime

from shared.costs.claims import recompute_start
from shared.views.documents import Impact, IncidentView, PlanView, SpanKind, SpanView, TaskView


def _s(at: datetime | None) -> float:
    return math.inf if at is None else at.timestamp()


def _recompute_end_s(impact: Impact) -> float:
    """Return when the last recomputed step ended, or the training that it was part of."""
    if recompute_start(impact) is None:
        return math.inf
    return min(_s(impact.restored_at) + (impact.steps_recomputed - 1) * impact.step_s, _s(impact.until))


def _bounds(impact: Impact) -> tuple[float, ...]:
    """Return the times of an impact from which its claims are made (``costs/claims.py``), in a fixed order."""
    recompute = recompute_start(impact)
    restored = recompute or impact.restored_at or impact.closed_at
    return (
        _s(impact.drained_at),
        _s(recompute),
        _recompute_end_s(impact),
        _s(restored),
        _s(impact.resumed_at or restored),
        _s(impact.resumed_at),
        _s(impact.restored_at),
        _s(impact.until),
        _s(impact.restored_at or impact.until),
    )


def _end_s(impact: Impact) -> float:
    """Return when the last claim of an impact ends."""
    if impact.restored_at is None and impact.closed_at is None:
        return math.inf  # the impact's transition goes on
    if (impact.restored_at or impact.resumed_at) and impact.until is None:
        return math.inf  # the impact's workers train
    return max(bound for bound in (*_bounds(impact), impact.planned_at.timestamp()) if bound < math.inf)


def plan_times(plan: PlanView) -> tuple[float, float]:
    """Return from when, and up to when, a plan has claims."""
    impacts = plan.impacts.values()
    start_s = min(
        (plan.since or plan.decided_at).timestamp(), *(bound for i in impacts for bound in _bounds(i)), math.inf
    )
    detected_s = [plan.detected_at.timestamp()] if plan.detected_at is not None else []
    return start_s, max([start_s, plan.decided_at.timestamp(), *detected_s, *map(_end_s, impacts)])


def span_times(span: SpanView) -> tuple[float, float]:
    """Return from when, and up to when, a span has claims.

    Up to the detection of its incident, these are claims on its workers.
    """
    detected_s = span.detected_at.timestamp() if span.detected_at is not None else -math.inf
    return span.start.timestamp(), max(_s(span.end), detected_s)


def _first_difference(before: Iterable[float], after: Iterable[float]) -> float:
    return min((min(old, new) for old, new in zip(before, after, strict=True) if old != new), default=math.inf)


def plan_changed_from_s(before: PlanView | None, plan: PlanView) -> float:
    """Return the earliest time at which a plan's claims are not what they were before; infinite if there is none."""
    if before is None:
        return plan_times(plan)[0]
    return min(
        (_first_difference(_bounds(before.impacts[name]), _bounds(i)) for name, i in plan.impacts.items()),
        default=math.inf,
    )


def span_changed_from_s(before: SpanView | None, span: SpanView) -> float:
    """Return the earliest time at which a span's claims are not what they were before; infinite if there is none."""
    if span.kind is SpanKind.PROGRESS:
        return math.inf  # what the span achieves is not settled
    if before is None:
        return span.start.timestamp()
    return _first_difference(span_times(before), span_times(span))


def task_changed_from_s(before: TaskView | None, task: TaskView) -> float:
    """Return the earliest time from which it is no longer settled whether a task could train: that of its end."""
    if before is None or before.ended_at == task.ended_at or before.position != task.position:
        return math.inf
    return min(_s(before.ended_at), _s(task.ended_at))


def last_bound_s(
    plans: Iterable[PlanView], incidents: Iterable[IncidentView], spans: Iterable[SpanView], tasks: Iterable[TaskView]
) -> float:
    """Return the latest time that has come at which a claim of these views begins or ends; -inf if there is none."""
    impacts = [impact for plan in plans for impact in plan.impacts.values()]
    # Times are compared as they are: to make a number of each takes longer than all else here.
    times = [
        *(plan.decided_at for plan in plans),
        *(at for i in impacts for at in (i.planned_at, i.drained_at, i.resumed_at, i.restored_at)),
        *(at for i in impacts for at in (i.until, i.closed_at)),
        *(at for incident in incidents for at in (incident.occurred_at, incident.detected_at)),
        *(at for span in spans for at in (span.start, span.end, span.detected_at)),
        *(at for task in tasks for at in (task.submitted_at, task.ended_at)),
    ]
    latest = max((at for at in times if at is not None), default=None)
    ends_s = [-math.inf if latest is None else latest.timestamp(), *map(_recompute_end_s, impacts)]
    return max(end_s for end_s in ends_s if end_s < math.inf)
