"""The agent's admission to the cluster: asked of the detector before the agent does anything else."""

from __future__ import annotations

import asyncio
import logging

from shared.bus.connection import Bus
from shared.bus.dropped import DroppedMessages
from shared.bus.messages import decode
from shared.errors import Conflict, NameInUse, Unavailable, Undecodable, UnicronError, UnreachableAddress
from shared.messages.admission import ALIVE, ANSWER, HELLO, REVOCATION, REVOKED, Answer, Hello

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 3.0
"""The detector may ask two other agents first, for half a second each (``services.detector.main``)."""

RETRY_S = 0.1
"""Pause before a hello is repeated: short beside the start of an agent, which takes seconds."""

_REFUSALS: dict[str, type[UnicronError]] = {one.code: one for one in (NameInUse, Undecodable, UnreachableAddress)}


class Admission:
    """One agent's right to its name.

    Args:
        bus: connected.
        hello: who wants to join.
        dropped: counts the messages that cannot be decoded.
    """

    def __init__(self, bus: Bus, hello: Hello, dropped: DroppedMessages) -> None:
        self._bus, self._hello, self._dropped = bus, hello, dropped
        self._revoked: asyncio.Future[UnicronError] = asyncio.get_running_loop().create_future()

    async def obtain(self) -> None:
        """Wait until the agent is admitted.

        Raises:
            NameInUse: a living agent has the name.
            UnreachableAddress: this node and another one could not reach each other.
            Conflict: refused for a reason that this version does not know.
        """
        # Served first: from the admission on, the detector asks here before it gives the name to another agent.
        own = f"{self._hello.node}.{self._hello.incarnation}"
        await self._bus.serve(f"{ALIVE}.{own}", self._alive)
        await self._bus.subscribe(f"{REVOKED}.{own}", self._take_revocation)
        said = ""
        while True:
            answer = await self._ask()
            match answer.verdict:
                case "admitted":
                    return
                case "refused":
                    raise _REFUSALS.get(answer.code, Conflict)(answer.detail)
                case "wait":
                    if answer.detail != said:
                        logger.info("not admitted yet: %s", answer.detail)
                    said = answer.detail
            await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        """Wait until cancelled, or raise the error that the name belongs to another agent by now."""
        raise await self._revoked

    async def _ask(self) -> Answer:
        try:
            data = self._hello.model_dump_json().encode()
            subject = f"{HELLO}.{self._hello.node}"
            return decode(ANSWER, await self._bus.request(subject, data, timeout_s=ANSWER_TIMEOUT_S))
        except Unavailable:
            return Answer(verdict="wait", detail="the detector does not answer")
        except Undecodable as err:
            return Answer(verdict="wait", detail=f"the detector's answer cannot be read: {err.detail}")

    async def _alive(self, _: bytes) -> bytes:
        return b"+"

    async def _take_revocation(self, _: str, data: bytes) -> None:
        try:
            revocation = decode(REVOCATION, data)
        except Undecodable as err:
            self._dropped.note(REVOKED, err)
            return
        if not self._revoked.done():
            self._revoked.set_result(NameInUse(revocation.detail))
