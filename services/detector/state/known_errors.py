"""What later decisions need of error events, once they are in the log. Part of the detector's state.

An error event itself may have pages of evidence, and a log has any number of them. Three questions are asked about
earlier errors: which one does a task's newest plan answer, how often has the task failed in the same way, and how often
was it retried because of broken collectives. What is kept here answers them as all error events together would, and is
bounded for each task that has not ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from services.detector.state.back_off import Tries, way_of
from shared.events.evidence import Evidence
from shared.events.severities import SEVERITY, ErrorKind, Severity
from shared.events.union import ErrorDetected

MOST_FAILURES = 1000
"""Most different failures of one task that are remembered. A failure that comes again after a thousand other ones
counts as new: it is restarted or retried once more before the task is given up."""


_TRACEBACK = "Traceback (most recent call last):"

_FRAME = re.compile(r'^ +File "([^"\n]+)", line (\d+)', re.MULTILINE)

_OTHERS_CODE = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<")
"""Files of libraries. One line of a library may raise many errors of a program, which the program's own line tells
apart."""

_DRILL = "InjectedFault"
"""The exception of an injected fault (``process.faults``): two such exceptions have two causes, though one line raises
both."""


def place_of(kind: ErrorKind, text: str) -> str:
    """Return the exception that a text ends with and the lines that raised it; empty where it has no traceback.

    Args:
        kind: of the error.
        text: a traceback, or the last output of a process that ended.
    """
    if kind not in (ErrorKind.EXCEPTION, ErrorKind.PROCESS_EXIT):
        return ""
    last = text.rpartition(_TRACEBACK)[2]  # of exceptions that others led to, the one that was raised at the end
    frames = list(_FRAME.finditer(last))
    if not frames:
        return ""
    behind = last[frames[-1].end() :].splitlines()[1:]
    name = next((line.partition(":")[0] for line in behind if line and not line[0].isspace()), "")
    name = name.rpartition(".")[2]
    own = [frame for frame in frames if not _OTHERS_CODE.search(frame[1])]
    places = dict.fromkeys(f"{frame[1]}:{frame[2]}" for frame in (*own[-1:], frames[-1]))
    return "" if name == _DRILL else " ".join((name, *places))


@dataclass(frozen=True, slots=True)
class KnownError:
    """An error event without its evidence. ``failure``: the key of the failure, ``place``: that of an exception.

    ``way``: in which way it failed (``back_off.way_of``). ``starting``: whether a process failed that its plan had
    started. The other fields are those of the event.
    """

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
    place: str = ""
    way: str = ""
    starting: bool = False

    @classmethod
    def of(cls, event: ErrorDetected, evidence: Evidence) -> KnownError:
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
            failure=evidence.failure,
            place=evidence.place,
            way=way_of(evidence, event.worker),
            starting=evidence.starting,
        )


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A failure of a task. ``incident``: the newest. ``at``: generation -> when it was detected there last.

    ``place``: as in ``KnownError``; ``event_id``: the newest error's id.
    """

    incident: str
    at: dict[int, datetime]
    place: str = ""
    event_id: str = ""


@dataclass(frozen=True, slots=True)
class Repeats:
    """In how many generations a task has failed in one way since its newest step, and the newest of them."""

    times: int
    generation: int

    def before(self, generation: int) -> int:
        """Return in how many other generations: ranks that fail alike in one fail once."""
        return self.times - (self.generation == generation)

    def again(self, generation: int) -> Repeats:
        """Return these tries with a failure in one more generation."""
        return Repeats(self.before(generation) + 1, generation)


