"""Requests of the detector to agents, but for probes (``prober.py``): what their ranks do. Part of the shell."""

from __future__ import annotations

from services.detector.standstill import StacksQuestion
from shared.bus import Bus
from shared.dropped import DroppedMessages
from shared.errors import Unavailable, Undecodable
from shared.messages import decode
from shared.stacks import STACKS, STACKS_REPLY, StacksReply, StacksRequest

REPLY_S = 1.0
"""Time for a request and for its reply, beside the time-out that the request itself has: as in ``prober.py``."""


class AgentRequests:
    """Asks agents over the bus.

    Args:
        bus: connected.
        dropped: counts answers that cannot be read.
    """

    def __init__(self, bus: Bus, dropped: DroppedMessages) -> None:
        self._bus, self._dropped = bus, dropped

    async def stacks(self, question: StacksQuestion) -> StacksReply | None:
        """Return what the ranks of a node do; None if it does not answer, as an agent of an older version does not."""
        subject = f"{STACKS}.{question.node}"
        request = StacksRequest(task=question.task, generation=question.generation, timeout_s=question.timeout_s)
        limit_s = question.timeout_s + REPLY_S
        try:
            answer = await self._bus.request(subject, request.model_dump_json().encode(), timeout_s=limit_s)
            return decode(STACKS_REPLY, answer)
        except Unavailable:
            return None
        except Undecodable as err:
            self._dropped.note(subject, err)
            return None
