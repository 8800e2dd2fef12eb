"""The detector's questions to agents over the bus, and to nodes by itself: what they reach, and what their ranks do."""

from __future__ import annotations

from services.detector.probing import DETECTOR, ProbeQuestion
from services.detector.standstill import StacksQuestion
from shared import probes
from shared.bus import Bus
from shared.dropped import DroppedMessages
from shared.errors import Unavailable, Undecodable
from shared.messages import decode
from shared.probes import PROBE, PROBE_REPLY, Outcome, ProbeRequest
from shared.stacks import STACKS, STACKS_REPLY, StacksReply, StacksRequest

REPLY_S = 1.0
"""Time for a request and for its reply, beside the time-out that the request itself has: a round trip with a delay of
0.2 s in each direction, and the repetition of a segment that was lost. With less, a witness in such a network that
waits for the whole time-out of a probe would answer too late, and could never say that a node is silent."""


async def probe(
    bus: Bus, question: ProbeQuestion, dropped: DroppedMessages
) -> tuple[dict[str, Outcome], dict[str, float]]:
    """Have a question answered, by this process or by an agent; nothing is known if the agent does not answer.

    Returns:
        Node -> outcome; and node -> round trip in seconds, of those that were measured.
    """
    if question.witness == DETECTOR:
        return await probes.probe(question.peers, question.timeout_s), {}
    subject = f"{PROBE}.{question.witness}"
    request = ProbeRequest(peers=dict(question.peers), timeout_s=question.timeout_s)
    limit_s = question.timeout_s + REPLY_S
    try:
        answer = await bus.request(subject, request.model_dump_json().encode(), timeout_s=limit_s)
        reply = decode(PROBE_REPLY, answer)
    except Unavailable:
        return {}, {}
    except Undecodable as err:
        dropped.note(subject, err)
        return {}, {}
    return reply.known(), reply.round_trips_s


async def stacks(bus: Bus, question: StacksQuestion, dropped: DroppedMessages) -> StacksReply | None:
    """Return what the ranks of a node do; None if the agent does not answer, as one of an older version does not."""
    subject = f"{STACKS}.{question.node}"
    request = StacksRequest(task=question.task, generation=question.generation, timeout_s=question.timeout_s)
    limit_s = question.timeout_s + REPLY_S
    try:
        answer = await bus.request(subject, request.model_dump_json().encode(), timeout_s=limit_s)
        return decode(STACKS_REPLY, answer)
    except Unavailable:
        return None
    except Undecodable as err:
        dropped.note(subject, err)
        return None
