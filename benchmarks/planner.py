"""How fast the planner decides. One JSON line a size, then the look-ahead table, then a lookup with its placement.

    .venv/bin/python -m benchmarks.planner [--rounds 7] [--sizes 128x6,4096x64,16384x64,100000x256] [--skip-look-ahead]
        [--degenerate 16384x64]

Solver (``solve``: a ``Problem`` in, a ``Solution`` out, one core) and the paper's O(m n^2) dynamic program
(``paper_dp``: the recursion alone over prepared arrays, numba, one core) take turns; times are medians. Where the
program would take more than ``PAPER_LIMIT_S``, one of its rows is measured over a part of the counts and
``paper_dp_extrapolated_s`` is the time of all of them at that rate: a calculation, not a measurement.
All is compiled before the clock starts; ``load_s`` is what loading the compiled code took (tens of seconds if it is
compiled for the first time).

``degenerate``: T is linear, concave, in plateaus, constant or noisy in every single count, and tasks are alike, so that
far more counts are useful than of any real task, and many assignments tie.

The look-ahead is measured on a simulated cluster of 2,048 nodes with 8 workers and 64 tasks: ``build_s`` for the whole
table, ``lookup_s`` for the answer to a node's loss, ``placement_s`` for its counts' workers, ``decide_s`` for the whole
decision; ``event_bytes`` (bounded), ``field_bytes``, ``canonical_s`` and ``append_s`` for writing its event where the
log has the throughput tables, ``event_with_tables_bytes`` for that of the first plan, which has them. ``moved``: the
decision where a thousand workers change hands, and where every task gets another count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_decisions import NODE_WORKERS, measure_look_ahead, measure_moved
from benchmarks.report import Report, at_least, run
from benchmarks.timing import timed
from shared.events.plans import Problem, Solution, TaskProblem
from shared.planning import compiled
from shared.planning.solver import solve, solve_with_alternatives, solve_with_proof
from shared.planning.waf import term

MOST_TASK_BYTES = 800
"""Of a SEV1 plan's event for each task of its problem, where no table changed. Its part of the problem is 400 bytes, of
the solution 170, of the alternatives 60; and two tasks that change, each with hundreds of workers in a few dozen runs,
are up to 10 kB among 64 tasks. With 64 tasks the bound is 51 kB; each table alone would be 5 to 40 kB."""

PAPER_LIMIT_S = 5.0
"""The paper's program is run in full where it takes no longer."""


