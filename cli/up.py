"""``unicron up``: the embedded stack in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cli.foreground import run
from cli.run_directory import DEMO_MARKER
from cli.stack import Stack
from shared.settings import Settings

DEFAULT_PORT = Settings.model_fields["port"].default


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
    stack = Stack(run_dir, port=port, nodes=nodes, workers_per_node=workers_per_node)
    # From then on the folder contains files that no demo may replace.
    asyncio.run(run(stack, lambda: (stack.run_dir / DEMO_MARKER).unlink(missing_ok=True)))
