"""The agent's admission to the cluster: asked of the detector before the agent does anything else."""

from __future__ import annotations

import asyncio
import logging

from tenacity import AsyncRetrying, retry_if_result, wait_random_exponential

from shared.bus.connection import Bus
from shared.errors import (
    Conflict,
    InvalidReply,
    NameInUse,
    Unavailable,
    Undecodable,
    UnicronError,
    UnreachableAddress,
)
from shared.messages.admission import ALIVE, HELLO, REVOKED, Answer, Hello, Revocation

logger = logging.getLogger(__name__)

RETRY_S = 0.1
"""Longest pause before a hello is repeated the first time: short beside the start of an agent, which takes seconds."""

LONGEST_RETRY_S = 2.0
"""Longest pause between two hellos: thousands of agents that start at once must leave the detector time to answer them.
The upper limit doubles from ``RETRY_S`` on, and each pause is drawn between zero and the limit, so that agents do not
ask in step."""

_REFUSALS: dict[str, type[UnicronError]] = {one.code: one for one in (NameInUse, Undecodable, UnreachableAddress)}


class Admission:
    """One agent's right to its name.

    Args:
        bus: connected.
        hello: who wants to join.
    """

    def __init__(self, bus: Bus, hello: Hello) -> None:
        self._bus, self._hello = bus, hello
        self._said = ""
        self._revoked: asyncio.Future[UnicronError] = asyncio.get_running_loop().create_future()

    async def obtain(self) -> None:
        """Wait until the agent is admitted.

        Raises:
            NameInUse: a living agent has the name.
            UnreachableAddress: this node and another one could not reach each other.
            Conflict: the detector refuses for a reason that this version does not know.
        """
        # Serve first: from the admission on, the detector asks here before it gives the name to another agent.
        own = self._hello.node, self._hello.incarnation
        await self._bus.serve(ALIVE, self._alive, *own)
        await self._bus.subscribe(REVOKED, self._take_revocation, *own)
        retrying = AsyncRetrying(
            retry=retry_if_result(lambda answer: answer.verdict == "wait"),
            wait=wait_random_exponential(multiplier=RETRY_S, max=LONGEST_RETRY_S),
        )
        answer: Answer = await retrying(self._ask)
        if answer.verdict == "refused":
            raise _REFUSALS.get(answer.code, Conflict)(answer.detail)

    async def run(self) -> None:
        """Wait until cancelled, or raise the error that the name belongs to another agent by now."""
        raise await self._revoked

    async def _ask(self) -> Answer:
        try:
            answer = await self._bus.call(HELLO, self._hello, self._hello.node)
        except InvalidReply as err:
            answer = Answer(verdict="wait", detail=f"the detector: {err.detail}")
        except Unavailable:
            answer = Answer(verdict="wait", detail="the detector does not answer")
        if answer.verdict == "wait" and answer.detail != self._said:
            self._said = answer.detail
            logger.info("not admitted yet: %s", answer.detail)
        return answer

    async def _alive(self, _: None) -> None:
        """Answer the detector, which shows that this agent lives."""

    async def _take_revocation(self, revocation: Revocation) -> None:
        if not self._revoked.done():
            self._revoked.set_result(NameInUse(revocation.detail))
