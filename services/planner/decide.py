"""decide: one plan for each trigger. Pure; the state already contains the event (``evolve.py``).

    SEV3                    retry: all ranks finish the interrupted step in place
    SEV2                    restart of the process on its node; the survivors finish the step meanwhile
    difference again        the task goes on with the workers that have its state; without any it waits
    SEV1                    the node is isolated; the solver divides the cluster anew
    submitted, ended, node  the solver divides the cluster anew
    task is changed         the same, with the task's new weight and limits
    node is drained         the same, without its workers; a task whose state cannot move saves it and waits
    task is paused          the solver divides the cluster anew: nodes may have joined while the task saved its state
    worker slowed           the solver divides the cluster anew, and weighs how slow workers are used
    starving                the solver divides the cluster anew, with the starving task before running ones
    stop requested          the task drains, writes a checkpoint and ends
    resume requested        a task that waits for its operator takes part again in the solver's division
    failure without end     the task waits for its operator; the solver divides its workers
    stop refused            its state could not be saved: the task goes on, or ends without it if a user wants that

Every trigger is answered, if only by a plan that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from services.planner.checkpoint_advice import checkpoint_every_s
from services.planner.placement.changes import can_save, end, leave, move
from services.planner.placement.closed_nodes import has_processes, has_to_save
from services.planner.problem.problem import Solve
from services.planner.problem.reconfigure import Reconfiguration, reconfigure, same_workers
from services.planner.state.admission import present_wait
from services.planner.state.blame import blamed_node, blamed_task, is_stale
from services.planner.state.cluster import State, Task
from services.planner.state.slow_workers import is_answered
from shared.events import union as events
from shared.events.evidence import Evidence
from shared.events.plans import Response, TaskChange, Trigger
from shared.events.severities import Severity
from shared.events.union import Event, EventBase, derived_id
from shared.planning.solver import solve_with_alternatives

SERVICE = "planner"
"""Name of this service in the ids of the events that it derives from a cause (``derived_id``)."""

DECIDER = 8
"""Number of this decision code; every plan carries it.

