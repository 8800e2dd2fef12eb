"""Every request meets every state of a task and of its ranks: while a replica is left, no step is lost.

A course brings a task of three data-parallel ranks into a state, makes a request there, and goes on until all has
settled (``simulation.py``). The ranks have one step of state each, which is gone with the process; there are no
checkpoints but those that a stop or a pause writes. So whatever ends a process that nobody has saved shows as a loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.transition.state import Phase
from shared.events.codes import FailureCode
from shared.events.union import (
    ErrorDetected,
    EventBase,
    NodeDraining,
    NodeReturned,
    StateMoved,
    TaskChanged,
    TaskDeleted,
    TaskStopped,
    TaskStopRequested,
)
from tests.condition import until
from tests.reconcile.ranks import Rank
from tests.reconcile.services import Planner, Transition
from tests.reconcile.simulation import Script, Simulation
from tests.reconcile.virtual import now, run

TASK = "a"
POLL_S = 0.001
REACHED_S = 60.0


class Course(Simulation):
    """One state, and one request that meets it."""

    def __init__(self, state: str, request: str) -> None:
        super().__init__(Script(seed=1, healed_s=0.5, calm_s=1.0, tasks=((TASK, 3),)))
        self.state, self.request = state, request
        self.events = 0
        self.step_at_request = 0
        self.done = False

    async def course(self) -> None:
        await STATES[self.state](self)
        self.step_at_request = self.cluster.newest.get(TASK, 0)
        await REQUESTS[self.request](self)
        await self.bring_back()
        self.done = True

    # ---- what a state or a request is made of

    async def bring_back(self) -> None:
        """Start the service that is away again, later than the transition service waits for the answer to a fault."""
        for name in ("planner", "detector", "transition"):
            if name not in self.services:
                await asyncio.sleep(4.0)
                self._start(name)

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition, f"{self.state} is reached", limit_s=REACHED_S)

    def ranks(self) -> list[Rank]:
        """Return the task's ranks that have state, those that have the most first."""
        found = [rank for rank in self.cluster.living() if rank.process.task == TASK and rank.step is not None]
        return sorted(found, key=lambda rank: -(rank.step or 0))

    def lose_one(self, *, signalled: bool = True) -> None:
        """End a process of the task, if another one has as many steps."""
        ranks = self.ranks()
        if len(ranks) > 1 and ranks[0].step == ranks[1].step:
            ranks[1].agent.ended(ranks[1].process, -9, signalled=signalled)

    def send(self, kind: type[EventBase], **fields: Any) -> None:
        self.events += 1
        event = kind(event_id=f"course-{self.events}", occurred_at=now(), **fields)
        self.log.append([event])  # type: ignore[list-item]

    def planner(self) -> Planner:
        found = self.services["planner"]
        assert isinstance(found, Planner)
        return found

    def in_phase(self, phase: Phase) -> bool:
        """Return whether the task's plan is in a phase."""
        mover = self.services["transition"]
        assert isinstance(mover, Transition)
        part = mover.state.task(TASK).part
        return part is not None and part.active and phase in part.runs and phase not in part.done

    def resume(self) -> None:
        """Submit the task again, as the api does for one that has ended."""
        kinds = [r.event.type for r in self.log.records if r.stream == f"task/{TASK}"]
        lives = [kind for kind in kinds if kind in ("task.submitted", "task.stopped", "task.finished", "task.failed")]
        if lives[-1] != "task.submitted":
            self.events += 1
            self.submit(TASK, 3, f"course-{self.events}")

    # ---- what came of it

    def stops(self) -> list[TaskStopped]:
        return [r.event for r in self.log.records if isinstance(r.event, TaskStopped)]

    def crossed(self) -> list[str]:
        """Return what is said of plans that counted on processes which the plan before them had released."""
        moved = [r.event for r in self.log.records if isinstance(r.event, StateMoved)]
        return [event.detail for event in moved if event.code is FailureCode.RELEASED]


# ---- states


