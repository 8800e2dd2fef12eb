"""The agent's watch over the devices of its node: NVML's events, and its counters at an interval.

A thread waits for events, so that a fault is reported within milliseconds and nothing is polled for it. The thread
hands over what it finds to the event loop, which counts, logs and signals it (``DeviceFailed``); the detector decides.
A node without a driver, or whose workers use no devices, has nothing to watch, and says so once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable

from services.agent.machine import nvml
from services.agent.machine.device_health import DeviceHealth, lasting_faults
from services.agent.machine.hardware import NodeHardware
from services.agent.machine.nvml import Device, DeviceEvent, Driver, Reading
from shared.clock import SteadyClock
from shared.errors import InvalidInput
from shared.events.device_faults import device_fault, of_xid
from shared.events.severities import Severity
from shared.events.union import derived_id
from shared.messages.signals import DeviceFailed, DeviceReading, DeviceStatus, Signal

logger = logging.getLogger(__name__)

READ_INTERVAL_S = 5.0
"""Interval of the readings. Faults come as events; what only counters say (a row that could not be remapped, heat, a
device that is gone without an Xid) lasts, and nobody acts on it within seconds. A reading takes some milliseconds of
the driver for each device."""

WAIT_MS = 250
"""The longest wait of the thread for an event before it looks whether it is to end. An event ends the wait."""

REPEAT_S = 1.0
"""A fault that comes again on the same device within this time is counted, and not signalled: a faulty kernel makes
thousands of Xids a second, which would keep back the agent's other signals."""

BUSY_PERCENT = 50
"""Part of the time in which a kernel has to run for a device to count as at work."""

STOP_S = 5.0
"""How long the agent waits for the end of the thread; a call of a driver that hangs is left alone."""


