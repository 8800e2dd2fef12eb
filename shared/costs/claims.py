"""Claims of plans: what moves, faults and training made of each worker's time, in seconds. Pure.

C_failure = C_detection + C_transition + C_recompute + C_lost + C_sub-healthy, in worker-seconds.

Every second of every allocated worker is *claimed* by what the worker did (or could not do) in it. Charges
(``shared/costs/charges.py``) give each second to the first claim on it, in the order of
``shared/costs/ledger.py``. So the parts add up to the allocated time, and no second of a worker is counted twice:
not by two parts of one incident, not by two incidents whose times overlap, not by two tasks that have a worker one
after the other. The claims that follow from a plan are made here; those of nodes that are away, of tasks that lack
workers and of workers without a task in ``shared/costs/span_claims.py``.

For one task of one plan, with N workers before it (S survivors, R = those of the N that are started again, G = those of
the N that the plan does without, A = workers that are new to the task):

    detection    N x (detected - occurred)                 all wait for the lost one at the next collective
    transition   S x (resumed - detected)                  held, re-planned, the interrupted step finished
               + S x (restored - drained)                  the second rendezvous, at the step boundary
               + R x (restored - detected)                 process started, state moved, first step
               + G x (resumed - detected)                  as S: until then no plan could do better
               + A x (restored - planned)                  started for this plan; only while not busy elsewhere
    sub-healthy  G x (restored - resumed)                  fewer workers than before the fault
    recompute    N' x steps recomputed x step time         N' workers of the target; transition ends where it starts
    training     from resumed or restored until the next plan, minus all of the above

``resumed`` is replaced by ``restored`` where nothing was interrupted. A task that a plan moves without a fault has
only ``S x (restored - drained)`` and A's part. Moves that no incident caused (a start, growth, a node that left)
are ``planned``, recomputed steps included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from shared.views.documents import Impact


class Part(StrEnum):
    """What a span of a worker's time was used for."""

    DETECTION = "detection"
    TRANSITION = "transition"
    RECOMPUTE = "recompute"
    LOST = "lost"
    """The worker's node is away: lost or isolated."""
    SUB_HEALTHY = "sub-healthy"
    """The worker is present, and without an open incident it would be used, or used better."""
    PLANNED = "planned"
    """A transition that no incident caused."""
    TRAINING = "training"
    UNSCHEDULED = "unscheduled"
    """No task uses the worker: its node is closed, or no task could use more workers."""
    IDLE = "idle"
    """No task uses the worker, and some task could use more workers."""


FAILURE_PARTS = (Part.DETECTION, Part.TRANSITION, Part.RECOMPUTE, Part.LOST, Part.SUB_HEALTHY)


@dataclass(frozen=True, slots=True)
class IncidentTimes:
    """The incident that a plan answers: its id, when the fault occurred and when it was detected."""

    id: str
    occurred_at: datetime
    detected_at: datetime


class Claim(NamedTuple):
    """The time of some workers from ``start_s`` to ``end_s`` (seconds since the epoch) goes to ``part``.

    ``workers``: each once. ``flop_per_worker_s``: weighted FLOP that such a second of one of them would have achieved.
    ``cause``: the trigger of the plan, where no incident is the cause. It is a tuple, which is made in a third of the
    time of a frozen dataclass: a second in which much happens has hundreds.
    """

    workers: tuple[str, ...]
    start_s: float
    end_s: float
    part: Part
    task: str
    incident: str = ""
    flop_per_worker_s: float = 0.0
    cause: str = ""


def _span(
    impact: Impact,
    workers: Iterable[str],
    start: datetime | None,
    end: datetime,
    part: Part,
    incident: str = "",
) -> list[Claim]:
    """Return the claim of workers on the time from ``start`` to ``end``; none if there is no worker, or no time."""
    claimed = tuple(workers)
    if not claimed or start is None or end <= start:
        return []
    rate = impact.waf_flop_per_s / len(impact.before) if impact.before else 0.0
    return [Claim(claimed, start.timestamp(), end.timestamp(), part, impact.task, incident, rate)]


def recompute_start(impact: Impact) -> datetime | None:
    """Return when the first recomputed step began: it ended at ``restored``, as the target's first step.

    A step time by which it would have begun before the plan, or before the drain, was measured in other circumstances.
    """
    if impact.restored_at is None or impact.steps_recomputed <= 0 or impact.step_s <= 0.0:
        return None
    least = max(impact.planned_at, impact.drained_at or impact.planned_at)
    longest_s = max((impact.restored_at - least).total_seconds(), 0.0)
    return impact.restored_at - timedelta(seconds=min(impact.step_s, longest_s))


