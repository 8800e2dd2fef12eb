"""The losses that Megatron-LM reports: sums over tokens and their numbers, over the whole global batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unicron import device
from unicron.losses import Loss
from unicron.megatron.parallel import data_group
from unicron.training.step import Step

DEFAULT = ("lm loss",)
"""The report of a process in which no micro-batch was ever computed."""


def averaging(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return Megatron-LM's ``average_losses_across_data_parallel_group`` without a collective in the passes of a step.

    A loss function may call it for each micro-batch, as that of ``pretrain_bert.py`` does. After a fault replicas have
    different numbers of micro-batches, and one would wait for another in vain; ``Reports`` averages over the replicas
    behind the passes. An evaluation is as in stock: it computes without gradients, by which it is told here, and each
    replica has as many micro-batches.
    """

    @functools.wraps(function)
    def averaged(losses: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            return torch.cat([loss.detach().clone().view(1) for loss in losses])
        return function(losses, *args, **kwargs)

    return averaged


class Reports:
    """The reports of one rank, for each micro-batch of a step."""

    def __init__(self) -> None:
        """Begin."""
        self._names: tuple[str, ...] = DEFAULT
        self._step = 0
        self._of: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, step: Step, micro_batch: int, report: dict[str, torch.Tensor]) -> Loss:
        """Note what a micro-batch reports; return its loss, the first thing that it reports."""
        if self._step != step.number:
            self._step, self._of = step.number, {}
        self._of[micro_batch], self._names = report, tuple(report)
        first = next(iter(report.values()))
        return (first[0], first[1]) if first.numel() == 2 else first

    def of_step(self, step: Step, micro_batches: int) -> dict[str, torch.Tensor]:
        """Return what ``train()`` is to log of a step of some micro-batches, on the last stage; all ranks call it.

        As in Megatron-LM, sums and tokens are added up on each rank, and then over the replicas. If some micro-batch
        was not computed once by a rank that is still here, the step's mean loss takes the place of all reports.

        Raises:
            RuntimeError: a peer was lost.
        """
        from megatron.core import parallel_state

        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        own = self._of if self._step == step.number else {}
        order = sorted(own)
        found = {}
        for name in self._names:
            values = [own[k][name] for k in order]
            summed = torch.zeros(2, dtype=torch.float32, device=device.current())
            if values and values[0].numel() == 2:
                summed = torch.vstack(values).sum(dim=0)
            elif values:
                summed = torch.stack([torch.cat(values).sum(), torch.ones_like(values[0][0]) * len(values)])
            total = torch.cat([summed, summed.new_full((1,), len(values))])
            if dist.get_world_size(data_group()) > 1:
                dist.all_reduce(total, group=data_group())
            complete = int(total[2]) == micro_batches
            found[name] = total[0] / total[1] if complete else torch.tensor(step.loss, device=total.device)
        return found
