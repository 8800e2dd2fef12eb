"""Requests of the detector to agents, other than probes (``prober.py``): to end ranks, to test themselves, for stacks.

Part of the shell.
"""

from __future__ import annotations

import logging
import uuid

from services.detector.nodes.leftovers import Clean
from services.detector.progress.standstill import StacksQuestion
from services.detector.state.unlogged import SelfTestQuestion
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.messages.commands import LEFTOVERS, ReleaseTask
from shared.messages.self_test import SelfTestResult, run_self_test
from shared.messages.stacks import STACKS, StacksReply, StacksRequest
from shared.service.log_lines import ids

logger = logging.getLogger(__name__)


class AgentRequests:
    """Asks agents over the bus.

    Args:
        bus: connected.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def self_test(self, question: SelfTestQuestion) -> SelfTestResult | None:
        """Return what an agent's self-test found; None if it does not answer."""
        try:
            return await run_self_test(self._bus, question.node, question.peers, empty=True, preflight=True)
        except Unavailable as err:
            logger.warning("%s", err.detail)
            return None

    async def clean(self, clean: Clean) -> None:
        """Ask a node to end left-behind ranks or copies. A node that does not do so is asked again later."""
        command = ReleaseTask(
            command_id=str(uuid.uuid4()),
            plan=f"clean/{clean.node}",
            task=clean.task,
            generation=clean.generation,
            workers=clean.workers,
            delete_copies=clean.copies,
        )
        try:
            reply = await self._bus.call(LEFTOVERS, command, clean.node)
        except Unavailable as err:
            logger.warning("node %s does not clean up yet: %s", clean.node, err.detail, extra=ids(clean))
            return
        if not reply.ok:
            logger.warning(
                "node %s does not clean up behind %s: %s %s", clean.node, clean.task, reply.code, reply.detail
            )

    async def stacks(self, question: StacksQuestion) -> StacksReply | None:
        """Return what the ranks of a node do; None if the agent does not answer, as older versions do not."""
        request = StacksRequest(task=question.task, generation=question.generation, timeout_s=question.timeout_s)
        limit_s = question.timeout_s + STACKS.timeout_s
        try:
            return await self._bus.call(STACKS, request, question.node, timeout_s=limit_s)
        except Unavailable:
            return None
