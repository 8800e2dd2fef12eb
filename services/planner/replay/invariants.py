"""What is true of every plan, whichever decider made it: the check of plans that this program cannot decide again.

``replay`` uses it for plans of an older decider. A plan is judged by the state in which it was made (the fold of the
log up to its cause), by the problem and the solution recorded in it, and by what the log reports of its execution. A
change of the planner that makes plans which fail a check here loosens that check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isclose

from services.planner.problem.problem import Solve
from services.planner.state.cluster import State, Task, node_of
from shared.errors import InvalidInput
from shared.events.plans import Problem, Response, Solution, Stage, TaskChange, Trigger
from shared.events.union import (
    ErrorDetected,
    Event,
    EventBase,
    NodeDrained,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeReturned,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskChanged,
    TaskFailed,
    TaskFinished,
    TaskResultUnwritten,
    TaskResumeRequested,
    TaskStarving,
    TaskStopped,
    TaskStopRefused,
    TaskStopRequested,
    TaskSubmitted,
    WorkerSlowed,
)
from shared.planning.solver import evaluate

OBJECTIVE_TOLERANCE = 1e-9
"""Relative difference up to which two objectives are equal. An older decider may have added the terms in another order:
a float64 sum of n terms is off by at most n x 1.1e-16 of their magnitudes, so this has room for a million tasks."""

TRIGGERS: dict[type[EventBase], Trigger] = {
    TaskSubmitted: Trigger.TASK_SUBMITTED,
    TaskChanged: Trigger.TASK_CHANGED,
    TaskStopRequested: Trigger.STOP_REQUESTED,
    TaskResumeRequested: Trigger.RESUME_REQUESTED,
    TaskResultUnwritten: Trigger.RESULT_UNWRITTEN,
    TaskStopRefused: Trigger.STOP_REFUSED,
    TaskStarving: Trigger.TASK_STARVING,
    TaskFinished: Trigger.TASK_ENDED,
    TaskFailed: Trigger.TASK_ENDED,
    TaskStopped: Trigger.TASK_ENDED,
    StateMoved: Trigger.TASK_PAUSED,
    NodeJoined: Trigger.NODE_JOINED,
    NodeLeft: Trigger.NODE_LEFT,
    NodeDraining: Trigger.NODE_DRAINING,
    NodeDrained: Trigger.NODE_DRAINED,
    NodeReturned: Trigger.NODE_RETURNED,
    ErrorDetected: Trigger.ERROR,
    WorkerSlowed: Trigger.WORKER_SLOWED,
}
"""The trigger that a plan names, by the type of its cause."""


def may_be_answered(event: EventBase) -> bool:
    """Return whether a planner of any decider may answer an event."""
    match event:
        case StateMoved():
            return event.phase == "ended"
        case ErrorDetected():
            return event.answered_with is None
        case _:
            return type(event) in TRIGGERS


def answer_problems(before: State, cause: Recorded, answer: Sequence[Event], after: State, solve: Solve) -> list[str]:
    """Return what contradicts a recorded answer, in words; empty if every check passes.

    Args:
        before: the state after ``cause``, without the answer.
        cause: the record that was answered.
        answer: the recorded answer: a plan and the tasks' ends that it settles at once.
        after: the state after the answer.
        solve: the solver.
    """
    plan = answer[0] if answer else None
    if not isinstance(plan, PlanDecided):
        return ["the answer does not begin with a plan"]
    return [
        *_identity(before, cause, plan),
        *_stops(before, cause, answer[1:]),
        *(problem for change in plan.changes for problem in _change(before, change)),
        *_cluster(after, plan),
        *_solved(before, after, plan, solve),
    ]


def execution_problems(plan: PlanDecided, event: StateMoved) -> list[str]:
    """Return what contradicts a plan in a report of its execution: ranks where the plan put none."""
    change = next((change for change in plan.changes if change.task == event.task), None)
    if change is None:
        return [f"{event.phase} of task {event.task}, which the plan does not change"]
    staged = {member.worker for stage in change.stages for member in stage.members}
    planned = {*staged, *change.survivors, *change.failed, *change.release, *change.prepare}
    problems = []
    if stray := sorted({*event.sources, *event.pids} - planned):
        problems.append(f"{event.phase} of task {event.task} reports {', '.join(stray)}, which the plan does not name")
    stage = next((stage for stage in change.stages if stage.generation == event.generation), None)
    if event.phase in ("resumed", "restored") and stage is not None:
        members = {member.worker for member in stage.members}
        if stray := sorted(set(event.sources) - members):
            problems.append(f"{', '.join(stray)} took part in generation {event.generation} without being a member")
    return problems


def _identity(before: State, cause: Recorded, plan: PlanDecided) -> Iterator[str]:
    """Yield what is wrong with the plan's names, cause and trigger."""
    event = cause.event
    if plan.cause != event.event_id:
        yield f"its cause is {plan.cause}, its id follows from {event.event_id}"
    if plan.trigger is not TRIGGERS.get(type(event)):
        yield f"its trigger is {plan.trigger}, its cause {event.type}"
    if plan.occurred_at != cause.recorded_at:
        yield "it was not made at the time of its cause"
    if plan.plan != f"p{before.plans + 1}":
        yield f"it is named {plan.plan}, the plan number {before.plans + 1}"
    if plan.incident != (event.incident if isinstance(event, ErrorDetected) else None):
        yield f"its incident is {plan.incident}, not that of its cause"
    if tuple(plan.beside) != (before.beside if isinstance(event, ErrorDetected) else ()):
        yield f"it answers {plan.beside} beside its cause; logged with that were {list(before.beside)}"
    if (plan.response is Response.NONE) != (not plan.changes):
        yield f"its response is {plan.response}, with {len(plan.changes)} changes"
    names = [change.task for change in plan.changes]
    if names != sorted(set(names)):
        yield "its changes are not one for each task, by name"
    replaced = {before.tasks[n].plan for n in names if n in before.tasks and before.tasks[n].change is not None}
    if set(plan.supersedes) != replaced:
        yield f"it supersedes {plan.supersedes}; its tasks were in the plans {sorted(replaced)}"


