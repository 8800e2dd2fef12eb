"""Metrics of the transition service: commands in flight, how long they take, and the parts of plans in progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.metrics_core import Metric

from services.transition.state import State
from shared.messages.commands import Command, Reply
from shared.service.metrics import StateMetrics, gauge

NO_REPLY = "no-reply"
"""Code of a command that had no reply in time."""

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Buckets from the hold of a rank to the longest time for a reply (``resume_timeout_s``)."""


class TransitionMetrics:
    """Takes note of commands.

    Args:
        registry: of the process.
        state: returns the service's state.
    """

    def __init__(self, registry: CollectorRegistry, state: Callable[[], State]) -> None:
        self._state = state
        self._in_flight: Counter[str] = Counter()
        self._seconds = Histogram(
            "unicron_command_seconds",
            "Time from a command to the reply of its agent.",
            ["kind"],
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._failed = PrometheusCounter(
            "unicron_commands_failed_total",
            "Commands that failed, by the code of the reply.",
            ["kind", "code"],
            registry=registry,
        )
        registry.register(StateMetrics(self._read))

    def sent(self, command: Command) -> None:
        """Take note that a command waits for its reply."""
        self._in_flight[command.kind] += 1

    def ended(self, command: Command) -> None:
        """Take note that it waits no more."""
        self._in_flight[command.kind] -= 1

    def replied(self, command: Command, reply: Reply | None, seconds: float) -> None:
        """Take note of a reply. ``reply``: None if the command's time was up."""
        self._seconds.labels(command.kind).observe(seconds)
        if reply is None or not reply.ok:
            self._failed.labels(command.kind, NO_REPLY if reply is None else reply.code or "").inc()

    def _read(self) -> Iterator[Metric]:
        waiting = {(kind,): float(count) for kind, count in self._in_flight.items()}
        yield gauge("unicron_commands_in_flight", "Commands that wait for a reply.", waiting, "kind")
        active = sum(part.active for part in self._state().parts())
        yield gauge("unicron_transition_tasks_changing", "Tasks that a plan is being carried out for.", active)
