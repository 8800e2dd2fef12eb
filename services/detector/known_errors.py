"""What later decisions need of error events, once they are in the log. Part of the detector's state.

An error event itself may have pages of evidence, and a log has any number of them. Three questions are asked about
earlier errors: which one does a task's newest plan answer, how often has the task failed in the same way, and how often
was it retried because of broken collectives. What is kept here answers them as all error events together would, and is
bounded for each task that has not ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from shared.events import ErrorDetected
from shared.severities import SEVERITY, ErrorKind, Severity

MOST_FAILURES = 1000
"""Different failures of one task that are remembered. A failure that comes again after a thousand other ones counts as
new: it is restarted or retried once more before the task is given up."""


@dataclass(frozen=True, slots=True)
class KnownError:
    """An error event without its evidence. ``failure``: the key of the failure. The others are the event's fields."""

    event_id: str
    incident: str
    kind: ErrorKind
    severity: Severity
    detected_at: datetime
    task: str | None
    worker: str | None
    node: str | None
    rank: int | None
    generation: int | None
    failure: str | None

    @classmethod
    def of(cls, event: ErrorDetected, failure: str | None) -> KnownError:
        """Return what is kept of an event."""
        return cls(
            event_id=event.event_id,
            incident=event.incident,
            kind=event.kind,
            severity=event.severity,
            detected_at=event.detected_at,
            task=event.task,
            worker=event.worker,
            node=event.node,
            rank=event.rank,
            generation=event.generation,
            failure=failure,
        )


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A failure of a task. ``incident``: the newest. ``at``: generation -> when it was detected there last."""

    incident: str
    at: dict[int, datetime]


@dataclass(slots=True)
class FailureHistory:
    """The failures of one task since it was submitted.

    Errors come in the order of their times, so the newest of each generation say how many there were within any time
    before now. More generations than a task may be restarted need not be known: with these it is given up.

    Attributes:
        failures: by key (kind, error and step), the one that came last at the end.
        retried: errors of broken collectives, the newest of each generation.
    """

    failures: dict[str, KnownFailure] = field(default_factory=dict)
    retried: list[KnownError] = field(default_factory=list)

    def add(self, error: KnownError, generation: int, max_restarts: int) -> None:
        """Note an error of the task in a generation. ``max_restarts``: the task's."""
        if error.failure is not None:
            before = self.failures.pop(error.failure, None)
            at = {**before.at} if before is not None else {}
            at.pop(generation, None)
            at[generation] = error.detected_at
            for oldest in list(at)[: -(max_restarts + 1)]:
                del at[oldest]
            self.failures[error.failure] = KnownFailure(error.incident, at)
            if len(self.failures) > MOST_FAILURES:
                del self.failures[next(iter(self.failures))]
        if SEVERITY[error.kind] is Severity.SEV3:
            others = [known for known in self.retried if known.generation != error.generation]
            self.retried = [*others, error][-max(1, max_restarts) :]

    def times(self, key: str, *, window_s: float, now: datetime, without: int) -> int:
        """Return in how many generations, without one, the failure was detected within a time before now."""
        known = self.failures.get(key)
        times = known.at.items() if known is not None else ()
        return sum(generation != without and (now - at).total_seconds() <= window_s for generation, at in times)

    def repeats(self, key: str) -> bool:
        """Return whether the task has failed in this way before."""
        return key in self.failures

    def incident(self, key: str) -> str:
        """Return the newest incident of the failure; empty if there is none."""
        known = self.failures.get(key)
        return known.incident if known is not None else ""

    def newest_retry(self, max_restarts: int, *, window_s: float, now: datetime) -> KnownError | None:
        """Return the newest error of broken collectives if ``max_restarts`` were retried within a time before now."""
        recent = [error for error in self.retried if (now - error.detected_at).total_seconds() <= window_s]
        return recent[-1] if len(recent) >= max(1, max_restarts) else None
