"""The agent's departure: announced to the detector before the agent ends its processes (``shared/departure.py``)."""

from __future__ import annotations

import asyncio
import logging

from services.agent.signals import SignalQueue
from shared.bus import Bus
from shared.departure import DEPARTURE_ANSWER, DEPARTURES, Departure
from shared.errors import Unavailable, Undecodable
from shared.messages import decode

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 2.0
"""How long an agent that ends waits for the detector, which answers after one append to the log, in about 5 ms. Without
an answer the node counts as lost."""

ANSWER_TIMEOUT_S = 1.0
"""Time for one answer, as for a signal."""

RETRY_PAUSE_S = 0.1
"""Pause before a request that failed is repeated, for example while the detector restarts."""


class Leaving:
    """Announces that the node leaves.

    Args:
        bus: the connection to send on.
        signals: sent first, since signals of a node that has left are dropped.
        node: the node's name.
        incarnation: of the agent.
    """

    def __init__(self, bus: Bus, signals: SignalQueue, node: str, incarnation: str) -> None:
        self._bus, self._signals, self._node, self._incarnation = bus, signals, node, incarnation

    async def leave(self, reason: str) -> None:
        """Return when the log says that the node has left, or when no answer came in time."""
        departure = Departure(node=self._node, incarnation=self._incarnation, reason=reason)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._signals.answered()
                await self._announce(departure)
        except TimeoutError:
            logger.warning("the detector does not answer: this node will count as lost")
        else:
            logger.info("left: %s", reason)

    async def _announce(self, departure: Departure) -> None:
        data = departure.model_dump_json().encode()
        while True:
            try:
                answer = decode(DEPARTURE_ANSWER, await self._bus.request(DEPARTURES, data, timeout_s=ANSWER_TIMEOUT_S))
            except (Unavailable, Undecodable):
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            if answer.verdict == "refused":
                logger.warning("the detector cannot read the departure: %s", answer.detail)
            return
