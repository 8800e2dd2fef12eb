"""How long the solver takes without numba: the kernels as plain Python, as in the control image. JSON lines.

    .venv/bin/python -m benchmarks.plain_kernels [--sizes 128x6,512x16,1024x32]

Plain and compiled kernels take turns on the problems of ``benchmarks.planner``; times are medians of ``--rounds``
turns. Both have to give the same answer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.planner import problem
from benchmarks.report import Report, at_least, run
from benchmarks.timing import timed
from shared.events.plans import Problem
from shared.planning import compiled
from shared.planning.solver import solve_with_alternatives


def measure_size(workers: int, tasks: int, rounds: int) -> dict[str, Any]:
    """Return one line: plain and compiled kernels in turns, without what loading the compiled ones takes."""
    posed = problem(workers, tasks)
    seconds: dict[str, list[float]] = {"plain": [], "compiled": []}
    answers = []
    for _ in range(rounds):
        for name, kernels in (("plain", compiled.plain), ("compiled", compiled.compiled())):
            solve_s, answer = timed(partial(_solve, posed, kernels))
            seconds[name].append(solve_s)
            answers.append(answer)
    return {
        "workers": workers,
        "tasks": tasks,
        "rounds": rounds,
        "plain_s": statistics.median(seconds["plain"]),
        "compiled_s": statistics.median(seconds["compiled"]),
        "times_slower": statistics.median(p / c for p, c in zip(*seconds.values(), strict=True)),
        "equal": all(answer == answers[0] for answer in answers),
    }


def _solve(posed: Problem, kernels: Any) -> Any:
    with patch.object(compiled, "namespace", lambda work: kernels):
        return solve_with_alternatives(posed)


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure and print; answers that differ miss a bound."""
    _solve(problem(128, 6), compiled.compiled())
    for size in options.sizes.split(","):
        workers, tasks = (int(part) for part in size.split("x"))
        row = measure_size(workers, tasks, options.rounds)
        report.line("plain-kernels", **row)
        report.equal(f"{size}: plain and compiled agree", row["equal"], True)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.plain_kernels", description="Measure the solver without numba.")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--sizes", default="128x6,512x16,1024x32", help="workers x tasks, of each problem")
    options = parser.parse_args()
    return run(partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
