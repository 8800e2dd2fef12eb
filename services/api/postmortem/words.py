"""The words of a post-mortem: what those of a log mean to a new reader, durations, sentences that compare numbers."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from services.api.postmortem.model import Alike, Replanned
from shared.events.severities import ErrorKind, Severity
from shared.interface.costs import IncidentCost
from shared.text import flop

KINDS = {
    ErrorKind.NODE_LOST: "nothing was heard of the node any more, so its workers and their processes count as lost",
    ErrorKind.PROCESS_EXIT: "a process of the task ended before its work was done",
    ErrorKind.CONNECTION: "processes of the task lost their connections to one another, and none of them had ended",
    ErrorKind.DEVICE: "a GPU of the node reported a fault",
    ErrorKind.EXCEPTION: "the training program raised an exception",
    ErrorKind.COLLECTIVE_TIMEOUT: "a collective operation did not end in time",
    ErrorKind.HANG: "the processes lived, and the task made no progress",
    ErrorKind.NON_FINITE: "a loss or a gradient was infinite or not a number",
    ErrorKind.TRANSITION_FAILED: "a plan could not be carried out",
    ErrorKind.BROKEN_LINK: "nodes could not reach one another",
    ErrorKind.DIFFERENCE: "a new process was not what those that train are, and had to leave before it took part",
    ErrorKind.REPORTED: "a monitor from outside reported an error of the node",
}
"""Kind of an incident -> what has happened, as a sentence."""

ADVICE = {
    ErrorKind.NODE_LOST: "start the machine, or the service on it; the node joins again by itself.",
    ErrorKind.DEVICE: "reset the device with the agent stopped, or restart the machine; then start the agent, or "
    "`unicron return`.",
    ErrorKind.BROKEN_LINK: "mend the link; the node returns by itself once its links have worked for a while.",
    ErrorKind.PROCESS_EXIT: "If it repeats at one step, the task fails with the last line of the error.",
    ErrorKind.EXCEPTION: "If it repeats at one step, the task fails with the last line of the error.",
    ErrorKind.HANG: "If it repeats, look at the stacks below for what did not enter which collective.",
    ErrorKind.COLLECTIVE_TIMEOUT: "If it repeats, look at the network between the nodes of the task.",
    ErrorKind.CONNECTION: "If it repeats, look at the network between the nodes of the task.",
    ErrorKind.NON_FINITE: "Look at the samples of that micro-batch, and at the parameter that is named below.",
    ErrorKind.DIFFERENCE: "Undo the change that is named below; or stop and resume the task, which then takes it over.",
    ErrorKind.REPORTED: "look at what the monitor says of the node, mend it, then `unicron return`.",
}
"""Kind of an incident -> what an operator can do (docs/operations.md, "What failures look like")."""

SEVERITIES = {
    Severity.SEV1: "the node is left out of use, and its workers' work is planned anew",
    Severity.SEV2: "the process is started again on its node; if that fails, it becomes SEV1",
    Severity.SEV3: "the step is tried again in place; if that fails, it becomes SEV2",
}
"""Severity -> the answer to it."""

SOURCES = {
    "own": "kept its own state",
    "live": "took it from a member that still had it",
    "memory": "read the copy in its node's memory",
    "peer-memory": "read a copy in another node's memory",
    "checkpoint": "read the checkpoint",
    "loaded": "read the checkpoint that the script was given",
    "initial": "began from the initial state",
    "script": "started the script again, which goes on from its own checkpoint",
}
"""Source of a member's state -> what the member did; the nearest source first (``unicron.state.transfer``)."""

