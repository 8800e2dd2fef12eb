"""``unicron watch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.options import Format, Output, Server, checked_node
from cli.watch.provider import Provider

app = typer.Typer(no_args_is_help=True, add_completion=False)

Every = Annotated[float, typer.Option("--every-s", min=1.0, max=3600.0, help="Seconds between two looks.")]
Node = Annotated[
    str | None,
    typer.Option("--node", metavar="NODE", help="Name of this machine's node. Default: UNICRON_NODE, or its own."),
]
Once = Annotated[bool, typer.Option("--once", help="Look once, report and end, as from a timer.")]


@app.callback()
def watch() -> None:
    """Report troubles of nodes that another system knows of, so that they are drained or isolated.

    UNICRON_TOKEN has a token with the scope `report` (`unicron token add NAME --scope report --node PATTERN`).
    """


@app.command()
def slurm(every_s: Every = 30.0, once: Once = False, server: Server = None, output: Output = Format.TEXT) -> None:
    """Watch Slurm's node states: drained or failing nodes are warnings, nodes that are down are errors.

    It runs `scontrol show node -o`, on any machine that has it.
    """
    from cli.watch import slurm as states
    from cli.watch.watching import watch as run

    run(server, states.look, every_s=every_s, once=once, as_json=output is Format.JSON)


@app.command()
def kubernetes(
    api: Annotated[str | None, typer.Option(help="Address of Kubernetes' API. Default: that of this pod's.")] = None,
    account: Annotated[
        Path | None, typer.Option(help="Folder with the service account's `token` and `ca.crt`. Default: the pod's.")
    ] = None,
    errors: Annotated[
        list[str] | None, typer.Option("--error", metavar="TYPE", help="A condition that isolates; repeatable.")
    ] = None,
    ignored: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="TYPE", help="A condition that means nothing; repeatable.")
    ] = None,
    taints: Annotated[
        list[str] | None, typer.Option("--taint", metavar="KEY", help="A further taint that drains; repeatable.")
    ] = None,
    every_s: Every = 15.0,
    once: Once = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Watch the conditions and taints of Kubernetes' nodes, and what NVSentinel says of them.

    Conditions of troubles, and taints of nodes that are to go away, are warnings; --error makes a condition an error.
    """
    from cli.watch.kubernetes import ACCOUNT, Heard, Nodes
    from cli.watch.watching import watch as run

    nodes = Nodes(api, account or ACCOUNT, Heard(errors or (), ignored or (), taints or ()))
    run(server, nodes.look, every_s=every_s, once=once, as_json=output is Format.JSON)


@app.command()
def cloud(
    provider: Annotated[Provider, typer.Argument(help="Who runs this machine.")],
    node: Node = None,
    ahead_s: Annotated[
        float, typer.Option("--ahead-s", min=0.0, help="Notices of what happens later wait until then, seconds.")
    ] = 900.0,
    metadata: Annotated[str | None, typer.Option(help="Address of the metadata service. Default: the usual one.")] = (
        None
    ),
    every_s: Every = 5.0,
    once: Once = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Watch a cloud's notices of maintenance and preemption of this machine: warnings with their deadline."""
    from cli.watch.cloud import Notices
    from cli.watch.watching import watch as run

    notices = Notices(provider, _own(node), ahead_s, metadata)
    run(server, notices.look, every_s=every_s, once=once, as_json=output is Format.JSON)


@app.command()
def machine(
    node: Node = None,
    root: Annotated[Path, typer.Option(help="Folder with the machine's `sys` and `dev`.")] = Path("/"),
    every_s: Every = 10.0,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Watch this machine's InfiniBand and RoCE ports, and what its kernel says of network cards and PCIe.

    A port that was active and is down is an error, one that loses its link again and again a warning. It needs to read
    /dev/kmsg: root, or CAP_SYSLOG.
    """
    import time

    from cli.watch.machine import Machine
    from cli.watch.watching import watch as run

    found = Machine(_own(node), root)
    run(
        server,
        lambda: found.look(time.monotonic()),
        every_s=every_s,
        once=False,
        as_json=output is Format.JSON,
    )


def _own(node: str | None) -> str:
    """Return the name of the node on this machine: the one given, or that of the settings."""
    from shared.settings.model import read_settings

    return read_settings().node if node is None else checked_node(node)
