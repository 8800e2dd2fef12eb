"""How fast the planner decides. One JSON line a size, then the look-ahead table, then a lookup with its placement.

    .venv/bin/python -m benchmarks.planner [--rounds 7] [--sizes 128x6,4096x64,16384x64,100000x256] [--skip-look-ahead]
        [--degenerate 16384x64]

Solver (``solve``: a ``Problem`` in, a ``Solution`` out, one core) and the paper's O(m n^2) dynamic program
(``paper_dp``: the recursion alone over prepared arrays, numba, one core) take turns; times are medians. Where the
program would take more than ``PAPER_LIMIT_S``, one of its rows is measured over a part of the counts and
``paper_dp_extrapolated_s`` says what all of them would take at that rate: that is a calculation, not a measurement.
All is compiled before the clock starts; ``load_s`` is what loading the compiled code took (tens of seconds if it is
compiled for the first time).

``degenerate``: T is linear, concave, in plateaus, constant or noisy in every single count, and tasks are alike, so that
far more counts are useful than of any real task, and many assignments tie.

The look-ahead is measured on a simulated cluster of 2,048 nodes with 8 workers and 64 tasks: ``build_s`` for the whole
table, ``lookup_s`` for the answer to a node's loss, ``placement_s`` for its counts' workers, ``decide_s`` for the whole
decision; ``event_bytes``, ``canonical_s`` and ``append_s`` for writing its event. ``moved``: the decision where a
thousand workers change hands, and where every task gets another count.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from services.planner import placement, reconfigure
from services.planner.core import decide, evolve
from services.planner.lookahead import LookAhead
from services.planner.problem import build_problem
from services.planner.state import Node, State, Task
from shared.events import ErrorDetected, PlanDecided
from shared.log import EventLog
from shared.planning import compiled
from shared.planning.solver import evaluate, solve, solve_with_alternatives, solve_with_proof
from shared.planning.waf import term
from shared.plans import Layout, Problem, Solution, TaskProblem
from shared.severities import ErrorKind, Method, Severity
from shared.tasks import parse_spec

PAPER_LIMIT_S = 5.0
"""The paper's program is run in full where it takes no longer."""

