"""The plans of a page: what each decided, and why it gives no other numbers of workers. Reads the log.

Only SEV1 asks the solver. What re-planning would have given where a task was restarted or retried in place is a model:
the newest problem that the solver had before, as it stood when the fault struck, solved without the workers that the
fault has stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from services.api.plan_text import explain
from services.api.postmortem.counts import count_reasons, more_than_given, unused, useful_counts
from services.api.postmortem.model import DecidedPlan, OtherCount, Replanned
from services.api.store.readers import ViewReader
from services.api.store.tables import PLANS
from shared.errors import Archived, InvalidInput
from shared.events.plans import LoggedTable, Problem, Response, Solution, TaskProblem
from shared.events.union import PlanDecided
from shared.log.log import EventLog
from shared.planning.solver import solve
from shared.planning.waf import term
from shared.views.documents import PlanView

MOST_PLANS = 200
"""Plans before one in which its throughput tables are looked for: a table is logged again once no plan names it."""


_MODEL = [
    "throughput, times of transitions and D_running are those of the plan before",
    "with its workers back, the task waits for one to be started again and to take the state",
    "with fewer, the survivors go on by themselves",
    "without the worker means until the next failure, though a new process could use its place sooner",
]


def replanned(
    basis: str,
    problem: Problem,
    given: Mapping[str, int],
    name: str,
    workers: int,
    lost: int,
) -> Replanned | None:
    """Return what re-planning would have given a task that was restarted or retried in place.

    Args:
        basis: name of the plan whose problem is taken.
        problem: of that plan, with its throughput tables.
        given: the assignment that it decided.
        name: of the task.
        workers: that the task had.
        lost: how many of them the fault has stopped.

    Returns:
        None: the problem does not have the task, or says nothing of so many workers.
    """
    counts = {**given, name: workers}
    present = problem.model_copy(update={"tasks": [_present(task, counts, name, lost) for task in problem.tasks]})
    hit = next((task for task in present.tasks if task.name == name), None)
    if hit is None or hit.throughput.get(workers, 0.0) <= 0.0:
        return None
    shrunk = max((x for x in useful_counts(hit) if x <= workers - lost), default=0)
    left = _without(present, hit, lost)
    best: Solution | None = None
    with suppress(InvalidInput):  # raised where too little is left for the tasks that were admitted
        best = solve(left)
    return Replanned(
        task=name,
        workers=workers,
        restored_flop=term(hit, workers).objective,
        shrunk_workers=shrunk,
        shrunk_flop=term(hit, shrunk).objective if shrunk else 0.0,
        assignment=dict(sorted(best.assignment.items())) if best is not None else {},
        assignment_flop=best.objective if best is not None else 0.0,
        kept_flop=sum(term(task, task.current).objective for task in present.tasks),
        more=_more(present, hit, counts),
        basis=basis,
        assumptions=_MODEL,
    )


def _without(present: Problem, hit: TaskProblem, lost: int) -> Problem:
    """Return the problem without the workers that the fault has stopped."""
    pools = {pool: workers - lost if pool == hit.pool else workers for pool, workers in present.pools.items()}
    return present.model_copy(update={"workers": present.workers - lost, "pools": pools})


def _more(present: Problem, hit: TaskProblem, counts: Mapping[str, int]) -> OtherCount:
    """Return why a restarted task has no more workers than before."""
    more = more_than_given(present, hit, counts)
    free = unused(present, counts, hit.pool)
    if more.workers is None or more.workers - counts[hit.name] > free:
        return more
    if (more.less_flop or 0.0) < 0.0:
        reason = f"{free} are free and would help; the solver, which gives them, is asked at the next trigger"
        return more.model_copy(update={"reason": reason})
    return more


def _present(task: TaskProblem, counts: Mapping[str, int], hit: str, lost: int) -> TaskProblem:
    """Return a task's part of the problem as it stood when the fault struck: with the workers that it was given."""
    workers = counts.get(task.name, 0)
    is_hit = task.name == hit
    staying = workers - lost if is_hit else workers
    return task.model_copy(update={"current": workers, "faulted": is_hit, "staying": staying, "transition_to_s": {}})


