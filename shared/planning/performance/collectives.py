"""Time of collectives by message size, group size, and the group's position in the cluster.

Ring model (Thakur et al., IJHPCA 2005; NCCL's "bus bandwidth"): an all-reduce of S bytes over n workers moves
2 (n - 1) / n S over the slowest link, a reduce-scatter or all-gather half of that. Groups that span nodes use the
network cards of all their members in a node.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.planning.performance.calibration import Calibration
from shared.planning.performance.hardware import Hardware


class Group(NamedTuple):
    """``size`` workers whose numbers are ``stride`` apart. Workers are numbered node by node."""

    size: int
    stride: int

    def members_per_node(self, workers_per_node: int) -> int:
        """Return the number of members in one node: 1 where the stride leaves the node."""
        return max(1, min(self.size, workers_per_node // self.stride))


def bandwidth(group: Group, hardware: Hardware, constants: Calibration) -> float:
    """Return the bus bandwidth that large collectives of the group reach, bytes/s."""
    intra = hardware.intra_bytes_per_s * constants.intra_fraction
    members = group.members_per_node(hardware.workers_per_node)
    inter = members * hardware.inter_bytes_per_s * constants.inter_fraction
    if members >= group.size:
        return intra
    return inter if members == 1 else min(intra, inter)


def latency_s(group: Group, hardware: Hardware, constants: Calibration) -> float:
    """Return the seconds of an all-reduce of no bytes: a ring inside the node, a tree between nodes."""
    members = group.members_per_node(hardware.workers_per_node)
    nodes = -(-group.size // members)
    ring = 2 * (members - 1) * hardware.intra_latency_s
    # The depth of the tree, log2 rounded up, in integers: a library logarithm may differ between machines.
    tree = 2 * (nodes - 1).bit_length() * hardware.inter_latency_s
    return constants.collective_s + ring + tree


def all_reduce_s(size_bytes: float, group: Group, hardware: Hardware, constants: Calibration) -> float:
    """Return the seconds of an all-reduce of ``size_bytes`` on each worker."""
    if group.size == 1:
        return 0.0
    moved = 2.0 * (group.size - 1) / group.size * size_bytes
    return latency_s(group, hardware, constants) + moved / bandwidth(group, hardware, constants)


def half_s(size_bytes: float, group: Group, hardware: Hardware, constants: Calibration) -> float:
    """Return the seconds of a reduce-scatter or an all-gather; ``size_bytes``: the size of the whole tensor."""
    if group.size == 1:
        return 0.0
    moved = (group.size - 1) / group.size * size_bytes
    latency = (latency_s(group, hardware, constants) + constants.collective_s) / 2.0
    return latency + moved / bandwidth(group, hardware, constants)


def point_to_point_s(size_bytes: float, inter_node: bool, hardware: Hardware, constants: Calibration) -> float:
    """Return the seconds of one transfer between two workers."""
    if inter_node:
        link, latency = hardware.inter_bytes_per_s * constants.inter_fraction, hardware.inter_latency_s
    else:
        link, latency = hardware.intra_bytes_per_s * constants.intra_fraction, hardware.intra_latency_s
    return constants.collective_s / 2.0 + latency + size_bytes / link
