"""From a fault to the event that records it: severity, escalation, and the end of a task that fails again and again.

A *fault* describes what went wrong before anything decides about it. ``judge`` turns a task's fault into an error
event, or into the end of the task. ``incidents.py`` has faults judged, and ``hangs.py`` finds the faults of tasks that
stand still.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from services.detector.state import back_off
from services.detector.state.error_classes import ErrorClass, class_of, class_of_exit, exit_name
from services.detector.state.known_errors import KnownError, place_of
from services.detector.state.task import MonitoredTask, Suspicion
from shared.events.codes import FailureCode
from shared.events.evidence import Evidence
from shared.events.severities import SEVERITY, ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, Event, StateMoved, TaskFailed, derived_id
from shared.messages.signals import ProcessExited, RankRaised, RankSignal
from shared.model import filled
from shared.tasks.refusals import reason_of

SERVICE = "detector"
"""The name of this service in derived ids."""

METHOD = {
    ErrorKind.NODE_LOST: Method.NODE_HEALTH,
    ErrorKind.PROCESS_EXIT: Method.PROCESS_SUPERVISION,
    ErrorKind.CONNECTION: Method.EXCEPTION,
    ErrorKind.EXCEPTION: Method.EXCEPTION,
    ErrorKind.NON_FINITE: Method.STATISTICS,
    ErrorKind.HANG: Method.STATISTICS,
    ErrorKind.COLLECTIVE_TIMEOUT: Method.STATISTICS,
    ErrorKind.DEVICE: Method.DEVICE,
    ErrorKind.TRANSITION_FAILED: Method.TRANSITION,
    ErrorKind.BROKEN_LINK: Method.NODE_HEALTH,
    ErrorKind.DIFFERENCE: Method.EXCEPTION,
    ErrorKind.REPORTED: Method.REPORT,
}
"""The method that finds an error of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a task, before it is judged.

    Attributes:
        cause: the id that the event's id derives from.
        kind: the kind of the error event.
        error: the name of the error: an exception's type, a signal. Kind, error and step identify a repeated failure.
        occurred_at: the best estimate of the time of the fault.
        generation: the task's.
        step: updates applied.
        worker: the failed worker; None if no worker is to blame.
        node: the worker's node.
        rank: the worker's rank.
        traceback: what the process reported, for the reader; its last line ends the reason of a failed task.
        evidence: the error event's.
        by_peers: whether a broken link between two nodes may be the cause (``links.py``).
        stalled_s: for how long ranks have stood still; None if the fault is no stall.
        in_setup: whether the ranks stand still while they join a generation.
        certain: whether it is a fault in any case, or only if a link is found broken.
        severity: of a first occurrence, where it does not follow from the kind.
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
    by_peers: bool = False
    stalled_s: float | None = None
    in_setup: bool = False
    certain: bool = True
    severity: Severity | None = None

    @property
    def key(self) -> str:
        """The same failure has the same key. A difference between members is the same at any step."""
        if self.kind is ErrorKind.DIFFERENCE:
            return f"{self.kind.value}/{self.error}"
        return f"{self.kind.value}/{self.error}/step {self.step}"


def last_line(text: str) -> str:
    """Return the last line of a traceback or of a process's output; empty if the text is blank."""
    return text.strip().rpartition("\n")[2].strip()


# ---- faults of signals


def of_exit(exited: ProcessExited, suspects: list[RankRaised]) -> Fault:
    """Return the fault of a process that ended.

    Args:
        exited: the signal.
        suspects: the ranks of the same generation whose collectives broke before the exit was known.
    """
    name = exit_name(exited.exit_code)
    found = class_of_exit(name, exited.last_output, oom_killed=exited.oom_killed)
    return Fault(
        cause=exited.signal_id,
        kind=_kind(found, ErrorKind.PROCESS_EXIT),
        error=name,
        # The peers of a dead process may notice its end before its parent does.
        occurred_at=min([exited.occurred_at, *(s.occurred_at for s in suspects)]),
        **where(exited),
        traceback=exited.last_output,
        evidence={
            "exit": name,
            "exit_code": exited.exit_code,
            "pid": exited.pid,
            "last_output": exited.last_output,
            **({"stack": exited.stack} if exited.stack else {}),
            "broken_sockets_of": [s.worker for s in suspects],
            **_classified(found),
        },
    )


def of_exception(raised: RankRaised) -> Fault:
    """Return the fault of a rank that raised."""
    differs = raised.cause == "differs"
    found = class_of(f"{raised.error}: {raised.detail}") if not differs else None
    kinds = {"non_finite": ErrorKind.NON_FINITE, "differs": ErrorKind.DIFFERENCE}
    return Fault(
        cause=raised.signal_id,
        kind=kinds.get(raised.cause) or _kind(found, ErrorKind.EXCEPTION),
        error=raised.difference if differs else raised.error,
        occurred_at=raised.occurred_at,
        **where(raised),
        traceback=raised.traceback,
        evidence={
            "error": raised.error,
            "detail": raised.detail,
            "traceback": raised.traceback,
            **_first_non_finite(raised),
            **({"resource": raised.resource, "limit": raised.limit} if raised.resource else {}),
            **_classified(found),
        },
    )


def where(signal: RankSignal) -> dict[str, Any]:
    """Return the fields of a fault that say where and when in the training a rank has failed."""
    return {name: getattr(signal, name) for name in ("generation", "step", "worker", "node", "rank")}


def _first_non_finite(raised: RankRaised) -> dict[str, Any]:
    """Return the entries of the evidence for where a value first was not finite, as far as the rank knows."""
    named = {"parameter": raised.parameter or None, "micro_batch": raised.micro_batch}
    return {name: value for name, value in named.items() if value is not None}


def _kind(found: ErrorClass | None, otherwise: ErrorKind) -> ErrorKind:
    return ErrorKind.DEVICE if found is not None and found.is_device else otherwise


def _classified(found: ErrorClass | None) -> dict[str, str]:
    """Return the entries of the evidence for a class of errors."""
    return {"class": found.name, "advice": found.advice} if found is not None else {}


def of_broken_sockets(task: MonitoredTask, suspicion: Suspicion) -> Fault:
    """Return the fault of collectives that broke without another cause. The first rank that raised stands for all."""
    first = suspicion.signals[0]
    return Fault(
        cause=f"{task.name}/{suspicion.generation}",
        kind=ErrorKind.CONNECTION,
        error=first.error,
        occurred_at=min(s.occurred_at for s in suspicion.signals),
        **{**where(first), "generation": suspicion.generation},
        traceback=first.traceback,
        evidence={
            "error": first.error,
            "detail": first.detail,
            "traceback": first.traceback,
            "broken_sockets_of": [s.worker for s in suspicion.signals],
        },
        by_peers=True,
    )


def of_transition(task: MonitoredTask, moved: StateMoved) -> Fault:
    """Return the fault of a task's newest plan, which could not be carried out."""
    original = task.cause
    worker = moved.failed_workers[0] if moved.failed_workers else None
    # The rank that was the first to report broken sockets is not to blame for them.
    blamed = original if original is not None and original.kind is not ErrorKind.CONNECTION else None
    if worker is None and blamed is not None and blamed.task == task.name:
        worker = blamed.worker
    node = worker.rpartition("/")[0] if worker is not None else (blamed.node if blamed is not None else None)
    return Fault(
        cause=moved.event_id,
        kind=ErrorKind.TRANSITION_FAILED,
        error=_failed_answer_to(original),
        occurred_at=moved.occurred_at,
        generation=moved.generation,
        step=task.step,
        worker=worker,
        node=node,
        traceback=moved.detail,
        evidence=Evidence.of_plan(moved.failed_workers, moved.code).mapping(
            plan=moved.plan, detail=moved.detail, **_classified(class_of(moved.detail))
        ),
        by_peers=moved.code in (FailureCode.TIMEOUT, FailureCode.RANK_RAISED),
    )


def _failed_answer_to(original: KnownError | None) -> str:
    """Return what a plan that failed was to answer: the kind of an error, or ``start`` for a plan of another cause.

    Where the answer to a failed plan fails as well, it is the same failure again.
    """
    if original is None:
        return "start"
    if original.kind is ErrorKind.TRANSITION_FAILED and original.failure:
        return original.failure.split("/")[1]  # part of ``Fault.key``
    return original.kind.value


# ---- events


def judge(task: MonitoredTask, fault: Fault, *, window_s: float, now: datetime) -> Event:
    """Return the event of a task's fault: an error, or the end of the task.

    The same failure at the same step more than ``max_restarts`` times within ``window_s`` ends the task: the task has
    a bug. A repeat below that number has the severity of the first occurrence. A first failure of a process that the
    outstanding retry or restart has started is the failure of that response: it escalates the incident. So do broken
    collectives of which no link is the cause, once they have been retried ``max_restarts`` times at any steps. The same
    exception from the same line again, with no other failure between, is a further attempt of one incident.
    """
    # Ranks that fail alike in one generation are one occurrence; the time for which a hang was waited for is left out.
    window_s += (task.max_restarts + 1) * (fault.stalled_s or 0.0)
    window_s += back_off.waited_s(task.max_restarts + 1)
    times = 1 + task.failures.times(fault.key, window_s=window_s, now=now, without=fault.generation)
    repeated = task.failures.repeats(fault.key)
    event_id = derived_id(fault.cause, SERVICE, f"{task.name}/{fault.kind.value}")
    outside = back_off.cause_outside(fault.kind, _known(fault))
    if times > task.max_restarts and not outside:
        return _failed_too_often(task, fault, times, now=now, event_id=event_id)
    original = None if repeated else _failed_response(task, fault)
    severity = fault.severity or SEVERITY[fault.kind]
    if original is not None:
        severity = max(severity, original.severity.escalated(), key=_badness)
    elif severity is Severity.SEV3 and (
        original := task.failures.newest_retry(task.max_restarts, window_s=window_s, now=now)
    ):
        # The same failure at the same step ends the task. Without this rule a task that makes steps between two
        # failures would be retried for ever.
        severity, fault = Severity.SEV2, replace(fault, node=None, worker=None, rank=None)
    # A process that a signal ended has raised nothing: a traceback in its output is of an error that it has survived.
    signalled = fault.evidence.get("exit_code", 0) < 0
    place = "" if signalled else place_of(fault.kind, fault.traceback)
    before = task.failures.in_a_row(place, window_s=window_s, now=now) if original is None else None
    of_incident = original or before
    return filled(
        ErrorDetected,
        fault,
        event_id=event_id,
        occurred_at=min(fault.occurred_at, now),
        incident=of_incident.incident if of_incident is not None else event_id,
        severity=severity,
        method=METHOD[fault.kind],
        detected_at=now,
        task=task.name,
        evidence={
            **fault.evidence,
            **_judged(task, fault, place).mapping(occurrences=times),
            **_repeated(task, fault, outside, now),
        },
        escalates=original.event_id if original is not None else None,
        repeats=before.event_id if before is not None else None,
    )