Raise it by one in every change after which some log would be decided differently, or the same decision written in
other bytes: in ``evolve``, ``decide`` or anything they call, in the solver, or in a model of ``shared.events.plans``.
Replay compares plans of this decider byte for byte; an older plan is solved again and checked for what is true of every
plan (``replay``). docs/planner.md, "Replay", says what else belongs to such a change."""


@dataclass
class _Draft:
    """A plan in the making.

    Attributes:
        trigger: why the plan is made.
        response: the plan's response if it changes anything.
        incident: the incident that the plan answers.
        beside: those of the losses that were found at the same moment.
        changes: what the plan does to each task.
        question: the state for which the solver is asked, and the reason in words; None: the solver is not asked.
        solved: the solver's answer.
        stopped: tasks that the plan stops at once, because they have no live state to save.
        failing: the task whose change waits for as long as its error says, whatever the solver gives the task; empty:
            none.
    """

    trigger: Trigger
    response: Response = Response.RECONFIGURE
    incident: str | None = None
    beside: tuple[str, ...] = ()
    changes: list[TaskChange] = field(default_factory=list)
    question: tuple[State, str] | None = None
    solved: Reconfiguration | None = None
    stopped: list[Task] = field(default_factory=list)
    failing: str = ""


def decide(
    state: State, event: EventBase, at: datetime, solve: Solve = solve_with_alternatives, *, digest: bool = True
) -> list[Event]:
    """Return the events that follow from ``event``: none, or a plan and the ends of tasks that it stops at once.

    Args:
        state: the fold of all events up to and including ``event``.
        event: the event.
        at: when the event was recorded.
        solve: the solver, or a function that gives the same answers (``lookahead/table.py``).
        digest: whether to set ``inputs_sha256`` and ``checkpoint_every_s``, which the look-ahead does not need.
    """
    draft = _draft(state, event)
    if draft is None:
        return []
    if draft.question is not None:
        posed, why = draft.question
        draft.solved = reconfigure(posed, at, why, solve)
        solved = draft.solved.changes
        if draft.failing and isinstance(event, events.ErrorDetected):
            solved = [_held_back(one, event) if one.task == draft.failing else one for one in solved]
        draft.changes += solved
    return _events(state, event, at, draft, digest=digest)


def asked(state: State, event: EventBase) -> State | None:
    """Return the state for which the solver is asked about ``event``, which ``state`` contains; None: it is not."""
    draft = _draft(state, event)
    return draft.question[0] if draft is not None and draft.question is not None else None


def _draft(state: State, event: EventBase) -> _Draft | None:
    """Return the draft that answers the event; None if the event is no trigger."""
    match event:
        case events.TaskSubmitted():
            return _ask(state, _Draft(Trigger.TASK_SUBMITTED), f"task {event.task} was submitted")
        case events.TaskChanged():
            return _changed(state, event)
        case events.TaskStopRequested():
            return _stop(state, event)
        case events.TaskStopRefused():
            return _stop_refused(state, event)
        case events.TaskResumeRequested():
            return _resumed(state, event)
        case events.TaskStarving():
            return _starving(state, event)
        case events.TaskResultUnwritten():
            return _result_unwritten(state, event)
        case events.TaskFinished() | events.TaskFailed() | events.TaskStopped():
            return _task_ended(state, event)
        case events.StateMoved():
            return _paused(state, event)
        case events.NodeJoined():
            return _node(state, Trigger.NODE_JOINED, f"node {event.node} joined")
        case events.NodeLeft():
            return _node(state, Trigger.NODE_LEFT, f"node {event.node} left: {event.reason}")
        case events.NodeDrained():
            return _node(state, Trigger.NODE_DRAINED, f"node {event.node} is drained")
        case events.NodeReturned():
            return _node(state, Trigger.NODE_RETURNED, f"node {event.node} was returned")
        case events.NodeDraining():
            return _draining(state, event)
        case events.ErrorDetected():
            return _error(state, event) if event.answered_with is None else None
        case events.WorkerSlowed():
            return _slowed(state, event)
        case _:
            return None


def _changed(state: State, event: events.TaskChanged) -> _Draft:
    """Answer a change of a task's weight or limits; for a task that has ended meanwhile the plan changes nothing."""
    draft = _Draft(Trigger.TASK_CHANGED)
    task = state.tasks.get(event.task)
    if task is None or task.life == "ended":
        return draft
    most = "any" if event.max_workers is None else event.max_workers
    why = f"task {event.task} was changed: weight {event.weight:g}, {event.min_workers} to {most} workers"
    return _ask(state, draft, why)


def _node(state: State, trigger: Trigger, why: str) -> _Draft:
    draft = _Draft(trigger)
    _leave_again(state, draft)
    return _ask(state, draft, why)


def _draining(state: State, event: events.NodeDraining) -> _Draft:
    """Answer a drain: tasks move; one that cannot move, or has not by the drain's end, saves its state and waits."""
    draft = _Draft(Trigger.NODE_DRAINING)
    there = [task for _, task in sorted(state.tasks.items()) if has_processes(task, event.node)]
    saving = [t for t in there if t.life == "active" and not t.leaving and (event.save or has_to_save(state, t))]
    for task in saving:
        why = f"not gone after {event.timeout_s:g} s" if event.save else "its state cannot move"
        draft.changes.append(leave(state, task, "pause", f"node {event.node} is drained; {why}"))
    return draft if event.save else _ask(state, draft, f"node {event.node} is drained")


def _slowed(state: State, event: events.WorkerSlowed) -> _Draft | None:
    """Answer a worker that became slower or as fast again; a worker on trial or on an unusable node gets no answer."""
    if not is_answered(state, event):
        return None
    how = f"is {event.slowdown:.3g} x slower than its peers" if event.slowdown > 1.0 else "is as fast as its peers"
    return _ask(state, _Draft(Trigger.WORKER_SLOWED), f"worker {event.worker} {how}")


def _stop(state: State, event: events.TaskStopRequested) -> _Draft:
    draft = _Draft(Trigger.STOP_REQUESTED)
    task = state.tasks.get(event.task)
    if task is None or task.life != "stopping":
        return draft
    if task.change is not None and task.change.action == "stop" and not task.at_once:
        return draft
    _stop_task(state, draft, task, "its stop was requested")
    return _ask(state, draft, f"task {task.name} stopped") if draft.changes and draft.stopped else draft


