"""evolve: the detector's state after one event of the log.

No clock, random source or I/O is used. The given state itself is changed: it is large, and nobody keeps an older one.
A node is *lost* when nothing is heard of it, *isolated* when it is left out until a link heals or an operator
returns it, and *condemned* when an error of its own takes it out until it has passed a self-test.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from services.detector.incidents.faults import SERVICE
from services.detector.nodes import isolation, kept_copies
from services.detector.progress import recording
from services.detector.state import anomalies
from services.detector.state.back_off import reached_step
from services.detector.state.cluster import DetectorState
from services.detector.state.known_errors import KnownError
from services.detector.state.node import MonitoredNode
from services.detector.state.preflights import Preflight
from services.detector.state.task import MonitoredTask
from services.detector.state.unlogged import Condemnation, Isolation
from shared.events import union as events
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import EventBase, derived_id
from shared.messages.signals import RECONNECT_GRACE_S
from shared.tasks.specification import DEFAULT_MAX_RESTARTS


def evolve(state: DetectorState, event: EventBase, at: datetime) -> DetectorState:
    """Fold one event into the state; return the state. ``at``: the frame gives it to every fold; it is not used."""
    fold = _FOLDS.get(type(event))
    if fold is not None:
        fold(state, event)
        for name in _touched(state, event):
            state.settle(name)
    return state


def _touched(state: DetectorState, event: EventBase) -> list[str]:
    """Return the tasks of which this event may have been the last that was outstanding."""
    if isinstance(event, events.PlanDecided):
        return list(state.tasks)
    task = getattr(event, "task", None)
    return [task] if task is not None else []


def _task(state: DetectorState, name: str) -> MonitoredTask:
    task = state.recall(name)
    if task is None:
        task = state.tasks[name] = MonitoredTask(name=name, max_restarts=DEFAULT_MAX_RESTARTS)
    return task


def _configured(state: DetectorState, event: events.ClusterConfigured) -> None:
    state.mtbf_node_s = event.mtbf_node_s


def _injected(state: DetectorState, event: events.FaultInjected) -> None:
    state.causes.inject(event)


def _node_joined(state: DetectorState, event: events.NodeJoined) -> None:
    state.joins.add(event.event_id)
    state.isolated.pop(event.node, None)
    state.condemned.pop(event.node, None)
    _forget_slowness(state, event.node)
    known = state.nodes.get(event.node)
    same = known is not None and known.incarnation == event.incarnation
    past = known.past | {known.incarnation} if known is not None else frozenset()
    state.nodes[event.node] = MonitoredNode(
        name=event.node,
        incarnation=event.incarnation,
        joined=event.event_id,
        supervisor=event.supervisor,
        hardware=event.hardware,
        probe=event.probe,
        network=event.network,
        workers=len(event.workers),
        closed=known is not None and known.closed,
        past=past - {event.incarnation},
        heard_at=known.heard_at if known is not None and same else None,
        heartbeat=known.heartbeat if known is not None and same else None,
    )


def _node_adopted(state: DetectorState, event: events.NodeAdopted) -> None:
    """Note that a node has another agent.

    The new agent does not join, and first sends the signals that its predecessor has not sent.
    """
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.predecessor:
        return
    state.joins.add(derived_id(event.incarnation, SERVICE, "joined"))
    node.incarnation, node.past, node.probe = event.incarnation, node.past | {event.predecessor}, event.probe
    node.adopted_until = event.occurred_at + timedelta(seconds=RECONNECT_GRACE_S)


def _node_left(state: DetectorState, event: events.NodeLeft) -> None:
    """Note a node that left. The ends of its ranks, and what their peers report about those ends, are no faults."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return
    node.left, node.unreachable_since = True, None
    _forget_slowness(state, event.node)
    for task in state.tasks.values():
        workers = task.workers_on(event.node)
        if workers:
            _await_answer(task, event.event_id)
        for worker in workers:
            task.cover(worker, task.newest_generation())


def _node_draining(state: DetectorState, event: events.NodeDraining) -> None:
    node = state.nodes.get(event.node)
    if node is not None:
        node.draining, node.planned, node.drained = event, False, False
        node.closed |= event.by == "user"
    if event.report:
        state.reports.answer(event.node, event.report, event.occurred_at)


def _node_cordoned(state: DetectorState, event: events.NodeCordoned) -> None:
    if (node := state.nodes.get(event.node)) is not None:
        node.closed = True


