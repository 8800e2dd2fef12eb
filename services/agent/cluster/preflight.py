"""The agent's preflight (setting ``preflight``): what training does is measured before the node joins or is used again.

The detector judges it, and decides; what was measured is in the log (``node.measured``). It also names the neighbours
with which the node does an all-reduce; a node that no task uses is one for others. An agent that succeeds another one
does not measure before it joins: its node may train.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from services.agent.machine import hardware, preflight
from services.agent.machine.address import NodeAddress, socket_environment
from services.agent.machine.hardware import VISIBLE_VARIABLE, Devices, NodeHardware
from shared.bus.connection import Bus
from shared.bus.messages import REASON_CHARACTERS
from shared.errors import Unavailable, UnicronError
from shared.events.measurements import Line, Measurement, Rate
from shared.events.node_events import CheckResult
from shared.messages.preflight import (
    MEET,
    NEIGHBOUR,
    PREFLIGHT,
    MeetReply,
    MeetRequest,
    NeighbourRequest,
    PreflightAnswer,
    PreflightReport,
)
from shared.messages.probes import address as address_of
from shared.messages.self_test import SelfTest
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a report is sent again: a detector that starts takes some seconds."""

NEIGHBOURS = 2
"""Neighbours with which a node measures: if it is slow with one alone, that one may be the slow one."""

NEIGHBOURS_S = 50.0
"""Time for that: with what else a self-test does it stays below ``SELF_TEST.timeout_s``."""


class Preflight:
    """Measures the node, and has the detector judge it.

    Args:
        settings: ``preflight``, ``node``, ``domain``, ``run_dir``, and for how long a detector is waited for.
        bus: connected.
        incarnation: of this agent.
        supervisor: id of the process that has started it.
        found: the node's workers and their devices.
        python: in which ranks run.
        address: of the node.
    """

    def __init__(
        self,
        settings: Settings,
        bus: Bus,
        incarnation: str,
        supervisor: str,
        found: NodeHardware,
        python: str,
        address: NodeAddress,
    ) -> None:
        self._settings, self._bus, self._incarnation = settings, bus, incarnation
        self._supervisor, self._found, self._python, self._address = supervisor, found, python, address
        self._measures = False

    async def serve(self, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Be a neighbour for others from now on, while no task uses this node. ``spawn``: has a coroutine run."""

        async def meet(request: MeetRequest) -> MeetReply:
            used = await asyncio.to_thread(preflight.in_use)
            if used or self._measures:
                return MeetReply()
            self._measures = True
            spawn(self._meet(request))
            return MeetReply(begins=True)

        if self._settings.preflight:
            await self._bus.serve(MEET, meet, self._settings.node, refuse=lambda _: MeetReply())

    async def _meet(self, request: MeetRequest) -> None:
        try:
            await self._measure_with(await asyncio.to_thread(self._devices), request.peer, request.store, None)
        finally:
            self._measures = False

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
        devices = await asyncio.to_thread(self._devices)
        self._measures = True
        try:
            measured = await preflight.measure(self._python, folder, devices)
            rates, problems = list(measured.rates), list(measured.problems)
            if rates:
                with contextlib.suppress(TimeoutError, OSError, UnicronError):
                    async with asyncio.timeout(NEIGHBOURS_S):
                        await self._with_neighbours(measured, devices, rates, problems)
            return measured.model_copy(update={"rates": rates, "problems": problems})
        finally:
            self._measures = False

    async def _with_neighbours(
        self, measured: Measurement, devices: Devices, rates: list[Rate], problems: list[Line]
    ) -> None:
        """Measure with the neighbours that the detector names; add what is found. One that does not come is no fault.

        Raises:
            OSError: no store can listen.
            UnicronError: the detector does not answer, or is of an older version.
        """
        known: list[str] = []
        while len(known) < NEIGHBOURS:
            with socket.create_server((self._address.ip, 0), family=_family(self._address.ip)) as listener:
                store = address_of(self._address.ip, listener.getsockname()[1])
                request = NeighbourRequest(
                    node=self._settings.node, device=measured.device, count=measured.count, store=store, known=known
                )
                answer = await self._bus.call(NEIGHBOUR, request, self._settings.node)
                if answer.peer is None:
                    return
                known.append(answer.peer)
                own = listener if answer.store is None else None
                found = await self._measure_with(devices, answer.peer, answer.store or store, own)
            rates += found[0]
            problems += found[1]

    async def _measure_with(
        self, devices: Devices, peer: str, store: str, listener: socket.socket | None
    ) -> tuple[list[Rate], list[str]]:
        interfaces = socket_environment(self._address.interface)
        found = await preflight.with_neighbour(self._python, devices, peer, store, listener, interfaces)
        logger.info("preflight with a neighbour: %s", "; ".join([*map(str, found[0]), *found[1]]))
        return found

    def _devices(self) -> Devices:
        """Return the node's devices, with the driver's names."""
        return hardware.devices(os.environ.get(VISIBLE_VARIABLE)) if self._found.entries else Devices()


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET
