"""Failures that come again without a new step: the waits grow, causes from outside do not count, a person is asked."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detector.state import back_off
from services.detector.state.back_off import LONGEST_WAIT_S, Tries, wait_s, waited_s
from services.detector.state.known_errors import FailureHistory, KnownError
from shared.events.evidence import Evidence
from shared.events.plans import Response, TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, TaskFailed, TaskProgressed, TaskResumeRequested, TaskSubmitted
from shared.messages.signals import RankRaised
from shared.tasks.specification import DEFAULT_PROGRESS_TIMEOUT_S, parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import START, Cluster, at, complete, moved, plan, restart_plan

OUTAGE = "[Errno 5] Input/output error: '/mnt/data/shard-0001.bin'"


class Course:
    """A cluster in which ranks fail one after the other; each failure is answered by a restart that trains again."""

    def __init__(self, **fields: Any) -> None:
        self.cluster = Cluster(max_restarts=fields.pop("max_restarts", 3))
        if fields:
            spec = parse_spec({**SPEC, **fields})
            monitored = self.cluster.monitor.state.tasks["gpt"]
            monitored.progress_timeout_s = spec.progress_timeout_s
        self.now_s = 1.0
        self.plans = 1

    def raises(self, worker: str = "n1/0", *, step: int = 16, error: str = "OSError", detail: str = OUTAGE) -> Any:
        fields = self.cluster.raised(worker, self.now_s, "exception", step=step).model_dump()
        text = f"Traceback ...\n{error}: {detail}\n"
        signal = RankRaised.model_validate({**fields, "error": error, "detail": detail, "traceback": text})
        return self._answered(worker, self.cluster.signal(signal, self.now_s))

    def killed(self, worker: str, *, step: int = 16) -> Any:
        return self._answered(
            worker, self.cluster.signal(self.cluster.exited(worker, self.now_s, step=step), self.now_s)
        )

    def breaks(self, *, step: int = 16) -> Any:
        """Collectives break without another cause, and are retried."""
        signal = self.cluster.raised("n0/0", self.now_s, "communication", step=step, generation=self.cluster.generation)
        self.cluster.monitor.feed(signal, at(self.now_s))
        for node in self.cluster.names:
            self.cluster.beat(node, self.now_s + 0.4)
        [event] = self.cluster.tick(self.now_s + 0.5)
        assert event.severity is Severity.SEV3
        self.plans += 1
        name, generation = f"p{self.plans}", self.cluster.generation
        again = stage(generation + 1, self.cluster.workers, kind="interrupted")
        change = TaskChange(
            task="gpt", reason="retry", action="move", from_generation=generation, survivors=self.cluster.workers,
            hold=True, interrupted=again,
        )  # fmt: skip
        self.cluster.fold(plan(name, event.event_id, change, response=Response.RETRY))
        self.cluster.fold(moved(name, generation + 1, "resumed", step=step, complete=True))
        self.cluster.generation += 1
        self.now_s += 10.0
        return event

    def _answered(self, worker: str, events: list[Any]) -> Any:
        [event] = [one for one in events if not isinstance(one, TaskProgressed)]
        if isinstance(event, ErrorDetected):
            self.plans += 1
            restart_plan(f"p{self.plans}", event, self.cluster, worker, generation=self.cluster.generation)
            complete(f"p{self.plans}", self.cluster, self.cluster.generation + 2)
        return event

    def again(self, times: int, gap_s: float = 10.0, **fields: Any) -> list[Any]:
        events = []
        for _ in range(times):
            events.append(self.raises(**fields))
            self.now_s += gap_s
        return events

    def resume(self) -> None:
        event = TaskResumeRequested(event_id=f"resume {self.now_s}", occurred_at=at(self.now_s), task="gpt")
        self.cluster.monitor.record(event, at(self.now_s))


def waits(events: list[Any]) -> list[float]:
    return [Evidence.read(event.evidence).wait_s for event in events]


@given(st.integers(0, 2000))
def test_waits_grow_and_are_capped(same: int) -> None:
    assert wait_s(0) == 0.0
    assert 0.0 <= wait_s(same) <= wait_s(same + 1) <= LONGEST_WAIT_S
    assert wait_s(same + 1) == min(LONGEST_WAIT_S, 2.0 ** min(same, 100))
    assert waited_s(same) == sum(wait_s(before) for before in range(same))


def test_a_first_failure_is_answered_at_once_and_says_nothing_of_waits() -> None:
    first = Course().raises()
    assert {"wait_s", "without_progress", "needs_operator", "not_counted"}.isdisjoint(first.evidence)


def test_the_same_failure_without_progress_waits_twice_as_long_each_time() -> None:
    events = Course().again(9)
    assert waits(events) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0]
    assert [Evidence.read(event.evidence).without_progress for event in events] == [0, *range(2, 10)]


def test_collectives_that_break_again_wait_longer_each_time() -> None:
    """A retry in place is an answer like any other."""
    course = Course(max_restarts=5)
    assert waits([course.breaks() for _ in range(4)]) == [0.0, 1.0, 2.0, 4.0]
    assert waits([course.breaks(step=17)]) == [0.0]


def test_an_outage_of_storage_does_not_end_the_task() -> None:
    events = Course().again(12)
    assert {type(event) for event in events} == {ErrorDetected}
    assert events[-1].evidence["not_counted"] == "the error says storage"


def test_a_bug_still_ends_the_task_after_max_restarts() -> None:
    *errors, failed = Course().again(4, error="ValueError", detail="it broke")
    assert waits(errors) == [0.0, 1.0, 2.0]
    assert isinstance(failed, TaskFailed)
    assert "happened 4 times; max_restarts is 3" in failed.reason


def test_a_bug_whose_waits_are_longer_than_the_window_still_ends_the_task() -> None:
    course = Course(max_restarts=12)
    events = []
    for same in range(13):
        events.append(course.raises(error="ValueError", detail="it broke"))
        course.now_s += 1.0 + wait_s(same)
    assert course.now_s > 600.0
    assert isinstance(events[-1], TaskFailed)


@pytest.mark.parametrize(
    "detail",
    [
        "[Errno 28] No space left on device: '/mnt/out'",
        "[Errno 111] Connection refused",
        "The client socket has timed out after 60000ms",
        "[Errno 98] Address already in use",
    ],
)
def test_what_says_that_it_is_of_the_surroundings_does_not_count(detail: str) -> None:
    assert all(isinstance(event, ErrorDetected) for event in Course().again(6, detail=detail))


@pytest.mark.parametrize("detail", ["[Errno 24] Too many open files", "[Errno 12] Cannot allocate memory", "a bug"])
def test_what_the_task_may_cause_itself_counts(detail: str) -> None:
    assert isinstance(Course().again(4, detail=detail)[-1], TaskFailed)


def test_a_process_that_somebody_kills_again_and_again_does_not_end_the_task() -> None:
    course = Course()
    assert waits([course.killed("n1/0") for _ in range(5)]) == [0.0, 1.0, 2.0, 4.0, 8.0]


def test_an_outage_that_comes_again_at_many_steps_and_on_many_nodes_does_not_end_the_task() -> None:
    course = Course()
    events = [course.raises(f"n{number % 3}/0", step=16 + number) for number in range(20)]
    assert {type(event) for event in events} == {ErrorDetected}
    bug = Course()
    events = [bug.raises(f"n{number % 3}/0", step=16 + number, detail="a bug") for number in range(13)]
    assert isinstance(events[-1], TaskFailed)


def test_processes_of_other_workers_that_somebody_kills_at_the_same_step_are_started_at_once() -> None:
    course = Course()
    assert waits([course.killed(f"n{rank}/0") for rank in range(3)]) == [0.0, 0.0, 0.0]


def test_ranks_that_fail_alike_in_one_generation_are_one_try() -> None:
    cluster = Cluster()
    events = [cluster.signal(cluster.raised(worker, 1.0, "exception"), 1.0)[0] for worker in cluster.workers]
    assert waits(events) == [0.0] * len(events)


def test_progress_resets_waits_and_counts() -> None:
    course = Course()
    before = course.again(3, error="ValueError", detail="it broke")
    further = course.again(3, error="ValueError", detail="it broke", step=17)
    assert waits(before) == waits(further) == [0.0, 1.0, 2.0]
    # Back at the earlier step, with the steps since then lost: that is no progress, and the same failure again.
    assert waits(course.again(1, error="ValueError", detail="it broke")) == [4.0]


def test_another_failure_at_the_same_step_waits_for_itself_alone() -> None:
    course = Course()
    course.again(3)
    assert waits(course.again(2, error="ValueError", detail="it broke")) == [0.0, 1.0]


def test_a_process_that_fails_as_it_starts_waits_although_the_others_train() -> None:
    cluster = Course().cluster
    found = []
    for number in range(4):
        worker, now_s = "n1/0", 1.0 + 10.0 * number
        generation = cluster.generation if not number else cluster.generation + 2
        signal = cluster.raised(worker, now_s, "exception", step=16 if not number else 0, generation=generation)
        fields = signal.model_dump() | {"error": "OSError", "detail": OUTAGE, "traceback": f"OSError: {OUTAGE}"}
        [event] = [
            one
            for one in cluster.signal(RankRaised.model_validate(fields), now_s)
            if not isinstance(one, TaskProgressed)
        ]
        found.append(event)
        if number:
            cluster.generation += 1
        restart_plan(f"q{number}", event, cluster, worker, generation=cluster.generation)
        cluster.fold(moved(f"q{number}", cluster.generation + 1, "resumed", step=17 + number))
    assert waits(found) == [0.0, 1.0, 2.0, 4.0]


def test_after_hours_without_progress_the_task_is_given_to_its_operator() -> None:
    course = Course()
    events = course.again(1 + int(DEFAULT_PROGRESS_TIMEOUT_S // 600), gap_s=600.0)
    *tried, last = events
    assert all(not Evidence.read(event.evidence).needs_operator for event in tried)
    why = Evidence.read(last.evidence).needs_operator
    assert "failed 25 times without a new step, for 14400 s; progress_timeout_s is 14400" in why
    assert "the error says storage" in why


def test_the_limit_is_one_of_the_specification() -> None:
    course = Course(progress_timeout_s=35.0)
    assert [bool(Evidence.read(event.evidence).needs_operator) for event in course.again(6)] == [
        *[False] * 4,
        True,
        True,
    ]


def test_few_failures_far_apart_are_no_reason_to_ask_an_operator() -> None:
    """A checkpoint may be hours old: the task is tried ``max_restarts`` times in any case."""
    events = Course().again(4, gap_s=DEFAULT_PROGRESS_TIMEOUT_S)
    assert [bool(Evidence.read(event.evidence).needs_operator) for event in events] == [False] * 3 + [True]


def test_a_task_that_an_operator_resumes_begins_anew() -> None:
    course = Course(progress_timeout_s=35.0)
    assert Evidence.read(course.again(5)[-1].evidence).needs_operator
    course.resume()
    events = course.again(3)
    assert waits(events) == [0.0, 1.0, 2.0]
    assert not any(Evidence.read(event.evidence).needs_operator for event in events)


def test_a_resumption_gives_a_bug_its_restarts_again_and_blames_no_node() -> None:
    course = Course()
    course.again(3, error="ValueError", detail="it broke")
    course.resume()
    *errors, failed = course.again(4, error="ValueError", detail="it broke")
    assert {error.severity.value for error in errors} == {"SEV2"}
    assert isinstance(failed, TaskFailed)


def test_a_submission_reads_the_limit_of_its_specification() -> None:
    cluster = Cluster()
    spec = parse_spec({**SPEC, "name": "other", "progress_timeout_s": 60})
    cluster.fold(TaskSubmitted(event_id="other", occurred_at=START, task="other", spec=spec))
    assert cluster.monitor.state.tasks["other"].progress_timeout_s == 60.0
    assert cluster.monitor.state.tasks["gpt"].progress_timeout_s == DEFAULT_PROGRESS_TIMEOUT_S


ways = st.sampled_from(["storage", "exception/ValueError"])


@given(st.lists(st.tuples(ways, st.integers(0, 2), st.integers(-1, 2)), max_size=40))
def test_any_course_counts_as_all_its_failures_do(course: list[tuple[str, int, int]]) -> None:
    """The history keeps counts; a list of all failures answers the same."""
    history, failures = FailureHistory(), list[tuple[str, int]]()
    generation, step, reached = 0, 0, -1
    for number, (way, further, steps) in enumerate(course):
        generation, step = generation + further, max(0, step + steps)
        tries = history.tries(way, generation, step, starting=False)
        if step > reached:
            failures.clear()
            reached = step
        same = len({at for one, at in failures if one == way} - {generation})
        assert (tries.same, tries.all) == (same, len({at for _, at in failures} - {generation}))
        failures.append((way, generation))
        history._note_repeats(_known(way, number), generation, step)


def _known(way: str, number: int) -> KnownError:
    return KnownError(
        event_id=f"error {number}",
        incident=f"error {number}",
        kind=ErrorKind.EXCEPTION,
        severity=Severity.SEV2,
        detected_at=START + timedelta(seconds=number),
        task="gpt",
        worker=None,
        node=None,
        rank=None,
        generation=1,
        failure=None,
        way=way,
    )


def test_nothing_is_said_of_a_task_that_has_never_failed() -> None:
    fields = {"outside": "", "max_restarts": 3, "progress_timeout_s": 1.0, "now": START}
    assert back_off.repeated(Tries(), **fields).mapping() == {}  # type: ignore[arg-type]
