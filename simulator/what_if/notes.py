"""What a simulated what-if says about itself: its parameters, where each is from, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from shared.events.severities import ErrorKind
from shared.model import Model
from simulator.policies.parameters import parameters, policies
from simulator.policies.unicron import UNICRON
from simulator.policy import Policy
from simulator.run.calibration import Calibration
from simulator.run.measured_times import CHECKPOINT, assumed_times
from simulator.what_if.changes import NODE_TIMEOUT, Changes
from simulator.what_if.history_totals import OVERHEAD, Totals
from simulator.workloads.trace import WISHED, Trace
from simulator.workloads.workload import Workload

ASSUMPTIONS = (
    "faults stay as recorded: when, at which node or task; a task that has ended sooner or waits has none",
    "every task is there from the start at full strength, and one that ended has the steps that it made",
    "a slow worker makes its whole node slow, from when the log says so",
    "throughput of a task: the model's at each number of workers, times one measured factor",
    "published policies take the times of their papers; detection and transitions as measured are the live planner's",
)

_DETECTED = (ErrorKind.NODE_LOST, ErrorKind.PROCESS_EXIT, ErrorKind.EXCEPTION, ErrorKind.HANG)
"""Kinds of errors of which the time to detection is said."""

_FEW = 0.5
"""The share of a task's steps in the model: with fewer, the answer says so task by task."""

_LEAST_SHARE = 5e-5
"""Parts of a difference below it show as zero."""

_SHARE = 0.01
"""The share of the history's length: what is off by more is worth a note."""


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
    """The history that the notes are about.

    ``submitted``: when each task was. ``workload``: with the changes. ``calibration``: what the log measured.
    ``seeds``: pairs of runs.
    """

    submitted: Mapping[str, datetime]
    workload: Workload
    calibration: Calibration
    seeds: int


class Answer(NamedTuple):
    """What was simulated: without and with the changes, and the parts of the difference in accumulated WAF."""

    model: Totals
    what_if: Totals
    waf_difference: Mapping[str, float]


def notes_of(history: History, changes: Changes, answer: Answer) -> list[str]:
    """Return what is to be known of this log, of these changes, and of what they come to."""
    return [
        *_of_faults(history.workload.trace, changes),
        *_of_tasks(history, answer),
        *_of_changes(history, changes),
        *_of_answer(answer),
    ]


def assumptions_of(policy: Policy) -> list[str]:
    """Return what a policy assumes, each with its source; of the live planner's nothing: its times are measured."""
    if policy.name == UNICRON.name:
        return []
    of = policy.name
    known = parameters(of) if of in policies() else {}
    stated = known.get("efficiency") or known.get("redundant_overhead")
    source = f"{stated.known}; {stated.source}" if stated is not None else "no loss stated by its source"
    detected = [f"{kind.value} {policy.timing.detection_s(kind, 0.0):g}" for kind in _DETECTED]
    return [
        f"{of}: {policy.source}",
        f"{of}: efficiency of a healthy step {policy.efficiency:.4g} of the live planner's ({source})",
        f"{of}: seconds to the detection of a fault: {', '.join(detected)}, or more; this and other times with their "
        "sources: simulator/policies/parameters.json",
        *(f"{of}: {each.rstrip('.')}" for each in policy.assumptions),
        f"{of}: checkpoints are as far apart as the parameters above say, whatever its paper has",
    ]


def _of_faults(trace: Trace, changes: Changes) -> Iterator[str]:
    downs = [each for each in trace.occurrences if each.change != "up"]
    faults = [each for each in downs if each.kind not in WISHED]
    if not faults:
        yield "no failure in the log: what policies and times would change about one does not show"
    elif changes.node_timeout_s is not None and all(each.change != "down" for each in faults):
        yield f"no node was lost in the log: {NODE_TIMEOUT} has nothing to change"
    wished = (each for each in downs if each.kind in WISHED)
    if early := [each for each in wished if each.at_s < (1.0 - _SHARE) * trace.horizon_s]:
        nodes = ", ".join(sorted({each.node for each in early}))
        yield f"{nodes}: left or drained as somebody wished; simulated as lost, and paid for while away"


def _of_answer(answer: Answer) -> Iterator[str]:
    """Yield where the difference in accumulated WAF is from, and what never came to an end."""
    what_if, whole = answer.what_if, answer.model.accumulated_waf_flop
    named = [(kind, flop / whole) for kind, flop in answer.waf_difference.items() if whole]
    shown = [f"{kind.replace('_', ' ')} {share:+.2%}" for kind, share in named if abs(share) >= _LEAST_SHARE]
    if shown:
        total = sum(share for _, share in named)
        yield f"accumulated WAF, DIFFERENCE in parts, of MODEL's: {', '.join(shown)}; together {total:+.2%}"
    if what_if.policy != UNICRON.name:
        overhead = dict(named).get(OVERHEAD, 0.0)
        yield f"efficiency of {what_if.policy}, healthy steps beside the live planner's: {overhead:+.2%} of MODEL's WAF"
    if what_if.unfound_faults:
        yield (
            f"faults that {what_if.policy} does not find before the log ends: {what_if.unfound_faults:g}. Their tasks "
            "stand still from the fault on, which counts as detection"
        )


def _of_tasks(history: History, answer: Answer) -> Iterator[str]:
    tasks, changed = answer.model.tasks, answer.what_if.tasks
    for spec in history.workload.tasks:
        if spec.name not in history.calibration.throughput:
            yield f"{spec.name}: no step time in the log; its throughput is the model's alone"
        model, what_if = tasks[spec.name].steps, changed[spec.name].steps
        if model == 0.0:
            yield f"{spec.name}: makes no step as simulated; nothing can be said of it"
        elif what_if < _FEW * model:
            yield f"{spec.name}: {what_if:.0f} steps at the end with the changes, {model:.0f} as it was configured"
    began, late = min(history.submitted.values()), timedelta(seconds=_SHARE * history.workload.trace.horizon_s)
    for task, at in history.submitted.items():
        if at - began > late:
            yield f"{task}: submitted {(at - began).total_seconds():.0f} s after the first; simulated from the start"
    if all(task.ended_s is not None for task in (*tasks.values(), *changed.values())):
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
