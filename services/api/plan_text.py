"""A plan as text, for ``unicron plan show`` and ``GET /v1/plans/{id}``."""

from __future__ import annotations

from shared.events.plans import Problem, Response, SlowWorkers, Solution, Stage, TaskChange, TaskProblem, Trigger
from shared.events.union import PlanDecided
from shared.planning.waf import touches, transition_s
from shared.text import flop

_RESPONSES = {
    Response.RETRY: "all ranks finish the interrupted step in place (no solver asked)",
    Response.RESTART: "the process is started again on its node (no solver asked)",
    Response.RECONFIGURE: "the cluster is divided anew",
    Response.NONE: "nothing changes",
}

_TRIGGERS = {
    Trigger.NODE_JOINED: "a node that joined",
    Trigger.NODE_LEFT: "a node that left in order",
    Trigger.NODE_DRAINING: "a node that is to be emptied",
    Trigger.NODE_DRAINED: "a node that is empty",
    Trigger.NODE_RETURNED: "a node that is to be used again",
    Trigger.TASK_ENDED: "the end of a task",
    Trigger.TASK_SUBMITTED: "a task that was submitted",
    Trigger.TASK_CHANGED: "a task whose weight or limits were changed",
    Trigger.RESUME_REQUESTED: "the request to try a task again that waits after failures",
    Trigger.RESULT_UNWRITTEN: "that a task cannot write its result, or is to try that again",
    Trigger.STOP_REQUESTED: "the request to stop a task",
    Trigger.STOP_REFUSED: "a task that was not stopped, since its state could not be saved",
    Trigger.TASK_PAUSED: "a task whose state is saved, and that waits for workers",
    Trigger.WORKER_SLOWED: "a worker that became slower, or as fast as its peers again",
    Trigger.TASK_STARVING: "a task that has waited too long for workers",
}

_SOURCES = {
    "live": "keep their state",
    "take": "take it from a live rank",
    "checkpoint": "read the checkpoint",
    "initial": "begin from the initial state",
    "script": "start the script, which goes on from its own checkpoint",
}

_LABELS = {
    "best": "best up to the next failure",
    "second-best": "second best",
    "keep": "keep all counts",
    "only-faulted-shrinks": "only the faulted task shrinks",
    "equal-split": "equal shares",
}

_SLOW_LABELS = {
    "keep": "used as they are now",
    "without-slow": "left out, and their tasks shrink",
    "spare": "left out, and others take their places",
    "dealt-by-speed": "kept, with fewer micro-batches for their replicas",
    "dealt-equally": "kept, with micro-batches dealt equally again",
    "last-resort": "given to a task, as better than nothing",
}


def explain(plan: PlanDecided) -> str:
    """Return the plan as text: its trigger, the change of each task, the objective, and the rejected alternatives."""
    named = [plan.incident, *plan.beside] if plan.incident else []
    incident = f" (incident{'s' * (len(named) > 1)} {', '.join(named)})" if named else ""
    trigger = f"{plan.trigger.value}, {_TRIGGERS[plan.trigger]}" if plan.trigger in _TRIGGERS else plan.trigger.value
    lines = [f"Plan {plan.plan} answers {trigger}{incident}: {_RESPONSES[plan.response]}."]
    if plan.supersedes:
        lines.append(f"It takes over from {', '.join(plan.supersedes)}, not yet done.")
    for change in plan.changes:
        lines += ["", *_change(change)]
    if plan.queued:
        lines += ["", *(f"Task {name} waits: {reason}." for name, reason in sorted(plan.queued.items()))]
    if plan.problem is not None and plan.solution is not None:
        lines += ["", *_objective(plan.problem, plan.solution), *_alternatives(plan.solution, plan.alternatives)]
    if plan.slow is not None:
        lines += ["", *_slow(plan.slow)]
    lines += _checkpoints(plan)
    if plan.inputs_sha256:
        lines += ["", f"Digest of the problem (SHA-256 of its canonical JSON): {plan.inputs_sha256}"]
    return "\n".join(lines)


def _change(change: TaskChange) -> list[str]:
    lines = [f"Task {change.task}: {change.reason}."]
    if change.failed:
        lines.append(f"  lost, or ended first: {' '.join(change.failed)}")
    if change.interrupted is not None:
        lines.append(f"  finishes the interrupted step as {_stage(change.interrupted)}")
    elif change.hold and change.survivors:
        lines.append(f"  leaves the broken step: {' '.join(change.survivors)}")
    if change.action == "stop":
        lines.append("  then stops: at the next step boundary it writes a checkpoint and ends")
    elif change.action == "pause":
        lines.append("  then pauses: at the next step boundary it writes a checkpoint and gives up its workers")
    elif change.action == "end":
        lines.append("  is over: its processes end")
    if change.release:
        lines.append(f"  gives up: {' '.join(change.release)}")
    if change.prepare:
        when = f", not before {change.not_before:%H:%M:%S} UTC" if change.not_before is not None else ""
        lines.append(f"  starts processes on: {' '.join(change.prepare)}{when}")
    if change.target is not None:
        lines.append(f"  from the next step boundary on: {_stage(change.target)}")
    return lines


