"""How fast the main job heals: SIGKILL of a data-parallel rank, SIGKILL of a whole node. One JSON line a fault.

    .venv/bin/python -m benchmarks.main_job [--repeats 5]

``fault_to_detected_s`` starts when the signal is sent, by this process's clock, and ends at the incident's
``detected_at``; ``fault_to_step_done_s`` ends when the interrupted step is done (``resumed_at``),
``detected_to_training_s`` when all tasks train at the planned strength again (``restored_at``). The last line holds
medians.
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
from datetime import datetime
from pathlib import Path
from typing import Any

from cli.client import Client
from cli.stack import Stack

Record = dict[str, Any]

LIMIT_S = 60.0
"""For one fault to be healed; more is a failure of the benchmark."""


def task(name: str, corpus: Path) -> Record:
    """Return a task of the size that the published comparisons use: a small GPT, steps of about 100 ms."""
    return {
        "name": name,
        "model": {"layers": 2, "hidden": 64, "heads": 4, "sequence_length": 64},
        "batch": {"global": 12, "micro": 1},
        "steps": 1_000_000,
        "data": str(corpus),
        "workers": {"min": 1, "max": 4},
    }


async def until(client: Client, name: str, step: int) -> Record:
    """Wait until the task trains and has done ``step`` steps; return it."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found: Record = client.get(f"/v1/tasks/{name}")
        if found["state"] == "running" and found["step"] >= step:
            return found
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{name} did not reach step {step} in {LIMIT_S} s")


async def healed(client: Client, known: set[str], kind: str) -> Record:
    """Wait until the new incident of this kind is over; return it."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for incident in client.pages("/v1/incidents")["items"]:
            if incident["id"] not in known and incident["kind"] == kind and incident["restored_at"]:
                return dict(incident)
        await asyncio.sleep(0.02)
    raise TimeoutError(f"no {kind} healed in {LIMIT_S} s")


def figures(incident: Record, fault_at: float) -> Record:
    """Return the times of an incident relative to the fault."""
    at = {k: datetime.fromisoformat(incident[k]).timestamp() for k in ("detected_at", "resumed_at", "restored_at")}
    return {
        "fault_to_detected_s": round(at["detected_at"] - fault_at, 4),
        "fault_to_step_done_s": round(at["resumed_at"] - fault_at, 4),
        "detected_to_training_s": round(at["restored_at"] - at["detected_at"], 4),
        "steps_recomputed": incident["steps_recomputed"],
    }


async def kill_rank(client: Client) -> Record:
    """Kill rank 1 of the first task; return the figures."""
    before = await until(client, "first", client.get("/v1/tasks/first")["step"] + 5)
    known = {i["id"] for i in client.pages("/v1/incidents")["items"]}
    victim = next(r for r in before["ranks"] if r["rank"] == 1)
    fault_at = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    incident = await healed(client, known, "process-exit")
    after = {r["worker"]: r["pid"] for r in (await until(client, "first", 0))["ranks"]}
    kept = all(after.get(r["worker"]) == r["pid"] for r in before["ranks"] if r is not victim)
    return {"fault": "sigkill-rank", **figures(incident, fault_at), "step_s": before["step_s"], "survivors_kept": kept}


async def kill_node(stack: Stack, client: Client, node: str) -> Record:
    """Kill a node, wait until all train again, bring it back; return the figures."""
    for name in ("first", "second"):
        await until(client, name, client.get(f"/v1/tasks/{name}")["step"] + 3)
    known = {i["id"] for i in client.pages("/v1/incidents")["items"]}
    fault_at = await stack.kill_node(node)
    incident = await healed(client, known, "node-lost")
    await stack.start_node(node)
    deadline = time.monotonic() + LIMIT_S
    while sum(client.get(f"/v1/tasks/{name}")["workers"] for name in ("first", "second")) < 8:
        if time.monotonic() > deadline:
            raise TimeoutError("the node's workers were not used again")
        await asyncio.sleep(0.1)
    return {"fault": "sigkill-node", **figures(incident, fault_at)}


def summary(rows: list[Record]) -> Record:
    """Return the median of every figure, by fault."""
    result: Record = {"medians": {}}
    for fault in sorted({r["fault"] for r in rows}):
        of = [r for r in rows if r["fault"] == fault]
        names = [k for k, v in of[0].items() if isinstance(v, int | float) and not isinstance(v, bool)]
        result["medians"][fault] = {n: round(statistics.median(r[n] for r in of), 4) for n in names} | {"runs": len(of)}
    return result


async def run(repeats: int, run_dir: Path, corpus: Path) -> None:
    """Measure and print."""
    rows = []
    async with Stack(run_dir, nodes=4, workers_per_node=2) as stack:
        client = Client(stack.url)
        client.post("/v1/tasks", task("first", corpus))
        await until(client, "first", 5)
        for _ in range(repeats):
            rows.append(await kill_rank(client))
            print(json.dumps(rows[-1]), flush=True)
        client.post("/v1/tasks", task("second", corpus))
        for i in range(repeats):
            rows.append(await kill_node(stack, client, f"n{i % 4}"))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(rows)))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run-dir", type=Path, help="keeps what the run writes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-main-job-") as folder:
        corpus = Path(folder) / "corpus.txt"
        subprocess.run([sys.executable, "-P", "-m", "unicron.corpus", str(corpus)], check=True)
        asyncio.run(run(options.repeats, options.run_dir or Path(folder) / "run", corpus))


if __name__ == "__main__":
    main()
