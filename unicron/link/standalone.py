"""The one generation of a process without a node agent: the process by itself, or as one of torchrun's."""

from __future__ import annotations

from unicron.link import torchrun
from unicron.protocol import environment
from unicron.protocol.messages import Configure


def standalone_generation(directory: str, *, tensor: int = 1, pipeline: int = 1, resume: str = "") -> Configure:
    """Return the generation that torchrun's environment describes; without that environment, one of a single rank.

    Args:
        directory: where the generation writes.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        resume: the checkpoint to start from; empty: the initial state.
    """
    rank = int(torchrun.value(environment.RANK, "0"))
    size = int(torchrun.value(environment.WORLD_SIZE, "1"))
    source = "checkpoint" if resume else "initial"
    return Configure(
        generation=1,
        stage="boundary",
        rank=rank,
        world_size=size,
        tensor=tensor,
        pipeline=pipeline,
        store_host=torchrun.value(environment.MASTER_ADDR, "127.0.0.1"),
        store_port=int(torchrun.value(environment.MASTER_PORT, "0")) if size > 1 else 0,
        members=[[r, str(r), source] for r in range(size)],
        checkpoint=resume,
        directory=directory,
    )
