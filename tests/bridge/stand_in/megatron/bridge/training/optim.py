"""The scheduler of learning rate and weight decay."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def _get_scheduler(optimizer_config: Any, scheduler_config: Any, optimizer: Any) -> OptimizerParamScheduler:
    decay = optimizer_config.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optimizer_config.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=scheduler_config.samples,
        lr_decay_style="linear",
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=scheduler_config.samples,
        wd_incr_style="constant",
    )
