"""On which subjects an agent takes commands, and which: all of the transition service, releases of the detector."""

from __future__ import annotations

import functools

from services.agent.commands import Commands
from shared.bus import Bus
from shared.commands import COMMANDS, LEFTOVERS, RELEASE


async def listen(bus: Bus, node: str, commands: Commands) -> None:
    """Take commands for a node from now on."""
    await bus.serve(f"{COMMANDS}.{node}", commands.serve)
    await bus.serve(f"{LEFTOVERS}.{node}", functools.partial(commands.serve, kinds=RELEASE))
