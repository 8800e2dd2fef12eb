"""Requests to the agent to hand over to a successor (``shared/messages/agent_restart.py``)."""

from __future__ import annotations

import asyncio
import logging

from shared.bus.connection import Bus
from shared.bus.dropped import DroppedMessages
from shared.bus.messages import decode
from shared.errors import Undecodable
from shared.messages.agent_restart import AGENT_RESTART, AGENT_RESTART_REQUEST, AgentRestartResult

logger = logging.getLogger(__name__)


class HandOver:
    """Whether the agent is to hand over."""

    def __init__(self) -> None:
        self._due = asyncio.Event()
        self._incarnation, self._dropped = "", DroppedMessages({})

    @property
    def is_due(self) -> bool:
        """Whether the agent has been asked to."""
        return self._due.is_set()

    async def serve(self, bus: Bus, node: str, incarnation: str, dropped: DroppedMessages) -> None:
        """Take requests from now on; ``dropped`` counts those that cannot be decoded."""
        self._incarnation, self._dropped = incarnation, dropped
        await bus.serve(f"{AGENT_RESTART}.{node}", self._answer)

    async def asked(self) -> None:
        """Wait until the agent is to hand over."""
        await self._due.wait()
        logger.info("asked to hand over to a successor")

    async def _answer(self, data: bytes) -> bytes:
        """Answer a request; a repeated one may reach the successor, which stays."""
        try:
            request = decode(AGENT_RESTART_REQUEST, data)
        except Undecodable as err:
            self._dropped.note(AGENT_RESTART, err)
        else:
            if request.incarnation == self._incarnation:
                self._due.set()
        return AgentRestartResult(incarnation=self._incarnation).model_dump_json().encode()
