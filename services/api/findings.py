"""What a batch of the fold has found that is counted: small, so that it can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from services.api.batches import Batch
from services.api.views import IncidentView, PlanState


class Found(NamedTuple):
    """Incidents and plans that are new in a batch, and what they came to in it. Times are in seconds."""

    detected: tuple[tuple[str, str, float], ...] = ()
    """Of each new incident: kind, severity, from the fault to its detection."""
    escalated: tuple[str, ...] = ()
    """Severities to which incidents rose."""
    restored: tuple[tuple[str, float], ...] = ()
    """Of each incident that is over: severity, from the fault until its tasks were back at planned strength."""
    planned: tuple[tuple[str, str], ...] = ()
    """Of each new plan: trigger, response."""
    failed_plans: int = 0


Observe = Callable[[Found], None]
"""Takes note of what a batch has found."""


def ignored(_: Found) -> None:
    """Take no note of what a batch has found."""


def found_in(batch: Batch) -> Found:
    """Return what a batch has found."""
    incidents, plans = batch.incidents.changes(), batch.plans.changes()
    return Found(
        detected=tuple(
            (now.kind.value, now.severity.value, _seconds(now.occurred_at, now.detected_at))
            for before, now in incidents
            if before is None
        ),
        escalated=tuple(
            now.severity.value for before, now in incidents if before is not None and before.severity != now.severity
        ),
        restored=tuple(
            (now.severity.value, _seconds(now.occurred_at, now.restored_at))
            for before, now in incidents
            if now.restored_at is not None and not _restored(before)
        ),
        planned=tuple((now.trigger.value, now.response.value) for before, now in plans if before is None),
        failed_plans=sum(
            now.state is PlanState.FAILED and (before is None or before.state is not PlanState.FAILED)
            for before, now in plans
        ),
    )


def _restored(incident: IncidentView | None) -> bool:
    return incident is not None and incident.restored_at is not None


def _seconds(start: datetime, end: datetime) -> float:
    """Return the time between two moments; clocks of two machines may differ by a little."""
    return max(0.0, (end - start).total_seconds())