class DeviceWatch:
    """Watches the devices of a node: those that its workers may use, and no other of the machine.

    Args:
        node: the node's name.
        incarnation: of the agent.
        found: the node's workers and their devices.
        put: takes signals to send.
        clock: the agent's.
        read_interval_s: seconds between two readings.
    """

    def __init__(
        self,
        node: str,
        incarnation: str,
        found: NodeHardware,
        put: Callable[[list[Signal]], None],
        clock: SteadyClock,
        *,
        read_interval_s: float = READ_INTERVAL_S,
    ) -> None:
        self._node, self._incarnation, self._put, self._clock = node, incarnation, put, clock
        self._read_interval_s = read_interval_s
        self._entries, self._shown = found.entries, found.shown
        # An injected fault needs no driver: the k-th worker then stands for one with the k-th device.
        self._places: dict[str, tuple[int, int | None]] = {
            worker: (slot, None) for slot, worker in enumerate(found.workers)
        }
        self.devices: list[Device] = []
        self.health: dict[int, DeviceHealth] = {}
        self.faults: Counter[tuple[int, str]] = Counter()
        """(device, fault) -> how often the fault has come."""
        self._signalled_at_s: dict[tuple[int, str], float] = {}
        self._signals = 0
        self._unpublished = False
        """Whether devices were read since the last call of ``new_readings``."""
        self._driver: Driver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    # ---- life

    async def start(self) -> None:
        """Connect to the driver, report the faults that there are already, and watch from then on."""
        self._loop = asyncio.get_running_loop()
        if not self._entries:
            logger.info("no devices are watched: the workers have none")
            return
        self._driver, problem = await asyncio.to_thread(nvml.connect)
        if self._driver is None:
            logger.warning("no devices are watched: the driver cannot be asked: %s", problem or "there is none")
            return
        reporting, readings = await asyncio.to_thread(self._look, self._driver)
        if not self.devices:
            logger.info("no devices are watched: the driver has none")
        elif not reporting:
            logger.warning("the driver reports no events: its counters are read every %g s", self._read_interval_s)
        for device, reading in readings:
            self._take_reading(device, reading)
        self._thread = threading.Thread(target=self._watch, args=(self._driver, bool(reporting)), daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the watch."""
        self._stopping.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_S)

    # ---- what others ask for

    def statuses(self) -> list[DeviceStatus]:
        """Return what heartbeats say: the devices with something to say."""
        faults: dict[int, dict[str, int]] = {}
        for (device, fault), count in self.faults.items():
            faults.setdefault(device, {})[fault] = count
        notes = {device: found for device, health in self.health.items() if (found := health.notes())}
        return [
            DeviceStatus(
                device=device, uuid=self._uuid(device), notes=notes.get(device, []), faults=faults.get(device, {})
            )
            for device in sorted({*faults, *notes})
        ]

    def busy_workers(self) -> set[str]:
        """Return the workers whose device computed for most of the time before the newest look at it."""
        used = {index: health.reading.utilisation_percent or 0 for index, health in self.health.items()}
        return {worker for index in used if used[index] >= BUSY_PERCENT for worker in self.workers_of(index)}

    def new_readings(self) -> list[DeviceReading]:
        """Return what heartbeats say of all devices, once after each look at them; empty until the next one."""
        if not self._unpublished or self._driver is None:
            return []
        self._unpublished = False
        return [self._reading(device, self._driver.version) for device in self.devices]

    def _reading(self, device: Device, driver: str) -> DeviceReading:
        now = self._health(device.index).reading
        return DeviceReading(
            device=device.index,
            uuid=device.uuid,
            name=device.name,
            workers=self.workers_of(device.index),
            memory_bytes=device.memory_bytes,
            driver=driver,
            temperature_c=now.temperature_c,
            utilisation_percent=now.utilisation_percent,
            memory_used_bytes=now.memory_used_bytes,
        )

    async def problem(self) -> str:
        """Return which device cannot be used, as it is now; empty if all can. For the node's self-test."""
        if self._driver is None:
            return ""
        for device in self.devices:
            reading = await asyncio.to_thread(self._driver.read, device)
            for name in sorted(lasting_faults(reading)):
                fault = device_fault(name)
                if fault.severity is Severity.SEV1:
                    return f"device {device.index} ({device.name}): {fault.meaning}"
        return ""

    def inject(self, xid: int, device: int = 0) -> None:
        """Report an Xid as if the driver had, on the event loop. A driver is not needed.

        Raises:
            InvalidInput: the node has no such device.
        """
        known = {found.index for found in self.devices} or {index for index, _ in self._places.values()}
        if device not in known:
            problem = f"one of {', '.join(map(str, sorted(known)))} is allowed"
            raise InvalidInput.of(
                "device", device, problem, f"device {device}: node {self._node} has no such device; {problem}"
            )
        self._report(device, of_xid(xid), injected=True)

    # ---- in the thread

    def _look(self, driver: Driver) -> tuple[int, list[tuple[int, Reading]]]:
        """Find the devices and their workers; return how many devices report events, and the first readings."""
        there = driver.devices()
        mine = {place[0] for entry in self._entries if (place := driver.place(entry, there)) is not None}
        self.devices = [device for device in there if device.index in mine]
        found = {worker: driver.place(shown, there) for worker, shown in self._shown.items()}
        self._places = {worker: place for worker, place in found.items() if place is not None}
        return driver.listen(self.devices), [(device.index, driver.read(device)) for device in self.devices]

    def _watch(self, driver: Driver, reporting: bool) -> None:
        """Wait for events, and read counters when a reading is due, until the end."""
        read_at_s, listened_at_s = self._clock.seconds(), -self._read_interval_s
        while not self._stopping.is_set():
            happened = False
            if reporting:
                try:
                    happened = self._take_event(driver.wait(WAIT_MS))
                except OSError as err:
                    # A device that is lost makes the wait fail; its reading says which one it is. The others are
                    # listened to again, at once the first time: then at the interval, should the wait fail again.
                    logger.warning("the driver cannot wait for events: %s", err)
                    again = self._clock.seconds() - listened_at_s >= self._read_interval_s
                    reporting, happened = again and bool(driver.listen(self.devices)), True
                    listened_at_s = self._clock.seconds()
            else:
                self._stopping.wait(WAIT_MS / 1000)
            overdue = self._clock.seconds() - read_at_s >= self._read_interval_s
            if overdue:
                read_at_s = self._clock.seconds()
                reporting = reporting or bool(driver.listen(self.devices))
            if happened or overdue:
                for device in self.devices:
                    self._hand_over(self._take_reading, device.index, driver.read(device))
        driver.close()

    def _take_event(self, event: DeviceEvent | None) -> bool:
        """Hand over an event; return whether the counters are to be read because of it."""
        if event is None:
            return False
        if event.xid is not None and event.device is not None:
            self._hand_over(self._take_xid, event)
        elif event.xid is not None:
            logger.warning("Xid %d of a device that the driver does not list", event.xid)
        return True

    def _hand_over(self, take: Callable[..., None], *arguments: object) -> None:
        """Have the event loop take something; an event loop that has ended takes nothing any more."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(take, *arguments)
        except RuntimeError:
            self._stopping.set()

    # ---- on the event loop

    def _take_xid(self, event: DeviceEvent) -> None:
        assert event.device is not None
        assert event.xid is not None
        self._health(event.device).note_xid(event.xid, self._clock.seconds())
        self._report(event.device, of_xid(event.xid), instance=event.instance)

    def _take_reading(self, device: int, reading: Reading) -> None:
        self._unpublished = True
        for fault in self._health(device).take(reading, self._clock.seconds()):
            self._report(device, fault)

    def _report(self, device: int, fault: str, *, instance: int | None = None, injected: bool = False) -> None:
        """Count, log and signal a fault."""
        key, now_s = (device, fault), self._clock.seconds()
        self.faults[key] += 1
        if now_s - self._signalled_at_s.get(key, -REPEAT_S) < REPEAT_S:
            return
        self._signalled_at_s[key] = now_s
        about = device_fault(fault)
        logger.warning("device %d: %s (%s)%s", device, fault, about.meaning, ", injected" if injected else "")
        self._signals += 1
        signal = DeviceFailed(
            signal_id=derived_id(self._incarnation, "device", self._signals),
            node=self._node,
            incarnation=self._incarnation,
            occurred_at=self._clock.now(),
            fault=fault,
            device=device,
            uuid=self._uuid(device),
            name=next((found.name for found in self.devices if found.index == device), ""),
            workers=self.workers_of(device, instance),
            readings=self._health(device).reading.numbers(),
            injected=injected,
        )
        self._put([signal])

    def workers_of(self, device: int, instance: int | None = None) -> list[str]:
        """Return the workers of a device, or those of a GPU instance of it (MIG) and of the whole device."""
        return sorted(
            worker
            for worker, (index, part) in self._places.items()
            if index == device and (instance is None or part is None or part == instance)
        )

    def _health(self, device: int) -> DeviceHealth:
        return self.health.setdefault(device, DeviceHealth())

    def _uuid(self, device: int) -> str:
        return next((found.uuid for found in self.devices if found.index == device), "")
