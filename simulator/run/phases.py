"""The phases of one task's part of a plan, as the transition service reports them (``services.transition``)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from services.transition.moved_events import MovedPhase, moved_phase
from services.transition.phases import generation_of, phases_with_work, stage_of
from services.transition.state import Part, Phase, State, Task
from shared.events.plans import TaskChange


class Moved(NamedTuple):
    """A phase that the log reports. ``trains``: the task trains from its stage on."""

    phase: Phase
    name: MovedPhase
    generation: int
    trains: bool


def moved_phases(plan: str, change: TaskChange, occupied: Collection[str]) -> list[Moved]:
    """Return the phases with an event in the log, in order; the last one completes the part.

    Args:
        plan: its name.
        change: what it does to the task.
        occupied: workers that may have a process of the task.
    """
    state = State(tasks={change.task: Task(occupied=set(occupied))})
    numbers = [stage.generation for stage in change.stages]
    part = Part(plan, None, change, max([change.from_generation, *numbers]))
    working = phases_with_work(state, part)
    found = []
    for phase in Phase:
        name = moved_phase(part, phase) if phase in working else None
        if name is not None:
            stage = stage_of(part, phase)
            generation = stage.generation if stage is not None else generation_of(part, phase)
            found.append(Moved(phase, name, generation, stage is not None and stage is change.stages[-1]))
    return found