def _recompute(impact: Impact, incident: str, as_of: datetime) -> Iterator[Claim]:
    """Yield the claims on recomputed steps, up to the end of the training that they are part of.

    Steps that a planned stop has cost belong to no incident, so their time counts as ``planned``.
    """
    part = Part.RECOMPUTE if incident else Part.PLANNED
    start = recompute_start(impact)
    if start is None:
        return
    assert impact.restored_at is not None
    start_s = start.timestamp()
    later_s = (impact.steps_recomputed - 1) * impact.step_s
    until_s = min(at.timestamp() for at in (impact.until, as_of) if at is not None)
    end_s = min(impact.restored_at.timestamp() + later_s, until_s)
    rate = impact.waf_flop_per_s / len(impact.before) if impact.before else 0.0
    if impact.after and end_s > start_s:
        yield Claim(tuple(impact.after), start_s, end_s, part, impact.task, incident, rate)


def failure_claims(impact: Impact, incident: IncidentTimes, *, first: bool, as_of: datetime) -> list[Claim]:
    """Return the claims of one incident on one task through one of its plans (formulas above).

    Args:
        impact: the plan's impact on the task.
        incident: the incident that the plan answers.
        first: whether the plan is the first answer to the incident for this task. A later plan (after a failed restart,
            or a further error) claims from its own decision on; the time before belongs to the earlier plan.
        as_of: stands in for times that have not come yet.
    """
    if not impact.faulted:
        return [
            *_recompute(impact, incident.id, as_of),
            *_moved_claims(impact, Part.TRANSITION, incident.id, as_of),
        ]
    closed = impact.closed_at or as_of
    restored = recompute_start(impact) or impact.restored_at or closed
    resumed = impact.resumed_at or restored
    start = incident.detected_at if first else max(incident.detected_at, impact.planned_at)
    before, after, survivors = set(impact.before), set(impact.after), set(impact.survivors)
    spared = sorted(before & survivors)
    restarted = sorted((before & after) - survivors)
    gone = sorted(before - after - survivors)
    claims = list(_recompute(impact, incident.id, as_of))
    if first:
        claims += _span(impact, impact.before, incident.occurred_at, incident.detected_at, Part.DETECTION, incident.id)
    claims += _span(impact, spared, start, resumed, Part.TRANSITION, incident.id)
    claims += _span(impact, restarted, start, restored, Part.TRANSITION, incident.id)
    claims += _span(impact, gone, start, resumed, Part.TRANSITION, incident.id)
    claims += _span(impact, gone, resumed, restored, Part.SUB_HEALTHY, incident.id)
    claims += _span(impact, spared, impact.drained_at, restored, Part.TRANSITION, incident.id)
    return claims


def _moved_claims(impact: Impact, part: Part, incident: str, as_of: datetime) -> list[Claim]:
    """Return the claims of a move of a healthy task: the pause of the workers that stay."""
    end = recompute_start(impact) or impact.restored_at or impact.closed_at or as_of
    return _span(impact, impact.survivors, impact.drained_at, end, part, incident)


def planned_claims(impact: Impact, as_of: datetime, cause: str = "") -> list[Claim]:
    """Return the claims of a move that no incident caused: recomputed steps and the pause of the workers that stay.

    ``cause``: the trigger of the plan.
    """
    claims = [*_recompute(impact, "", as_of), *_moved_claims(impact, Part.PLANNED, "", as_of)]
    return [claim._replace(cause=cause) for claim in claims]


def training_claims(impact: Impact, as_of: datetime) -> list[Claim]:
    """Return the claims of training: of all workers after the plan, and of survivors that resume during it.

    Survivors of a task that is to have no workers train until it has none.
    """
    until = impact.until or as_of
    if not impact.after and impact.closed_at is not None:
        until = min(until, impact.closed_at)
    claims = _span(impact, impact.after, impact.restored_at, until, Part.TRAINING)
    if impact.resumed_at is not None:
        end = impact.restored_at or until
        claims += _span(impact, impact.survivors, impact.resumed_at, end, Part.TRAINING)
    return claims


def start_claims(impact: Impact, incident: str, as_of: datetime, cause: str = "") -> list[Claim]:
    """Return the claims of starting workers that are new to the task, where these do not train for another one."""
    new = sorted(set(impact.after) - set(impact.before))
    end = recompute_start(impact) or impact.restored_at or impact.closed_at or as_of
    part = Part.TRANSITION if incident else Part.PLANNED
    claims = _span(impact, new, impact.planned_at, end, part, incident)
    return claims if incident or not cause else [claim._replace(cause=cause) for claim in claims]
