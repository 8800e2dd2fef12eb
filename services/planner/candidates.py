"""Solutions that futures compare with the best one (``rollouts.py``), and the problems whose answers they are.

    the solver's alternatives   all counts kept, only the faulted task shrinking, the second best, equal shares
    ``patient``                 the best if D_running were as long as a future: for moves that pay over many failures
    ``spare-nodes-K``           the best for K nodes fewer, so that K nodes are free to replace the next that are lost;
                                with the kind of the nodes where there are several

The answers for fewer nodes are also what the cluster may become once nodes are lost. Their problems ask what would be
best if nothing had happened yet but that these nodes are gone: the same whichever node an event has hit, so one answer
is solved ahead for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from services.planner.futures import HORIZON_FAILURES
from services.planner.problem import Solve
from services.planner.state import State
from shared.errors import InvalidInput
from shared.planning.instance import Inputs, TableCache
from shared.planning.solver import evaluate, pools_of
from shared.plans import Problem, Solution, TaskProblem

FEWER_NODES = 2
"""Losses of nodes for which answers are asked: a future seldom has more at a time before nodes return."""


class Candidates(NamedTuple):
    """Solutions to compare.

    ``solutions``: the best first, no two with the same counts. ``fewer``: for each pool that has tasks, by its place in
    ``pools_of``, the answers for one node fewer and so on.
    """

    solutions: list[Solution]
    fewer: list[list[Solution]]


def candidates(
    state: State,
    problem: Problem,
    running_s: Mapping[str, float],
    solution: Solution,
    alternatives: list[Solution],
    solve: Solve,
) -> Candidates:
    """Return the solutions to compare.

    Args:
        state: the cluster.
        problem: the problem that was solved.
        running_s: D_running of each pool.
        solution: the best solution.
        alternatives: of the solver.
        solve: answers further problems.
    """
    further, fewer = [], []
    if (lasting := _answer(solve, patient(problem, running_s))) is not None:
        further.append(evaluate(problem, lasting.assignment, "patient"))
    spares = int(state.parameter("spare_nodes_max"))
    for pool in pools_of(problem):
        found = [_answer(solve, posed) for posed in with_fewer_nodes(state, pool)]
        fewer.append([each for each in found if each is not None])
        where = f"-{pool.tasks[0].pool}" if problem.pools and pool.tasks else ""
        for nodes, each in enumerate(found[:spares], start=1):
            if each is not None:
                counts = {**solution.assignment, **each.assignment}
                further.append(evaluate(problem, counts, f"spare-nodes-{nodes}{where}"))
    distinct = {tuple(sorted(each.assignment.items())): each for each in reversed([*alternatives, *further])}
    distinct.pop(tuple(sorted(solution.assignment.items())), None)
    return Candidates([solution, *reversed(distinct.values())], fewer)


def patient_inputs(state: State, pools: list[Inputs], running_s: Mapping[str, float]) -> Iterator[Inputs]:
    """Yield the inputs of the problem of ``patient``, pool by pool, for the look-ahead.

    Args:
        state: the cluster.
        pools: of the problem. Their arrays count where they differ from their tasks.
        running_s: D_running of each pool.
    """
    if state.parameter("rollouts") < 1:
        return
    for pool in pools:
        present_s = pool.task_arrays.running_s
        if present_s.size:
            lasting = present_s >= running_s[pool.tasks[0].pool]
            longer_s = np.where(lasting, present_s * HORIZON_FAILURES, present_s)
            yield replace(pool, task_arrays=pool.task_arrays._replace(running_s=longer_s))


def inputs_with_fewer_nodes(state: State, problem: Problem, cache: TableCache) -> Iterator[Inputs]:
    """Yield the inputs of the problems of ``with_fewer_nodes``, for the look-ahead."""
    if state.parameter("rollouts") < 1:
        return
    for pool in pools_of(problem):
        for posed in with_fewer_nodes(state, pool):
            yield Inputs.of(posed, cache)


def patient(problem: Problem, running_s: Mapping[str, float]) -> Problem:
    """Return the problem with D_running as long as futures are, for all tasks that last until the next failure."""
    tasks = [
        task.model_copy(update={"running_s": task.running_s * HORIZON_FAILURES})
        if task.running_s >= running_s[task.pool]
        else task
        for task in problem.tasks
    ]
    return problem.model_copy(update={"tasks": tasks})


def with_fewer_nodes(state: State, pool: Problem) -> Iterator[Problem]:
    """Yield the problems of a pool that has one node fewer, two, and so on, as if no task were hit."""
    kind = pool.tasks[0].pool if pool.tasks else ""
    size = node_workers(state, kind)
    tasks = [_unhit(task) for task in pool.tasks]
    for nodes in range(1, max(FEWER_NODES, int(state.parameter("spare_nodes_max"))) + 1):
        if tasks and pool.workers > size * nodes:
            yield pool.model_copy(update={"workers": pool.workers - size * nodes, "tasks": tasks})


def node_workers(state: State, kind: str) -> int:
    """Return the workers of a usual node that is usable: the most frequent number, of equals the largest.

    ``kind``: of hardware; empty: any.
    """
    sizes: dict[int, int] = {}
    for node in state.nodes.values():
        if node.usable and kind in ("", node.hardware):
            sizes[len(node.workers)] = sizes.get(len(node.workers), 0) + 1
    return max(sizes, key=lambda size: (sizes[size], size), default=1)


def _unhit(task: TaskProblem) -> TaskProblem:
    """Return a task's part of the problem as if nothing had hit it. The price of a pause, which a hit changes, goes."""
    to_s = {count: seconds for count, seconds in task.transition_to_s.items() if count}
    return task.model_copy(update={"faulted": False, "staying": task.current, "transition_to_s": to_s})


def _answer(solve: Solve, problem: Problem) -> Solution | None:
    """Return the best solution; None if the tasks that must have workers need more, or the objective overflows."""
    try:
        return solve(problem)[0]
    except InvalidInput:
        return None
