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
    interleave: int = 1
    """Model chunks of each pipeline stage."""
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    """Whether gradients are reduced beside the last backward pass and, where the optimizer is distributed, parameters
    gathered beside the next forward."""
    bucket: int = 200_000
    """Gradients in one of Megatron's buckets where reductions overlap: five buckets of the small model. Megatron's
    default is 40 million."""

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered beside the forward pass."""
        return self.overlap and self.distributed_optimizer

    @property
    def all_micro_batches(self) -> int:
        """M, the micro-batches of all replicas in a step."""
        return self.micro_batches * self.ranks // (self.tensor * self.pipeline)


def build(work: Workload, tensor: int, pipeline: int) -> tuple[Any, Any]:
    """Return Megatron's model, of an interleaved pipeline its chunks, and optimizer, with Megatron's defaults."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(1)
    interleaved = work.interleave > 1
    config = TransformerConfig(
        num_layers=work.layers,
        hidden_size=work.hidden,
        num_attention_heads=work.heads,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=work.interleave if interleaved else None,
        # With Megatron's default two interleaved stages train to a wrong result on gloo.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
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
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=work.overlap,
        overlap_param_gather=work.gathers,
        use_distributed_optimizer=work.distributed_optimizer,
        bucket_size=work.bucket if work.overlap else None,
    )
    chunks = [
        DistributedDataParallel(config, ddp, _module(work, config, number if interleaved else None))
        for number in range(work.interleave)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            clip_grad=1.0,
            use_distributed_optimizer=work.distributed_optimizer,
            overlap_param_gather=work.gathers,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    return (chunks if interleaved else chunks[0]), optimizer


def _module(work: Workload, config: Any, virtual_stage: int | None) -> Any:
    """Return a rank's GPT, or one chunk of it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=work.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
        vp_stage=virtual_stage,
    )


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens, positions and labels of a micro-batch."""


def batch(work: Workload, step: int, micro_batch: int) -> Batch:
    """Return a micro-batch of random tokens."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    tokens = torch.randint(VOCABULARY, (work.samples, work.sequence_length + 1), generator=generator)
    positions = torch.arange(work.sequence_length).expand(work.samples, -1)
    return tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous()


def compute(work: Workload, model: Any, batches: list[Batch], done: Callable[..., None] | None = None) -> list[Any]:
    """Compute some micro-batches in one call of Megatron's schedule.

    Args:
        work: the workload.
        model: Megatron's DistributedDataParallel, or a list of chunks.
        batches: one for each micro-batch.
        done: called after the backward pass of each with its place in ``batches``, its loss, which only a pipeline's
            last stage knows, and the number of the chunk, where there are several.

    Returns:
        The mean loss of each micro-batch; empty on a stage before the last.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses: list[torch.Tensor] = []
    chunks = model if isinstance(model, list) else [model]
    computed = [iter(range(len(batches))) for _ in chunks]

    def forward_step(iterator: Iterator[Batch], module: Any) -> tuple[torch.Tensor, Any]:
        tokens, positions, labels = next(iterator)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total = output.float().sum()
            losses.append(total.detach() / labels.numel())
            return total, torch.tensor(labels.numel(), dtype=torch.int), losses[-1]

        return module(tokens, positions, None, labels=labels), loss

    def backward_done(*chunk: int) -> None:
        i = next(computed[chunk[0] if chunk else 0])
        if done is not None:
            done(i, losses[i] if losses else None, *chunk)

    with unicron.each_backward(model, backward_done) if done is not None else nullcontext():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks,
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
    config = (model[0] if isinstance(model, list) else model).config
    config.finalize_model_grads_func = finalize_model_grads
    if work.overlap:
        config.no_sync_func = model.no_sync
    if work.gathers:
        config.param_sync_func = model.start_param_sync
    return model, optimizer


def stock_step(work: Workload, model: Any, optimizer: Any, step: int) -> None:
    """Do a step as Megatron's own training loop does."""
    from megatron.core import parallel_state

    replicas = parallel_state.get_data_parallel_group()
    for chunk in model if isinstance(model, list) else [model]:
        chunk.zero_grad_buffer()
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
            ks = step.all_micro_batches()

            def done(i: int, loss: torch.Tensor | None, chunk: int | None = None) -> None:
                step.commit(ks[i], loss, ids(ks[i]), chunk)

            compute(work, run.model, [batch(work, step.number, k) for k in ks], done)
        else:
            for k in step.micro_batches():
                (loss,) = compute(work, run.model, [batch(work, step.number, k)])
                step.commit(k, loss, ids(k))
        step.reduce()
        run.optimizer.step()
