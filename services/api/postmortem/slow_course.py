"""The course of a slow worker: since when it was slow, its phases, and what it cost. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from services.api.observed_views import SlowdownView
from services.api.postmortem.durations import seconds
from services.api.postmortem.model import Phase
from services.api.postmortem.slow_model import SlowCost
from services.api.postmortem.timeline import between_s
from shared.events import PlanDecided, Recorded, StateMoved, TaskProgressed, WorkerSlowed

SECONDS_PER_HOUR = 3600.0


def evidence_steps(evidence: dict[str, Any]) -> int:
    """Return how many steps spoke against the worker when it was found; 0: not recorded."""
    steps = evidence.get("steps")
    return steps if isinstance(steps, int) else 0


def time_of_step(done: Sequence[tuple[int, datetime]], step: int) -> datetime | None:
    """Return about when a step was done: between two reports the steps are taken as equally long.

    Args:
        done: numbers of steps and when they were done, of one task and generation, in the order of the log.
        step: its number.

    Returns:
        None: no two reports have the step between them.
    """
    for (first, start), (last, end) in pairwise(done):
        if first <= step <= last and first < last:
            return start + (end - start) * ((step - first) / (last - first))
    return None


@dataclass(frozen=True)
class Outcome:
    """What plans have made of a slow worker.

    ``label``: the way of the newest plan (``SlowChoice``); None: no plan has answered it. ``used_by``: the task that
    has the worker by it; empty: none. ``decided_at``: since when plans have not left the worker to its task as it was;
    None: they do.
    """

    label: str | None
    used_by: str
    decided_at: datetime | None


def outcome(view: SlowdownView, records: Sequence[Recorded]) -> Outcome:
    """Return what plans have made of the worker. ``records``: of its course."""
    found = Outcome(None, view.task, None)
    for record in records:
        event = record.event
        if not isinstance(event, PlanDecided) or event.slow is None or not event.slow.choices:
            continue
        choice = event.slow.choices[0]
        used_by = choice.used.get(view.worker, "")
        waits = used_by == view.task and choice.label != "dealt-by-speed"
        decided_at = None if waits else found.decided_at or record.recorded_at
        found = Outcome(choice.label, used_by, decided_at)
    return found


@dataclass(frozen=True)
class Pace:
    """How long the steps of the slow worker's task took, seconds: before it was slow, and until it was found."""

    before_s: float
    slow_s: float

    @property
    def lost_part(self) -> float:
        """The part of its workers' time that the task lost while one was slow."""
        return max(1.0 - self.before_s / self.slow_s, 0.0)


def pace(view: SlowdownView, progress: Sequence[TaskProgressed], began_at: datetime | None) -> Pace | None:
    """Return how long the task's steps took; None: the log does not say.

    Args:
        view: of the slowdown.
        progress: reports of the task's progress before the worker was found.
        began_at: since when it was slow.
    """
    steps = evidence_steps(view.evidence)
    before = [event.step_s for event in progress if event.step_s > 0.0 and event.step <= view.step - steps]
    slow_s = between_s(began_at, view.found_at)
    if not steps or not before or not slow_s:
        return None
    return Pace(before_s=before[-1], slow_s=slow_s / steps)


def is_part(record: Recorded, view: SlowdownView, plans: Collection[str]) -> bool:
    """Return whether a record from the one that found the worker on is part of its course."""
    match record.event:
        case WorkerSlowed() as event:
            return event.worker == view.worker and (view.ended_at is None or event.occurred_at <= view.ended_at)
        case PlanDecided() | StateMoved() as event:
            return event.plan in plans
        case _:
            return False


def phases(
    view: SlowdownView, began_at: datetime | None, carried_out_at: datetime | None, records: Sequence[Recorded]
) -> list[Phase]:
    """Return the parts of the way from the beginning of a slowdown to the end of its plan.

    ``records``: of its course.
    """
    decided = next((record for record in records if isinstance(record.event, PlanDecided)), None)
    moves = [record for record in records if isinstance(record.event, StateMoved)]
    done = next((record.position for record in moves if record.event.occurred_at == carried_out_at), None)
    decided_at = None if decided is None else decided.recorded_at
    return [
        Phase(
            name="detection",
            meaning="from the first slow step until the detector was certain",
            duration_s=between_s(began_at, view.found_at),
            position=view.position,
        ),
        Phase(
            name="decision",
            meaning="until the plan was in the log",
            duration_s=between_s(view.found_at, decided_at),
            position=None if decided is None else decided.position,
        ),
        Phase(
            name="transition",
            meaning="until all tasks that the plan changes trained on the workers that it gives them",
            duration_s=between_s(decided_at, carried_out_at),
            position=done,
        ),
        Phase(
            name="all of it",
            meaning="from the first slow step until the plan was carried out",
            duration_s=between_s(began_at, carried_out_at),
            position=done,
        ),
    ]


def cost(
    view: SlowdownView,
    workers: int,
    steps: Pace,
    began_at: datetime,
    chosen: Outcome,
    carried_out_at: datetime | None,
    price_per_worker_hour: float,
    now: datetime,
) -> SlowCost:
    """Return what a slow worker cost so far.

    Args:
        view: of the slowdown.
        workers: of the task while it was slow.
        steps: how long the task's steps took.
        began_at: since when it was slow.
        chosen: what plans have made of it.
        carried_out_at: when the newest plan was carried out; None: it is not.
        price_per_worker_hour: of the cluster.
        now: up to when costs are computed.
    """
    over = view.ended_at or now
    decided_at = chosen.decided_at
    lost_part = steps.lost_part
    waited_until = over if decided_at is None else min(decided_at, over)
    waited = workers * lost_part * max((waited_until - began_at).total_seconds(), 0.0)
    paused = unused = 0.0
    if decided_at is not None:
        paused = workers * max(((carried_out_at or now) - decided_at).total_seconds(), 0.0)
        if carried_out_at is not None and not chosen.used_by:
            unused = max((over - carried_out_at).total_seconds(), 0.0)
    assumptions = [
        f"steps of {view.task}, which all {workers} workers do together, took {seconds(steps.slow_s)} from then on "
        f"until it was found, and {seconds(steps.before_s)} before (reports of progress): {steps.lost_part:.0%} of the "
        "workers' time was lost, and would have been for as long as nothing was done",
        "from the decision until it was carried out they did not train at all, which is the most that it can have cost",
    ]
    if unused:
        assumptions.append("the slow worker itself is counted while no task used it")
    return SlowCost(
        workers=workers,
        waited_worker_s=waited,
        paused_worker_s=paused,
        unused_worker_s=unused,
        money=(waited + paused + unused) * price_per_worker_hour / SECONDS_PER_HOUR,
        further_hour_worker_s=workers * lost_part * SECONDS_PER_HOUR,
        assumptions=assumptions if decided_at is not None else assumptions[:1],
    )
