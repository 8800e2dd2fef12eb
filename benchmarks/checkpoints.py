"""What checkpoints cost a training step, and how fast state comes back from them.

    .venv/bin/python -m benchmarks.checkpoints [--ranks 2] [--pairs 600] [--cycles 12] [--hidden 128]

A small GPT trains on data-parallel ranks, each on a node of its own. First, steps beside which a snapshot (an in-memory
copy of the state) is made and stored on two nodes take turns with steps without one, in the order with, without,
without, with: on a shared machine the speed of a core changes by tens of percent within seconds, which only
neighbouring steps share. Then blocks of steps with and without asynchronous persistent checkpoints take turns. Then the
state is read back, in turns, from a peer's memory (one node's snapshots are hidden) and from disk (whose pages are
still cached: disk's best case).

JSON lines on stdout: step times and CPU-seconds (all ranks) by kind, ratios to steps without with a 95% confidence
interval over parts of the run, how many snapshots were stored before their step's end, restore times, and the bounds.
Exit status 0 if all bounds hold. The loop of the ranks is in ``benchmarks/checkpoints_rank.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.checkpoint_schedule import MEMORY, NONE, PERSISTENT, Row, Schedule
from benchmarks.intervals import LEAST_RATIOS, REASON, interval
from benchmarks.ranks import run_ranks
from benchmarks.report import Report, at_least, run

MEMORY_RATIO = 1.02
"""Required: the step time with a snapshot of each step over that without, at most 2% more."""

PARTS = 30
"""Parts of the run for the confidence interval: each about as long as a change of the machine's speed lasts."""


def variables(memory: Path, folder: Path, rank: int) -> Row:
    """Return what a rank reads from its environment: a node of its own, whose snapshots are below ``memory``."""
    return {
        "UNICRON_MEMORY": str(memory / f"n{rank}" / "job"),
        "UNICRON_NODE": f"n{rank}",
        "UNICRON_DOMAIN": f"n{rank}",
        "UNICRON_SPEC": str(folder / "spec.json"),
    }


def compare(measured: list[list[Row]], schedule: Schedule, kind: str, report: Report) -> float:
    """Print the figures of the steps of a kind and of the steps without that are their neighbours.

    Return the ratio of their step times.
    """
    steps = {row["step"]: row for row in measured[0] if "step" in row}
    cpu = {n: sum(row["cpu_s"] for rows in measured for row in rows if row.get("step") == n) for n in steps}
    # From one step's beginning to the next: what lies between steps counts too.
    wall = {n: steps[n + 1]["began"] - steps[n]["began"] for n in steps if n + 1 in steps}
    repetitions = schedule.pairs if kind == MEMORY else schedule.cycles
    parts = min(PARTS, repetitions)
    found: dict[str, list[list[int]]] = {of: [[] for _ in range(parts)] for of in (NONE, kind)}
    for n in wall:
        counted = schedule.counted(n)
        if counted is not None and counted[0] == kind:
            found[schedule.kind(n)][counted[1] * parts // repetitions].append(n)
    for of in found:
        mine = list(itertools.chain.from_iterable(found[of]))
        line: Row = {
            "compared": kind,
            "kind": of,
            "steps": len(mine),
            "step_s_median": round(statistics.median(wall[n] for n in mine), 5),
            "cpu_s_per_step": round(statistics.fmean(cpu[n] for n in mine), 5),
        }
        if of == MEMORY:
            line["stored"] = sum(steps[n]["stored"] for n in mine)
        if of == kind:
            for name, seconds in (("ratio", wall), ("cpu_ratio", cpu)):
                parted = zip(found[kind], found[NONE], strict=True)
                mean, low, high = interval([sum(seconds[n] for n in a) / sum(seconds[n] for n in b) for a, b in parted])
                line |= {name: round(mean, 4), f"{name}_95": [round(low, 4), round(high, 4)]}
        report.line("steps", **line)
    return float(line["ratio"])


def restored(measured: list[list[Row]], report: Report) -> dict[str, float]:
    """Print how long restoring took from each source, in seconds; return the medians."""
    times: dict[str, list[float]] = {}
    for row in itertools.chain.from_iterable(measured):
        if "restore" in row:
            times.setdefault(row["restore"], []).append(row["s"])
            assert row["took"] in (row["restore"], "memory"), row  # the other ranks have their own snapshot
    medians = {source: statistics.median(found) for source, found in times.items()}
    for source, found in times.items():
        report.line("restore", restore=source, s_median=round(medians[source], 4), s_max=round(max(found), 4))
    return medians


def judge(measured: list[list[Row]], schedule: Schedule, report: Report) -> None:
    """Print the figures and the bounds."""
    ratios = {kind: compare(measured, schedule, kind, report) for kind in (MEMORY, PERSISTENT)}
    medians = restored(measured, report)
    report.at_most("step time with a snapshot of each step over that without", ratios[MEMORY], MEMORY_RATIO)
    report.below("restore from a peer's memory, against disk (s)", medians["peer-memory"], medians["disk"])


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure and print; no rank, folder or snapshot is left, however this ends."""
    from unicron.trainer import corpus

    schedule = Schedule(options.pairs, options.cycles)
    memory = Path("/dev/shm") / f"unicron-benchmark-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="unicron-checkpoints-") as name, ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, memory, ignore_errors=True)
        folder = Path(name)
        corpus.write(folder / "corpus.txt", size_bytes=400_000)
        model = {"layers": 4, "hidden": options.hidden, "heads": 4, "sequence_length": 128}
        spec = {"name": "b", "model": model, "batch": {"global": options.batch}, "steps": schedule.steps}
        (folder / "spec.json").write_text(json.dumps(spec | {"data": str(folder / "corpus.txt")}))
        arguments = [str(folder), str(schedule.pairs), str(schedule.cycles)]
        environment = partial(variables, memory, folder)
        measured = run_ranks("benchmarks.checkpoints_rank", arguments, folder, options.ranks, environment=environment)
        judge(measured, schedule, report)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    repetitions = at_least(LEAST_RATIOS, REASON)
    parser.add_argument("--ranks", type=at_least(2), default=2)
    parser.add_argument("--pairs", type=repetitions, default=600, help="of steps with and without a snapshot")
    parser.add_argument("--cycles", type=repetitions, default=12, help="of blocks with and without checkpoints")
    parser.add_argument("--hidden", type=at_least(4), default=128)
    parser.add_argument("--batch", type=at_least(1), default=8, help="samples in one update")
    options = parser.parse_args()
    return run(partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
