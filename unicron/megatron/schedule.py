"""What Megatron's schedules call: at the end of each micro-batch's backward pass, and to scale a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unicron.megatron.model import config_of, is_megatron


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
    config = config_of(model)
    timers, config.timers = config.timers, _BackwardTimer(done)
    try:
        yield
    finally:
        config.timers = timers


class LossScale:
    """Makes each micro-batch's loss count 1/M, where Megatron's schedules divide by the micro-batches of a call.

    They do so with ``calculate_per_token_loss=False``, Megatron's default, and are right if every step is one call on
    every replica. Here the micro-batches of a call differ: a survivor computes those of a lost rank. The schedules call
    this object as ``config.grad_scale_func``, on the loss that they have divided.
    """

    def __init__(self, model: Any, micro_batches: int) -> None:
        """Prepare to take the place of the model's own function, which is called first.

        Args:
            model: Megatron's DistributedDataParallel, a list of them, or any other module, of which nothing is
                changed.
            micro_batches: M, in one step, over all replicas.
        """
        self._micro_batches = micro_batches
        self._factor = 1.0
        self.applies = is_megatron(model) and not config_of(model).calculate_per_token_loss
        """Whether the loss is scaled here rather than by the training loop."""
        self._config: Any = None
        self._own: Callable[[torch.Tensor], torch.Tensor] | None = None
        if self.applies:
            self._config = config_of(model)
            own = self._config.grad_scale_func
            # Two models may have the same configuration.
            self._own = own._own if isinstance(own, LossScale) else own

    def begin_call(self, micro_batches: int) -> None:
        """Scale the losses of the next call of a schedule.

        Args:
            micro_batches: that the call computes.
        """
        self._factor = micro_batches / self._micro_batches
        if self.applies:
            # At each call: a model that was built later may have the same configuration.
            self._config.grad_scale_func = self

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, scaled."""
        return (loss if self._own is None else self._own(loss)) * self._factor
