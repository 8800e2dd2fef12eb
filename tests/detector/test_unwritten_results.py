"""A task whose result cannot be written for a while: its workers go to others, for longer each time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from services.detector.progress.unwritten_results import FIRST_WAIT_S, LONGEST_WAIT_S
from shared.events.plans import TaskChange
from shared.events.union import TaskCheckpointFailed, TaskResultUnwritten, TaskSubmitted
from shared.messages.signals import RankCheckpointFailed, StorageReturned
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import START, Cluster, at, moved, plan

FULL = "all steps are done, and the result cannot be written: no room"


def failed(cluster: Cluster, now: float, *, lends: bool) -> list[Any]:
    about = {**cluster._about("n0/0", now, 100), "reason": FULL, "lends": lends}
    return cluster.signal(RankCheckpointFailed.model_validate(about), now)


def storage_returned(cluster: Cluster, now: float, generation: int) -> list[Any]:
    about = cluster._about("n0/0", now, 100, generation=generation)
    return cluster.signal(StorageReturned.model_validate(about), now)


def tried_again(cluster: Cluster, number: int) -> None:
    """The task has left its workers, and has them again in another generation."""
    generation = cluster.generation
    pause = TaskChange(task="gpt", reason="full", action="pause", from_generation=generation, survivors=cluster.workers)
    target = stage(generation + 1, cluster.workers, source="checkpoint")
    again = TaskChange(
        task="gpt",
        reason="again",
        action="move",
        from_generation=generation,
        prepare=cluster.workers,
        target=target,
    )
    cluster.fold(
        plan(f"pause-{number}", f"cause-{number}", pause),
        moved(f"pause-{number}", generation, "ended", complete=True),
        plan(f"again-{number}", f"again-{number}", again),
        moved(f"again-{number}", generation + 1, "restored", complete=True),
    )
    cluster.generation += 1


def test_its_workers_go_to_others_once_it_says_that_they_may() -> None:
    cluster = Cluster()
    (first,) = failed(cluster, 1.0, lends=False)
    assert isinstance(first, TaskCheckpointFailed)
    assert failed(cluster, 15.0, lends=False) == []
    (event,) = failed(cluster, 31.0, lends=True)
    assert isinstance(event, TaskResultUnwritten)
    assert (event.task, event.generation, event.step, event.worker, event.reason) == ("gpt", 1, 100, "n0/0", FULL)
    assert event.retry_at == at(31.0) + timedelta(seconds=FIRST_WAIT_S)
    assert not event.ended
    assert failed(cluster, 31.0, lends=True) == [], "the signal is repeated"
    assert failed(cluster, 63.0, lends=True) == [], "it was said"


def test_each_try_in_vain_makes_it_wait_longer_until_it_is_submitted_again() -> None:
    cluster = Cluster()
    waits = []
    for number in range(5):
        (event,) = failed(cluster, 40.0, lends=True)
        waits.append((event.retry_at - at(40.0)).total_seconds())
        tried_again(cluster, number)
    assert waits == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S]
    cluster.fold(TaskSubmitted(event_id="again", occurred_at=START, task="gpt", spec=parse_spec(SPEC)))
    tried_again(cluster, 9)
    (event,) = failed(cluster, 50.0, lends=True)
    assert event.retry_at == at(50.0) + timedelta(seconds=FIRST_WAIT_S)


def test_a_node_that_can_write_again_ends_the_wait_that_began_in_its_generation() -> None:
    cluster = Cluster()
    assert storage_returned(cluster, 30.0, 1) == [], "it does not wait"
    failed(cluster, 31.0, lends=True)
    assert storage_returned(cluster, 45.0, 7) == []
    (event,) = storage_returned(cluster, 50.0, 1)
    assert isinstance(event, TaskResultUnwritten)
    assert (event.ended, event.generation, event.retry_at) == (True, 1, at(50.0))
    assert storage_returned(cluster, 51.0, 1) == [], "the signal is repeated"
    tried_again(cluster, 0)
    assert storage_returned(cluster, 60.0, 1) == [], "it tries"


def test_what_is_being_done_about_the_task_comes_first() -> None:
    cluster = Cluster()
    failed(cluster, 1.0, lends=False)
    stop = TaskChange(task="gpt", reason="stop", action="stop", from_generation=1, survivors=cluster.workers)
    cluster.fold(plan("p2", "cause", stop))
    assert failed(cluster, 40.0, lends=True) == []
