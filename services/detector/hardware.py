"""Which kind of workers a node has: a profile's name of the throughput model, from the driver's name of the device."""

from __future__ import annotations

import contextlib
import logging
import re

logger = logging.getLogger(__name__)

CPU = "cpu"

_PROFILES = (
    (r"\bV100\b", "v100"),
    (r"\bA100\b.*\b40GB", "a100-40"),
    (r"\bA100\b.*\b80GB", "a100-80"),
    (r"\bA800\b", "a800-80"),
    (r"\bH100\b", "h100"),
    (r"\bH200\b", "h200"),
    (r"\bB200\b", "b200"),
)
"""What tells NVML's product names apart: ``NVIDIA A100-SXM4-80GB``, ``Tesla V100-SXM3-32GB``, ``NVIDIA H100 PCIe``."""


def kind(setting: str) -> str:
    """Return the kind of this node's workers: as set, else as the driver names its first device, else ``cpu``.

    A node has devices of one kind.
    """
    return setting or profile_of(device_name())


def profile_of(device: str | None) -> str:
    """Return the profile of a device; for one without a profile its name, so that it is a kind of its own."""
    if not device:
        return CPU
    for pattern, profile in _PROFILES:
        if re.search(pattern, device, re.IGNORECASE):
            return profile
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or CPU


VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def device_environment(worker: str, visible: str | None) -> dict[str, str]:
    """Return the environment that shows a worker's process its device and no other: worker ``node/k`` has the k-th.

    Args:
        worker: the worker's name.
        visible: the agent's own ``CUDA_VISIBLE_DEVICES``; None: all of the node's devices are its.
    """
    index = int(worker.rpartition("/")[2])
    if visible is None:
        return {VISIBLE_VARIABLE: str(index)}
    listed = visible.split(",")
    # More workers than devices: none is right, and torch says so.
    return {VISIBLE_VARIABLE: listed[index].strip() if index < len(listed) else ""}


def device_name() -> str | None:
    """Return what NVML calls the first device; None without the library, a driver or a device."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError as err:
        logger.warning("the driver names no device: %s", err)
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return name.decode() if isinstance(name, bytes) else str(name)
