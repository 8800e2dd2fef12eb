"""Train a small network with plain PyTorch; lines that Unicron needs are marked.

    python examples/plain_pytorch.py                                       # alone
    torchrun --nproc-per-node 2 examples/plain_pytorch.py                  # data parallel, without healing
    unicron submit examples/plain-pytorch.yaml                             # on a cluster, healing

The parameters at the end are the same each time, to rounding.
"""

from __future__ import annotations

import torch

import unicron  # +

STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE = 200, 8, 16
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(4096, 32, generator=generator)
targets = torch.sin(inputs @ torch.randn(32, 1, generator=generator))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(tensor: int, pipeline: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # +
    """Return model and optimizer; a plain module is not split, so both sizes are 1."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def sample_ids(step: int, micro_batch: int) -> list[int]:
    """Return the samples of a micro-batch: of step and number alone, so that any process can compute it."""
    first = ((step - 1) * MICRO_BATCHES + micro_batch) * MICRO_BATCH_SIZE
    return [i % len(inputs) for i in range(first, first + MICRO_BATCH_SIZE)]


run = unicron.attach(steps=STEPS, micro_batches=MICRO_BATCHES, build=build, checkpoint_every=50)  # +
for step in run.steps():  # + in place of `for step in range(STEPS)`
    with step:  # +
        for k in step.micro_batches():  # + in place of `for k in range(rank, MICRO_BATCHES, world_size)`
            ids = sample_ids(step.number, k)
            loss: torch.Tensor = torch.nn.functional.mse_loss(
                run.model(inputs[ids].to(device)), targets[ids].to(device)
            )
            torch.autograd.backward(loss / MICRO_BATCHES)
            step.commit(k, loss, ids)  # +
        step.reduce()  # + in place of DistributedDataParallel's all-reduce
        run.optimizer.step()
    if step.completed and step.number % 50 == 0 and run.generation.rank == 0:
        print(f"step {step.number}: loss {step.loss:.5f} on {run.generation.world_size} processes", flush=True)
