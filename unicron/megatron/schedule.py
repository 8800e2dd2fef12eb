"""Megatron's schedules: what they call, at the end of each backward pass and to scale a loss, and what they take."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from unicron.errors import WrongLoop
from unicron.losses import Loss, noted, read, tokens_of
from unicron.megatron.grad_scaler import GradScaler
from unicron.megatron.model import config_of, is_megatron, model_chunks
from unicron.megatron.parallel import last_stage


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
    """Knows to which model chunk the last backward pass belonged.

    Megatron's timers do not tell. The operation that has computed each chunk's output gets a hook, which is called as
    that chunk's backward pass begins.
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
        done: called without arguments; if there are several chunks, with the number of the chunk that has computed.
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
        micro_batches: the number that is to be computed.
        pipeline: the number of stages.
        group: micro-batches that a rank computes with one chunk before it turns to the next
            (``microbatch_group_size_per_vp_stage``), at least ``pipeline``.
    """
    if not micro_batches:
        return 0
    count = max(micro_batches, group)
    rest = count % group
    return count + pipeline - rest if 0 < rest < pipeline else count


def fill(model: Any, micro_batches: list[int]) -> list[int]:
    """Return micro-batches as a schedule takes them: an interleaved one gets the last one repeatedly.

    Args:
        model: the rank's model.
        micro_batches: those that are to be computed.
    """
    if len(model_chunks(model)) == 1:
        return micro_batches
    config = config_of(model)
    count = fitting(len(micro_batches), config.pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage)
    return micro_batches + micro_batches[-1:] * (count - len(micro_batches))


class LossScale:
    """Makes each micro-batch's loss count as it has to, and sees that it does.

    With ``calculate_per_token_loss=False``, Megatron's default, a loss counts 1/M. The schedules divide it by the
    micro-batches of a call, which is right if every step is one call on every replica; here the micro-batches of a call
    differ, since a survivor computes those of a lost rank. With True a loss that is committed as a sum over tokens and
    their number stays as it is, as in Megatron, and the gradients of the global batch are divided by its tokens; one
    that is committed as a mean is scaled by the training loop. The loss of a micro-batch that only fills an interleaved
    schedule counts nothing: its gradients are zero.

    The schedules call this object as ``config.grad_scale_func``, on the loss that they have divided.
    """

    def __init__(self, model: Any, micro_batches: int, scaler: GradScaler | None = None) -> None:
        """Prepare to take the place of the model's own function, which is called first.

        Args:
            model: Megatron's DistributedDataParallel, a list of them, or any other module, of which nothing is
                changed.
            micro_batches: M, the number in one step, over all replicas, if a step does not say it.
            scaler: the optimizer's loss scale, which is applied first.
        """
        self.micro_batches = micro_batches
        """M: the number of micro-batches of the present step."""
        self._scaler = scaler if scaler is not None and scaler.applies else None
        self._factor = 1.0
        self._computed = self._filling = self._scaled = 0
        """Numbers of the present call: its micro-batches, how many of them only fill the schedule, and the losses
        scaled."""
        self._counts_tokens: bool | None = None
        """Whether losses are committed as sums over tokens that gradients are divided by; None: not known yet."""
        self._begun: list[torch.Tensor] | None = []
        """The losses that the backward passes of a first step began with; None: they were compared, or cannot be."""
        self._committed: list[Any] = []
        """What these losses should be, by what was committed for the same micro-batches."""
        self._config: Any = config_of(model) if is_megatron(model) else None
        if self._config is not None and self._config.deallocate_pipeline_outputs and last_stage() > 0:
            # A pipeline gives the memory of an output back before its backward pass, so what is left there may be any
            # number.
            self._begun = None
        self._per_token = self._config is not None and bool(self._config.calculate_per_token_loss)
        self.applies = self._config is not None and not self._per_token
        """Whether the loss is scaled here rather than by the training loop."""
        self._own: Callable[[torch.Tensor], torch.Tensor] | None = None
        if self._config is not None:
            own = self._config.grad_scale_func
            # Two models may have the same configuration.
            self._own = own._own if isinstance(own, LossScale) else own
        if self._scaler is not None:
            # Megatron-LM and scripts set the same attribute, possibly of another optimizer.
            self._own = self._scaler.scale_loss

    def begin_call(self, micro_batches: int, *, filling: int = 0) -> None:
        """Scale the losses of the next call of a schedule.

        Args:
            micro_batches: the number that the call computes.
            filling: how many of them, the last ones, only fill the schedule.
        """
        self._factor = micro_batches / self.micro_batches if self.applies else 1.0
        self._computed, self._filling, self._scaled = micro_batches, filling, 0
        if self._config is not None:
            # This is done at each call: a model that was built later may have the same configuration.
            self._config.grad_scale_func = self

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, scaled.

        The schedules call this once for each micro-batch, in order, with its loss; and with a number, of which no
        gradient is asked, for the scale of auxiliary losses, whether there are any or not.

        Raises:
            WrongLoop: more losses come than a call that is filled up computes micro-batches.
        """
        replicas = 1.0 if self._scaler is None else self._scaler.replicas
        scaled = (loss if self._own is None else self._own(loss)) * (self._factor * replicas)
        if not loss.requires_grad:
            return scaled
        if self._begun is not None:
            self._begun.append((loss * self._factor).detach())
        if not self._filling:
            return scaled
        if self._scaled == self._computed:
            raise WrongLoop(
                f"config.grad_scale_func is called for more losses than the {self._computed} micro-batches of a call "
                "that is filled up: scale an auxiliary loss with a number, config.grad_scale_func(torch.ones(1))"
            )
        self._scaled += 1
        return scaled if self._scaled <= self._computed - self._filling else scaled * 0.0

    def committed(self, losses: Sequence[Loss], means: Sequence[Any]) -> list[torch.Tensor]:
        """Note losses that are committed; return the numbers of their tokens if gradients are divided by those.

        Args:
            losses: as the training loop gives them.
            means: the mean of each.

        Raises:
            WrongLoop: some are sums over tokens, and others are not, where that makes a difference.
        """
        tokens = [found for loss in losses if (found := tokens_of(loss)) is not None] if self._per_token else []
        if self._per_token and losses:
            of_sums = len(tokens) == len(losses)
            if (tokens and not of_sums) or self._counts_tokens is (not of_sums):
                raise WrongLoop(
                    "step.commit: with calculate_per_token_loss the loss of each micro-batch is (sum, tokens), or that "
                    "of none is"
                )
            self._counts_tokens = of_sums
        if self._begun is not None and self._config is not None:
            expected = [loss[0] for loss in losses if isinstance(loss, tuple)] if tokens else means
            scale = 1.0 if tokens else 1.0 / self.micro_batches
            self._committed += [noted(one) * scale for one in expected]
        return tokens

    def check(self) -> None:
        """Compare, once, what backward passes began with and what was committed for them; the passes are done.

        If a micro-batch was broken off, they are compared in the next step.

        Raises:
            WrongLoop: they differ by more than a term that is not reported would explain.
        """
        begun, committed = self._begun, self._committed
        if begun is None:
            return
        self._begun, self._committed = [], []
        if len(begun) != len(committed):
            return
        self._begun = None
        values = read(dict(enumerate([*(one.double().reshape(()) for one in begun), *committed])))
        had, wanted = (math.fsum(abs(values[i + first]) for i in range(len(begun))) for first in (0, len(begun)))
        if wanted and not 1.0 / TOLERATED <= had / wanted <= TOLERATED:
            raise WrongLoop(_EXPLAINED[self._per_token, bool(self._counts_tokens)].format(had / wanted))


TOLERATED = 2.0
"""Greatest factor between the loss that a backward pass begins with and the committed one: terms that a loop does not
report (a regularisation) make a small one. A forgotten factor is the number of micro-batches or of tokens."""

_EXPLAINED = {
    (False, False): (
        "gradients would be {:.4g} times those of the committed losses: with calculate_per_token_loss=False the loss "
        "function returns the mean loss, or its sum and the number of tokens, not divided by the micro-batches; and "
        "step.commit takes the mean loss, or (sum, tokens)"
    ),
    (True, False): (
        "gradients would be {:.4g} times those of the committed losses: with calculate_per_token_loss=True and a loss "
        "function that returns sums over tokens, as Megatron's own, give step.commit (sum, tokens); or have the loss "
        "function return the mean loss divided by the micro-batches of a step, and give step.commit the mean loss"
    ),
    (True, True): (
        "gradients would be {:.4g} times those of the committed losses: where step.commit is given (sum, tokens) with "
        "calculate_per_token_loss=True the loss function returns that sum, as Megatron's own, and divides it by nothing"
    ),
}
"""The messages, by whether ``calculate_per_token_loss`` is set, and whether the committed losses are sums over
tokens."""
