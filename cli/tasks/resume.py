"""``unicron resume``."""

from __future__ import annotations

from urllib.parse import quote

from cli.options import Format, Output, Server, TaskName
from cli.output import print_json
from unicron_client.answers import restarts_whole


def resume(task: TaskName, server: Server = None, output: Output = Format.TEXT) -> None:
    """Have a task that was stopped or has failed go on from its checkpoint.

    Its last specification is submitted again, with the changes that were made while it ran. Newer copies that its nodes
    still have in memory count before the checkpoint, and where there is none. A task that waits after
    failures is tried again at once.
    """
    from cli.client import Client

    with Client(server) as client:
        answer = client.post(f"/v1/tasks/{quote(task, safe='')}/resume")
    if output is Format.JSON:
        print_json(answer)
    else:
        where = f"step {answer['step']}{', or from a newer copy in memory' if answer['copies_kept'] else ''}"
        if restarts_whole(answer["spec"]):
            where = "the script's own checkpoint"
        print(f"{answer['name']}: {answer['state']}, goes on from {where}")
