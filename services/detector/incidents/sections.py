"""A boundary section that only some ranks come to. Pure.

All ranks have to enter a section (``unicron.training.boundary``); those that have wait there for the others. Each rank
reports how many sections it has entered behind its newest step. A rank that has gone on behind the step with fewer than
another one has entered does not come any more, however long anybody waits: this follows from the order in which each
rank does things, and no fault of a rank, node or link looks like it. A new generation would come to the same section in
the same way. So it is no incident that is healed: the script is wrong, and the task ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from services.detector.incidents.faults import SERVICE
from services.detector.state.cluster import DetectorState
from services.detector.state.task import MonitoredTask
from shared.events.union import TaskFailed, derived_id
from shared.messages.signals import WorkerStatus

GONE_ON = {
    "begun": "in step {next}",
    "compute": "in step {next}",
    "reduce": "in step.reduce() of step {next}",
    "update": "behind step.reduce() of step {next}",
    "checkpoint": "behind it, in a checkpoint or at the end of the loop",
    "tail": "behind the loop",
}
"""Phases of a rank that has left the boundary behind its newest step -> where that is, in words."""

MOST_RANKS = 8
"""Ranks that a reason names at one place."""


def entered_alone(state: DetectorState, task: MonitoredTask, now: datetime) -> TaskFailed | None:
    """Return the end of a task in which ranks have gone on without a section that others are in; None: there are none.

    Args:
        state: the detector's.
        task: that trains.
        now: the time.
    """
    own = {w: s for w, s in state.statuses(task).items() if (s.task, s.generation) == (task.name, task.generation)}
    inside = {w: s for w, s in own.items() if s.phase == "aside" and s.sections}
    for status in inside.values():
        step, count = status.step, status.sections or 0
        gone_on = {
            w: s
            for w, s in own.items()
            if s.step == step and s.phase in GONE_ON and s.sections is not None and s.sections < count
        }
        if gone_on:
            here = [w for w, s in inside.items() if (s.step, s.sections) == (step, count)]
            return _failed(task, status, here, gone_on, now)
    return None


def _failed(
    task: MonitoredTask, status: WorkerStatus, here: list[str], gone_on: Mapping[str, WorkerStatus], now: datetime
) -> TaskFailed:
    places: dict[str, list[str]] = {}
    for worker, other in gone_on.items():
        places.setdefault(GONE_ON[other.phase or ""].format(next=status.step + 1), []).append(worker)
    elsewhere = "; ".join(f"{_ranks(task, workers)} {_is(workers)} {place}" for place, workers in places.items())
    script = f" ({status.section})" if status.section else ""
    return TaskFailed(
        event_id=derived_id(f"{task.name}/{task.generation}", SERVICE, "section entered alone"),
        occurred_at=now,
        task=task.name,
        generation=task.generation,
        step=status.step,
        reason=f"WrongLoop: {_ranks(task, here)} {_is(here)} in run.boundary() behind step {status.step}{script}, "
        f"which other ranks have not entered: {elsewhere}. All ranks have to enter a boundary section: put `if rank == "
        "0` inside the block, not around it, and let whether a step has one follow from step.number alone",
    )


def _is(workers: list[str]) -> str:
    return "is" if len(workers) == 1 else "are"


def _ranks(task: MonitoredTask, workers: list[str]) -> str:
    """Return which ranks these are, in words."""
    ranks = sorted(task.members[worker].rank for worker in workers)
    shown = ", ".join(str(rank) for rank in ranks[:MOST_RANKS])
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
