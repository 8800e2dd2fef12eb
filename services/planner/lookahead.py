"""Answers for what may happen next, solved before it does (the paper's table, DESIGN section 3).

After every change of the state, in the background: any node lost, or back at once (its agent was restarted), a node
joining, any task ending or failing where no node is to blame, and a second node lost right after the plan for the
first. (A worker that cannot be restarted takes its node with it: the same problem as the node's loss.) Nodes whose loss
poses the same problem, of one kind and size and with workers of the same tasks, are a class.

The table is keyed by the content of the problem of each pool, all that the solver reads of it. So an answer can be
missing but never be wrong, and whether it was looked up or solved changes no byte of a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from services.planner.core import asked, decide, evolve
from services.planner.problem import build_problem, horizons_s, task_problem
from services.planner.state import Node, State, Task, node_of
from shared.errors import InvalidInput
from shared.events import ErrorDetected, Event, NodeJoined, TaskFinished
from shared.planning.instance import Inputs, Tables
from shared.planning.solver import Counts, answer, best_counts, pools_of
from shared.plans import Problem, Solution, TaskProblem
from shared.severities import SEVERITY, ErrorKind, Method, Severity

HORIZON_S = 60.0
"""D_running moves on its grid as time goes by: if it will within this time, both sides of the step are solved."""


Share = tuple[str, int, int, int]
"""A task's part of a node: its name, how many workers it has there, how many of them hold its state, and how many are
planned for it."""


class Loss(NamedTuple):
    """A class of usable nodes: of one kind and size, on which the same tasks have as much. ``node``: one of them."""

    node: str
    hardware: str
    workers: int
    shares: tuple[Share, ...]


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

    def counters(self) -> dict[str, int]:
        """Return what is counted, for the service's health."""
        return {
            "look_ahead_answers": len(self),
            "look_ahead_hits": self.hits,
            "look_ahead_misses": self.misses,
        }

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
    spread, hits = _Spread(), _Hits(at, tables)
    losses = spread.classes(state)
    firsts: list[tuple[ErrorDetected, State, Posed]] = []
    states: list[State] = []
    for loss in losses:
        lost = _lost(loss.node, at)
        after = evolve(state, lost, at)
        posed = asked(after, lost)
        if posed is not None:
            firsts.append((lost, after, _posed(posed, at, tables)))
            states.append(posed)
            yield from firsts[-1][2]
    events: list[Event] = [*_joins(state, at), *_ends(state, at), *_failures(state, at)]
    for event in events:
        if (posed := asked(evolve(state, event, at), event)) is not None:
            states.append(posed)
            yield from _posed(posed, at, tables)
    later = at + timedelta(seconds=HORIZON_S)
    for posed in states:
        # The problem differs from that of now only if D_running takes a step on its grid.
        if horizons_s(posed, at) != horizons_s(posed, later):
            yield from _posed(posed, later, tables)
    yield from hits.of(state, losses, lambda loss: _join(state.nodes[loss.node], at))
    for lost, after, pools in firsts:
        counts = [solved(inputs) for inputs in pools]
        known = [found for found in counts if found is not None]
        if len(known) == len(pools):
            planned = _planned(after, lost, at, pools, known)
            yield from hits.of(planned, spread.classes(planned), lambda loss: _lost(loss.node, at))


def _posed(state: State, at: datetime, tables: Tables) -> Posed:
    return [Inputs.of(pool, tables) for pool in pools_of(build_problem(state, at))]


def loss_classes(state: State) -> list[Loss]:
    """Return the usable nodes by which tasks lose how much with them."""
    return _Spread().classes(state)


class _Spread:
    """Where tasks are. What was counted of a task is remembered as long as it is the same object."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Task, dict[str, Share]]] = {}

    def classes(self, state: State) -> list[Loss]:
        """See ``loss_classes``."""
        shares: dict[str, list[Share]] = {name: [] for name, node in state.nodes.items() if node.usable}
        for name in sorted(state.tasks):
            if state.tasks[name].life != "ended":
                for where, share in self._shares(state.tasks[name]).items():
                    if where in shares:
                        shares[where].append(share)
        classes: dict[tuple[str, int, tuple[Share, ...]], Loss] = {}
        for name in sorted(shares):
            node = state.nodes[name]
            key = (node.hardware, len(node.workers), tuple(shares[name]))
            if key not in classes:
                classes[key] = Loss(name, *key)
        return list(classes.values())

    def _shares(self, task: Task) -> dict[str, Share]:
        found = self._known.get(id(task))
        if found is None:
            kept = Counter(map(node_of, task.kept))
            planned = Counter(map(node_of, task.members))
            workers = Counter(map(node_of, dict.fromkeys((*task.holders, *task.members))))
            found = task, {node: (task.name, n, kept[node], planned[node]) for node, n in workers.items()}
            self._known[id(task)] = found
        return found[1]


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


class _Template(NamedTuple):
    """The problem after an event whose tasks are spared. ``places``: pool and index of each task."""

    state: State
    problem: Problem
    running_s: dict[str, float]
    posed: Posed
    tasks: dict[str, TaskProblem]
    places: dict[str, tuple[int, int]]


Numbers = dict[str, float]
"""What differs in a task's part of a problem, by the name of the column in ``Inputs``."""

