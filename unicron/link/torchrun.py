"""Training without a node agent, and torchrun's environment variables: read there, set for scripts where there is one.

Scripts read them to choose a device or to have one process of a node do something. Under an agent they tell the present
generation, and change with it; ``run.generation`` tells the same to code that follows the changes.
"""

from __future__ import annotations

import os

from unicron import device
from unicron.protocol import environment
from unicron.protocol.messages import Configure


def variables_of(configure: Configure, *, one_device: bool) -> dict[str, str]:
    """Return the variables of one rank in a generation.

    Args:
        configure: the generation.
        one_device: whether each process sees one device, which is then number 0 for all of them.
    """
    nodes = [str(worker).rpartition("/")[0] for _, worker, _ in configure.members]
    own = nodes[configure.rank]
    found = {
        environment.RANK: configure.rank,
        environment.WORLD_SIZE: configure.world_size,
        environment.LOCAL_RANK: 0 if one_device else nodes[: configure.rank].count(own),
        environment.LOCAL_WORLD_SIZE: nodes.count(own),
        environment.GROUP_RANK: list(dict.fromkeys(nodes)).index(own),
        environment.GROUP_WORLD_SIZE: len(set(nodes)),
        environment.MASTER_ADDR: configure.store_host,
        environment.MASTER_PORT: configure.store_port,
        environment.GENERATION: configure.generation,
    }
    return {name: str(value) for name, value in found.items()}


def publish(configure: Configure) -> None:
    """Set the variables to those of a generation that this process joins."""
    os.environ.update(variables_of(configure, one_device=device.is_cuda()))


def value(name: str, default: str = "") -> str:
    """Return a variable that torchrun has set for this process.

    A process that a script has started under an agent inherits those of a rank, which say nothing about it.
    """
    inherited = environment.GENERATION in os.environ and environment.TORCHRUN_ID not in os.environ
    return default if inherited else environment.text(name, default)


def standalone_generation(directory: str, *, tensor: int = 1, pipeline: int = 1, resume: str = "") -> Configure:
    """Return the generation that torchrun's environment describes; without that environment, one of a single rank.

    Args:
        directory: where the generation writes.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        resume: the checkpoint to start from; empty: the initial state.
    """
    rank = int(value(environment.RANK, "0"))
    size = int(value(environment.WORLD_SIZE, "1"))
    source = "checkpoint" if resume else "initial"
    return Configure(
        generation=1,
        stage="boundary",
        rank=rank,
        world_size=size,
        tensor=tensor,
        pipeline=pipeline,
        store_host=value(environment.MASTER_ADDR, "127.0.0.1"),
        store_port=int(value(environment.MASTER_PORT, "0")) if size > 1 else 0,
        members=[[r, str(r), source] for r in range(size)],
        checkpoint=resume,
        directory=directory,
    )
