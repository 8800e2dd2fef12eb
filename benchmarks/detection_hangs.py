"""Hangs of ``benchmarks.detection``: a task of longer steps, and a bound of its own for each injection."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.detection_lab import TASK, Lab, Struck, laboratory, unix_s
from benchmarks.detection_measures import PERCENTILE, Measures, percentile
from benchmarks.report import Report
from cli.waiting import Record
from shared.errors import TimedOut
from shared.settings.model import Settings

HANGS = {
    "hang-stop": "hang=stop",
    "hang-sleep": "hang=sleep",
    "hang-deadlock": "hang=deadlock",
    "hang-spin": "hang=spin",
    "hang-collective": "hang=collective",
}
"""Class -> the fault."""

INJECTIONS = 6
"""Of each kind of hang: 30 in all."""

TIMES = 2.0
"""The bound, as a multiple of the p99 of recent steps."""

RECENT_S = 30.0
"""What of the past is recent."""

LEAST_STEPS = 10
"""Steps of the new generation before a hang strikes it: its first steps, which may take longer, are over by then."""

PAST_STEPS = 50
"""Steps before the first hang: there is a recent past (the detector asks for 40 steps)."""

SPECIFICATION: Record = {
    "model": {"layers": 4, "hidden": 128, "heads": 4, "sequence_length": 128},
    "batch": {"global": 24, "micro": 1},
    "steps": 1_000_000,
    "checkpoint": {"every": 0},
    "max_restarts": 1000,
    "script": str(Path(__file__).with_name("detection_rank.py")),
}
"""Steps of some 0.5 s, so that it is not the floor alone that decides."""


async def course(names: Sequence[str], ranks: int, scale: float, report: Report) -> None:
    """Run the kinds of hangs in turns."""
    floor_s = Settings().hang_floor_s
    of_kind = {
        name: Measures(f"{name}, of its bound", INJECTIONS, bound=1.0, unit="parts of the bound", paper="3x mean step")
        for name in names
    }
    for measures in of_kind.values():
        measures.scale(scale)
    async with laboratory(nodes=ranks) as lab:
        await lab.train(**SPECIFICATION, workers={"min": ranks, "max": ranks})
        await lab.client.until_step(TASK, PAST_STEPS, 120.0)
        rounds = max(measures.injections for measures in of_kind.values())
        explained: set[str] = set()
        for number, (kind, found) in itertools.product(range(rounds), of_kind.items()):
            try:
                explained.add(await hang(lab, HANGS[kind], number % ranks, found, floor_s))
            except TimedOut as err:
                found.give_up(err.detail)
                break
        await lab.stop()
        await lab.look()
    for measures in of_kind.values():
        measures.judge(report)
    others = [record["event"] for incident, record in lab.incidents.items() if incident not in explained]
    report.equal("hangs: incidents without a fault", len(others), 0, first=others[:3])


async def hang(lab: Lab, fault: str, rank: int, measures: Measures, floor_s: float) -> str:
    """Have a rank hang, and wait until it has been found and replaced; return the incident."""
    await lab.client.until_step(TASK, (await lab.client.task(TASK))["step"] + LEAST_STEPS, 60.0)
    await lab.forget()
    struck = await lab.strike(fault, rank)
    error = await lab.event("a hang", is_hang)
    found_s = unix_s(error["recorded_at"]) - struck.at_s
    p99_s = percentile(recent_steps(lab.stack.run_dir / "tasks" / TASK, struck), PERCENTILE) or 0.0
    bound_s = max(TIMES * p99_s, floor_s)
    event = error["event"]
    right = (event["kind"], event["rank"]) == ("hang", struck.rank)
    limit = {name: event["evidence"].get(name) for name in ("limit_s", "limit_source")}
    measures.add(found_s / bound_s, right=right, seconds=found_s, bound_s=bound_s, **limit)
    await lab.healed(error)
    return str(event["incident"])


def is_hang(record: Record) -> bool:
    """Return whether a record is an error of the task."""
    return bool(record["type"] == "error.detected" and record["event"]["task"] == TASK)


def recent_steps(folder: Path, struck: Struck) -> list[float]:
    """Return the durations in seconds of the steps that ended, on any rank, shortly before a fault."""
    durations = []
    for path in folder.glob("steps-*.txt"):
        for line in path.read_text().splitlines():
            ended_s, duration_s = (float(number) for number in line.split())
            if struck.at_s - RECENT_S < ended_s < struck.at_s:
                durations.append(duration_s)
    return durations
