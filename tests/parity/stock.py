"""One rank of a stock run: plain Megatron, with its own reductions and its own end of a step, without a failure.

    python stock.py SPEC RESULT RANK WORLD_SIZE PORT TENSOR PIPELINE INTERLEAVE

Model, first parameters, optimizer and samples are the built-in trainer's; the loop is as short as Megatron allows. The
parameters go to RESULT (``parameters.safetensors``), and beside it go the loss of the last step and the digest of all
samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron.accounting import EMPTY_DIGEST, chain_digest
from unicron.checkpoint.export import export
from unicron.megatron import cpu
from unicron.megatron.model import config_of, model_chunks
from unicron.trainer import model as gpt
from unicron.trainer import spec
from unicron.trainer.data import Samples


def forward_step(batches: Iterator[dict[str, torch.Tensor]], module: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step, with a loss function of three results: sum, number of tokens, and what to report."""
    batch = next(batches)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = batch["loss_mask"].reshape(-1)
        total = (output.float().reshape(-1) * weights).sum()
        return total, weights.sum().to(torch.int), total.detach() / weights.sum()

    return module(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss


@contextlib.contextmanager
def loss_scaled_as_by_default() -> Iterator[None]:
    """Have Megatron divide the losses of micro-batches by their number, where the trainer's loss function divides them.

    Numbers are then rounded inside a backward pass as the trainer's are. If the totals were divided by the number of
    tokens (``calculate_per_token_loss``), all would be rounded in another way, from the first step on, without a fault.
    """
    from megatron.core import transformer

    megatron: Any = transformer
    config = megatron.TransformerConfig
    megatron.TransformerConfig = lambda **settings: config(**settings | {"calculate_per_token_loss": False})
    try:
        yield
    finally:
        megatron.TransformerConfig = config


def train(task: spec.Spec, samples: Samples, tensor: int, pipeline: int) -> tuple[Any, float, bytes]:
    """Train; return the model, the loss of the last step (known to the last stage), and the digest of all samples."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    with loss_scaled_as_by_default():
        model, optimizer = gpt.build(task, tensor, pipeline)
    gpt.initialise(task, model)
    optimizer.reload_model_params()
    chunks = model_chunks(model)
    config = config_of(model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None
    if chunks[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = chunks[0].no_sync if len(chunks) == 1 else [chunk.no_sync for chunk in chunks]
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    digest, loss = EMPTY_DIGEST, float("nan")
    for step in range(1, task.steps + 1):
        ids = [samples.ids(step, k) for k in range(task.micro_batches)]
        digest = chain_digest(digest, [i for of_one in ids for i in of_one])
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        own = [samples.batch(of_one) for of_one in ids[replica::replicas]]
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(own) for _ in chunks] if len(chunks) > 1 else iter(own),
            model=chunks,
            num_microbatches=len(own),
            seq_length=task.sequence_length,
            micro_batch_size=task.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        total = torch.tensor(sum(float(one) for one in losses), dtype=torch.float64)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        loss = float(total) / task.micro_batches
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:  # the last update is gathered by no forward pass
            chunk.start_param_sync(force_sync=True)
    return model, loss, digest


def main(
    path: str, result: str, rank: int, world_size: int, port: int, tensor: int, pipeline: int, interleave: int
) -> None:
    """Be the rank."""
    from megatron.core import parallel_state

    cpu.enable()
    task = spec.load(path)
    samples = Samples(task, Path(path).parent / "data")  # by itself: in a group, Megatron's ranks would wait for rank 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    virtual = interleave if interleave > 1 else None
    parallel_state.initialize_model_parallel(tensor, pipeline, virtual, create_gloo_process_groups=False)
    model, loss, digest = train(task, samples, tensor, pipeline)
    with ThreadPoolExecutor(1) as thread:
        assert not export(model, Path(result).parent, thread).reason
    dist.barrier()
    ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    if parallel_state.is_pipeline_last_stage() and ranks == (0, 0):  # which knows the loss
        Path(result).with_suffix(".json").write_text(json.dumps({"loss": loss, "samples_sha256": digest.hex()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(number) for number in sys.argv[3:]))
