"""``unicron stop``."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from cli.options import Format, Output, Server, TaskName
from cli.output import print_json


def stop(
    task: TaskName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has stopped.")] = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Stop a task at the next step, with a checkpoint.

    A later submission under its name resumes from that checkpoint.
    """
    from cli.client import Client
    from cli.waiting import wait_for_end

    with Client(server) as client:
        answer = client.post(f"/v1/tasks/{quote(task, safe='')}/stop")
        if wait:
            answer = wait_for_end(server, answer["name"])
    if output is Format.JSON:
        print_json(answer)
    else:
        at = f" at step {answer['step']}" if wait else ""
        print(f"{answer['name']}: {answer['state']}{at}")
    if wait and answer["state"] == "failed":
        raise typer.Exit(1)
