"""One fault seen by many ranks and methods: one incident with several observations, and its root cause. Pure.

An error event has what was known when it was decided. A later report that belongs to the incident is no error of its
own: the broken sockets of the peers, the exception that follows an Xid, the end of the process after its exception.
Such reports are collected until the survivors have left the step (``state.moved``, phase ``held``) and their signals
have come, at most for ``OBSERVE_S``; then one event ``incident.observed`` has them. No plan follows from that event. If
there was nothing but the error itself, no event is appended. A detector that ends meanwhile appends none either.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from services.detector.incidents.faults import SERVICE, Fault, last_line, of_exception, of_exit, where
from services.detector.state.cluster import DetectorState
from services.detector.state.task import MonitoredTask
from services.detector.state.unlogged import IncidentWatch
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Method
from shared.events.union import ErrorDetected, Event, IncidentObserved, Observation, StateMoved, derived_id
from shared.messages.signals import ProcessExited, RankRaised
from shared.model import filled

OBSERVE_S = 5.0
"""Longest collection. Sockets break within milliseconds of the end of a peer, and a step of a large model, at whose
micro-batches ranks look at them, takes some seconds."""

SETTLE_S = 0.5
"""Time for the signals of ranks that have left the step: they arrive within 50 ms, and on a busy machine within this
time (twice ``incidents.SETTLE_S``)."""

MOST = 16
"""Most observations of an incident that are kept. Further ones are only counted: in a task of a thousand ranks they all
say the same."""

DETAIL_CHARACTERS = 200
"""Longest detail, in characters: a line of a traceback."""

ORDER = (
    ErrorKind.DEVICE,
    ErrorKind.NODE_LOST,
    ErrorKind.BROKEN_LINK,
    ErrorKind.REPORTED,
    ErrorKind.DIFFERENCE,
    ErrorKind.PROCESS_EXIT,
    ErrorKind.EXCEPTION,
    ErrorKind.NON_FINITE,
    ErrorKind.HANG,
    ErrorKind.COLLECTIVE_TIMEOUT,
    ErrorKind.CONNECTION,
    ErrorKind.TRANSITION_FAILED,
)
"""Kinds in the order in which they are taken for the root cause: a kind further down is seen because of one further up.
Among observations of one kind, the earliest is the cause."""

_PLACES = {kind: place for place, kind in enumerate(ORDER)}

_SAID = (ErrorKind.EXCEPTION, ErrorKind.NON_FINITE, ErrorKind.DEVICE, ErrorKind.DIFFERENCE)
"""Kinds by which a process says itself why it ends."""


def root_cause(observations: Sequence[Observation]) -> Observation:
    """Return the observation from which the others follow.

    The end of a process that has said why it ends is not the cause of that. ``observations``: at least one.
    """
    said = {one.worker for one in observations if one.kind in _SAID}
    causes = [
        one
        for one in observations
        if not (one.kind is ErrorKind.PROCESS_EXIT and one.worker in said and one.error.startswith("exit "))
    ]
    return min(causes, key=lambda one: (_PLACES[one.kind], one.at, one.worker or "", one.node or "", one.error))


def begin(state: DetectorState, error: ErrorDetected) -> None:
    """Begin to collect what belongs to an incident. ``state``: without the error, which is about to be folded.

    A further error of an incident that is watched, such as its escalation, is one of its observations.
    """
    observed = _of_error(error)
    if (watch := state.watches.get(error.incident)) is not None:
        _add(watch, observed)
        return
    if error.escalates is not None or error.incident != error.event_id:
        return
    tasks = frozenset({error.task} if error.task is not None else Evidence.read(error.evidence).tasks)
    watch = state.watches[error.incident] = IncidentWatch(
        incident=error.incident,
        task=error.task,
        tasks=tasks,
        worker=error.worker,
        node=error.node,
        due_at=error.detected_at + timedelta(seconds=OBSERVE_S),
        observations=[observed],
    )
    for name in sorted(tasks):
        task = state.tasks.get(name)
        if task is None or task.suspicion is None:
            continue
        for raised in task.suspicion.signals:
            # A fault of broken sockets is named after the first rank that reported them.
            if error.kind is not ErrorKind.CONNECTION or raised.worker != error.worker:
                _add(watch, _of_fault(_broken_sockets(raised)))


def note(state: DetectorState, task: MonitoredTask, signal: ProcessExited | RankRaised) -> None:
    """Add a signal of a task's rank that is no fault of its own to the incident that explains it, if one is watched."""
    watch = _watch_of(state, task.name, signal.worker, signal.node)
    if watch is None:
        return
    if isinstance(signal, ProcessExited):
        _add(watch, _of_fault(of_exit(signal, [])))
    elif signal.cause == "communication":
        _add(watch, _of_fault(_broken_sockets(signal)))
    else:
        _add(watch, _of_fault(of_exception(signal)))


