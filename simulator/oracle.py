"""The oracle: what a cluster could achieve at most, if failures were known at once and moving tasks took no time.

Between two occurrences the nodes that are there are divided among the tasks so that the sum of F(t, x) is greatest.
That is a bound for every policy as long as all tasks outlast the horizon: at each instant a policy has some division
of the same nodes, in layouts that the specifications allow. With tasks that end it is none, since the order in which
tasks end matters then.

**Healthy nodes.** The division is the exact optimum of the solver of the running system. T at each count is that of the
fastest layout, which the planner's tables do not always take.

**Slow nodes.** A node whose workers are s times slower counts as 1/s of a node. Let a task run on x workers in D
replicas that are together as fast as n healthy workers, n = (sum of 1/s), and deal M micro-batches. No deal is faster
than one in proportion to speed, which takes M x / (n D) micro-batches' time, against ceil(M / D) at full speed. So the
task achieves at most E(x) n / x, where E(x) = T(x) ceil(M / D) D / M is T without the rounding of the deal. With C the
least concave function above F with E for T, and C(0) = 0, that is at most C(n). So the bound of a cluster with slow
nodes is the best division of a *real* number n of workers among tasks of concave C; and not above that of the same
nodes at full speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from services.planner.state.admission import admit
from services.planner.throughput.model import flop_per_step, hardware_in_nodes
from services.planner.throughput.tables import allowed_layouts
from shared.events.plans import Problem, TaskProblem
from shared.planning.performance.search import Timed
from shared.planning.solver import solve
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec
from simulator.outcome import Outcome, WafPoint
from simulator.workloads.workload import Workload

NAME = "oracle"
"""Its name in reports."""


class Rates(NamedTuple):
    """What a task achieves at most, FLOP/s by count. ``even``: if micro-batches could be dealt in parts (E above)."""

    fastest: dict[int, float]
    even: dict[int, float]


class Capacity(NamedTuple):
    """The workers of all nodes that are there: their number, and how many healthy ones are as fast together."""

    workers: int
    healthy_equivalent: float


def oracle(workload: Workload, seed: int = 0, *, admits: bool = False) -> Outcome:
    """Return the greatest outcome of a workload. It has no transitions and no costs by kind.

    Args:
        workload: the workload.
        seed: of the trace, for reports; the oracle draws nothing.
        admits: whether each task gets the least number of workers on which it runs before any gets more (``Bound``).
    """
    bound = Bound(workload, admits=admits)
    present = capacities(workload)
    waf = [WafPoint(at_s, bound.waf_flop_per_s(capacity)) for at_s, capacity in present]
    ends_s = [*(at_s for at_s, _ in present[1:]), workload.trace.horizon_s]
    spans_s = [end_s - at_s for (at_s, _), end_s in zip(present, ends_s, strict=True)]
    return Outcome(
        policy=NAME,
        seed=seed,
        horizon_s=workload.trace.horizon_s,
        accumulated_waf_flop=math.fsum(p.waf_flop_per_s * s for p, s in zip(waf, spans_s, strict=True)),
        worker_s={},
        allocated_worker_s=math.fsum(c.workers * s for (_, c), s in zip(present, spans_s, strict=True)),
        transitions=0,
        recovery_s=[],
        waf=waf,
        completed_s={},
        events=0,
    )


def capacities(workload: Workload) -> list[tuple[float, Capacity]]:
    """Return what is there from each time on at which that changes, seconds; the first time is 0."""
    trace, each = workload.trace, workload.workers_per_node
    slowdowns = dict.fromkeys(trace.nodes[: trace.present], 1.0)
    found = [(0.0, _capacity(slowdowns, each))]
    for at_s, together in itertools.groupby(trace.occurrences, key=lambda occurrence: occurrence.at_s):
        for occurrence in together:
            if occurrence.change == "up":
                slowdowns[occurrence.node] = 1.0
            elif occurrence.change == "down":
                slowdowns.pop(occurrence.node, None)
            elif occurrence.change == "degraded" and occurrence.node in slowdowns:
                slowdowns[occurrence.node] = occurrence.slowdown
        capacity = _capacity(slowdowns, each)
        if capacity != found[-1][1]:
            found.append((at_s, capacity))
    return found


def _capacity(slowdowns: Mapping[str, float], workers_per_node: int) -> Capacity:
    """Return the capacity of the nodes that are there, by their slowdowns."""
    speed = math.fsum(1.0 / slowdown for slowdown in slowdowns.values())
    return Capacity(len(slowdowns) * workers_per_node, speed * workers_per_node)


class Bound:
    """The greatest weighted FLOP/s of a workload's tasks, by capacity.

    With ``admits``, the greatest that leaves no task without workers that fits, heavy ones first: what the planner
    promises its users (``services.planner.state.admission``), at once and for nothing. It is what a planner with that
    rule is measured by, and no bound of it to the last digit: while a light task's fault is not found yet, the heavy
    ones still have workers that this division has given to the light one.
    """

    def __init__(self, workload: Workload, *, admits: bool = False) -> None:
        """Take the tasks, the kind of workers and the most of them that there can be."""
        self._tasks = workload.tasks
        self._admits = admits
        self._most = len(workload.trace.nodes) * workload.workers_per_node
        rate = workload.parameters.get("worker_flop_per_s", Settings.model_fields["worker_flop_per_s"].default)
        self._rates = {
            spec.name: _scaled(
                task_rates(spec, workload.hardware, workload.workers_per_node, rate, self._most),
                workload.throughput.get(spec.name, 1.0),
            )
            for spec in self._tasks
        }
        self._known: dict[Capacity, float] = {}

    def waf_flop_per_s(self, capacity: Capacity) -> float:
        """Return the greatest weighted FLOP/s on these workers."""
        if capacity not in self._known:
            bound = self._at_full_speed(capacity.workers)
            if capacity.healthy_equivalent < capacity.workers:
                bound = min(bound, self._divided(capacity.healthy_equivalent))
            self._known[capacity] = bound
        return self._known[capacity]

    def _at_full_speed(self, workers: int) -> float:
        """Return the exact optimum of healthy workers."""
        whole = Capacity(workers, float(workers))
        if whole not in self._known:
            tasks = [_posed(spec, self._rates[spec.name].fastest, workers) for spec in self._tasks]
            admitted: set[str] = admit(tasks, {"": workers}) if self._admits else set()
            required = [task.model_copy(update={"required": task.name in admitted}) for task in tasks]
            self._known[whole] = solve(Problem(workers=workers, tasks=required)).total_waf_flop_per_s
        return self._known[whole]

    def _divided(self, workers: float) -> float:
        """Return the optimum of a real number of workers among the tasks' concave bounds: steepest pieces first."""
        pieces = [piece for spec in self._tasks for piece in _pieces(spec, self._rates[spec.name].even)]
        left, total = workers, 0.0
        for slope, width in sorted(pieces, reverse=True):
            taken = min(width, left)
            total += slope * taken
            left -= taken
        return total


