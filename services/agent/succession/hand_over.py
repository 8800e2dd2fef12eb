"""Requests to the agent to hand over to a successor (``shared/messages/admission.py``)."""

from __future__ import annotations

import asyncio
import logging

from shared.bus.connection import Bus
from shared.messages.admission import AGENT_RESTART, AgentRestart, AgentRestartResult

logger = logging.getLogger(__name__)


class HandOver:
    """Whether the agent is to hand over."""

    def __init__(self) -> None:
        self._due = asyncio.Event()
        self._incarnation = ""

    @property
    def is_due(self) -> bool:
        """Whether the agent has been asked to."""
        return self._due.is_set()

    async def serve(self, bus: Bus, node: str, incarnation: str) -> None:
        """Take requests from now on."""
        self._incarnation, own = incarnation, AgentRestartResult(incarnation=incarnation)
        await bus.serve(AGENT_RESTART, self._answer, node, refuse=lambda _: own)

    async def asked(self) -> None:
        """Wait until the agent is to hand over."""
        await self._due.wait()
        logger.info("asked to hand over to a successor")

    async def _answer(self, request: AgentRestart) -> AgentRestartResult:
        """Answer a request. It names the agent that is to leave: if it reaches the successor, nothing happens."""
        if request.incarnation == self._incarnation:
            self._due.set()
        return AgentRestartResult(incarnation=self._incarnation)
