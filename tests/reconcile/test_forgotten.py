"""What the detector forgets changes nothing: it decides as one that keeps every error and every task for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.detector.nodes import isolation
from services.detector.state.cluster import DetectorState
from services.detector.state.known_errors import FailureHistory, KnownError
from services.detector.state.task import MonitoredTask
from shared.events.severities import SEVERITY, Severity
from shared.events.union import IncidentObserved
from tests.reconcile.simulation import Kind, ScheduledFault, Script, Simulation, courses
from tests.reconcile.virtual import run

KINDS: list[Kind] = ["exit", "exit", "hang", "agent", "detector", "stop", "finish", "finish", "submit", "submit"]

FAULTS = st.builds(
    ScheduledFault,
    at_s=st.integers(0, 150).map(lambda tenths: tenths / 10),
    kind=st.sampled_from(KINDS),
    which=st.integers(0, 5),
    lasts_s=st.sampled_from([0.3, 1.0, 2.0]),
)

SCRIPTS = st.builds(
    Script,
    seed=st.integers(0, 2**16),
    loss=st.sampled_from([0.0, 0.05]),
    repeat=st.sampled_from([0.1, 0.5]),
    delay_s=st.sampled_from([0.0, 0.05, 0.5]),
    faults=st.lists(FAULTS, min_size=2, max_size=10),
    max_restarts=st.sampled_from([0, 1, 3]),
)

SUBMITTED_AGAIN = Script(
    seed=7,
    repeat=0.5,
    delay_s=0.5,
    faults=[
        ScheduledFault(3.0, "finish", 0),
        ScheduledFault(7.0, "submit", 0),
        ScheduledFault(12.0, "exit", 1),
        ScheduledFault(12.5, "detector", 0),
    ],
)
"""A task has ended, and its name is used again: its agents repeat signals of its predecessor."""


class Everything:
    """A detector that forgets nothing."""

    @staticmethod
    def add(history: FailureHistory, error: KnownError, generation: int, max_restarts: int, step: int) -> None:
        history._note_repeats(error, generation, step)  # counts, which tests/detector/test_back_off.py compares
        history.retried.append(error)

    @staticmethod
    def times(history: FailureHistory, key: str, *, window_s: float, now: datetime, without: int) -> int:
        since = history.counted_since
        counted = [e for e in history.retried if since is None or e.detected_at >= since]
        recent = [e for e in counted if e.failure == key and (now - e.detected_at).total_seconds() <= window_s]
        return len({e.generation for e in recent} - {without})

    @staticmethod
    def repeats(history: FailureHistory, key: str) -> bool:
        return any(error.failure == key for error in history.retried)

    @staticmethod
    def incident(history: FailureHistory, key: str) -> str:
        return next((error.incident for error in reversed(history.retried) if error.failure == key), "")

    @staticmethod
    def newest_retry(
        history: FailureHistory, max_restarts: int, *, window_s: float, now: datetime
    ) -> KnownError | None:
        retried = [e for e in history.retried if SEVERITY[e.kind] is Severity.SEV3]
        recent = [e for e in retried if (now - e.detected_at).total_seconds() <= window_s]
        return recent[-1] if len({e.generation for e in recent}) >= max(1, max_restarts) else None


@contextmanager
def keeping_everything() -> Iterator[None]:
    """Let detectors keep every task, every error and every break."""
    with (
        mock.patch.object(DetectorState, "settle", return_value=None),
        mock.patch.object(DetectorState, "answered", lambda state, cause: state.unanswered.get(cause)),
        mock.patch.object(MonitoredTask, "forget_older_generations", return_value=None),
        mock.patch.object(isolation, "forget_breaks", return_value=None),
        mock.patch.multiple(
            FailureHistory,
            add=Everything.add,
            times=Everything.times,
            repeats=Everything.repeats,
            incident=Everything.incident,
            newest_retry=Everything.newest_retry,
        ),
    ):
        yield


def events(script: Script) -> list[str]:
    """Return the log of a run, and how it ended.

    Without what was seen of incidents: a signal of a task that has ended, and is forgotten, is no further observation.
    """

    async def work() -> list[str]:
        simulation = Simulation(script)
        unsettled = await simulation.run()
        logged = [record.event for record in simulation.log.records]
        return [event.canonical() for event in logged if not isinstance(event, IncidentObserved)] + [unsettled]

    return run(work())


@pytest.mark.timeout(240)
@courses(25)
@given(script=SCRIPTS)
@example(script=SUBMITTED_AGAIN)
def test_any_course_is_decided_as_if_everything_were_kept(script: Script) -> None:
    found = events(script)
    with keeping_everything():
        assert found == events(script)
    assert found[-1] == ""