@dataclass(slots=True)
class FailureHistory:
    """The failures of one task since it was submitted.

    Errors come in the order of their times, so the newest of each generation say how many there were within any time
    before now. More generations than a task may be restarted need not be known: with these it is given up.

    Attributes:
        failures: by key (kind, error and step), the one that came last at the end.
        retried: errors of broken collectives, the newest of each generation.
        reached: the most updates applied when it failed; -1: not known.
        idle_since: when it failed there first; None: it has not, or an operator has looked at it since.
        counted_since: when it failed there first, or when an operator has looked at it since: what came before does
            not count.
        ways: in which ways it has failed since then.
        all_ways: the same, in any way.
    """

    failures: dict[str, KnownFailure] = field(default_factory=dict)
    retried: list[KnownError] = field(default_factory=list)
    reached: int = -1
    idle_since: datetime | None = None
    counted_since: datetime | None = None
    ways: dict[str, Repeats] = field(default_factory=dict)
    all_ways: Repeats = Repeats(0, -1)

    def add(self, error: KnownError, generation: int, max_restarts: int, step: int = -1) -> None:
        """Note an error of the task in a generation.

        Args:
            error: the error.
            generation: of the task.
            max_restarts: of the task.
            step: updates applied by then; -1: not known.
        """
        self._note_repeats(error, generation, step)
        if error.failure is not None:
            before = self.failures.pop(error.failure, None)
            at = {**before.at} if before is not None else {}
            at.pop(generation, None)
            at[generation] = error.detected_at
            for oldest in list(at)[: -(max_restarts + 1)]:
                del at[oldest]
            self.failures[error.failure] = KnownFailure(error.incident, at, error.place, error.event_id)
            if len(self.failures) > MOST_FAILURES:
                del self.failures[next(iter(self.failures))]
        if SEVERITY[error.kind] is Severity.SEV3:
            others = [known for known in self.retried if known.generation != error.generation]
            self.retried = [*others, error][-max(1, max_restarts) :]

    def _note_repeats(self, error: KnownError, generation: int, step: int) -> None:
        """Count a failure among those without progress. A new step begins anew.

        Steps of other processes are no progress of a process that has failed as it started.
        """
        if step > self.reached or self.idle_since is None:
            kept = self.ways.get(error.way) if error.starting and self.idle_since is not None else None
            if step > self.reached:
                self.reached, self.counted_since = step, error.detected_at
            self.idle_since = error.detected_at
            self.ways, self.all_ways = {error.way: kept} if kept is not None else {}, Repeats(0, -1)
        self.ways[error.way] = self.ways.pop(error.way, Repeats(0, -1)).again(generation)
        self.all_ways = self.all_ways.again(generation)
        if len(self.ways) > MOST_FAILURES:
            del self.ways[next(iter(self.ways))]

    def tries(self, way: str, generation: int, step: int, *, starting: bool) -> Tries:
        """Return how the task has failed since its newest step, in generations before this one.

        Args:
            way: in which it fails now.
            generation: of the failure.
            step: updates applied by now.
            starting: whether a process fails that the plan has started.
        """
        new = step > self.reached or self.idle_since is None
        if new and not (starting and self.idle_since is not None):
            return Tries()
        same = self.ways.get(way, Repeats(0, -1)).before(generation)
        return Tries(same) if new else Tries(same, self.all_ways.before(generation), self.idle_since)

    def begin_anew(self, at: datetime) -> None:
        """Forget what was tried without progress: an operator has looked at the task."""
        self.idle_since, self.counted_since = None, at
        self.ways, self.all_ways = {}, Repeats(0, -1)

    def times(self, key: str, *, window_s: float, now: datetime, without: int) -> int:
        """Return in how many generations, without one, the failure was detected within a time before now.

        Failures before the newest step at which it has failed, or before an operator has looked at the task, do not
        count.
        """
        known, since = self.failures.get(key), self.counted_since
        times = known.at.items() if known is not None else ()
        return sum(
            generation != without and (now - at).total_seconds() <= window_s and (since is None or at >= since)
            for generation, at in times
        )

    def repeats(self, key: str) -> bool:
        """Return whether the task has failed in this way before now."""
        return key in self.failures

    def in_a_row(self, place: str, *, window_s: float, now: datetime) -> KnownFailure | None:
        """Return the newest failure if its incident is of the same exception, with no other one or long time between.

        Args:
            place: of the exception; empty: it is like no other.
            window_s: longest time since the newest failure, in seconds.
            now: the present.
        """
        newest = next(reversed(self.failures.values()), None)
        if not place or newest is None or (now - max(newest.at.values())).total_seconds() > window_s:
            return None
        same = any(one.place == place and one.incident == newest.incident for one in self.failures.values())
        return newest if same else None

    def incident(self, key: str) -> str:
        """Return the newest incident of the failure; empty if there is none."""
        known = self.failures.get(key)
        return known.incident if known is not None else ""

    def newest_retry(self, max_restarts: int, *, window_s: float, now: datetime) -> KnownError | None:
        """Return the newest error of broken collectives if ``max_restarts`` were retried within a time before now."""
        recent = [error for error in self.retried if (now - error.detected_at).total_seconds() <= window_s]
        return recent[-1] if len(recent) >= max(1, max_restarts) else None
