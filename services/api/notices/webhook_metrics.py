"""Metrics of the webhook."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric

from shared.service.metrics import StateMetrics, gauge


class WebhookMetrics:
    """Takes note of requests to the webhook.

    Args:
        registry: of the process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._began_s: float | None = None
        self._requests = Counter(
            "unicron_webhook_requests_total",
            "Requests to the webhook that are done with.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("delivered", "given-up"):
            self._requests.labels(outcome)
        self._failures = Counter(
            "unicron_webhook_failures_total", "Attempts that the receiver did not take.", registry=registry
        )
        registry.register(StateMetrics(self._read))

    def begun(self, at_s: float) -> None:
        """Take note of a request. ``at_s``: the time of the monotonic clock."""
        self._began_s = at_s

    def failed(self) -> None:
        """Take note of an attempt that has failed."""
        self._failures.inc()

    def ended(self, outcome: str) -> None:
        """Take note that a request is done with."""
        self._began_s = None
        self._requests.labels(outcome).inc()

    def _read(self) -> Iterator[Metric]:
        waits_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        yield gauge("unicron_webhook_waiting_seconds", "For how long the present request has been tried.", waits_s)
