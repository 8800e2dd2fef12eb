"""What a simulated what-if says about itself: its parameters, where each is from, and what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal

from shared.events import Event, TaskSubmitted
from shared.model import Model
from simulator.calibration import Calibration
from simulator.measured_times import CHECKPOINT, assumed_times
from simulator.policies.unicron import UNICRON
from simulator.policy import Policy
from simulator.what_if_changes import NODE_TIMEOUT, Changes
from simulator.workload import Workload

ASSUMPTIONS = (
    "faults stay as recorded: when, at which node or task; a task that has ended sooner or waits has none",
    "every task is there from the start at full strength, and one that ended has the steps that it made",
    "a slow worker makes its whole node slow, from when the log says so",
    "throughput of a task: the model's at each number of workers, times one measured factor",
    "published policies take the times of their papers; detection and transitions as measured are the live planner's",
)

_LATE = 0.01
"""Of the history's length: a task that was submitted later than that is worth a note."""


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


def notes_of(
    events: Sequence[Event],
    workload: Workload,
    changes: Changes,
    calibration: Calibration,
    steps: Mapping[str, float],
    seeds: int,
) -> list[str]:
    """Return what is to be known of this log.

    Args:
        events: of the log.
        workload: with the changes.
        changes: what is changed.
        calibration: what the log measured.
        steps: by task, as simulated without changes.
        seeds: pairs of runs.
    """
    notes = []
    faults = [each for each in workload.trace.occurrences if each.change != "up"]
    if not faults:
        notes.append("no failure in the log: what policies and times would change about one does not show")
    elif changes.node_timeout_s is not None and all(each.change != "down" for each in faults):
        notes.append(f"no node was lost in the log: {NODE_TIMEOUT} changes nothing")
    for spec in workload.tasks:
        if spec.name not in calibration.throughput:
            notes.append(f"{spec.name}: no step time in the log; its throughput is the model's alone")
        if steps.get(spec.name, 0.0) == 0.0:
            notes.append(f"{spec.name}: makes no step as simulated; nothing can be said of it")
    submitted = {event.task: event.occurred_at for event in events if isinstance(event, TaskSubmitted)}
    began, late = min(submitted.values()), timedelta(seconds=_LATE * workload.trace.horizon_s)
    notes += [
        f"{task}: submitted {(at - began).total_seconds():.0f} s after the first; simulated from the start"
        for task, at in submitted.items()
        if at - began > late
    ]
    if changes.spares:
        notes.append(
            f"spares={changes.spares}: {changes.spares} more, allocated all the time; the planner uses them where that "
            "pays, policies that keep spares leave them free"
        )
    if any(key.startswith("weight.") for key in changes.given):
        notes.append("accumulated WAF counts with the changed weights in every column")
    if workload.parameters.get("rollouts", 0.0) > 0.0 and seeds == 1:
        notes.append("plans are compared in drawn futures (rollouts); --seeds 5 shows how much the draws matter")
    return notes
