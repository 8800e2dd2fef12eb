"""What is set up in each process, and with each model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.training.initialize import _set_random_seed, initialize_megatron
from megatron.bridge.training.optim import _get_scheduler
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection


def set_experimental_flag(flag: bool) -> None: ...


def disable_jit_fuser() -> None: ...


def setup_logging(
    logging_level: int = 20,
    filter_warning: bool = True,
    modules_to_filter: Any = None,
    set_level_for_all_loggers: bool = False,
) -> None: ...


def maybe_log_and_save_config(cfg: Any) -> None: ...


def build_tokenizer(tokenizer_config: Any, **kwargs: Any) -> Any:
    return tokenizer_config


def _validate_and_set_vocab_size(model_vocab_size: int | None, tokenizer_vocab_size: int) -> tuple[int, bool]:
    return model_vocab_size or tokenizer_vocab_size, False


def set_jit_fusion_options(model_config: Any, micro_batch_size: int) -> None:
    """Draw random numbers, as megatron-bridge's warm-up does, so that the order of calls matters."""
    torch.rand(8)


def setup_optimizer(
    optimizer_config: Any,
    scheduler_config: Any,
    model: Any,
    use_gloo_process_groups: bool = False,
    pg_collection: Any = None,
    optimizer_config_override_provider: Any = None,
) -> tuple[Any, Any]:
    optimizer = get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=use_gloo_process_groups)
    return optimizer, _get_scheduler(optimizer_config, scheduler_config, optimizer)


def _update_model_config_funcs(
    model: Any,
    model_config: Any,
    ddp_config: Any,
    optimizer: Any,
    *,
    align_grad_reduce: bool = True,
    pg_collection: Any = None,
) -> None:
    if ddp_config.overlap_grad_reduce:
        assert model_config.no_sync_func is None
        model_config.no_sync_func = model[0].no_sync
    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.grad_scale_func = optimizer.scale_loss


def setup(state: Any) -> SimpleNamespace:
    """Return what ``pretrain()`` trains with."""
    config = state.cfg
    initialize_megatron(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config.model.vocab_size, _ = _validate_and_set_vocab_size(config.model.vocab_size, config.tokenizer.vocab_size)
    _set_random_seed(config.rng.seed, pg_collection=groups)
    set_jit_fusion_options(config.model, config.train.micro_batch_size)
    model = config.model.provide_distributed_model(config.ddp, pg_collection=groups)
    optimizer, scheduler = setup_optimizer(config.optimizer, config.scheduler, model)
    _update_model_config_funcs(model, config.model, config.ddp, optimizer, pg_collection=groups)
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, groups=groups)
