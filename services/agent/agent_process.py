"""The node agent's process, which the supervisor starts: ``python -P -m services.agent.agent_process``.

The agent itself is in ``agent.py``.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import sys
import uuid
from collections.abc import Coroutine
from typing import Any

from services.agent.agent import Agent
from services.agent.cluster.admission import Admission
from services.agent.faults import Faults
from services.agent.machine import address, hardware
from services.agent.machine.hardware import VISIBLE_VARIABLE, NodeHardware
from services.agent.node.slots import worker_names
from services.agent.succession import inheritance
from services.agent.succession.hand_over import HandOver
from services.agent.succession.inheritance import Inheritance
from services.agent.succession.restarts import HANDED_OVER
from shared import names
from shared.bus.cancellation import end
from shared.errors import InvalidInput, NameInUse
from shared.machine.process import die_with_parent
from shared.messages.admission import Hello
from shared.messages.health import AGENT
from shared.service.frame import Context, run
from shared.service.joining import node_name
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

ASKED = "its agent was asked to end"
"""Why a node leaves."""


async def serve(inherited: Inheritance, hand_over: HandOver, context: Context) -> None:
    """Run the agent until cancelled, or until it is to hand over.

    The node's processes end with an agent that was asked to end, or whose name belongs to another one. Any other agent
    leaves them to its successor.
    """
    settings, bus = context.settings, context.bus
    _check_name(settings)
    local, server = bus.addresses
    found = await asyncio.to_thread(address.find, settings, local, server)
    workers = await asyncio.to_thread(_hardware, settings)
    incarnation = uuid.uuid4().hex
    hello = Hello(
        node=settings.node,
        incarnation=incarnation,
        addresses=found.by_setting,
        network=found.network,
        supervisor=inherited.supervisor,
    )
    admission = Admission(bus, hello)
    await admission.obtain()
    agent = Agent(settings, bus, found, workers, incarnation, inherited)
    agent.metrics.register(context.registry)
    await agent.measure()
    in_use = False
    try:
        await agent.start()
        context.ready()
        context.ending.cancels = False
        await hand_over.serve(bus, settings.node, incarnation)
        xid = agent.devices.inject
        await Faults(agent.node, agent.send, bus, enabled=settings.fault_injection, xid=xid).serve()
        await _first(agent.run(), admission.run(), _drained(context.stop, agent), hand_over.asked())
    except NameInUse:
        in_use = True
        agent.keep_snapshots()
        raise
    finally:
        if context.stop.is_set():
            await agent.leave(ASKED)
        if context.stop.is_set() or in_use:
            await agent.stop()
        else:
            await agent.hand_over()


async def _drained(stop: asyncio.Event, agent: Agent) -> None:
    """Wait until the agent was asked to end, and its node is drained. A second request to end cancels this."""
    await stop.wait()
    await agent.drain(ASKED)


async def _first(*work: Coroutine[Any, Any, None]) -> None:
    """Wait until cancelled or until the first of these ends; raise its error.

    An agent ends with an error of its own, with the loss of its name, or when it was asked to end or to hand over.
    """
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            await end(task)


def _hardware(settings: Settings) -> NodeHardware:
    """Return the node's workers and their devices.

    Raises:
        NoDevice: a worker has no device, while another worker has one or the operator asked for devices.
    """
    names = worker_names(settings.node, settings.workers_per_node)
    visible = os.environ.get(VISIBLE_VARIABLE)
    return hardware.of_node(settings.node, names, setting=settings.hardware, visible=visible)


def _check_name(settings: Settings) -> None:
    """Refuse a host name that makes no node name. A name from the settings has been checked with the other settings."""
    if not names.is_name(settings.node):
        problem = (
            f"the host name gives no node name, which has 1 to 63 of a-z, 0-9 and '-' and neither begins nor ends with "
            f"'-': set UNICRON_NODE (given: {settings.node!r})"
        )
        raise InvalidInput.of("node", settings.node, problem, problem)


def main() -> int:
    """Run the node agent; return its exit code."""
    inherited, parent = inheritance.read(sys.argv[1:])
    if not die_with_parent(signal.SIGKILL, parent):
        return 1
    hand_over = HandOver()
    # The name is needed before ``run`` reads the settings and reports errors in them.
    name = f"{AGENT}{node_name()}"
    code = run(name, functools.partial(serve, inherited, hand_over), journal=False)
    return HANDED_OVER if code == 0 and hand_over.is_due else code


if __name__ == "__main__":
    raise SystemExit(main())
