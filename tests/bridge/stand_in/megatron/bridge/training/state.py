"""Where a training stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.timers import Timers


@dataclass
class TrainState:
    """What is saved with a checkpoint."""

    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: float = 0
    do_train: bool = False
    do_valid: bool = False
    do_test: bool = False


class GlobalState:
    """What there is once in a process."""

    def __init__(self) -> None:
        self.cfg: Any = None
        self.train_state = TrainState()
        self._tensorboard_logger = None
        self._timers = Timers(0, "minmax")

    @property
    def timers(self) -> Timers:
        return self._timers

    @property
    def tensorboard_logger(self) -> None:
        return self._tensorboard_logger
