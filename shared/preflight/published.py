"""What the hardware of a node should reach, from the data sheets of the throughput model's profiles.

``shared/planning/performance/hardware.json`` has the numbers with their sources. The data sheets themselves:

    A100    https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    H100    https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    H200    https://www.nvidia.com/en-us/data-center/h200/
    B200    https://www.nvidia.com/en-us/data-center/dgx-b200/
"""

from __future__ import annotations

from typing import NamedTuple

from shared.events.measurements import Measurement, Quantity
from shared.planning.performance.hardware import profile
from shared.text import amount

PROFILES = {
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A800-SXM4-80GB": "a800-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
"""The driver's name of a device -> the profile whose data sheet is that of exactly this device. Cards for PCIe have a
part of the rates of their namesakes, and so have the slices of a device (MIG), which have other names."""

MEMORY_REACHED = 0.85
"""Part of the data sheet's memory bandwidth that a large copy reaches: refreshes and error correction take the rest. An
assumption: no device was at hand to measure it."""

LINK_REACHED = 0.8
"""Part of a link's rate that NCCL's rings reach: the protocol takes a fifth, as NCCL's authors say of 370 of 450 GB/s
on H100 (https://github.com/NVIDIA/nccl-tests/issues/212). Where switches reduce, the bus bandwidth is higher."""


class Published(NamedTuple):
    """A rate that hardware should reach. ``source``: what it follows from, in words."""

    value: float
    source: str


def published(quantity: Quantity, measured: Measurement) -> Published | None:
    """Return what the node should reach; None: nothing is published of it.

    An all-reduce is compared where all devices of a node that has switches take part: what fewer devices reach depends
    on the links that are between just these.
    """
    if measured.device not in PROFILES:
        return None
    known = profile(PROFILES[measured.device])
    match quantity:
        case "matrix products":
            peak, reached, unit = known.peak_flop_per_s, known.sustained_fraction, "FLOP/s"
        case "device memory":
            peak, reached, unit = known.memory_bytes_per_s, MEMORY_REACHED, "B/s"
        case "all-reduce" if measured.count == known.workers_per_node:
            peak, reached, unit = known.intra_bytes_per_s, LINK_REACHED, "B/s"
        case _:
            return None
    return Published(peak * reached, f"{reached:g} of {amount(peak, unit)}, the data sheet of {known.name}")
