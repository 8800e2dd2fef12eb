"""Node agents as processes of their own: the real program, whose ranks train nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.settings.model import Settings

AGENT = "import sys; from services.agent import main as agent; sys.exit(agent.main())"
"""Python code: the agent as it ships."""

STAND_IN_AGENT = (
    "from services.agent import main as agent; import sys;"
    "sys.exit(agent.main(fork_server=(sys.executable, '-m', 'tests.agent.stand_in')))"
)
"""Python code: the agent's ``main`` with the fork server of ``tests.agent.stand_in``."""


@dataclass
class Program:
    """A running node. ``process``: its supervisor; ``log``: the file with the log lines of supervisor and agent."""

    process: asyncio.subprocess.Process
    log: Path

    def signal_agent(self, number: signal.Signals) -> None:
        """Send a signal to the agent, not to its supervisor."""
        children = psutil.Process(self.process.pid).children()
        [agent] = [child for child in children if "services.agent.agent_process" in child.cmdline()]
        agent.send_signal(number)

    async def ready(self) -> None:
        """Wait until the agent serves commands."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line == b"ready\n", self.log.read_text()


@contextlib.asynccontextmanager
async def running(
    settings: Settings,
    name: str,
    log: Path,
    *,
    wrapper: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    program: str = STAND_IN_AGENT,
) -> AsyncIterator[Program]:
    """Run an agent until the end of the block.

    Args:
        settings: where NATS and the run directory are.
        name: the node's; empty: the agent finds it by itself.
        log: where its log lines go.
        wrapper: the beginning of the command line, such as ``unshare --uts``.
        environment: further variables.
        program: Python code of the agent.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith("UNICRON_")}
    variables |= {"UNICRON_NATS_URL": settings.nats_url, "UNICRON_NATS_CREDENTIAL": str(settings.nats_credential)}
    variables |= {"UNICRON_DRAIN_TIMEOUT_S": "0"}  # most of these tests have no planner, which would empty the node
    variables |= {"UNICRON_RUN_DIR": str(settings.run_dir), **({"UNICRON_NODE": name} if name else {})}
    with log.open("ab") as lines:
        process = await asyncio.create_subprocess_exec(
            *(*wrapper, sys.executable, "-c", program),
            env={**variables, **(environment or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=lines,
        )
    try:
        yield Program(process, log)
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
