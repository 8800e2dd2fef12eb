"""The hardware of a node: the kind of its workers, the device of each worker, and which devices a process may use.

A kind is the name of a profile of the throughput model (``shared/planning/performance``), found from the name that the
driver gives the device. The workers of a node are all of one kind: each has a device of its own, or none has one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.agent.machine import nvml
from services.agent.machine.nvml import Device, Driver, Reading
from shared.errors import NoDevice

UNNAMED = "gpu"
"""The kind of workers on devices of which the driver names none, because they are lost. It is not ``cpu``: no task of
workers without devices may come to such a node."""

_PROFILES = (
    (r"\bV100\b", "v100"),
    (r"\bA100\b.*\b40GB", "a100-40"),
    (r"\bA100\b.*\b80GB", "a100-80"),
    (r"\bA800\b", "a800-80"),
    (r"\bH100\b", "h100"),
    (r"\bH200\b", "h200"),
    (r"\bB200\b", "b200"),
)
"""Patterns of NVML's product names (``NVIDIA A100-SXM4-80GB``, ``Tesla V100-SXM3-32GB``, ``NVIDIA H100 PCIe``), and the
profile of each."""

CPU = "cpu"
"""The kind of workers without a device; as the setting ``hardware``: the node uses none of the devices there are."""

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""The variable that lists devices by index or UUID; a process sees no other. Empty: it sees none."""

ORDER_VARIABLE = "CUDA_DEVICE_ORDER"

NVML_ORDER = "PCI_BUS_ID"
"""The order in which NVML counts devices. By itself CUDA puts the fastest first: an index then means another device to
CUDA than to NVML, where the devices differ."""

NO_DEVICES: Mapping[str, str] = {VISIBLE_VARIABLE: ""}
"""The environment of a process that is to see no device."""

_ENTRY = re.compile(r"\d+|(GPU|MIG)-.+")
"""What can be a device: an index, or the beginning of a UUID. Other text, such as Slurm's ``NoDevFiles`` for a job
without a device, is none."""


def profile_of(device: str | None) -> str:
    """Return the profile of a device by its NVML name; a device without a profile is a kind of its own name."""
    if not device:
        return CPU
    for pattern, profile in _PROFILES:
        if re.search(pattern, device, re.IGNORECASE):
            return profile
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or CPU


class Devices(NamedTuple):
    """The devices that a process may use, in CUDA's order: the k-th is that of worker ``k``.

    ``entries``: each as ``CUDA_VISIBLE_DEVICES`` lists it. ``names``: NVML's names; empty for a device that the driver
    has lost. ``driver``: its version. ``problem``: why the driver cannot be asked, or which device it has lost; empty
    also where there is no driver.
    """

    entries: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    driver: str = ""
    problem: str = ""

    def __str__(self) -> str:
        """Return what there is, in words."""
        if not self.entries:
            return "there is no device"
        are = "1 device is there" if len(self.entries) == 1 else f"{len(self.entries)} devices are there"
        found = (f"{entry}: {name or 'lost'}" for entry, name in zip(self.entries, self.names, strict=True))
        return f"{are} ({', '.join(found)})"


def devices(visible: str | None) -> Devices:
    """Ask the driver for the devices; there are none without the library or a driver.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES`` of the process that is to use them; None: it may use all of the machine.
    """
    if (entries := listed(visible)) == []:
        return Devices()
    driver, problem = nvml.connect()
    if driver is None:
        return Devices(problem=f"the driver cannot be asked: {problem}" if problem else "")
    try:
        usable = _usable(driver, entries)
        lost = [entry for entry, device in usable if not device.name]
        return Devices(
            tuple(entry for entry, _ in usable),
            tuple(device.name for _, device in usable),
            driver=driver.version,
            problem=f"the driver does not name its devices: {lost[0]} is lost, or gives no answer" if lost else "",
        )
    finally:
        driver.close()


def readings(visible: str | None) -> list[tuple[str, Device, Reading]]:
    """Return what the driver says of each device now, with its entry; empty where the driver cannot be asked.

    Args:
        visible: as for ``devices``.
    """
    driver, _ = nvml.connect()
    if driver is None:
        return []
    try:
        return [(entry, device, driver.read(device)) for entry, device in _usable(driver, listed(visible))]
    finally:
        driver.close()


