"""On which subjects an agent takes which requests: commands, releases of the detector, self-tests, stacks."""

from __future__ import annotations

import functools

from services.agent.cluster.self_test import SelfTests
from services.agent.commands import Commands
from services.agent.ranks.stacks import Stacks
from shared.bus.connection import Bus
from shared.messages.commands import COMMANDS, LEFTOVERS, RELEASE
from shared.messages.self_test import SELF_TEST
from shared.messages.stacks import STACKS


async def listen(bus: Bus, node: str, commands: Commands) -> None:
    """Take commands for a node from now on."""
    await bus.serve(f"{COMMANDS}.{node}", commands.serve)
    await bus.serve(f"{LEFTOVERS}.{node}", functools.partial(commands.serve, kinds=RELEASE))


async def answer_questions(bus: Bus, node: str, self_tests: SelfTests, stacks: Stacks) -> None:
    """Answer from now on whether a node can run ranks, and what its ranks are doing."""
    await bus.serve(f"{SELF_TEST}.{node}", self_tests.serve)
    await bus.serve(f"{STACKS}.{node}", stacks.serve)
