"""Decisions of a planner with a large cluster, for ``benchmarks.planner``: the look-ahead table, a lookup, moves."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from benchmarks.timing import timed
from services.planner.decide import decide
from services.planner.evolve import evolve
from services.planner.lookahead.table import LookAhead
from services.planner.placement import ranks
from services.planner.problem import reconfigure
from services.planner.problem.problem import build_problem
from services.planner.state.cluster import Node, State, Task
from shared.events.plans import Layout, Problem, Solution
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, PlanDecided
from shared.log.log import EventLog
from shared.model import canonical_json
from shared.planning.solver import evaluate, solve, solve_with_alternatives
from shared.tasks.specification import parse_spec

NODE_WORKERS = 8
"""Workers of each simulated node."""

HARDWARE = "a100-80"
"""Kind of their hardware."""

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
            owners=workers,
            occupied=workers,
            layout=Layout(tensor=tensor, pipeline=pipeline, data=max(1, count // replica), micro_batch=1),
            step=100,
            step_s=5.0,
        )
    return State(nodes=at, tasks=running, kinds={HARDWARE: {NODE_WORKERS: nodes}})


def lost(node: str, at: datetime) -> ErrorDetected:
    """Return the event of a node's loss."""
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
    lookups: list[float] = []  # of each decision, which asks several problems
    fresh: list[float] = []
    placements, decisions = [], []
    place = ranks.place

    def timed_place(*arguments: Any) -> Any:
        seconds, result = timed(lambda: place(*arguments))
        placements.append(seconds)
        return result

    def timed_solve(posed: Problem) -> Any:
        seconds, result = timed(lambda: table.solve(posed))
        lookups[-1] += seconds
        fresh[-1] += timed(lambda: solve_with_alternatives(posed))[0]
        return result

    for i in range(rounds):
        event = lost(f"n{i * nodes // rounds:04d}", at)
        after = evolve(state, event, at)
        decisions.append(timed(partial(decide, after, event, at, table.solve))[0])
        lookups.append(0.0)
        fresh.append(0.0)
        setattr(reconfigure, "place", timed_place)  # noqa: B010 - measured in place
        (plan,) = decide(after, event, at, timed_solve)
        setattr(reconfigure, "place", place)  # noqa: B010
        assert isinstance(plan, PlanDecided)
        assert plan.canonical() == decide(after, event, at)[0].canonical()
    # The same plan where the log has its tables, as it has after the first plan.
    assert isinstance(plan, PlanDecided)
    known = after.model_copy(update={"tables": plan.tables})
    (later,) = decide(known, event, at)
    assert isinstance(later, PlanDecided)
    assert later.tables == {}
    canonical_s, text = timed(later.canonical)
    with tempfile.TemporaryDirectory() as directory:
        log = EventLog(f"sqlite:///{directory}/log.db")
        append_s = timed(lambda: log.append([later]))[0]
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
        "event_with_tables_bytes": len(plan.canonical()),
        "field_bytes": {name: len(canonical_json(part)) for name, part in json.loads(text).items() if part},
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
        step = max(state.tasks[giver].replica_size, state.tasks[taker].replica_size)
        given = min(left, counts[giver] // 2) // step * step
        counts[giver] -= given
        counts[taker] += given
        left -= given
    return counts