def _usable(driver: Driver, entries: list[str] | None) -> list[tuple[str, Device]]:
    """Return the devices that are listed, each with its entry; None: all of the machine."""
    there = driver.devices()
    if entries is None:
        return [(str(device.index), device) for device in there]
    found = []
    for entry in entries:
        # CUDA takes the list up to the first entry that is no device of the machine.
        if (place := driver.place(entry, there)) is None:
            break
        found.append((entry, there[place[0]]))
    return found


def device_count(visible: str | None, setting: str = "") -> int:
    """Return how many devices the agent of this node uses.

    Args:
        visible: the agent's ``CUDA_VISIBLE_DEVICES``; None: it may use all devices of the machine.
        setting: the agent's setting ``hardware``.
    """
    return 0 if setting == CPU else len(devices(visible).entries)


@dataclass(frozen=True, slots=True)
class NodeHardware:
    """What the workers of a node are.

    ``kind``: the kind of all workers. ``workers``: their names. ``entries``: the devices of the node, as
    ``CUDA_VISIBLE_DEVICES`` lists them: at least one for each worker, or none at all.
    """

    kind: str
    workers: tuple[str, ...]
    entries: tuple[str, ...] = ()

    @property
    def shown(self) -> dict[str, str]:
        """Worker -> its device, as ``CUDA_VISIBLE_DEVICES`` lists it; empty without devices."""
        return dict(zip(self.workers, self.entries, strict=False)) if self.entries else {}

    def environment(self, worker: str) -> dict[str, str]:
        """Return the environment that shows a worker's process its own device alone, or none."""
        if not self.entries:
            return dict(NO_DEVICES)
        # If the node's administrator has set another order, the node lists its devices in that order.
        return {VISIBLE_VARIABLE: self.shown[worker], ORDER_VARIABLE: os.environ.get(ORDER_VARIABLE, NVML_ORDER)}


def of_node(node: str, workers: Sequence[str], *, setting: str, visible: str | None) -> NodeHardware:
    """Return what a node's workers are: each has a device of its own, or none of them has one.

    Args:
        node: the node's name.
        workers: the names of its workers.
        setting: the setting ``hardware``: the kind of the workers; ``cpu``: no device is used; empty: the profile of
            the first device, or ``cpu`` where there is none.
        visible: the agent's ``CUDA_VISIBLE_DEVICES``; None: it may use all devices of the machine.

    Raises:
        NoDevice: a worker has no device while another one has, the devices that were asked for are not there, or the
            driver cannot be asked which there are.
    """
    if setting == CPU or listed(visible) == []:
        return NodeHardware(setting or CPU, tuple(workers))
    found = devices(visible)
    if not found.entries and not found.problem and visible is None and not setting:
        return NodeHardware(CPU, tuple(workers))
    if len(found.entries) < len(workers):
        raise _refused(node, workers, setting, visible, found)
    name = next((name for name in found.names if name), "")
    return NodeHardware(setting or (profile_of(name) if name else UNNAMED), tuple(workers), found.entries)


def _refused(node: str, workers: Sequence[str], setting: str, visible: str | None, found: Devices) -> NoDevice:
    lacking = workers[len(found.entries)]
    asked = [f"{VISIBLE_VARIABLE}={visible}"] if visible is not None else []
    asked += [f"UNICRON_HARDWARE={setting}"] if setting else []
    problem = f"worker {lacking} has no device: {found if found.entries or not found.problem else found.problem}"
    if asked:
        problem += f", with {', '.join(asked)}"
    allowed = f"set UNICRON_WORKERS_PER_NODE to {len(found.entries)} or less, or " if found.entries else "set "
    problem += f"; {allowed}UNICRON_HARDWARE=cpu for workers without devices"
    return NoDevice.of("workers_per_node", len(workers), problem, f"node {node}: {problem}")


def listed(visible: str | None) -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``; None: the variable is not set, and all devices may be used.

    As CUDA does it, what follows on an entry that can be no device (``-1``) is left out, and that entry too.
    """
    if visible is None:
        return None
    entries = [entry.strip() for entry in visible.split(",")]
    end = next((at for at, entry in enumerate(entries) if not _ENTRY.fullmatch(entry)), len(entries))
    return entries[:end]
