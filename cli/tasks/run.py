"""``unicron run``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Format, Output

if TYPE_CHECKING:
    from shared.launch.check import Check

app = typer.Typer(add_completion=False)

REFUSED = 3
"""Exit status of a command line that would train wrongly."""


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- SCRIPT [ARGS]...",
            help="What stands behind torchrun; torchrun with its options, srun and python may stand in front.",
        ),
    ],
    check: Annotated[
        bool,
        typer.Option("--check", help="Say how the task would run and why; start nothing. Exit 3 if it is refused."),
    ] = False,
    output: Output = Format.TEXT,
) -> None:
    """Check what stood behind torchrun: whether its task is healed inside the step, or by whole restarts.

    Needs neither a cluster nor a device. Where Megatron-LM's training module can be imported its own parser reads the
    arguments, in a process of its own; elsewhere a table of its releases does.
    """
    from cli.output import print_json_line
    from shared.errors import InvalidInput

    if not check:
        problem = "must be given: this version checks a command line, and `unicron submit` starts a task"
        raise InvalidInput(f"--check: {problem}", [{"field": "--check", "value": False, "problem": problem}])
    found = checked(command)
    if output is Format.JSON:
        print_json_line(found.document())
    else:
        _show(found)
    if found.verdict == "refused":
        raise typer.Exit(REFUSED)


def checked(command: list[str]) -> Check:
    """Return the verdict on a command line.

    Raises:
        InvalidInput: it starts no script.
    """
    from cli.tasks.own_parser import is_here, own_arguments
    from shared.launch.arguments import read_arguments
    from shared.launch.check import check
    from shared.launch.command import parse_command
    from shared.launch.script import Loop, read_script

    launch = parse_command(command)
    path = launch.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    folders = [Path.cwd(), *(Path(part) for part in path.split(os.pathsep) if part)]
    script = read_script(launch.script, launch.module, folders, installed_core)
    own = None
    if script.loop is Loop.MEGATRON_LM and is_here(script, [*folders, *map(Path, sys.path)]):
        own = own_arguments(launch, script, os.environ)
    return check(launch, script, own or read_arguments(launch.arguments), own_parser=own is not None)


def installed_core() -> str:
    """Return the version of megatron-core that is installed beside this command; empty: none is."""
    from importlib import metadata

    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return ""


SENTENCES = {
    "unchanged": "runs as it is, and is healed inside the step",
    "speed-off": "is healed inside the step, without what only concerns speed",
    "restart": "runs, and is healed by whole restarts from its own checkpoint",
    "refused": "would train wrongly or show a secret, and is refused",
}
"""Verdict -> what is said of the task."""


def _show(found: Check) -> None:
    """Print a verdict as text."""
    from cli.output import print_table

    task = found.task
    print(f"{task['script'] or task['module']}: {found.verdict.value}: it {SENTENCES[found.verdict.value]}")
    if found.findings:
        rows = [
            [f.argument, f.what.value, f"{f.why}. Instead: {f.instead.partition(chr(10))[0]}"] for f in found.findings
        ]
        print_table(("argument", "effect", "why"), rows)
    if task["loop"] == "other":
        from shared.launch.check import LINES

        print(f"\nIn a few lines it would heal inside the step:\n\n{LINES}")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
