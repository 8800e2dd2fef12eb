"""The course of a slow worker: since when it was slow, what plans made of it, and its phases. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from services.api.postmortem.model import Phase
from services.api.postmortem.timeline import end_position, phase
from shared.events.union import PlanDecided, Recorded, StateMoved, WorkerSlowed
from shared.views.observed_views import SlowdownView


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
    done = end_position(records, carried_out_at)
    decided_at = None if decided is None else decided.recorded_at
    certain, found_at = "from the first slow step until the detector was certain", view.found_at
    workers = "until all tasks that the plan changes trained on the workers that it gives them"
    whole = "from the first slow step until the plan was carried out"
    decision = None if decided is None else decided.position
    return [
        phase("detection", certain, began_at, found_at, view.position),
        phase("decision", "until the plan was in the log", found_at, decided_at, decision),
        phase("transition", workers, decided_at, carried_out_at, done),
        phase("all of it", whole, began_at, carried_out_at, done),
    ]
