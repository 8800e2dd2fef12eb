"""The agent's preflight (setting ``preflight``): what training does is measured before the node joins or is used again.

The detector judges it, and decides; what was measured is in the log (``node.measured``). An agent that succeeds another
one does not measure before it joins: its node may train.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from services.agent.machine import hardware, preflight
from services.agent.machine.hardware import VISIBLE_VARIABLE, Devices, NodeHardware
from shared.bus.connection import Bus
from shared.bus.messages import REASON_CHARACTERS
from shared.errors import Unavailable, UnicronError
from shared.events.measurements import Measurement
from shared.events.node_events import CheckResult
from shared.messages.preflight import PREFLIGHT, PreflightAnswer, PreflightReport
from shared.messages.self_test import SelfTest
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a report is sent again: a detector that starts takes some seconds."""


class Preflight:
    """Measures the node, and has the detector judge it.

    Args:
        settings: ``preflight``, ``node``, ``domain``, ``run_dir``, and for how long a detector is waited for.
        bus: connected.
        incarnation: of this agent.
        supervisor: id of the process that has started it.
        found: the node's workers and their devices.
        python: in which ranks run.
    """

    def __init__(
        self, settings: Settings, bus: Bus, incarnation: str, supervisor: str, found: NodeHardware, python: str
    ) -> None:
        self._settings, self._bus, self._incarnation = settings, bus, incarnation
        self._supervisor, self._found, self._python = supervisor, found, python

    async def before_joining(self) -> None:
        """Measure and report, if the node's operator wants that. A detector that takes no report keeps nobody out."""
        if not self._settings.preflight:
            return
        try:
            answer = await self._judged()
        except UnicronError as err:
            logger.warning("the detector takes no preflight, so the node joins without one: %s", err.detail)
            return
        level = logging.WARNING if answer.verdict == "refused" else logging.INFO
        logger.log(level, "preflight: %s%s", answer.verdict, f": {answer.reason}" if answer.reason else "")

    async def check(self, request: SelfTest) -> list[CheckResult]:
        """Measure and report as a part of a self-test, where that is asked for."""
        if not (self._settings.preflight and request.preflight):
            return []
        try:
            answer = await self._judged()
        except UnicronError as err:
            return [CheckResult(name="preflight", ok=False, detail=f"the detector does not judge it: {err.detail}")]
        detail = (answer.reason or answer.verdict)[:REASON_CHARACTERS]
        return [CheckResult(name="preflight", ok=answer.verdict != "refused", detail=detail)]

    async def _judged(self) -> PreflightAnswer:
        """Measure; return what the detector says.

        Raises:
            Unavailable: it does not answer.
        """
        settings = self._settings
        report = PreflightReport(
            node=settings.node,
            incarnation=self._incarnation,
            report=uuid.uuid4().hex,
            agent_pid=os.getpid(),
            supervisor=self._supervisor,
            domain=settings.domain,
            hardware=self._found.kind,
            workers=list(self._found.workers),
            measurement=await self._measure(),
        )
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            wait=wait_fixed(RETRY_S),
            stop=stop_after_delay(settings.connect_timeout_s),
            reraise=True,
        )
        return await retrying(self._bus.call, PREFLIGHT, report, settings.node)

    async def _measure(self) -> Measurement:
        folder = self._settings.run_dir.resolve()
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        return await preflight.measure(self._python, folder, await asyncio.to_thread(self._devices))

    def _devices(self) -> Devices:
        """Return the node's devices, with the driver's names."""
        return hardware.devices(os.environ.get(VISIBLE_VARIABLE)) if self._found.entries else Devices()
