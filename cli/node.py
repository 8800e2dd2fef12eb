"""``unicron node``: on the machine that has the key directory, and next to NATS."""

from __future__ import annotations

from pathlib import Path

import typer

from cli.options import Format, KeyPlace, NodeName, Output, PidFile, key_directory, tell_reload
from cli.output import print_json
from shared.errors import InvalidInput
from shared.names import is_name

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def node() -> None:
    """Give a node the right to use NATS, or take it away."""


@app.command()
def add(name: NodeName, keys: KeyPlace = None, pid_file: PidFile = None, output: Output = Format.TEXT) -> None:
    """Make a node's credential, and print its file: the one file to copy to the node.

    The node's agent gets it as UNICRON_NATS_CREDENTIAL, and has its name and the servers from there. Commands under way
    on other nodes are not disturbed.
    """
    if not is_name(name):
        problem = "must be 1 to 63 lower-case letters, digits and hyphens"
        raise InvalidInput(f"NODE: {name!r} {problem}", [{"field": "NODE", "value": name, "problem": problem}])
    directory = key_directory(keys)
    path: Path = directory.add_node(name).resolve()
    reloaded = tell_reload(directory, pid_file)
    if output is Format.JSON:
        print_json({"node": name, "credential": str(path), "reloaded": reloaded})
    else:
        print(path)


@app.command()
def remove(name: NodeName, keys: KeyPlace = None, pid_file: PidFile = None, output: Output = Format.TEXT) -> None:
    """Take a node's right to use NATS away: its connections are closed, and its credential is worth nothing.

    Its ranks train on without it until they are told otherwise: drain the node first.
    """
    directory = key_directory(keys)
    directory.remove_node(name)
    reloaded = tell_reload(directory, pid_file)
    if output is Format.JSON:
        print_json({"node": name, "reloaded": reloaded})
