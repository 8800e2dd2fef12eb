"""Whether recoveries wear a task out: many killed ranks in one run, and two survivors whose resources are watched.

    .venv/bin/python -m benchmarks.endurance [--recoveries 50]

Every time the same rank is killed, and comes back; the processes of the others live through all recoveries. JSON lines
on stdout: one for each recovery with what the survivors use after it, then the bounds: medians of the last recoveries
over those of the first. Exit status 0 if all bounds hold.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from functools import partial

import psutil

from benchmarks.embedded import Embedded, embedded, small_task
from benchmarks.report import Report, at_least, run
from cli.waiting import Record

LIMIT_S = 60.0
"""For one fault to be healed, which takes seconds; a longer time ends the benchmark with an error."""

WINDOW = 10
"""Recoveries at either end that are compared by their medians."""

STEPS_BETWEEN = 12
"""Steps between two recoveries: enough to time some."""

LIMITS = {"threads": 1.0, "sockets": 1.0, "descriptors": 1.0, "rss_bytes": 1.05, "step_s": 1.1, "step_cpu_s": 1.1}
"""Bounds on last over first. Memory that the allocator keeps settles within a few per cent; a step's wall time varies
with what else the machine does, its CPU time less so."""


def usage(pid: int) -> Record:
    """Return what a process uses."""
    process = psutil.Process(pid)
    descriptors = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    return {
        "threads": process.num_threads(),
        "sockets": sum(d.startswith("socket:") for d in descriptors),
        "descriptors": len(descriptors),
        "rss_bytes": process.memory_info().rss,
    }


def cpu_s(pids: list[int]) -> float:
    """Return the CPU time that processes have used, in seconds."""
    return sum(times.user + times.system for pid in pids for times in [psutil.Process(pid).cpu_times()])


async def recover(system: Embedded, number: int, survivors: list[int]) -> Record:
    """Kill the rank on the last worker, wait until it is back; return the time, and the most that a survivor uses."""
    client = system.client
    known = await client.known_incidents()
    before = await client.task("first")
    victim = max(before["ranks"], key=lambda r: str(r["worker"]))
    at = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    incident = await client.until_restored("process-exit", LIMIT_S, known=known)
    start_step, start_s = int((await client.task("first"))["step"]), cpu_s(survivors)
    found = await client.until_step("first", start_step + STEPS_BETWEEN, LIMIT_S)
    steps = int(found["step"]) - start_step
    pids = {r["pid"] for r in found["ranks"]}
    used = [usage(pid) for pid in survivors]
    return {
        "recovery": number,
        "wall_s": round(time.time() - at, 3),
        "survivors_kept": set(survivors) <= pids,
        "steps_recomputed": incident["steps_recomputed"],
        **{name: max(u[name] for u in used) for name in used[0]},
        "step_s": found["step_s"],
        "step_cpu_s": round((cpu_s(survivors) - start_s) / steps, 5),
    }


def judge(rows: list[Record], report: Report) -> None:
    """Compare the first recoveries with the last ones."""
    report.equal("recoveries that kept the survivors", sum(r["survivors_kept"] for r in rows), len(rows))
    report.equal("steps recomputed", sum(r["steps_recomputed"] for r in rows), 0)
    for name, limit in LIMITS.items():
        first = statistics.median(r[name] for r in rows[:WINDOW])
        last = statistics.median(r[name] for r in rows[-WINDOW:])
        report.at_most(f"{name}: last over first", round(last / first, 3), limit, first=first, last=last)


async def measure(recoveries: int, report: Report) -> None:
    """Measure and print."""
    rows = []
    async with embedded(3, 1) as system:
        task = small_task("first", system.corpus, workers={"min": 1, "max": 3}, max_restarts=1000)
        await system.client.submit(task)
        started = await system.client.until_step("first", STEPS_BETWEEN, LIMIT_S)
        survivors = [r["pid"] for r in sorted(started["ranks"], key=lambda r: str(r["worker"]))[:-1]]
        for number in range(recoveries):
            rows.append(await recover(system, number, survivors))
            report.line("recovery", **rows[-1])
    judge(rows, report)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.endurance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recoveries", type=at_least(1), default=50)
    options = parser.parse_args()
    return run(partial(measure, options.recoveries))


if __name__ == "__main__":
    sys.exit(main())