@dataclass(frozen=True)
class Answers:
    """The plans that answered what a page is about, in order. ``solved_before``: the solver's plans before them."""

    plans: Sequence[PlanView]
    solved_before: Sequence[PlanView] = field(default_factory=tuple)


def answers(views: ViewReader, names: Sequence[str], before: int) -> Answers:
    """Return what the projections know of plans.

    Args:
        views: of the projections.
        names: of the plans, in order.
        before: position before which plans of the solver are looked for, where there is no plan.
    """
    found = views.several(PLANS, names)
    plans = [found[plan] for plan in names if plan in found]
    first = plans[0].position if plans else before
    solved = [plan for plan in views.newest(PLANS, before=first, limit=MOST_PLANS) if plan.solved]
    return Answers(plans, solved)


def decided(found: Answers, log: EventLog, left_out: list[str]) -> list[DecidedPlan]:
    """Return the plans with their words and reasons; add to ``left_out`` what the log does not have any more."""
    return [_plan(found, plan, log, left_out) for plan in found.plans]


def _plan(found: Answers, view: PlanView, log: EventLog, left_out: list[str]) -> DecidedPlan:
    event = _event(log, view)
    if event is None:
        left_out.append(f"plan {view.id}: position {view.position} is archived")
        return DecidedPlan(id=view.id, position=view.position, decided_at=view.decided_at, words="")
    shown = DecidedPlan(
        id=view.id, position=view.position, decided_at=view.decided_at, words=explain(event), note=_note(event)
    )
    if event.problem is None or event.solution is None:
        return shown.model_copy(update={"replanned": _replanned(found, view, log)})
    earlier = [plan for plan in (*found.plans, *found.solved_before) if plan.solved and plan.position < view.position]
    problem = _whole(event, log, sorted(earlier, key=lambda plan: -plan.position))
    if problem is None:
        left_out.append(f"why plan {view.id} gives no other numbers: its throughput tables are too far back in the log")
        return shown
    given = event.solution.assignment
    return shown.model_copy(
        update={"counts": count_reasons(problem, event.solution), "unused_workers": unused(problem, given)}
    )


def _note(plan: PlanDecided) -> str:
    """Return what the answer follows from, where its words need that."""
    if plan.response in (Response.RESTART, Response.RETRY):
        what = "retried in place" if plan.response is Response.RETRY else "started again on its node"
        return (
            f"The answer to this severity is fixed: what failed is {what}, and every task keeps its number of workers."
        )
    return ""


def _replanned(found: Answers, view: PlanView, log: EventLog) -> list[Replanned]:
    """Return what re-planning would have given, by the newest problem before the plan."""
    before = [plan for plan in found.solved_before if plan.position < view.position]
    basis = _event(log, before[0]) if before else None
    problem = _whole(basis, log, before[1:]) if basis is not None else None
    if basis is None or basis.solution is None or problem is None:
        return []
    given = basis.solution.assignment
    models = [
        replanned(
            basis.plan,
            problem,
            given,
            name,
            len(impact.before),
            len(impact.before) - len(impact.survivors),
        )
        for name, impact in sorted(view.impacts.items())
        if impact.faulted
    ]
    return [model for model in models if model is not None]


def _event(log: EventLog, view: PlanView) -> PlanDecided | None:
    """Return a plan's event; None if it is archived and the segment is not at hand."""
    try:
        records = log.read(after=view.position - 1, limit=1)
    except Archived:
        return None
    event = records[0].event if records else None
    return event if isinstance(event, PlanDecided) else None


def _whole(plan: PlanDecided, log: EventLog, before: Sequence[PlanView]) -> Problem | None:
    """Return a plan's problem with its throughput tables, which it or plans before it have.

    None: the plan has no problem, or the tables are not found.

    Args:
        plan: whose problem is wanted.
        log: is read.
        before: the solver's plans before it, the newest first.
    """
    if plan.problem is None:
        return None
    tables: dict[str, LoggedTable] = dict(plan.tables)
    wanted = {task.table for task in plan.problem.tasks if task.table}
    for view in before:
        if wanted <= tables.keys():
            break
        event = _event(log, view)
        tables = {**(event.tables if event is not None else {}), **tables}
    return plan.problem.with_tables(tables) if wanted <= tables.keys() else None