async def training(course: Course) -> None:
    await course.until(lambda: course.cluster.newest.get(TASK, 0) >= 4 and len(course.ranks()) == 3)


async def starting(course: Course) -> None:
    await course.until(lambda: course.in_phase(Phase.PREPARE))


async def first_joining(course: Course) -> None:
    await course.until(lambda: course.in_phase(Phase.CONFIGURE_TARGET))


def unheard(kind: str, away: str = "detector") -> Callable[[Course], Awaitable[None]]:
    """Return the state behind a fault that the log does not have, since a service is away."""

    async def reach(course: Course) -> None:
        await training(course)
        course.kill(away)
        await fault(kind)(course)
        await asyncio.sleep(0.4)

    return reach


def fault(kind: str) -> Callable[[Course], Awaitable[None]]:
    async def strike(course: Course) -> None:
        if kind == "broken":
            for rank in course.ranks()[:1]:
                assert rank.group is not None
                rank.group.broken = True
        else:
            course.lose_one(signalled=kind == "exit")

    return strike


def answering(phase: Phase) -> Callable[[Course], Awaitable[None]]:
    """Return the state in which the answer to a fault is in a phase."""

    async def reach(course: Course) -> None:
        await training(course)
        course.lose_one()
        await course.until(lambda: course.in_phase(phase))

    return reach


def moving(phase: Phase) -> Callable[[Course], Awaitable[None]]:
    """Return the state in which the task gives up a worker."""

    async def reach(course: Course) -> None:
        await training(course)
        await fewer(course)
        await course.until(lambda: course.in_phase(phase))

    return reach


async def stopping(course: Course) -> None:
    await training(course)
    await stop(course)
    await course.until(lambda: course.in_phase(Phase.STOP))


async def stopped(course: Course) -> None:
    await training(course)
    await stop(course)
    await course.until(lambda: bool(course.stops()))


async def resuming(course: Course) -> None:
    await stopped(course)
    course.resume()
    await course.until(lambda: course.in_phase(Phase.CONFIGURE_TARGET))


async def pausing(course: Course) -> None:
    await training(course)
    drain(course, ("n0", "n1", "n2"))
    await course.until(lambda: course.in_phase(Phase.STOP))


async def queued(course: Course) -> None:
    await training(course)
    drain(course, ("n0", "n1", "n2"))
    await course.until(lambda: bool(course.planner().state.tasks[TASK].queued and not course.ranks()))


STATES: dict[str, Callable[[Course], Awaitable[None]]] = {
    "starting": starting,
    "joining for the first time": first_joining,
    "training": training,
    "a process has ended, unheard": unheard("exit"),
    "a process has vanished, unheard": unheard("vanish"),
    "sockets are broken, unheard": unheard("broken"),
    "sockets are broken": unheard("broken", away="planner"),
    "a process has ended, unanswered": unheard("exit", away="transition"),
    "holding": answering(Phase.HOLD),
    "completing the step": answering(Phase.CONFIGURE_INTERRUPTED),
    "a process starts again": answering(Phase.PREPARE),
    "joined by a newcomer": answering(Phase.CONFIGURE_TARGET),
    "draining": moving(Phase.DRAIN),
    "releasing": moving(Phase.RELEASE),
    "joining as fewer": moving(Phase.CONFIGURE_TARGET),
    "stopping": stopping,
    "stopped": stopped,
    "resuming": resuming,
    "pausing": pausing,
    "queued": queued,
}

# ---- requests


async def stop(course: Course) -> None:
    course.send(TaskStopRequested, task=TASK)


async def discard(course: Course) -> None:
    course.send(TaskStopRequested, task=TASK, lose_steps=True)


async def kill(course: Course) -> None:
    course.send(TaskStopRequested, task=TASK, lose_steps=True, at_once=True)


async def fewer(course: Course) -> None:
    course.send(TaskChanged, task=TASK, weight=1.0, min_workers=1, max_workers=2)


