"""``unicron submit``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Format, Output, Server
from cli.output import print_json

if TYPE_CHECKING:
    from shared.tasks import TaskSpec


def submit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The task's specification (YAML); - for standard input.")
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the task has ended; exit 1 unless it succeeded.")
    ] = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Submit a task.

    The specification is checked before it is sent. Relative paths in it are taken from its own folder.
    """
    from cli.client import Client
    from cli.task_progress import task_bar
    from cli.waiting import wait_for_end
    from shared.tasks import TaskState, load_spec

    spec = with_absolute_paths(load_spec(_read(file)), Path.cwd() if str(file) == "-" else file.parent)
    with Client(server) as client:
        task = client.post("/v1/tasks", spec.model_dump(mode="json", by_alias=True))
        if output is not Format.JSON:
            resumed = f", goes on from step {task['step']}" if task["step"] else ""
            print(f"submitted {task['name']} ({task['state']}{resumed})", flush=True)
        if wait:
            with task_bar(task["name"]) as seen:
                task = wait_for_end(server, task["name"], seen)
            if output is not Format.JSON:
                print(f"{task['name']}: {task['state']} at step {task['step']} of {task['steps']}; {task['reason']}")
    if output is Format.JSON:
        print_json(task)
    if wait and task["state"] != TaskState.SUCCEEDED:
        raise typer.Exit(1)


def _read(file: Path) -> str:
    """Return the text of a file.

    Raises:
        InvalidInput: it cannot be read, or is no UTF-8 text.
    """
    from shared.errors import InvalidInput
    from shared.tasks import MAX_SPEC_BYTES

    try:
        if str(file) == "-":
            return sys.stdin.read(MAX_SPEC_BYTES + 1)
        with open(file, encoding="utf-8") as stream:
            return stream.read(MAX_SPEC_BYTES + 1)
    except OSError as err:
        raise InvalidInput(f"cannot read {file}: {err.strerror or err}") from err
    except UnicodeDecodeError as err:
        raise InvalidInput(f"{file} is not UTF-8 text: {err}") from err


def with_absolute_paths(spec: TaskSpec, folder: Path) -> TaskSpec:
    """Return the specification with every relative path taken from ``folder``."""
    folder = folder.resolve()
    directory = spec.checkpoint.directory
    return spec.model_copy(
        update={
            "data": str(folder / spec.data),
            "script": None if spec.script is None else str(folder / spec.script),
            "checkpoint": spec.checkpoint.model_copy(
                update={"directory": None if directory is None else str(folder / directory)}
            ),
        }
    )