def _stops(before: State, cause: Recorded, events: Sequence[Event]) -> Iterator[str]:
    """Yield what is wrong with the tasks' ends beside a plan: each is of a stopping task, at its newest checkpoint."""
    for event in events:
        task = before.tasks.get(event.task) if isinstance(event, TaskStopped) else None
        if not isinstance(event, TaskStopped) or task is None or task.life != "stopping":
            yield f"{event.type} beside the plan, of no task that is stopping"
            continue
        ended = event.generation, event.step, event.path, event.occurred_at
        if ended != (task.generation, task.checkpoint_step, task.checkpoint, cause.recorded_at):
            yield f"task {event.task} stops elsewhere than at its newest checkpoint"


def _change(before: State, change: TaskChange) -> Iterator[str]:
    """Yield what is wrong with the change of one task."""
    task = before.find(change.task)
    if task is None:
        yield f"it changes task {change.task}, which was never submitted"
        return
    named = f"task {change.task}"
    generations = [change.from_generation, *(stage.generation for stage in change.stages)]
    if change.from_generation != task.generation:
        yield f"{named}: from generation {change.from_generation}, it has {task.generation}"
    if any(later <= earlier for earlier, later in pairwise(generations)):
        yield f"{named}: generations do not rise: {generations}"
    if (change.action == "move") != (change.target is not None):
        yield f"{named}: action {change.action} {'with' if change.target else 'without'} a target stage"
    if stray := set(change.survivors) - set(task.live_owners):
        yield f"{named}: survivors that do not have its state: {', '.join(sorted(stray))}"
    for stage in change.stages:
        yield from (f"{named}, generation {stage.generation}: {text}" for text in _stage(before, change, stage))
    last = change.stages[-1].members if change.stages and change.action in ("move", "none") else []
    if set(change.prepare) != {member.worker for member in last} - set(change.survivors):
        yield f"{named}: prepared are not the members that do not survive"


def _stage(before: State, change: TaskChange, stage: Stage) -> Iterator[str]:
    """Yield what is wrong with one stage: its members must fit the nodes and the layout."""
    workers = [member.worker for member in stage.members]
    if [member.rank for member in stage.members] != list(range(len(workers))):
        yield "its ranks are not 0, 1, ..."
    if stage.layout.world_size != len(workers):
        yield f"{len(workers)} members in a layout of {stage.layout.world_size}"
    if twice := sorted(worker for worker, times in Counter(workers).items() if times > 1):
        yield f"{', '.join(twice)} twice"
    if any(member.node != node_of(member.worker) for member in stage.members):
        yield "a member is not on the node of its worker"
    if missing := [worker for worker in workers if not before.usable(worker)]:
        yield f"no usable node has the workers {', '.join(missing)}"
    task = before.find(change.task)
    if stage.shares and (len(stage.shares), sum(stage.shares)) != (
        stage.layout.data,
        task.spec.batch.micro_batches if task is not None else 0,
    ):
        yield f"shares {stage.shares}, not one for each replica that add up to the micro-batches"
    live = {member.worker for member in stage.members if member.source == "live"}
    if not live <= set(change.survivors):
        yield "a member brings state that it does not have"
    if not live and any(member.source == "take" for member in stage.members):
        yield "members take state from nobody"


