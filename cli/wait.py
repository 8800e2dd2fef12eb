"""``unicron wait``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cli.options import Format, Output, Server, TaskName
from cli.output import print_json


class For(StrEnum):
    """What is waited for."""

    END = "end"
    RUNNING = "running"
    SUCCEEDED = "succeeded"


def wait(
    task: TaskName,
    until: Annotated[
        For, typer.Option("--for", help="end; running: at full strength; succeeded: exit 1 on any other end.")
    ] = For.END,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Longest wait; exit 5 when it has passed.")
    ] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Wait until a task has ended, or is in a state.

    Exit status: 0 if it came to what was waited for, 1 if the task has ended in another way.
    """
    from cli.task_progress import task_bar
    from cli.waiting import wait_for_task
    from shared.tasks import ENDED, TaskState

    ends = {state.value for state in ENDED}
    wanted = {For.END: ends, For.RUNNING: {TaskState.RUNNING.value}, For.SUCCEEDED: {TaskState.SUCCEEDED.value}}[until]
    with task_bar(task) as seen:
        found = wait_for_task(server, task, wanted | ends, timeout, seen)
    if output is Format.JSON:
        print_json(found)
    else:
        reason = f"; {found['reason']}" if found["reason"] else ""
        print(f"{found['name']}: {found['state']} at step {found['step']} of {found['steps']}{reason}")
    if found["state"] not in wanted:
        raise typer.Exit(1)
