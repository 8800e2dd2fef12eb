"""Slow workers as a question to the solver: with them, without them, with others in their places, or dealt by speed.

The solver knows counts of equal workers. So each way to use the slow workers (``Arrangement``) is a problem of its own:
a worker that is left out is in no problem; a task that keeps slow workers achieves T / slowdown of the slowest of them;
a task that loses one counts as disturbed, whatever its count. All are worth what the same objective says, costs of
transitions included, and the most valuable is taken. The ways that are weighed:

- A task with slow members leaves out none of them, or all that are at least as slow as one of them: one that stays
  slows the task as much as all that are faster. Members whose loss would cost the task its live state stay.
- Or the task keeps all slow members, and its micro-batches are dealt by speed (``dealing.py``), or equally again. - A
slow worker that no task uses in one of these ways may be given to a task beside it: the last resort.

A way is dropped where its best counts cannot be placed: another task would need a worker that only one may have. Where
there are more combinations than ``MOST_COMBINATIONS``, all tasks leave out what is as slow as one limit for all.

A way other than the present one has to be better by ``MARGIN`` of what the tasks concerned achieve (hysteresis).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from services.planner.placement.changes import keeps_state
from services.planner.problem.problem import Solve, build_problem, wanting, withheld_workers
from services.planner.state.cluster import Arrangement, State, Task
from services.planner.state.deals_by_speed import fitting_deal, present_deal
from services.planner.state.slow_workers import FULL_SPEED, hardware_of_worker, slowdown_of, taken_members
from shared.events.plans import Problem, SlowChoice, SlowWorkers, Solution

MARGIN = 0.05
"""By how much another use of the slow workers must be better, as a part of what the tasks concerned achieve until the
horizon. The model's own error and the scatter of measured slowdowns are of that size (``STAYING`` of
``throughput/tables.py``)."""

MOST_COMBINATIONS = 16
"""Ways that are weighed in full. Each is solved, in milliseconds for a usual cluster, which has few slow workers."""

MOST_LENT = 16
"""Number of ways to give away unused slow workers that are weighed."""

MOST_LOGGED = 8
"""Number of ways that the plan names: the ways turned down only explain the one taken."""

Label = Literal["keep", "without-slow", "spare", "dealt-by-speed", "dealt-equally", "last-resort"]
"""The label of a way, as in ``SlowChoice``."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """One way to use the slow workers, solved. ``state``: with the arrangement; it poses ``problem``."""

    state: State
    arrangement: Arrangement
    problem: Problem
    solution: Solution
    alternatives: list[Solution]
    label: Label

    def logged(self) -> SlowChoice:
        """Return the way as the plan names it."""
        return SlowChoice(
            label=self.label,
            used=self.arrangement.used,
            assignment=self.solution.assignment,
            objective=self.solution.objective,
            waf_flop_per_s=self.solution.total_waf_flop_per_s,
        )


class Ranking(NamedTuple):
    """The ways to use the slow workers, the one to take first.

    ``margin``: by how much the first way had to exceed ``keep``.
    """

    choices: list[Weighed]
    margin: float

    def logged(self, taken: Weighed) -> SlowWorkers:
        """Return the ranking as the plan names it, once one of the ways is taken."""
        used = taken.arrangement.used
        others = [choice.logged() for choice in self.choices if choice is not taken]
        return SlowWorkers(
            slowdowns={worker: slowdown_of(taken.state, worker) for worker in used},
            choices=[taken.logged(), *others[: MOST_LOGGED - 1]],
            margin=self.margin,
        )


class _Option(NamedTuple):
    """What one task does about its slow members. ``dealt``: by speed or equally; None: as it is."""

    left_out: frozenset[str]
    dealt: bool | None = None


def has_question(state: State) -> bool:
    """Return whether slow workers have to be weighed, or a task's micro-batches are dealt by speed."""
    return bool(_usable_slow(state)) or any(present_deal(task) for task in wanting(state))


