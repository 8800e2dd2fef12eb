"""When progress is recorded: as often as the rate changes; what is computed from it stays what it was."""

from __future__ import annotations

import itertools
import random
import statistics
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detector.decisions import status_events
from services.detector.progress import recording
from services.detector.state.cluster import DetectorState
from services.detector.state.task import MonitoredTask
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, TaskProgressed
from shared.messages.signals import WorkerStatus
from tests.detector.kit import START, Cluster
from tests.detector.progress_course import Course, summaries
from tests.examples import examples

DENSE_S = 5.0


def dense(course: Course) -> list[TaskProgressed]:
    """Return a summary each ``DENSE_S``, as it was before."""
    found: list[TaskProgressed] = []
    for event in summaries(course, every_step=True):
        if not found or (event.occurred_at - found[-1].occurred_at).total_seconds() >= DENSE_S:
            found.append(event)
    return found


courses = st.builds(
    Course,
    seed=st.integers(0, 2**32 - 1),
    step_s=st.sampled_from([0.2, 1.0, 4.0]),
    noise=st.sampled_from([0.0, 0.05, 0.2]),
    # Where the rate changes, as a part of the course, and by which factor.
    changes=st.lists(st.tuples(st.floats(0.0, 0.5), st.sampled_from([0.5, 0.8, 1.2, 3.0])), max_size=2),
    steps=st.just(1500),
)


@settings(max_examples=examples(8))
@given(courses)
def test_what_is_derived_from_sparse_progress_is_that_of_dense_progress(course: Course) -> None:
    """Within a tenth of the time so far for steps, and within the noise of a median for rates."""
    often, seldom = dense(course), summaries(course)
    shortest_s, longest_s = min(course.durations_s()), max(course.durations_s())
    index = 0
    for event in often:
        while index + 1 < len(seldom) and seldom[index + 1].occurred_at <= event.occurred_at:
            index += 1
        late_s = (event.occurred_at - seldom[index].occurred_at).total_seconds()
        allowed_s = max(DENSE_S, recording.GROWTH * (event.occurred_at - START).total_seconds())
        assert late_s <= min(allowed_s, recording.LONGEST_S) + 2 * longest_s
        assert event.step - seldom[index].step <= late_s / shortest_s + 1
    # At the end the rate has been the same for half of the course.
    rates = [statistics.median(event.step_s for event in events[-15:]) for events in (often, seldom)]
    assert abs(rates[1] / rates[0] - 1.0) <= max(2 * recording.LEAST_CHANGE, course.noise)
    assert len(seldom) <= len(often)


def test_a_month_of_ten_tasks_is_some_ten_thousand_rows() -> None:
    """One task for a day, with steps of 10 s that vary by 5%: the rest of the month is as its second half."""
    events = summaries(Course(seed=1, step_s=10.0, noise=0.05, steps=8640))
    half_day = START + timedelta(hours=12)
    later = sum(event.occurred_at > half_day for event in events)
    assert len(events) < 150
    assert later in {23, 24, 25}  # 1800 s each: 14,400 in a month of ten tasks


def test_a_change_of_the_rate_is_recorded_as_soon_as_the_window_shows_it() -> None:
    course = Course(seed=1, step_s=1.0, noise=0.05, steps=3000, changes=[(0.5, 1.5)])
    changed = START + timedelta(seconds=1500)
    events = [event for event in summaries(course) if event.occurred_at > changed]
    first = next(event for event in events if event.step_s > 1.4)
    assert (first.occurred_at - changed).total_seconds() < 1.5 * 32
    after = [event for event in events if event.occurred_at > first.occurred_at]
    # The mean of rates has fifteen samples: eight of the new rate come as quickly as ever.
    assert (after[7].occurred_at - first.occurred_at).total_seconds() < 100.0


def test_noise_is_no_change() -> None:
    drawn = random.Random(7)
    windows = [[drawn.lognormvariate(0.0, 0.2) for _ in range(32)] for _ in range(300)]
    taken = [recording.has_changed(statistics.median(a), b) for a, b in itertools.pairwise(windows)]
    assert sum(taken) <= 6  # 1 in 370 of normal values; these have a longer tail
    assert not recording.has_changed(1.0, [1.04] * 32)
    assert recording.has_changed(1.0, [1.06] * 32)


def test_before_a_fault_the_log_gets_the_newest_step() -> None:
    cluster = Cluster()
    for step in range(1, 9):
        cluster.beat("n0", step * 0.25, step=step, step_s=0.25, steps_timed=step)
    state = cluster.monitor.state
    error = ErrorDetected(
        event_id="e",
        occurred_at=START,
        incident="i",
        kind=ErrorKind.NODE_LOST,
        severity=Severity.SEV1,
        method=next(iter(Method)),
        detected_at=START,
        node="n1",
    )
    (summary,) = status_events.before_fault(state, error, START)
    assert (summary.task, summary.step, summary.step_s) == ("gpt", 8, 0.25)
    assert state.tasks["gpt"].progressed_step == 2  # that of the first rate
    decided = cluster.signal(cluster.exited("n1/0", 2.0), 2.0)
    assert [type(event) for event in decided] == [TaskProgressed, ErrorDetected]
    assert decided[0].step == 8


def test_a_task_without_a_rate_has_nothing_to_record() -> None:
    task = MonitoredTask("gpt", 3)
    assert not recording.is_unrecorded(task)
    status = WorkerStatus(worker="n0/0")
    assert status_events.of_rank(task, status, 5.0, START) is None
    assert DetectorState().trained_by(status) is None