PARTS = {
    "hold": "survivors leave the broken step",
    "free": "what is left of failed processes ends",
    "prepare": "new processes start",
    "store": "a meeting point for the new group of processes starts",
    "configure": "the members form the new group: rebuild, agree, move, redistribute and first_step are parts of it",
    "rebuild": "connections of the new group are made",
    "agree": "members agree on the newest state and on what is left of the step",
    "move": "members without the state take it",
    "redistribute": "the lost member's share of the step is computed by others",
    "first_step": "the rest of the step",
    "drain": "members go on to the end of a step",
    "release": "workers that the plan gives up are freed",
    "store-interrupted": "store, for the members that finish the interrupted step",
    "configure-interrupted": "configure, of the members that finish the interrupted step",
    "store-target": "store, for the members of the new stage",
    "configure-target": "configure, of the members of the new stage",
    "stop": "the task writes a checkpoint and ends",
}
"""Part of a phase -> what is done in it (docs/transition.md). Parts of one phase overlap."""


SHORTEST_S = 5e-4
"""What is shorter would be shown as 0 ms."""

SAME = 5e-4
"""Relative difference below which two numbers are the same in three digits."""


def seconds(value: float | None) -> str:
    """Return a duration in milliseconds, seconds, minutes or hours; ``-`` for None and for what is no number."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 1.0:
        return f"{value * 1e3:.0f} ms"
    if abs(value) < 120.0:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def clock(at: datetime | None, after: datetime | None = None) -> str:
    """Return a time to the millisecond, in UTC, with its date, or without it where ``after`` is of the same day."""
    if at is None:
        return "-"
    of_day = f"{at.astimezone(UTC):%H:%M:%S}.{at.microsecond // 1000:03d}"
    same_day = after is not None and after.astimezone(UTC).date() == at.astimezone(UTC).date()
    return of_day if same_day else f"{at.astimezone(UTC):%Y-%m-%d} {of_day}"


def taken(durations_s: dict[str, float]) -> str:
    """Return durations by name as one text, without those that are too short to be shown."""
    return ", ".join(f"{name} {seconds(value)}" for name, value in durations_s.items() if value >= SHORTEST_S)


def failure_worker_s(cost: IncidentCost) -> float:
    """Return the worker-seconds of all parts of an incident's cost."""
    return sum((cost.detection_worker_s, cost.transition_worker_s, cost.recompute_worker_s, cost.sub_healthy_worker_s))


def difference(value: float) -> str:
    """Return a difference of FLOP as ``X more`` or ``X less``."""
    return f"{flop(abs(value))} {'less' if value < 0.0 else 'more'}"


def fewer(model: Replanned) -> str:
    """Return why a restarted task does not go on with fewer workers."""
    if not model.shrunk_workers:
        return (
            f"no number of workers that is left is useful to it; with its {model.workers} back it is worth "
            f"{flop(model.restored_flop)}"
        )
    return (
        f"with the {model.shrunk_workers} left it would be worth {flop(model.shrunk_flop)}, "
        f"{difference(model.shrunk_flop - model.restored_flop)} than the {flop(model.restored_flop)} with "
        f"{model.workers}"
    )


def replanned(model: Replanned) -> str:
    """Return what the solver would have given all tasks, and what that is worth beside the answer that was given."""
    if not model.assignment:
        return "nothing: what was left is too few for the tasks that run"
    counts = ", ".join(f"{task} {workers}" for task, workers in model.assignment.items())
    gain = model.assignment_flop - model.kept_flop
    compared = "as much as" if abs(gain) < SAME * abs(model.kept_flop) else f"{difference(gain)} than"
    kept = f"the {flop(model.kept_flop)} with the failed worker back"
    return f"{counts}; all tasks together worth {flop(model.assignment_flop)}, {compared} {kept}"


def happened(alike: Alike) -> str:
    """Return whether an incident has happened before."""
    if not alike.examined:
        return "No: the log has no earlier incident."
    first = "No incident was like it" if not alike.newest else "There were incidents like it"
    return (
        f"{first}: of the {alike.examined} before, {alike.same_kind} of the same kind, {alike.same_node} of the same "
        f"node, {alike.same_worker} of the same worker."
    )