NODE_WORKERS = 8
HARDWARE = "a100-80"


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
def paper_rows(worth: NDArray[np.float64], workers: int, most: int) -> float:
    """The paper's recursion S(i, j) = max over k <= j of S(i-1, j-k) + G(t_i, k), for all j and all k <= ``most``."""
    before = np.zeros(workers + 1)
    after = np.zeros(workers + 1)
    for i in range(worth.shape[0]):
        for j in range(workers + 1):
            best = -np.inf
            for k in range(min(j, most) + 1):
                best = max(best, before[j - k] + worth[i, k])
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


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def measure_solver(workers: int, tasks: int, rounds: int) -> dict[str, Any]:
    """Return one line: the solver and the paper's program in turns."""
    posed = problem(workers, tasks)
    pairs = tasks * (workers + 1) * (workers + 2) // 2
    most = min(workers, max(1, 20_000_000 // workers))
    full = pairs <= 2e9  # at about 1e9 additions a second
    shown = [posed.tasks[0]] if not full else posed.tasks
    worth = np.array([[term(task, k).objective for k in range(workers + 1)] for task in shown])
    paper_rows(worth[:, :2], 1, 1)
    solving, alternatives, paper = [], [], []
    solution: Solution | None = None
    value = 0.0
    for _ in range(rounds):
        seconds, solution = timed(lambda: solve(posed))
        solving.append(seconds)
        seconds, value = timed(lambda: paper_rows(worth, workers, workers if full else most))
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


START = datetime(2025, 1, 1, tzinfo=UTC)


def cluster(nodes: int, tasks: int, counts: dict[str, int] | None = None, seed: int = 0) -> State:
    """A cluster in which every task runs, on these counts or on what its share of the nodes is."""
    source = random.Random(seed)
    names = [f"n{i:04d}" for i in range(nodes)]
    at = {
        name: Node(
            name=name,
            incarnation="1",
            domain=f"rack{i // 16}",
            workers=tuple(f"{name}/{slot}" for slot in range(NODE_WORKERS)),
            usable=True,
            since=START,
            hardware=HARDWARE,
        )
        for i, name in enumerate(names)
    }
    shares = [source.uniform(0.6, 1.4) for _ in range(tasks)]
    left = [worker for name in names for worker in at[name].workers]
    running = {}
    for i, share in enumerate(shares):
        tensor, pipeline = source.choice([(8, 1), (8, 2), (4, 2), (8, 4)])
        replica = tensor * pipeline
        count = int(share / sum(shares) * nodes * NODE_WORKERS * 0.99) // replica * replica
        if counts is not None:
            count = counts[f"t{i:03d}"]
        members, left = left[:count], left[count:]
        spec = parse_spec(
            {
                "name": f"t{i:03d}",
                "model": {"layers": 32, "hidden": 4096, "heads": 32, "sequence_length": 2048},
                "batch": {"global": source.choice([512, 1024, 1536]), "micro": 1},
                "parallel": {"tensor": tensor, "pipeline": pipeline},
                "weight": source.choice([0.5, 1.0, 2.0]) * source.uniform(0.9, 1.1),
                "workers": {"min": replica},
                "steps": 1_000_000,
                "data": "corpus",
            }
        )
        workers = tuple(members)
        running[spec.name] = Task(
            spec=spec,
            generation=1,
            members=workers,
            holders=workers,
            occupied=workers,
            layout=Layout(tensor=tensor, pipeline=pipeline, data=max(1, count // replica), micro_batch=1),
            step=100,
            step_s=5.0,
        )
    return State(nodes=at, tasks=running, kinds={HARDWARE: {NODE_WORKERS: nodes}})


def lost(node: str, at: datetime) -> ErrorDetected:
    return ErrorDetected(
        event_id=f"lost-{node}",
        occurred_at=at,
        incident="i",
        kind=ErrorKind.NODE_LOST,
        severity=Severity.SEV1,
        method=Method.NODE_HEALTH,
        detected_at=at,
        node=node,
    )


def measure_look_ahead(nodes: int, tasks: int, rounds: int) -> dict[str, Any]:
    """Return one line: the table, and decisions that use it."""
    at = START + timedelta(hours=1)
    # A cluster that has been planned already: a loss moves few workers.
    planned = solve(build_problem(cluster(nodes, tasks), at)).assignment
    state = cluster(nodes, tasks, planned)
    builds = []
    for _ in range(min(rounds, 3)):
        table = LookAhead()
        builds.append(timed(partial(table.rebuild, state, at))[0])
    lookups, placements, decisions, fresh = [], [], [], []
    place = placement.place

    def timed_place(*arguments: Any) -> Any:
        seconds, result = timed(lambda: place(*arguments))
        placements.append(seconds)
        return result

    def timed_solve(posed: Problem) -> Any:
        seconds, result = timed(lambda: table.solve(posed))
        lookups.append(seconds)
        fresh.append(timed(lambda: solve_with_alternatives(posed))[0])
        return result

    for i in range(rounds):
        event = lost(f"n{i * nodes // rounds:04d}", at)
        after = evolve(state, event, at)
        decisions.append(timed(partial(decide, after, event, at, table.solve))[0])
        setattr(reconfigure, "place", timed_place)  # noqa: B010 - measured in place
        (plan,) = decide(after, event, at, timed_solve)
        setattr(reconfigure, "place", place)  # noqa: B010
        assert isinstance(plan, PlanDecided)
        assert plan.canonical() == decide(after, event, at)[0].canonical()
    canonical_s, text = timed(plan.canonical)
    with tempfile.TemporaryDirectory() as directory:
        log = EventLog(f"sqlite:///{directory}/log.db")
        append_s = timed(lambda: log.append([plan]))[0]
        log.close()
    return {
        "benchmark": "look-ahead",
        "workers": nodes * NODE_WORKERS,
        "tasks": tasks,
        "answers": len(table),
        "build_s": statistics.median(builds),
        "build_least_s": min(builds),
        "hits": table.hits,
        "misses": table.misses,
        "lookup_s": statistics.median(lookups),
        "placement_s": statistics.median(placements),
        "lookup_and_placement_s": statistics.median(a + b for a, b in zip(lookups, placements, strict=True)),
        "solve_afresh_s": statistics.median(fresh),
        "decide_s": statistics.median(decisions),
        "event_bytes": len(text),
        "canonical_s": canonical_s,
        "append_s": append_s,
    }


def measure_moved(nodes: int, tasks: int, moved: int | None, rounds: int) -> dict[str, Any]:
    """Return one line: a decision that moves about so many workers (None: as the solver has it for any old counts)."""
    at = START + timedelta(hours=1)
    event = lost("n0100", at)
    state = cluster(nodes, tasks)
    wanted = solve(build_problem(evolve(state, event, at), at)).assignment
    if moved is not None:
        state = cluster(nodes, tasks, _shifted(state, wanted, moved))
    after = evolve(state, event, at)
    answered: tuple[Solution, list[Solution]] = (evaluate(build_problem(after, at), wanted, "best"), [])
    seconds = []
    for _ in range(rounds):
        took_s, (plan,) = timed(lambda: decide(after, event, at, lambda _: answered))
        seconds.append(took_s)
    assert isinstance(plan, PlanDecided)
    return {
        "benchmark": "moved",
        "workers": nodes * NODE_WORKERS,
        "tasks": tasks,
        "tasks_changed": len(plan.changes),
        "workers_started": sum(len(change.prepare) for change in plan.changes),
        "decide_s": statistics.median(seconds),
        "decide_least_s": min(seconds),
        "event_bytes": len(plan.canonical()),
    }


def _shifted(state: State, counts: dict[str, int], moved: int) -> dict[str, int]:
    """Return the counts with ``moved`` workers in the wrong hands: taken from some tasks for others."""
    counts = dict(counts)
    left = moved
    for giver, taker in zip(sorted(counts)[::2], sorted(counts)[1::2], strict=False):
        step = max(state.tasks[giver].replica, state.tasks[taker].replica)
        given = min(left, counts[giver] // 2) // step * step
        counts[giver] -= given
        counts[taker] += given
        left -= given
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the planner.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="128x6,4096x64,16384x64,100000x256")
    parser.add_argument("--look-ahead", default="2048x64", help="nodes x tasks")
    parser.add_argument("--skip-look-ahead", action="store_true")
    parser.add_argument("--degenerate", default="16384x64", help="workers x tasks; empty: not")
    options = parser.parse_args()
    load_s, _ = timed(lambda: (compiled.compiled(), solve_with_alternatives(problem(128, 6))))
    print(json.dumps({"benchmark": "load", "load_s": load_s}), flush=True)
    for size in options.sizes.split(","):
        workers, tasks = (int(part) for part in size.split("x"))
        print(json.dumps(measure_solver(workers, tasks, options.rounds)), flush=True)
    if not options.skip_look_ahead:
        nodes, tasks = (int(part) for part in options.look_ahead.split("x"))
        print(json.dumps(measure_look_ahead(nodes, tasks, options.rounds)), flush=True)
        for moved in (1000, None):
            print(json.dumps(measure_moved(nodes, tasks, moved, options.rounds)), flush=True)
    if options.degenerate:
        workers, tasks = (int(part) for part in options.degenerate.split("x"))
        for shape in SHAPES:
            print(json.dumps(measure_degenerate(shape, workers, tasks)), flush=True)


if __name__ == "__main__":
    main()