def _node_drained(state: DetectorState, event: events.NodeDrained) -> None:
    if (node := state.nodes.get(event.node)) is not None:
        node.drained = True


def _node_returned(state: DetectorState, event: events.NodeReturned) -> None:
    """Note a node that is used again. Its earlier faults no longer count if an operator has looked at the node."""
    node, isolated = state.nodes.get(event.node), state.isolated.get(event.node)
    if node is not None and node.incarnation == event.incarnation:
        node.draining, node.planned, node.drained, node.closed = None, False, False, False
        state.isolated.pop(event.node, None)
        state.condemned.pop(event.node, None)
    elif isolated is not None and isolated.until_returned:
        del state.isolated[event.node]  # the node has another agent by now, which joins
    preflight = state.preflights.get(event.node)
    if preflight is not None and preflight.refuses and preflight.event.incarnation == event.incarnation:
        preflight.overruled = True
    if event.actor != SERVICE:
        state.causes.forget_node(event.node)
        state.reports.overrule(event.node)


def _measured(state: DetectorState, event: events.NodeMeasured) -> None:
    """Note what a node's preflight has come to. An operator's word stands until the node is found fast enough."""
    known = state.preflights.get(event.node)
    same = known is not None and known.is_of(event.incarnation, event.supervisor)
    overruled = known is not None and known.overruled and same and event.verdict != "accepted"
    state.preflights[event.node] = Preflight(event, overruled)


def _submitted(state: DetectorState, event: events.TaskSubmitted) -> None:
    """Add a task. If an ended task had the same name, only its generations and recorded results stay."""
    old = state.recall(event.task)
    state.tasks.pop(event.task, None)  # the order is that of the submissions
    state.causes.forget_task(event.task)
    state.tasks[event.task] = MonitoredTask(
        name=event.task,
        max_restarts=event.spec.max_restarts,
        weight=event.spec.weight,
        min_workers=event.spec.workers.min,
        restarts_whole=event.spec.restarts_whole,
        finish_timeout_s=event.spec.finish_timeout_s,
        progress_timeout_s=event.spec.progress_timeout_s,
        step=event.step,
        generation=old.generation if old is not None else 0,
        highest_generation=old.highest_generation if old is not None else 0,
        recorded=old.recorded if old is not None else {},
        identity_before=(old.identity or old.identity_before) if old is not None else {},
    )


def _progressed(state: DetectorState, event: events.TaskProgressed) -> None:
    task = _task(state, event.task)
    task.step = event.step
    task.progressed_at, task.progressed_step = event.occurred_at, event.step
    task.progressed_generation = event.generation
    task.progressed_step_s, task.progressed_timed = event.step_s, task.timed
    if event.generation == task.generation:
        task.rates.note(task.layout, event.generation, event.step_s)


def _checkpointed(state: DetectorState, event: events.TaskCheckpointed) -> None:
    task = _task(state, event.task)
    task.recorded[event.event_id] = event.generation
    task.checkpoint_failures.clear()


def _checkpoint_failed(state: DetectorState, event: events.TaskCheckpointFailed) -> None:
    task = _task(state, event.task)
    task.recorded[event.event_id] = event.generation
    task.checkpoint_failures.add(recording.kind_of(event.reason))


def _copies_lacking(state: DetectorState, event: events.TaskCopiesLacking) -> None:
    task = _task(state, event.task)
    task.recorded[event.event_id] = event.generation
    if event.ended:
        task.copies_lacking.clear()
    else:
        task.copies_lacking.add(recording.kind_of(event.reason))


def _result_unwritten(state: DetectorState, event: events.TaskResultUnwritten) -> None:
    task = _task(state, event.task)
    task.recorded[event.event_id] = event.generation
    task.lent += not event.ended


def _stopped(state: DetectorState, event: events.TaskStopped) -> None:
    task = _task(state, event.task)
    task.recorded[event.event_id] = event.generation
    # A paused task has saved its state, and goes on when there are workers for it.
    pausing = task.change is not None and task.change.action == "pause"
    task.is_saved = bool(event.path) and event.step >= task.step
    if not pausing and not task.is_saved and not task.discards:
        task.copies_until = kept_copies.until(event.occurred_at)
    _leave(task, ended=not pausing)


def _stop_refused(state: DetectorState, event: events.TaskStopRefused) -> None:
    task = _task(state, event.task)
    if task.plan == event.plan:
        task.change = task.failed_transition = None  # its members train on