def _judged(task: MonitoredTask, fault: Fault, place: str) -> Evidence:
    """Return what later decisions use of a fault. ``place``: where its exception was raised; empty: it has no place."""
    known = Evidence(failure=fault.key, place=place) if place else Evidence(failure=fault.key)
    return known.model_copy(update={"starting": True}) if _is_starting(task, fault) else known


def _is_starting(task: MonitoredTask, fault: Fault) -> bool:
    """Return whether a process has failed that the outstanding plan has started or waits for."""
    started = task.change is not None and fault.worker in task.change.prepare
    return started or (fault.kind is ErrorKind.TRANSITION_FAILED and fault.worker is not None)


def _known(fault: Fault) -> Evidence:
    return Evidence.read({**fault.evidence, "failure": fault.key})


def _repeated(task: MonitoredTask, fault: Fault, outside: str, now: datetime) -> dict[str, Any]:
    """Return the entries of the evidence for a failure that has come before, without a new step since."""
    way, starting = back_off.way_of(_known(fault), fault.worker), _is_starting(task, fault)
    step = back_off.reached_step(fault.step, task.step, starting=starting)
    tries = task.failures.tries(way, fault.generation, step, starting=starting)
    found = back_off.repeated(
        tries,
        outside=outside,
        max_restarts=task.max_restarts,
        progress_timeout_s=task.progress_timeout_s,
        now=now,
    ).mapping()
    return {**found, "not_counted": outside} if found and outside else found


def escalation(task: MonitoredTask, moved: StateMoved, fault: Fault, *, window_s: float, now: datetime) -> Event:
    """Return the event of a task's newest plan, which could not be carried out. ``fault``: from ``of_transition``."""
    original = task.cause
    event = judge(task, fault, window_s=window_s, now=now)
    if isinstance(event, TaskFailed) or original is None:
        return event
    if moved.code is FailureCode.RELEASED:
        # Two plans crossed, and no response failed. The process is started again, and no node is to blame.
        return event.model_copy(update={"incident": original.incident})
    return event.model_copy(
        update={
            "incident": original.incident,
            "kind": original.kind,
            "severity": original.severity.escalated(),
            "rank": original.rank if fault.worker == original.worker else None,
            "escalates": original.event_id,
        }
    )


def refusal(task: MonitoredTask, raised: RankRaised, *, now: datetime) -> TaskFailed:
    """Return the end of a task that a rank refuses: the task cannot run as specified, so no node is to blame."""
    return TaskFailed(
        event_id=derived_id(raised.signal_id, SERVICE, f"{task.name}/refused"),
        occurred_at=now,
        task=task.name,
        generation=raised.generation,
        step=task.step,
        reason=reason_of(raised.worker, raised.node, raised.error, raised.detail),
        traceback=raised.traceback,
    )


def _failed_response(task: MonitoredTask, fault: Fault) -> KnownError | None:
    """Return the error whose retry or restart has failed with this fault; None if the fault is another matter.

    A process that a new plan for the cluster starts on another node fails for the first time: it is restarted there
    before the node is given up.
    """
    if task.change is None or fault.worker not in task.change.prepare:
        return None
    original = task.cause
    return original if original is not None and original.severity is not Severity.SEV1 else None


def _failed_too_often(task: MonitoredTask, fault: Fault, times: int, *, now: datetime, event_id: str) -> TaskFailed:
    what = f"{fault.kind.value} ({fault.error}) at step {fault.step}"
    error = last_line(fault.traceback) or (fault.evidence.get("advice", "") if fault.stalled_s is not None else "")
    return TaskFailed(
        event_id=event_id,
        occurred_at=now,
        task=task.name,
        generation=fault.generation,
        step=fault.step,
        reason=f"{what} happened {times} times; max_restarts is {task.max_restarts}{f': {error}' if error else ''}",
        traceback=fault.traceback,
        incident=task.failures.incident(fault.key),
    )


def _badness(severity: Severity) -> int:
    return {Severity.SEV3: 0, Severity.SEV2: 1, Severity.SEV1: 2}[severity]
