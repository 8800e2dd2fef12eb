"""What a small cluster takes beside its ranks, for the sizing table: processor time, memory, log. JSON lines.

    .venv/bin/python -m benchmarks.sizing [--nodes 4] [--idle 20] [--faults 5] [--events 100000]

An embedded stack trains one task; for ``--idle`` seconds nothing happens to it. Then one rank after the other is
killed. ``process``: cores and resident memory of each service, of nats-server and of the agents' processes (without
ranks, fork servers and what they start) in the time in which nothing happens. ``log``: events and bytes (of the columns
as text) that a task's start, that time, and one fault add. ``backup``, ``restore``: of a log of ``--events`` events
(``benchmarks.log_course``), seconds and bytes for each event.

Nothing is bounded: the figures are for docs/sizing.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil

from benchmarks.embedded import Embedded, embedded, small_task
from benchmarks.log_course import write
from benchmarks.report import Report, run
from cli.stack.children import SERVICES
from cli.waiting import WaitingClient
from shared.archive.backup import back_up
from shared.archive.restoration import restore
from shared.log.log import EventLog

LIMIT_S = 60.0
"""For one fault to be healed, which takes seconds."""

FIRST_STEPS = 20
"""Steps after which the rate of a task has been recorded for the first time."""


def log_size(run_dir: Path) -> tuple[int, int]:
    """Return the number of events, and their bytes as text."""
    with closing(sqlite3.connect(f"file:{run_dir / 'log.db'}?mode=ro", uri=True)) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(log)")]
        total = " + ".join(f"length(CAST({column} AS BLOB))" for column in columns)
        events, size = connection.execute(f"SELECT count(*), sum({total}) FROM log").fetchone()  # nosec B608
    return int(events), int(size)


def processes(system: Embedded) -> dict[str, psutil.Process]:
    """Return the processes of the control plane, and each node's supervisor and agent."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        command = process.cmdline()
        for name, module in SERVICES.items():
            if module in command:
                found[name] = process
        if command and Path(command[0]).name == "nats-server":
            found["nats"] = process
        node = process.environ().get("UNICRON_NODE", "")
        for name, module in (("supervisor", "services.agent.main"), ("agent", "services.agent.agent_process")):
            if module in command:
                found[f"{name} {node}"] = process
    return found


def used(found: dict[str, psutil.Process]) -> dict[str, float]:
    """Return the processor seconds of each process."""
    return {name: sum(process.cpu_times()[:2]) for name, process in found.items()}


def measure_backup(events: int, report: Report) -> None:
    """Back up a log, again when nothing has been added, and restore it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "log.db", events)
        with closing(EventLog(f"sqlite:///{folder / 'log.db'}", read_only=True)) as log:
            for what in ("first", "nothing new"):
                began_s = time.monotonic()
                done = back_up(log, folder / "backup")
                taken_s = round(time.monotonic() - began_s, 1)
                size = done.added.size_bytes if done.added is not None else 0
                per_event = round(size / done.position)
                report.line("backup", what=what, events=done.position, seconds=taken_s, bytes_per_event=per_event)
        began_s = time.monotonic()
        place = restore(folder / "backup", f"sqlite:///{folder / 'new.db'}")
        report.line("restore", events=place.position, seconds=round(time.monotonic() - began_s, 1))


async def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report."""
    await asyncio.to_thread(measure_backup, options.events, report)
    async with embedded(options.nodes, 1) as system:
        run_dir, client = system.stack.run_dir, system.client
        before = log_size(run_dir)
        spec = small_task(
            "main", system.corpus, checkpoint={"every": 0}, workers={"min": 1, "max": options.nodes}, max_restarts=1000
        )
        await client.submit(spec)
        await client.until_step("main", FIRST_STEPS, LIMIT_S)
        started = log_size(run_dir)
        found = processes(system)
        at_first = used(found)
        await asyncio.sleep(options.idle)
        later = used(found)
        for name, process in sorted(found.items()):
            cores = (later[name] - at_first[name]) / options.idle
            memory = process.memory_info().rss
            report.line("process", name=name, cores=round(cores, 4), memory_mib=round(memory / 2**20, 1))
        quiet = log_size(run_dir)
        for _ in range(options.faults):
            await _kill(client)
        after = log_size(run_dir)
        report.line("log", what="start of a task", **_difference(before, started, 1))
        report.line("log", what=f"{options.idle} s without faults", **_difference(started, quiet, 1))
        report.line("log", what="one killed rank", **_difference(quiet, after, options.faults))
        report.line("log", what="database", bytes_per_event=round(_database_bytes(run_dir) / after[0]))
        stored = sum(path.stat().st_size for path in (run_dir / "nats").rglob("*") if path.is_file())
        report.line("stream", bytes_per_event=round(stored / after[0]))


def _database_bytes(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in run_dir.glob("log.db*"))


def _difference(one: tuple[int, int], other: tuple[int, int], number: int) -> dict[str, float]:
    return {"events": round((other[0] - one[0]) / number, 1), "bytes": round((other[1] - one[1]) / number)}


async def _kill(client: WaitingClient) -> None:
    """Kill a rank, and wait until its incident is over and the task trains."""
    known = await client.known_incidents()
    task = await client.task("main")
    os.kill(task["ranks"][-1]["pid"], signal.SIGKILL)
    await client.until_restored("process-exit", LIMIT_S, known=known)
    await client.until_step("main", (await client.task("main"))["step"] + FIRST_STEPS, LIMIT_S)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="number of nodes, of one worker each")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds in which nothing happens")
    parser.add_argument("--faults", type=int, default=5, help="number of ranks that are killed")
    parser.add_argument("--events", type=int, default=100_000, help="length of the log that is backed up")
    return run(partial(measure, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
