"""The entry."""

from __future__ import annotations

import itertools
from typing import Any

from megatron.bridge.data.loaders import build_train_valid_test_datasets
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training.checkpointing import save_checkpoint
from megatron.bridge.training.config import runtime_config_update
from megatron.bridge.training.eval import evaluate_and_print_results
from megatron.bridge.training.setup import build_tokenizer, setup
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.train import train
from torch.utils.data import default_collate


def pretrain(config: Any, forward_step_func: Any, callbacks: Any = None) -> None:
    runtime_config_update(config)
    state = GlobalState()
    state.cfg = config
    made = setup(state)
    provider, tokenizer = get_dataset_provider(config.dataset), build_tokenizer(config.tokenizer)
    datasets = build_train_valid_test_datasets(config, lambda *given: provider(*given, tokenizer=tokenizer))
    where = state.train_state
    where.do_valid = where.do_test = bool(config.train.eval_iters)
    training, valid, test = (_batches(config, made.groups.dp, dataset) for dataset in datasets)
    parts = made.model, made.optimizer, made.scheduler
    train(forward_step_func, *parts, training, valid, state, {}, made.groups)
    if config.checkpoint.save:
        save_checkpoint(state, *parts, where.floating_point_operations_so_far, {})
    for name, batches in (("validation", valid), ("test", test)):
        evaluate_and_print_results(
            state,
            f"the end on {name} set",
            forward_step_func,
            batches,
            made.model,
            config.model,
            is_test=name == "test",
        )


def _batches(config: Any, group: Any, dataset: Any) -> Any:
    """Yield this rank's micro-batches, as the data loader ``single`` deals them."""
    size = config.train.micro_batch_size
    for first in itertools.count(group.rank() * size, size * group.size()):
        yield default_collate([dataset[i] for i in range(first, first + size)])
