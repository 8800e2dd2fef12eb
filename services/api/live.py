"""Live state: step, loss and phase of every worker, from the newest heartbeats.

``Live`` is kept in memory by the gateway's process and never stored; no decision depends on it. It belongs to the event
loop. Requests read a ``LiveState``, which does not change (``services/api/gateway.py`` has the rule).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from shared.bus.connection import Bus
from shared.bus.newest import Newest
from shared.messages.reachability import STALE_S, Reachability
from shared.messages.signals import HEARTBEATS, DeviceReading, Heartbeat, WorkerStatus
from shared.model import utc_now
from shared.views.documents import SHORTEST_STEP_S

RECENT_STEPS = 10
"""Steps whose median duration is the task's present step time: enough that one slow step does not show as a trend."""


UNWATCHED_PER_S = 250
"""Heartbeats that are read in a second while nobody looks at the live state: those of 1,000 nodes within 4 s. The nodes
send a few times as many, and no decision depends on them here."""

WATCHED_S = 10.0
"""For how long after somebody has looked all heartbeats are read as they come: the page and ``unicron top`` look more
often."""

SLICE = 25
"""Heartbeats that are read in succession, within a few milliseconds. Requests then have a turn."""

_WITH_READINGS = b'"device_readings":[{'
"""What the text of a heartbeat has that says how devices are. The heartbeat after it does not repeat that."""


@dataclass(frozen=True)
class LiveTask:
    """A task's newest generation as its workers report it.

    ``steps``: the most recently timed steps, each as the worker's count of timed steps and the duration in seconds.
    """

    generation: int = -1
    step: int = 0
    loss: float | None = None
    steps: tuple[tuple[int, float], ...] = ()

    @property
    def step_s(self) -> float:
        """Median duration of recent steps in seconds; 0 when none was timed yet."""
        return statistics.median(duration for _, duration in self.steps) if self.steps else 0.0

    def with_status(self, status: WorkerStatus) -> LiveTask:
        """Return the task after a report of one of its workers, of the same generation."""
        return replace(
            self,
            step=max(self.step, status.step),
            loss=self.loss if status.loss is None else status.loss,
            steps=self._with_step(status.steps_timed, status.step_s),
        )

    def _with_step(self, count: int, duration_s: float | None) -> tuple[tuple[int, float], ...]:
        """Return the recent steps with one more; a step that another rank has reported already is not added again."""
        if duration_s is None or duration_s < SHORTEST_STEP_S or any(known == count for known, _ in self.steps):
            return self.steps
        return (*self.steps, (count, duration_s))[-RECENT_STEPS:]


@dataclass(frozen=True)
class LiveState:
    """What the heartbeats reported up to one moment: the newest one of each node, and each task. Never changed.

    ``reachability``: which nodes the detector does not hear. ``heard_at``: when each newest heartbeat arrived.
    ``device_readings``: the newest of each node that has devices. ``copies``: task -> node -> bytes of copies in memory
    that the node keeps for it without a process there.
    """

    heartbeats: Mapping[str, Heartbeat] = field(default_factory=dict)
    tasks: Mapping[str, LiveTask] = field(default_factory=dict)
    reachability: Reachability = field(default_factory=Reachability)
    heard_at: Mapping[str, datetime] = field(default_factory=dict)
    device_readings: Mapping[str, list[DeviceReading]] = field(default_factory=dict)
    copies: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def task(self, name: str, generation: int) -> LiveTask | None:
        """Return a task as its workers report it, or None if the reports are of an older generation."""
        task = self.tasks.get(name)
        return task if task is not None and task.generation >= generation else None

    def worker(self, worker: str) -> WorkerStatus | None:
        """Return a worker's status in its node's newest heartbeat."""
        heartbeat = self.heartbeats.get(worker.partition("/")[0])
        if heartbeat is None:
            return None
        return heartbeat.statuses.get(worker)

    def counters(self) -> dict[str, int]:
        """Return the agents' counters by name, summed over their newest heartbeats."""
        return dict(sum((Counter(h.counters) for h in self.heartbeats.values()), Counter()))

    def last_heartbeat_at(self, node: str) -> datetime | None:
        """Return when the node's newest heartbeat arrived: the node's own clock may be wrong."""
        return self.heard_at.get(node)


