"""``unicron stop``, ``kill``, ``resume`` and ``delete``: the ends of a task, and its going on."""

from __future__ import annotations

import sys
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.options import Format, Output, Server, TaskName, connected
from cli.output import printed_json
from unicron_client.answers import restarts_whole


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
    from cli.waiting import wait_for_stop

    with connected(server) as client:
        answer = client.post(f"/v1/tasks/{quote(task, safe='')}/stop", {"lose_steps": discard})
        if wait:
            answer = wait_for_stop(server, answer["name"])
    if not printed_json(answer, output):
        print(_outcome(answer) if wait else f"{answer['name']}: {answer['state']}")
    if wait and (answer["state"] == "failed" or answer["stop_refused"]):
        raise typer.Exit(1)


def _outcome(task: dict[str, Any]) -> str:
    """Return what has become of a task that was asked to stop, and what was saved, in words."""
    if task["stop_refused"]:
        return f"{task['name']}: {task['state']}: {task['reason']}; --discard stops it without a checkpoint"
    saved = f", saved in {task['checkpoint']}" if task["checkpoint"] and task["saved_step"] == task["step"] else ""
    return f"{task['name']}: {task['state']} at step {task['step']}{saved}: {task['reason']}"


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
    from cli.waiting import wait_for_stop

    with connected(server) as client:
        path = f"/v1/tasks/{quote(task, safe='')}"
        if not yes and sys.stdin.isatty():
            _confirm(client.get(path))
        asked = client.post(f"{path}/stop", {"lose_steps": True, "at_once": True})
        ended = wait_for_stop(server, asked["name"])
    if not printed_json(ended, output):
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


def delete(task: TaskName, server: Server = None, output: Output = Format.TEXT) -> None:
    """List a task that has ended no more.

    Its events stay in the log, and its checkpoints and output where they are: a later submission of the name goes on
    from the newest checkpoint.
    """
    with connected(server) as client:
        answer = client.request("DELETE", f"/v1/tasks/{quote(task, safe='')}")
    if printed_json(answer, output):
        return
    kept = f"; its checkpoint stays: {answer['checkpoint']}" if answer["checkpoint"] else ""
    print(f"{answer['name']}: deleted{kept}")


def resume(task: TaskName, server: Server = None, output: Output = Format.TEXT) -> None:
    """Have a task that was stopped or has failed go on from its checkpoint.

    Its last specification is submitted again, with the changes that were made while it ran. Newer copies that its nodes
    still have in memory count before the checkpoint, and where there is none. A task that waits after
    failures is tried again at once.
    """
    with connected(server) as client:
        answer = client.post(f"/v1/tasks/{quote(task, safe='')}/resume")
    if not printed_json(answer, output):
        where = f"step {answer['step']}{', or from a newer copy in memory' if answer['copies_kept'] else ''}"
        if restarts_whole(answer["spec"]):
            where = "the script's own checkpoint"
        print(f"{answer['name']}: {answer['state']}, goes on from {where}")
