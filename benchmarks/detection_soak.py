"""The long course of ``benchmarks.detection``: nothing is wrong, and nothing may be reported.

Two tasks train while another process keeps each core busy, with checkpoints, evaluation and stalls of data. Once, in
the middle, all processes of the stack are suspended and go on, as when a virtual machine is moved. A rank of the task
``RECOVERED`` is killed every now and then, outside of the suspension: that is the one thing that may be reported, and
no generation that follows may be taken for a hang or a slow worker. Then the detector's tests for slow workers and
silent nodes run over generated days of a large task, where there are these simulations.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.detection_lab import Lab, laboratory
from benchmarks.report import Report
from cli.waiting import Record

ALARMS = ("error.detected", "worker.slowed", "anomaly.observed")
"""Events that report something wrong."""

TASKS = LEFT, RECOVERED = ("left", "right")

SPECIFICATION: Record = {
    "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32},
    "batch": {"global": 8, "micro": 1},
    "steps": 1_000_000,
    "checkpoint": {"every": 100},
    "workers": {"min": 2, "max": 2},
    "script": str(Path(__file__).with_name("detection_soak_rank.py")),
}

SUSPENDED_S = 20.0
"""Longer than every limit that silence or a standstill has here, ``slow_region_timeout_s`` aside."""

LOOK_S = 5.0

KILL_EVERY_S = 45.0
"""Time between two ranks that are killed: a hundred steps of the new generation at least, most of which it is judged by
what the generation before has shown."""

RECOVERY_S = 120.0
"""Longest wait for a recovery, which takes some seconds with both cores busy."""

PARTS = ("task.checkpointed", "evaluation", "stall", "suspended", "killed")
"""What every soak must have had, however short: otherwise it shows nothing."""

RANKS, HOURS, SEED = 1000, 24.0, 1
"""Of the simulated course."""


async def course(minutes: float, report: Report) -> None:
    """Run the soak, then the simulations."""
    async with laboratory(nodes=2, workers_per_node=2) as lab:
        for name in TASKS:
            await lab.client.submit({**SPECIFICATION, "name": name, "data": str(lab.corpus)})
        for name in TASKS:
            await lab.client.until_step(name, 3, 120.0)
        before = {name: (await lab.client.task(name))["step"] for name in TASKS}
        with busy():
            soak = await watch(lab, minutes * 60.0)
        report.line("soaked", minutes=minutes)
        await lab.look()
        done = {name: (await lab.client.task(name))["step"] - step for name, step in before.items()}
        generations = (await lab.client.task(LEFT))["generation"]
        judge(lab, soak, done, generations, report)
    simulated(report)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep each core busy with a process beside all others."""
    load = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in load:
        process.start()
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.join()


@dataclass
class Soak:
    """What was done to the tasks. ``suspended``: processes; ``killed``: incidents of the ranks that were killed."""

    suspended: int = 0
    killed: list[str] = field(default_factory=list)


async def watch(lab: Lab, duration_s: float) -> Soak:
    """Wait for this long; in the middle suspend everything once, and kill a rank now and then."""
    soak, began_s, kill_at_s = Soak(), time.monotonic(), KILL_EVERY_S
    while (spent_s := time.monotonic() - began_s) < duration_s:
        await asyncio.sleep(min(LOOK_S, duration_s - spent_s))
        if not soak.suspended and spent_s > duration_s / 2:
            soak.suspended = await suspend(lab)
        elif spent_s > kill_at_s:
            soak.killed.append(await recovery(lab, len(soak.killed) % 2))
            kill_at_s = time.monotonic() - began_s + KILL_EVERY_S
        await lab.look()
    return soak


async def recovery(lab: Lab, rank: int) -> str:
    """Kill a rank, and wait until the task trains on with all ranks; return the incident."""
    await lab.look()
    known = set(lab.incidents)
    await lab.strike("kill", rank, RECOVERED)

    def is_of_kill(record: Record) -> bool:
        event = record["event"]
        of_exit = record["type"] == "error.detected" and event["kind"] == "process-exit"
        return bool(of_exit and event["task"] == RECOVERED and event["incident"] not in known)

    error = await lab.event("the end of a rank", is_of_kill, RECOVERY_S)
    await lab.healed(error, RECOVERY_S)
    return str(error["event"]["incident"])


def judge(lab: Lab, soak: Soak, steps: dict[str, int], generation: int, report: Report) -> None:
    """Print what was reported, and its bounds.

    Args:
        lab: with all events since the start.
        soak: what was done.
        steps: of each task.
        generation: of the task of which no rank was killed.
        report: to print to.
    """
    of_kills = [r for r in lab.events if r["type"] in ALARMS and r["event"].get("incident") in soak.killed]
    false = [r for r in lab.events if r["type"] in ALARMS and r["event"].get("incident") not in soak.killed]
    parts = Counter(record["type"] for record in lab.events if record["type"] == "task.checkpointed")
    for path in lab.stack.run_dir.glob("tasks/*/soak-*.txt"):
        parts.update(path.read_text().split())
    parts.update(suspended=soak.suspended, killed=len(soak.killed))
    report.line("soak", steps=steps, parts=dict(parts), first=[record["event"] for record in false[:5]])
    report.equal("soak: false alarms", len(false), 0, types=dict(Counter(record["type"] for record in false)))
    report.equal("soak: errors of the killed ranks", len(of_kills), len(soak.killed))
    report.equal("soak: generation of the task without faults", generation, 1)
    report.at_least("soak: steps of each task", min(steps.values()), 10)
    for part in PARTS:
        report.at_least(f"soak: {part}", parts[part], 1)


async def suspend(lab: Lab) -> int:
    """Stop all processes of the stack, and let them go on; return how many there are."""
    processes = [process for process in psutil.Process().children(recursive=True) if is_of_stack(process, lab)]
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        await asyncio.sleep(SUSPENDED_S)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    return len(processes)


def is_of_stack(process: psutil.Process, lab: Lab) -> bool:
    """Return whether a process belongs to the stack, and not to the load or to Python's own helpers."""
    try:
        place = str(lab.stack.run_dir)
        return place in " ".join(process.cmdline()) or process.environ().get("UNICRON_RUN_DIR") == place
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def spin() -> None:
    """Keep one core busy."""
    while True:
        pass


def simulated(report: Report) -> None:
    """Run the simulations that there are over a day of a task of 1,000 ranks."""
    if (steps := _module("benchmarks.simulated_steps")) is not None:
        found = steps.false_alarms(ranks=RANKS, hours=HOURS, seed=SEED)
        report.line("simulated-steps", ranks=RANKS, hours=HOURS, seed=SEED, alarms=found.alarms)
        report.equal("simulated step times: false alarms", found.alarms, 0)
    if (silence := _module("benchmarks.simulated_silence")) is not None:
        losses = silence.false_losses(nodes=RANKS, hours=HOURS, seed=SEED)
        report.line("simulated-silence", nodes=RANKS, hours=HOURS, seed=SEED, lost=losses.lost)
        report.equal("simulated heartbeats: false losses", losses.lost, 0)


def _module(name: str) -> Any:
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