_COLUMNS = {"faulted", "running_s", "transition_s", "staying", "newcomers_s"}
"""Parts of a task's problem that may differ once it is hit and are a single number."""


_PAUSE = "moves_s"
"""The one entry of a task's ``transition_to_s`` is what its pause costs: one that was hit cannot save its step."""


class _Hits:
    """The problems of an event that strikes one node of each class.

    Those of one kind and size of node differ in nothing but the tasks that are hit: one problem is built with none hit,
    and in it those that are get the numbers of a task that has lost as much.
    """

    def __init__(self, at: datetime, tables: Tables) -> None:
        self._at, self._tables = at, tables
        self._known: dict[tuple[object, ...], tuple[Task, Numbers | None]] = {}

    def of(self, state: State, losses: list[Loss], event: Callable[[Loss], Event]) -> Iterator[Inputs]:
        """Yield the problems; those that are not as simple as that are built each by itself."""
        templates: dict[tuple[str, int], _Template | None] = {}
        for loss in losses:
            size = loss.hardware, loss.workers
            if size not in templates:
                templates[size] = self._template(state, event(loss))
            template = templates[size]
            if template is None:
                continue
            numbers = {share[0]: self._numbers(state, template, event, loss, share) for share in loss.shares}
            if None not in numbers.values():
                yield from _patched(template, numbers)
            elif (posed := asked(evolve(state, event(loss), self._at), event(loss))) is not None:
                yield from _posed(posed, self._at, self._tables)

    def _template(self, state: State, event: Event) -> _Template | None:
        posed = asked(evolve(state, event, self._at), event)
        if posed is None:
            return None
        spared = posed.model_copy(update={"tasks": state.tasks})
        problem = build_problem(spared, self._at)
        pools = [Inputs.of(pool, self._tables) for pool in pools_of(problem)]
        places = {task.name: (p, i) for p, inputs in enumerate(pools) for i, task in enumerate(inputs.tasks)}
        tasks = {task.name: task for task in problem.tasks}
        return _Template(spared, problem, horizons_s(spared, self._at), pools, tasks, places)

    def _numbers(
        self, state: State, template: _Template, event: Callable[[Loss], Event], loss: Loss, share: Share
    ) -> Numbers | None:
        """Return what differs if the task has lost this share of a node; None if that is not single numbers."""
        task, before = state.tasks[share[0]], template.tasks.get(share[0])
        if before is None:
            return {}  # it wants no workers
        times = before.running_s, before.transition_s
        key = (id(task), share, loss.hardware, loss.workers, id(before.throughput), times, template.problem.workers)
        found = self._known.get(key)
        if found is None:
            alone = state.model_copy(update={"tasks": {task.name: task}})
            struck = evolve(alone, event(loss), self._at)
            hit = struck.tasks[task.name]
            posed = template.state.model_copy(
                update={"nodes": struck.nodes, "tasks": {**template.state.tasks, task.name: hit}}
            )
            pool, problem = before.pool, template.problem
            workers = problem.pools.get(pool, problem.workers)
            after = task_problem(posed, hit, pool, workers, template.running_s[pool])
            found = self._known[key] = task, _difference(before, after)
        return found[1]


def _difference(before: TaskProblem, after: TaskProblem) -> Numbers | None:
    numbers: Numbers = {}
    for field in TaskProblem.model_fields:
        old, new = getattr(before, field), getattr(after, field)
        if field == "required" or old is new or old == new:
            continue  # who is admitted does not depend on it
        if field == "transition_to_s" and old.keys() == new.keys() == {0}:
            numbers[_PAUSE] = new[0]
            continue
        if field not in _COLUMNS:
            return None
        numbers[field] = new
    return numbers


def _patched(template: _Template, changes: Mapping[str, Numbers | None]) -> Iterator[Inputs]:
    """Yield the inputs with these tasks' numbers changed."""
    columns: list[dict[str, Any]] = [{} for _ in template.posed]
    for name, numbers in changes.items():
        if numbers is None:
            return
        for field, value in numbers.items():
            pool, index = template.places[name]
            if field not in columns[pool]:
                columns[pool][field] = getattr(template.posed[pool], field).copy()
            columns[pool][field][template.posed[pool].moves_starts[index] if field == _PAUSE else index] = value
    for inputs, changed in zip(template.posed, columns, strict=True):
        yield replace(inputs, **changed)


def _planned(state: State, event: Event, at: datetime, posed: Posed, counts: list[Counts]) -> State:
    """Return the state once the plan for the event is made."""
    assignment = {
        task.name: count
        for inputs, found in zip(posed, counts, strict=True)
        for task, count in zip(inputs.tasks, found.best, strict=True)
    }
    solution = Solution(label="best", assignment=assignment, objective=0.0, terms=[])
    for answer_ in decide(state, event, at, lambda _: (solution, []), digest=False):
        state = evolve(state, answer_, at)
    return state
