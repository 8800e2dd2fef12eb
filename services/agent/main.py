"""The node agent's process: ``python -P -m services.agent.main``. The agent itself is in ``agent.py``."""

from __future__ import annotations

import asyncio
import os
import uuid

from services.agent import address
from services.agent.admission import Admission
from services.agent.agent import Agent
from shared import names
from shared.admission import Hello
from shared.cancellation import end
from shared.errors import InvalidInput, NameInUse
from shared.service import Context, run
from shared.settings import Settings


async def serve(context: Context) -> None:
    """Run the agent until cancelled."""
    settings, bus = context.settings, context.bus
    _check_name(settings)
    local, server = bus.addresses
    found = await asyncio.to_thread(address.find, settings, local, server)
    incarnation = uuid.uuid4().hex
    hello = Hello(node=settings.node, incarnation=incarnation, addresses=found.by_setting, network=found.network)
    admission = Admission(bus, hello)
    await admission.obtain()
    agent = Agent(settings, bus, found, incarnation, counters=context.counters)
    try:
        await agent.start()
        context.ready()
        await _first(agent, admission)
    except NameInUse:
        agent.keep_snapshots()
        raise
    finally:
        if context.stop.is_set():
            await agent.leave("its agent was asked to end")
        await agent.stop()


async def _first(agent: Agent, admission: Admission) -> None:
    """Wait until cancelled, or raise what ends the agent first: an error of its own, or the loss of its name."""
    running, admitted = asyncio.create_task(agent.run()), asyncio.create_task(admission.run())
    try:
        done, _ = await asyncio.wait({running, admitted}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end(running)
        await end(admitted)


def _check_name(settings: Settings) -> None:
    """Refuse a host name that makes no node name; a name that was given has been checked with the other settings."""
    if not names.is_name(settings.node):
        problem = (
            f"the host name gives no node name, which has 1 to 63 of a-z, 0-9 and '-' and neither begins nor ends with "
            f"'-': set UNICRON_NODE (given: {settings.node!r})"
        )
        raise InvalidInput(problem, [{"field": "node", "value": settings.node, "problem": problem}])


def main() -> int:
    """Run the node agent; return its exit code."""
    # The name is needed before ``run`` reads the settings and reports errors in them.
    return run(f"agent-{os.environ.get('UNICRON_NODE') or names.host_label()}", serve, journal=False)


if __name__ == "__main__":
    raise SystemExit(main())