def ranking(state: State, at: datetime, solve: Solve) -> Ranking:
    """Return the ways to use the slow workers, solved.

    Raises:
        InvalidInput: as ``solve``.
    """
    slow = _usable_slow(state)
    tasks = wanting(state)
    present = {w: next((t.name for t in tasks if w in t.members), "") for w in slow}
    weighed = [_weighed(state, present, arrangement, at, solve) for arrangement in _arrangements(state, tasks, slow)]
    keep = weighed[0]
    found = [choice for choice in weighed if choice is not None]
    if not found:  # another task needs a slow worker of a task that cannot leave it out and keep its state
        dealt = {task.name: False for task in tasks if present_deal(task)}
        nowhere = Arrangement(used=dict.fromkeys(slow, ""), dealt=dealt)
        found = [choice for choice in (_weighed(state, present, nowhere, at, solve),) if choice is not None]
    known = {_key(choice.arrangement) for choice in found}
    for arrangement in _lending(tasks, [choice.arrangement for choice in _by_value(found)], slow, known):
        lent = _weighed(state, present, arrangement, at, solve)
        if lent is not None:
            found.append(lent)
    found = _by_value(found)
    if keep is None or found[0] is keep:
        return Ranking(found, 0.0)
    enough = [choice for choice in found if choice is not keep and _gain(keep, choice) > _margin(keep, choice)]
    if not enough:
        return Ranking([keep, *(choice for choice in found if choice is not keep)], 0.0)
    first = enough[0]
    return Ranking([first, *(choice for choice in found if choice is not first)], _margin(keep, first))


def posed_states(state: State) -> Iterator[State]:
    """Yield the state with each way to use the slow workers but the last resort; the state itself if there are none."""
    if not has_question(state):
        yield state
        return
    for arrangement in _arrangements(state, wanting(state), _usable_slow(state)):
        yield state.model_copy(update={"arrangement": arrangement})


def _usable_slow(state: State) -> dict[str, float]:
    """Return the slow workers that a plan may use, with their slowdowns, by name."""
    slow = {w: known.slowdown for w, known in sorted(state.slow.items()) if known.slowdown > FULL_SPEED}
    if not slow:
        return slow
    withheld = withheld_workers(state)
    return {worker: slowdown for worker, slowdown in slow.items() if state.usable(worker) and worker not in withheld}


def _arrangements(state: State, tasks: list[Task], slow: dict[str, float]) -> list[Arrangement]:
    """Return the ways without the last resort: the present way first, the way that leaves out all that it can last."""
    options = {task.name: _options(state, task, slow) for task in tasks}
    options = {name: found for name, found in options.items() if len(found) > 1}
    if prod(len(found) for found in options.values()) <= MOST_COMBINATIONS:
        combinations = [dict(zip(options, chosen, strict=True)) for chosen in product(*options.values())]
    else:
        limits = sorted(set(slow.values()), reverse=True)[: MOST_COMBINATIONS - 1]
        combinations = [{name: found[0] for name, found in options.items()}]
        for limit in limits:
            combinations.append({name: _within(found, limit, slow) for name, found in options.items()})
    present = {worker: next((task.name for task in tasks if worker in task.members), "") for worker in slow}
    return list({_key(found): found for found in (_arranged(present, each) for each in combinations)}.values())


def _within(options: list[_Option], limit: float, slow: dict[str, float]) -> _Option:
    """Return the option that leaves out the most members that are at least as slow as a limit, and no other members."""
    fitting = [each for each in options if each.dealt is None and all(slow[w] >= limit for w in each.left_out)]
    return max(fitting, key=lambda each: len(each.left_out))


def _arranged(present: dict[str, str], options: dict[str, _Option]) -> Arrangement:
    left_out = frozenset().union(*(option.left_out for option in options.values()))
    used = {worker: "" if worker in left_out else task for worker, task in present.items()}
    return Arrangement(used=used, dealt={n: o.dealt for n, o in sorted(options.items()) if o.dealt is not None})


def _key(arrangement: Arrangement) -> tuple[object, ...]:
    return tuple(arrangement.used.items()), tuple(arrangement.dealt.items())


def _options(state: State, task: Task, slow: dict[str, float]) -> list[_Option]:
    """Return what the task may do about its slow members; to use them as now comes first."""
    mine = [worker for worker in task.members if worker in slow]
    found = [_Option(frozenset())]
    if fitting_deal(state, task) is not None:
        found.append(_Option(frozenset(), True))
    if present_deal(task):
        found.append(_Option(frozenset(), False))
    for limit in sorted({slow[worker] for worker in mine}, reverse=True):
        left_out = frozenset(worker for worker in mine if slow[worker] >= limit)
        owners = set(task.live_owners)
        if keeps_state(task, owners - left_out) or not keeps_state(task, owners):
            found.append(_Option(left_out))
    return found


