"""The phases that a run reports are those of the transition service's core, in an order that it allows."""

from __future__ import annotations

from typing import Any

import pytest

from services.transition.phases import AFTER
from shared.events.plans import TaskChange
from simulator.run.phases import moved_phases
from tests.transition.drive import THREE, TWO, Drive, change, restart_change, stage

CHANGES: dict[str, tuple[TaskChange, list[str]]] = {
    "a replica is killed, no spare": (
        change(survivors=TWO, failed=["n2/0"], hold=True, interrupted=stage(2, TWO, interrupted=True), action="none"),
        TWO,
    ),
    "restart": (restart_change(), TWO),
    "retry": (
        change(survivors=THREE, hold=True, interrupted=stage(2, THREE, interrupted=True), action="none"),
        THREE,
    ),
    "grow": (change(survivors=TWO, prepare=["n2/0"], target=stage(2, THREE, take=["n2/0"])), TWO),
    "shrink": (change(survivors=THREE, release=["n2/0"], target=stage(2, TWO)), THREE),
    "shrink after a fault": (
        change(
            survivors=TWO,
            failed=["n2/0"],
            hold=True,
            interrupted=stage(2, TWO, interrupted=True),
            release=["n1/0"],
            target=stage(3, ["n0/0"]),
        ),
        TWO,
    ),
    "pause": (change(action="pause", survivors=THREE, release=THREE), THREE),
    "pause after a fault": (
        change(
            action="pause",
            survivors=TWO,
            failed=["n2/0"],
            hold=True,
            interrupted=stage(2, TWO, interrupted=True),
            release=TWO,
        ),
        TWO,
    ),
    "pause without anything to save": (change(action="pause", failed=["n2/0"], hold=True), []),
    "start from nothing": (change(prepare=THREE, target=stage(2, THREE, "initial")), []),
    "restore after a fault": (
        change(failed=["n2/0"], hold=True, prepare=THREE, target=stage(2, THREE, "checkpoint")),
        [],
    ),
    "end": (change(action="end", release=THREE), THREE),
}


@pytest.mark.parametrize("name", CHANGES)
def test_as_the_transition_service(name: str) -> None:
    planned, occupied = CHANGES[name]
    drive = Drive()
    if occupied:  # bring its processes up first
        begin = change(prepare=occupied, target=stage(1, occupied, "initial"))
        drive.plan("p0", begin)
        drive.answer_all()
        drive.moved.clear()
    drive.plan("p1", planned)
    while drive.waiting or drive.timers:
        drive.answer_all()
        if planned.action == "pause" and drive.timers:
            drive.stopped("a", 7)
            drive.timers.clear()
    there = [(event.phase, event.generation, event.complete) for event in drive.moved]
    found = moved_phases("p1", planned, occupied)
    here: list[Any] = [(each.name, each.generation, each is found[-1]) for each in found]
    # Phases that no arrow connects may end in either order.
    assert sorted(here) == sorted(there)
    assert here[-1] == there[-1]
    ended = [each.phase for each in found]
    assert all(not AFTER[phase] & set(ended[at:]) for at, phase in enumerate(ended))
