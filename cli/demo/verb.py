"""``unicron demo``: two tasks share a cluster, faults strike, both tasks end with the failure-free result."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.demo.report import Report, print_report
from cli.demo.run import NODES, WORKERS_PER_NODE, DemoRun
from cli.here import LOCK
from cli.stack.devices import Device, DeviceOption, Division, divide, found
from cli.stack.run_directory import DEMO_MARKER, RunDirectory
from shared.errors import Conflict, UnicronError

FILE_COLUMNS = 160
"""Width of the tables where the output is no terminal, enough for all columns."""


class DemoFailed(UnicronError):
    """A property that the demo promises does not hold."""


class Format(StrEnum):
    """How the result is printed."""

    TEXT = "text"
    JSON = "json"


def fresh_directory(path: Path) -> Path:
    """Return ``path`` as an empty folder; files of an earlier demo are deleted.

    Raises:
        Conflict: it contains files that no demo made, or a stack uses it.
    """
    if path.exists() and any(path.iterdir()) and not (path / DEMO_MARKER).exists():
        raise Conflict(f"{path} contains more than a demo's run; give another folder, --run-dir {path / 'demo'}")
    with RunDirectory(path) as directory:
        for entry in directory.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
        (directory.path / DEMO_MARKER).touch()
    return directory.path


async def _run(run_dir: Path, seed: int, console: Console, division: Division) -> Report:
    return await DemoRun(run_dir, seed, console, division).run()


def demo(
    run_dir: Annotated[Path, typer.Option(help="Folder for everything the run writes.")] = Path(".unicron"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the corpus and of both tasks.")] = 1234,
    device: DeviceOption = Device.AUTO,
    output: Annotated[
        Format, typer.Option("--output", "-o", help="text, or json: one object as last line.")
    ] = Format.TEXT,
) -> None:
    """Train two tasks through a killed process, an exception, a hang and a lost node; prove the result unchanged."""
    stream = sys.stderr if output is Format.JSON else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else FILE_COLUMNS)
    started = time.monotonic()
    division = divide(found(), device, NODES, WORKERS_PER_NODE, who="the demo")
    report = asyncio.run(_run(fresh_directory(run_dir), seed, console, division))
    report.wall_s = time.monotonic() - started
    print_report(report, console)
    if output is Format.JSON:
        print(json.dumps(report.summary()))
    if not report.ok:
        raise DemoFailed("; ".join(f"{c.name}: {c.detail}" for c in report.checks if not c.ok))