def _by_value(found: list[Weighed]) -> list[Weighed]:
    """Return the ways with the most valuable first; of equals, the one that changes less."""
    return sorted(found, key=lambda choice: -choice.solution.objective)


def _lending(
    tasks: list[Task], arrangements: list[Arrangement], slow: dict[str, float], known: set[tuple[object, ...]]
) -> Iterator[Arrangement]:
    """Yield arrangements with unused slow workers given to one task: the least slow ones, one, two and so on.

    The best arrangements come first, heavy tasks first. ``known``: those that are weighed already.
    """
    for arrangement in arrangements:
        unused = sorted((worker for worker, task in arrangement.used.items() if not task), key=lambda w: (slow[w], w))
        for task in sorted(tasks, key=lambda task: (-task.spec.weight, task.name)):
            for count in range(1, len(unused) + 1):
                used = {**arrangement.used, **dict.fromkeys(unused[:count], task.name)}
                lent = Arrangement(used=used, dealt=arrangement.dealt)
                if _key(lent) in known:
                    continue
                if len(known) >= MOST_COMBINATIONS + MOST_LENT:
                    return
                known.add(_key(lent))
                yield lent


def _weighed(
    state: State, present: dict[str, str], arrangement: Arrangement, at: datetime, solve: Solve
) -> Weighed | None:
    """Return the arrangement, solved; None if the best counts do not fit the arrangement."""
    posed = state.model_copy(update={"arrangement": arrangement})
    problem = build_problem(posed, at)
    solution, alternatives = solve(problem)
    if not _goes_with(posed, arrangement, problem, solution):
        return None
    label = _label(state, present, arrangement, solution)
    return Weighed(posed, arrangement, problem, solution, alternatives, label)


def _goes_with(state: State, arrangement: Arrangement, problem: Problem, solution: Solution) -> bool:
    """Return whether counts fit: no other task needs a task's slow workers, and a deal is that of the present count."""
    own = {task.name: 0 for task in problem.tasks}
    slow_of_pool: dict[str, int] = {}
    pools = {task.name: task.pool for task in problem.tasks}
    for worker, name in arrangement.used.items():
        kind = hardware_of_worker(state, worker)
        if name:
            slow_of_pool[kind] = slow_of_pool.get(kind, 0) + 1
            if pools.get(name) == kind or not problem.pools:
                own[name] += 1
    for pool, workers in (problem.pools or {"": problem.workers}).items():
        slow = slow_of_pool.get(pool, 0) if problem.pools else sum(slow_of_pool.values())
        mine = [task for task in problem.tasks if not problem.pools or task.pool == pool]
        if sum(max(0, solution.assignment[task.name] - own[task.name]) for task in mine) > workers - slow:
            return False
    for posed in problem.tasks:
        task = state.tasks[posed.name]
        is_dealt = arrangement.dealt.get(task.name, bool(present_deal(task)))
        if is_dealt and not taken_members(state, task) and solution.assignment[task.name] != posed.current:
            return False
    return True


def _label(state: State, present: dict[str, str], arrangement: Arrangement, solution: Solution) -> Label:
    used = arrangement.used
    if any(task and task != present[worker] for worker, task in used.items()):
        return "last-resort"
    if left := {task for worker, task in present.items() if task and not used[worker]}:
        replaced = all(solution.assignment[name] >= len(state.tasks[name].members) for name in left)
        return "spare" if replaced else "without-slow"
    if arrangement.dealt:
        return "dealt-by-speed" if any(arrangement.dealt.values()) else "dealt-equally"
    return "keep"


def _gain(keep: Weighed, other: Weighed) -> float:
    return other.solution.objective - keep.solution.objective


def _margin(keep: Weighed, other: Weighed) -> float:
    """Return by how much another way has to be better, in weighted FLOP: a part of what the tasks concerned achieve."""
    concerned = {*other.arrangement.dealt}
    for worker, task in other.arrangement.used.items():
        before = keep.arrangement.used[worker]
        if task != before:
            concerned |= {task, before}
    return MARGIN * sum(term.reward for term in keep.solution.terms if term.name in concerned)
