"""The objective: weighted achieved aggregate FLOP/s F, and the objective value G of a worker count (docs/planner.md).

The float arithmetic is + - * / and comparisons in a fixed order, so that every machine computes the same bits.
"""

from __future__ import annotations

from shared.events.plans import TaskProblem, Term


def waf_flop_per_s(task: TaskProblem, workers: int) -> float:
    """Return F(t, x), weighted FLOP/s: ``weight * T(t, x) / slowdown`` from ``necessary`` workers on (at least 1).

    Below that count it is 0.
    """
    return _full_flop_per_s(task, workers) / task.slowdown


def _full_flop_per_s(task: TaskProblem, workers: int) -> float:
    """Return F(t, x) as it would be without a slow worker."""
    if workers < max(1, task.necessary):
        return 0.0
    return task.weight * task.throughput.get(workers, 0.0)


def touches(task: TaskProblem, workers: int) -> bool:
    """Return whether this count disturbs the task: it differs from the present one, or the task has lost a worker."""
    return task.faulted or workers != task.current


def transition_s(task: TaskProblem, workers: int) -> float:
    """Return D_transition(t, x -> x') of a touched task, seconds: that of the count, or of its kind of change."""
    to_s = task.transition_to_s.get(workers)
    if to_s is not None:
        return to_s
    return task.transition_s + task.newcomers_s if workers > task.staying else task.transition_s


def term(task: TaskProblem, workers: int) -> Term:
    """Return the task's part of the objective, in weighted FLOP.

    G(t, x') = (F(t, x') - c x') * D_running - [touched] * F(t, x) * D_transition, where x is the count before the
    fault, and c what a worker costs, as weighted FLOP/s that are worth as much (0 unless prices are weighed). A
    transition is counted at full speed also for a task that a slow worker holds up, so that the value of a plan never
    rises with a slowdown.
    """
    rate = waf_flop_per_s(task, workers)
    reward = (rate - workers * task.worker_cost_flop_per_s) * task.running_s
    penalty = _full_flop_per_s(task, task.current) * transition_s(task, workers) if touches(task, workers) else 0.0
    return Term(
        name=task.name,
        workers=workers,
        waf_flop_per_s=rate,
        reward=reward,
        penalty=penalty,
        objective=reward - penalty,
    )
