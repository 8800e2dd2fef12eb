"""The steps of a rank that its next heartbeats report: those since the heartbeat before, and some longer. Pure.

Heartbeats are published and not repeated. So each step is in the heartbeats of ``WINDOW_S``, and a heartbeat that is
lost loses no step; the reader counts each step once. Where steps are short only some are reported, the same ones by all
nodes: those whose number a power of two divides, and the one with the largest loss.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shared.bus.messages import MAX_SECONDS
from shared.messages.signals import MAX_STEPS, StepReport
from unicron.protocol.messages import Progress

WINDOW_S = 0.6
"""How long a step is reported: two intervals of heartbeats (0.25 s by default), and the time by which one may be
late."""

NEWEST = 512
"""Most steps that are remembered within the window: as many as fit if each takes 1.2 ms."""


@dataclass(slots=True)
class StepWindow:
    """The newest steps of a rank in one generation, with the time of each on the agent's monotonic clock."""

    steps: deque[tuple[float, StepReport]] = field(default_factory=lambda: deque(maxlen=NEWEST))

    def add(self, report: StepReport, at_s: float) -> None:
        """Add a step that has ended."""
        self.steps.append((at_s, report))

    def reported(self, at_s: float) -> list[StepReport]:
        """Return what a heartbeat at ``at_s`` reports, at most ``MAX_STEPS`` and one more; forget what is older."""
        while self.steps and at_s - self.steps[0][0] > WINDOW_S:
            self.steps.popleft()
        found = [report for _, report in self.steps]
        stride = 1
        while sum(report.step % stride == 0 for report in found) > MAX_STEPS:
            stride *= 2
        highest = max((report.loss for report in found if report.loss is not None), default=None)
        return [report for report in found if report.step % stride == 0 or report.loss == highest is not None][
            -MAX_STEPS - 1 :
        ]


def step_report(message: Progress) -> StepReport:
    """Return the report of a step that has ended. A number that no heartbeat can have is left out."""
    first = message.rank == 0
    return StepReport(
        step=message.step,
        compute_s=_seconds(message.compute_s),
        micro_batches=message.micro_batches,
        duration_s=_seconds(message.duration_s) if first else None,
        loss=message.loss if first else None,
    )


def _seconds(value: float | None) -> float | None:
    """Return a duration with six digits, which are enough and short."""
    return float(f"{value:.6g}") if value is not None and 0.0 <= value <= MAX_SECONDS else None
