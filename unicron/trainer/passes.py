"""Forward and backward passes of the built-in trainer: loss and gradients of micro-batches, by Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from unicron import device
from unicron.megatron.model import model_chunks
from unicron.megatron.schedule import each_backward
from unicron.trainer.dropout import Dropout
from unicron.trainer.spec import Spec


def forward_backward(
    spec: Spec,
    model: Any,
    dropout: Dropout,
    step: int,
    batches: list[tuple[int, dict[str, torch.Tensor]]],
    done: Callable[..., None],
) -> None:
    """Compute loss and gradients of micro-batches with Megatron's schedule.

    Gradients are scaled by 1/M, where M is the number of micro-batches in the global batch, and added to ``main_grad``
    of the parameters.

    Args:
        spec: the task.
        model: the rank's model: a module, or the model chunks of an interleaved pipeline.
        dropout: reseeds the random generators.
        step: counts from 1.
        batches: micro-batch and its samples (``Samples.batch``), in the order of computation.
        done: called after the backward pass of each micro-batch, with its number and the mean loss over its tokens; the
            loss is None on ranks that are not in a pipeline's last stage. With several model chunks it also gets the
            number of the one that has computed.

    Raises:
        RuntimeError: a peer of the pipeline or the tensor-parallel group was lost.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    target = device.current()
    losses: list[torch.Tensor] = []
    chunks = len(model_chunks(model))
    orders = [iter(enumerate(batches)) for _ in range(chunks)]

    def backward_done(*chunk: int) -> None:
        i, (micro_batch, _) = next(orders[chunk[0] if chunk else 0])
        done(micro_batch, losses[i] if losses else None, *chunk)

    def loss_function(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        token_losses = output.float().reshape(-1)
        weights = mask.reshape(-1)
        loss = (token_losses * weights).sum() / weights.sum().clamp(min=1.0)
        # A detached clone: the schedule may scale the loss in place.
        losses.append(loss.detach().clone())
        return loss / spec.micro_batches, weights.sum().to(torch.int), losses[-1]

    def forward_step(iterator: Any, module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro_batch, batch = next(iterator)
        dropout.set_micro_batch(step, micro_batch)
        batch = {k: v.to(target) for k, v in batch.items()}
        output = module(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(loss_function, batch["loss_mask"])

    with each_backward(model, backward_done):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in range(chunks)] if chunks > 1 else iter(batches),
            model=model_chunks(model),
            num_microbatches=len(batches),
            seq_length=spec.sequence_length,
            micro_batch_size=spec.micro_batch,
            forward_only=False,
        )
