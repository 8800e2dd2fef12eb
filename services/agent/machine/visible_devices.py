"""Which devices a process may use, as its environment says it to CUDA. The driver is not asked (``hardware.py``)."""

from __future__ import annotations

import re
from collections.abc import Mapping

CPU = "cpu"
"""The kind of workers without a device; as the setting ``hardware``: the node uses none of the devices there are."""

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Lists devices by index or UUID; a process sees no other. Empty: it sees none."""

ORDER_VARIABLE = "CUDA_DEVICE_ORDER"

NVML_ORDER = "PCI_BUS_ID"
"""The order in which NVML counts devices. By itself CUDA puts the fastest first: an index then means another device to
CUDA than to NVML, where the devices differ."""

NO_DEVICES: Mapping[str, str] = {VISIBLE_VARIABLE: ""}
"""The environment of a process that is to see no device."""


_ENTRY = re.compile(r"\d+|(GPU|MIG)-.+")
"""What can be a device: an index, or the beginning of a UUID. Slurm lists ``NoDevFiles`` where a job has no device."""


def listed(visible: str | None) -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``; None: the variable is not set, and all devices may be used.

    As CUDA does it, what follows on an entry that can be no device (``-1``) is left out, and that entry too.
    """
    if visible is None:
        return None
    entries = [entry.strip() for entry in visible.split(",")]
    end = next((at for at, entry in enumerate(entries) if not _ENTRY.fullmatch(entry)), len(entries))
    return entries[:end]
