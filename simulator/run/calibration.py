"""Calibration: what a log measured of its cluster, for the parameters that the simulator has.

Times are medians over the whole log: of detection over the incidents of a kind, of transitions over the parts of plans
that were carried out with survivors. Throughput is measured over modelled, by task: the median over its reports of
progress in generations without a slow worker. What a log has no example of is left out, and keeps its default.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from services.planner.state.cluster import HardwareLayout
from services.planner.throughput.model import flop_per_step, hardware_in_nodes, modelled_flop_per_s
from shared.events.plans import Stage, TaskChange
from shared.events.severities import ErrorKind
from shared.events.union import (
    ErrorDetected,
    Event,
    NodeJoined,
    PlanDecided,
    StateMoved,
    TaskCheckpointed,
    TaskProgressed,
    TaskSubmitted,
    WorkerSlowed,
)
from simulator.run.execution import DECISION_S
from simulator.run.measured_times import CHECKPOINT

_DETECTION = {
    ErrorKind.NODE_LOST: "node_detection_s",
    ErrorKind.PROCESS_EXIT: "process_detection_s",
    ErrorKind.CONNECTION: "process_detection_s",
    ErrorKind.EXCEPTION: "exception_detection_s",
    ErrorKind.DEVICE: "exception_detection_s",
    ErrorKind.NON_FINITE: "exception_detection_s",
    ErrorKind.HANG: "hang_detection_s",
    ErrorKind.COLLECTIVE_TIMEOUT: "hang_detection_s",
    ErrorKind.BROKEN_LINK: "link_detection_s",
    ErrorKind.DIFFERENCE: "exception_detection_s",
}
"""The time that an incident of each kind is a sample of, as ``policies.timing.Detection`` has them. A transition that
fails is the simulator's own."""


class Sampled(NamedTuple):
    """A median, and the number of samples behind it."""

    value: float
    samples: int


class Calibration(NamedTuple):
    """What a log measured. ``times``: by name (``measured_times.TIMES``). ``throughput``: by task."""

    times: dict[str, Sampled]
    throughput: dict[str, Sampled]


def calibration_of(
    events: Sequence[Event], hardware: str, workers_per_node: int, worker_flop_per_s: float
) -> Calibration:
    """Return the calibration of a log.

    Args:
        events: in the order of the log.
        hardware: kind of all workers.
        workers_per_node: of every node.
        worker_flop_per_s: the setting by which the throughput model rates workers that no data sheet describes.
    """
    times = defaultdict[str, list[float]](list)
    for name, value in (*_detections(events), *_transitions(events), *_checkpoints(events)):
        times[name].append(value)
    throughput = defaultdict[str, list[float]](list)
    profile = hardware_in_nodes(hardware, workers_per_node, worker_flop_per_s)
    specs = {event.task: event.spec for event in events if isinstance(event, TaskSubmitted)}
    for event, stage in _healthy_reports(events):
        spec = specs.get(event.task)
        if spec is None:
            continue
        layout = HardwareLayout(hardware, stage.layout.tensor, stage.layout.pipeline, stage.layout.data)
        if (modelled := modelled_flop_per_s(spec, layout, profile)) > 0.0:
            throughput[event.task].append(flop_per_step(spec) / event.step_s / modelled)
    return Calibration(_medians(times), _medians(throughput))


def _medians(samples: dict[str, list[float]]) -> dict[str, Sampled]:
    return {name: Sampled(median(found), len(found)) for name, found in sorted(samples.items())}


def _detections(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Yield the detection of each first error of an incident; an escalation repeats an earlier one."""
    for event in events:
        if isinstance(event, ErrorDetected) and event.escalates is None and event.kind in _DETECTION:
            yield _DETECTION[event.kind], max(0.0, (event.detected_at - event.occurred_at).total_seconds())


def _transitions(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Yield the pauses of tasks that survivors went on with, and the starts of processes.

    A fault's pause is from its trigger to the first step of the target, without that step, the start of processes and
    the move of state, which the simulator adds. Another one begins when the survivors have drained.
    """
    parts: dict[tuple[str, str], tuple[PlanDecided, TaskChange]] = {}
    drained: dict[tuple[str, str], StateMoved] = {}
    for event in events:
        if isinstance(event, PlanDecided):
            parts.update({(event.plan, change.task): (event, change) for change in event.changes})
        if not isinstance(event, StateMoved) or (key := (event.plan, event.task)) not in parts:
            continue
        plan, change = parts[key]
        took = event.durations_s
        if event.phase == "prepared" and "prepare" in took:
            yield "process_start_s", took["prepare"]
        elif event.phase == "drained":
            drained[key] = event
        elif event.phase == "restored" and event.complete and change.survivors:
            others_s = took.get("first_step", 0.0) + took.get("move", 0.0)
            if change.hold:
                others_s += DECISION_S + (took.get("prepare", 0.0) if change.prepare else 0.0)
                yield "fault_pause_s", _not_below_0((event.occurred_at - plan.occurred_at).total_seconds() - others_s)
            elif key in drained:
                since = drained[key].occurred_at
                yield "pause_s", _not_below_0((event.occurred_at - since).total_seconds() - others_s)


def _not_below_0(seconds: float) -> float:
    """Return the rest of a time; its parts overlap a little where phases do."""
    return max(0.0, seconds)


def _checkpoints(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Yield the times between two checkpoints that one generation of a task wrote."""
    newest: dict[tuple[str, int], TaskCheckpointed] = {}
    for event in events:
        if isinstance(event, TaskCheckpointed):
            before = newest.get((event.task, event.generation))
            if before is not None and event.step > before.step:
                yield CHECKPOINT, (event.occurred_at - before.occurred_at).total_seconds()
            newest[event.task, event.generation] = event


def _healthy_reports(events: Sequence[Event]) -> Iterator[tuple[TaskProgressed, Stage]]:
    """Yield the reports with a step time of generations that have no slow worker, with what they trained on."""
    stages: dict[tuple[str, int], Stage] = {}
    slow: set[str] = set()
    for event in events:
        if isinstance(event, PlanDecided):
            for change in event.changes:
                stages.update({(change.task, stage.generation): stage for stage in change.stages})
        elif isinstance(event, NodeJoined):
            slow.difference_update(event.workers)
        elif isinstance(event, WorkerSlowed):
            (slow.add if event.slowdown > 1.0 else slow.discard)(event.worker)
        elif isinstance(event, TaskProgressed) and event.step_s > 0.0:
            stage = stages.get((event.task, event.generation))
            if stage is not None and slow.isdisjoint(member.worker for member in stage.members):
                yield event, stage
