"""Train a GPT with Megatron-core in a loop of one's own; lines that Unicron needs are marked.

    python examples/megatron_gpt.py                                        # alone
    torchrun --nproc-per-node 2 examples/megatron_gpt.py                   # data parallel, without healing
    unicron submit examples/megatron-gpt.yaml                              # on a cluster, healing

Model, optimizer, data and schedule are Megatron's, as in its own examples. Without a GPU, ``unicron.attach`` makes
megatron-core run on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import unicron  # +

STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 60, 8, 2
LAYERS, HIDDEN, HEADS, SEQUENCE_LENGTH, VOCABULARY = 2, 64, 4, 32, 128


def build(tensor: int, pipeline: int) -> tuple[Any, Any]:  # + called in Megatron's process groups
    """Return the rank's model and optimizer for these parallel sizes."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
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
        max_sequence_length=SEQUENCE_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to("cuda" if torch.cuda.is_available() else "cpu")
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    model = DistributedDataParallel(config, ddp, module)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=2e-3, weight_decay=0.01, clip_grad=1.0),
        [model],
        use_gloo_process_groups=False,
    )
    return model, optimizer


def sample_ids(step: int, micro_batch: int) -> list[int]:
    """Return the samples of a micro-batch: of step and number alone, so that any rank can compute it."""
    first = ((step - 1) * MICRO_BATCHES + micro_batch) * MICRO_BATCH_SIZE
    return list(range(first, first + MICRO_BATCH_SIZE))


def batch(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions and labels: sequences that count on from the sample's number."""
    positions = torch.arange(SEQUENCE_LENGTH).expand(len(ids), -1)
    tokens = (torch.tensor(ids)[:, None] * 7 + torch.arange(SEQUENCE_LENGTH + 1)) % VOCABULARY
    where = "cuda" if torch.cuda.is_available() else "cpu"
    return tokens[:, :-1].contiguous().to(where), positions.to(where), tokens[:, 1:].contiguous().to(where)


def forward_step(batches: Iterator[tuple[torch.Tensor, ...]], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step: the output, and the function that makes it a loss."""
    tokens, positions, labels = next(batches)
    return model(tokens, positions, None, labels=labels), partial(loss_function, labels)


def forward_backward(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """Compute one micro-batch by Megatron's schedule; return its loss on the pipeline's last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    schedule = get_forward_backward_func()
    losses: list[torch.Tensor] = schedule(
        forward_step_func=forward_step,
        data_iterator=iter([batch(ids)]),
        model=[model],
        num_microbatches=1,
        seq_length=SEQUENCE_LENGTH,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_only=False,
    )
    return losses


def loss_function(labels: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum over the tokens, their number, and the loss to report."""
    total = losses.float().sum()
    return total, torch.tensor(labels.numel(), dtype=torch.int), total.detach() / labels.numel()


run = unicron.attach(steps=STEPS, micro_batches=MICRO_BATCHES, build=build, checkpoint_every=20)  # +
for step in run.steps():  # + in place of `for iteration in range(STEPS)`
    with step:  # +
        for k in step.micro_batches():  # + in place of one call with all of the replica's micro-batches
            ids = sample_ids(step.number, k)
            losses = forward_backward(run.model, ids)
            step.commit(k, losses[0] if losses else None, ids)  # +
        step.reduce()  # + in place of finalize_model_grads
        run.optimizer.step()
    if step.completed and step.number % 20 == 0 and run.generation.rank == 0:
        print(f"step {step.number}: loss {step.loss:.5f} on {run.generation.world_size} processes", flush=True)
