"""What there is before a model is built."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator


def initialize_megatron(
    cfg: Any,
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    restart_store: Any = None,
) -> None:
    train = cfg.train
    sizes = train.rampup_batch_size, train.global_batch_size, train.micro_batch_size, cfg.data_parallel_size
    init_num_microbatches_calculator(0, *sizes)
    if not skip_mpu_initialization:
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def _set_random_seed(
    seed_: int,
    data_parallel_random_init: bool = False,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    *,
    pg_collection: Any,
) -> None:
    torch.manual_seed(seed_)
    tensor_parallel.model_parallel_cuda_manual_seed(seed_)
