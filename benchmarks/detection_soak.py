"""The long course of ``benchmarks.detection``: nothing is wrong, and nothing may be reported.

Two tasks train while another process keeps each core busy, with checkpoints, evaluation and stalls of data. Once, in
the middle, all processes of the stack are suspended and go on, as when a virtual machine is moved. Then the detector's
tests for slow workers and silent nodes run over generated days of a large task, where there are these simulations.
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
from pathlib import Path
from typing import Any

import psutil

from benchmarks.detection_lab import Lab, laboratory
from benchmarks.report import Report
from cli.waiting import Record

ALARMS = ("error.detected", "worker.slowed", "anomaly.observed")
"""Events that report something wrong."""

TASKS = ("left", "right")

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
        load = [
            multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)
        ]
        for process in load:
            process.start()
        try:
            await watch(lab, minutes * 60.0, report)
        finally:
            for process in load:
                process.kill()
                process.join()
        await lab.look()
        alarms = Counter(record["type"] for record in lab.events if record["type"] in ALARMS)
        shown = [record["event"] for record in lab.events if record["type"] in ALARMS][:5]
        done = {name: (await lab.client.task(name))["step"] - step for name, step in before.items()}
        generations = [(await lab.client.task(name))["generation"] for name in TASKS]
        report.line("soak", minutes=minutes, steps=done, alarms=dict(alarms), first=shown)
        report.equal("soak: false alarms", sum(alarms.values()), 0)
        report.equal("soak: generations of the tasks", generations, [1, 1])
        report.at_least("soak: steps of each task", min(done.values()), 10)
    simulated(report)


async def watch(lab: Lab, duration_s: float, report: Report) -> None:
    """Wait for this long; in the middle suspend everything once."""
    began_s, suspended = time.monotonic(), False
    while (spent_s := time.monotonic() - began_s) < duration_s:
        await asyncio.sleep(min(LOOK_S, duration_s - spent_s))
        if not suspended and spent_s > duration_s / 2:
            suspended = True
            count = await suspend(lab)
            report.line("suspended", processes=count, seconds=SUSPENDED_S)
        await lab.look()


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
