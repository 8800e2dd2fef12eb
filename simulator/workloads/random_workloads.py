"""Random clusters, tasks and traces, for properties that hold whatever happens.

They have what the named workloads lack: nodes that join later, slow nodes, several faults at once, tasks of different
least counts, and clusters so small that tasks have to wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.planning.performance import profile
from shared.tasks.specification import TaskSpec, Workers
from simulator.workloads import failure_mix
from simulator.workloads.draws import Draws
from simulator.workloads.generators import DAY_S, HOUR_S, node_names
from simulator.workloads.paper_tasks import outlasting, task
from simulator.workloads.paper_workloads import HARDWARE
from simulator.workloads.trace import Change, Occurrence, Trace
from simulator.workloads.workload import Workload

SIZES = ("1.3B", "7B", "13B")

CHANGES: dict[Change, float] = {"error": 4.0, "down": 3.0, "degraded": 1.0}
"""How often each happens to a healthy node: most failures leave the node (figure 1)."""


MOST_FAILURES = 40
"""Failures of a trace in the mean, at most: a run of one policy then takes a second or two."""


def random_workload(seed: int) -> Workload:
    """Return a random workload whose tasks outlast it.

    2 to 12 nodes of 4 or 8 A800, of which some may join later; 1 to 5 tasks; 6 hours to 10 days; nodes fail after 2
    hours to 4 days on average, or more seldom (``MOST_FAILURES``), and are repaired after 2 minutes to 3 days.
    """
    draws = Draws("random-workload", seed)
    nodes = node_names(draws.count(2, 12))
    per_node = draws.one_of((4, 8))
    horizon_s = round(draws.uniform(6 * HOUR_S, 10 * DAY_S))
    present = len(nodes) - min(draws.one_of((0, 0, 1, 2)), len(nodes) - 1)
    tasks = tuple(_task(draws, number) for number in range(1, draws.count(1, 5) + 1))
    trace = Trace(
        f"random-{seed}",
        nodes,
        present,
        tuple(_occurrences(draws, nodes, present, horizon_s)),
        horizon_s,
        f"simulator.workloads.random_workloads, seed {seed}",
    )
    endless = outlasting(tasks, horizon_s, len(nodes) * per_node * profile(HARDWARE).peak_flop_per_s)
    return Workload(trace.name, trace, tasks, HARDWARE, per_node, endless=endless)


def _task(draws: Draws, number: int) -> TaskSpec:
    weight = round(draws.uniform(0.25, 4.0), 2)
    spec = task(f"task-{number}", draws.one_of(SIZES), weight=weight)
    return spec.model_copy(update={"workers": Workers(min=draws.one_of((1, 4, 8)))})


def _occurrences(draws: Draws, nodes: tuple[str, ...], present: int, horizon_s: float) -> Iterator[Occurrence]:
    """Yield what happens to all nodes, by time, then node."""
    mean_s = max(draws.uniform(2 * HOUR_S, 4 * DAY_S), len(nodes) * horizon_s / MOST_FAILURES)
    found = [each for node in nodes[:present] for each in _life(draws, node, 0.0, mean_s, horizon_s)]
    for node in nodes[present:]:
        joins_s = round(draws.uniform(0.001, horizon_s), 3)
        found += [Occurrence(joins_s, node, "up"), *_life(draws, node, joins_s, mean_s, horizon_s)]
    yield from sorted(found, key=lambda each: (each.at_s, each.node))


def _life(draws: Draws, node: str, since_s: float, mean_s: float, horizon_s: float) -> Iterator[Occurrence]:
    """Yield what happens to one node that is there from ``since_s`` on."""
    at_s = round(since_s + draws.exponential(mean_s), 3)
    while at_s <= horizon_s:
        change = draws.weighted(CHANGES)
        if change == "error":
            cause = draws.weighted(failure_mix.lighter())
            assert cause.kind is not None  # of lighter causes
            yield Occurrence(at_s, node, "error", cause.kind.value)
        else:
            is_slow = change == "degraded"
            yield Occurrence(at_s, node, change, "", round(draws.uniform(1.05, 3.0), 2) if is_slow else 1.0)
            # From minutes (a reboot) to days (a replaced part), each order of magnitude as probable.
            at_s = round(at_s + draws.one_of((120.0, 1800.0, 6 * HOUR_S, DAY_S)) * draws.uniform(1.0, 3.0), 3)
            if at_s > horizon_s:
                return
            yield Occurrence(at_s, node, "up")
        at_s = round(at_s + draws.exponential(mean_s), 3)
