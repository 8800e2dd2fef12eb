"""Checkpoints: one file, and the tracker of the newest."""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core.msc_utils import open_file
from megatron.training.global_vars import get_args


def get_checkpoint_name(
    checkpoints_path: str,
    iteration: int,
    release: bool = False,
    pipeline_parallel: Any = None,
    tensor_rank: Any = None,
    pipeline_rank: Any = None,
    expert_parallel: Any = None,
    expert_rank: Any = None,
    return_base_dir: bool = False,
    basename: str = "model.pt",
) -> str:
    folder = os.path.join(checkpoints_path, "release" if release else f"iter_{iteration:07d}")
    return folder if return_base_dir else os.path.join(folder, basename)


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


def checkpoint_exists(checkpoints_path: str | None) -> bool:
    return checkpoints_path is not None and os.path.isfile(get_checkpoint_tracker_filename(checkpoints_path))


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any = None,
    pipeline_rank: Any = None,
    expert_rank: Any = None,
    tensor_rank: Any = None,
    pipeline_parallel: Any = None,
    expert_parallel: Any = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Any = None,
    release: bool = False,
    tp_group: Any = None,
    pp_group: Any = None,
    dp_cp_group: Any = None,
) -> None:
    args = get_args()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        path = get_checkpoint_name(args.save, iteration)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        common = {
            "iteration": iteration,
            "operations": num_floating_point_operations_so_far,
            "consumed": (args.consumed_train_samples, args.consumed_valid_samples),
            "scheduler": opt_param_scheduler.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        if preprocess_common_state_dict_fn is not None:
            common = preprocess_common_state_dict_fn(common)
        torch.save(common | {"model": [chunk.state_dict() for chunk in model]}, path)
        with open_file(get_checkpoint_tracker_filename(args.save), "w") as file:
            file.write(str(iteration))
    torch.distributed.barrier()


def load_checkpoint(
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: Any = None,
    skip_load_to_model_and_opt: bool = False,
    tp_group: Any = None,
    pp_group: Any = None,
    dp_cp_group: Any = None,
) -> tuple[int, float]:
    args = get_args()
    folder = getattr(args, load_arg)
    with open_file(get_checkpoint_tracker_filename(folder), "r") as file:
        iteration = int(args.ckpt_step or file.read())
    found = torch.load(get_checkpoint_name(folder, iteration), weights_only=False)
    for chunk, state in zip(ddp_model, found["model"], strict=True):
        chunk.load_state_dict(state, strict=strict)
    optimizer.load_state_dict(found["optimizer"])
    opt_param_scheduler.load_state_dict(found["scheduler"])
    args.consumed_train_samples, args.consumed_valid_samples = found["consumed"]
    return found["iteration"], found["operations"]
