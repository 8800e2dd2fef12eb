"""Members of a task whose node reports no such process: the end of a rank of which no signal arrived. Pure.

An agent signals the end of each process (``ProcessExited``), which is the fast way. A signal can be lost with its
agent, or on the way. So what the log says (a member trains on this worker) is compared with every heartbeat, also
while a plan is carried out: a survivor that has vanished must not be waited for, and its node is not to blame.
"""

from __future__ import annotations

from datetime import datetime

from services.detector.incidents import script_ends
from services.detector.incidents.faults import Fault
from services.detector.state.cluster import DetectorState
from services.detector.state.task import MonitoredTask
from shared.events.evidence import Evidence
from shared.events.plans import Member
from shared.events.severities import ErrorKind
from shared.messages.signals import WorkerStatus

ABSENT_S = 1.0
"""For how long heartbeats must report a member absent. The signal of its end arrives within 50 ms (measured), on a busy
machine within 0.25 s (``services.detector.decisions.incidents.SETTLE_S``); four heartbeats make it certain."""

VANISHED = "vanished"
"""The error's name where a process vanished, in place of an exit code."""


def update(state: DetectorState, task: MonitoredTask, now: datetime) -> None:
    """Note from when on each member of a task has been absent from the heartbeats of its node.

    Args:
        state: the detector's.
        task: trains, or has a plan in progress; none of its errors is unanswered.
        now: when the newest heartbeats have arrived, or later.
    """
    if script_ends.going_on(state, task):
        task.absent_since = {}  # the others' scripts have ended: any other end of a process is signalled
        return
    statuses = state.statuses(task)
    absent = [w for w in expected(task) if _is_absent(state, task, task.members[w], statuses.get(w))]
    task.absent_since = {worker: task.absent_since.get(worker, now) for worker in absent}


def find(state: DetectorState, task: MonitoredTask, listening_since: datetime) -> Fault | None:
    """Return the fault of members that vanished; None if all are there, or may have left just now.

    Args:
        state: the detector's.
        task: after ``update``.
        listening_since: the time from which heartbeats and signals arrive; after the bus was away, the signals that
            wait in the agents come first. So do those of a node that was unreachable: they may say that the task has
            finished.
    """
    nodes = [node for member in task.members.values() if (node := state.nodes.get(member.node)) is not None]
    if any(node.unreachable_since is not None for node in nodes):
        return None
    listening_since = max([listening_since, *(n.adopted_until for n in nodes if n.adopted_until is not None)])
    vanished = [w for w, since in task.absent_since.items() if _confirmed(state, w, max(since, listening_since))]
    if not vanished:
        return None
    member = task.members[vanished[0]]
    return Fault(
        cause=f"{task.name}/{task.generation}/{','.join(vanished)}/{VANISHED}",
        kind=ErrorKind.PROCESS_EXIT,
        error=VANISHED,
        occurred_at=task.absent_since[member.worker],
        generation=task.generation,
        step=task.step,
        worker=member.worker,
        node=member.node,
        rank=member.rank,
        evidence=Evidence(workers=vanished).mapping(exit=VANISHED),
    )


def expected(task: MonitoredTask) -> list[str]:
    """Return the members that must have a process now: all, or those that stay in the plan that is carried out."""
    if task.change is None:
        return list(task.members)
    change = task.change
    if change.action not in ("move", "none"):
        return []
    leaving = {*change.release, *change.failed, *change.prepare}
    kept = {m.worker for m in task.stages()[-1].members} if task.stages() else set(change.survivors)
    staying = (kept & set(change.survivors)) - leaving
    return [w for w in task.members if w in staying and task.accepts(w, task.generation)]


def _is_absent(state: DetectorState, task: MonitoredTask, member: Member, status: WorkerStatus | None) -> bool:
    """Return whether the node is there and reports no process of the task's generation on the member's worker.

    A process of an older generation is not the member: it has never joined, and what it waits for will not come.
    """
    node = state.nodes.get(member.node)
    if node is None or not node.present or node.heartbeat is None:
        return False
    return status is None or status.task != task.name or (status.generation or 0) < task.generation


def _confirmed(state: DetectorState, worker: str, since: datetime) -> bool:
    """Return whether the worker's node has been heard ``ABSENT_S`` after ``since``, or later."""
    heard_at = state.nodes[worker.rpartition("/")[0]].heard_at
    return heard_at is not None and (heard_at - since).total_seconds() >= ABSENT_S