def _cluster(after: State, plan: PlanDecided) -> Iterator[str]:
    """Yield what is wrong with the cluster after the plan: a worker has two tasks, or a task is forgotten."""
    owners = Counter(worker for task in after.tasks.values() for worker in task.members)
    if shared := sorted(worker for worker, times in owners.items() if times > 1):
        yield f"two tasks have the workers {', '.join(shared)}"
    for change in plan.changes:
        task = after.tasks.get(change.task)
        if task is not None and task.members and not _allowed(task):
            yield f"task {task.name}: {len(task.members)} workers are not within its specification"
    queued = {task.name for task in after.tasks.values() if task.life == "active" and not task.members}
    if set(plan.queued) != queued:
        yield f"queued are {sorted(plan.queued)}; without workers are {sorted(queued)}"


def _allowed(task: Task) -> bool:
    limits, count = task.spec.workers, len(task.members)
    return limits.min <= count and (limits.max is None or count <= limits.max)


def _solved(before: State, after: State, plan: PlanDecided, solve: Solve) -> Iterator[str]:
    """Yield what is wrong with the recorded problem, its solution, or what the plan makes of it."""
    problem, solution = plan.problem, plan.solution
    if problem is None or solution is None:
        if problem is not None or solution is not None or plan.alternatives or plan.inputs_sha256:
            yield "a problem without a solution, or the reverse"
        yield from _unsolved(before, after, plan)
        return
    if plan.inputs_sha256 != problem.sha256():
        yield "inputs_sha256 is not the digest of its problem"
    yield from _posed(before, problem)
    tables = {**before.tables, **plan.tables}
    if all(task.table in tables for task in problem.tasks if task.table):  # a missing table is reported elsewhere
        yield from _best(problem.with_tables(tables), plan, solution, solve)
    for posed in problem.tasks:
        members = after.tasks[posed.name].members if posed.name in after.tasks else ()
        if len(members) != solution.assignment.get(posed.name, 0):
            yield f"task {posed.name}: assigned {solution.assignment.get(posed.name, 0)}, has {len(members)} workers"
        kinds = {after.nodes[node_of(w)].hardware for w in members if node_of(w) in after.nodes}
        if problem.pools and not kinds <= {posed.pool}:
            yield f"task {posed.name}: of pool {posed.pool}, on {', '.join(sorted(kinds))}"


def _unsolved(before: State, after: State, plan: PlanDecided) -> Iterator[str]:
    """Yield tasks that get another count of workers although nothing was solved; tasks that leave must get none."""
    for change in plan.changes:
        if change.action in ("move", "none") and change.task in before.tasks:
            had, has = len(before.tasks[change.task].members), len(after.tasks[change.task].members)
            if had != has:
                yield f"task {change.task}: {had} -> {has} workers without a solution"


def _posed(before: State, problem: Problem) -> Iterator[str]:
    """Yield where the recorded problem contradicts the state: its workers, and what a task's submission says."""
    if problem.workers > len(before.usable_workers()):
        yield f"its problem has {problem.workers} workers, the nodes {len(before.usable_workers())}"
    for posed in problem.tasks:
        task = before.tasks.get(posed.name)
        if task is None or task.life != "active":
            yield f"its problem has task {posed.name}, which is not active"
        elif (posed.current, posed.weight) != (len(task.members), task.spec.weight) or (
            # A task that has workers back needs some on each of their nodes.
            posed.necessary < task.spec.workers.min if task.home else posed.necessary != task.spec.workers.min
        ):
            yield f"its problem has another task {posed.name} than the log"


def _best(problem: Problem, plan: PlanDecided, solution: Solution, solve: Solve) -> Iterator[str]:
    """Yield where the recorded solutions are not worth what they claim, or the solution is not the best."""
    try:
        best, _ = solve(problem)
    except InvalidInput as err:
        yield f"its problem cannot be solved: {err.detail}"
        return
    if not _equal(best.objective, solution.objective):
        yield f"solved again, the objective is {best.objective!r}; recorded is {solution.objective!r}"
    if sum(solution.assignment.values()) > problem.workers:
        yield f"its solution has more than {problem.workers} workers"
    for recorded in (solution, *plan.alternatives):
        value = evaluate(problem, recorded.assignment, recorded.label)
        same = _same_total(value, recorded) if recorded.waf_flop_per_s is not None else _same_terms(value, recorded)
        if not _equal(value.objective, recorded.objective) or not same:
            yield f"{recorded.label} is worth {value.objective!r}; recorded is {recorded.objective!r}"


def _same_terms(one: Solution, other: Solution) -> bool:
    return len(one.terms) == len(other.terms) and all(
        (a.name, a.workers) == (b.name, b.workers) and _equal(a.objective, b.objective)
        for a, b in zip(one.terms, other.terms, strict=True)
    )


def _same_total(one: Solution, other: Solution) -> bool:
    """Return whether an alternative, which has no terms in the log, has the same weighted FLOP/s."""
    return not other.terms and _equal(one.total_waf_flop_per_s, other.total_waf_flop_per_s)


def _equal(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=OBJECTIVE_TOLERANCE)
