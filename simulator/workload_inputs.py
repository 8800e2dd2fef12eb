"""From what a user names to a workload: a trace by name, in a file or in a log, with cluster and tasks of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from services.planner.replay.replay import Replayer
from shared.errors import InvalidInput, NotFound
from shared.log.segments import is_segment, segments_in
from simulator.cluster_files import ClusterFile, read_cluster, read_tasks
from simulator.log_traces import workload_of_log
from simulator.workloads import generators
from simulator.workloads.paper_tasks import DEFAULT_CASE, outlasting
from simulator.workloads.paper_workloads import NAMES, with_tasks, workload
from simulator.workloads.trace import Trace
from simulator.workloads.trace_files import read_trace
from simulator.workloads.workload import Workload, peak_flop_per_s

SQLITE_HEADER = b"SQLite format 3\0"
"""The first bytes of every SQLite file (https://sqlite.org/fileformat.html, section 1.3)."""


def resolve(
    trace: str,
    seed: int = 0,
    *,
    cluster: Path | None = None,
    tasks: Path | None = None,
    case: int = DEFAULT_CASE,
) -> Workload:
    """Return the workload that a user asks for.

    Where nothing else is given: the nodes of the trace with 8 workers each, and the six tasks of a case of the paper's
    table 3; of a log, its own cluster and tasks.

    Args:
        trace: a name (``paper_workloads.NAMES``), a trace file, or a log: an SQLite file, a segment, a folder of
            segments, or a database's URL.
        seed: of a generated trace; others are as they are.
        cluster: a cluster file (``cluster_files``).
        tasks: a task file, in place of the tasks of the trace.
        case: of the paper's table 3.

    Raises:
        NotFound: no such trace or file.
        InvalidInput: of what a file says, or a cluster that has fewer nodes than the trace.
        Corrupt: of a log.
    """
    given = read_cluster(cluster) if cluster is not None else ClusterFile()
    found = _found(trace, seed, case, given)
    if tasks is not None:
        found = replace(found, tasks=read_tasks(tasks))
    return with_cluster(found, given)


def with_cluster(found: Workload, cluster: ClusterFile) -> Workload:
    """Return the workload on the cluster of a file: its kind of workers, its parameters, and its further nodes.

    Raises:
        InvalidInput: the cluster has fewer nodes than the trace, or not one that the trace names.
    """
    hardware = cluster.hardware or found.hardware
    workers_per_node = cluster.workers_per_node or found.workers_per_node
    trace = _with_nodes(found.trace, cluster.nodes)
    parameters = {**found.parameters, **cluster.settings}
    throughput = {**found.throughput, **cluster.throughput}
    peak = max([1.0, *throughput.values()]) * peak_flop_per_s(hardware, parameters)
    return replace(
        found,
        trace=trace,
        hardware=hardware,
        workers_per_node=workers_per_node,
        parameters=parameters,
        endless=outlasting(
            found.tasks,
            trace.horizon_s,
            len(trace.nodes) * workers_per_node * peak,
        ),
        times={**found.times, **cluster.times},
        throughput=throughput,
    )


def _found(trace: str, seed: int, case: int, cluster: ClusterFile) -> Workload:
    """Return the workload as the trace alone has it."""
    if trace in NAMES:
        nodes = cluster.nodes if trace == "trace-a" and isinstance(cluster.nodes, int) else generators.PAPER_NODES
        return workload(trace, seed, case, nodes=nodes)
    if (log := _log(trace)) is not None:
        return workload_of_log(log, Path(trace).name)
    path = Path(trace)
    if not path.exists():
        raise NotFound(f"no trace {trace!r}: neither a file nor one of {', '.join(NAMES)}")
    return with_tasks(read_trace(path), case=case)


def _log(trace: str) -> Replayer | None:
    """Return a replayer of the log that the text names; None if it names none."""
    if "://" in trace:
        return Replayer.of_url(trace)
    path = Path(trace)
    if path.is_dir():
        return Replayer.of_segments(segments_in(path))
    if not path.is_file():
        return None
    if is_segment(path):
        return Replayer.of_segments([path])
    with path.open("rb") as file:
        return Replayer.of_file(path) if file.read(len(SQLITE_HEADER)) == SQLITE_HEADER else None


def _with_nodes(trace: Trace, nodes: int | list[str] | None) -> Trace:
    """Return the trace with the further nodes that are there all the time."""
    if nodes is None:
        return trace
    if isinstance(nodes, list):
        if missing := [node for node in trace.nodes if node not in nodes]:
            problem = f"must have all nodes of the trace; {missing[0]} is missing"
            raise InvalidInput.of("nodes", len(nodes), problem, f"nodes: {problem}")
        further = [node for node in nodes if node not in trace.nodes]
    else:
        if nodes < len(trace.nodes):
            problem = f"must be at least {len(trace.nodes)}, as many as the trace names"
            raise InvalidInput.of("nodes", nodes, problem)
        free = (name for name in generators.node_names(2 * nodes) if name not in trace.nodes)
        further = [next(free) for _ in range(nodes - len(trace.nodes))]
    all_nodes = (*trace.nodes[: trace.present], *further, *trace.nodes[trace.present :])
    return replace(trace, nodes=all_nodes, present=trace.present + len(further))
