"""What there is once in a process."""

from __future__ import annotations

from typing import Any

from megatron.core.timers import Timers

_FOUND: dict[str, Any] = {}


def get_args() -> Any:
    return _FOUND["args"]


def get_timers() -> Any:
    return _FOUND["timers"]


def get_tensorboard_writer() -> Any:
    return _FOUND.get("writer")


def _set_tensorboard_writer(args: Any) -> None:
    _FOUND["writer"] = None


def set_global_variables(args: Any) -> None:
    """Set arguments, timers and the calculator of micro-batches."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    _FOUND["args"], _FOUND["timers"] = args, Timers(0, "minmax")
    _set_tensorboard_writer(args)
    sizes = args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    init_num_microbatches_calculator(args.rank, *sizes)
