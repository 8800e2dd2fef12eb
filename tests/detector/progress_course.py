"""The training of one task in simulated time, and what the detector records of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from services.detector.decisions import status_events
from services.detector.progress import recording
from shared.events.union import TaskProgressed
from tests.detector.kit import START, Cluster

INTERVAL_S = 5.0
"""The default of ``progress_interval_s``."""


@dataclass(frozen=True)
class Course:
    """Steps of a task. ``noise``: relative deviation of a step's time. ``changes``: (part of the steps, factor)."""

    seed: int
    step_s: float
    noise: float
    steps: int
    changes: Sequence[tuple[float, float]] = ()

    def durations_s(self) -> list[float]:
        drawn = random.Random(self.seed)
        found = []
        for number in range(self.steps):
            factor = 1.0
            for part, times in self.changes:
                if number >= part * self.steps:
                    factor *= times
            found.append(self.step_s * factor * drawn.lognormvariate(0.0, self.noise))
        return found


def summaries(course: Course, *, every_step: bool = False) -> list[TaskProgressed]:
    """Return the events of a course, with one heartbeat a step."""
    cluster = Cluster()
    task = cluster.monitor.state.tasks["gpt"]
    now, events = START, []
    for number, duration_s in enumerate(course.durations_s(), start=1):
        now += timedelta(seconds=duration_s)
        task.step, task.timed = number, number
        task.durations_s.append(duration_s)
        if every_step and number > 1:
            events.append(status_events.task_progressed(task, None, now))
        elif not every_step and recording.is_due(task, number, INTERVAL_S, now):
            event = status_events.task_progressed(task, None, now)
            cluster.monitor.fold(event)
            events.append(event)
    return events
