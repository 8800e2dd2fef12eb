"""How soon a healthy replica goes on after a hold that spares it, and after one that breaks everything off.

    .venv/bin/python -m benchmarks.hold [--rounds 8]

Two replicas of two tensor-parallel ranks train a small GPT. A rank of one is killed while the other replica is in the
fourth of its eight backward passes, in which a stopped rank keeps it until the hold is sent. That names the lost rank
(``named``) or does not (``unknown``: every collective is broken off), in turns in one run; sums are in the gradient
buffers (``in-place``, the default), or in float64 beside them (``apart``, ``deterministic_sums``). The time is from the
hold to the end of the interrupted step on the healthy replica. No services take part.

One JSON line for each run, then for each kind of sums the medians, and a bound on the upper end of the 95% interval of
the ratio of the two times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.intervals import LEAST_RATIOS, REASON, interval
from benchmarks.report import Report, at_least, run
from tests.unicron.harness import agent
from unicron.protocol.messages import Held, Hold
from unicron.trainer import corpus

WORKERS = ("w0", "w1", "w2", "w3")
WHOLE, LOST = ("w0", "w1"), "w3"
FAULTS = "3:2:2.backward:kill,0:2:3.backward:hang"

SPEC = {
    "name": "held",
    "model": {"layers": 4, "hidden": 128, "heads": 4, "sequence_length": 128},
    "batch": {"global": 32, "micro": 2},
    "steps": 3,
    "checkpoint": {"every": 0},
}
"""Micro-batches of some 0.1 s: long beside the making of process groups, as they are in practice."""


def write_spec(folder: Path, text: Path, *, apart: bool) -> Path:
    """Write the task's specification into a new folder; return its file."""
    folder.mkdir()
    spec = folder / "spec.json"
    spec.write_text(json.dumps(SPEC | {"data": str(text), "deterministic_sums": apart}))
    return spec


async def heal(spec: Path, *, named: bool) -> dict[str, float]:
    """Train until the fault, hold, and finish the step; return what was measured."""
    async with agent(spec.parent / "run") as a:
        await asyncio.gather(*(a.fork(worker, spec, {"UNICRON_FAIL_AT": FAULTS}) for worker in WORKERS))
        await a.configure(dict.fromkeys(WORKERS, "initial"), tensor=2)
        await a.until(lambda: LOST in a.exits)
        await a.stopped("w0")
        began_s = time.monotonic()
        survivors = [worker for worker in WORKERS if worker != LOST]
        for worker in survivors:
            a.send(worker, Hold(generation=1, lost=[LOST] if named else []))
        a.go_on(["w0"])
        await a.until(lambda: all(a.of(Held, worker) for worker in survivors))
        held_s = time.monotonic() - began_s
        resumed = await a.resumed(await a.configure(dict.fromkeys(WHOLE, "live"), stage="interrupted", tensor=2))
        resumed_s = time.monotonic() - began_s
        a.kill("w2")
        await a.finished(len(WHOLE))
        return {"held_s": held_s, "resumed_s": resumed_s, "computed": resumed[0].computed}


async def measure(rounds: int, report: Report) -> None:
    """Measure in turns."""
    found: dict[tuple[bool, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        text = corpus.write(Path(name) / "corpus.txt", size_bytes=50_000)
        for number in range(rounds):
            for apart in (False, True):
                for named in (True, False) if number % 2 else (False, True):
                    spec = write_spec(Path(name) / f"{number}-{apart}-{named}", text, apart=apart)
                    measured = await heal(spec, named=named)
                    found.setdefault((apart, named), []).append(measured["resumed_s"])
                    report.line("run", sums=_sums(apart), hold=_hold(named), **measured)
    for apart in (False, True):
        for named in (False, True):
            median = statistics.median(found[apart, named])
            report.line("median", sums=_sums(apart), hold=_hold(named), resumed_s=median)
        ratios = [one / other for one, other in zip(found[apart, True], found[apart, False], strict=True)]
        ratio, low, high = interval(ratios)
        report.below(
            f"{_sums(apart)}: time of named over unknown, end of its interval", high, 1.0, ratio=ratio, low=low
        )


def _sums(apart: bool) -> str:
    return "apart" if apart else "in-place"


def _hold(named: bool) -> str:
    return "named" if named else "unknown"


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(LEAST_RATIOS, REASON), default=8)
    return run(partial(measure, parser.parse_args().rounds))


if __name__ == "__main__":
    sys.exit(main())
