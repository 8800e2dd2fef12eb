"""Metrics of what the fold finds: incidents with their times, and plans.

Counted is what this process has folded as it came, and what had come while no api ran. A projection that is built anew
from position 0 counts nothing again (``services.api.store.feed``).
"""

from __future__ import annotations

from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.api.store.batches import Batch
from shared.views.documents import PlanState

DETECTION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""From an exit that the kernel reports at once to a hang in a slow region (``slow_region_timeout_s``)."""

RECOVERY_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""From a retry in place to a node that is replaced by hand."""


class FoldMetrics:
    """Takes note of what the batches of the fold have found, in the thread that folds.

    Args:
        registry: of the process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._incidents = Counter(
            "unicron_incidents_total", "Incidents, by kind and first severity.", ["kind", "severity"], registry=registry
        )
        self._escalations = Counter(
            "unicron_incident_escalations_total", "Incidents whose severity rose.", ["severity"], registry=registry
        )
        self._detection = Histogram(
            "unicron_incident_detection_seconds",
            "From a fault to its detection.",
            ["kind"],
            buckets=DETECTION_BUCKETS_S,
            registry=registry,
        )
        self._recovery = Histogram(
            "unicron_incident_recovery_seconds",
            "From a fault until its tasks were back at planned strength.",
            ["severity"],
            buckets=RECOVERY_BUCKETS_S,
            registry=registry,
        )
        self._plans = Counter(
            "unicron_plans_total", "Plans, by trigger and response.", ["trigger", "response"], registry=registry
        )
        self._failed_plans = Counter(
            "unicron_plans_failed_total", "Plans that could not be carried out.", registry=registry
        )

    def folded(self, batch: Batch) -> None:
        """Take note of what a batch has changed, once it is committed."""
        for before, now in batch.incidents.changes():
            kind, severity = now.kind.value, now.severity.value
            if before is None:
                self._incidents.labels(kind, severity).inc()
                self._detection.labels(kind).observe(_seconds(now.occurred_at, now.detected_at))
            elif before.severity != now.severity:
                self._escalations.labels(severity).inc()
            if now.restored_at is not None and (before is None or before.restored_at is None):
                self._recovery.labels(severity).observe(_seconds(now.occurred_at, now.restored_at))
        for plan_before, plan in batch.plans.changes():
            if plan_before is None:
                self._plans.labels(plan.trigger.value, plan.response.value).inc()
            if plan.state is PlanState.FAILED and (plan_before is None or plan_before.state is not PlanState.FAILED):
                self._failed_plans.inc()


def _seconds(start: datetime, end: datetime) -> float:
    """Return the time between two moments; clocks of two machines may differ by a little."""
    return max(0.0, (end - start).total_seconds())
