"""Checkpoints: one file, where the training stands, and the two files that name the newest."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import asdict
from typing import Any

import torch
from megatron.bridge.training.state import TrainState


def get_checkpoint_name(checkpoints_path: str, iteration: int, release: bool = False) -> str:
    return os.path.join(checkpoints_path, "release" if release else f"iter_{iteration:07d}")


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


def get_checkpoint_train_state_filename(checkpoints_path: str, prefix: str | None = None) -> str:
    return os.path.join(checkpoints_path, "train_state.pt" if prefix is None else f"{prefix}_train_state.pt")


def checkpoint_exists(checkpoints_path: str | None) -> bool:
    return checkpoints_path is not None and os.path.isfile(get_checkpoint_tracker_filename(checkpoints_path))


@functools.cache
def read_train_state(filename: str) -> TrainState:
    return TrainState(**torch.load(filename))


def cleanup_old_non_persistent_checkpoint(save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False) -> None:
    for name in sorted(name for name in os.listdir(save_dir) if name.startswith("iter_"))[:-leave_ckpt_num]:
        shutil.rmtree(os.path.join(save_dir, name))


def save_checkpoint(
    state: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: int,
    checkpointing_context: Any = None,
    pipeline_rank: Any = None,
    tensor_rank: Any = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Any = None,
    prebuilt_state_dict: Any = None,
    pg_collection: Any = None,
) -> None:
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        parent, train_state = state.cfg.checkpoint.save, state.train_state
        folder = get_checkpoint_name(parent, train_state.step)
        os.makedirs(folder, exist_ok=True)
        torch.save(asdict(train_state), get_checkpoint_train_state_filename(folder))
        shutil.copy(
            get_checkpoint_train_state_filename(folder), get_checkpoint_train_state_filename(parent, prefix="latest")
        )
        with open(get_checkpoint_tracker_filename(parent), "w") as file:
            file.write(str(train_state.step))
        parts = {"model": [chunk.state_dict() for chunk in model], "scheduler": opt_param_scheduler.state_dict()}
        torch.save(parts, os.path.join(folder, "model.pt"))
        cleanup_old_non_persistent_checkpoint(parent)
    torch.distributed.barrier()


def load_checkpoint(
    state: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    strict: bool = True,
    checkpointing_context: Any = None,
    skip_load_to_model_and_opt: bool = False,
) -> tuple[int, float]:
    raise NotImplementedError("no test loads a checkpoint of the stand-in's")
