"""Megatron's schedules: what they call, at the end of each backward pass and to scale a loss, and what they take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from unicron.errors import WrongLoop
from unicron.megatron.model import config_of, is_megatron, model_chunks


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


class _ChunksInBackward:
    """Knows which model chunk the last backward pass was of.

    Megatron's timers do not tell. What has computed each chunk's output gets a hook, which is called as that chunk's
    backward pass begins.
    """

    def __init__(self, model: Any) -> None:
        self._last = 0
        self._hooks = [
            chunk.register_forward_hook(partial(self._watch, number))
            for number, chunk in enumerate(model_chunks(model))
        ]

    def _watch(self, number: int, module: Any, arguments: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            raise WrongLoop(f"a model chunk of an interleaved pipeline returns one tensor, not {type(output).__name__}")
        begin = partial(self._begin, number)
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(begin)  # in 4 microseconds; a tensor's hook takes 32 (measured)
        elif output.requires_grad:
            output.register_hook(begin)  # type: ignore[no-untyped-call]  # the chunk has no layers: it is its input

    def _begin(self, number: int, gradients: object) -> None:
        self._last = number

    def last(self) -> int:
        """Return the number of the chunk."""
        return self._last

    def remove(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()


@contextlib.contextmanager
def each_backward(model: Any, done: Callable[..., None]) -> Iterator[None]:
    """Call ``done`` after the backward pass of each micro-batch in Megatron's schedules.

    The calls come in the order of the data iterator, for each model chunk of an interleaved pipeline. At each call the
    gradient buffers (of the chunk) contain the gradients of the micro-batch just computed and of no other, provided
    that ``done`` commits it.

    Args:
        model: Megatron's DistributedDataParallel, or the list of model chunks of an interleaved pipeline.
        done: called without arguments; of several chunks, with the number of the one that has computed.
    """
    config = config_of(model)
    several = len(model_chunks(model)) > 1
    chunks = _ChunksInBackward(model) if several else None
    timers, config.timers = config.timers, _BackwardTimer(done if chunks is None else lambda: done(chunks.last()))
    try:
        yield
    finally:
        config.timers = timers
        if chunks is not None:
            chunks.remove()


def fitting(micro_batches: int, pipeline: int, group: int) -> int:
    """Return the least number of micro-batches, at least ``micro_batches``, that the interleaved schedule takes.

    Args:
        micro_batches: that are to be computed.
        pipeline: stages.
        group: micro-batches that a rank computes with one chunk before it turns to the next
            (``microbatch_group_size_per_vp_stage``), at least ``pipeline``.
    """
    if not micro_batches:
        return 0
    count = max(micro_batches, group)
    rest = count % group
    return count + pipeline - rest if 0 < rest < pipeline else count


def fill(model: Any, micro_batches: list[int]) -> list[int]:
    """Return micro-batches as a schedule takes them: to those of an interleaved one the last is added, again and again.

    Args:
        model: the rank's model.
        micro_batches: that are to be computed.
    """
    if len(model_chunks(model)) == 1:
        return micro_batches
    config = config_of(model)
    count = fitting(len(micro_batches), config.pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage)
    return micro_batches + micro_batches[-1:] * (count - len(micro_batches))


class LossScale:
    """Makes each micro-batch's loss count 1/M, where Megatron's schedules divide by the micro-batches of a call.

    And makes the loss of those count nothing that only fill an interleaved schedule: their gradients are zero.

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
        self._computed = self._filling = self._scaled = 0
        """Of the present call: its micro-batches, how many of them only fill the schedule, and the losses scaled."""
        is_interleaved = len(model_chunks(model)) > 1 and is_megatron(model)
        self.applies = is_megatron(model) and not config_of(model).calculate_per_token_loss
        """Whether the loss is scaled here rather than by the training loop."""
        self._config: Any = None
        self._own: Callable[[torch.Tensor], torch.Tensor] | None = None
        if self.applies or is_interleaved:
            self._config = config_of(model)
            own = self._config.grad_scale_func
            # Two models may have the same configuration.
            self._own = own._own if isinstance(own, LossScale) else own

    def begin_call(self, micro_batches: int, *, filling: int = 0) -> None:
        """Scale the losses of the next call of a schedule.

        Args:
            micro_batches: that the call computes.
            filling: how many of them, the last ones, only fill the schedule.
        """
        self._factor = micro_batches / self._micro_batches if self.applies else 1.0
        self._computed, self._filling, self._scaled = micro_batches, filling, 0
        if self._config is not None:
            # At each call: a model that was built later may have the same configuration.
            self._config.grad_scale_func = self

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, scaled.

        The schedules call this once for each micro-batch, in order, with its loss; and with a number, of which no
        gradient is asked, for the scale of auxiliary losses, whether there are any or not.

        Raises:
            WrongLoop: more losses come than a call that is filled up computes micro-batches.
        """
        scaled = loss if self._own is None else self._own(loss)
        if not self._filling or not loss.requires_grad:
            return scaled * self._factor
        if self._scaled == self._computed:
            raise WrongLoop(
                f"config.grad_scale_func is called for more losses than the {self._computed} micro-batches of a call "
                "that is filled up: scale an auxiliary loss with a number, config.grad_scale_func(torch.ones(1))"
            )
        self._scaled += 1
        return scaled * (self._factor if self._scaled <= self._computed - self._filling else 0.0)
