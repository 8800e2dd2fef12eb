"""What failures cost: C_failure = C_detection + C_transition + C_sub-healthy (DESIGN section 1), in worker-seconds.

Every second of every worker a task holds is *claimed* by what the worker did (or could not do) in it, and a claim
that comes later in the order takes only what the earlier ones left (``settle``). So the parts add up to the time held,
and no second of a worker is counted twice: not by two parts of one incident, not by two incidents whose times overlap,
not by two tasks that share a worker one after the other.

For one task of one plan, with N workers before it (S survivors, R = those of the N that are started again, G = those of
the N that the plan does without, A = workers that are new to the task):

    detection    N x (detected - occurred)                 all wait for the lost one at the next collective
    transition   S x (resumed - detected)                  held, re-planned, the interrupted step finished
               + S x (restored - drained)                  the second rendezvous, at the step boundary
               + R x (restored - detected)                 process started, state moved, first step
               + G x (resumed - detected)                  as S: until then no plan could do better
               + A x (restored - planned)                  started for this plan; only while not busy elsewhere
    sub-healthy  G x (restored - resumed)                  below the strength the plan aims for
    recompute    N' x steps recomputed x step time         N' workers of the target; shown apart from transition
    training     from resumed or restored until the next plan, minus all of the above

``resumed`` falls back to ``restored`` where nothing was interrupted. A task that no fault touched but a plan moves pays
only ``S x (restored - drained)`` and A's part. Moves that no incident caused (a start, growth) are ``planned``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import Field

from shared.model import Model

SECONDS_PER_HOUR = 3600.0


class Part(StrEnum):
    """What a stretch of a worker's time went to."""

    DETECTION = "detection"
    TRANSITION = "transition"
    RECOMPUTE = "recompute"
    SUB_HEALTHY = "sub-healthy"
    PLANNED = "planned"
    TRAINING = "training"


FAILURE_PARTS = (Part.DETECTION, Part.TRANSITION, Part.RECOMPUTE, Part.SUB_HEALTHY)


class Impact(Model):
    """What one plan did to one task, as facts with their times.

    ``before``, ``after``: workers the task had and is to have. ``faulted``: the fault stopped this task's step.
    ``planned_at``: when the plan was decided. ``closed_at``: when nothing of it was left to do, or the next plan took
    over. ``until``: when the training that followed ended (None: it goes on). ``step_s``, ``waf_flop_per_s``: of the
    task before the plan (weighted FLOP/s of all its workers).
    """

    task: str
    before: list[str] = Field(default_factory=list)
    after: list[str] = Field(default_factory=list)
    survivors: list[str] = Field(default_factory=list)
    faulted: bool = False
    planned_at: datetime
    drained_at: datetime | None = None
    resumed_at: datetime | None = None
    restored_at: datetime | None = None
    closed_at: datetime | None = None
    until: datetime | None = None
    steps_recomputed: int = 0
    step_s: float = 0.0
    waf_flop_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """The incident a plan answers: its id and its two times."""

    incident: str
    occurred_at: datetime
    detected_at: datetime


