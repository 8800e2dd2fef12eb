"""The hardware of a node: the kind of its workers, and the device of each worker.

A kind is the name of a profile of the throughput model (``shared/planning/performance``), found from the name that the
driver gives the device.
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

from services.agent import nvml

logger = logging.getLogger(__name__)

CPU = "cpu"
"""The kind of workers without a device."""

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

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def kind(setting: str) -> str:
    """Return the kind of this node's workers. All devices of a node are of one kind.

    Args:
        setting: the kind as set; empty: the profile of the driver's first device, or ``cpu`` without one.
    """
    return setting or profile_of(device_name())


def profile_of(device: str | None) -> str:
    """Return the profile of a device by its NVML name; a device without a profile is a kind of its own name."""
    if not device:
        return CPU
    for pattern, profile in _PROFILES:
        if re.search(pattern, device, re.IGNORECASE):
            return profile
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or CPU


def device_environment(worker: str, visible: str | None) -> dict[str, str]:
    """Return the environment that shows a worker's process only its own device: worker ``node/k`` has the k-th.

    Args:
        worker: the worker's name.
        visible: the agent's own ``CUDA_VISIBLE_DEVICES``; None: the agent may use all devices of the node.
    """
    index = int(worker.rpartition("/")[2])
    if visible is None:
        return {VISIBLE_VARIABLE: str(index)}
    listed = visible.split(",")
    # A worker without a device of its own sees none, and torch reports that.
    return {VISIBLE_VARIABLE: listed[index].strip() if index < len(listed) else ""}


class Devices(NamedTuple):
    """The devices of a node, by NVML's names.

    ``driver``: its version. ``problem``: why the driver names no devices; empty also where there is no driver.
    """

    names: tuple[str, ...] = ()
    driver: str = ""
    problem: str = ""


def devices() -> Devices:
    """Ask the driver for the devices; there are none without the library or a driver."""
    driver, problem = nvml.connect()
    if driver is None:
        return Devices(problem=f"the driver cannot be asked: {problem}" if problem else "")
    try:
        found = driver.devices()
        if unnamed := [device.index for device in found if not device.name]:
            return Devices(problem=f"the driver does not name its devices: {unnamed[0]} is lost, or gives no answer")
        return Devices(tuple(device.name for device in found), driver=driver.version)
    finally:
        driver.close()


def device_count(visible: str | None) -> int:
    """Return how many devices the agent of this node may use.

    Args:
        visible: the agent's ``CUDA_VISIBLE_DEVICES``; None: it may use all devices of the node.
    """
    found = len(devices().names)
    return found if visible is None else min(found, len([one for one in visible.split(",") if one.strip()]))


def device_name() -> str | None:
    """Return NVML's name of the first device; None where there is none."""
    found = devices()
    if found.problem:
        logger.warning("%s", found.problem)
    return found.names[0] if found.names else None
