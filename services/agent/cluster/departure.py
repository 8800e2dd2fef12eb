"""The agent's departure, which it announces to the detector before it ends its processes (messages/admission.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from services.agent.cluster.signals import SignalQueue
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.messages.admission import DEPARTURES, Departure

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 2.0
"""How long an agent that ends waits for the detector, which answers after one append to the log, in about 5 ms. Without
an answer the node counts as lost."""

RETRY_PAUSE_S = 0.1
"""Pause before an announcement is repeated: the detector does not answer, or tasks are still there."""

SAVE_FACTOR = 2.0
"""Time of a whole drain, as a multiple of the time that tasks have to move away. A task that cannot move has as much
time again to save its state."""


class Leaving:
    """Announces that the node leaves.

    Args:
        bus: the connection to send on.
        signals: the queue of signals, which is sent first, since signals of a node that has left are dropped.
        node: the node's name.
        incarnation: of the agent.
    """

    def __init__(self, bus: Bus, signals: SignalQueue, node: str, incarnation: str) -> None:
        self._bus, self._signals, self._node, self._incarnation = bus, signals, node, incarnation

    async def leave(self, reason: str) -> None:
        """Return when the log says that the node has left, or when no answer came in time."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._signals.answered()
                await self._announce(reason, drain_s=0.0)
        except TimeoutError:
            logger.warning("the detector does not answer: this node will count as lost")
        else:
            logger.info("left: %s", reason)

    async def drain(self, reason: str, drain_s: float) -> bool:
        """Have the node drained, and leave it empty; return whether that was possible in time.

        Args:
            reason: in words, for people.
            drain_s: how long tasks may take to move away. A task that is still there then has as much time again to
                save its state.
        """
        logger.info("draining: %s; tasks have %g s to move away, and as long to save what cannot", reason, drain_s)
        try:
            async with asyncio.timeout(SAVE_FACTOR * drain_s):
                await self._announce(reason, drain_s=drain_s)
        except TimeoutError:
            logger.warning("not drained in time")
            return False
        logger.info("drained and left")
        return True

    async def _announce(self, reason: str, *, drain_s: float) -> None:
        """Repeat the announcement until it is answered with anything but ``wait``."""
        departure = Departure(node=self._node, incarnation=self._incarnation, reason=reason, drain_s=drain_s)
        waiting_for = ""
        while True:
            with contextlib.suppress(Unavailable):
                answer = await self._bus.call(DEPARTURES, departure, self._node)
                if answer.verdict == "left":
                    return
                if answer.verdict == "refused":
                    logger.warning("the detector cannot read the departure: %s", answer.detail)
                    return
                if answer.detail != waiting_for:
                    logger.info("waiting for: %s", answer.detail)
                waiting_for = answer.detail
            await asyncio.sleep(RETRY_PAUSE_S)
