"""How soon services are ready on a long log, with and without state snapshots. JSON lines; exit status 1 if missed.

    .venv/bin/python -m benchmarks.snapshots [--events 50000] [--folder FOLDER] [--only-with]

The log is made by the real planner (``benchmarks.log_course``: its mix and its seed). Each service is a process of its
own, over a bus that has the whole log already. For each

    write       the program that writes a snapshot, without one before
    bound       from the start of its process until it is ready, from that snapshot at the end of the log
    without     from the start of its process until it is ready, which folds the whole log

with the processor time and the peak of memory of the process up to then.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import psutil

from benchmarks.log_course import prepare
from benchmarks.report import Report, at_least, run
from benchmarks.stream import fill
from shared.errors import Unavailable
from shared.log.log import EventLog
from shared.nats.nats_server import NatsServer

SERVICES = ("detector", "planner", "transition")

MOST_READY_S = 5.0

_PATIENCE_S = "50"
"""``UNICRON_NODE_TIMEOUT_S``: nobody sends heartbeats here, and no event about that is to come into the log."""


async def measure(run_dir: Path, report: Report, *, only_with: bool) -> None:
    """Measure the starts of all services on a log.

    Args:
        run_dir: has the log.
        report: takes the lines.
        only_with: do not start services without a snapshot.
    """
    async with AsyncExitStack() as stack:
        # In memory: a million messages are not to wait for the disk.
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="unicron-snapshots-", dir="/dev/shm"))
        nats = await stack.enter_async_context(NatsServer(Path(store)))
        log = stack.enter_context(closing(EventLog(f"sqlite:///{run_dir / 'log.db'}")))
        last = log.last_position()
        began = time.perf_counter()
        await fill(nats, log)
        report.line("stream", events=last, wall_s=round(time.perf_counter() - began, 1))
        for service in SERVICES:
            environment = _environment(service, run_dir, nats)
            report.line("write", service=service, events=last, **await _write(service, environment, last))
            (snapshot,) = (run_dir / "state-snapshots").glob(f"{service}-*")
            found = await _ready(service, environment)
            size_mb = round(snapshot.stat().st_size / 1e6, 2)
            seconds = found.pop("wall_s")
            report.at_most(f"{service} is ready from a snapshot, s", seconds, MOST_READY_S, size_mb=size_mb, **found)
        for service in () if only_with else SERVICES:
            environment = _environment(service, run_dir, nats) | {"UNICRON_STATE_SNAPSHOT_EVENTS": "0"}
            found = await _ready(service, environment)
            report.line("without", service=service, events=last, **found)


def _environment(service: str, run_dir: Path, nats: NatsServer) -> dict[str, str]:
    return {
        **os.environ,
        "UNICRON_RUN_DIR": str(run_dir),
        "UNICRON_NATS_URL": nats.url,
        "UNICRON_NATS_CREDENTIAL": str(nats.keys.credential_file(service)),
        "UNICRON_NODE_TIMEOUT_S": _PATIENCE_S,
    }


async def _ready(service: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Start a service, and end it once it is ready; return what that took."""
    began = time.perf_counter()
    process = await _started(f"services.{service}.main", environment)
    assert process.stdout is not None
    line = await process.stdout.readline()
    wall_s = time.perf_counter() - began
    if line != b"ready\n":
        await process.wait()
        raise Unavailable(f"{service} did not start")
    taken = psutil.Process(process.pid)
    times, peak_kb = taken.cpu_times(), _peak_kb(process.pid)
    process.kill()  # a planned stop would write a snapshot
    await process.communicate()
    return {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(times.user + times.system, 2),
        "peak_mib": round(peak_kb / 1024),
    }


async def _write(service: str, environment: Mapping[str, str], last: int) -> dict[str, Any]:
    """Write a snapshot of a service; return what that took."""
    began = time.perf_counter()
    process = await _started(f"services.{service}.state_snapshot", environment, str(last))
    if await process.wait():
        raise Unavailable(f"no snapshot of {service}")
    return {"wall_s": round(time.perf_counter() - began, 2)}


async def _started(module: str, environment: Mapping[str, str], *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )


def _peak_kb(pid: int) -> int:
    """Return the peak of a process's memory, in KiB (``VmHWM``)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=at_least(1000), default=50_000)
    parser.add_argument("--folder", type=Path, help="keep the log here, and use it if it is there")
    parser.add_argument("--only-with", action="store_true", help="no starts without a snapshot")
    given = parser.parse_args()

    async def whole(report: Report) -> None:
        with tempfile.TemporaryDirectory(prefix="unicron-snapshots-") as temporary:
            run_dir = (given.folder or Path(temporary)).resolve()
            prepare(run_dir, given.events, report)
            for snapshot in run_dir.glob("state-snapshots/*"):
                snapshot.unlink()
            await measure(run_dir, report, only_with=given.only_with)

    return run(whole)


if __name__ == "__main__":
    sys.exit(main())
