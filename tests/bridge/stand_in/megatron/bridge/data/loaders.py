"""Datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def build_train_valid_test_datasets(cfg: Any, build_train_valid_test_datasets_provider: Callable[..., Any]) -> Any:
    train = cfg.train
    evaluations = 1 + train.train_iters // train.eval_interval
    counts = [n * train.global_batch_size for n in (train.train_iters, evaluations * train.eval_iters, 1)]
    return build_train_valid_test_datasets_provider(counts, cfg.dataset)
