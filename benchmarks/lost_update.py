"""What it costs to lose a part of an update that other ranks have applied: with the distributed optimizer, one step.

    .venv/bin/python -m benchmarks.lost_update [--rounds 8]

Three data-parallel ranks train a small GPT with the distributed optimizer and overlapped communication. One of them is
killed, and its node with it, in turns before its update (``update``) and behind it, before its part of the parameters
is sent (``gather``). In the second case the others have applied theirs, and all go back to the in-memory copies of the
step before. The time is from the hold until the others have done the step. No services take part.

One JSON line for each run, then the medians, and a bound on the median of the difference in steps: a step without a
fault, of the same run, is one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.intervals import LEAST_RATIOS, REASON
from benchmarks.report import Report, at_least, run
from tests.unicron.harness import agent
from tests.unicron.test_snapshots import Nodes
from unicron.protocol.messages import Progress
from unicron.trainer import corpus

NODES = {"w0": "n0", "w1": "n1", "w2": "n2"}
LOST, SURVIVORS = "w1", ["w0", "w2"]
STEP = 3
POINTS = ("update", "gather")
MOST_STEPS = 1.0
"""Going back one step computes all micro-batches of a step again, in place of those of the lost rank alone."""

SPEC = {
    "name": "a",
    "model": {"layers": 4, "hidden": 128, "heads": 4, "sequence_length": 128},
    "batch": {"global": 24, "micro": 2},
    "steps": STEP + 1,
    "checkpoint": {"every": 0, "memory_every": STEP - 1},
    "parallel": {"distributed_optimizer": True, "overlap": True},
}
"""As in ``benchmarks.hold``. Copies are of the step before the fault."""


def write_spec(folder: Path, text: Path) -> Path:
    """Write the task's specification into a new folder; return its file."""
    folder.mkdir()
    spec = folder / "spec.json"
    spec.write_text(json.dumps(SPEC | {"data": str(text)}))
    return spec


async def heal(folder: Path, text: Path, at: str) -> dict[str, float]:
    """Train until the fault, hold, and finish the step; return what was measured."""
    spec = write_spec(folder, text)
    async with agent(folder / "run") as a:
        memory = Path(tempfile.mkdtemp(prefix="unicron-benchmark-", dir="/dev/shm"))
        try:
            nodes = Nodes(a, spec, memory, NODES)
            await nodes.train_to(LOST, STEP, at)
            await a.in_step(SURVIVORS, STEP + (at == "gather"), "update" if at == "update" else "begun")
            steps = [m.duration_s for m in a.of(Progress, "w0") if m.phase == "ended" and m.step < STEP]
            a.kill(LOST)
            shutil.rmtree(nodes.folder(NODES[LOST]))
            began_s = time.monotonic()
            await a.hold(SURVIVORS)
            generation = await a.configure(
                dict.fromkeys(SURVIVORS, "live"), stage="interrupted", complete=False, fault_step=STEP
            )
            resumed = await a.resumed(generation)
            resumed_s = time.monotonic() - began_s
            await a.finished(len(SURVIVORS))
        finally:
            shutil.rmtree(memory)
    return {"resumed_s": resumed_s, "step_s": min(steps), "computed": resumed[0].computed}


async def measure(rounds: int, report: Report) -> None:
    """Measure in turns."""
    found: dict[str, list[dict[str, float]]] = {at: [] for at in POINTS}
    with tempfile.TemporaryDirectory() as name:
        text = corpus.write(Path(name) / "corpus.txt", size_bytes=50_000)
        for number in range(rounds):
            for at in POINTS if number % 2 else reversed(POINTS):
                measured = await heal(Path(name) / f"{number}-{at}", text, at)
                found[at].append(measured)
                report.line("run", at=at, **measured)
    for at, runs in found.items():
        report.line("median", at=at, resumed_s=statistics.median(one["resumed_s"] for one in runs))
    steps = [
        (behind["resumed_s"] - before["resumed_s"]) / before["step_s"]
        for before, behind in zip(found["update"], found["gather"], strict=True)
    ]
    step_s = statistics.median(one["step_s"] for runs in found.values() for one in runs)
    report.at_most("steps that a lost part of the update costs", statistics.median(steps), MOST_STEPS, step_s=step_s)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(LEAST_RATIOS, REASON), default=8)
    return run(partial(measure, parser.parse_args().rounds))


if __name__ == "__main__":
    sys.exit(main())
