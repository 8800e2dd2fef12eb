"""From what went wrong to the event that says so: severity, escalation, the same failure again and again."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from services.detector.view import NodeView, TaskView, View
from shared.events import ErrorDetected, Event, TaskFailed, derived_id
from shared.severities import SEVERITY, ErrorKind, Method, Severity
from shared.signals import ProcessExited, RankRaised

SERVICE = "detector"
"""Names this service in derived ids."""

_METHOD = {
    ErrorKind.NODE_LOST: Method.NODE_HEALTH,
    ErrorKind.PROCESS_EXIT: Method.PROCESS_SUPERVISION,
    ErrorKind.CONNECTION: Method.EXCEPTION,
    ErrorKind.EXCEPTION: Method.EXCEPTION,
    ErrorKind.NON_FINITE: Method.STATISTICS,
    ErrorKind.HANG: Method.STATISTICS,
    ErrorKind.COLLECTIVE_TIMEOUT: Method.STATISTICS,
    ErrorKind.DEVICE: Method.DEVICE,
    ErrorKind.TRANSITION_FAILED: Method.TRANSITION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One cause, before it is known how to answer it.

    ``cause``: what the event's id derives from. ``error``: the error's name (exception type, signal): with kind and
    step it tells whether this is the same failure as before. ``step``: updates applied. ``traceback``: for the reader.
    """

    cause: str
    kind: ErrorKind
    error: str
    occurred_at: datetime
    generation: int
    step: int
    worker: str | None = None
    node: str | None = None
    rank: int | None = None
    traceback: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The same failure has the same key."""
        return f"{self.kind.value}/{self.error}/step {self.step}"


def exit_name(exit_code: int) -> str:
    """Return ``SIGKILL`` for -9, ``exit 1`` for 1."""
    if exit_code >= 0:
        return f"exit {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def of_exit(said: ProcessExited, suspects: list[RankRaised]) -> Fault:
    """Return the fault of a process that ended; ``suspects``: ranks whose collectives broke before this was known."""
    name = exit_name(said.exit_code)
    return Fault(
        cause=said.signal_id,
        kind=ErrorKind.PROCESS_EXIT,
        error=name,
        # The peers of a dead process may have noticed sooner than its parent.
        occurred_at=min([said.occurred_at, *(s.occurred_at for s in suspects)]),
        generation=said.generation,
        step=said.step,
        worker=said.worker,
        node=said.node,
        rank=said.rank,
        traceback=said.last_output,
        evidence={
            "exit": name,
            "exit_code": said.exit_code,
            "pid": said.pid,
            "last_output": said.last_output,
            "broken_sockets_of": [s.worker for s in suspects],
        },
    )


def of_exception(said: RankRaised) -> Fault:
    """Return the fault of a rank that raised."""
    return Fault(
        cause=said.signal_id,
        kind=ErrorKind.NON_FINITE if said.cause == "non_finite" else ErrorKind.EXCEPTION,
        error=said.error,
        occurred_at=said.occurred_at,
        generation=said.generation,
        step=said.step,
        worker=said.worker,
        node=said.node,
        rank=said.rank,
        traceback=said.traceback,
        evidence={"error": said.error, "detail": said.detail, "traceback": said.traceback},
    )


def judge(view: View, task: TaskView, fault: Fault, *, window_s: float, now: datetime) -> Event:
    """Return what the log is told of a task's fault.

    The same failure at the same step more than ``max_restarts`` times within ``window_s`` ends the task: that is a
    bug in the task. A repeat below that is answered as the first was. A fresh failure of a process that the
    outstanding retry or restart had just started is the failure of that response: it escalates the incident.
    """
    # Ranks that fail alike in one generation are one occurrence.
    earlier = {
        f.generation
        for f in task.failures
        if f.key == fault.key and f.generation != fault.generation and (now - f.at).total_seconds() <= window_s
    }
    repeated = any(f.key == fault.key for f in task.failures)
    event_id = derived_id(fault.cause, SERVICE, f"{task.name}/{fault.kind.value}")
    if len(earlier) + 1 > task.max_restarts:
        return _failed(view, task, fault, len(earlier) + 1, now=now, event_id=event_id)
    original = None if repeated else _response_that_failed(view, task, fault)
    severity = SEVERITY[fault.kind]
    if original is not None:
        severity = max(severity, original.severity.escalated(), key=_badness)
    return ErrorDetected(
        event_id=event_id,
        occurred_at=min(fault.occurred_at, now),
        incident=original.incident if original is not None else event_id,
        kind=fault.kind,
        severity=severity,
        method=_METHOD[fault.kind],
        detected_at=now,
        node=fault.node,
        worker=fault.worker,
        task=task.name,
        rank=fault.rank,
        generation=fault.generation,
        step=fault.step,
        evidence={**fault.evidence, "failure": fault.key, "occurrences": len(earlier) + 1},
        escalates=original.event_id if original is not None else None,
    )


RELEASED = "released"
"""How the detail of a failed transition begins that counted on a process which an earlier plan had ended."""


def escalation(view: View, task: TaskView, *, window_s: float, now: datetime) -> Event | None:
    """Return what follows from a plan that could not be carried out; None if its cause is known already."""
    moved = task.broken
    if moved is None or task.ended or task.unanswered:
        return None
    note = view.plans.get(moved.plan)
    original = view.errors.get(note.cause) if note is not None else None
    worker = moved.failed_workers[0] if moved.failed_workers else None
    if worker is None and original is not None and original.task == task.name:
        worker = original.worker
    node = worker.rpartition("/")[0] if worker is not None else (original.node if original is not None else None)
    fault = Fault(
        cause=moved.event_id,
        kind=ErrorKind.TRANSITION_FAILED,
        error=original.kind.value if original is not None else "start",
        occurred_at=moved.occurred_at,
        generation=moved.generation,
        step=task.step,
        worker=worker,
        node=node,
        traceback=moved.detail,
        evidence={"plan": moved.plan, "detail": moved.detail, "workers": moved.failed_workers},
    )
    event = judge(view, task, fault, window_s=window_s, now=now)
    if isinstance(event, TaskFailed) or original is None:
        return event
    if moved.detail.startswith(f"{RELEASED}:"):
        # No response failed: two plans crossed. The process is to be started again, and no node is to blame.
        return event.model_copy(update={"incident": original.incident})
    return event.model_copy(
        update={
            "incident": original.incident,
            "kind": original.kind,
            "severity": original.severity.escalated(),
            "method": Method.TRANSITION,
            "rank": original.rank if worker == original.worker else None,
            "escalates": original.event_id,
        }
    )


def node_lost(view: View, node: NodeView, *, now: datetime, reason: str, limit_s: float) -> ErrorDetected:
    """Return the error event of a node that is gone, with every task that had ranks on it."""
    event_id = derived_id(node.joined, SERVICE, "lost")
    heard_at = node.heard_at or now
    tasks: dict[str, Any] = {}
    for task in view.tasks.values():
        prefix = f"{node.name}/"
        workers = sorted(w for w in task.concerned() if w.startswith(prefix)) if not task.ended else []
        if workers:
            tasks[task.name] = {
                "workers": workers,
                "ranks": {w: m.rank for w, m in task.members.items() if w in workers},
                "generation": task.newest_generation(),
                "step": task.step,
            }
    return ErrorDetected(
        event_id=event_id,
        occurred_at=min(heard_at, now),
        incident=event_id,
        kind=ErrorKind.NODE_LOST,
        severity=Severity.SEV1,
        method=Method.NODE_HEALTH,
        detected_at=now,
        node=node.name,
        evidence={
            "reason": reason,
            "incarnation": node.incarnation,
            "last_heartbeat_at": heard_at.isoformat(),
            "silence_s": (now - heard_at).total_seconds(),
            "limit_s": limit_s,
            "tasks": tasks,
        },
    )


def _response_that_failed(view: View, task: TaskView, fault: Fault) -> ErrorDetected | None:
    """Return the error whose response this fault is the failure of, if it is one.

    A retry or a restart can fail. A process that a re-planned cluster starts on some other node has failed for the
    first time: it is restarted there before that node is given up.
    """
    if task.change is None or task.plan is None or fault.worker not in task.change.prepare:
        return None
    note = view.plans.get(task.plan)
    original = view.errors.get(note.cause) if note is not None else None
    return original if original is not None and original.severity is not Severity.SEV1 else None


def _failed(view: View, task: TaskView, fault: Fault, times: int, *, now: datetime, event_id: str) -> TaskFailed:
    last = [e for e in view.errors.values() if e.task == task.name and e.evidence.get("failure") == fault.key]
    what = f"{fault.kind.value} ({fault.error}) at step {fault.step}"
    return TaskFailed(
        event_id=event_id,
        occurred_at=now,
        task=task.name,
        generation=fault.generation,
        step=fault.step,
        reason=f"{what} happened {times} times; max_restarts is {task.max_restarts}",
        traceback=fault.traceback,
        incident=last[-1].incident if last else "",
    )


def _badness(severity: Severity) -> int:
    return {Severity.SEV3: 0, Severity.SEV2: 1, Severity.SEV1: 2}[severity]
