"""Evaluation."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training.training import _mean, _print


def evaluate_and_print_results(
    state: Any,
    prefix: str,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    config: Any,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    process_non_loss_data_func: Any = None,
    non_loss_data_func: Any = None,
    callback_manager: Any = None,
    is_test: bool = False,
) -> None:
    train, reports = state.cfg.train, []
    schedule = get_forward_backward_func(pp_size=1, vp_size=None)
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        for _ in range(train.eval_iters):
            reports += schedule(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=get_num_microbatches(),
                seq_length=config.seq_length,
                micro_batch_size=train.micro_batch_size,
                forward_only=True,
            )
            state.train_state.consumed_valid_samples += train.global_batch_size
    for chunk in model:
        chunk.train()
    _print(f"evaluation at {prefix}", _mean(reports))