def _finished(state: DetectorState, event: events.TaskFinished) -> None:
    task = _task(state, event.task)
    task.recorded[event.event_id] = event.generation
    _leave(task, ended=True)


def _failed(state: DetectorState, event: events.TaskFailed) -> None:
    task = _task(state, event.task)
    task.copies_until = kept_copies.until(event.occurred_at)
    _leave(task, ended=True)


def _stop_requested(state: DetectorState, event: events.TaskStopRequested) -> None:
    _task(state, event.task).discards |= event.lose_steps or event.at_once


def _deleted(state: DetectorState, event: events.TaskDeleted) -> None:
    _task(state, event.task).copies_until = None


def _leave(task: MonitoredTask, *, ended: bool) -> None:
    """Note that the task has left its workers, for good or until it is planned again."""
    task.ended = ended
    task.members, task.absent_since = {}, {}
    task.suspicion = task.failed_transition = task.inquiry = None
    task.unanswered.clear()


def _error(state: DetectorState, event: events.ErrorDetected) -> None:
    evidence = Evidence.read(event.evidence)
    known = state.unanswered[event.event_id] = KnownError.of(event, evidence)
    _note_breaks(state, event, evidence)
    state.causes.add(event, evidence)
    if event.node is not None and evidence.report:
        state.reports.answer(event.node, evidence.report, event.detected_at)
    if event.severity is Severity.SEV1 and event.node is not None:
        _condemn(state, event, event.node, evidence)
    if event.node is not None and _is_of_node(event):
        _leave_out(state, event, event.node, evidence)
        for name, part in evidence.tasks.items():
            task = _task(state, name)
            _await_answer(task, event.answered_with or event.event_id)
            for worker in part.workers:
                task.cover(worker, part.generation)
    if event.task is None:
        return
    task = _task(state, event.task)
    _await_answer(task, event.event_id)
    generation = event.generation if event.generation is not None else task.generation
    if event.worker is not None:
        task.cover(event.worker, generation)
    for worker in evidence.workers if _is_by_device(event) else ():
        task.cover(worker, generation)
    task.recorded[event.event_id] = generation
    step = reached_step(event.step or 0, task.step, starting=known.starting)
    task.failures.add(known, generation, task.max_restarts, step)


def _is_by_device(event: events.ErrorDetected) -> bool:
    """Return whether a device itself has reported an error, not a process that met it."""
    return event.kind is ErrorKind.DEVICE and event.method is Method.DEVICE


def _is_of_node(event: events.ErrorDetected) -> bool:
    """Return whether an error concerns all tasks of its node. An escalation has the kind of the error before."""
    if event.kind is ErrorKind.DEVICE:
        return event.task is None
    return event.kind in _OF_NODES and event.escalates is None


def _await_answer(task: MonitoredTask, event_id: str) -> None:
    """Note an event that a plan has to answer. It explains broken collectives, if any."""
    task.unanswered.add(event_id)
    task.suspicion = task.inquiry = None


def _note_breaks(state: DetectorState, event: events.ErrorDetected, evidence: Evidence) -> None:
    """Note the pairs of nodes that an error found broken. Two nodes of one pair may be isolated at the same time."""
    for pair in evidence.pairs:
        times = state.breaks.setdefault(pair, [])
        if event.detected_at not in times:
            times.append(event.detected_at)
    for pair in list(state.breaks) if evidence.pairs else ():
        isolation.forget_breaks(state, pair, event.detected_at)


def _condemn(state: DetectorState, event: events.ErrorDetected, name: str, evidence: Evidence) -> None:
    """Note that an error takes a node out of use, for itself or because the same error has come again.

    A node that is merely lost is not condemned.
    """
    if evidence.rule == "lemon" or evidence.report:
        state.isolated[name] = Isolation(event.event_id, event.detected_at, 0.0, True)
    elif event.kind is not ErrorKind.BROKEN_LINK and (event.kind is not ErrorKind.NODE_LOST or event.escalates):
        by_device = _is_by_device(event) or state.is_held_by_device(name)
        state.condemned[name] = Condemnation(event.event_id, by_device)