@dataclass(frozen=True, slots=True)
class Claim:
    """One worker's time from ``start_s`` to ``end_s`` (seconds since the epoch) goes to ``part``.

    ``flop_per_worker_s``: weighted FLOP that such a second would have achieved.
    """

    worker: str
    start_s: float
    end_s: float
    part: Part
    task: str
    incident: str = ""
    flop_per_worker_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Charge:
    """What a claim was left with: ``worker_s`` after earlier claims took theirs."""

    claim: Claim
    worker_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Worker-seconds of the four failure parts, the weighted FLOP not achieved in them, and their price."""

    detection_worker_s: float = 0.0
    transition_worker_s: float = 0.0
    recompute_worker_s: float = 0.0
    sub_healthy_worker_s: float = 0.0
    lost_flop: float = 0.0
    money: float = 0.0

    @property
    def worker_s(self) -> float:
        """All four parts together."""
        return self.detection_worker_s + self.transition_worker_s + self.recompute_worker_s + self.sub_healthy_worker_s


def money(worker_s: float, price_per_worker_hour: float) -> float:
    """Return the price of ``worker_s`` worker-seconds."""
    return worker_s * price_per_worker_hour / SECONDS_PER_HOUR


def _span(
    impact: Impact,
    workers: Iterable[str],
    start: datetime | None,
    end: datetime,
    part: Part,
    incident: str = "",
) -> Iterator[Claim]:
    """Yield the claim of each worker on the time from ``start`` to ``end``; none if that is empty."""
    if start is None or end <= start:
        return
    rate = impact.waf_flop_per_s / len(impact.before) if impact.before else 0.0
    for worker in workers:
        yield Claim(worker, start.timestamp(), end.timestamp(), part, impact.task, incident, rate)


def _recompute(impact: Impact, incident: str, as_of: datetime) -> Iterator[Claim]:
    """Yield recompute: the steps from the first one of the target stage (it ends at ``restored``) on."""
    if impact.restored_at is None or impact.steps_recomputed <= 0 or impact.step_s <= 0.0:
        return
    start_s = impact.restored_at.timestamp() - impact.step_s
    end_s = min(start_s + impact.steps_recomputed * impact.step_s, as_of.timestamp())
    rate = impact.waf_flop_per_s / len(impact.before) if impact.before else 0.0
    for worker in impact.after:
        if end_s > start_s:
            yield Claim(worker, start_s, end_s, Part.RECOMPUTE, impact.task, incident, rate)


def failure_claims(impact: Impact, fault: Fault, *, first: bool, as_of: datetime) -> list[Claim]:
    """Return what an incident claims of one task through one of its plans (formulas above).

    ``first``: the plan is the first answer to the incident. A later one (its restart failed, or a further error
    superseded it) claims from its own time on: what lies before is the earlier plan's. Times that have not come yet
    are taken as ``as_of``.
    """
    if not impact.faulted:
        return [
            *_recompute(impact, fault.incident, as_of),
            *_moved_claims(impact, Part.TRANSITION, fault.incident, as_of),
        ]
    closed = impact.closed_at or as_of
    restored = impact.restored_at or closed
    resumed = impact.resumed_at or restored
    start = fault.detected_at if first else max(fault.detected_at, impact.planned_at)
    before, after, survivors = set(impact.before), set(impact.after), set(impact.survivors)
    spared = sorted(before & survivors)
    restarted = sorted((before & after) - survivors)
    gone = sorted(before - after - survivors)
    claims = list(_recompute(impact, fault.incident, as_of))
    if first:
        claims += _span(impact, impact.before, fault.occurred_at, fault.detected_at, Part.DETECTION, fault.incident)
    claims += _span(impact, spared, start, resumed, Part.TRANSITION, fault.incident)
    claims += _span(impact, restarted, start, restored, Part.TRANSITION, fault.incident)
    claims += _span(impact, gone, start, resumed, Part.TRANSITION, fault.incident)
    claims += _span(impact, gone, resumed, restored, Part.SUB_HEALTHY, fault.incident)
    claims += _span(impact, spared, impact.drained_at, restored, Part.TRANSITION, fault.incident)
    return claims


def _moved_claims(impact: Impact, part: Part, incident: str, as_of: datetime) -> Iterator[Claim]:
    """Yield what moving a healthy task costs: the pause of those that stay."""
    end = impact.restored_at or impact.closed_at or as_of
    yield from _span(impact, impact.survivors, impact.drained_at, end, part, incident)


def planned_claims(impact: Impact, as_of: datetime) -> list[Claim]:
    """Return what a move that no incident caused claims: the pause of those that stay."""
    return [*_recompute(impact, "", as_of), *_moved_claims(impact, Part.PLANNED, "", as_of)]


def training_claims(impact: Impact, as_of: datetime) -> list[Claim]:
    """Return the time in which the task trains after the plan (and, where survivors go on at once, during it)."""
    until = impact.until or as_of
    claims = list(_span(impact, impact.after, impact.restored_at, until, Part.TRAINING))
    if impact.resumed_at is not None:
        end = impact.restored_at or until
        claims += _span(impact, impact.survivors, impact.resumed_at, end, Part.TRAINING)
    return claims


def start_claims(impact: Impact, incident: str, as_of: datetime) -> list[Claim]:
    """Return the time in which workers new to the task are started for it; what they still did elsewhere goes first."""
    new = sorted(set(impact.after) - set(impact.before))
    end = impact.restored_at or impact.closed_at or as_of
    part = Part.TRANSITION if incident else Part.PLANNED
    return list(_span(impact, new, impact.planned_at, end, part, incident))


def settle(claims: Iterable[Claim]) -> list[Charge]:
    """Give every second of every worker to the first claim on it, in the order of ``claims``.

    Pure and exact: for one worker the charges add up to the length of the union of its claims.
    """
    taken: dict[str, list[tuple[float, float]]] = {}
    charges = []
    for claim in claims:
        spans = taken.setdefault(claim.worker, [])
        charges.append(Charge(claim, _take(spans, claim.start_s, claim.end_s)))
    return charges


def _take(spans: list[tuple[float, float]], start: float, end: float) -> float:
    """Add ``[start, end)`` to the disjoint, sorted ``spans``; return how much of it was free."""
    if end <= start:
        return 0.0
    index = max(bisect_left(spans, (start, start)) - 1, 0)
    low, high, free, at = start, end, 0.0, start
    while index < len(spans) and spans[index][0] <= end:
        left, right = spans[index]
        if right < start:
            index += 1
            continue
        free += max(left - at, 0.0)
        at = max(at, right)
        low, high = min(low, left), max(high, right)
        del spans[index]
    free += max(end - at, 0.0)
    insort(spans, (low, high))
    return free


def total(charges: Iterable[Charge], price_per_worker_hour: float) -> Cost:
    """Return the failure cost in ``charges``; charges of other parts are left out.

    ``lost_flop``: worker-seconds times the weighted FLOP/s that one worker achieved before. ``money``: worker-seconds
    times the price.
    """
    seconds = dict.fromkeys(FAILURE_PARTS, 0.0)
    lost_flop = 0.0
    for charge in charges:
        if charge.claim.part in seconds:
            seconds[charge.claim.part] += charge.worker_s
            lost_flop += charge.worker_s * charge.claim.flop_per_worker_s
    return Cost(
        detection_worker_s=seconds[Part.DETECTION],
        transition_worker_s=seconds[Part.TRANSITION],
        recompute_worker_s=seconds[Part.RECOMPUTE],
        sub_healthy_worker_s=seconds[Part.SUB_HEALTHY],
        lost_flop=lost_flop,
        money=money(sum(seconds.values()), price_per_worker_hour),
    )


def worker_s(charges: Iterable[Charge], part: Part) -> float:
    """Return the worker-seconds of one part."""
    return sum(charge.worker_s for charge in charges if charge.claim.part is part)
