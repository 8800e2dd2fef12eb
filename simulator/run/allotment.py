"""The allotment: each task's workers in the best plan of the healthy cluster, and what a policy pins by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.planner.evolve import evolve
from services.planner.problem.problem import build_problem
from services.planner.state.cluster import State
from services.planner.throughput.tables import layout_of
from shared.events.plans import Layout
from shared.events.union import Event, TaskSubmitted
from shared.planning.solver import solve_with_alternatives
from shared.tasks.specification import TaskSpec
from simulator.policy import Scope
from simulator.run.agenda import START


class Allotment(NamedTuple):
    """The best plan of the healthy cluster without spares: workers and layout of each task that gets some."""

    workers: dict[str, int]
    layouts: dict[str, Layout]


def allot(tasks: Sequence[TaskSpec], cluster: Sequence[Event]) -> Allotment:
    """Return the allotment.

    Args:
        tasks: specifications as they were submitted.
        cluster: the configuration, and the nodes that join, without spares.
    """
    state = State()
    for event in cluster:
        state = evolve(state, event, START)
    for spec in tasks:
        submitted = TaskSubmitted(event_id=spec.name, occurred_at=START, task=spec.name, spec=spec)
        state = evolve(state, submitted, START)
    found, _ = solve_with_alternatives(build_problem(state, START))
    workers = {name: count for name, count in found.assignment.items() if count > 0}
    layouts = {name: layout_of(state, state.tasks[name], count) for name, count in workers.items()}
    return Allotment(workers, layouts)


def pinned(spec: TaskSpec, scope: Scope, allotment: Allotment) -> TaskSpec:
    """Return the specification as the policy submits it; a task without an allotment stays as it is."""
    count = allotment.workers.get(spec.name)
    if scope == "cluster" or count is None:
        return spec
    least = count if scope == "fixed" else spec.workers.min
    return spec.model_copy(update={"workers": spec.workers.model_copy(update={"min": least, "max": count})})
