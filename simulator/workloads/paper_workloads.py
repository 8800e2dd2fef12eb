"""Workloads by name: the traces of the Unicron paper's evaluation, and real ones, each with its tasks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from shared.errors import InvalidInput
from shared.planning.performance import profile
from shared.tasks.specification import TaskSpec
from simulator.workloads import generators
from simulator.workloads.paper_tasks import DEFAULT_CASE, outlasting, task, tasks_for
from simulator.workloads.trace import Trace
from simulator.workloads.trace_files import parse_spot_trace, parse_trace
from simulator.workloads.workload import Workload

HARDWARE = "a800-80"
"""Kind of the workers of the paper's cluster, and of those of a trace of which nothing else is known."""

WORKERS_PER_NODE = 8

SPOT_SOURCE = (
    "Bamboo (Thorpe et al., NSDI 2023), instances of a spot pool on a public cloud, repository uclasystem/bamboo, MIT"
)

INFINITEHBD_SOURCE = (
    "InfiniteHBD-Trace (repository stepfun-ai/InfiniteHBD-Trace, Apache-2.0): the faults of the 400 nodes of a "
    "training cluster in 349 days"
)

NAMES = ("trace-a", "trace-b", "fig3", "spot-p3", "spot-g4dn", "short-outages", "infinitehbd")
"""Workloads that ``workload`` knows."""

REAL = ("spot-p3", "spot-g4dn", "infinitehbd")
"""Those that are the same for every seed. Their traces have no lighter failures, so their runs draw nothing either."""


def workload(name: str, seed: int = 0, case: int = DEFAULT_CASE, *, nodes: int = generators.PAPER_NODES) -> Workload:
    """Return a workload by name.

    ``trace-a``, ``trace-b``, ``short-outages``: the paper's cluster with six tasks of a case of table 3; ``fig3``:
    GPT-3 7B on 64 GPUs; ``spot-p3``, ``spot-g4dn``: what happened to the instances of a spot pool, here to nodes of 8
    A800 with six tasks; ``infinitehbd``: what happened to 400 nodes of a training cluster, with 64 tasks. No task ends
    within the horizon.

    Args:
        name: one of ``NAMES``.
        seed: of the generator; the real traces are as they were, whatever the seed.
        case: of the paper's table 3.
        nodes: of ``trace-a``, which keeps its rates per node; the others have the paper's.

    Raises:
        InvalidInput: no such name, case, or number of nodes.
    """
    made: dict[str, Callable[[], Trace]] = {
        "trace-a": lambda: generators.trace_a(seed, nodes),
        "trace-b": lambda: generators.trace_b(seed),
        "fig3": lambda: generators.fig3(seed),
        "spot-p3": lambda: spot("p3"),
        "spot-g4dn": lambda: spot("g4dn"),
        "short-outages": lambda: generators.short_outages(seed),
        "infinitehbd": infinitehbd,
    }
    if name not in made:
        problem = f"must be one of {', '.join(NAMES)}"
        raise InvalidInput.of("trace", name, problem)
    if name != "trace-a" and nodes != generators.PAPER_NODES:
        problem = "only for trace-a; the others have the number of nodes of their source"
        raise InvalidInput.of("nodes", nodes, problem)
    trace = made[name]()
    return with_tasks(trace, (task("gpt-7b", "7B"),) if name == "fig3" else None, case)


def with_tasks(trace: Trace, tasks: tuple[TaskSpec, ...] | None = None, case: int = DEFAULT_CASE) -> Workload:
    """Return the workload of a trace on nodes of 8 A800. ``tasks``: None: those of a case, enough for the cluster.

    Raises:
        InvalidInput: no such case.
    """
    workers = len(trace.nodes) * WORKERS_PER_NODE
    if tasks is None:
        tasks = tasks_for(_most_present(trace) * WORKERS_PER_NODE, case)
    endless = outlasting(tasks, trace.horizon_s, workers * profile(HARDWARE).peak_flop_per_s)
    return Workload(trace.name, trace, tasks, HARDWARE, WORKERS_PER_NODE, endless=endless)


def spot(kind: str) -> Trace:
    """Return the real trace of a spot pool, ``p3`` or ``g4dn``; no two nodes of it have the same name."""
    text = files("simulator").joinpath(f"data/bamboo_spot/{kind}-trace.csv").read_text(encoding="utf-8")
    return parse_spot_trace(text, name=f"spot-{kind}", source=SPOT_SOURCE)


def infinitehbd() -> Trace:
    """Return the faults of a cluster of 400 nodes in 349 days; each takes its node until it is repaired."""
    text = files("simulator").joinpath("data/infinitehbd/faults.csv").read_text(encoding="utf-8")
    return parse_trace(text, name="infinitehbd", source=INFINITEHBD_SOURCE)


def _most_present(trace: Trace) -> int:
    """Return the greatest number of nodes that are there at one time."""
    there = set(trace.nodes[: trace.present])
    most = len(there)
    for each in trace.occurrences:
        if each.change == "up":
            there.add(each.node)
        elif each.change == "down":
            there.discard(each.node)
        most = max(most, len(there))
    return most
