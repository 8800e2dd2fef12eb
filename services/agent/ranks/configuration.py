"""What a rank is told to join a stage: the command of the transition service, as a message to the rank."""

from __future__ import annotations

from shared.messages.commands import ConfigureTask
from unicron.protocol import messages


def configure_message(command: ConfigureTask, rank: int, directory: str) -> messages.Configure:
    """Return the message to the process of a rank.

    Args:
        command: what is to be formed.
        rank: the receiver's.
        directory: where the generation writes.
    """
    stage = command.stage
    return messages.Configure(
        generation=stage.generation,
        stage=stage.kind,
        rank=rank,
        world_size=stage.layout.world_size,
        tensor=stage.layout.tensor,
        pipeline=stage.layout.pipeline,
        store_host=command.store_host,
        store_port=command.store_port,
        members=[[m.rank, m.worker, m.source] for m in sorted(stage.members, key=lambda m: m.rank)],
        checkpoint=stage.checkpoint,
        complete=stage.complete,
        directory=directory,
        fault_step=command.fault_step,
        shares=stage.shares,
        identity=command.identity,
    )
