"""Requests of the detector to agents: probes of others, self-tests, the end of left-behind ranks. Part of the shell."""

from __future__ import annotations

import logging
import uuid

from services.detector.leftovers import Clean
from services.detector.probing import ProbeQuestion
from services.detector.return_state import SelfTestQuestion
from shared.bus import Bus
from shared.commands import LEFTOVERS, REPLY, ReleaseTask
from shared.dropped import DroppedMessages
from shared.errors import Unavailable, Undecodable
from shared.log_lines import ids
from shared.messages import decode
from shared.probes import PROBE, PROBE_REPLY, Outcome, ProbeRequest
from shared.self_test import SelfTestResult, run_self_test

logger = logging.getLogger(__name__)

CLEAN_TIMEOUT_S = 5.0
"""Time-out of the request to end left-behind ranks. The agent kills them, and answers within its own grace."""

PROBE_REPLY_S = 1.0
"""Time for a request to probe and for its reply, beside the probe's own time-out: a round trip with a delay of 0.2 s in
each direction, and the repetition of a segment that was lost. With less, a witness in such a network that waits for the
whole time-out of a probe would answer too late, and could never say that a node is silent."""


class AgentRequests:
    """Asks agents over the bus.

    Args:
        bus: connected.
        dropped: counts answers that cannot be read.
    """

    def __init__(self, bus: Bus, dropped: DroppedMessages) -> None:
        self._bus, self._dropped = bus, dropped

    async def witness(self, question: ProbeQuestion) -> tuple[dict[str, Outcome], dict[str, float]]:
        """Return what an agent found out, and the round trips in seconds; nothing if it does not answer."""
        subject = f"{PROBE}.{question.witness}"
        request = ProbeRequest(peers=dict(question.peers), timeout_s=question.timeout_s)
        limit_s = question.timeout_s + PROBE_REPLY_S
        try:
            answer = await self._bus.request(subject, request.model_dump_json().encode(), timeout_s=limit_s)
            reply = decode(PROBE_REPLY, answer)
        except Unavailable:
            return {}, {}
        except Undecodable as err:
            self._dropped.note(subject, err)
            return {}, {}
        return reply.known(), reply.round_trips_s

    async def self_test(self, question: SelfTestQuestion) -> SelfTestResult | None:
        """Return what an agent's self-test found; None if it does not answer."""
        try:
            return await run_self_test(self._bus, question.node, question.peers, empty=True)
        except Unavailable as err:
            logger.warning("%s", err.detail)
            return None

    async def clean(self, clean: Clean) -> None:
        """Send a request to end left-behind ranks. A node that does not do it is asked again later."""
        command = ReleaseTask(
            command_id=str(uuid.uuid4()),
            plan=f"clean/{clean.node}",
            task=clean.task,
            generation=clean.generation,
            workers=clean.workers,
        )
        subject = f"{LEFTOVERS}.{clean.node}"
        try:
            answer = await self._bus.request(subject, command.model_dump_json().encode(), timeout_s=CLEAN_TIMEOUT_S)
            reply = decode(REPLY, answer)
        except Unavailable as err:
            logger.warning("node %s is back and not clean yet: %s", clean.node, err.detail, extra=ids(clean))
            return
        except Undecodable as err:
            self._dropped.note(subject, err)
            return
        if not reply.ok:
            logger.warning(
                "node %s is back and does not end %s: %s %s", clean.node, clean.task, reply.code, reply.detail
            )
