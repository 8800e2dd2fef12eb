"""``unicron stop``."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.options import Format, Output, Server, TaskName
from cli.output import print_json


def stop(
    task: TaskName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has stopped, or could not be saved.")] = False,
    discard: Annotated[bool, typer.Option("--discard", help="Stop even if steps since a checkpoint are lost.")] = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Stop a task at the next step, with a checkpoint.

    A later submission under its name resumes from that checkpoint. A task whose checkpoint cannot be written does not
    stop, unless --discard is given: it trains on.
    """
    from cli.client import Client
    from cli.waiting import wait_for_stop

    with Client(server) as client:
        answer = client.post(f"/v1/tasks/{quote(task, safe='')}/stop", {"lose_steps": discard})
        if wait:
            answer = wait_for_stop(server, answer["name"])
    if output is Format.JSON:
        print_json(answer)
    else:
        print(_outcome(answer) if wait else f"{answer['name']}: {answer['state']}")
    if wait and (answer["state"] == "failed" or answer["stop_refused"]):
        raise typer.Exit(1)


def _outcome(task: dict[str, Any]) -> str:
    """Return what has become of a task that was asked to stop, and what was saved, in words."""
    if task["stop_refused"]:
        return f"{task['name']}: {task['state']}: {task['reason']}; --discard stops it without a checkpoint"
    saved = f", saved in {task['checkpoint']}" if task["checkpoint"] and task["saved_step"] == task["step"] else ""
    return f"{task['name']}: {task['state']} at step {task['step']}{saved}: {task['reason']}"
