"""``unicron kill``."""

from __future__ import annotations

import sys
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.options import Format, Output, Server, TaskName
from cli.output import print_json


def kill(
    task: TaskName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """End a task at once, without a checkpoint.

    Its processes are ended in the midst of a step (SIGKILL), whatever they do: steps since its newest checkpoint are
    lost. A later submission under its name goes on from that checkpoint. `unicron stop` waits for the step, and saves.
    On a terminal the command asks first.
    """
    from cli.client import Client
    from cli.waiting import wait_for_stop

    with Client(server) as client:
        path = f"/v1/tasks/{quote(task, safe='')}"
        if not yes and sys.stdin.isatty():
            _confirm(client.get(path))
        asked = client.post(f"{path}/stop", {"lose_steps": True, "at_once": True})
        ended = wait_for_stop(server, asked["name"])
    if output is Format.JSON:
        print_json(ended)
    else:
        print(f"{ended['name']}: {ended['state']} at step {ended['step']}: {ended['reason']}")


def _confirm(task: dict[str, Any]) -> None:
    """Ask on standard error; end the command unless the answer is yes."""
    saved = (
        f"what follows step {task['saved_step']}, that of its newest checkpoint" if task["checkpoint"] else "all of it"
    )
    question = f"End {task['name']} ({task['state']}, step {task['step']}) at once? {saved.capitalize()} is lost."
    # Not typer.confirm, which prints the space behind a question on standard output.
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise typer.Exit(1)
