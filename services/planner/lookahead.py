"""Answers for what may happen next, solved before it does (the paper's table, DESIGN section 3).

After every change of the state, in the background: any node lost, or back at once (its agent was restarted), a node
joining, any task ending or failing where no node is to blame, and a second node lost right after the plan for the
first. (A worker that cannot be restarted takes its node with it: the same problem as the node's loss.) Nodes whose loss
poses the same problem, of one kind and size and with workers of the same tasks, are a class.

The table is keyed by the content of the problem of each pool, all that the solver reads of it. So an answer can be
missing but never be wrong, and whether it was looked up or solved changes no byte of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np

from services.planner.core import asked, evolve
from services.planner.problem import build_problem, horizons_s
from services.planner.state import Node, State, Task, node_of
from services.planner.tables import layout_of
from shared.errors import InvalidInput
from shared.events import ErrorDetected, Event, NodeJoined, TaskFinished
from shared.planning.instance import Inputs, Tables
from shared.planning.solver import Counts, answer, best_counts, pools_of
from shared.plans import Problem, Solution
from shared.severities import SEVERITY, ErrorKind, Method, Severity

HORIZON_S = 60.0
"""D_running moves on its grid as time goes by: if it will within this time, both sides of the step are solved."""


class Loss(NamedTuple):
    """A class of nodes: ``node`` is one of ``number`` of this kind and size, on which these tasks have workers."""

    node: str
    number: int
    hardware: str
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

        It is a hit if the answer to every pool is known.

        Raises:
            InvalidInput: as that does.
        """
        pools = [Inputs.of(pool, self._tables) for pool in pools_of(problem)]
        known = [self._known.get(inputs.key()) for inputs in pools]
        if None in known:
            self.misses += 1
        else:
            self.hits += 1
        return answer([(inputs, found or best_counts(inputs)) for inputs, found in zip(pools, known, strict=True)])

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


Posed = list[Inputs]
"""A problem, pool by pool."""


def foreseen(state: State, at: datetime, solved: Callable[[Inputs], Counts | None], tables: Tables) -> Iterator[Inputs]:
    """Yield the problems of all next events, the likeliest first: losses of nodes, joins, ends, second losses.

    Args:
        state: as it is.
        at: the present time.
        solved: the answer to a first loss, on which a second follows.
        tables: remembers the arrays of tables.
    """
    losses = loss_classes(state)
    firsts: list[tuple[Loss, State, Posed]] = []
    states: list[State] = []
    for loss in losses:
        after = _after(state, _lost(loss.node, at), at)
        if after is not None:
            firsts.append((loss, after, _posed(after, at, tables)))
            states.append(after)
            yield from firsts[-1][2]
    events: list[Event] = [*_joins(state, at), *_ends(state, at), *_failures(state, at)]
    for event in events:
        if (after := _after(state, event, at)) is not None:
            states.append(after)
            yield from _posed(after, at, tables)
    later = at + timedelta(seconds=HORIZON_S)
    for after in states:
        # The problem differs from that of now only if D_running takes a step on its grid.
        if horizons_s(after, at) != horizons_s(after, later):
            yield from _posed(after, later, tables)
    yield from _returns(state, losses, at, tables)
    for loss, after, posed in firsts:
        counts = [solved(inputs) for inputs in posed]
        known = [found for found in counts if found is not None]
        if len(known) == len(posed):
            yield from _second_losses(after, loss, losses, posed, known, at, tables)


def _posed(state: State, at: datetime, tables: Tables) -> Posed:
    return [Inputs.of(pool, tables) for pool in pools_of(build_problem(state, at))]


