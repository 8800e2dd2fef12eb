"""Metrics of the planner: how long its decisions take, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import Metric

from services.planner.lookahead.table import LookAhead
from shared.service.metrics import StateMetrics, counter, gauge

LOOKED_UP, SOLVED, NO_COUNTS = "looked up", "solved", "no counts to choose"
"""Where a decision came from: an answer of the look-ahead, the solver, or neither of them."""

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Buckets from an answer that is looked up to the largest problem (``benchmarks/planner.py``)."""


class PlannerMetrics:
    """Takes note of decisions.

    Args:
        registry: of the process.
        look_ahead: of the planner.
    """

    def __init__(self, registry: CollectorRegistry, look_ahead: LookAhead) -> None:
        self._look_ahead = look_ahead
        self._decisions = Histogram(
            "unicron_planner_decision_seconds",
            "Time of a decision, by where its answer came from.",
            ["answer"],
            buckets=BUCKETS_S,
            registry=registry,
        )
        for answer in (LOOKED_UP, SOLVED, NO_COUNTS):
            self._decisions.labels(answer)
        registry.register(StateMetrics(self._read))

    def decided(self, answer: str, seconds: float) -> None:
        """Take note of a decision; ``answer``: where it came from."""
        self._decisions.labels(answer).observe(seconds)

    def _read(self) -> Iterator[Metric]:
        table = self._look_ahead
        yield gauge("unicron_planner_look_ahead_answers", "Answers that are solved ahead.", len(table))
        lookups = {("hit",): float(table.hits), ("miss",): float(table.misses)}
        yield counter("unicron_planner_look_ahead_total", "Questions to the look-ahead.", lookups, "result")
