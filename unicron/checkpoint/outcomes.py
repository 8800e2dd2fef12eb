"""The reports of checkpoints to the agent."""

from __future__ import annotations

from unicron.checkpoint.writer import Outcomes
from unicron.link import reporting
from unicron.link.agent_link import AgentLink
from unicron.protocol.messages import Checkpointed, CheckpointFailed, Configure


def reported_to(link: AgentLink, configure: Configure) -> Outcomes:
    """Return the receiver that reports the outcome of a checkpoint of a generation to the agent."""

    def published(step: int, location: str) -> None:
        link.send(Checkpointed(generation=configure.generation, step=step, path=location))

    def failed(step: int, reason: str) -> None:
        reason = reason[: reporting.DETAIL_CHARACTERS]
        link.send(CheckpointFailed(generation=configure.generation, rank=configure.rank, step=step, reason=reason))

    return Outcomes(published, failed)
