"""The planning problem of a moment, made from the planner's state. Its terms are explained in docs/planner.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from services.planner.placement.changes import disturbed
from services.planner.placement.closed_nodes import closed_workers, draining_members
from services.planner.placement.transition_costs import on_grid, transition_cost
from services.planner.state.admission import admit, called
from services.planner.state.cluster import State, Task, node_of
from services.planner.state.deals_by_speed import posed_slowdown
from services.planner.state.pools import pool_sizes, settle
from services.planner.state.slow_workers import taken_members
from services.planner.state.usable_nodes import usable_nodes
from services.planner.throughput.corrections import correction
from services.planner.throughput.model import flop_per_step
from services.planner.throughput.tables import table_of, throughput_of
from shared.events.plans import Problem, Solution, TaskProblem

HOUR_S = 3600.0
EFLOP = 1e18

Solve = Callable[[Problem], tuple[Solution, list[Solution]]]
"""Answers a problem with the best assignment and the alternatives (``solver.solve_with_alternatives``)."""


def build_problem(state: State, at: datetime) -> Problem:
    """Return the problem: all tasks that want workers, and all usable workers except those of leaving tasks."""
    sizes = pool_sizes(state, withheld_workers(state))
    workers = sum(sizes.values())
    running = horizons_s(state, at)
    claimed = claimed_workers(state)

    def pose(task: Task, pool: str) -> TaskProblem:
        return task_problem(state, task, pool, sizes[pool], running[pool], claimed)

    if len(sizes) > 1:
        tasks = settle(state, wanting(state), sizes, pose)
    else:
        (pool,) = sizes
        tasks = [pose(task, pool) for task in wanting(state)]
    admitted = admit(tasks, sizes, called(state, at), allow_pausing=state.parameter("allow_pausing") > 0.0)
    return Problem(
        workers=workers,
        tasks=[task.model_copy(update={"required": task.name in admitted}) for task in tasks],
        pools=sizes if len(sizes) > 1 else {},
    )


def wanting(state: State) -> list[Task]:
    """Return the tasks among which workers are divided, by name: all but those that only wait for a script's end."""
    tasks = (state.tasks[name] for name in sorted(state.tasks))
    return [task for task in tasks if task.life == "active" and not task.leaving and not _ends(task)]


def _ends(task: Task) -> bool:
    """Return whether a task's script runs to its end behind the last step: a move would begin that end anew."""
    return task.has_trained and bool(task.members) and not disturbed(task) and task.unwritten is None


def available_workers(state: State) -> list[str]:
    """Return the usable workers that are not withheld (see ``withheld_workers``)."""
    withheld = withheld_workers(state)
    return [worker for worker in state.usable_workers() if worker not in withheld]


def home_workers(state: State, task: Task) -> list[str]:
    """Return the workers that a task has to have back, in rank order; empty: any will do.

    These are those that it had when it had done all steps and could not write its result: what it has done is in the
    memory of their nodes alone, unless a checkpoint of it was saved.
    """
    if task.members or task.life != "active" or task.unwritten is not None or task.needs_operator or task.has_trained:
        return []
    return [worker for worker in task.home if state.usable(worker) and state.nodes[node_of(worker)].open]


def _least_at_home(task: Task, home: list[str]) -> int:
    """Return with how many of these workers a task has all that it has done: copies are read by any rank of their node.

    A task whose model is divided needs the replicas that it had. If a node is lost, the copies on the other nodes are
    tried.
    """
    if task.replica_size == 1:
        return len(set(map(node_of, home)))
    return len(home) if len(home) == len(task.home) else 0


def claimed_workers(state: State) -> dict[str, str]:
    """Return the workers that tasks have to have back -> the task."""
    return {w: name for name, task in state.tasks.items() if task.home for w in home_workers(state, task)}


def staying_workers(state: State, task: Task) -> list[str]:
    """Return the workers on which a task that takes no newcomers can go on: they have the task's state."""
    draining = {name for name, node in state.nodes.items() if node.draining}
    return [worker for worker in task.live_owners if state.usable(worker) and node_of(worker) not in draining]


def withheld_workers(state: State) -> set[str]:
    """Return the usable workers that no plan may give to a task.

    These are the workers on which a stopping task still has a process, unless they are planned for another task, those
    of scripts that run to their end, and those of closed nodes. In a question about slow workers, the slow workers that
    the question leaves out are withheld, too.
    """
    withheld = {w for task in state.tasks.values() if task.life == "stopping" for w in task.occupied}
    if withheld:
        withheld -= {w for task in state.tasks.values() for w in task.members}
    if state.arrangement is not None:
        withheld |= {worker for worker, task in state.arrangement.used.items() if not task}
    for task in state.tasks.values():
        if task.life == "active" and _ends(task):
            withheld |= set(task.occupied)
    return withheld | closed_workers(state)


