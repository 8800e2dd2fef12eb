"""The same exception from the same line in a row is one incident, with its attempts."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from services.detector.state.known_errors import place_of
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, TaskFailed
from tests.detector.kit import Cluster, at, complete, restart_plan

SCRIPT = "/home/you/train.py"


def traceback(line: int = 12, *, error: str = "ValueError: no such shard: 7", library: str = "") -> str:
    frames = [f'  File "{SCRIPT}", line {line}, in step\n    batch = next(batches)']
    if library:
        frames.append(f'  File "/venv/lib/python3.11/site-packages/{library}", line 900, in call\n    raise error')
    return "\n".join(["Traceback (most recent call last):", *frames, error, ""])


def attempts(cluster: Cluster, texts: list[str], *, gap_s: float = 10.0, steps: int = 1) -> list[Any]:
    """A rank raises, is restarted, and raises again, each time at a later step."""
    events: list[Any] = []
    for index, text in enumerate(texts):
        seconds = 1.0 + index * gap_s
        raised = cluster.raised("n1/0", seconds, "exception", step=16 + index * steps)
        raised = raised.model_copy(update={"traceback": text})
        events += cluster.monitor.feed(raised, at(seconds)).events
        if isinstance(events[-1], ErrorDetected):
            restart_plan(f"p{index + 2}", events[-1], cluster, "n1/0", generation=cluster.generation)
            complete(f"p{index + 2}", cluster, cluster.generation + 2)
    return [event for event in events if isinstance(event, ErrorDetected | TaskFailed)]


@pytest.mark.parametrize("steps", [0, 1])
def test_one_bug_is_one_incident(steps: int) -> None:
    """At one step, and at others: the line is the same. What the error says may differ."""
    texts = [traceback(error=f"ValueError: no such shard: {number}") for number in range(3)]
    first, *others = attempts(Cluster(), texts, steps=steps)
    assert (first.incident, first.repeats) == (first.event_id, None)
    assert {one.incident for one in others} == {first.incident}
    assert [one.repeats for one in others] == [first.event_id, others[0].event_id]
    assert {one.escalates for one in others} == {None}  # the response to each has succeeded
    assert len({one.event_id for one in (first, *others)}) == 3


def test_the_end_of_the_task_belongs_to_the_incident() -> None:
    *errors, failed = attempts(Cluster(), [traceback()] * 4, steps=0)
    assert isinstance(failed, TaskFailed)
    assert {one.incident for one in (*errors, failed)} == {errors[0].event_id}


@pytest.mark.parametrize(
    "between",
    [
        traceback(line=13),
        traceback(error="KeyError: 7"),
        traceback(library="torch/nn/functional.py"),
        "no traceback at all",
    ],
)
def test_another_failure_between_two_ends_the_row(between: str) -> None:
    first, other, last = attempts(Cluster(), [traceback(), between, traceback()])
    assert len({one.incident for one in (first, other, last)}) == 3
    assert last.repeats is None


def test_one_that_comes_much_later_is_another_incident() -> None:
    first, second = attempts(Cluster(), [traceback()] * 2, gap_s=700.0)
    assert first.incident != second.incident


@pytest.mark.parametrize(("exit_code", "incidents"), [(-signal.SIGKILL, 2), (-signal.SIGSEGV, 2), (1, 1)])
@pytest.mark.parametrize("output", [f"{traceback()}generation 4 from own\n", ""])
def test_only_a_process_that_ends_by_itself_ends_of_what_it_has_printed(
    exit_code: int, incidents: int, output: str
) -> None:
    """A survivor prints the broken collective that it goes on from; a signal ends it long afterwards."""
    cluster = Cluster()
    found = []
    for index in range(2):
        seconds = 1.0 + 10.0 * index
        exited = cluster.exited("n1/0", seconds, step=16 + index)
        exited = exited.model_copy(update={"exit_code": exit_code, "last_output": output})
        [error] = cluster.signal(exited, seconds)
        found.append(error)
        restart_plan(f"p{index + 2}", error, cluster, "n1/0", generation=cluster.generation)
        complete(f"p{index + 2}", cluster, cluster.generation + 2)
    assert len({error.incident for error in found}) == (incidents if output else 2)


def test_an_attempt_counts_for_the_limits_of_causes() -> None:
    """It is a fault like the first: on one worker, the third of a cause is one severity worse."""
    found = attempts(Cluster(max_restarts=9), [traceback()] * 4)
    severities = [one.severity for one in found if isinstance(one, ErrorDetected)]
    assert severities[0] is Severity.SEV2
    evidence = [one.evidence.get("repetition", {}).get("times") for one in found if isinstance(one, ErrorDetected)]
    assert evidence[2:] == [3, 4]


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        (ErrorKind.EXCEPTION, traceback(), f"ValueError {SCRIPT}:12"),
        (ErrorKind.PROCESS_EXIT, f"loading\n{traceback()}one more line\n", f"ValueError {SCRIPT}:12"),
        (ErrorKind.EXCEPTION, traceback(error="my.errors.Broken"), f"Broken {SCRIPT}:12"),
        (
            ErrorKind.EXCEPTION,
            traceback(library="torch/nn/functional.py"),
            f"ValueError {SCRIPT}:12 /venv/lib/python3.11/site-packages/torch/nn/functional.py:900",
        ),
        (ErrorKind.EXCEPTION, f"{traceback(7)}\nDuring handling ...\n\n{traceback(12)}", f"ValueError {SCRIPT}:12"),
        (ErrorKind.EXCEPTION, traceback(error="unicron.process.faults.InjectedFault: asked for"), ""),
        (ErrorKind.NON_FINITE, traceback(), ""),
        (ErrorKind.PROCESS_EXIT, "Killed", ""),
        (ErrorKind.EXCEPTION, "", ""),
    ],
)
def test_the_place_of_an_exception(kind: ErrorKind, text: str, place: str) -> None:
    assert place_of(kind, text) == place
