"""The ledger: every worker-second from a node's first join until it is removed or drained, charged once. Pure.

docs/costs.md has the definition of each kind. Nothing here reads a clock: ``as_of`` stands in for times to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from shared.costs.charges import Charge, settle
from shared.costs.claims import (
    Claim,
    IncidentTimes,
    Part,
    failure_claims,
    planned_claims,
    start_claims,
    training_claims,
)
from shared.costs.intervals import Interval, outside, overlapping, union
from shared.costs.span_claims import (
    Window,
    allocated_intervals,
    lost_claims,
    shortfall_claims,
    undetected_claims,
    unused_claims,
)
from shared.views.documents import IncidentView, PlanView, SpanView

CATEGORIES = {
    Part.DETECTION: "detection",
    Part.TRANSITION: "transition_incident",
    Part.PLANNED: "transition_planned",
    Part.RECOMPUTE: "recompute",
    Part.LOST: "lost",
    Part.SUB_HEALTHY: "sub_healthy",
    Part.UNSCHEDULED: "unscheduled",
    Part.IDLE: "idle",
    Part.TRAINING: "useful",
}
"""The kinds of time by the part of a claim, in the order in which they apply."""


@dataclass(frozen=True)
class History:
    """The input of the ledger: views of all time."""

    plans: Sequence[PlanView]
    incidents: Sequence[IncidentView]
    spans: Sequence[SpanView]

    def present(self, at: datetime) -> datetime:
        """Return a present time that is not before what the log records: its clock may be a little ahead of ours."""
        return max([at, *(span.end or span.start for span in self.spans)])


def all_claims(history: History, window: Window, as_of: datetime) -> list[Claim]:
    """Return every claim, in the order in which seconds are charged: that of the kinds (``CATEGORIES``)."""
    return [*used_claims(history, window, as_of), *unused_claims(history.spans, window)]


def used_claims(history: History, window: Window, as_of: datetime) -> list[Claim]:
    """Return the claims of plans and of incidents, which come before the claims on time that nobody uses.

    Within a kind the oldest incident comes first. A worker that an incident has taken from a task is sub-healthy also
    while it trains for a task of a lower weight; so training and sub-healthy time come by weight. What no claim of a
    plan or an incident covers is unscheduled or idle.
    """
    spans = history.spans
    incidents = sorted(history.incidents, key=lambda view: view.position)
    by_part: dict[Part, list[Claim]] = {part: [] for part in Part}
    weighted: list[tuple[float, Claim]] = []
    starts: list[Claim] = []
    for weight, claim, starting in _plan_claims(history.plans, incidents, as_of):
        if not window.has(claim.start_s, claim.end_s):
            continue
        if starting:
            starts.append(claim)
        elif claim.part in {Part.TRAINING, Part.SUB_HEALTHY}:
            weighted.append((weight, claim))
        else:
            by_part[claim.part].append(claim)
    for claim in _while_not_training(starts, [claim for _, claim in weighted if claim.part is Part.TRAINING]):
        by_part[claim.part].append(claim)
    weighted += shortfall_claims(spans, window)
    weighted.sort(key=lambda pair: (-pair[0], pair[1].part is not Part.TRAINING))
    detected = {incident.id: incident.detected_at for incident in incidents}
    return [
        *by_part[Part.DETECTION],
        *undetected_claims(spans, detected, window),
        *by_part[Part.TRANSITION],
        *by_part[Part.PLANNED],
        *by_part[Part.RECOMPUTE],
        *lost_claims(spans, window),
        *(claim for _, claim in weighted),
    ]


def _plan_claims(
    plans: Sequence[PlanView], incidents: Sequence[IncidentView], as_of: datetime
) -> Iterator[tuple[float, Claim, bool]]:
    """Yield each claim of a plan with the weight of its task, and whether it is one on the start of a new worker."""
    by_id = {plan.id: plan for plan in plans}
    charged: set[tuple[str, str]] = set()
    for incident in incidents:
        first = IncidentTimes(incident.id, incident.occurred_at, incident.detected_at)
        # A further attempt is a fault of its own: from that attempt on its plan claims time, and not from the first
        # fault on.
        again = {
            one.event: IncidentTimes(incident.id, one.occurred_at, one.detected_at) for one in incident.attempts[1:]
        }
        answered: set[str] = set()
        for plan in sorted((by_id[name] for name in incident.plans if name in by_id), key=lambda p: p.position):
            for task, impact in plan.impacts.items():
                if incident.id not in (plan.incident, *plan.beside) and task not in answered:
                    continue  # another incident's plan counts only for tasks that this incident's plans changed
                times = again.get(plan.cause, first)
                is_first = task not in answered or times is not first
                for claim in failure_claims(impact, times, first=is_first, as_of=as_of):
                    yield impact.weight, claim, False
                answered.add(task)
                if (plan.id, task) not in charged:
                    charged.add((plan.id, task))
                    for claim in start_claims(impact, incident.id, as_of):
                        yield impact.weight, claim, True
    for plan in sorted(plans, key=lambda view: view.position):
        for task, impact in plan.impacts.items():
            for claim in training_claims(impact, as_of):
                yield impact.weight, claim, False
            if (plan.id, task) not in charged:
                cause = plan.trigger.value
                for claim in planned_claims(impact, as_of, cause):
                    yield impact.weight, claim, False
                for claim in start_claims(impact, "", as_of, cause):
                    yield impact.weight, claim, True


def _while_not_training(starts: Sequence[Claim], training: Iterable[Claim]) -> Iterator[Claim]:
    """Yield the claims on starts as far as the workers do not train for another task meanwhile."""
    trained: dict[str, list[Interval]] = {worker: [] for claim in starts for worker in claim.workers}
    for claim in training:
        for worker in claim.workers:
            if worker in trained:
                trained[worker].append((claim.start_s, claim.end_s))
    free = {worker: outside(union(intervals)) for worker, intervals in trained.items()}
    for claim in starts:
        workers_of: dict[Interval, list[str]] = {}
        for worker in claim.workers:
            for interval in overlapping(free[worker], claim.start_s, claim.end_s):
                workers_of.setdefault(interval, []).append(worker)
        for (start_s, end_s), workers in workers_of.items():
            yield claim._replace(workers=tuple(workers), start_s=start_s, end_s=end_s)


@dataclass(frozen=True)
class Ledger:
    """All charges in a window, and what they are to add up to.

    ``claims``: the claims that were settled. ``allocated``: when each worker was allocated. ``kinds``: of incidents, by
    id.
    """

    claims: Sequence[Claim]
    charges: Sequence[Charge]
    allocated: Mapping[str, Sequence[Interval]]
    kinds: Mapping[str, str]

    def cause(self, claim: Claim) -> str:
        """Return the kind of a claim's incident, or the trigger of its plan; empty where neither is the cause."""
        return self.kinds.get(claim.incident, claim.cause)

    def charges_within(self, window: Window) -> list[Charge]:
        """Return the part of the charges that lies in a part of the window."""
        parts = ((charge, _part(charge.intervals, window)) for charge in self.charges)
        return [charge._replace(intervals=tuple(part)) for charge, part in parts if part]

    def within(self, window: Window) -> Ledger:
        """Return the ledger of a part of the window."""
        # Workers of the same times go on having one list of them.
        distinct = {id(intervals): intervals for intervals in self.allocated.values()}
        times = {key: _part(intervals, window) for key, intervals in distinct.items()}
        return Ledger(
            claims=[claim for claim in self.claims if window.has(claim.start_s, claim.end_s)],
            charges=self.charges_within(window),
            allocated={worker: times[id(intervals)] for worker, intervals in self.allocated.items()},
            kinds=self.kinds,
        )


def _part(intervals: Sequence[Interval], window: Window) -> list[Interval]:
    return list(overlapping(intervals, window.start_s, window.end_s))


def ledger(history: History, as_of: datetime, window: Window | None = None, *, unused: bool = True) -> Ledger:
    """Settle everything up to ``as_of``.

    Args:
        history: the views.
        as_of: stands in for times to come.
        window: what to charge; None: all time up to then.
        unused: whether to charge time that nobody uses, too: no incident has any of it.
    """
    as_of = history.present(as_of)
    window = window or Window.of(None, as_of)
    claims = (all_claims if unused else used_claims)(history, window, as_of)
    allocated = allocated_intervals(history.spans, window)
    return Ledger(
        claims=claims,
        charges=settle(claims, allocated),
        allocated=allocated,
        kinds={incident.id: incident.kind.value for incident in history.incidents},
    )
