"""Where the workers of an embedded stack train: each on a device of its own, or all of them on the CPU.

``unicron up`` and ``unicron demo`` start several nodes on one machine. What a user asks for and what the machine has
are compared here, before anything is started: a stack in which some workers have a device and others have none cannot
train.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from services.agent.machine import hardware
from services.agent.machine.hardware import CPU, VISIBLE_VARIABLE, Devices
from shared.errors import NoDevice
from shared.settings.model import read_settings

CPU_NODES = 4
CPU_WORKERS_PER_NODE = 2
"""Nodes of a stack that trains on the CPU, and workers of each, where nothing else is asked for: enough to lose a node,
and to move work within a node and between nodes."""

MOST = 64
"""Nodes, or workers of a node, of one stack."""


class Device(StrEnum):
    """What workers are to train on."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


DeviceOption = Annotated[
    Device,
    typer.Option(help="What workers train on: a GPU each, or the CPU. auto: GPUs if there is one for each worker."),
]


@dataclass(frozen=True)
class Division:
    """The nodes of a stack, the workers of each, and their devices.

    ``shown``: ``CUDA_VISIBLE_DEVICES`` of each node's agent, in the order of the nodes; empty on the CPU. ``said``: one
    line for the user; empty where there is nothing to say.
    """

    nodes: int
    workers_per_node: int
    shown: tuple[str, ...] = ()
    said: str = ""


def found(visible: str | None = None) -> Devices:
    """Ask the driver which devices this process may use; none if the setting ``hardware`` is ``cpu``.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES``; None: that of this process.
    """
    if read_settings().hardware == CPU:
        return Devices(problem="UNICRON_HARDWARE is cpu")
    return hardware.devices(os.environ.get(VISIBLE_VARIABLE) if visible is None else visible)


def divide(
    there: Devices, wanted: Device, nodes: int | None = None, workers_per_node: int | None = None, *, who: str
) -> Division:
    """Return how the devices of the machine are divided among the nodes of a stack.

    A number that is not given follows from the devices: by itself the machine is one node with all of them.

    Args:
        there: the devices that may be used.
        wanted: what workers are to train on.
        nodes: as the user has given it.
        workers_per_node: as the user has given it.
        who: needs the workers, in the line for the user.

    Raises:
        NoDevice: workers were to train on devices, and there are too few.
    """
    on_cpu = Division(nodes or CPU_NODES, workers_per_node or CPU_WORKERS_PER_NODE)
    if wanted is Device.CPU:
        return on_cpu
    usable = 0 if there.problem else len(there.entries)
    each = workers_per_node or min(usable // (nodes or 1), MOST)
    count = nodes or min(usable // max(each, 1), MOST)
    if each and count and each * count <= usable:
        entries = there.entries
        shown = tuple(",".join(entries[node * each : (node + 1) * each]) for node in range(count))
        used = each * count
        left = f", {usable - used} left over" if used < usable else ""
        return Division(count, each, shown, f"trains on {_devices(used)}: {_kinds(there)}{left}")
    needed = (nodes or 1) * (workers_per_node or 1)
    if usable:
        why = f"{_devices(usable)}, {who} {'need' if who.endswith('s') else 'needs'} {needed}"
    else:
        why = there.problem or "there is no device"
    if wanted is Device.CUDA:
        raise NoDevice.of("--device", wanted.value, why, f"--device cuda: {why}; --device cpu trains without")
    if not usable and not there.problem:
        return on_cpu
    return Division(on_cpu.nodes, on_cpu.workers_per_node, said=f"trains on the CPU: {why}")


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _kinds(there: Devices) -> str:
    return ", ".join(sorted(set(there.names)))
