"""A user's own log as a workload: what happened to *their* nodes, and the tasks that they ran.

Time begins with the first submission; nodes that are there by then are present. What happened is what the detector
logged, at the time at which it happened:

    node.joined, node.returned         up
    error.detected SEV1, node.left,
    node.drained                       down
    error.detected SEV2, SEV3          error; not of a failed transition, which the simulator has itself
    worker.slowed                      degraded, by the slowest worker of the node; up, once none is slow

A node that is isolated after escalations was lost then: its first answers had failed. Every task of the log is there
from the start; one that ended has the steps that it made. The last submission of a name counts. An error that names
its task happens to that task. What the log measured takes the place of what the simulator assumes (``calibration``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from services.planner.replay.replay import Replayer
from shared.errors import InvalidInput
from shared.events.severities import ErrorKind, Severity
from shared.events.union import (
    ClusterConfigured,
    ErrorDetected,
    Event,
    NodeDrained,
    NodeJoined,
    NodeLeft,
    NodeReturned,
    PlanDecided,
    Recorded,
    TaskFailed,
    TaskFinished,
    TaskStopped,
    TaskStopRequested,
    TaskSubmitted,
    WorkerSlowed,
)
from shared.planning.performance import names
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec
from simulator.run.calibration import Calibration, calibration_of
from simulator.workloads.paper_tasks import outlasting
from simulator.workloads.trace import Occurrence, Trace
from simulator.workloads.workload import PARAMETERS, Workload, peak_flop_per_s


class _Nodes(NamedTuple):
    """What all nodes of a log have in common."""

    hardware: str
    workers_per_node: int


def workload_of_log(replayer: Replayer, name: str) -> Workload:
    """Return the workload that a log tells of.

    Args:
        replayer: the log: a database, or segments (``services.planner.replay.replay.Replayer``).
        name: of the workload and its trace, for example the file's.

    Raises:
        InvalidInput: the log has no task or no node, or nodes that differ in kind or size.
        Corrupt, NotFound: of the log.
    """
    return workload_of_records(replayer.records, name)


def workload_of_records(records: Iterable[Recorded], name: str) -> Workload:
    """Return the workload of records, in the order of the log; errors as ``workload_of_log``."""
    events = [record.event for record in records]
    began = min((event.occurred_at for event in events if isinstance(event, TaskSubmitted)), default=None)
    if began is None:
        raise InvalidInput(f"log {name}: no task was submitted in it; a workload needs at least one")
    common = _common(events, name)
    horizon_s = max(0.0, max((event.occurred_at - began).total_seconds() for event in events))
    nodes, present, occurrences = _placed(_changes(events, began), horizon_s)
    trace = Trace(name, nodes, present, tuple(occurrences), horizon_s, f"log {name}, from {began.isoformat()}")
    tasks = tuple(_tasks(events))
    parameters = _parameters(events)
    measured = calibration_of_log(events, name)
    throughput = {task: found.value for task, found in measured.throughput.items()}
    workers = len(nodes) * common.workers_per_node
    peak = max([1.0, *throughput.values()]) * peak_flop_per_s(common.hardware, parameters)
    return Workload(
        name,
        trace,
        tasks,
        common.hardware,
        common.workers_per_node,
        parameters,
        outlasting(tasks, horizon_s, workers * peak),
        {time: found.value for time, found in measured.times.items()},
        throughput,
    )


def calibration_of_log(events: Sequence[Event], name: str) -> Calibration:
    """Return what the events of a log measured; errors as ``workload_of_log``."""
    common, default = _common(events, name), Settings.model_fields["worker_flop_per_s"].default
    rate = _parameters(events).get("worker_flop_per_s", default)
    return calibration_of(events, common.hardware, common.workers_per_node, rate)


def _common(events: Sequence[Event], name: str) -> _Nodes:
    """Return what the nodes have in common."""
    found = Counter((event.hardware, len(event.workers)) for event in events if isinstance(event, NodeJoined))
    if not found:
        raise InvalidInput(f"log {name}: no node joined in it; a workload needs at least one")
    if len(found) > 1:
        kinds = ", ".join(f"{workers} workers of {kind}" for kind, workers in sorted(found))
        raise InvalidInput(f"log {name}: nodes with {kinds}; nodes of one kind and size can be simulated")
    hardware, workers = next(iter(found))
    return _Nodes(hardware if hardware in names() else "cpu", workers)


def _parameters(events: Sequence[Event]) -> dict[str, float]:
    """Return the parameters of decisions that the log configured first."""
    for event in events:
        if isinstance(event, ClusterConfigured):
            return {field: float(getattr(event, field)) for field in sorted(PARAMETERS)}
    return {}


def _tasks(events: list[Event]) -> Iterator[TaskSpec]:
    """Yield the specification of each task, with the steps that it made if it ended early."""
    submitted: dict[str, TaskSubmitted] = {}
    ended: dict[str, int] = {}
    asked: set[str] = set()
    for event in events:
        if isinstance(event, TaskSubmitted):
            submitted[event.task] = event
            ended.pop(event.task, None)
            asked.discard(event.task)
        elif isinstance(event, TaskStopRequested):
            asked.add(event.task)
        elif isinstance(event, TaskFinished | TaskFailed) or (isinstance(event, TaskStopped) and event.task in asked):
            ended[event.task] = event.step  # a stop that nobody asked for is a pause
    for task, event in submitted.items():
        steps = max(1, ended.get(task, event.spec.steps) - event.step)
        yield event.spec.model_copy(update={"steps": steps})


def _changes(events: list[Event], began: datetime) -> list[Occurrence]:
    """Return what happened to nodes, by time; before the start at negative times."""
    homes: dict[str, str] = {}
    slow: dict[str, dict[str, float]] = {}
    found = []
    for event in events:
        at_s = (event.occurred_at - began).total_seconds()
        if isinstance(event, PlanDecided):
            homes |= _homes(event)
        elif isinstance(event, NodeJoined | NodeReturned):
            slow.pop(event.node, None)
            found.append(Occurrence(at_s, event.node, "up"))
        elif isinstance(event, NodeLeft | NodeDrained):
            found.append(Occurrence(at_s, event.node, "down", "drained" if isinstance(event, NodeDrained) else "left"))
        elif isinstance(event, WorkerSlowed) and event.ends is None:
            slow.setdefault(event.node, {})[event.worker] = event.slowdown
            found.append(_speed(at_s, event.node, max(slow[event.node].values())))
        elif isinstance(event, ErrorDetected) and (error := _error(event, at_s, homes)) is not None:
            found.append(error)
    return sorted(found, key=lambda each: each.at_s)


def _error(event: ErrorDetected, at_s: float, homes: Mapping[str, str]) -> Occurrence | None:
    """Return what an error event says of a node; None if of none. ``homes``: a node of each task."""
    if event.severity is Severity.SEV1 and event.node is not None:
        return Occurrence(at_s, event.node, "down", event.kind.value)
    worker_node = event.worker.partition("/")[0] if event.worker is not None else None
    node = event.node or worker_node or homes.get(event.task or "")
    first = event.escalates is None and event.kind is not ErrorKind.TRANSITION_FAILED
    if not first or node is None or event.severity is Severity.SEV1:
        return None  # an escalation repeats its first error; some errors are of no node
    return Occurrence(at_s, node, "error", event.kind.value, task=event.task or "")


def _homes(plan: PlanDecided) -> Iterator[tuple[str, str]]:
    """Yield a node of each task that a plan gives workers."""
    for change in plan.changes:
        stage = change.target or change.interrupted
        if stage is not None and stage.members:
            yield change.task, stage.members[0].worker.partition("/")[0]


def _speed(at_s: float, node: str, slowdown: float) -> Occurrence:
    return Occurrence(at_s, node, "degraded", "", slowdown) if slowdown > 1 else Occurrence(at_s, node, "up")


def _placed(changes: list[Occurrence], horizon_s: float) -> tuple[tuple[str, ...], int, list[Occurrence]]:
    """Return the nodes, how many are present at the start, and what happens from then on.

    Left out is what changes nothing, such as the second report of a loss.
    """
    there: dict[str, float] = {}  # node -> its slowdown
    start: list[str] | None = None
    seen: list[str] = []
    found: list[Occurrence] = []
    for each in changes:
        if each.at_s > 0 and start is None:
            start = sorted(there)
            found += [Occurrence(0.0, node, "degraded", "", by) for node, by in there.items() if by > 1]
        is_new = there.get(each.node) != each.slowdown if each.change in ("up", "degraded") else each.node in there
        if each.change == "degraded" and each.node not in there:
            is_new = False
        if not is_new:
            continue
        if each.change == "down":
            del there[each.node]
        elif each.change != "error":
            there[each.node] = each.slowdown
        if each.node not in seen:
            seen.append(each.node)
        if start is not None and each.at_s <= horizon_s:
            found.append(each)
    present = start if start is not None else sorted(there)
    later = [node for node in seen if node not in present and any(each.node == node for each in found)]
    return (*present, *later), len(present), found
