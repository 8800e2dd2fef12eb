"""What ``benchmarks.overhead`` trains: a GPT of Megatron's, by a step of stock Megatron's and by one of this library's.

Both models have the same shape, data, loss function and schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import unicron

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What each rank computes in a step."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    sequence_length: int = 128
    samples: int = 1
    """In a micro-batch."""
    micro_batches: int = 2
    """Of each replica."""
    ranks: int = 2
    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @property
    def all_micro_batches(self) -> int:
        """M, the micro-batches of all replicas in a step."""
        return self.micro_batches * self.ranks // (self.tensor * self.pipeline)


def build(work: Workload, tensor: int, pipeline: int) -> tuple[Any, Any]:
    """Return Megatron's model and optimizer, with Megatron's defaults."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=work.layers,
        hidden_size=work.hidden,
        num_attention_heads=work.heads,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=work.sequence_parallel,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=work.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=work.distributed_optimizer)
    model = DistributedDataParallel(config, ddp, module)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0, use_distributed_optimizer=work.distributed_optimizer),
        [model],
        use_gloo_process_groups=False,
    )
    return model, optimizer


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens, positions and labels of a micro-batch."""


def batch(work: Workload, step: int, micro_batch: int) -> Batch:
    """Return a micro-batch of random tokens."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    tokens = torch.randint(VOCABULARY, (work.samples, work.sequence_length + 1), generator=generator)
    positions = torch.arange(work.sequence_length).expand(work.samples, -1)
    return tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous()


def compute(
    work: Workload, model: Any, batches: list[Batch], done: Callable[[torch.Tensor | None], None] | None = None
) -> list[torch.Tensor]:
    """Compute some micro-batches in one call of Megatron's schedule.

    Args:
        work: the workload.
        model: Megatron's DistributedDataParallel.
        batches: one for each micro-batch.
        done: called after the backward pass of each with its loss, which only a pipeline's last stage knows.

    Returns:
        The mean loss of each micro-batch; empty on a stage before the last.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses: list[torch.Tensor] = []
    computed = iter(range(len(batches)))

    def forward_step(iterator: Iterator[Batch], module: Any) -> tuple[torch.Tensor, Any]:
        tokens, positions, labels = next(iterator)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total = output.float().sum()
            losses.append(total.detach() / labels.numel())
            return total, torch.tensor(labels.numel(), dtype=torch.int), losses[-1]

        return module(tokens, positions, None, labels=labels), loss

    def backward_done() -> None:
        i = next(computed)
        if done is not None:
            done(losses[i] if losses else None)

    with unicron.each_backward(model, backward_done) if done is not None else nullcontext():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=work.sequence_length,
            micro_batch_size=work.samples,
            forward_only=False,
        )
    return losses


def stock(work: Workload) -> tuple[Any, Any]:
    """Return model and optimizer as Megatron's own training loop sets them up."""
    from megatron.core.distributed import finalize_model_grads

    model, optimizer = build(work, work.tensor, work.pipeline)
    model.config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer


def stock_step(work: Workload, model: Any, optimizer: Any, step: int) -> None:
    """Do a step as Megatron's own training loop does."""
    from megatron.core import parallel_state

    replicas = parallel_state.get_data_parallel_group()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    ks = range(replicas.rank(), work.all_micro_batches, replicas.size())
    losses = compute(work, model, [batch(work, step, k) for k in ks])
    optimizer.step()
    if losses:
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean, group=replicas)  # Megatron's loop averages the loss over the replicas, to log it
        float(mean)


def our_step(work: Workload, run: unicron.Run, step: unicron.Step) -> None:
    """Do a step of this library's loop, as docs/integrating.md has it."""

    def ids(k: int) -> list[int]:
        return [step.number * work.all_micro_batches + k]

    with step:
        if work.pipeline > 1:
            order = iter(ks := step.all_micro_batches())

            def done(loss: torch.Tensor | None) -> None:
                k = next(order)
                step.commit(k, None if loss is None else float(loss), ids(k))

            compute(work, run.model, [batch(work, step.number, k) for k in ks], done)
        else:
            for k in step.micro_batches():
                (loss,) = compute(work, run.model, [batch(work, step.number, k)])
                step.commit(k, float(loss), ids(k))
        step.reduce()
        run.optimizer.step()