def loss_classes(state: State) -> list[Loss]:
    """Return the usable nodes by which tasks lose how much with them."""
    on_node: dict[str, dict[str, int]] = {name: {} for name, node in state.nodes.items() if node.usable}
    for task in state.tasks.values():
        for worker in dict.fromkeys((*task.holders, *task.members)) if task.life != "ended" else ():
            counts = on_node.get(node_of(worker))
            if counts is not None:
                counts[task.name] = counts.get(task.name, 0) + 1
    classes: dict[tuple[str, int, tuple[tuple[str, int], ...]], list[str]] = {}
    for name in sorted(on_node):
        node = state.nodes[name]
        key = (node.hardware, len(node.workers), tuple(sorted(on_node[name].items())))
        classes.setdefault(key, []).append(name)
    return [
        Loss(names[0], len(names), hardware, workers, frozenset(task for task, _ in counts))
        for (hardware, workers, counts), names in classes.items()
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
    """Yield the return of each kind of node that is gone, and a new node of each kind and size there is."""
    seen: set[tuple[str, int]] = set()
    for node in sorted(state.nodes.values(), key=lambda n: (n.usable, n.name)):
        kind = node.hardware, len(node.workers)
        if kind not in seen:
            seen.add(kind)
            yield _join(node.model_copy(update={"name": f"{node.name}+"}) if node.usable else node, at)


def _join(node: Node, at: datetime) -> NodeJoined:
    return NodeJoined(
        event_id="look-ahead",
        occurred_at=at,
        node=node.name,
        incarnation="look-ahead",
        agent_pid=1,
        domain=node.domain,
        hardware=node.hardware,
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


def _failures(state: State, at: datetime) -> Iterator[ErrorDetected]:
    """Yield the failure of each task that is not the fault of any node: all its workers begin anew."""
    for name in sorted(state.tasks):
        if state.tasks[name].members:
            yield ErrorDetected(
                event_id="look-ahead",
                occurred_at=at,
                incident="look-ahead",
                kind=ErrorKind.COLLECTIVE_TIMEOUT,
                severity=Severity.SEV1,
                method=Method.STATISTICS,
                detected_at=at,
                task=name,
            )


def _returns(state: State, losses: list[Loss], at: datetime, tables: Tables) -> Iterator[Inputs]:
    """Yield the problems of a node that comes back before its loss was noticed: its tasks lose what was on it."""
    template: Posed = []
    for loss in losses:
        if not template:
            after = _after(state, _join(state.nodes[loss.node], at), at)
            template = _posed(after, at, tables) if after is not None else []
        yield from _faulted(template, loss)


def _faulted(template: Posed, loss: Loss) -> Iterator[Inputs]:
    """Yield a problem with those tasks faulted that the loss hits."""
    for inputs in template:
        faulted = [task.name in loss.tasks and task.current > 0 for task in inputs.tasks]
        yield replace(inputs, faulted=np.array(faulted, np.int64))


def _second_losses(
    state: State, first: Loss, losses: list[Loss], posed: Posed, counts: list[Counts], at: datetime, tables: Tables
) -> Iterator[Inputs]:
    """Yield the problems of each further loss, once the plan for the first one is made.

    They differ in nothing but who is faulted, for each kind and size of node; so one is built and the rest follow.
    """
    answers = {
        task.name: (task.pool, count)
        for inputs, found in zip(posed, counts, strict=True)
        for task, count in zip(inputs.tasks, found.best, strict=True)
    }
    planned = _planned(state, answers)
    templates: dict[tuple[str, int], Posed] = {}
    for second in losses:
        if second == first and second.number == 1:
            continue
        size = second.hardware, second.workers
        if size not in templates:
            gone = second.node if second.node != first.node else next(_others(planned, second))
            after = _after(planned, _lost(gone, at), at)
            templates[size] = _posed(after, at, tables) if after is not None else []
        yield from _faulted(templates[size], second)


def _others(state: State, loss: Loss) -> Iterator[str]:
    """Yield the usable nodes of the same kind and size."""
    for name, node in state.nodes.items():
        if node.usable and (node.hardware, len(node.workers)) == (loss.hardware, loss.workers):
            yield name


def _planned(state: State, counts: dict[str, tuple[str, int]]) -> State:
    """Return the state as the plan leaves it, as far as problems go: who has how many workers, and none is broken.

    A task that is paused has left; one that was queued stays so. Which workers they are makes no difference here.
    ``counts``: pool and count of each task.
    """
    tasks: dict[str, Task] = {}
    for name, task in state.tasks.items():
        pool, count = counts.get(name, ("", -1))
        if count < 0:
            tasks[name] = task
        elif count > 0 or not (task.members or task.kept):
            members = tuple(f"?/{i}" for i in range(count))
            tasks[name] = task.model_copy(
                update={
                    "members": members,
                    "holders": (),
                    "occupied": (),
                    "lost": (),
                    "broken": False,
                    "pool": pool if count else "",
                    "layout": layout_of(state, task.model_copy(update={"pool": pool}), count),
                }
            )
    return state.model_copy(update={"tasks": tasks})
