"""Names of torch that are not the same in all versions that the library works with (2.9 to 2.13).

Everything else that the library uses of torch, its private names included, is the same in them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

FLIGHT_RECORDER_ENTRIES = ("TORCH_FR_BUFFER_SIZE", "2000")
"""Environment variable and value: how many collectives the flight recorder keeps in memory. 2000 is torch's default
since 2.11; before, the default is 0. A process reads the variable once, as it makes its first group. Torch warns of the
variable's former name (TORCH_NCCL_TRACE_BUFFER_SIZE)."""


def _newest(*names: str) -> Any:
    """Return the first of some functions of ``torch.distributed`` that this version has: the newest name comes first.

    A later version also has the former name, and warns when it is called.
    """
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


# Renamed in 2.13, the arguments are the same.
reduce_scatter_single = _newest("reduce_scatter_single", "reduce_scatter_tensor")
all_gather_single = _newest("all_gather_single", "all_gather_into_tensor")
