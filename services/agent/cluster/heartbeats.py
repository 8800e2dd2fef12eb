"""The node's heartbeats: the state of its workers, published at an interval and after every change of occupation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence, Set

from services.agent.machine.address import NodeAddress
from services.agent.machine.device_watch import DeviceWatch
from services.agent.machine.hardware import CPU
from services.agent.machine.proc import children_cpu_s, scheduled, usage
from services.agent.node.process import CHILDREN_AFTER_S, Process
from services.agent.node.slots import Node
from shared.bus.connection import Bus
from shared.clock import SteadyClock
from shared.errors import Unavailable
from shared.messages.signals import HEARTBEATS, DeviceReading, DeviceStatus, Heartbeat, KeptCopies, WorkerStatus
from shared.settings.model import Settings

CHANGES_FRACTION = 0.1
"""Least pause after a heartbeat, as a part of the interval. The ranks of a node change one after the other within
milliseconds, at every command; in a cluster of thousands of nodes, where the interval is long, a heartbeat for each
change would be most of what the detector reads in a recovery."""

PAUSE_S = 0.1
"""A heartbeat that is late by more than this shows that the agent itself did not run. The ranks are not charged with
that time."""


class Heartbeats:
    """Publishes the node's heartbeats.

    Args:
        bus: the connection to publish on.
        node: the node whose workers are reported.
        address: the node's address.
        settings: ``heartbeat_interval_s``, ``domain``.
        agent_pid: reported in every heartbeat.
        clock: the agent's clock.
        counters: reported in every heartbeat.
        supervisor: id of the agent's supervisor, reported in every heartbeat.

    Attributes:
        hardware: kind of the node's workers.
        probe: where the agent answers probes; empty before it listens.
        devices: returns the devices of which there is something to say.
        device_readings: returns what there is of all devices, once after each look at them.
        busy_workers: returns the workers whose device computes.
        copies: returns the bytes of copies in memory that the node keeps for each task without a process here.
        sequence: number of the newest heartbeat; 0: none yet.
        published_at_s: when it was published, by the agent's monotonic clock.
    """

    def __init__(
        self,
        bus: Bus,
        node: Node,
        address: NodeAddress,
        settings: Settings,
        agent_pid: int,
        clock: SteadyClock,
        counters: Mapping[str, int],
        supervisor: str,
    ) -> None:
        self._bus, self._node, self._address, self._settings, self._clock = bus, node, address, settings, clock
        self._agent_pid, self._counters, self._supervisor = agent_pid, counters, supervisor
        self.hardware = CPU
        self.probe = ""
        self.devices: Callable[[], list[DeviceStatus]] = list
        self.device_readings: Callable[[], list[DeviceReading]] = list
        self.busy_workers: Callable[[], Set[str]] = frozenset
        self.copies: Callable[[], dict[str, int]] = dict
        self.sequence = 0
        self.published_at_s: float | None = None
        self._due = asyncio.Event()
        self._published: list[tuple[object, ...]] = []

    def of_devices(self, kind: str, watch: DeviceWatch) -> None:
        """Report what the node's workers are, and how their devices are."""
        self.hardware, self.devices, self.device_readings = kind, watch.statuses, watch.new_readings
        self.busy_workers = watch.busy_workers

    def note_change(self) -> None:
        """Have a heartbeat published soon if the occupation of a slot differs from the last heartbeat's."""
        workers = self._node.status(at_s=0.0, process_states={}, schedules={})
        if occupation(workers) != self._published:
            self._due.set()

    def request(self) -> None:
        """Have a heartbeat published soon: at once, or when the pause after the last one is over."""
        self._due.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        interval_s = self._settings.heartbeat_interval_s
        pause_s = CHANGES_FRACTION * interval_s
        last_s = self._clock.seconds()
        while True:
            now_s = self._clock.seconds()
            if (late_s := now_s - last_s - interval_s) > PAUSE_S:
                self._node.paused(late_s)
                await asyncio.sleep(0)  # messages that ranks sent meanwhile are read before
            last_s = now_s
            with contextlib.suppress(Unavailable):
                await self._publish()
            await asyncio.sleep(pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s - pause_s):
                    await self._due.wait()

    async def _publish(self) -> None:
        self._due.clear()
        workers = self._workers()
        self._published = occupation(workers)
        for process in self._node.processes():
            process.gaps_s.clear()  # each gap is reported once only
        self.sequence += 1
        heartbeat = Heartbeat(
            node=self._node.name,
            incarnation=self._node.incarnation,
            agent_pid=self._agent_pid,
            sequence=self.sequence,
            sent_at=self._clock.now(),
            interval_s=self._settings.heartbeat_interval_s,
            domain=self._settings.domain,
            hardware=self.hardware,
            addresses=self._address.by_setting,
            network=self._address.network,
            probe=self.probe,
            supervisor=self._supervisor,
            workers=workers,
            counters=dict(self._counters),
            devices=self.devices(),
            device_readings=self.device_readings(),
            copies=[KeptCopies(task=task, size_bytes=size) for task, size in sorted(self.copies().items())],
        )
        await self._bus.publish(HEARTBEATS, heartbeat, self._node.name)
        self.published_at_s = self._clock.seconds()

    def _workers(self) -> list[WorkerStatus]:
        """Return the status of every worker, with what the kernel reports about its process."""
        now_s, busy = self._clock.seconds(), self.busy_workers()
        processes = [process for process in self._node.processes() if process.pid is not None]
        used = {process.pid or 0: found for process in processes if (found := usage(process.pid or 0)) is not None}
        for process in processes:
            if (found := used.get(process.pid or 0)) is not None:
                cpu_s = found.cpu_s + _children_cpu_s(process, now_s)
                process.note_work(now_s, cpu_s, device_busy=process.worker in busy)
        states = {pid: found.state for pid, found in used.items()}
        schedules = {pid: schedule for pid in used if (schedule := scheduled(pid)) is not None}
        return self._node.status(at_s=self._clock.seconds(), process_states=states, schedules=schedules)


def _children_cpu_s(process: Process, now_s: float) -> float:
    """Return the processor time of a process's children, if the process has made no progress for a while."""
    since_s = process.progress_at_s
    return children_cpu_s(process.pid or 0) if since_s is not None and now_s - since_s > CHILDREN_AFTER_S else 0.0


def occupation(workers: Sequence[WorkerStatus]) -> list[tuple[object, ...]]:
    """Return the part of the workers' status whose change makes a heartbeat due: the occupant of each slot."""
    return [(w.worker, w.state, w.task, w.generation, w.rank, w.pid) for w in workers]