def settle(state: DetectorState, event: Event, now: datetime) -> None:
    """Have a collection end soon once the survivors have left the step, or a first step was done without them."""
    if isinstance(event, StateMoved) and event.incident is not None and event.phase != "failed":
        watch = state.watches.get(event.incident)
        if watch is not None:
            watch.due_at = min(watch.due_at, now + timedelta(seconds=SETTLE_S))


def due(state: DetectorState, now: datetime) -> list[IncidentObserved]:
    """Return the events of the collections that have ended, which are dropped."""
    ended = [watch for watch in state.watches.values() if watch.due_at <= now]
    for watch in ended:
        del state.watches[watch.incident]
    return [_event(watch, now) for watch in ended if len(watch.observations) > 1]


def _event(watch: IncidentWatch, now: datetime) -> IncidentObserved:
    return filled(
        IncidentObserved,
        watch,
        event_id=derived_id(watch.incident, SERVICE, "observed"),
        occurred_at=now,
        root_cause=root_cause(watch.observations),
    )


def _watch_of(state: DetectorState, task: str, worker: str, node: str) -> IncidentWatch | None:
    """Return the incident that explains a signal: of the same worker, else of its node, else the newest of the task."""
    found = [watch for watch in state.watches.values() if task in watch.tasks]
    ranked = sorted(found, key=lambda watch: (watch.worker == worker, watch.worker is None and watch.node == node))
    return ranked[-1] if ranked else None


def _add(watch: IncidentWatch, observed: Observation) -> None:
    """Add an observation; if there are too many, drop the last one of the least telling kind."""
    if any(_is_repeat(one, observed) for one in watch.observations):
        return
    watch.observations.append(observed)
    if len(watch.observations) > MOST:
        worst = max(range(1, len(watch.observations)), key=lambda i: (_PLACES[watch.observations[i].kind], i))
        del watch.observations[worst]
        watch.omitted += 1


def _is_repeat(one: Observation, other: Observation) -> bool:
    """Return whether an agent has repeated a signal: the times of the two are the same, as far as they can be."""
    if (one.kind, one.worker, one.error) != (other.kind, other.worker, other.error):
        return False
    return one.worker is not None


def _of_error(error: ErrorDetected) -> Observation:
    detail = error.evidence.get("detail") or error.evidence.get("reason") or error.evidence.get("last_output") or ""
    name = error.evidence.get("error") or error.evidence.get("exit") or error.kind.value
    return filled(Observation, error, error=str(name), detail=_cut(last_line(str(detail))), at=error.occurred_at)


def _cut(detail: str) -> str:
    """Return a detail of at most ``DETAIL_CHARACTERS``; a longer detail is cut and ends in an ellipsis."""
    return detail if len(detail) <= DETAIL_CHARACTERS else f"{detail[: DETAIL_CHARACTERS - 1]}…"


def _of_fault(fault: Fault) -> Observation:
    method = Method.PROCESS_SUPERVISION if "exit" in fault.evidence else Method.EXCEPTION
    detail = str(fault.evidence.get("detail") or last_line(fault.traceback))
    return filled(Observation, fault, method=method, detail=_cut(detail), at=fault.occurred_at)


def _broken_sockets(raised: RankRaised) -> Fault:
    return Fault(
        cause=raised.signal_id,
        kind=ErrorKind.CONNECTION,
        error=raised.error,
        occurred_at=raised.occurred_at,
        **where(raised),
        evidence={"detail": raised.detail},
    )
