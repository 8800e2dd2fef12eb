"""``unicron wait``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cli.options import Format, Output, Server, TaskName
from cli.output import printed_json
from unicron_client.answers import step_of


class For(StrEnum):
    """What is waited for."""

    END = "end"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"


def wait(
    task: TaskName,
    until: Annotated[
        For,
        typer.Option("--for", help="end; running: at full strength; succeeded, stopped: exit 1 on any other end."),
    ] = For.END,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Longest wait; exit 8 when it has passed.")
    ] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Wait until a task has ended, or is in a state.

    Exit status: 0 if it came to what was waited for, 1 if the task has ended in another way, 8 if the time has passed.
    """
    from cli.progress import task_bar
    from cli.waiting import wait_for_task
    from unicron_client.resources import ENDED

    wanted = ENDED if until is For.END else frozenset({until.value})
    with task_bar(task) as seen:
        found = wait_for_task(server, task, wanted | ENDED, timeout, seen)
    if not printed_json(found, output):
        reason = f"; {found['reason']}" if found["reason"] else ""
        print(f"{found['name']}: {found['state']} at step {step_of(found)}{reason}")
    if found["state"] not in wanted:
        raise typer.Exit(1)
