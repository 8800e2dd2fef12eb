"""``unicron delete``."""

from __future__ import annotations

from urllib.parse import quote

from cli.options import Format, Output, Server, TaskName
from cli.output import print_json


def delete(task: TaskName, server: Server = None, output: Output = Format.TEXT) -> None:
    """List a task that has ended no more.

    Its events stay in the log, and its checkpoints and output where they are: a later submission of the name goes on
    from the newest checkpoint.
    """
    from cli.client import Client

    with Client(server) as client:
        answer = client.request("DELETE", f"/v1/tasks/{quote(task, safe='')}")
    if output is Format.JSON:
        print_json(answer)
        return
    kept = f"; its checkpoint stays: {answer['checkpoint']}" if answer["checkpoint"] else ""
    print(f"{answer['name']}: deleted{kept}")
