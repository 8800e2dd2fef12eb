"""``unicron node add`` and ``remove``: credentials of nodes. They run where the key directory is, next to NATS."""

from __future__ import annotations

from pathlib import Path

import typer

from cli.options import Format, KeyPlace, NodeName, Output, PidFile, checked_node, key_directory, tell_reload
from cli.output import print_json, printed_json

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def node() -> None:
    """Give a node the right to use NATS, or take it away."""


@app.command()
def add(name: NodeName, keys: KeyPlace = None, pid_file: PidFile = None, output: Output = Format.TEXT) -> None:
    """Make a node's credential, and print the path of its file: the one file to copy to the node.

    `unicron agent --join FILE` is all that the node needs then: the node's name and the servers are in the file.
    Commands under way on other nodes are not disturbed.
    """
    directory = key_directory(keys)
    path: Path = directory.add_node(checked_node(name)).resolve()
    reloaded = tell_reload(directory, pid_file)
    if not printed_json({"node": name, "credential": str(path), "reloaded": reloaded}, output):
        print(path)


@app.command()
def remove(name: NodeName, keys: KeyPlace = None, pid_file: PidFile = None, output: Output = Format.TEXT) -> None:
    """Take a node's right to use NATS away: its connections are closed, and its credential is worth nothing.

    Its ranks train on without the bus until they are told otherwise: drain the node first.
    """
    directory = key_directory(keys)
    directory.remove_node(name)
    reloaded = tell_reload(directory, pid_file)
    if output is Format.JSON:
        print_json({"node": name, "reloaded": reloaded})
