"""The loop, and what it calls."""

from __future__ import annotations

import sys
from typing import Any

from megatron.bridge.training.checkpointing import save_checkpoint
from megatron.bridge.training.eval import evaluate_and_print_results
from megatron.bridge.training.utils import flop_utils
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training.training import _mean, _print


def should_disable_forward_pre_hook(
    use_megatron_fsdp: bool, use_distributed_optimizer: bool, overlap_param_gather: bool
) -> bool:
    return use_distributed_optimizer and overlap_param_gather


def train_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    global_state: Any,
    pg_collection: Any,
    forward_backward_func: Any,
) -> tuple[Any, ...]:
    config = global_state.cfg
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=config.model.seq_length,
        micro_batch_size=config.train.micro_batch_size,
        forward_only=False,
    )
    is_updated, norm, zeros = optimizer.step()
    if is_updated:
        scheduler.step(increment=config.train.global_batch_size)
    return _mean(reports), int(not is_updated), False, False, 0, norm, zeros, None


def train(
    forward_step_func: Any,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    global_state: Any,
    checkpointing_context: Any,
    pg_collection: Any,
    process_non_loss_data_func: Any = None,
    non_loss_data_func: Any = None,
    callback_manager: Any = None,
) -> None:
    config, timers, state = global_state.cfg, global_state.timers, global_state.train_state
    for chunk in model:
        chunk.train()
    timers("interval-time", log_level=0).start(barrier=True)
    schedule = get_forward_backward_func(pp_size=pg_collection.pp.size(), vp_size=None)
    while state.step < config.train.train_iters:
        update_num_microbatches(state.consumed_train_samples, consistency_check=True, verbose=True)
        losses, *_ = train_step(
            forward_step_func, train_data_iterator, model, optimizer, scheduler, global_state, pg_collection, schedule
        )
        state.step += 1
        samples = pg_collection.dp.size() * config.train.micro_batch_size * get_num_microbatches()
        state.consumed_train_samples += samples
        state.floating_point_operations_so_far += flop_utils.num_floating_point_operations(config, samples)
        _print(f" iteration {state.step:8d}/{config.train.train_iters:8d}", losses)
        if state.do_valid and state.step % config.train.eval_interval == 0:
            evaluate_and_print_results(
                global_state, f"iteration {state.step}", forward_step_func, valid_data_iterator, model, config.model
            )
        exits = bool(config.train.exit_interval) and state.step % config.train.exit_interval == 0
        if config.checkpoint.save and (exits or state.step % config.checkpoint.save_interval == 0):
            save_checkpoint(
                global_state, model, optimizer, scheduler, state.floating_point_operations_so_far,
                checkpointing_context, train_data_iterator=train_data_iterator,
            )  # fmt: skip
        if exits:
            sys.exit(0)
    timers("interval-time").stop()
