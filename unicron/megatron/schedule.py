"""The end of each micro-batch's backward pass in Megatron's pipeline schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class _BackwardTimer:
    """Reports the end of each backward pass; takes the place of Megatron's timers, which the schedules call."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._name = ""

    def __call__(self, name: str, **options: Any) -> _BackwardTimer:
        self._name = name
        return self

    def start(self, **options: Any) -> None:
        """Do nothing."""

    def stop(self, **options: Any) -> None:
        """Report the end of a backward pass."""
        if self._name == "backward-compute":
            self._done()


@contextlib.contextmanager
def each_backward(model: Any, done: Callable[[], None]) -> Iterator[None]:
    """Call ``done`` after the backward pass of each micro-batch in Megatron's schedules (not interleaved ones).

    The calls come in the order of the data iterator. At each call the gradient buffers contain the gradients of the
    micro-batch just computed and of no other, provided that ``done`` commits it.

    Args:
        model: Megatron's DistributedDataParallel.
        done: called without arguments.
    """
    config = model.config
    timers, config.timers = config.timers, _BackwardTimer(done)
    try:
        yield
    finally:
        config.timers = timers
