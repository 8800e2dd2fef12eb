"""How fast the main job heals: SIGKILL of a data-parallel rank, SIGKILL of a whole node. One JSON line for each fault.

    .venv/bin/python -m benchmarks.main_job [--repeats 5]

``fault_to_detected_s`` starts when the signal is sent, by this process's clock, and ends at the incident's
``detected_at``; ``fault_to_step_done_s`` ends when the interrupted step is done (``resumed_at``),
``detected_to_training_s`` when all tasks train at the planned strength again (``restored_at``). The last line has the
medians. There are no bounds.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path

from benchmarks.embedded import Embedded, embedded, small_task
from benchmarks.report import Report, at_least, run
from cli.waiting import AT_STRENGTH, Record

LIMIT_S = 60.0
"""For one fault to be healed, which takes seconds; a longer time ends the benchmark with an error."""

NODES, WORKERS_PER_NODE = 4, 2
TASKS = ("first", "second")


def times(incident: Record, fault_at: float) -> Record:
    """Return the times of an incident relative to the fault (Unix seconds)."""
    at = {k: datetime.fromisoformat(incident[k]).timestamp() for k in ("detected_at", "resumed_at", "restored_at")}
    return {
        "fault_to_detected_s": round(at["detected_at"] - fault_at, 4),
        "fault_to_step_done_s": round(at["resumed_at"] - fault_at, 4),
        "detected_to_training_s": round(at["restored_at"] - at["detected_at"], 4),
        "steps_recomputed": incident["steps_recomputed"],
    }


async def after_steps(system: Embedded, name: str, steps: int) -> Record:
    """Wait until a task trains and has done so many steps more; return it."""
    before = await system.client.task(name)
    return await system.client.until_step(name, before["step"] + steps, LIMIT_S)


async def kill_rank(system: Embedded) -> Record:
    """Kill rank 1 of the first task; return the times."""
    before = await after_steps(system, "first", 5)
    known = await system.client.known_incidents()
    victim = next(r for r in before["ranks"] if r["rank"] == 1)
    fault_at = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    incident = await system.client.until_restored("process-exit", LIMIT_S, known=known)
    after = {r["worker"]: r["pid"] for r in (await after_steps(system, "first", 0))["ranks"]}
    kept = all(after.get(r["worker"]) == r["pid"] for r in before["ranks"] if r is not victim)
    return {"fault": "sigkill-rank", **times(incident, fault_at), "step_s": before["step_s"], "survivors_kept": kept}


async def kill_node(system: Embedded, node: str) -> Record:
    """Kill a node, wait until all tasks train again, bring the node back; return the times."""
    for name in TASKS:
        await after_steps(system, name, 3)
    known = await system.client.known_incidents()
    fault_at = await system.stack.kill_node(node)
    incident = await system.client.until_restored("node-lost", LIMIT_S, known=known)
    await system.stack.start_node(node)

    async def used() -> bool:
        # Not every worker: on busy cores the planner may find that a task is faster with fewer than it had.
        tasks = [await system.client.task(name) for name in TASKS]
        nodes = {rank["node"] for task in tasks for rank in task["ranks"]}
        return node in nodes and all(task["state"] in AT_STRENGTH for task in tasks)

    await system.client.until(f"the workers of {node} are used again", used, LIMIT_S)
    return {"fault": "sigkill-node", **times(incident, fault_at)}


def medians(rows: list[Record]) -> Record:
    """Return the median of every number, by fault."""
    found: Record = {}
    for fault in sorted({r["fault"] for r in rows}):
        of = [r for r in rows if r["fault"] == fault]
        names = [k for k, v in of[0].items() if isinstance(v, int | float) and not isinstance(v, bool)]
        found[fault] = {n: round(statistics.median(r[n] for r in of), 4) for n in names} | {"runs": len(of)}
    return found


async def measure(repeats: int, run_dir: Path | None, report: Report) -> None:
    """Measure and print."""
    rows = []
    async with embedded(NODES, WORKERS_PER_NODE, run_dir=run_dir) as system:
        await system.client.submit(small_task("first", system.corpus))
        await system.client.until_step("first", 5, LIMIT_S)
        for _ in range(repeats):
            rows.append(await kill_rank(system))
            report.line("fault", **rows[-1])
        await system.client.submit(small_task("second", system.corpus))
        for i in range(repeats):
            rows.append(await kill_node(system, f"n{i % NODES}"))
            report.line("fault", **rows[-1])
    report.line("medians", medians=medians(rows))


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.main_job", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=at_least(1), default=5, help="of each fault")
    parser.add_argument("--run-dir", type=Path, help="folder for what the run writes, which stays")
    options = parser.parse_args()
    return run(partial(measure, options.repeats, options.run_dir))


if __name__ == "__main__":
    sys.exit(main())
