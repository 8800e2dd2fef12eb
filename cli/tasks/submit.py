"""``unicron submit``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.options import Format, Output, Server, Ship, ShipFiles, connected
from cli.output import clock, print_json
from unicron_client.answers import step_of


def submit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The task's specification (YAML); - for standard input.")
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the task has ended; exit 1 unless it succeeded.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option("--key", help="Idempotency key: the same submission again with it starts nothing new."),
    ] = None,
    ship: Ship = None,
    ship_file: ShipFiles = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Submit a task.

    The specification is checked before it is sent. Relative paths in it are taken from its own folder.
    """
    from cli.progress import task_bar
    from cli.waiting import wait_for_end
    from unicron_client.specifications import as_body, specification

    spec, shipped = specification(file), None
    if ship is not None:
        from unicron_client.shipped_code import shipment

        shipped = shipment(ship, ship_file or ())
        spec = shipped.of(spec)
        print(shipped, file=sys.stderr)
    with connected(server) as client:
        if shipped is not None:
            client.send_code(shipped)
        task, new = client.submission(as_body(spec), key)
        if not new:
            print(_repeated(task), file=sys.stderr)
        elif output is not Format.JSON:
            resumed = f", goes on from step {task['step']}" if task["step"] else ""
            print(f"submitted {task['name']} ({task['state']}{resumed})", flush=True)
        if wait:
            with task_bar(task["name"]) as seen:
                task = wait_for_end(server, task["name"], seen)
            if output is not Format.JSON:
                print(f"{task['name']}: {task['state']} at step {step_of(task)}; {task['reason']}")
    if output is Format.JSON:
        print_json(task)
    if wait and task["state"] != "succeeded":
        raise typer.Exit(1)


def _repeated(task: dict[str, Any]) -> str:
    """Return what is said of a submission whose key has submitted the task before."""
    when, now = clock(task["submitted_at"]), f"{task['state']}, step {step_of(task)}"
    return f"{task['name']}: already submitted at {when} UTC with this key; nothing new was started ({now})"