def _stop_refused(state: State, event: events.TaskStopRefused) -> _Draft:
    draft = _Draft(Trigger.STOP_REFUSED)
    task = state.tasks.get(event.task)
    if task is None or task.life == "ended" or task.change is not None or task.plan != event.plan:
        return draft
    if task.life == "stopping":
        _stop_task(state, draft, task, "its stop was requested, saved or not")
        return draft
    return _ask(state, draft, f"task {task.name} goes on, since its state cannot be saved")


def _resumed(state: State, event: events.TaskResumeRequested) -> _Draft:
    """Answer a request to try a task again.

    If the task's plan only waits to start processes, ``transition`` starts them.
    """
    draft, task = _Draft(Trigger.RESUME_REQUESTED), state.tasks.get(event.task)
    if task is None or task.life != "active" or task.leaving or not task.queued:
        return draft
    return _ask(state, draft, f"task {event.task} was resumed")


def _starving(state: State, event: events.TaskStarving) -> _Draft:
    draft = _Draft(Trigger.TASK_STARVING)
    wait = present_wait(state.tasks.get(event.task))
    if wait is None or wait.since != event.since:
        return draft
    return _ask(state, draft, f"task {event.task} has waited too long")


def _result_unwritten(state: State, event: events.TaskResultUnwritten) -> _Draft:
    """Answer that a task cannot write its result, so that others may have its workers; or that it is to try again."""
    draft, task = _Draft(Trigger.RESULT_UNWRITTEN), state.tasks.get(event.task)
    if task is None or task.life != "active" or task.leaving:
        return draft
    if event.ended:
        return _ask(state, draft, f"task {event.task} is to write its result") if task.queued else draft
    if task.unwritten is None or task.unwritten.cause != event.event_id:
        return draft
    return _ask(state, draft, f"task {event.task} cannot write its result")


def _stop_task(state: State, draft: _Draft, task: Task, reason: str) -> None:
    """Add the change that stops the task: with a checkpoint, or at once if a user wants that or nothing can save it."""
    if can_save(task) and not task.at_once:
        draft.changes.append(leave(state, task, "stop", reason))
        return
    if task.occupied:
        why = "at once, without a checkpoint" if task.at_once else "no live state to save"
        draft.changes.append(end(state, task, f"{reason}; {why}"))
    draft.stopped.append(task)


def _task_ended(state: State, event: events.TaskFinished | events.TaskFailed | events.TaskStopped) -> _Draft | None:
    task = state.find(event.task)
    draft = _Draft(Trigger.TASK_ENDED)
    if task is None:
        return draft
    if task.life != "ended":
        return None  # a paused task has saved its state: this is no end of the task
    what = {"task.finished": "finished", "task.failed": "failed", "task.stopped": "stopped"}[event.type]
    if task.occupied:
        draft.changes.append(end(state, task, f"it {what}"))
    return _ask(state, draft, f"task {task.name} {what}")


def _paused(state: State, event: events.StateMoved) -> _Draft | None:
    """Answer the end of a pause. While a task leaves, the solver gives it nothing, whatever becomes free meanwhile."""
    task = state.tasks.get(event.task)
    if event.phase != "ended" or task is None or task.plan != event.plan or task.life != "active":
        return None
    if task.change is not None or not task.queued:
        return None
    return _ask(state, _Draft(Trigger.TASK_PAUSED), f"task {task.name} has paused")


def _error(state: State, event: events.ErrorDetected) -> _Draft:
    draft = _Draft(Trigger.ERROR, incident=event.incident, beside=state.beside)
    where = event.worker or event.node or event.task or "the cluster"
    what = f"{event.kind.value} of {where}"
    if event.severity is Severity.SEV1:
        if blamed_node(event) is None:
            task = blamed_task(state, event)
            if task is None:
                return draft
            draft.failing = task.name
        _leave_again(state, draft)
        return _ask(state, draft, what)
    task = blamed_task(state, event)
    if task is None or is_stale(task, event) or not task.broken:
        return draft
    given_up = bool(Evidence.read(event.evidence).needs_operator)
    if (given_up or (task.closed and event.severity is Severity.SEV2)) and not task.leaving:
        return _ask(
            state, draft, f"{what}; the task {'waits for its operator' if given_up else 'takes no new processes'}"
        )
    draft.response = Response.RETRY if event.severity is Severity.SEV3 else Response.RESTART
    if task.leaving:
        _leave_again(state, draft)
        return _ask(state, draft, f"task {task.name} stopped") if draft.stopped else draft
    verb = "retried in place" if event.severity is Severity.SEV3 else "restarted on its node"
    draft.changes.append(_held_back(move(state, task, same_workers(state, task), f"{what}; {verb}"), event))
    return draft


