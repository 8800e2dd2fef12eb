"""``unicron up``: the embedded stack in the foreground."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.stack.devices import MOST, Device, DeviceOption, Division, divide, found
from cli.stack.foreground import run
from cli.stack.run_directory import DEMO_MARKER
from cli.stack.stack import Stack
from shared.settings.model import Settings

DEFAULT_PORT = Settings.model_fields["port"].default


def up(
    run_dir: Annotated[Path, typer.Option(help="Folder for everything a run writes.")] = Path(".unicron"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 for any.")] = DEFAULT_PORT,
    nodes: Annotated[
        int | None,
        typer.Option(min=0, max=MOST, help="Node agents to start; 0: only to look. Default: 1 with GPUs, else 4."),
    ] = None,
    workers_per_node: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Workers of each node. Default: one for each GPU, else 2.")
    ] = None,
    device: DeviceOption = Device.AUTO,
    standby: Annotated[
        bool, typer.Option("--standby", help="Start a second detector, planner and transition service, which stand by.")
    ] = False,
) -> None:
    """Start the whole system on this machine; Ctrl-C stops it.

    Each worker trains on a GPU of its own, or all of them on the CPU, where there are fewer GPUs than workers.

    Prints one line, ``ready URL``, when it can take tasks. A task that was running when the stack was stopped
    resumes from its newest checkpoint when a stack is started in the same run directory.
    """
    divided = Division(0, 1) if nodes == 0 else divide(found(), device, nodes, workers_per_node, who="its workers")
    if divided.said:
        print(divided.said, file=sys.stderr)
    stack = Stack(
        run_dir,
        port=port,
        nodes=divided.nodes,
        workers_per_node=divided.workers_per_node,
        devices=divided.shown,
        standby=standby,
    )
    # From then on the folder contains files that no demo may replace.
    asyncio.run(run(stack, lambda: (stack.run_dir / DEMO_MARKER).unlink(missing_ok=True)))
