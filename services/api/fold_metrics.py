"""Metrics of what the fold finds: incidents with their times, and plans.

Counted is what this process has folded as it came, and what had come while no api ran. A projection that is built anew
from position 0 counts nothing again (``services.api.feed``).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.api.findings import Found

DETECTION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""From an exit that the kernel reports at once to a hang in a slow region (``slow_region_timeout_s``)."""

RECOVERY_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""From a retry in place to a node that is replaced by hand."""


class FoldMetrics:
    """Takes note of what the batches of the fold have found, in the thread that asked for the fold.

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

    def folded(self, found: Found) -> None:
        """Take note of what a batch has found."""
        for kind, severity, seconds in found.detected:
            self._incidents.labels(kind, severity).inc()
            self._detection.labels(kind).observe(seconds)
        for severity in found.escalated:
            self._escalations.labels(severity).inc()
        for severity, seconds in found.restored:
            self._recovery.labels(severity).observe(seconds)
        for trigger, response in found.planned:
            self._plans.labels(trigger, response).inc()
        self._failed_plans.inc(found.failed_plans)