def problem(workers: int, tasks: int, seed: int = 0) -> Problem:
    """Tasks of several layouts: T has a step wherever one micro-batch less is on the most loaded replica."""
    source = random.Random(seed)
    replicas = (1, 2, 4, 8) if workers < 1000 else (8, 16, 32, 64)
    items = []
    for i in range(tasks):
        replica = source.choice(replicas)
        micro_batches = source.choice([96, 128, 192, 256, 512, 1024, 1536])
        peak = source.uniform(5e13, 1.5e14)
        table = {
            replica * d: peak * replica * micro_batches / (-(-micro_batches // d) + 0.1 * (d - 1) / d)
            for d in range(1, min(micro_batches, workers // replica) + 1)
        }
        current = max(replica, int(workers / tasks * source.uniform(0.6, 1.3)) // replica * replica)
        items.append(
            TaskProblem(
                name=f"t{i:03d}",
                weight=source.choice([0.5, 1.0, 1.0, 2.0, 4.0]) * source.uniform(0.9, 1.1),
                necessary=replica,
                maximum=workers,
                current=min(current, max(table)),
                faulted=i == 0,
                transition_s=source.uniform(5, 60),
                running_s=source.uniform(2e4, 1e5),
                throughput=table,
            )
        )
    return Problem(workers=workers, tasks=items)


@numba.njit(cache=False)
def paper_rows(values: NDArray[np.float64], workers: int, most: int) -> float:
    """The paper's recursion S(i, j) = max over k <= j of S(i-1, j-k) + G(t_i, k), for all j and all k <= ``most``."""
    before = np.zeros(workers + 1)
    after = np.zeros(workers + 1)
    for i in range(values.shape[0]):
        for j in range(workers + 1):
            best = -np.inf
            for k in range(min(j, most) + 1):
                best = max(best, before[j - k] + values[i, k])
            after[j] = best
        before, after = after, before
    return float(before[workers])


SHAPES: dict[str, Callable[[int, random.Random], float]] = {
    "linear": lambda k, _: 1.0 * k,
    "concave": lambda k, _: k / (1.0 + k / 256.0),
    "plateaus": lambda k, _: k // 24 * 24.0,
    "constant": lambda k, _: 1.0,
    "noise": lambda k, source: k * (1.0 + 0.05 * source.random()),
}


def degenerate(shape: str, workers: int, tasks: int) -> Problem:
    """Tasks alike in all but their names, one of which has lost a node; every count is in the table."""
    items = []
    for i in range(tasks):
        source = random.Random(i)
        items.append(
            TaskProblem(
                name=f"t{i:03d}",
                weight=1.0,
                necessary=1,
                maximum=workers,
                current=workers // tasks,
                faulted=i == 0,
                transition_s=60.0,
                running_s=86_400.0,
                throughput={k: 1e14 * SHAPES[shape](k, source) for k in range(1, workers + 1)},
                required=True,
            )
        )
    return Problem(workers=workers - NODE_WORKERS, tasks=items)


def measure_degenerate(shape: str, workers: int, tasks: int) -> dict[str, Any]:
    """Return one line: the solver on a problem that real tasks do not pose."""
    posed = degenerate(shape, workers, tasks)
    solve_s, (solution, proof) = timed(lambda: solve_with_proof(posed))
    return {
        "benchmark": "degenerate",
        "shape": shape,
        "workers": workers,
        "tasks": tasks,
        "counts": sum(len(task.throughput) for task in posed.tasks),
        "solve_s": solve_s,
        "solve_with_alternatives_s": timed(lambda: solve_with_alternatives(posed))[0],
        "states": proof.states,
        "proven": proof.bound == solution.objective,
    }


def measure_solver(workers: int, tasks: int, rounds: int) -> dict[str, Any]:
    """Return one line: the solver and the paper's program in turns."""
    posed = problem(workers, tasks)
    pairs = tasks * (workers + 1) * (workers + 2) // 2
    most = min(workers, max(1, 20_000_000 // workers))
    full = pairs <= 2e9  # at about 1e9 additions a second
    shown = [posed.tasks[0]] if not full else posed.tasks
    values = np.array([[term(task, k).objective for k in range(workers + 1)] for task in shown])
    paper_rows(values[:, :2], 1, 1)
    solving, alternatives, paper = [], [], []
    solution: Solution | None = None
    value = 0.0
    for _ in range(rounds):
        seconds, solution = timed(lambda: solve(posed))
        solving.append(seconds)
        seconds, value = timed(lambda: paper_rows(values, workers, workers if full else most))
        paper.append(seconds)
        alternatives.append(timed(lambda: solve_with_alternatives(posed))[0])
    assert solution is not None
    proof = solve_with_proof(posed)[1]
    line: dict[str, Any] = {
        "benchmark": "solve",
        "workers": workers,
        "tasks": tasks,
        "counts": sum(len(task.throughput) for task in posed.tasks),
        "rounds": rounds,
        "solve_s": statistics.median(solving),
        "solve_least_s": min(solving),
        "solve_with_alternatives_s": statistics.median(alternatives),
        "objective": solution.objective,
        "bound": proof.bound,
        "states": proof.states,
    }
    if full:
        assert abs(value - solution.objective) <= 1e-12 * abs(value), (value, solution.objective)
        ratios = [p / s for p, s in zip(paper, solving, strict=True)]
        return {**line, "paper_dp_s": statistics.median(paper), "times_faster": statistics.median(ratios)}
    done = (workers + 1) * (most + 1) - most * (most + 1) // 2
    return {
        **line,
        "paper_dp_s": None,
        "paper_dp_part_s": statistics.median(paper),
        "paper_dp_extrapolated_s": statistics.median(paper) * pairs / done,
    }


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure and print; a problem that is not proven to be solved best misses a bound."""
    load_s, _ = timed(lambda: (compiled.compiled(), solve_with_alternatives(problem(128, 6))))
    report.line("load", benchmark="load", load_s=load_s)
    for size in options.sizes.split(","):
        workers, tasks = (int(part) for part in size.split("x"))
        row = measure_solver(workers, tasks, options.rounds)
        report.line("solve", **row)
        # The proof is exact: the solver's upper bound is the value of its answer.
        report.equal(f"{size}: objective", row["objective"], row["bound"])
    if not options.skip_look_ahead:
        nodes, tasks = (int(part) for part in options.look_ahead.split("x"))
        row = measure_look_ahead(nodes, tasks, options.rounds)
        report.line("look-ahead", **row)
        # Counted in bytes of a seeded cluster: the same on every machine.
        report.at_most("bytes of a SEV1 plan, no table changed", row["event_bytes"], MOST_TASK_BYTES * tasks)
        for moved in (1000, None):
            report.line("moved", **measure_moved(nodes, tasks, moved, options.rounds))
    if options.degenerate:
        workers, tasks = (int(part) for part in options.degenerate.split("x"))
        for shape in SHAPES:
            row = measure_degenerate(shape, workers, tasks)
            report.line("degenerate", **row)
            report.equal(f"{shape}: proven", row["proven"], True)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.planner", description="Measure the planner.")
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--sizes", default="128x6,4096x64,16384x64,100000x256", help="workers x tasks, of each problem")
    parser.add_argument("--look-ahead", default="2048x64", help="nodes x tasks")
    parser.add_argument("--skip-look-ahead", action="store_true")
    parser.add_argument("--degenerate", default="16384x64", help="workers x tasks; empty: none")
    options = parser.parse_args()
    return run(partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
