"""What heartbeats tell now: step, loss and phase of every worker. In memory only; nothing is decided by it."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import ValidationError

from services.api.views import SHORTEST_STEP_S
from shared.signals import Heartbeat, WorkerStatus

logger = logging.getLogger(__name__)

RECENT_STEPS = 10
"""Steps whose median duration is the task's present step time: enough that one slow step does not show as a trend."""


@dataclass
class LiveTask:
    """A task's newest generation as its workers report it."""

    generation: int = -1
    step: int = 0
    loss: float | None = None
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    @property
    def step_s(self) -> float:
        """Median duration of recent steps; 0 when none was timed yet."""
        return statistics.median(duration for _, duration in self.steps) if self.steps else 0.0


class Live:
    """Latest heartbeat of each node."""

    def __init__(self) -> None:
        self._heartbeats: dict[str, Heartbeat] = {}
        self._tasks: dict[str, LiveTask] = {}

    async def hear(self, _subject: str, data: bytes) -> None:
        """Take in a heartbeat from the bus; what is not one is dropped with a warning."""
        try:
            self.add(Heartbeat.model_validate_json(data))
        except ValidationError as err:
            logger.warning("not a heartbeat: %s", err)

    def add(self, heartbeat: Heartbeat) -> None:
        """Take in a heartbeat; one that was overtaken by a later one of the same agent is dropped."""
        known = self._heartbeats.get(heartbeat.node)
        if known is not None and known.incarnation == heartbeat.incarnation and known.sequence >= heartbeat.sequence:
            return
        self._heartbeats[heartbeat.node] = heartbeat
        for status in heartbeat.workers:
            self._add_status(status)

    def _add_status(self, status: WorkerStatus) -> None:
        if status.task is None or status.generation is None:
            return
        task = self._tasks.setdefault(status.task, LiveTask())
        if status.generation < task.generation:
            return
        if status.generation > task.generation:
            self._tasks[status.task] = task = LiveTask(status.generation)
        if status.step > task.step:
            task.step = status.step
        if status.loss is not None:
            task.loss = status.loss
        if (
            status.step_s
            and status.step_s >= SHORTEST_STEP_S
            and all(count != status.steps_timed for count, _ in task.steps)
        ):
            task.steps.append(
                (status.steps_timed, status.step_s)
            )  # once for each step: ranks of one task take the same time for it

    def forget(self, task: str) -> None:
        """Drop a task's history (it was submitted again)."""
        self._tasks.pop(task, None)

    def task(self, name: str, generation: int) -> LiveTask | None:
        """Return what is known of a task, if it is of this generation or a newer one."""
        task = self._tasks.get(name)
        return task if task is not None and task.generation >= generation else None

    def worker(self, worker: str) -> WorkerStatus | None:
        """Return a worker's status in its node's latest heartbeat."""
        heartbeat = self._heartbeats.get(worker.partition("/")[0])
        if heartbeat is None:
            return None
        return next((status for status in heartbeat.workers if status.worker == worker), None)

    def last_heartbeat_at(self, node: str) -> datetime | None:
        """Return when the node's latest heartbeat was sent, by its own clock."""
        heartbeat = self._heartbeats.get(node)
        return heartbeat.sent_at.astimezone(UTC) if heartbeat else None
