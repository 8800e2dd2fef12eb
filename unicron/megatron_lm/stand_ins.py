"""Stand-ins for small parts of Megatron-LM while its ``train()`` runs on the library's steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist


class OneReplica:
    """Megatron's ``parallel_state`` as ``train()`` reads it: the batch is the task's, with any number of replicas."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_data_parallel_world_size(self, *args: Any, **kwargs: Any) -> int:
        """Return 1, for any number of replicas."""
        return 1


class OneReplicaGroups:
    """Megatron's ``ProcessGroupCollection`` as ``train()`` reads it: that of the present generation, with one replica.

    ``train()`` goes on through a change of the generation, so it must not have a group itself.
    """

    dp = SimpleNamespace(size=lambda: 1)

    def __getattr__(self, name: str) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection

        return getattr(ProcessGroupCollection.use_mpu_process_groups(), name)


class SchedulerState:
    """Megatron's scheduler of learning rate and weight decay as a part of the state."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state dict."""
        return dict(self.made.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scheduler's state dict."""
        self.made.load_state_dict(state)


def print_time(string: str, override_timestamp: float | None = None) -> None:
    """Print a time as Megatron-LM's ``print_datetime`` does, without waiting for all ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        at = datetime.fromtimestamp(time.time() if override_timestamp is None else override_timestamp)
        print(f"[{string}] datetime: {at:%Y-%m-%d %H:%M:%S.%f} ", flush=True)


def without_barrier(function: Callable[..., None]) -> Callable[..., None]:
    """Return a timer's function that starts or stops it without waiting for all ranks."""

    @functools.wraps(function)
    def called(timer: Any, barrier: bool = False) -> None:
        function(timer)

    return called
