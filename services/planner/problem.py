"""The planning problem of a moment, from the planner's state (DESIGN section 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

from services.planner.corrections import correction
from services.planner.pools import pool_sizes, settle
from services.planner.state import State, Task
from services.planner.tables import table_of, throughput_of
from services.planner.throughput import flop_per_step
from shared.planning.waf import waf_flop_per_s
from shared.plans import Problem, TaskProblem

GRID = 1.1
"""Step of D_running: finer than anyone knows the time between failures."""


def build_problem(state: State, at: datetime) -> Problem:
    """Return the problem: all tasks that want workers, and all usable workers but those of tasks that are leaving."""
    sizes = pool_sizes(state, withheld_workers(state))
    workers = sum(sizes.values())
    running = horizons_s(state, at)

    def pose(task: Task, pool: str) -> TaskProblem:
        return task_problem(state, task, pool, sizes[pool], running[pool])

    if len(sizes) > 1:
        tasks = settle(state, wanting(state), sizes, pose)
        admitted = {name for pool in sizes for name in admit([t for t in tasks if t.pool == pool], sizes[pool])}
    else:
        (pool,) = sizes
        tasks = [pose(task, pool) for task in wanting(state)]
        admitted = admit(tasks, workers)
    return Problem(
        workers=workers,
        tasks=[task.model_copy(update={"required": task.name in admitted}) for task in tasks],
        pools=sizes if len(sizes) > 1 else {},
    )


def admit(tasks: Sequence[TaskProblem], workers: int) -> set[str]:
    """Return the tasks that are to have workers whatever others would make of them.

    Running tasks come before queued ones, then heavy before light, then by name; each is admitted if the least
    count at which it runs still fits. What is not admitted gets what the admitted ones leave, if that is enough.
    """
    admitted: set[str] = set()
    left = workers
    for task in sorted(tasks, key=lambda t: (t.current == 0, -t.weight, t.name)):
        least = least_count(task)
        if least is not None and least <= left:
            admitted.add(task.name)
            left -= least
    return admitted


def least_count(task: TaskProblem) -> int | None:
    """Return the smallest count at which the task achieves anything; None if there is none."""
    working = (k for k in sorted(task.throughput) if k <= task.maximum and waf_flop_per_s(task, k) > 0.0)
    return next(working, None)


def wanting(state: State) -> list[Task]:
    """Return the tasks among which workers are divided, by name."""
    tasks = (state.tasks[name] for name in sorted(state.tasks))
    return [task for task in tasks if task.life == "active" and not task.leaving]


def available_workers(state: State) -> list[str]:
    """Return the usable workers but those on which a stopping task still has a process, unless promised to another."""
    withheld = withheld_workers(state)
    return [worker for worker in state.usable_workers() if worker not in withheld]


def withheld_workers(state: State) -> set[str]:
    """Return the workers on which a stopping task still has a process, unless promised to another."""
    withheld = {w for task in state.tasks.values() if task.life == "stopping" for w in task.occupied}
    if withheld:
        withheld -= {w for task in state.tasks.values() for w in task.members}
    return withheld


def horizons_s(state: State, at: datetime) -> dict[str, float]:
    """Return D_running of each pool: the expected time until the next failure of any of its usable nodes, seconds.

    A failure in another pool leaves a pool's problem as it was. Failures are taken as a Poisson process with a Gamma
    prior worth one failure: the rate of one node, of whatever kind, is
    (1 + failures seen) / (prior mean time + node time observed), and n nodes fail n times as often.
    """
    usable = [node for node in state.nodes.values() if node.usable]
    # Exact, as times are whole microseconds: in any order.
    observed_s = state.node_s + sum((at - node.since for node in usable), timedelta()).total_seconds()
    mtbf_s = (state.parameter("mtbf_node_s") + max(0.0, observed_s)) / (1 + state.losses)
    numbers = Counter(node.hardware for node in usable) or Counter([""])
    return {hardware: on_grid(mtbf_s / number) for hardware, number in sorted(numbers.items())}


def on_grid(value_s: float) -> float:
    """Return the largest power of 1.1 that is not above the value, seconds (below 1: the value itself).

    D_running changes by the moment; what was solved ahead for a moment ago has to hold for the event when it comes.
    """
    if value_s < 1.0:
        return value_s
    below = 1.0
    while below * GRID <= value_s:
        below = below * GRID
    return below


def transition_s(state: State, task: Task) -> float:
    """Return D_transition: the mean of the measured transitions, with the prior as one more, seconds.

    A task that moves by its checkpoint also computes again what it did since.
    """
    measured = (state.parameter("transition_prior_s") + state.transition_s) / (1 + state.transitions)
    if task.replica == 1:
        return measured
    return measured + max(0, task.step - task.checkpoint_step) * task.step_s


def task_problem(state: State, task: Task, pool: str, workers: int, failure_s: float) -> TaskProblem:
    """Return the task's part of the problem, before admission.

    Args:
        state: the cluster.
        task: as it is in the state, or would be.
        pool: the kind of workers it is to have.
        workers: how many of them there are.
        failure_s: D_running of the pool, seconds.
    """
    task = task.model_copy(update={"pool": pool})
    current = len(task.members)
    maximum = workers if task.spec.workers.max is None else task.spec.workers.max
    table = throughput_of(state, task, workers)
    # Not validated again: a table has thousands of entries, and all of it comes from what was validated.
    return TaskProblem.model_construct(
        name=task.name,
        weight=task.spec.weight,
        necessary=task.spec.workers.min,
        maximum=maximum,
        current=current,
        faulted=bool(task.lost) or task.broken,
        transition_s=transition_s(state, task),
        transition_to_s={},
        running_s=min(failure_s, _remaining_s(task, table, workers)),
        throughput=table,
        required=False,
        pool=task.pool,
        correction=correction(table_of(state, task).exponent),
    )


def _remaining_s(task: Task, table: dict[int, float], workers: int) -> float:
    """Return the time the task's remaining work takes at the rate expected of it, seconds.

    The rate is that of its present count; of a task that has none, the best within reach. At least one step remains.
    """
    rate = table.get(len(task.members), 0.0)
    if rate <= 0.0:
        rate = max((table[x] for x in sorted(table) if x <= workers), default=0.0)
    if rate <= 0.0:
        return 0.0
    return max(1, task.spec.steps - task.step) * flop_per_step(task.spec) / rate
