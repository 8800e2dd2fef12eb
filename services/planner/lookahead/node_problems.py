"""The problems posed by an event that hits one node of each class (``next_events.py``).

The problems of nodes of one kind and size differ only in the tasks that are hit. So one problem is built as if no task
were hit. For each class, the tasks that are hit then get other numbers in its arrays: those of a task that has lost as
much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from services.planner.decide import asked
from services.planner.evolve import evolve
from services.planner.lookahead.next_events import NodeClass, TaskShare
from services.planner.problem.problem import build_problem, claimed_workers, horizons_s, task_problem
from services.planner.state.cluster import State, Task
from shared.events.plans import Problem, TaskProblem
from shared.events.union import Event
from shared.planning.instance import Inputs, TableCache
from shared.planning.solver import pools_of

PoolInputs = list[Inputs]
"""A problem, pool by pool."""

Numbers = dict[str, float]
"""The numbers in which a task's part of a problem differs, by their names in ``TaskArrays``, or ``PAUSE_S``."""

COLUMNS = {"faulted", "running_s", "transition_s", "staying", "newcomers_s"}
"""Parts of a task's problem that are single numbers and may differ once the task is hit."""

PAUSE_S = "pause_s"
"""Name of the cost of a pause, the only entry of ``transition_to_s``: a task that was hit cannot save its step."""


def posed_inputs(state: State, at: datetime, cache: TableCache) -> PoolInputs:
    """Return the inputs of the problem that the state poses."""
    return [Inputs.of(pool, cache) for pool in pools_of(build_problem(state, at))]


class _Template(NamedTuple):
    """The problem after an event, as if no task were hit.

    ``running_s``: D_running of each pool. ``places``: pool and index of each task in ``pools``.
    """

    state: State
    problem: Problem
    running_s: dict[str, float]
    pools: PoolInputs
    tasks: dict[str, TaskProblem]
    places: dict[str, tuple[int, int]]


class NodeProblems:
    """Builds the problems; remembers by how much a task's part differs after a loss."""

    def __init__(self, at: datetime, cache: TableCache) -> None:
        """Pose all problems at time ``at``."""
        self._at, self._cache = at, cache
        self._known: dict[tuple[object, ...], tuple[Task, Numbers | None]] = {}

    def of(self, state: State, classes: list[NodeClass], event: Callable[[NodeClass], Event]) -> Iterator[Inputs]:
        """Yield the inputs of each class's problem. Problems that differ in more than numbers are built in full."""
        templates: dict[tuple[str, int, bool, bool], _Template | None] = {}
        for hit in classes:
            size = hit.hardware, hit.workers, hit.cordoned, hit.draining
            if size not in templates:
                templates[size] = self._template(state, event(hit))
            template = templates[size]
            if template is None:
                continue
            numbers = {share.task: self._numbers(state, template, event, hit, share) for share in hit.shares}
            if None not in numbers.values():
                yield from _patched(template, numbers)
            elif (posed := asked(evolve(state, event(hit), self._at), event(hit))) is not None:
                yield from posed_inputs(posed, self._at, self._cache)

    def _template(self, state: State, event: Event) -> _Template | None:
        """Return the template after the event; None if the solver is not asked about the event."""
        posed = asked(evolve(state, event, self._at), event)
        if posed is None:
            return None
        spared = posed.model_copy(update={"tasks": state.tasks})
        problem = build_problem(spared, self._at)
        pools = [Inputs.of(pool, self._cache) for pool in pools_of(problem)]
        places = {task.name: (p, i) for p, inputs in enumerate(pools) for i, task in enumerate(inputs.tasks)}
        tasks = {task.name: task for task in problem.tasks}
        return _Template(spared, problem, horizons_s(spared, self._at), pools, tasks, places)

    def _numbers(
        self, state: State, template: _Template, event: Callable[[NodeClass], Event], hit: NodeClass, share: TaskShare
    ) -> Numbers | None:
        """Return what differs if the task has lost this share of a node; None if more differs than single numbers."""
        task, before = state.tasks[share.task], template.tasks.get(share.task)
        if before is None:
            return {}  # the task wants no workers
        times = before.running_s, before.transition_s
        kind = hit.hardware, hit.workers, hit.cordoned, hit.draining
        key = (id(task), share, kind, id(before.throughput), times, template.problem.workers)
        found = self._known.get(key)
        if found is None:
            alone = state.model_copy(update={"tasks": {task.name: task}})
            after = self._task_after(template, evolve(alone, event(hit), self._at), before)
            found = self._known[key] = task, _difference(before, after)
        return found[1]

    def _task_after(self, template: _Template, struck: State, before: TaskProblem) -> TaskProblem:
        """Return the task's part of the problem after the event, which ``struck`` contains."""
        task = struck.tasks[before.name]
        tasks = {**template.state.tasks, task.name: task}
        posed = template.state.model_copy(update={"nodes": struck.nodes, "tasks": tasks})
        workers = template.problem.pools.get(before.pool, template.problem.workers)
        claimed = claimed_workers(posed)
        return task_problem(posed, task, before.pool, workers, template.running_s[before.pool], claimed)


def _difference(before: TaskProblem, after: TaskProblem) -> Numbers | None:
    """Return the numbers that differ; None if more differs than single numbers."""
    numbers: Numbers = {}
    for field in TaskProblem.model_fields:
        old, new = getattr(before, field), getattr(after, field)
        if field == "required" or old is new or old == new:
            continue  # admission does not depend on the hit
        if field == "transition_to_s" and old.keys() == new.keys() == {0}:
            numbers[PAUSE_S] = new[0]
            continue
        if field not in COLUMNS:
            return None
        numbers[field] = new
    return numbers


def _patched(template: _Template, changes: Mapping[str, Numbers | None]) -> Iterator[Inputs]:
    """Yield the template's inputs with the numbers of these tasks changed."""
    columns: list[dict[str, Any]] = [{} for _ in template.pools]
    pauses: list[Any] = [None for _ in template.pools]
    for name, numbers in changes.items():
        for field, value in (numbers or {}).items():
            pool, index = template.places[name]
            if field == PAUSE_S:
                transitions = template.pools[pool].transition_arrays
                if pauses[pool] is None:
                    pauses[pool] = transitions.seconds.copy()
                pauses[pool][transitions.starts[index]] = value
                continue
            if field not in columns[pool]:
                columns[pool][field] = getattr(template.pools[pool].task_arrays, field).copy()
            columns[pool][field][index] = value
    for inputs, changed, seconds in zip(template.pools, columns, pauses, strict=True):
        transitions = inputs.transition_arrays
        yield replace(
            inputs,
            task_arrays=inputs.task_arrays._replace(**changed),
            transition_arrays=transitions if seconds is None else transitions._replace(seconds=seconds),
        )
