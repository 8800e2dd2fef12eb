from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as mpu


def average_losses_across_data_parallel_group(losses: Any) -> torch.Tensor:
    averaged = torch.cat([loss.clone().detach().view(1) for loss in losses])
    torch.distributed.all_reduce(averaged, group=mpu.get_data_parallel_group())
    averaged /= mpu.get_data_parallel_world_size()
    return averaged