def task_rates(spec: TaskSpec, kind: str, workers_per_node: int, worker_flop_per_s: float, most: int) -> Rates:
    """Return what a task achieves at most at each count up to ``most``, FLOP/s; nothing beyond ``workers.max``."""
    return _task_rates(spec.model_dump_json(by_alias=True), kind, workers_per_node, worker_flop_per_s, most)


@lru_cache(maxsize=256)
def _task_rates(spec_json: str, kind: str, workers_per_node: int, worker_flop_per_s: float, most: int) -> Rates:
    spec = TaskSpec.model_validate_json(spec_json)
    most = most if spec.workers.max is None else min(most, spec.workers.max)
    hardware = hardware_in_nodes(kind, workers_per_node, worker_flop_per_s)
    layouts = allowed_layouts(spec, hardware, most)
    flop = flop_per_step(spec)
    fastest = {count: flop / alike[0].iteration_s for count, alike in layouts.items()}
    even = {
        count: max(flop / timed.iteration_s * _rounding(spec, timed) for timed in alike)
        for count, alike in layouts.items()
    }
    return Rates(fastest, even)


def _scaled(rates: Rates, factor: float) -> Rates:
    """Return the rates of a task that achieves so much of what is modelled, at any count."""
    fastest = {count: rate * factor for count, rate in rates.fastest.items()}
    return Rates(fastest, {count: rate * factor for count, rate in rates.even.items()})


def _rounding(spec: TaskSpec, timed: Timed) -> float:
    """Return by how much a step would be faster if micro-batches could be dealt in parts: ceil(M / D) D / M."""
    micro_batches, data = spec.batch.global_ // timed.config.micro_batch, timed.config.data
    return -(-micro_batches // data) * data / micro_batches


def _posed(spec: TaskSpec, throughput: Mapping[int, float], workers: int) -> TaskProblem:
    """Return the task's part of a problem whose objective is F: a second, and nothing to pay for a transition."""
    return TaskProblem(
        name=spec.name,
        weight=spec.weight,
        necessary=spec.workers.min,
        maximum=workers if spec.workers.max is None else min(workers, spec.workers.max),
        current=0,
        transition_s=0.0,
        running_s=1.0,
        throughput={count: rate for count, rate in sorted(throughput.items()) if count <= workers},
    )


def _pieces(spec: TaskSpec, throughput: Mapping[int, float]) -> list[tuple[float, int]]:
    """Return the pieces of the least concave function above F that is 0 at 0: slope, and width in workers.

    Pieces that do not rise are left out. The points of the upper convex hull, from left to right (Andrew, 1979).
    """
    hull: list[tuple[int, float]] = [(0, 0.0)]
    for count in sorted(throughput):
        point = count, spec.weight * throughput[count] if count >= spec.workers.min else 0.0
        while len(hull) > 1 and _slope(hull[-2], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    pieces = [(_slope(a, b), b[0] - a[0]) for a, b in itertools.pairwise(hull)]
    return [piece for piece in pieces if piece[0] > 0.0]


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
