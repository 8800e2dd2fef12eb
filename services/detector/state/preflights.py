"""The newest preflight of a node, as the detector knows it: part of its state that follows from the log."""

from __future__ import annotations

from dataclasses import dataclass

from shared.events.node_events import NodeMeasured


@dataclass(slots=True)
class Preflight:
    """What a node's newest preflight has come to.

    Attributes:
        event: the event.
        overruled: whether an operator uses the node though it was refused.
    """

    event: NodeMeasured
    overruled: bool = False

    @property
    def refuses(self) -> bool:
        """Whether the node may not join."""
        return self.event.verdict == "refused" and not self.overruled

    def is_of(self, incarnation: str, supervisor: str) -> bool:
        """Return whether it is that of this agent, or of one before it that had the same supervisor."""
        own = incarnation == self.event.incarnation
        return own or (bool(supervisor) and supervisor == self.event.supervisor)
