"""``unicron up``: the embedded stack in the foreground."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from cli.stack import Stack
from shared.errors import Unavailable
from shared.settings import Settings

DEFAULT_PORT = Settings.model_fields["port"].default


async def _serve(stack: Stack) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        starting = asyncio.create_task(stack.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        await starting
        print(f"ready {stack.url}", flush=True)
        assert stack.failed is not None
        await asyncio.wait({stopping, stack.failed}, return_when=asyncio.FIRST_COMPLETED)
        if stack.failed.done():
            raise Unavailable(stack.failed.result())
        stopping.cancel()
    finally:
        await stack.stop()


def up(
    run_dir: Annotated[Path, typer.Option(help="Folder for everything a run writes.")] = Path(".unicron"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 for any.")] = DEFAULT_PORT,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Node agents to start.")] = 4,
    workers_per_node: Annotated[int, typer.Option(min=1, max=64, help="Workers of each node.")] = 2,
) -> None:
    """Start the whole system on this machine; Ctrl-C stops it.

    Prints one line, ``ready URL``, when it can take tasks. A task that was running when the stack was stopped goes on
    from its newest checkpoint when the same run directory is started again.
    """
    asyncio.run(_serve(Stack(run_dir, port=port, nodes=nodes, workers_per_node=workers_per_node)))
