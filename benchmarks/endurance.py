"""Whether recoveries wear a task out: one life, many killed ranks, two survivors that are watched.

    .venv/bin/python -m benchmarks.endurance [--recoveries 50]

Every time the same rank is killed, and comes back; the processes of the others live through all recoveries. JSON lines
on stdout: one for each recovery with what the survivors use after it, then medians of the first and the last ones, and
whether they are the same within the limits. Exit status 0 if they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.main_job import healed, task, until
from cli.client import Client
from cli.stack import Stack

Record = dict[str, Any]

WINDOW = 10
"""Recoveries at either end that are compared by their medians."""

STEPS_BETWEEN = 12
"""Steps between two recoveries: enough to time some."""

LIMITS = {"threads": 1.0, "sockets": 1.0, "descriptors": 1.0, "rss_bytes": 1.05, "step_s": 1.1, "step_cpu_s": 1.1}
"""Last over first, at most. Memory that the allocator keeps settles within a few per cent; a step's wall time varies
with whatever else the machine does, its CPU time less so."""


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
    """Return the CPU time that processes have used."""
    return sum(times.user + times.system for pid in pids for times in [psutil.Process(pid).cpu_times()])


async def recover(client: Client, number: int, survivors: list[int]) -> Record:
    """Kill the rank on the last worker, wait until it is back; return the time and the most a survivor uses then."""
    known = {i["id"] for i in client.pages("/v1/incidents")["items"]}
    before: Record = client.get("/v1/tasks/first")
    victim = max(before["ranks"], key=lambda r: str(r["worker"]))
    at = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    incident = await healed(client, known, "process-exit")
    start_step, start_s = int(client.get("/v1/tasks/first")["step"]), cpu_s(survivors)
    found = await until(client, "first", start_step + STEPS_BETWEEN)
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


def judge(rows: list[Record]) -> list[Record]:
    """Compare the first recoveries with the last ones."""
    judged = [
        {"what": "survivors kept", "holds": all(r["survivors_kept"] for r in rows)},
        {"what": "nothing recomputed", "holds": all(r["steps_recomputed"] == 0 for r in rows)},
    ]
    for name, limit in LIMITS.items():
        first = statistics.median(r[name] for r in rows[:WINDOW])
        last = statistics.median(r[name] for r in rows[-WINDOW:])
        ratio = round(last / first, 3)
        judged.append(
            {"what": name, "first": first, "last": last, "ratio": ratio, "limit": limit, "holds": ratio <= limit}
        )
    return judged


async def run(recoveries: int, run_dir: Path, corpus: Path) -> bool:
    """Measure and print; return whether all holds."""
    async with Stack(run_dir, nodes=3, workers_per_node=1) as stack:
        client = Client(stack.url)
        client.post("/v1/tasks", {**task("first", corpus), "workers": {"min": 1, "max": 3}, "max_restarts": 1000})
        started = await until(client, "first", STEPS_BETWEEN)
        survivors = [r["pid"] for r in sorted(started["ranks"], key=lambda r: str(r["worker"]))[:-1]]
        rows = []
        for number in range(recoveries):
            rows.append(await recover(client, number, survivors))
            print(json.dumps(rows[-1]), flush=True)
    judged = judge(rows)
    for row in judged:
        print(json.dumps(row))
    return all(row["holds"] for row in judged)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.endurance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recoveries", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-endurance-") as folder:
        corpus = Path(folder) / "corpus.txt"
        subprocess.run([sys.executable, "-P", "-m", "unicron.corpus", str(corpus)], check=True)
        return 0 if asyncio.run(run(options.recoveries, Path(folder) / "run", corpus)) else 1


if __name__ == "__main__":
    sys.exit(main())
