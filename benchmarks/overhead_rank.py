"""One rank of ``benchmarks.overhead``: steps of stock Megatron and steps of this library, in turns.

``benchmarks/ranks.py`` starts it, with the folder of the run and a workload as arguments. Both models have the same
shape, data, loss function and schedule. In each pair the two take turns at who is first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unicron
from benchmarks.intervals import median_interval

SETTLING_PAIRS = 5
"""Pairs at the beginning that do not count: memory is allocated and caches are filled."""

CHECKED_EVERY = 50
"""Pairs between two looks at whether the interval is narrow enough."""

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What each rank computes in a step."""

    layers: int
    hidden: int
    heads: int
    sequence_length: int
    samples: int
    """In a micro-batch."""
    micro_batches: int
    """Of each rank."""
    distributed_optimizer: bool = False
    most_pairs: int
    """Pairs of steps after which the measurement ends, however wide the interval is."""
    width: float
    """Width of the 95% interval of the ratio of times at which the measurement ends."""


def build(work: Workload, tensor: int, pipeline: int) -> tuple[Any, Any]:
    """Return Megatron's model and optimizer, with Megatron's defaults."""
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


def batch(work: Workload, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions and labels of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    tokens = torch.randint(VOCABULARY, (work.samples, work.sequence_length + 1), generator=generator)
    positions = torch.arange(work.sequence_length).expand(work.samples, -1)
    return tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous()


def forward_step(batches: Iterator[tuple[torch.Tensor, ...]], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step."""
    tokens, positions, labels = next(batches)

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = losses.float().sum()
        return total, torch.tensor(labels.numel(), dtype=torch.int), total.detach() / labels.numel()

    return model(tokens, positions, None, labels=labels), loss


def compute(work: Workload, model: Any, batches: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Compute some micro-batches in one call of Megatron's schedule; return their losses."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=work.sequence_length,
        micro_batch_size=work.samples,
        forward_only=False,
    )
    return losses


def stock_step(work: Workload, model: Any, optimizer: Any, rank: int, step: int) -> None:
    """Do a step as Megatron's own training loop does."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    ks = range(rank, work.micro_batches * dist.get_world_size(), dist.get_world_size())
    losses = compute(work, model, [batch(work, step, k) for k in ks])
    optimizer.step()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)  # Megatron's loop averages the loss over the replicas, to log it
    float(mean)


def our_step(work: Workload, run: unicron.Run, step: unicron.Step) -> None:
    """Do a step of this library's loop."""
    with step:
        for k in step.micro_batches():
            (loss,) = compute(work, run.model, [batch(work, step.number, k)])
            step.commit(k, float(loss), [step.number * micro_batches_of_step(work) + k])
        step.reduce()
        run.optimizer.step()


def micro_batches_of_step(work: Workload) -> int:
    """Return M, the micro-batches of all ranks in a step."""
    return work.micro_batches * int(os.environ["WORLD_SIZE"])


def timed(work: Callable[[], None]) -> dict[str, float]:
    """Return the wall time and the CPU-seconds of this rank's part of a step."""
    dist.barrier()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return {"s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}


def measure(work: Workload, folder: Path) -> list[dict[str, dict[str, float]]]:
    """Train both; return the times of each pair of steps."""
    from megatron.core.distributed import finalize_model_grads

    rank = int(os.environ["RANK"])
    run = unicron.attach(
        steps=SETTLING_PAIRS + work.most_pairs,
        micro_batches=micro_batches_of_step(work),
        build=partial(build, work),
        directory=str(folder),
    )
    pairs: list[dict[str, dict[str, float]]] = []
    stock: tuple[Any, Any] | None = None
    for step in run.steps():
        if stock is None:
            stock = build(work, 1, 1)
            stock[0].config.finalize_model_grads_func = finalize_model_grads
        ways = {
            "stock": partial(stock_step, work, *stock, rank, step.number),
            "ours": partial(our_step, work, run, step),
        }
        order = list(ways) if step.number % 2 else list(ways)[::-1]
        pair = {way: timed(ways[way]) for way in order}
        if step.number > SETTLING_PAIRS:
            pairs.append(pair)
        if len(pairs) % CHECKED_EVERY == 0 and pairs and _is_enough(work, pairs):
            break
    return pairs


def _is_enough(work: Workload, pairs: list[dict[str, dict[str, float]]]) -> bool:
    """Return whether rank 0's interval is narrow enough."""
    _, low, high = median_interval([pair["ours"]["s"] / pair["stock"]["s"] for pair in pairs])
    enough = torch.tensor([float(high - low <= work.width)])
    dist.broadcast(enough, 0)
    return bool(enough)


def main(folder: Path) -> None:
    """Measure as one rank."""
    torch.set_num_threads(1)
    work = Workload(**json.loads((folder / "workload.json").read_text()))
    pairs = measure(work, folder)
    rank = os.environ["RANK"]
    (folder / f"rank-{rank}.json").write_text(json.dumps(pairs))
    sys.stdout.flush()
    os._exit(0)  # the run has not come to its last step


if __name__ == "__main__":
    main(Path(sys.argv[1]))