class Live:
    """Collects heartbeats. Only the event loop may call its methods."""

    def __init__(self) -> None:
        self._heartbeats: dict[str, Heartbeat] = {}
        self._heard_at: dict[str, datetime] = {}
        self._tasks: dict[str, LiveTask] = {}
        self._device_readings: dict[str, list[DeviceReading]] = {}
        self._reachability, self._reachability_at_s = Reachability(), 0.0
        self._looked_at_s = 0.0

    async def keep_hearing(self, bus: Bus) -> None:
        """Take in the heartbeats on the bus until cancelled, the newest of each node; slowly while nobody looks."""
        waiting = Newest(HEARTBEATS, bus.dropped, utc_now)
        read = HEARTBEATS.receiver(self.hear, lambda _: None, bus.dropped)

        async def put(subject: str, data: bytes) -> None:
            await (read if _WITH_READINGS in data else waiting.put)(subject, data)

        await bus.listen(HEARTBEATS.subject, put)
        while True:
            await waiting.wait(WATCHED_S)
            for heartbeat, _ in waiting.take(SLICE):
                self.add(heartbeat)
            watched = time.monotonic() - self._looked_at_s < WATCHED_S
            await asyncio.sleep(0.0 if watched else SLICE / UNWATCHED_PER_S)

    async def hear_detector(self, reachability: Reachability) -> None:
        """Take in which nodes the detector does not hear."""
        self._reachability, self._reachability_at_s = reachability, time.monotonic()

    async def hear(self, heartbeat: Heartbeat) -> None:
        """Take in a heartbeat from the bus."""
        self.add(heartbeat)

    def add(self, heartbeat: Heartbeat) -> None:
        """Take in a heartbeat; one that arrives after a later one of the same agent is dropped."""
        known = self._heartbeats.get(heartbeat.node)
        if known is not None and known.incarnation == heartbeat.incarnation and known.sequence >= heartbeat.sequence:
            return
        if known is not None and known.incarnation != heartbeat.incarnation:
            self._device_readings.pop(heartbeat.node, None)  # another agent may have other devices, or none
        if heartbeat.device_readings:
            self._device_readings[heartbeat.node] = heartbeat.device_readings
        self._heartbeats[heartbeat.node], self._heard_at[heartbeat.node] = heartbeat, utc_now()
        for status in heartbeat.workers:
            self._add_status(status)

    def _add_status(self, status: WorkerStatus) -> None:
        if status.task is None or status.generation is None:
            return
        task = self._tasks.get(status.task, LiveTask())
        if status.generation < task.generation:
            return
        if status.generation > task.generation:
            task = LiveTask(status.generation)
        self._tasks[status.task] = task.with_status(status)

    def forget(self, task: str) -> None:
        """Drop the reports on a task, because it was submitted again."""
        self._tasks.pop(task, None)

    def state(self, *, watched: bool = True) -> LiveState:
        """Return the state of this moment. ``watched``: somebody looks at it; it is no regular probe."""
        if watched:
            self._looked_at_s = time.monotonic()
        stale = time.monotonic() - self._reachability_at_s > STALE_S
        reachability = Reachability() if stale else self._reachability
        return LiveState(
            dict(self._heartbeats),
            dict(self._tasks),
            reachability,
            dict(self._heard_at),
            dict(self._device_readings),
            self._copies(),
        )

    def _copies(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for heartbeat in self._heartbeats.values():
            for kept in heartbeat.copies:
                found.setdefault(kept.task, {})[heartbeat.node] = kept.size_bytes
        return found
