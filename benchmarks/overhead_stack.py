"""The part of ``benchmarks.overhead`` with a stack: a node agent and the control plane run beside the ranks."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.embedded import Embedded, embedded
from benchmarks.overhead_rank import STEPS, Plan
from cli.stack.children import SERVICES
from shared.errors import Unavailable

AGENT, CONTROL_PLANE = "agent", "control plane"
"""First words of the names of groups of processes."""

ALONE_S = 20.0
"""For how long this library's steps run alone: 80 heartbeats, and four summaries of progress in the log."""

LONGEST_S = 900.0
"""A case that takes longer has failed: the whole benchmark has twenty minutes."""

POLL_S = 0.5
"""Between two looks for the result; the ranks have the cores meanwhile."""

LOOKS_PER_REQUEST = 20
"""Looks for the result between two requests whether the task is well, which cost the api processor time."""

TASK = "overhead"


async def run_task(plan: Plan, folder: Path) -> list[Any]:
    """Run the ranks of a plan as a task under a node agent; return what each rank measured.

    Raises:
        Unavailable: the task has failed, or takes too long.
    """
    script = write_script(folder)
    results = [folder / f"rank-{rank}.json" for rank in range(plan.work.ranks)]
    async with embedded(1, plan.work.ranks) as bench:
        replace(plan, alone_s=ALONE_S, processes=processes(bench)).write(folder)
        await bench.client.post("/v1/tasks", specification(plan, bench.corpus, script))
        async with asyncio.timeout(LONGEST_S):
            for look in itertools.count(1):
                if all(result.exists() for result in results):
                    break
                if look % LOOKS_PER_REQUEST == 0:
                    await check(bench)
                await asyncio.sleep(POLL_S)
    return [json.loads(result.read_text()) for result in results]


async def check(bench: Embedded) -> None:
    """Check that the task has met no failure.

    Raises:
        Unavailable: it has, so nothing measured would count.
    """
    task, incidents = await bench.client.get(f"/v1/tasks/{TASK}"), await bench.client.incidents()
    if task["state"] == "failed" or incidents:
        raise Unavailable(f"task {TASK}: {task}; incidents: {incidents}")


def write_script(folder: Path) -> Path:
    """Write the task's script; return its path. Ranks do not have this repository on their path."""
    script = folder / "script.py"
    root = Path(__file__).resolve().parents[1]
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(root)!r})\nfrom pathlib import Path\n"
        f"from benchmarks.overhead_rank import main\nmain(Path({str(folder)!r}))\n"
    )
    return script


def specification(plan: Plan, corpus: Path, script: Path) -> dict[str, Any]:
    """Return the specification of a task whose ranks run the script."""
    work = plan.work
    model = {
        "layers": work.layers,
        "hidden": work.hidden,
        "heads": work.heads,
        "sequence_length": work.sequence_length,
    }
    return {
        "name": TASK,
        "model": model,
        "batch": {"global": work.all_micro_batches * work.samples, "micro": work.samples},
        "steps": STEPS,
        "data": str(corpus),
        "script": str(script),
        "workers": {"min": work.ranks, "max": work.ranks},
        "parallel": {
            "tensor": work.tensor,
            "pipeline": work.pipeline,
            "interleave": work.interleave,
            "sequence_parallel": work.sequence_parallel,
            "distributed_optimizer": work.distributed_optimizer,
        },
        "checkpoint": {"every": 0, "memory_every": 0},
    }


def processes(bench: Embedded) -> dict[str, list[int]]:
    """Return the pids of the agent's processes and of the control plane's, by group; no task runs yet."""
    (node,) = bench.stack.node_names
    found = {f"{AGENT}: {node}": [process.pid for process in bench.stack.node_processes(node)]}
    found[f"{CONTROL_PLANE}: bus"] = [bench.stack.nats.pid]
    for child in psutil.Process().children(recursive=True):
        name = next((name for name, module in SERVICES.items() if module in child.cmdline()), None)
        if name is not None:
            found.setdefault(f"{CONTROL_PLANE}: {name}", []).append(child.pid)
    return found
