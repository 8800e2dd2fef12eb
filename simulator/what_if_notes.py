"""What a simulated what-if says about itself: its parameters, where each is from, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from shared.model import Model
from simulator.calibration import Calibration
from simulator.history_totals import TaskTotals
from simulator.measured_times import CHECKPOINT, assumed_times
from simulator.policies.unicron import UNICRON
from simulator.policy import Policy
from simulator.trace import Trace
from simulator.what_if_changes import NODE_TIMEOUT, Changes
from simulator.workload import Workload

ASSUMPTIONS = (
    "faults stay as recorded: when, at which node or task; a task that has ended sooner or waits has none",
    "every task is there from the start at full strength, and one that ended has the steps that it made",
    "a slow worker makes its whole node slow, from when the log says so",
    "throughput of a task: the model's at each number of workers, times one measured factor",
    "published policies take the times of their papers; detection and transitions as measured are the live planner's",
)

_SHARE = 0.01
"""Of the history's length: what is off by more is worth a note."""

_WISHED = ("left", "drained")
"""Kinds of ``down`` that are no fault."""


class Parameter(Model):
    """A parameter of the simulation.

    Attributes:
        name: a time of ``measured_times.TIMES``, or ``throughput.TASK``, measured over modelled.
        value: in seconds; of a throughput, a ratio.
        origin: ``log``: measured there. ``default``: the log has no example of it. ``change``: as the user gave it.
        samples: of the log, of which it is the median.
    """

    name: str
    value: float
    origin: Literal["log", "default", "change"]
    samples: int


def parameters_of(calibration: Calibration, workload: Workload, policy: Policy, changes: Changes) -> list[Parameter]:
    """Return the parameters of the simulation with the changes.

    Of another policy than the live planner's, times are those of its papers and not listed, but for changed ones and
    how often checkpoints are written.
    """
    changed = {"node_detection_s": changes.node_timeout_s, CHECKPOINT: changes.checkpoint_every_s}
    found = []
    for name, default in assumed_times().items():
        given, sampled = changed.get(name), calibration.times.get(name)
        if given is not None:
            found.append(Parameter(name=name, value=given, origin="change", samples=0))
        elif name != CHECKPOINT and policy.name != UNICRON.name:
            continue
        elif sampled is not None:
            found.append(Parameter(name=name, value=sampled.value, origin="log", samples=sampled.samples))
        else:
            value = policy.timing.checkpoint_every_s if name == CHECKPOINT else default
            found.append(Parameter(name=name, value=value, origin="default", samples=0))
    for spec in workload.tasks:
        sampled, name = calibration.throughput.get(spec.name), f"throughput.{spec.name}"
        if sampled is not None:
            found.append(Parameter(name=name, value=sampled.value, origin="log", samples=sampled.samples))
        else:
            found.append(Parameter(name=name, value=1.0, origin="default", samples=0))
    return found


class History(NamedTuple):
    """What the notes are about.

    ``submitted``: when each task was. ``workload``: with the changes. ``calibration``: what the log measured.
    ``tasks``: as simulated without changes. ``seeds``: pairs of runs.
    """

    submitted: Mapping[str, datetime]
    workload: Workload
    calibration: Calibration
    tasks: Mapping[str, TaskTotals]
    seeds: int


def notes_of(history: History, changes: Changes) -> list[str]:
    """Return what is to be known of this log, and of these changes."""
    return [*_of_faults(history.workload.trace, changes), *_of_tasks(history), *_of_changes(history, changes)]


def _of_faults(trace: Trace, changes: Changes) -> Iterator[str]:
    downs = [each for each in trace.occurrences if each.change != "up"]
    faults = [each for each in downs if each.kind not in _WISHED]
    if not faults:
        yield "no failure in the log: what policies and times would change about one does not show"
    elif changes.node_timeout_s is not None and all(each.change != "down" for each in faults):
        yield f"no node was lost in the log: {NODE_TIMEOUT} has nothing to change"
    wished = (each for each in downs if each.kind in _WISHED)
    if early := [each for each in wished if each.at_s < (1.0 - _SHARE) * trace.horizon_s]:
        nodes = ", ".join(sorted({each.node for each in early}))
        yield f"{nodes}: left or drained as somebody wished; simulated as lost, and paid for while away"


def _of_tasks(history: History) -> Iterator[str]:
    for spec in history.workload.tasks:
        if spec.name not in history.calibration.throughput:
            yield f"{spec.name}: no step time in the log; its throughput is the model's alone"
        if history.tasks[spec.name].steps == 0.0:
            yield f"{spec.name}: makes no step as simulated; nothing can be said of it"
    began, late = min(history.submitted.values()), timedelta(seconds=_SHARE * history.workload.trace.horizon_s)
    for task, at in history.submitted.items():
        if at - began > late:
            yield f"{task}: submitted {(at - began).total_seconds():.0f} s after the first; simulated from the start"
    if all(task.ended_s is not None for task in history.tasks.values()):
        yield "all tasks end within the time: their work is done either way, what differs is when, and at what cost"


def _of_changes(history: History, changes: Changes) -> Iterator[str]:
    if changes.spares:
        nodes = "1 more node" if changes.spares == 1 else f"{changes.spares} more nodes"
        yield (
            f"spares={changes.spares}: {nodes}, allocated all the time. The planner uses what is there; a policy that "
            "gives each task a fixed share keeps them free until a node is lost"
        )
    if any(key.startswith("weight.") for key in changes.given):
        yield "accumulated WAF counts with the changed weights in every column"
    if history.workload.parameters.get("rollouts", 0.0) > 0.0 and history.seeds == 1:
        yield "plans are compared in drawn futures (rollouts); --seeds 5 shows how much the draws matter"
