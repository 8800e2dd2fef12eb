"""The job under torchrun: a plain data-parallel loop that starts from its newest checkpoint, one every ten steps."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benchmarks.peers.job import Job, PlainGpt, start

CHECKPOINT_EVERY = 10
"""Steps between two checkpoints: a second of training, far more often than is affordable with a large model."""


def main() -> None:
    """Train to the end."""
    start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job = Job()
    gpt = PlainGpt(job)
    path = job.folder / "checkpoint.pt"
    done = 0
    if path.exists():
        state = torch.load(path, weights_only=False)
        gpt.load(state)
        done = state["step"]
    for step in range(done + 1, job.spec.steps + 1):
        gpt.compute(rank, step, job.own(rank, ranks), ranks)
        dist.all_reduce(gpt.gradients)
        gpt.optimizer.step()
        job.note("done", rank=rank, step=step, ranks=ranks)
        if step % CHECKPOINT_EVERY == 0 and rank == 0:
            torch.save({**gpt.state(), "step": step}, f"{path}.partial")
            os.replace(f"{path}.partial", path)
    if rank == 0:
        job.save(gpt.model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
