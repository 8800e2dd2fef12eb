"""What leaves the node on its own account: signals (repeated until answered, in order) and heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

from services.detector.changes import Changes
from services.detector.clock import SteadyClock
from services.detector.node import Node, workers_of
from services.detector.proc import process_state, scheduled
from shared.bus import Bus
from shared.errors import Unavailable
from shared.settings import Settings
from shared.signals import HEARTBEATS, SIGNALS, Heartbeat, Signal

ANSWER_TIMEOUT_S = 1.0
"""The detector answers after one append, about 5 ms; a lost request is repeated after this."""

RETRY_PAUSE_S = 0.1
"""Nobody listens while the detector restarts; it is asked again this often."""

MAX_WAITING_SIGNALS = 4096
"""Signals kept for a detector that does not answer; beyond it the oldest are dropped."""

PAUSE_S = 0.1
"""A heartbeat this much too late means the agent itself was not run; the time is not held against the ranks."""


class Signals:
    """The queue of signals to the detector."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: deque[Signal] = deque(maxlen=MAX_WAITING_SIGNALS)
        self._changes = Changes()

    def put(self, signals: Sequence[Signal]) -> None:
        """Send these after all earlier ones."""
        self._waiting.extend(signals)
        self._changes.notify()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._changes.until(lambda: bool(self._waiting))
            signal = self._waiting[0]
            try:
                await self._bus.request(SIGNALS, signal.model_dump_json().encode(), timeout_s=ANSWER_TIMEOUT_S)
            except Unavailable:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            if self._waiting and self._waiting[0] is signal:
                self._waiting.popleft()


class Heartbeats:
    """Publishes the state of the node's workers, at an interval and whenever who does what changes."""

    def __init__(self, bus: Bus, node: Node, settings: Settings, agent_pid: int, clock: SteadyClock) -> None:
        self._bus, self._node, self._settings, self._clock = bus, node, settings, clock
        self._agent_pid = agent_pid
        self.hardware = settings.hardware
        self._sequence = 0
        self._changed = asyncio.Event()
        self._last: tuple[object, ...] = ()

    def changed(self) -> None:
        """Look whether a heartbeat is due at once."""
        workers = self._node.status(at_s=0.0, process_states={}, schedules={})
        if workers_of(self._node.name, workers) != self._last:
            self._changed.set()

    def due(self) -> None:
        """Have a heartbeat sent at once."""
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        interval_s = self._settings.heartbeat_interval_s
        last_s = self._clock.seconds()
        while True:
            now_s = self._clock.seconds()
            if (late_s := now_s - last_s - interval_s) > PAUSE_S:
                self._node.paused(late_s)
                await asyncio.sleep(0)  # what ranks said meanwhile is read first
            last_s = now_s
            with contextlib.suppress(Unavailable):
                await self._publish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._changed.wait()

    async def _publish(self) -> None:
        self._changed.clear()
        pids = [process.pid for process in self._node.processes() if process.pid is not None]
        states = {pid: state for pid in pids if (state := process_state(pid)) is not None}
        schedules = {pid: found for pid in pids if (found := scheduled(pid)) is not None}
        workers = self._node.status(at_s=self._clock.seconds(), process_states=states, schedules=schedules)
        self._last = workers_of(self._node.name, workers)
        self._sequence += 1
        heartbeat = Heartbeat(
            node=self._node.name,
            incarnation=self._node.incarnation,
            agent_pid=self._agent_pid,
            sequence=self._sequence,
            sent_at=self._clock.now(),
            interval_s=self._settings.heartbeat_interval_s,
            domain=self._settings.domain,
            hardware=self.hardware,
            workers=workers,
        )
        await self._bus.publish(f"{HEARTBEATS}.{self._node.name}", heartbeat.model_dump_json().encode())