def _held_back(change: TaskChange, event: events.ErrorDetected) -> TaskChange:
    """Return the answer to an error with the wait that the detector asks for when a failure comes again."""
    evidence = Evidence.read(event.evidence)
    retried = event.severity is Severity.SEV3
    if not (change.prepare or retried) or evidence.wait_s <= 0.0:
        return change
    reason = (
        f"{change.reason} after {evidence.wait_s:g} s, since the same failure came {evidence.without_progress} times "
        "without a new step"
    )
    not_before = event.detected_at + timedelta(seconds=evidence.wait_s)
    return change.model_copy(update={"reason": reason, "not_before": not_before})


def _leave_again(state: State, draft: _Draft) -> None:
    """Add the changes of tasks that lost a process while they were being stopped or paused."""
    for name in sorted(state.tasks):
        task = state.tasks[name]
        if not task.broken or not task.leaving:
            continue
        if task.life == "stopping":
            _stop_task(state, draft, task, "a worker was lost while it stopped")
        else:
            draft.changes.append(leave(state, task, "pause", "a worker was lost while it paused"))


def _ask(state: State, draft: _Draft, why: str) -> _Draft:
    """Set the question to the solver: in its state, tasks stopped at once have ended, and paused ones leave."""
    for change in draft.changes:
        if change.action == "pause":
            state = state.with_changed(change.task, change=change, members=())
    for task in draft.stopped:
        ended = task.model_copy(update={"life": "ended", "members": (), "owners": (), "broken": False, "lost": ()})
        state = state.model_copy(update={"tasks": {**state.tasks, task.name: ended}})
    draft.question = state, why
    return draft


def _events(state: State, event: EventBase, at: datetime, draft: _Draft, *, digest: bool) -> list[Event]:
    changes = sorted(draft.changes, key=lambda change: change.task)
    unfinished = [state.tasks[c.task].plan for c in changes if state.tasks[c.task].change is not None]
    solved = draft.solved
    problem = solved.problem.by_digest(solved.solution.assignment) if solved else None
    plan = events.PlanDecided(
        event_id=derived_id(event.event_id, SERVICE, 0),
        occurred_at=at,
        decider=DECIDER,
        plan=f"p{state.plans + 1}",
        trigger=draft.trigger,
        cause=event.event_id,
        incident=draft.incident,
        beside=list(draft.beside),
        response=draft.response if changes else Response.NONE,
        supersedes=list(dict.fromkeys(unfinished)),
        changes=changes,
        queued=_queued(state, draft),
        inputs_sha256=problem.sha256() if problem and digest else "",
        problem=problem,
        solution=solved.solution if solved else None,
        alternatives=[other.without_terms() for other in solved.alternatives] if solved else [],
        tables=solved.tables if solved else {},
        slow=solved.slow if solved else None,
        checkpoint_every_s=checkpoint_every_s(state, at, changes) if solved and digest else {},
    )
    return [plan, *_stops(event, at, draft.stopped)]


def _queued(state: State, draft: _Draft) -> dict[str, str]:
    """Return why each task without workers has none, once the plan is made."""
    paused = {c.task: f"paused: {c.reason}" for c in draft.changes if c.action == "pause"}
    solved = draft.solved.queued if draft.solved else {}
    leaving = [
        t for t in state.tasks.values() if t.life == "active" and t.queued and (draft.solved is None or t.leaving)
    ]
    found = {t.name: t.queued for t in leaving} | paused | solved
    return {name: found[name] for name in sorted(found)}


def _stops(event: EventBase, at: datetime, tasks: Sequence[Task]) -> list[Event]:
    """Return the ends of tasks that stop without a process to write a checkpoint: their newest checkpoint remains."""
    return [
        events.TaskStopped(
            event_id=derived_id(event.event_id, SERVICE, index),
            occurred_at=at,
            task=task.name,
            generation=task.generation,
            step=task.checkpoint_step,
            path=task.checkpoint,
        )
        for index, task in enumerate(tasks, start=1)
    ]
