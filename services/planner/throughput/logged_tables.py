"""Throughput tables in the log: each is in the first plan that names its digest, and remembered while plans name it.

What is remembered are the tables of the newest problem. A table that comes back later is logged again, so a plan never
depends on an older one than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from services.planner.state.cluster import State
from services.planner.throughput.tables import table_of
from shared.events.plans import LoggedTable, Problem
from shared.events.union import PlanDecided


def unlogged_tables(state: State, problem: Problem) -> dict[str, LoggedTable]:
    """Return, by digest, the tables of the problem, posed in this state, that are not remembered."""
    found = {}
    for posed in problem.tasks:
        if posed.table not in state.tables and posed.table not in found:
            table = table_of(state, state.tasks[posed.name].model_copy(update={"pool": posed.pool}))
            found[table.sha256] = table.logged()
    return found


def remembered_tables(known: Mapping[str, LoggedTable], plan: PlanDecided) -> Mapping[str, LoggedTable]:
    """Return the tables that are remembered after a plan; ``known`` itself if they are the same."""
    if plan.problem is None:
        return known
    named = {task.table for task in plan.problem.tasks}
    if not plan.tables and named == known.keys():
        return known
    return {digest: table for digest, table in {**known, **plan.tables}.items() if digest in named}


def table_problems(known: Mapping[str, LoggedTable], plan: PlanDecided) -> Iterator[str]:
    """Yield what is wrong with a plan's tables: one that is not what its digest says, or that is nowhere in the log.

    Args:
        known: the tables that are remembered before the plan.
        plan: the plan.
    """
    for digest, table in plan.tables.items():
        if table.sha256() != digest:
            yield f"its throughput table {digest} has other contents than its digest says"
    for task in plan.problem.tasks if plan.problem is not None else ():
        if task.table and task.table not in known and task.table not in plan.tables:
            yield f"the throughput table {task.table} of task {task.name} is in no plan before it, nor in this one"
