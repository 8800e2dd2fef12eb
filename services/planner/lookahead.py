"""Answers for what may happen next, solved before it does (the paper's table, DESIGN section 3).

After every change of the state, in the background: any node lost, a node joining, any task ending, and a second node
lost right after the plan for the first. (A worker that cannot be restarted takes its node with it: the same problem as
the node's loss.) Nodes whose loss poses the same problem, of one size and with workers of the same tasks, are a class.

The table is keyed by the content of the problem, all that the solver reads of it. So an answer can be missing but
never be wrong, and whether it was looked up or solved changes no byte of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np

from services.planner.core import asked, evolve
from services.planner.problem import build_problem, on_grid, running_s
from services.planner.state import Node, State, Task, node_of
from shared.errors import InvalidInput
from shared.events import ErrorDetected, Event, NodeJoined, TaskFinished
from shared.planning.instance import Inputs, Tables
from shared.planning.solver import Counts, answer, best_counts
from shared.plans import Problem, Solution
from shared.severities import SEVERITY, ErrorKind, Method

HORIZON_S = 60.0
"""D_running moves on its grid as time goes by: if it will within this time, both sides of the step are solved."""


class Loss(NamedTuple):
    """A class of nodes: ``node`` is one of ``number`` with this many workers, on which these tasks have workers."""

    node: str
    number: int
    workers: int
    tasks: frozenset[str]


class LookAhead:
    """The table. ``hits``, ``misses``: of problems asked for. ``solve`` may be called while ``rebuild`` runs."""

    def __init__(self) -> None:
        """Start with an empty table."""
        self.hits = 0
        self.misses = 0
        self._known: dict[bytes, Counts] = {}
        self._tables = Tables()

    def __len__(self) -> int:
        return len(self._known)

    def solve(self, problem: Problem) -> tuple[Solution, list[Solution]]:
        """Return what ``solve_with_alternatives`` returns.

        Raises:
            InvalidInput: as that does.
        """
        inputs = Inputs.of(problem, self._tables)
        found = self._known.get(inputs.key())
        if found is None:
            self.misses += 1
            found = best_counts(inputs)
        else:
            self.hits += 1
        return answer(inputs, found)

    def rebuild(self, state: State, at: datetime, going_on: Callable[[], bool] = lambda: True) -> bool:
        """Solve all that may come next; forget what may not any more. Return False if ``going_on`` ended it early.

        What is known already is not solved again, and each answer counts from the moment it is found.
        """
        known: dict[bytes, Counts] = {}
        self._tables = Tables()
        for inputs in foreseen(state, at, self._counts, self._tables):
            if not going_on():
                return False
            key = inputs.key()
            found = self._known.get(key) or self._solved(inputs)
            if found is not None:
                self._known[key] = known[key] = found
        self._known = known
        return True

    def _counts(self, inputs: Inputs) -> Counts | None:
        return self._known.get(inputs.key()) or self._solved(inputs)

    def _solved(self, inputs: Inputs) -> Counts | None:
        try:
            return best_counts(inputs)
        except InvalidInput:
            return None


def foreseen(state: State, at: datetime, solved: Callable[[Inputs], Counts | None], tables: Tables) -> Iterator[Inputs]:
    """Yield the problems of all next events, the likeliest first: node losses, joins, ends, second losses.

    Args:
        state: as it is.
        at: the present time.
        solved: the answer to a first loss, on which a second follows.
        tables: remembers the arrays of tables.
    """
    losses = loss_classes(state)
    firsts: list[tuple[Loss, State, Inputs]] = []
    states: list[State] = []
    for loss in losses:
        after = _after(state, _lost(loss.node, at), at)
        if after is not None:
            firsts.append((loss, after, Inputs.of(build_problem(after, at), tables)))
            states.append(after)
            yield firsts[-1][2]
    events: list[Event] = [*_joins(state, at), *_ends(state, at)]
    for event in events:
        if (after := _after(state, event, at)) is not None:
            states.append(after)
            yield Inputs.of(build_problem(after, at), tables)
    later = at + timedelta(seconds=HORIZON_S)
    for after in states:
        # The problem differs from that of now only if D_running takes a step on its grid.
        if on_grid(running_s(after, at)) != on_grid(running_s(after, later)):
            yield Inputs.of(build_problem(after, later), tables)
    for loss, after, inputs in firsts:
        counts = solved(inputs)
        if counts is not None:
            yield from _second_losses(after, loss, losses, inputs, counts, at, tables)


def loss_classes(state: State) -> list[Loss]:
    """Return the usable nodes by which tasks lose how much with them."""
    on_node: dict[str, dict[str, int]] = {name: {} for name, node in state.nodes.items() if node.usable}
    for task in state.tasks.values():
        for worker in dict.fromkeys((*task.holders, *task.members)) if task.life != "ended" else ():
            counts = on_node.get(node_of(worker))
            if counts is not None:
                counts[task.name] = counts.get(task.name, 0) + 1
    classes: dict[tuple[int, tuple[tuple[str, int], ...]], list[str]] = {}
    for name in sorted(on_node):
        key = (len(state.nodes[name].workers), tuple(sorted(on_node[name].items())))
        classes.setdefault(key, []).append(name)
    return [
        Loss(names[0], len(names), workers, frozenset(task for task, _ in counts))
        for (workers, counts), names in classes.items()
    ]


def _after(state: State, event: Event, at: datetime) -> State | None:
    """Return the state in which the solver would be asked about the event; None if it would not."""
    return asked(evolve(state, event, at), event)


def _lost(node: str, at: datetime) -> ErrorDetected:
    return ErrorDetected(
        event_id="look-ahead",
        occurred_at=at,
        incident="look-ahead",
        kind=ErrorKind.NODE_LOST,
        severity=SEVERITY[ErrorKind.NODE_LOST],
        method=Method.NODE_HEALTH,
        detected_at=at,
        node=node,
    )


def _joins(state: State, at: datetime) -> Iterator[NodeJoined]:
    """Yield the return of each kind of node that is gone, and a new node of each size there is."""
    seen: set[int] = set()
    for node in sorted(state.nodes.values(), key=lambda n: (n.usable, n.name)):
        if len(node.workers) in seen:
            continue
        seen.add(len(node.workers))
        yield _join(node.model_copy(update={"name": f"{node.name}+"}) if node.usable else node, at)


def _join(node: Node, at: datetime) -> NodeJoined:
    return NodeJoined(
        event_id="look-ahead",
        occurred_at=at,
        node=node.name,
        incarnation="look-ahead",
        agent_pid=1,
        domain=node.domain,
        workers=[f"{node.name}/{worker.rpartition('/')[2]}" for worker in node.workers],
    )


def _ends(state: State, at: datetime) -> Iterator[TaskFinished]:
    """Yield the end of each task. However it ends, its workers are free."""
    for name in sorted(state.tasks):
        task = state.tasks[name]
        if task.life != "ended":
            yield TaskFinished(
                event_id="look-ahead",
                occurred_at=at,
                task=name,
                generation=task.generation,
                step=task.spec.steps,
                samples_sha256="",
                parameters_path="",
            )


def _second_losses(
    state: State, first: Loss, losses: list[Loss], inputs: Inputs, counts: Counts, at: datetime, tables: Tables
) -> Iterator[Inputs]:
    """Yield the problems of each further loss, once the plan for the first one is made.

    They differ in nothing but who is faulted, for each size of node; so one is built and the rest follow from it.
    """
    planned = _planned(state, dict(zip((task.name for task in inputs.tasks), counts.best, strict=True)))
    templates: dict[int, Inputs] = {}
    for second in losses:
        if second == first and second.number == 1:
            continue
        if second.workers not in templates:
            gone = next(node for node in _of_size(planned, second.workers))
            after = _after(planned, _lost(gone, at), at)
            if after is None:
                continue
            templates[second.workers] = Inputs.of(build_problem(after, at), tables)
        template = templates[second.workers]
        faulted = np.array([task.name in second.tasks and task.current > 0 for task in template.tasks], np.int64)
        yield replace(template, faulted=faulted)


def _of_size(state: State, workers: int) -> Iterator[str]:
    return (name for name, node in state.nodes.items() if node.usable and len(node.workers) == workers)


def _planned(state: State, counts: dict[str, int]) -> State:
    """Return the state as the plan leaves it, as far as problems go: who has how many workers, and none is broken.

    A task that is paused has left; one that was queued stays so. Which workers they are makes no difference here.
    """
    tasks: dict[str, Task] = {}
    for name, task in state.tasks.items():
        count = counts.get(name)
        if count is None:
            tasks[name] = task
        elif count > 0 or not (task.members or task.kept):
            members = tuple(f"?/{i}" for i in range(count))
            tasks[name] = task.model_copy(
                update={"members": members, "holders": (), "occupied": (), "lost": (), "broken": False}
            )
    return state.model_copy(update={"tasks": tasks})
