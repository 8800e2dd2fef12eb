"""What the detector keeps of errors answers its questions as all error events together would, and is bounded."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.log_course import Course
from services.detector.state import known_errors
from services.detector.state.cause_history import REMEMBERED, CauseHistory
from services.detector.state.cluster import DetectorState
from services.detector.state.known_errors import FailureHistory, KnownError
from services.detector.state_snapshot import KEPT as DETECTOR
from shared.events.severities import SEVERITY, ErrorKind, Severity
from shared.events.union import ErrorDetected, Recorded, TaskFailed, TaskFinished, TaskSubmitted
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC
from tests.detector.kit import START, Cluster, only_error, plan
from tests.kept import folded, restored

WINDOW_S = 600.0


def error(number: int, after_s: float, kind: ErrorKind, generation: int, failure: str | None) -> KnownError:
    return KnownError(
        event_id=f"error-{number}",
        incident=f"incident-{number}",
        kind=kind,
        severity=SEVERITY[kind],
        detected_at=START + timedelta(seconds=after_s),
        task="gpt",
        worker=None,
        node=None,
        rank=None,
        generation=generation,
        failure=failure,
    )


steps = st.tuples(
    st.sampled_from([0.0, 10.0, 300.0, 601.0]),  # after the error before
    st.sampled_from([ErrorKind.CONNECTION, ErrorKind.PROCESS_EXIT, ErrorKind.COLLECTIVE_TIMEOUT]),
    st.integers(0, 1),  # generations later
    st.sampled_from(["a", "b", None]),
)


@given(st.lists(steps, max_size=30), st.integers(0, 3), st.sampled_from([0.0, 200.0, 700.0]))
def test_any_history_answers_as_all_errors_do(
    course: list[tuple[float, ErrorKind, int, str | None]], max_restarts: int, later_s: float
) -> None:
    errors: list[KnownError] = []
    kept = FailureHistory()
    at_s, generation = 0.0, 1
    for pause_s, kind, further, failure in course:
        at_s, generation = at_s + pause_s, generation + further
        errors.append(error(len(errors), at_s, kind, generation, failure))
        kept.add(errors[-1], generation, max_restarts)
        now = START + timedelta(seconds=at_s + later_s)
        recent = [e for e in errors if (now - e.detected_at).total_seconds() <= WINDOW_S]
        for key in ("a", "b"):
            for without in (generation, generation + 1):
                times = len({e.generation for e in recent if e.failure == key} - {without})
                found = kept.times(key, window_s=WINDOW_S, now=now, without=without)
                assert found == times or min(found, times) >= max_restarts, "a task is given up by then"
            same = [e for e in errors if e.failure == key]
            assert kept.repeats(key) == bool(same)
            assert kept.incident(key) == (same[-1].incident if same else "")
        retried = [e for e in recent if SEVERITY[e.kind] is Severity.SEV3]
        enough = len({e.generation for e in retried}) >= max(1, max_restarts)
        newest = kept.newest_retry(max_restarts, window_s=WINDOW_S, now=now)
        assert newest == (retried[-1] if enough else None)
    assert all(len(known.at) <= max_restarts + 1 for known in kept.failures.values())
    assert len(kept.retried) <= max(1, max_restarts)


def test_the_oldest_of_many_failures_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_errors, "MOST_FAILURES", 3)
    kept = FailureHistory()
    for number, key in enumerate(["a", "b", "c", "a", "d"]):
        kept.add(error(number, number, ErrorKind.PROCESS_EXIT, number, key), number, 3)
    assert list(kept.failures) == ["c", "a", "d"]


def test_errors_before_the_one_that_a_plan_answers_are_answered() -> None:
    state = DetectorState()
    state.unanswered = {str(number): error(number, 0.0, ErrorKind.HANG, 1, None) for number in range(4)}
    assert state.answered("no error") is None
    assert len(state.unanswered) == 4
    known = state.answered("2")
    assert known is not None
    assert known.event_id == "error-2"
    assert list(state.unanswered) == ["3"]


def test_what_was_recorded_of_a_task_is_not_recorded_of_the_next_one_with_its_name() -> None:
    """An agent repeats a signal until it has an answer, however long that takes."""
    cluster = Cluster()
    signal = cluster.finished("n0/0", 1.0)
    assert [type(event) for event in cluster.signal(signal, 1.0)] == [TaskFinished]
    state = cluster.monitor.state
    assert list(state.tasks) == []
    assert list(state.ended) == ["gpt"]
    assert cluster.signal(signal, 2.0) == []
    spec = parse_spec(SPEC)
    cluster.fold(TaskSubmitted(event_id="again", occurred_at=START, task="gpt", spec=spec))
    assert list(state.tasks) == ["gpt"]
    assert state.ended == {}
    assert state.tasks["gpt"].highest_generation == 1
    assert cluster.signal(signal, 3.0) == []


def test_a_task_that_has_ended_is_kept_until_its_last_error_is_answered() -> None:
    cluster = Cluster()
    lost = only_error(cluster.signal(cluster.exited("n0/0", 1.0), 1.0))
    cluster.fold(TaskFailed(event_id="failed", occurred_at=START, task="gpt", generation=1, step=1, reason="user"))
    state = cluster.monitor.state
    assert list(state.ended) == ["gpt"]
    late = lost.model_copy(update={"event_id": "late"})
    cluster.fold(late)  # decided before its detector knew of the end
    assert state.tasks["gpt"].ended
    assert state.ended == {}
    cluster.fold(plan("p2", "late"))
    assert list(state.tasks) == []
    assert list(state.ended) == ["gpt"]


@pytest.fixture(scope="module")
def course() -> list[Recorded]:
    return list(Course(4000).records())


def test_what_is_over_leaves_the_detectors_state(course: list[Recorded]) -> None:
    records = course
    submitted = sum(isinstance(r.event, TaskSubmitted) for r in records)
    ended = sum(isinstance(r.event, TaskFinished) for r in records)
    assert ended > 10
    _, state = folded(DETECTOR, records, len(records))
    assert len(state.tasks) == submitted - ended
    assert len(state.ended) == ended
    assert sum(isinstance(r.event, ErrorDetected) for r in records) > 300
    assert len(state.unanswered) <= 1
    # Of causes, the newest are remembered of each place.
    assert state.causes.tasks.keys() <= state.tasks.keys()
    assert state.causes.nodes.keys() <= state.nodes.keys()
    remembered = [*state.causes.nodes.values(), *state.causes.tasks.values()]
    assert max(len(occurred) for occurred in remembered) <= REMEMBERED
    assert restored(DETECTOR, state) == state
    state.causes = CauseHistory()
    # A task that ended is a name and some ids, whatever has happened to it.
    assert len(DETECTOR.codec.dump(state)) < 1000 * (len(state.tasks) + len(state.nodes)) + 1000 * ended
    assert restored(DETECTOR, state) == state
