"""A boundary section that only some ranks enter ends the task with a reason, and no fault looks like it."""

from __future__ import annotations

from typing import Any

import pytest

from shared.events.union import ErrorDetected, TaskFailed
from tests.detector.kit import Cluster, only_error, timed

INSIDE: dict[str, Any] = {"phase": "aside", "sections": 1, "section": "train.py:41"}


def waiting(n0: dict[str, Any], n1: dict[str, Any], n2: dict[str, Any], seconds: float = 3.5) -> list[Any]:
    """Three ranks have stood for some seconds behind step 17, each as its status says; return what the tick finds."""
    cluster = Cluster()
    timed(cluster, *[0.1] * 10)
    cluster.listen_until(10.0)
    for node, status in zip(cluster.names, (n0, n1, n2), strict=True):
        cluster.beat(node, 10.0, **{"step": 17, "progress_age_s": seconds, "sections": 0, **status})
    return cluster.tick(10.0)


def test_a_section_that_one_rank_enters_alone_ends_the_task_and_says_where_everybody_is() -> None:
    (failed,) = waiting(INSIDE, {"phase": "reduce"}, {"phase": "reduce"})
    assert isinstance(failed, TaskFailed)
    assert failed.reason == (
        "WrongLoop: rank 0 is in run.boundary() behind step 17 (train.py:41), which other ranks have not entered: "
        "ranks 1, 2 are in step.reduce() of step 18. All ranks have to enter a boundary section: put `if rank == 0` "
        "inside the block, not around it, and let whether a step has one follow from step.number alone"
    )
    assert (failed.step, failed.generation) == (17, 1)


def test_the_places_of_the_others_are_named_one_by_one() -> None:
    (failed,) = waiting({"phase": "checkpoint"}, INSIDE, {"phase": "compute"})
    assert "rank 1 is in run.boundary()" in failed.reason
    assert "rank 0 is behind it, in a checkpoint or at the end of the loop; rank 2 is in step 18." in failed.reason


def test_it_is_the_second_section_behind_a_step_that_others_leave_out() -> None:
    gone_on = {"phase": "reduce", "sections": 1}
    (failed,) = waiting({**INSIDE, "sections": 2}, gone_on, gone_on)
    assert isinstance(failed, TaskFailed)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"phase": "aside"}, id="it does something of its own, and may come"),
        pytest.param({"phase": "ended"}, id="it is still behind the same step"),
        pytest.param({"phase": "reduce", "sections": 1}, id="it was in the section, which has ended for it first"),
        pytest.param({"phase": "reduce", "step": 18}, id="it has done a step that needs the first rank: news is late"),
        pytest.param({"phase": "reduce", "sections": None}, id="its agent is of a version that does not say"),
        pytest.param({"phase": "waiting", "state": "waiting"}, id="it was asked to leave"),
    ],
)
def test_nothing_follows_while_another_rank_may_still_come(other: dict[str, Any]) -> None:
    assert not [event for event in waiting(INSIDE, other, other) if isinstance(event, TaskFailed)]


def test_a_loop_that_uses_the_library_wrongly_ends_a_task_that_has_trained_at_once() -> None:
    cluster = Cluster()
    (failed,) = cluster.signal(cluster.raised("n1/0", 1.0, "wrong_loop"), 1.0)
    assert isinstance(failed, TaskFailed)
    assert failed.reason == "worker n1/0 of node n1 cannot run it: ValueError: it broke"


def test_a_rank_that_is_killed_before_it_enters_is_a_fault_as_elsewhere() -> None:
    cluster = Cluster()
    timed(cluster, *[0.1] * 10)
    cluster.listen_until(10.0)
    for node, status in zip(cluster.names, (INSIDE, {"phase": "ended"}, INSIDE), strict=True):
        cluster.beat(node, 10.0, **{"step": 17, "progress_age_s": 3.5, "sections": 0, **status})
    error = only_error(cluster.signal(cluster.exited("n1/0", 10.1), 10.1))
    assert isinstance(error, ErrorDetected)
    assert [event for event in cluster.tick(10.2) if isinstance(event, TaskFailed)] == []
