"""What there is before a model is built."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.training import arguments
from megatron.training.global_vars import get_args, set_global_variables


def initialize_megatron(
    extra_args_provider: Any = None,
    args_defaults: Any = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    parsed_args: Any = None,
    store: Any = None,
) -> None:
    args = parsed_args or arguments.parse_args(extra_args_provider, ignore_unknown_args)
    args.data_parallel_size = args.world_size // args.tensor_model_parallel_size // args.pipeline_model_parallel_size
    set_global_variables(args)
    if not skip_mpu_initialization:
        _initialize_distributed(get_embedding_ranks, get_position_embedding_ranks, store)
        _set_random_seed(args.seed)


def _initialize_distributed(get_embedding_ranks: Any, get_position_embedding_ranks: Any, store: Any) -> None:
    args = get_args()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=store)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size, args.pipeline_model_parallel_size, create_gloo_process_groups=False
        )


def _compile_dependencies() -> None:
    """Compile nothing."""


def _set_random_seed(
    seed_: int,
    data_parallel_random_init: bool = False,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> None:
    torch.manual_seed(seed_ + 100 * parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(seed_)


def set_jit_fusion_options() -> None:
    """Draw random numbers, as Megatron-LM's warm-up does, so that the order of calls matters."""
    torch.rand(8)
