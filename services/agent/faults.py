"""Faults that a user asks for (``shared/messages/injection.py``): the agent has them happen, in its ranks or by itself.

A rank's fault is a message to its process, which schedules it (``unicron/process/faults.py``). All are refused unless
the setting ``fault_injection`` is on for this agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from services.agent.machine.oom_kills import own_counter
from services.agent.node.process import Process
from services.agent.node.slots import Node
from shared.bus.connection import Bus
from shared.bus.messages import REASON_CHARACTERS
from shared.errors import InvalidInput, Undecodable
from shared.messages.injection import FAULTS, FaultRequest, FaultResult, RequestedFault, parse
from unicron.protocol import messages

logger = logging.getLogger(__name__)

ANSWERED_S = 0.1
"""How long an agent that is to leave the bus waits until its answer has left it."""

MOST_KNOWN = 1000
"""Ids of requests that an agent remembers: a request is repeated within seconds, if at all."""

UNLIMITED_BYTES = 1 << 62
"""Limit above which a control group counts as unlimited: version 1 shows about 2^63 bytes where there is none
(cgroup-v1/memory.rst)."""

Xid = Callable[[int, int], None]
"""Has a device report an Xid: code and number of the device. Raises ``InvalidInput`` for a device that is not there."""


class Refusal(NamedTuple):
    """Why a fault cannot happen. ``field``: of the user's request."""

    field: str
    problem: str


class Faults:
    """Has faults happen on request.

    Args:
        node: whose processes may be struck.
        send: sends a message to a process.
        bus: which a ``disconnect`` leaves.
        enabled: the setting ``fault_injection``.
        xid: has a device report an Xid.
    """

    def __init__(
        self,
        node: Node,
        send: Callable[[Process, messages.Message], None],
        bus: Bus,
        *,
        enabled: bool,
        xid: Xid,
    ) -> None:
        self._node, self._send, self._bus = node, send, bus
        self._enabled, self._xid = enabled, xid
        self._known: OrderedDict[str, None] = OrderedDict()

    async def serve(self) -> None:
        """Begin to take requests."""
        await self._bus.serve(FAULTS, self._answer, self._node.name, refuse=self._refuse)

    async def _answer(self, request: FaultRequest) -> FaultResult:
        return self._result(self._take(request))

    def _refuse(self, err: Undecodable) -> FaultResult:
        return self._result(Refusal("fault", f"the request cannot be read: {err.detail}"))

    def _result(self, refusal: Refusal | None) -> FaultResult:
        field, problem = refusal or ("fault", "")
        return FaultResult(
            incarnation=self._node.incarnation,
            field=field,
            problem=problem[:REASON_CHARACTERS],
            disabled=not self._enabled,
        )

    def _take(self, request: FaultRequest) -> Refusal | None:
        """Judge a request, and have its fault happen unless it is only to be judged or has come before."""
        if not self._enabled:
            return Refusal("fault", "UNICRON_FAULT_INJECTION is off for this agent; it must be 1 when the agent starts")
        if request.fault_id in self._known:
            return None
        try:
            fault = parse(request.fault)
        except InvalidInput as err:
            return Refusal("fault", err.detail)
        refusal = self._refusal_of_rank(request, fault) if fault.of_rank else None
        if refusal is not None or request.judge:
            return refusal
        self._known[request.fault_id] = None
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        logger.warning("injects %s (request %s)", fault.text, request.fault_id)
        return self._inject(request, fault)

    def _process(self, request: FaultRequest) -> Process | None:
        """Return the process that trains as the rank, or None."""
        process = self._node.slots.get(request.worker)
        if process is None or (process.task, process.rank) != (request.task, request.rank):
            return None
        return process if process.attached and process.configured and not process.ending else None

    def _refusal_of_rank(self, request: FaultRequest, fault: RequestedFault) -> Refusal | None:
        process = self._process(request)
        if process is None:
            return Refusal("rank", f"no process of {request.task!r} trains as this rank on {request.worker} now")
        begun = process.step + 1
        if request.step is not None and request.step <= begun:
            return Refusal("step", f"must be above {begun}, the step that the rank computes")
        if fault.kind == "oom" and isinstance(limit := own_memory_limit(), str):
            return Refusal(
                "fault", f"oom needs a control group with a limit of memory around the node's agent: {limit}"
            )
        return None

    def _inject(self, request: FaultRequest, fault: RequestedFault) -> Refusal | None:
        """Have the fault happen; return why it could not happen after all."""
        if fault.kind == "disconnect":
            asyncio.get_running_loop().call_later(ANSWERED_S, self._bus.stay_away, fault.away_s)
            return None
        if fault.kind == "xid":
            try:
                self._xid(*fault.xid)
            except InvalidInput as err:
                return Refusal("fault", err.detail)
            return None
        process = self._process(request)
        assert process is not None
        argument = str(own_memory_limit()) if fault.kind == "oom" else fault.argument
        message = messages.Inject(id=request.fault_id, kind=fault.kind, argument=argument, step=request.step or 0)
        self._send(process, message)
        return None


def own_memory_limit() -> int | str:
    """Return the limit of memory of this process's control group in bytes, or in words why there is none to reach."""
    return memory_limit(own_counter(), Path("/proc/meminfo"))


def memory_limit(counter: Path | None, machine: Path) -> int | str:
    """Return a control group's limit of memory in bytes, or in words why a process cannot be ended for reaching it.

    Args:
        counter: the group's ``memory.events`` or ``memory.oom_control`` (``services.agent.machine.oom_kills``).
        machine: ``/proc/meminfo``.
    """
    if counter is None:
        return "the kernel shows none"
    name = "memory.max" if counter.name == "memory.events" else "memory.limit_in_bytes"
    try:
        text = (counter.parent / name).read_text().strip()
        total_bytes = int(machine.read_text().split("MemTotal:")[1].split()[0]) * 1024
        whole_group = counter.parent / "memory.oom.group"
        ends_all = whole_group.exists() and whole_group.read_text().strip() == "1"
        disabled = "oom_kill_disable 1" in counter.read_text()
    except (OSError, IndexError, ValueError) as err:
        return f"its files cannot be read: {err}"
    if text == "max" or int(text) >= min(UNLIMITED_BYTES, total_bytes):
        return f"{counter.parent} has no limit below the memory of the machine"
    if ends_all or disabled:
        return f"{counter.parent} has the kernel end {'all its processes together' if ends_all else 'none'}"
    return int(text)
