"""The configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


class GPTDatasetConfig:
    """Data of a GPT, which the script of these tests does not have."""

    def __init__(
        self, seq_length: int, skip_getting_attention_mask_from_dataset: bool = True, *args: Any, **kwargs: Any
    ) -> None: ...


@dataclass
class ConfigContainer:
    """All of it."""

    model: Any
    train: Any
    optimizer: Any
    scheduler: Any
    ddp: Any
    dataset: Any
    logger: Any
    tokenizer: Any
    checkpoint: Any
    dist: Any
    rng: Any
    comm_overlap: Any = None
    optimizer_config_override_provider: Any = None

    def get_data_parallel_size(self, world_size: int) -> int:
        return int(world_size // self.model.tensor_model_parallel_size // self.model.pipeline_model_parallel_size)

    def set_data_parallel_size(self) -> None:
        self.data_parallel_size = self.get_data_parallel_size(int(os.environ.get("WORLD_SIZE", "1")))


def runtime_config_update(cfg: ConfigContainer) -> None:
    cfg.set_data_parallel_size()