def _leave_out(state: DetectorState, event: events.ErrorDetected, name: str, evidence: Evidence) -> None:
    """Note that a node is lost, or isolated."""
    if event.kind is ErrorKind.BROKEN_LINK:
        after_s = isolation.return_after_s(state, evidence.pairs, event.detected_at)
        stays = evidence.rule == "pair"
        state.isolated[name] = Isolation(event.event_id, event.detected_at, after_s, stays)
        return
    node = state.nodes.get(name)
    if event.kind is ErrorKind.NODE_LOST and node is not None and evidence.incarnation in (None, node.incarnation):
        node.lost, node.unreachable_since = event.event_id, None
        _forget_slowness(state, name)


def _planned(state: DetectorState, event: events.PlanDecided) -> None:
    cause = state.answered(event.cause)
    for node in state.nodes.values():
        if node.draining is not None and node.draining.event_id == event.cause:
            node.planned = True
    for task in state.tasks.values():
        task.unanswered.discard(event.cause)
    for change in event.changes:
        task = _task(state, change.task)
        task.plan, task.cause = event.plan, cause
        task.suspicion = task.failed_transition = task.inquiry = None
        numbers = [change.from_generation, *(stage.generation for stage in change.stages)]
        task.highest_generation = max([task.highest_generation, *numbers])
        idle = change.action == "none" and change.interrupted is None and not (change.hold or change.release)
        task.change = None if idle else change
        task.forget_older_generations()
        for worker in change.failed:
            task.cover(worker, change.from_generation)


def _moved(state: DetectorState, event: events.StateMoved) -> None:
    task = _task(state, event.task)
    if task.plan != event.plan or task.change is None:
        return
    stage = next((s for s in task.change.stages if s.generation == event.generation), None)
    if event.phase in ("resumed", "restored") and stage is not None:
        task.resume(stage, event)
    if event.phase == "failed":
        task.failed_transition = event
        if task.ended:
            task.change = None  # nothing escalates; ``leftovers`` ends the processes that are left
    if event.complete:
        if event.phase == "ended":
            task.members = {}
        task.change = None


def _slowed(state: DetectorState, event: events.WorkerSlowed) -> None:
    if event.slowdown > 1.0:
        state.slowed[event.worker] = event.slowdown
    else:
        state.slowed.pop(event.worker, None)


def _forget_slowness(state: DetectorState, node: str) -> None:
    """Forget the slow workers of a node that is lost, has left or joins anew: what was measured is gone.

    The planner and the api do so too.
    """
    for worker in [worker for worker in state.slowed if worker.rpartition("/")[0] == node]:
        del state.slowed[worker]


def _observed(state: DetectorState, event: events.AnomalyObserved) -> None:
    anomalies.fold(_task(state, event.task).anomalies, event)


_OF_NODES = (ErrorKind.NODE_LOST, ErrorKind.BROKEN_LINK, ErrorKind.REPORTED)
"""Kinds of errors that concern all tasks of a node."""

_FOLDS: dict[type[EventBase], Callable[[DetectorState, Any], None]] = {
    events.ClusterConfigured: _configured,
    events.FaultInjected: _injected,
    events.NodeJoined: _node_joined,
    events.NodeAdopted: _node_adopted,
    events.NodeLeft: _node_left,
    events.NodeCordoned: _node_cordoned,
    events.NodeDraining: _node_draining,
    events.NodeDrained: _node_drained,
    events.NodeReturned: _node_returned,
    events.NodeMeasured: _measured,
    events.NodeReported: lambda state, event: state.reports.note(event),
    events.NodeReportHeld: lambda state, event: state.reports.hold(event),
    events.TaskSubmitted: _submitted,
    events.TaskResumeRequested: lambda state, event: _task(state, event.task).failures.begin_anew(event.occurred_at),
    events.TaskIdentified: lambda state, event: _task(state, event.task).identify(event.identity),
    events.TaskProgressed: _progressed,
    events.TaskCheckpointed: _checkpointed,
    events.TaskCheckpointFailed: _checkpoint_failed,
    events.TaskCopiesLacking: _copies_lacking,
    events.TaskResultUnwritten: _result_unwritten,
    events.TaskStopped: _stopped,
    events.TaskStopRefused: _stop_refused,
    events.TaskChanged: lambda state, event: _task(state, event.task).change_wishes(event.weight, event.min_workers),
    events.TaskFinished: _finished,
    events.TaskFailed: _failed,
    events.TaskStopRequested: _stop_requested,
    events.TaskDeleted: _deleted,
    events.ErrorDetected: _error,
    events.PlanDecided: _planned,
    events.StateMoved: _moved,
    events.WorkerSlowed: _slowed,
    events.AnomalyObserved: _observed,
}
