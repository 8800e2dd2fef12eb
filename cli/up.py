"""``unicron up``: the embedded stack in the foreground."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.run_directory import DEMO_MARKER
from cli.stack import Stack
from shared.errors import Unavailable
from shared.settings import Settings

DEFAULT_PORT = Settings.model_fields["port"].default


async def _serve(stack: Stack) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(stack.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await _first(starting, stopping)
        if starting.done():
            await starting
            # From here on the folder contains files that no demo may replace.
            (stack.run_dir / DEMO_MARKER).unlink(missing_ok=True)
            print(f"ready {stack.url}", flush=True)
            await _first(stack.failed, stopping)
            if stack.failed.done():
                raise Unavailable(stack.failed.result())
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await stack.stop()


async def _first(*waits: asyncio.Future[Any]) -> None:
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


def up(
    run_dir: Annotated[Path, typer.Option(help="Folder for everything a run writes.")] = Path(".unicron"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 for any.")] = DEFAULT_PORT,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Node agents to start.")] = 4,
    workers_per_node: Annotated[int, typer.Option(min=1, max=64, help="Workers of each node.")] = 2,
) -> None:
    """Start the whole system on this machine; Ctrl-C stops it.

    Prints one line, ``ready URL``, when it can take tasks. A task that was running when the stack was stopped
    resumes from its newest checkpoint when a stack is started in the same run directory.
    """
    asyncio.run(_serve(Stack(run_dir, port=port, nodes=nodes, workers_per_node=workers_per_node)))
