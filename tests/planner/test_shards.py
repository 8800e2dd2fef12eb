"""Faults of tasks whose model or optimizer is divided: which stages form, and where the state comes from."""

from __future__ import annotations

import pytest

from shared.events.severities import ErrorKind
from tests.planner.kit import change_of, running, sources, workers

COPIED = {"every": 5, "memory_every": 1}
COPIED_BY_THEMSELVES = {"every": 5, "memory_every": "auto"}
NOT_COPIED = {"every": 5, "memory_every": 0}


def test_whole_replicas_finish_the_step_and_the_rest_of_a_broken_one_stands_by() -> None:
    world = running(nodes=2, workers=2, parallel={"tensor": 2})
    world.checkpoint(step=5)
    a, b, c, d = world.task().members
    assert a.split("/")[0] == b.split("/")[0] != c.split("/")[0] == d.split("/")[0]
    plan = world.exit(b)
    change = change_of(plan)
    assert change.hold
    assert change.survivors == [a, c, d]
    assert change.interrupted is not None
    assert workers(change.interrupted) == [c, d]
    assert (change.interrupted.layout.tensor, change.interrupted.layout.data) == (2, 1)
    assert change.prepare == [b]
    assert change.target is not None
    assert dict(zip(workers(change.target), sources(change.target), strict=True)) == {
        a: "live", b: "take", c: "live", d: "live",
    }  # fmt: skip
    # Another of the same replica before that has formed: a is a step behind, and no whole replica is left. Copies in
    # memory have what is missing.
    last = change_of(world.exit(d))
    assert last.hold
    assert last.interrupted is None
    assert last.target is not None
    assert (last.target.complete, last.target.checkpoint) == (False, "checkpoint-5")
    assert dict(zip(workers(last.target), sources(last.target), strict=True)) == {
        a: "live", b: "take", c: "live", d: "take",
    }  # fmt: skip
    assert last.survivors == [a, c]


@pytest.mark.parametrize(
    ("checkpoint", "source"), [(COPIED, "live"), (COPIED_BY_THEMSELVES, "live"), (NOT_COPIED, "checkpoint")]
)
def test_all_replicas_retry_and_a_divided_optimizer_needs_all_its_parts(
    checkpoint: dict[str, int], source: str
) -> None:
    parallel = {"tensor": 2, "distributed_optimizer": True}
    world = running(nodes=2, workers=2, parallel=parallel, checkpoint=checkpoint)
    world.checkpoint(step=5)
    members = list(world.task().members)
    retry = change_of(world.complete(world.error(ErrorKind.CONNECTION, task="a", generation=1)))
    assert retry.interrupted is not None
    assert (workers(retry.interrupted), retry.action) == (members, "none")
    change = change_of(world.exit(members[3]))
    assert change.hold
    assert change.interrupted is None
    assert change.target is not None
    assert change.target.checkpoint == "checkpoint-5"
    assert (change.survivors, sources(change.target)[:3]) == (members[:3], [source] * 3)


def test_the_survivors_of_a_divided_optimizer_finish_the_step_by_what_is_copied() -> None:
    """Each replica has a part. The lost part is in the memory of nodes until the survivors have divided it anew."""
    world = running(parallel={"distributed_optimizer": True}, checkpoint=COPIED)
    a, b, c, d = world.task().members
    plan = world.exit(b)
    change = change_of(plan)
    assert change.interrupted is not None
    assert change.target is not None
    assert (workers(change.interrupted), change.interrupted.complete) == ([a, c, d], False)
    assert (workers(change.target), change.target.complete) == ([a, c, d, b], True)
    # Another one before that has formed: still nobody has b's part.
    second = world.exit(d)
    change = change_of(second)
    assert change.interrupted is not None
    assert (workers(change.interrupted), change.interrupted.complete) == ([a, c], False)
    # Now the two have all of it, and it is saved when the task stops.
    world.resume(second, change)
    assert (world.task().owners, world.task().ranks) == ((a, c), {a: 0, c: 1})
    stop = change_of(world.stop())
    assert stop.interrupted is not None
    assert (workers(stop.interrupted), stop.interrupted.complete) == ([a, c], True)


def test_a_divided_optimizer_that_shrinks_is_whole_once_its_survivors_have_formed() -> None:
    world = running(nodes=3, workers=1, parallel={"distributed_optimizer": True}, checkpoint=COPIED)
    plan = world.lose("n1")
    change = change_of(plan)
    assert change.action == "none"
    assert change.interrupted is not None
    assert not change.interrupted.complete
    world.complete(plan)
    joined = change_of(world.join("n3"))
    assert joined.interrupted is None
    assert joined.target is not None
    assert joined.target.complete