def drain(course: Course, nodes: tuple[str, ...] = ("n1",)) -> None:
    for node in nodes:
        course.send(NodeDraining, node=node, by="user", timeout_s=60.0)
        course.send(NodeDraining, node=node, by="user", timeout_s=0.0, save=True)


async def drain_one(course: Course) -> None:
    course.send(NodeDraining, node="n1", by="user", timeout_s=60.0)


async def drain_all(course: Course) -> None:
    drain(course, ("n0", "n1", "n2"))
    await asyncio.sleep(8.0)
    for node in ("n0", "n1", "n2"):
        course.send(NodeReturned, node=node, incarnation=course.cluster.agents[node].node.incarnation)


async def stop_and_resume(course: Course) -> None:
    before = len(course.stops())
    await stop(course)
    await course.bring_back()
    await course.until(lambda: len(course.stops()) > before or not course.planner().state.tasks.get(TASK))
    course.resume()


async def delete(course: Course) -> None:
    if course.stops():
        course.send(TaskDeleted, task=TASK)


async def another_fault(course: Course) -> None:
    course.lose_one()


REQUESTS: dict[str, Callable[[Course], Awaitable[None]]] = {
    "stop": stop,
    "stop, also unsaved": discard,
    "kill": kill,
    "fewer workers": fewer,
    "drain a node": drain_one,
    "drain all nodes and return them": drain_all,
    "stop and resume": stop_and_resume,
    "delete": delete,
    "another fault": another_fault,
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "request_",
    [pytest.param(name, marks=[] if name in ("stop", "stop and resume") else pytest.mark.slow) for name in REQUESTS],
)
def test_no_request_loses_a_step_while_a_replica_is_left(request_: str, state: str) -> None:
    async def course() -> Course:
        found = Course(state, request_)
        assert await found.run() == ""
        return found

    found = run(course())
    assert found.done
    stops, newest = found.stops(), found.cluster.newest.get(TASK, 0)
    again = found.cluster.again.get(TASK, 0)
    if request_ == "kill":
        assert stops
        return
    assert again == 0, f"{again} steps were lost"
    assert found.crossed() == []
    if stops:
        assert stops[-1].step <= newest
    if request_.startswith("stop") and not request_.endswith("resume"):
        assert [(event.step, event.path != "") for event in stops[-1:]] == [(newest, newest > 0)]
    elif state not in ("pausing", "queued") and (state[:4] != "stop" or request_ == "stop and resume"):
        assert newest > found.step_at_request, "it trains on"


async def released(course: Course) -> None:
    """Have n1 drained while the planner, which answers what the log gets before, is away until n1 is released."""
    await training(course)
    await drain_one(course)
    await course.until(lambda: course.in_phase(Phase.DRAIN))
    course.kill("planner")


@pytest.mark.parametrize("others", [("n2",), ("n0",), ("n0", "n2")])
@pytest.mark.parametrize("away_s", [0.2, 1.0], ids=["released", "as fewer"])
def test_a_drain_that_is_answered_before_the_release_of_another_is_known_is_no_fault(
    others: tuple[str, ...], away_s: float
) -> None:
    class Crossing(Course):
        async def course(self) -> None:
            await released(self)
            for node in others:
                self.send(NodeDraining, node=node, by="user", timeout_s=60.0)
            await asyncio.sleep(away_s)
            self.step_at_request = self.cluster.newest[TASK]
            self._start("planner")
            self.done = True

    async def course() -> Crossing:
        found = Crossing("a drain", "drain further nodes")
        assert await found.run() == ""
        return found

    found = run(course())
    recorded = [record.event for record in found.log.records]
    moved = [event.phase for event in recorded if isinstance(event, StateMoved)]
    assert "released" in moved[: moved.index("held")], "the plans have not crossed"
    assert found.crossed() == []
    assert [event for event in recorded if isinstance(event, ErrorDetected)] == []
    assert found.cluster.again == {TASK: 0}
    assert found.cluster.newest[TASK] > found.step_at_request or len(others) == 2