def node_mtbf_s(state: State, at: datetime) -> float:
    """Return the mean time between failures of one node, of any kind, seconds.

    Failures are modelled as a Poisson process with a Gamma prior worth one failure. The rate of one node is
    (1 + failures seen) / (prior mean time + node time observed).
    """
    observed_s = state.node_s + usable_nodes(state.nodes).usable_s(at)
    return (state.parameter("mtbf_node_s") + max(0.0, observed_s)) / (1 + state.losses)


def horizons_s(state: State, at: datetime) -> dict[str, float]:
    """Return D_running of each pool: the expected seconds until the next failure of any of its usable nodes.

    A failure in another pool leaves a pool's problem unchanged. n nodes fail n times as often as one.
    """
    mtbf_s = node_mtbf_s(state, at)
    numbers = usable_nodes(state.nodes).nodes or {"": 1}
    return {hardware: on_grid(mtbf_s / number) for hardware, number in sorted(numbers.items())}


def task_problem(
    state: State, task: Task, pool: str, workers: int, failure_s: float, claimed: Mapping[str, str]
) -> TaskProblem:
    """Return the task's part of the problem, before admission.

    Args:
        state: the cluster.
        task: the task as it is in the state, or as it would be.
        pool: the kind of workers that the task is to have.
        workers: the number of workers of that kind.
        failure_s: D_running of the pool, seconds.
        claimed: see ``claimed_workers``.
    """
    task = task.model_copy(update={"pool": pool})
    if task.closed:
        workers = min(workers, len(staying_workers(state, task)))
    if task.needs_operator:
        workers = 0
    home = home_workers(state, task)
    current = len(task.members)
    maximum = workers if task.spec.workers.max is None else task.spec.workers.max
    maximum = min(maximum, workers) if task.closed or task.needs_operator else maximum
    if home or task.unwritten is not None:
        maximum = min(maximum, len(home))
    whole = table_of(state, task)
    table = throughput_of(state, task, workers, whole)
    rate = table.get(current)
    in_table = rate == (whole.throughput.get(current) if current <= workers else None)
    cost = transition_cost(state, task, whole)
    dealt_anew = state.arrangement is not None and task.name in state.arrangement.dealt
    is_hit = bool(task.lost) or task.broken or bool(draining_members(state, task))
    is_hit = is_hit or (bool(claimed) and any(claimed.get(worker, task.name) != task.name for worker in task.members))
    # Built without validation: a table has thousands of entries, and all values come from validated models.
    return TaskProblem.model_construct(
        name=task.name,
        weight=task.spec.weight,
        necessary=max(task.spec.workers.min, _least_at_home(task, home)),
        maximum=maximum,
        current=current,
        faulted=is_hit or bool(taken_members(state, task)) or dealt_anew,
        transition_s=cost.transition_s,
        transition_to_s=cost.to_s,
        staying=cost.staying,
        newcomers_s=cost.newcomers_s,
        running_s=min(failure_s, on_grid(_remaining_s(task, table, workers))),
        throughput=table,
        required=False,
        pool=task.pool,
        correction=correction(whole.exponent),
        table=whole.sha256,
        current_flop_per_s=None if in_table else rate,
        reload_s=cost.reload_s,
        slowdown=posed_slowdown(state, task, task.pool),
        worker_cost_flop_per_s=worker_cost_flop_per_s(state, pool),
    )


def worker_cost_flop_per_s(state: State, kind: str) -> float:
    """Return what a worker of this kind costs, as weighted FLOP/s that are worth as much; 0: costs are not weighed."""
    value = state.parameter("value_per_eflop")
    if value <= 0.0:
        return 0.0
    prices = state.config.prices if state.config is not None else {}
    per_hour = prices.get(kind, state.parameter("price_per_worker_hour"))
    return per_hour / HOUR_S * EFLOP / value


def _remaining_s(task: Task, table: dict[int, float], workers: int) -> float:
    """Return the seconds that the task's remaining work takes at its expected rate. At least one step remains.

    The expected rate is that of the present count; for a task without workers, the best rate of the counts up to
    ``workers``.
    """
    rate = table.get(len(task.members), 0.0)
    if rate <= 0.0:
        rate = max((table[x] for x in sorted(table) if x <= workers), default=0.0)
    if rate <= 0.0:
        return 0.0
    return max(1, task.spec.steps - task.step) * flop_per_step(task.spec) / rate