def _stage(stage: Stage) -> str:
    layout = stage.layout
    sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
    groups: dict[str, list[str]] = {}
    for member in stage.members:
        groups.setdefault(member.source, []).append(member.worker)
    who = "; ".join(f"{' '.join(workers)} {_SOURCES[source]}" for source, workers in groups.items())
    shares = f"; micro-batches: {' '.join(map(str, stage.shares))}" if stage.shares else ""
    return f"generation {stage.generation}, {len(stage.members)} workers ({sizes}): {who}{shares}"


def _objective(problem: Problem, solution: Solution) -> list[str]:
    """Return lines for the chosen assignment, with the terms of each task's objective."""
    tasks = {task.name: task for task in problem.tasks}
    used = sum(solution.assignment.values())
    lines = [f"{used} of {problem.workers} workers are used; the plan is worth {flop(solution.objective)}:"]
    for pool, workers in sorted(problem.pools.items()):
        taken = sum(solution.assignment[task.name] for task in problem.tasks if task.pool == pool)
        lines.append(f"  of kind {pool}: {taken} of {workers}")
    for term in solution.terms:
        task = tasks[term.name]
        count = f"{task.current} -> {term.workers} workers"
        if term.workers == task.current:
            count = f"{term.workers} workers as before"
        lines.append(
            f"  {term.name} (weight {task.weight:g}{_conditions(problem, task)}): {count}, "
            f"{flop(term.waf_flop_per_s)}/s x {task.running_s:.4g} s = {flop(term.reward)}, "
            f"less {flop(term.penalty)} for {_transition(task, term.workers)}"
        )
    return lines


def _transition(task: TaskProblem, workers: int) -> str:
    """Return the kind of the change to this count and its time (``services/planner/placement/transition_costs.py``)."""
    if not touches(task, workers):
        return "no transition"
    if task.current == 0:
        return "a start" if workers else "waiting on"
    seconds = f"{transition_s(task, workers):.3g} s"
    if workers == 0:
        return f"a pause of {seconds}, restoring included"
    if workers in task.transition_to_s or (task.staying == 0 and task.newcomers_s == 0.0):
        return f"a restore of {seconds}: the state is read again, what was done since is computed again"
    if workers > task.staying:
        return f"a transition of {seconds}: {task.transition_s:.3g} s, and {task.newcomers_s:.3g} s as others join"
    return f"a transition of {seconds} among those that stay"


def _conditions(problem: Problem, task: TaskProblem) -> str:
    found = [f"at least {task.necessary}"] if task.necessary > 1 else []
    if problem.pools:
        found.append(f"on {task.pool}")
    if task.correction != 1.0:
        found.append(f"measured {task.correction:.3g} x the modelled throughput")
    if task.slowdown != 1.0:
        found.append(f"held up {task.slowdown:.3g} x by slow workers")
    if task.worker_cost_flop_per_s:
        found.append(f"a worker costs what {flop(task.worker_cost_flop_per_s)}/s are worth")
    if task.faulted:
        found.append("lost a worker")
    if task.required:
        found.append("admitted")
    return "".join(f", {text}" for text in found)


def _alternatives(best: Solution, alternatives: list[Solution]) -> list[str]:
    if not alternatives:
        return ["No other assignment was possible."]
    lines = ["Turned down:"]
    for other in alternatives:
        counts = ", ".join(f"{name} {workers}" for name, workers in sorted(other.assignment.items()))
        label = _LABELS.get(other.label, other.label)
        less = best.objective - other.objective
        lines.append(f"  {label} ({counts}): {flop(other.objective)}, {_more_or_less(-less)}")
    return lines


def _checkpoints(plan: PlanDecided) -> list[str]:
    """Return lines for the checkpoints that lose the least."""
    if not plan.checkpoint_every_s:
        return []
    advice = ", ".join(f"{task} every {every_s:.3g} s" for task, every_s in plan.checkpoint_every_s.items())
    return ["", f"At the measured rate of losses, these checkpoints lose the least: {advice}."]


def _more_or_less(value: float) -> str:
    return f"{flop(abs(value))} {'more' if value > 0.0 else 'less'}"


def _slow(slow: SlowWorkers) -> list[str]:
    """Return lines for the way in which slow workers are used, and those that were turned down."""
    if not slow.slowdowns:
        return ["No worker is slow; micro-batches had been dealt by speed."]
    taken, *others = slow.choices
    who = ", ".join(f"{worker} ({slowdown:.3g} x slower)" for worker, slowdown in slow.slowdowns.items())
    margin = f"; that had to be better by {flop(slow.margin)}" if slow.margin else ""
    lines = [f"Slow workers: {who}. They are {_SLOW_LABELS[taken.label]} ({taken.label}){margin}."]
    for other in others:
        used = ", ".join(f"{worker} by {task or 'none'}" for worker, task in other.used.items())
        more = other.objective - taken.objective
        lines.append(f"  {other.label} ({used}): {flop(other.objective)}, {_more_or_less(more)}")
    return lines
